// Shared parts of the matrix product kernels for grouped integer weights: the loop over panels, blocks of K and row
// tiles. The layouts are in quire/kernels/grouped_layout.h.
#pragma once

#include "gemm_grouped_numbers.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kUnpackedQuads = 64;  // 16 KiB, in L1 beside sums and rows of the input
constexpr int64_t kMinGroupQuads = 4;

// One code per byte: the halves of bytes, and the integers of e2m1 codes (kE2m1).
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
inline I32 low_halves(I32 x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
inline I32 high_halves(I32 x) { return low_halves(_mm512_srli_epi16(x, 4)); }
inline I32 of_floats(I32 codes) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2m1));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}
inline I32 subtract_bytes(I32 x, int y) { return _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(y))); }
inline I32 and_bytes(I32 x, int y) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(y))); }
inline I32 shift(I32 x, int up) { return up >= 0 ? _mm512_slli_epi16(x, up) : _mm512_srli_epi16(x, -up); }
inline I32 join_bits(I32 low, I32 high, int low_mask) {
  constexpr int kLowElseHigh = 0xe4;
  return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(static_cast<char>(low_mask)), kLowElseHigh);
}
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
inline I32 low_halves(I32 x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0f)); }
inline I32 high_halves(I32 x) { return low_halves(_mm256_srli_epi16(x, 4)); }
inline I32 of_floats(I32 codes) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kE2m1));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
inline I32 subtract_bytes(I32 x, int y) { return _mm256_sub_epi8(x, _mm256_set1_epi8(static_cast<char>(y))); }
inline I32 and_bytes(I32 x, int y) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(y))); }
inline I32 shift(I32 x, int up) { return up >= 0 ? _mm256_slli_epi16(x, up) : _mm256_srli_epi16(x, -up); }
inline I32 join_bits(I32 low, I32 high, int low_mask) {
  const I32 mask = _mm256_set1_epi8(static_cast<char>(low_mask));
  return _mm256_or_si256(_mm256_and_si256(low, mask), _mm256_andnot_si256(mask, high));
}
#endif

// Unpacks pairs of quads of e2m1 codes, `row_bytes` of each pair, to integers of one byte, minus their zero if kSigned.
// The next pair lies kQuadBytes further in `from`, and its quads in `to` are `pitch` bytes apart.
template <bool kSigned>
inline void unpack_floats(const uint8_t* from, int64_t quads, int64_t row_bytes, uint8_t* to, int64_t pitch,
                          Prefetch prefetch) {
  constexpr int kZero = kSigned ? kE2m1Zero : 0;
  for (; quads > 0; quads -= 2, from += kQuadBytes, to += 2 * pitch) {
    prefetch.fetch();
    prefetch.fetch();
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
    for (int64_t i = 0; i < row_bytes; i += sizeof(I32)) {
      const I32 both = load_i32(from + i);
      store_i32(to + i, subtract_bytes(of_floats(low_halves(both)), kZero));
      store_i32(to + pitch + i, subtract_bytes(of_floats(high_halves(both)), kZero));
    }
#else
    for (int64_t i = 0; i < row_bytes; ++i) {
      to[i] = static_cast<uint8_t>(kE2m1[from[i] & 0x0f] - kZero);
      to[pitch + i] = static_cast<uint8_t>(kE2m1[from[i] >> 4] - kZero);
    }
#endif
  }
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
// Unpacks a vector of columns of the quads that CodePlanes holds together to one code per byte, minus their middle if
// kSigned. `to` has a row of `pitch` bytes per quad.
template <int kBits, bool kSigned>
inline void unpack_vectors(const uint8_t* from, uint8_t* to, int64_t pitch) {
  constexpr CodePlanes kPlanes(kBits);
  constexpr int kQuads = static_cast<int>(kPlanes.quads), kSharing = 8 / kPlanes.low_bits;
  constexpr int kLowMask = (1 << kPlanes.low_bits) - 1, kMask = (1 << kBits) - 1;
  I32 low, high;
  if constexpr (kPlanes.high_bits != 0) high = load_i32(from + kPlanes.low_bytes());
#pragma GCC unroll 8
  for (int q = 0; q < kQuads; ++q) {
    if (q % kSharing == 0) low = load_i32(from + q / kSharing * kQuadBytes);
    I32 codes = shift(low, -(q % kSharing) * kPlanes.low_bits);
    if constexpr (kPlanes.high_bits != 0)
      codes = join_bits(codes, shift(high, kPlanes.low_bits - q * kPlanes.high_bits), kLowMask);
    codes = and_bytes(codes, kMask);
    if constexpr (kSigned) codes = subtract_bytes(codes, 1 << (kBits - 1));
    store_i32(to + q * pitch, codes);
  }
}
#endif

// Unpacks codes of `quads` quads, rounded up to the number that CodePlanes holds together, to one code per byte, minus
// their middle if kSigned.
template <int kBits, bool kSigned>
inline void unpack_codes(const uint8_t* from, int64_t quads, uint8_t* to, Prefetch prefetch) {
  constexpr CodePlanes kPlanes(kBits);
  constexpr int kQuads = static_cast<int>(kPlanes.quads);
  for (; quads > 0; quads -= kQuads, from += kPlanes.bytes(), to += kQuads * kQuadBytes) {
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) prefetch.fetch();
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
#pragma GCC unroll 4
    for (int64_t i = 0; i < kQuadBytes; i += sizeof(I32)) unpack_vectors<kBits, kSigned>(from + i, to + i, kQuadBytes);
#else
    constexpr int kMiddle = kSigned ? 1 << (kBits - 1) : 0, kSharing = 8 / kPlanes.low_bits;
    constexpr int kLowMask = (1 << kPlanes.low_bits) - 1, kHighMask = (1 << kPlanes.high_bits) - 1;
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q)
      for (int64_t i = 0; i < kQuadBytes; ++i) {
        int code = from[q / kSharing * kQuadBytes + i] >> (q % kSharing * kPlanes.low_bits) & kLowMask;
        if constexpr (kPlanes.high_bits != 0)
          code |= (from[kPlanes.low_bytes() + i] >> (q * kPlanes.high_bits) & kHighMask) << kPlanes.low_bits;
        to[q * kQuadBytes + i] = static_cast<uint8_t>(code - kMiddle);
      }
#endif
  }
}

template <bool kSigned>
inline void unpack_codes(const GroupedForm& form, const uint8_t* from, int64_t quads, uint8_t* to, Prefetch prefetch) {
  if (form.has_floats()) return unpack_floats<kSigned>(from, quads, kQuadBytes, to, kQuadBytes, prefetch);
  switch (form.bits) {
    case 2:
      return unpack_codes<2, kSigned>(from, quads, to, prefetch);
    case 3:
      return unpack_codes<3, kSigned>(from, quads, to, prefetch);
    case 4:
      return unpack_codes<4, kSigned>(from, quads, to, prefetch);
    case 5:
      return unpack_codes<5, kSigned>(from, quads, to, prefetch);
    default:
      return unpack_codes<6, kSigned>(from, quads, to, prefetch);
  }
}

// Adds the finished sums[rows][64] of one group to totals[rows][64].
template <Offset kOffset, bool kSigned>
inline void add_group_of_rows(const QuantizedRows& input, int64_t row, int64_t num_rows, int64_t group,
                              const DecodedGroup& numbers, const int32_t* sums, float* totals) {
  constexpr int W = F32::kWidth, kVectors = kPanelWidth / W;
  F32 scales[kVectors], offsets[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    scales[v] = load(numbers.scales + v * W);
    offsets[v] = kOffset == Offset::middle ? zero() : load(numbers.offsets + v * W);
  }
  for (int64_t r = 0; r < num_rows; ++r, sums += kPanelWidth, totals += kPanelWidth) {
    const RowNumbers of_row(input, input.at(row + r, group));
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const F32 total = group == 0 ? zero() : load(totals + v * W);
      store(totals + v * W, add_group<kOffset, kSigned>(total, load_i32(sums + v * W), of_row, scales[v], offsets[v]));
    }
  }
}

// 8 bits; 4 bits in packed form, of integers or of e2m1; or fewer than 8 bits, unpacked to bytes block by block
enum class Codes { bytes, packed, floats, unpacked };

constexpr bool is_packed(Codes codes) { return codes == Codes::packed || codes == Codes::floats; }

// Whole groups of a panel, and their rows of the input.
struct GroupRun {
  const QuantizedRows* input;
  int64_t row, first_group, num_groups, group_quads;
  int bits;                     // bits of a code in the products
  const uint8_t* weights;       // [groups][quads][64][4]
  const DecodedGroup* numbers;  // [groups]
  float* totals;                // [rows][64]
};

// Whole super-groups of a panel with `super_groups` groups each, and their rows of the input.
struct SuperRun {
  const QuantizedRows* input;
  int64_t row, first_super, num_supers, super_groups, group_quads;
  int bits;                // bits of a code
  const uint8_t* weights;  // [supers][groups][quads][64][4]
  FactorNumbers numbers;   // numbers of the first super-group
  float* totals;           // [rows][64]

  int64_t first_group() const { return first_super * input->scale_groups; }
};

// Adds the integer sums[rows][64] of group g of a super-group to supers[rows][64].
template <Offset kOffset, bool kSigned>
inline void add_factor_group_of_rows(const SuperRun& run, const FactorNumbers& numbers, int64_t super, int64_t g,
                                     int64_t num_rows, const int32_t* sums, int32_t* supers) {
  constexpr int W = F32::kWidth, kVectors = kPanelWidth / W;
  I32 factors[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) factors[v] = load_factors(numbers.factors + g * numbers.group_bytes + v * W);
  const int64_t group = (run.first_super + super) * run.input->scale_groups + g;
  for (int64_t r = 0; r < num_rows; ++r, sums += kPanelWidth, supers += kPanelWidth) {
    const int32_t zero_sum = kOffset == Offset::middle ? run.input->zero_sums[run.input->at(run.row + r, group)] : 0;
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const I32 before = g == 0 ? zero_i32() : load_i32(supers + v * W);
      store_i32(supers + v * W,
                add_factor_group<kOffset, kSigned>(before, load_i32(sums + v * W), zero_sum, factors[v]));
    }
  }
}

// Adds the finished supers[rows][64] to run.totals.
template <Offset kOffset>
inline void add_super_of_rows(const SuperRun& run, const FactorNumbers& numbers, int64_t super, int64_t num_rows,
                              const int32_t* supers) {
  const QuantizedRows& input = *run.input;
  const int64_t index = run.first_super + super;
  const float* const row_scales = input.scales + input.at(run.row, index);
  const int16_t* const sums = input.minimum_sums + 2 * input.at(run.row, index * input.sums_per_scale);
  for (int64_t c = 0; c < kPanelWidth; c += F32::kWidth) {
    const F32 scales = load(numbers.halves + c);
    float* const totals = run.totals + c;
    const auto add_rows = [&](const auto& minima_of_row, F32 minimum_scales) {
      for (int64_t r = 0; r < num_rows; ++r) {
        const F32 total = index == 0 ? zero() : load(totals + r * kPanelWidth);
        store(totals + r * kPanelWidth,
              add_super<kOffset>(total, load_i32(supers + r * kPanelWidth + c), minima_of_row(r),
                                 broadcast(row_scales[r]), scales, minimum_scales));
      }
    };
    if constexpr (kOffset == Offset::minima) {
      const F32 minimum_scales = load(numbers.halves + kPanelWidth + c);
      const auto add_minima = [&](const auto& pairs) {
        add_rows([&](int64_t r) { return pairs.times(sums + 2 * r, input.number_pitch); }, minimum_scales);
      };
      if (run.super_groups == 8)
        add_minima(MinimumPairs<4>(numbers, 8, c));
      else
        add_minima(MinimumPairs<>(numbers, run.super_groups, c));
    } else {
      add_rows([](int64_t) { return zero_i32(); }, zero());
    }
  }
}

// Computes the super-groups of a run by Tile::run(). `sums` has room for the sums of a group, then of a super-group.
template <class Tile, Codes kCodes, Offset kOffset, bool kSigned>
inline void add_supers_through_memory(int rows, const SuperRun& run, int32_t* sums, int32_t* supers,
                                      Prefetch prefetch) {
  const QuantizedRows& input = *run.input;
  const int64_t group_bytes = run.group_quads * kQuadBytes / (is_packed(kCodes) ? 2 : 1);
  const int8_t* codes = input.codes + run.row * input.stride + run.first_group() * run.group_quads * kQuad;
  const uint8_t* weights = run.weights;
  FactorNumbers numbers = run.numbers;
  for (int64_t super = 0; super < run.num_supers; ++super, numbers.next_super(run.super_groups)) {
    for (int64_t g = 0; g < run.super_groups; ++g, codes += run.group_quads * kQuad, weights += group_bytes) {
      Tile::template run<kCodes, kSigned>(rows, run.bits, codes, input.stride, weights, run.group_quads, sums, true,
                                          prefetch);
      add_factor_group_of_rows<kOffset, kSigned>(run, numbers, super, g, rows, sums, supers);
    }
    add_super_of_rows<kOffset>(run, numbers, super, rows, supers);
  }
}

// Tile::kBlockQuads   of a block, which stays in L1 or L2 while row tiles take turns; as packed
// Tile::kMaxRows   rows of the largest tile, a multiple of
// Tile::kRowUnit   whole rows of sums that run() may write
// Tile::reads_packed(rows, group_quads)  4-bit codes are taken as they are stored
// Tile::is_in_order(rows, codes)  the only pass of few rows is faster with the CPU's own prefetching, if it follows
//                  streams: it reads a block in the order of its addresses
// Tile::kSigned    run<> can take unpacked codes with a sign
// Tile::run<codes, signed>(rows, bits, codes, stride, weights, quads, sums, is_first, prefetch)
//                  sums[rows][64] = (is_first ? 0 : sums) + codes[rows][quads] * weights[quads][64][4], and
//                  prefetch.fetch() once per quad, or, packed, per two
// Tile::kAddsGroups, Tile::adds_groups(rows)    there is a faster way for whole groups:
// Tile::add_groups<codes, offset>(rows, run, prefetch)
//                  the same, and groups are added to the float sums
// Tile::super_passes(rows)    passes in which add_supers() goes through a block
// Tile::add_supers<codes, offset, signed>(rows, run, sums, supers, plan, pass)
//                  adds super-groups to run.totals; `sums` and `supers` [rows][64] are its own
template <class Tile, Codes kCodes, Offset kOffset, bool kFactors>
inline void run_form(const GemmBlock& block) {
  constexpr bool kUnpacks = kCodes == Codes::unpacked;  // this costs one more pass over a block
  constexpr bool kSigned = kUnpacks && kOffset == Offset::middle && Tile::kSigned;
  constexpr int64_t kWeightBytes = is_packed(kCodes) ? kQuadBytes / 2 : kQuadBytes;
  constexpr int64_t kQuadsPerFetch = is_packed(kCodes) ? 2 : 1;
  // blocks are whole groups, or parts of one
  constexpr int64_t kMaxQuads = kUnpacks ? kUnpackedQuads : Tile::kBlockQuads;
  const GemmArgs& args = *block.args;
  const GroupedLayout layout(args.weight.form, args.weight.k);
  const QuantizedRows input(args, const_cast<void*>(block.input));
  const int64_t group_quads = args.weight.form.group_size / kQuad, num_quads = layout.num_groups * group_quads;
  const int64_t stored_quad_bytes = kQuadBytes * args.weight.form.bits / 8;
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t num_tiles = ceil_div(num_rows, Tile::kMaxRows);
  // nearly equal heights: 7 rows are 4 + 3
  const int64_t tile_rows = round_up(ceil_div(num_rows, num_tiles), Tile::kRowUnit);
  const auto passes_of = [](int64_t rows) { return kFactors ? Tile::super_passes(rows) : 1; };
  const int num_passes = static_cast<int>(num_tiles - 1) * passes_of(tile_rows) +
                         passes_of(num_rows - (num_tiles - 1) * tile_rows) + kUnpacks;
  // with factors, sums of a tile and of its super-groups
  const int64_t totals_rows = num_rows + kPaddedRows, sums_rows = kFactors ? 2 * Tile::kMaxRows : totals_rows;
  constexpr int64_t kNumbersBytes = kMaxQuads / kMinGroupQuads * sizeof(DecodedGroup);
  uint8_t* const unpacked = static_cast<uint8_t*>(scratch(
      Scratch::gemm_tiles, kUnpackedQuads * kQuadBytes + kNumbersBytes + 4 * kPanelWidth * (sums_rows + totals_rows)));
  DecodedGroup* const numbers = reinterpret_cast<DecodedGroup*>(unpacked + kUnpackedQuads * kQuadBytes);
  int32_t* const sums = reinterpret_cast<int32_t*>(unpacked + kUnpackedQuads * kQuadBytes + kNumbersBytes);
  int32_t* const supers = sums + kPanelWidth * Tile::kMaxRows;
  float* const totals = reinterpret_cast<float*>(sums + kPanelWidth * sums_rows);
  // blocks have whole units
  const int64_t unit_quads = kFactors ? group_quads * args.weight.form.super_size : group_quads;
  const int64_t block_quads = unit_quads > kMaxQuads ? kMaxQuads : kMaxQuads / unit_quads * unit_quads;
  const int64_t whole_quads = kFactors ? num_quads / unit_quads * unit_quads : num_quads;
  const int64_t block_groups = std::max<int64_t>(1, block_quads / group_quads);
  alignas(64) float bias[kPanelWidth];

  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const char* const packed = static_cast<const char*>(args.weight.data) + panel * layout.panel_bytes;
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(packed + layout.codes_at);
    load_bias(args, panel, bias);
    prefetch_lines(packed + layout.panel_bytes + layout.supers_at, layout.num_supers * layout.super_bytes);
    for (int64_t begin = 0, end; begin < num_quads; begin = end) {
      const int64_t first_group = begin / group_quads;
      const int64_t group_end = (first_group + 1) * group_quads;
      end = std::min(begin + block_quads, group_quads > kMaxQuads ? group_end
                                          : begin < whole_quads   ? whole_quads
                                                                  : num_quads);
      const bool is_last = end == num_quads;
      const uint8_t* weights = codes + begin * stored_quad_bytes;
      const uint8_t* const next_codes = is_last ? codes + layout.panel_bytes : codes + end * stored_quad_bytes;
      const PrefetchPlan plan{reinterpret_cast<const char*>(next_codes),
                              static_cast<int>(ceil_div(kQuadsPerFetch * stored_quad_bytes, int64_t{64})),
                              (end - begin) / kQuadsPerFetch,
                              num_passes,
                              Tile::is_in_order(num_rows, kCodes),
                              reinterpret_cast<const char*>(weights)};
      if constexpr (!kFactors) {
        decode_groups(args.weight.form, layout, packed, first_group, ceil_div(end, group_quads), numbers);
      }
      prefetch_lines(is_last ? packed + layout.panel_bytes : packed + end / group_quads * layout.group_bytes,
                     block_groups * layout.group_bytes);
      if constexpr (kUnpacks) {
        unpack_codes<kSigned>(args.weight.form, weights, end - begin, unpacked, plan.of_pass(0));
        weights = unpacked;
      }
      int pass = kUnpacks;
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = tile * tile_rows, rows = std::min(tile_rows, num_rows - row);
        if constexpr (kFactors) {
          const int64_t first_super = first_group / args.weight.form.super_size;
          const int64_t super_groups = std::min(args.weight.form.super_size, (end - begin) / group_quads);
          const SuperRun run{.input = &input,
                             .row = block.row_begin + row,
                             .first_super = first_super,
                             .num_supers = (end - begin) / (super_groups * group_quads),
                             .super_groups = super_groups,
                             .group_quads = group_quads,
                             .bits = args.weight.form.bits,
                             .weights = weights,
                             .numbers = {layout, packed, first_super, args.weight.form.super_size},
                             .totals = totals + row * kPanelWidth};
          Tile::template add_supers<kCodes, kOffset, kSigned>(static_cast<int>(rows), run, sums, supers, plan, pass);
          pass += passes_of(rows);
          continue;
        }
        Prefetch prefetch = plan.of_pass(pass++);
        if constexpr (Tile::kAddsGroups) {
          if (Tile::adds_groups(rows) && group_quads <= kMaxQuads) {
            const GroupRun run{.input = &input,
                               .row = block.row_begin + row,
                               .first_group = first_group,
                               .num_groups = (end - begin) / group_quads,
                               .group_quads = group_quads,
                               .bits = args.weight.form.product_bits(),
                               .weights = weights,
                               .numbers = numbers,
                               .totals = totals + row * kPanelWidth};
            Tile::template add_groups<kCodes, kOffset>(static_cast<int>(rows), run, prefetch);
            continue;
          }
        }
        for (int64_t quad = begin, next; quad < end; quad = next) {
          const int64_t group = quad / group_quads;
          next = std::min(end, (group + 1) * group_quads);
          int32_t* const tile_sums = sums + row * kPanelWidth;
          Tile::template run<kCodes, kSigned>(static_cast<int>(rows), args.weight.form.product_bits(),
                                              input.codes + (block.row_begin + row) * input.stride + quad * kQuad,
                                              input.stride, weights + (quad - begin) * kWeightBytes, next - quad,
                                              tile_sums, quad == group * group_quads, prefetch);
          if (next == (group + 1) * group_quads)
            add_group_of_rows<kOffset, kSigned>(input, block.row_begin + row, rows, group, numbers[group - first_group],
                                                tile_sums, totals + row * kPanelWidth);
        }
      }
    }
    store_finished(args, {block.row_begin, num_rows, panel, bias}, totals);
  }
}

template <class Tile, Codes kCodes>
inline void run_codes(const GemmBlock& block) {
  if constexpr (kCodes == Codes::floats) return run_form<Tile, kCodes, Offset::middle, false>(block);
  const bool has_factors = block.args->weight.form.has_factors();
  switch (offset_of(block.args->weight.form)) {
    case Offset::middle:
      return has_factors ? run_form<Tile, kCodes, Offset::middle, true>(block)
                         : run_form<Tile, kCodes, Offset::middle, false>(block);
    case Offset::zeros:
      return run_form<Tile, kCodes, Offset::zeros, false>(block);
    case Offset::minima:
      return has_factors ? run_form<Tile, kCodes, Offset::minima, true>(block)
                         : run_form<Tile, kCodes, Offset::minima, false>(block);
  }
}

template <class Tile>
inline void run_grouped(const GemmBlock& block) {
  const int64_t num_rows = block.row_end - block.row_begin;
  const GroupedForm& form = block.args->weight.form;
  if (form.bits == 8) {
    run_codes<Tile, Codes::bytes>(block);
  } else if (form.bits == 4 && Tile::reads_packed(num_rows, form.group_size / kQuad)) {
    form.has_floats() ? run_codes<Tile, Codes::floats>(block) : run_codes<Tile, Codes::packed>(block);
  } else {
    run_codes<Tile, Codes::unpacked>(block);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
