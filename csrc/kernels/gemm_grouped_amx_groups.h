// Grouped weights on AMX tiles, groups of up to 512, where adding a group to the float sums takes as long as its
// products.
//
// The work goes over 16 columns and one block of K at a time. Codes of fewer bits become bytes in L1. Then, for each 16
// rows, the float sums stay in vector registers over all groups, and the integer sums of a group leave the tiles during
// the products of the next groups. Groups of 32 or 16 make tiles with 32 or 16 k.
#pragma once

#include "amx_tiles.h"
#include "gemm_grouped_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileColumns = 16, kTilesPerPanel = kPanelWidth / kTileColumns;
constexpr int64_t kGroupsBlockQuads =
    kAmxSmallGroup / kQuad;  // 8 KiB of unpacked codes, in L1 beside rows of the input and numbers
constexpr int64_t kTileSums = kTileRows * kTileColumns;
// 4-bit codes are unpacked to the high halves of bytes, which saves shifts: sums are 16 times as large, and scales a
// 16th. No bits change, unless the product of the scales of a row and a column is below 2^-122.
constexpr float kHighHalf = 16;

// k of a tile.
inline int64_t step_of(int64_t group_size) { return group_size % 64 == 0 ? 64 : group_size % 32 == 0 ? 32 : 16; }

// sums += input * weights; kSigned: of the codes of weights. A macro, because tiles are named by literals.
#define QUIRE_MULTIPLY_TILES(sums, input, weights) \
  if constexpr (kSigned) {                         \
    _tile_dpbssd(sums, input, weights);            \
  } else {                                         \
    _tile_dpbsud(sums, input, weights);            \
  }

// Fetches the weights of the next block from memory to L2, a few lines at a time.
struct Fetcher {
  const char* next;
  const char* end;

  inline void fetch(int64_t lines) {
    for (; lines > 0 && next < end; --lines, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Unpacks `quads` quads of 16 columns of 4-bit codes to [quads][16][4] bytes; kSigned: codes minus their middle.
template <bool kSigned>
void unpack_columns_4bit(const uint8_t* from, int64_t quads, uint8_t* to) {
  constexpr int kAndXor = 0x6a;
  const __m512i high_half = _mm512_set1_epi8(-16), sign = _mm512_set1_epi8(kSigned ? -128 : 0);
  for (int64_t pair = 0; pair < quads / 2; ++pair, from += kQuadBytes, to += 2 * kRowBytes) {
    const __m512i x = _mm512_load_si512(from), low = _mm512_slli_epi16(x, 4);
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(low, high_half, sign, kAndXor));
    _mm512_store_si512(to + kRowBytes, _mm512_ternarylogic_epi32(x, high_half, sign, kAndXor));
  }
}

// The same for kBits, or, with kFloats, for e2m1. Quads are rounded up to the number that CodePlanes holds together.
template <int kBits, bool kSigned, bool kFloats>
void unpack_columns(const uint8_t* from, int64_t quads, uint8_t* to) {
  if constexpr (kFloats) {
    unpack_floats<kSigned>(from, quads, kRowBytes, to, kRowBytes, {});
  } else if constexpr (kBits == 4) {
    unpack_columns_4bit<kSigned>(from, quads, to);
  } else {
    constexpr CodePlanes kPlanes(kBits);
    for (; quads > 0; quads -= kPlanes.quads, from += kPlanes.bytes(), to += kPlanes.quads * kRowBytes)
      unpack_vectors<kBits, kSigned>(from, to, kRowBytes);
  }
  written_for_tiles();
}

// 16 columns of one block of K, for any rows.
struct ColumnBlock {
  const uint8_t* weights;  // [quads][16][4], quads `pitch` bytes apart
  int64_t pitch;
  const DecodedGroup* numbers;  // of the block's groups, unless
  FactorNumbers factors;        // of its super-groups
  int64_t column;               // the first one of the panel
  int64_t first_group, num_groups, group_quads;
};

// The rows of a block, and what they are added to.
struct RowTiles {
  const QuantizedRows* input;
  int64_t first_row, count;
  float* totals;  // [count][16][64]
};

// Adds the finished integer sums of a super-group with `num_groups` groups to 16 columns of totals[kRows][64].
// `factors` belong to the super-group.
template <int kRows, Offset kOffset>
void add_super_of_tile(const FactorNumbers& factors, int64_t column, const QuantizedRows& input, int64_t row,
                       int64_t super, int64_t num_groups, const I32 (&sums)[kRows], float* totals) {
  const F32 scales = load(factors.halves + column);
  const MinimumPairs<> pairs(factors, kOffset == Offset::minima ? num_groups : 0, column);
  F32 minimum_scales = zero();
  if constexpr (kOffset == Offset::minima) minimum_scales = load(factors.halves + kPanelWidth + column);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    I32 minima = zero_i32();
    if constexpr (kOffset == Offset::minima) {
      const int16_t* const of_row = input.minimum_sums + 2 * input.at(row + r, super * input.sums_per_scale);
      minima = pairs.times(of_row, input.number_pitch);
    }
    const F32 total = super == 0 ? zero() : load(totals + r * kPanelWidth);
    const F32 row_scale = broadcast(input.scales[input.at(row + r, super)]);
    store(totals + r * kPanelWidth, add_super<kOffset>(total, sums[r], minima, row_scale, scales, minimum_scales));
  }
}

// Tile 0 = codes * weights, 16 x 16.
template <bool kSigned>
inline void multiply_group(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t pitch, int64_t quads,
                           int64_t step) {
  _tile_zero(0);
  for (const int8_t* const end = codes + quads * kQuad; codes < end; codes += step) {
    _tile_loadd(4, codes, stride);
    _tile_loadd(6, weights, pitch);
    weights += step / kQuad * pitch;
    QUIRE_MULTIPLY_TILES(0, 4, 6)
  }
}

// Adds the groups of a block to 16 columns of rows.totals. `sums` has room for two tiles. With factors the block begins
// with a super-group, and its integer sums stay in registers; kShift: they are 2^kShift times as large, like the codes.
//
// A step stores the sums of a group, multiplies the next one, and adds the one before. So it waits for no result of its
// own, also where the next tile of the output begins. Inline, with copies of what it is given: else g++ reads these
// again after each tile store, and the loop is slower than one that waits (benchmarks/NOTES.md).
template <int kRows, Offset kOffset, bool kSigned, bool kFactors, int kShift>
__attribute__((always_inline)) inline void add_groups(const ColumnBlock block, const RowTiles rows, int64_t step,
                                                      int32_t* sums, Fetcher& whole_fetcher, int64_t lines_per_group) {
  const QuantizedRows input = *rows.input;
  Fetcher fetcher = whole_fetcher;
  const int64_t group_quads = block.group_quads, num_groups = block.num_groups;
  const int8_t* const codes = input.codes + rows.first_row * input.stride + block.first_group * group_quads * kQuad;
  const int64_t first_super = block.first_group / input.scale_groups;
  int32_t *added = sums, *stored = sums + kTileSums;
  int64_t next_tile = 0, next_group = 0;

  const auto multiply_next = [&]() __attribute__((always_inline)) {
    if (next_tile == rows.count) return;
    fetcher.fetch(lines_per_group);
    multiply_group<kSigned>(codes + next_tile * kTileRows * input.stride + next_group * group_quads * kQuad,
                            input.stride, block.weights + next_group * group_quads * block.pitch, block.pitch,
                            group_quads, step);
    if (++next_group < num_groups) return;
    next_group = 0;
    ++next_tile;
  };
  multiply_next();
  _tile_stored(0, added, kRowBytes);
  multiply_next();

  for (int64_t tile = 0; tile < rows.count; ++tile) {
    const int64_t row = rows.first_row + tile * kTileRows;
    float* const totals = rows.totals + tile * kTileRows * kPanelWidth + block.column;
    F32 total[kRows];
    I32 super_sums[kRows];
    FactorNumbers factors = block.factors;
    int64_t super = first_super, super_begin = 0;  // with factors: the super-group, its first group
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = kFactors || block.first_group == 0 ? zero() : load(totals + r * kPanelWidth);
      super_sums[r] = zero_i32();
    }
    for (int64_t g = 0; g < num_groups; ++g) {
      _tile_stored(0, stored, kRowBytes);
      multiply_next();
      const int64_t at = input.at(row, block.first_group + g);
      if constexpr (kFactors) {
        const I32 of_group = load_factors(factors.factors + (g - super_begin) * factors.group_bytes + block.column);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const int32_t zero_sum = kOffset == Offset::middle && !kSigned ? input.zero_sums[at + r] : 0;
          super_sums[r] =
              add_factor_group<kOffset, kSigned>(super_sums[r], load_i32(added + r * kTileColumns), zero_sum, of_group);
        }
        const int64_t super_groups = g + 1 - super_begin;
        if (super_groups == input.scale_groups || g + 1 == num_groups) {
          I32 finished[kRows];  // a copy, so that super_sums stay in registers
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            finished[r] = _mm512_srai_epi32(super_sums[r], kShift);
            super_sums[r] = zero_i32();
          }
          add_super_of_tile<kRows, kOffset>(factors, block.column, input, row, super, super_groups, finished, totals);
          factors.next_super(input.scale_groups);
          super_begin = g + 1;
          ++super;
        }
      } else {
        const F32 scales = load(block.numbers[g].scales + block.column);
        const F32 offsets = load(block.numbers[g].offsets + block.column);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
          total[r] = add_group<kOffset, kSigned>(total[r], load_i32(added + r * kTileColumns),
                                                 RowNumbers(input, at + r), scales, offsets);
      }
      std::swap(added, stored);
    }
    if constexpr (kFactors) continue;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) store(totals + r * kPanelWidth, total[r]);
  }
  whole_fetcher = fetcher;
}

struct Buffers {
  uint8_t unpacked[kGroupsBlockQuads * kRowBytes];
  DecodedGroup numbers[kGroupsBlockQuads / kMinGroupQuads];
  int32_t sums[2 * kTileSums];
};

template <int kRows, int kBits, Offset kOffset, bool kFactors, bool kFloats = false>
void run_small_groups(const GemmBlock& block) {
  constexpr bool kUnpacks = kBits != 8, kSigned = kUnpacks && kOffset == Offset::middle;
  constexpr int kShift = kBits == 4 && !kFloats ? 4 : 0;
  const GemmArgs& args = *block.args;
  const GroupedForm& form = args.weight.form;
  const GroupedLayout layout(form, args.weight.k);
  const QuantizedRows input(args, const_cast<void*>(block.input));
  const int64_t group_quads = form.group_size / kQuad, num_quads = layout.num_groups * group_quads;
  const int64_t quad_bytes = kQuadBytes * kBits / 8, step = step_of(form.group_size);
  const int64_t num_rows = block.row_end - block.row_begin, num_tiles = ceil_div(num_rows, kTileRows);
  const int64_t unit_quads = group_quads * (kFactors ? form.super_size : 1);  // what a block has whole
  const int64_t block_quads = kGroupsBlockQuads / unit_quads * unit_quads;

  Buffers* const buffers =
      static_cast<Buffers*>(scratch(Scratch::gemm_tiles, sizeof(Buffers) + 4 * kTileSums * num_tiles * kTilesPerPanel));
  float* const totals = reinterpret_cast<float*>(buffers + 1);
  alignas(64) float bias[kPanelWidth];

  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const char* const packed = static_cast<const char*>(args.weight.data) + panel * layout.panel_bytes;
    const char* const codes = packed + layout.codes_at;
    load_bias(args, panel, bias);
    prefetch_lines(packed + layout.panel_bytes + layout.supers_at, layout.num_supers * layout.super_bytes);
    for (int64_t begin = 0, end; begin < num_quads; begin = end) {
      end = std::min(begin + block_quads, num_quads);
      const int64_t first_group = begin / group_quads, num_groups = (end - begin) / group_quads;
      if constexpr (!kFactors) {
        decode_groups(form, layout, packed, first_group, first_group + num_groups, buffers->numbers);
      }
      if constexpr (!kFactors && kShift != 0) {
        for (int64_t g = 0; g < num_groups; ++g) buffers->numbers[g].divide_codes(kHighHalf, kOffset);
      }
      const bool is_last = end == num_quads;
      prefetch_lines(is_last ? packed + layout.panel_bytes : packed + end / group_quads * layout.group_bytes,
                     num_groups * layout.group_bytes);
      const char* const next = is_last ? codes + layout.panel_bytes : codes + end * quad_bytes;
      Fetcher fetcher{next, next + (end - begin) * quad_bytes};
      const int64_t passes = kTilesPerPanel * (num_tiles + kUnpacks);
      const int64_t lines_per_pass = (end - begin) * quad_bytes / 64 / passes + 1;
      const int64_t lines_per_group = ceil_div(lines_per_pass, num_groups);

      for (int64_t column = 0; column < kPanelWidth; column += kTileColumns) {
        const uint8_t* const stored = reinterpret_cast<const uint8_t*>(codes + begin * quad_bytes + column * kQuad);
        if constexpr (kUnpacks) {
          fetcher.fetch(lines_per_pass);
          unpack_columns<kBits, kSigned, kFloats>(stored, end - begin, buffers->unpacked);
        }
        const ColumnBlock columns{.weights = kUnpacks ? buffers->unpacked : stored,
                                  .pitch = kUnpacks ? kRowBytes : kQuadBytes,
                                  .numbers = buffers->numbers,
                                  .factors = {layout, packed, first_group / form.super_size, form.super_size},
                                  .column = column,
                                  .first_group = first_group,
                                  .num_groups = num_groups,
                                  .group_quads = group_quads};
        add_groups<kRows, kOffset, kSigned, kFactors, kShift>(columns, {&input, block.row_begin, num_tiles, totals},
                                                              step, buffers->sums, fetcher, lines_per_group);
      }
    }
    store_finished(args, {block.row_begin, num_rows, panel, bias}, totals);
  }
}

template <int kRows, int kBits>
void run_small_groups(const GemmBlock& block) {
  if constexpr (kBits == 4) {
    if (block.args->weight.form.has_floats()) return run_small_groups<kRows, 4, Offset::middle, false, true>(block);
  }
  const bool has_factors = block.args->weight.form.has_factors();
  switch (offset_of(block.args->weight.form)) {
    case Offset::middle:
      return has_factors ? run_small_groups<kRows, kBits, Offset::middle, true>(block)
                         : run_small_groups<kRows, kBits, Offset::middle, false>(block);
    case Offset::zeros:
      return run_small_groups<kRows, kBits, Offset::zeros, false>(block);
    case Offset::minima:
      return has_factors ? run_small_groups<kRows, kBits, Offset::minima, true>(block)
                         : run_small_groups<kRows, kBits, Offset::minima, false>(block);
  }
}

inline void run_small_groups(const GemmBlock& block) {
  const bool is_half_tile = block.args->m <= kTileRows / 2;
  switch (block.args->weight.form.bits) {
    case 2:
      return is_half_tile ? run_small_groups<kTileRows / 2, 2>(block) : run_small_groups<kTileRows, 2>(block);
    case 3:
      return is_half_tile ? run_small_groups<kTileRows / 2, 3>(block) : run_small_groups<kTileRows, 3>(block);
    case 4:
      return is_half_tile ? run_small_groups<kTileRows / 2, 4>(block) : run_small_groups<kTileRows, 4>(block);
    case 5:
      return is_half_tile ? run_small_groups<kTileRows / 2, 5>(block) : run_small_groups<kTileRows, 5>(block);
    case 6:
      return is_half_tile ? run_small_groups<kTileRows / 2, 6>(block) : run_small_groups<kTileRows, 6>(block);
    default:
      return is_half_tile ? run_small_groups<kTileRows / 2, 8>(block) : run_small_groups<kTileRows, 8>(block);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
