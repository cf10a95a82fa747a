// What the matrix product kernels for grouped integer weights share: quantization of the input, the loop over panels,
// blocks of K and row tiles, and the step from exact integer sums to float. The layouts are in quire/kernels/gemm.h.
#pragma once

#include "gemm_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kQuad = 4;
constexpr int64_t kQuadBytes = kQuad * kPanelWidth;  // of 8-bit codes of one panel
constexpr int64_t kBlockQuads = 128;                 // 32 KiB of 8-bit codes, in L1 or L2 while row tiles take turns
constexpr int64_t kUnpackedQuads = 64;               // 16 KiB, in L1 beside sums and rows of the input
constexpr int64_t kPaddedRows = 32;                  // tiles read and write whole tiles

struct GroupedShape {
  int bits;
  int64_t num_groups, group_quads, num_quads;
  int64_t panel_bytes;

  explicit GroupedShape(const GemmArgs& args)
      : bits(args.bits),
        num_groups((args.k + args.group_size - 1) / args.group_size),
        group_quads(args.group_size / kQuad),
        num_quads(num_groups * group_quads),
        panel_bytes(kPanelWidth * num_groups * 4 + stored_bytes(num_quads)) {}

  int64_t stored_bytes(int64_t quads) const { return quads * kQuadBytes * bits / 8; }
};

// The rows of x after prepare(): codes, and per row and group the scale and zero * sum of codes.
struct QuantizedRows {
  int64_t stride;  // an odd number of cache lines, so that rows fall into different cache sets
  int64_t num_groups;
  int8_t* codes;
  float* scales;
  int32_t* zero_sums;

  QuantizedRows(const GemmArgs& args, void* input)
      : stride(((GroupedShape(args).num_quads * kQuad + 63) / 64 | 1) * 64),
        num_groups(GroupedShape(args).num_groups),
        codes(static_cast<int8_t*>(input)),
        scales(reinterpret_cast<float*>(codes + padded_rows(args.m) * stride)),
        zero_sums(reinterpret_cast<int32_t*>(scales + args.m * num_groups)) {}

  static int64_t padded_rows(int64_t m) { return (m + kPaddedRows - 1) / kPaddedRows * kPaddedRows; }
  int64_t bytes(int64_t m) const { return padded_rows(m) * stride + 8 * m * num_groups; }
};

inline int64_t grouped_input_bytes(const GemmArgs& args) { return QuantizedRows(args, nullptr).bytes(args.m); }

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
inline void store_codes(int8_t* to, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline F32 to_float(const int32_t* sums) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(sums))}; }
inline F32 to_float(const int32_t* sums, int32_t offset) {
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(offset)))};
}
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
inline void store_codes(int8_t* to, F32 x) {
  const __m256i words = _mm256_cvtps_epi32(x.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
}
inline F32 to_float(const int32_t* sums) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums)))};
}
inline F32 to_float(const int32_t* sums, int32_t offset) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(x, _mm256_set1_epi32(offset)))};
}
#else
inline void store_codes(int8_t* to, F32 x) {
  float lanes[F32::kWidth];
  store(lanes, x);
  for (int i = 0; i < F32::kWidth; ++i) to[i] = static_cast<int8_t>(std::lrint(lanes[i]));
}
inline F32 to_float(const int32_t* sums, int32_t offset) {
  float lanes[F32::kWidth];
  for (int i = 0; i < F32::kWidth; ++i) lanes[i] = static_cast<float>(sums[i] - offset);
  return load(lanes);
}
inline F32 to_float(const int32_t* sums) { return to_float(sums, 0); }
#endif

// Elements [0, count) of one group of a row become codes in [-127, 127], the rest up to group_size zeros. A group with
// an element that is not finite gets the scale NaN, so that its whole row of the output says so.
template <class T>
inline void quantize_group(const T* x, int64_t count, int64_t group_size, int8_t* codes, float* scale) {
  constexpr int W = F32::kWidth;
  const auto load_at = [&](int64_t i) {
    return i + W <= count ? load(x + i) : load_n(x + i, static_cast<int>(std::max<int64_t>(0, count - i)));
  };
  F32 largest = zero(), check = zero();
  for (int64_t i = 0; i < count; i += W) {
    const F32 v = load_at(i);
    largest = max(largest, max(v, zero() - v));
    check = fma(v, zero(), check);
  }
  const float max_abs = reduce_max(largest), not_finite = reduce_add(check);
  const bool is_zero = max_abs < 1e-30f;
  const F32 inverse = broadcast(is_zero || not_finite != 0 ? 0 : 127 / max_abs);
  *scale = is_zero ? not_finite : max_abs / 127 + not_finite;
  for (int64_t i = 0; i < group_size; i += W) store_codes(codes + i, not_finite == 0 ? load_at(i) * inverse : zero());
}

inline void grouped_prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const QuantizedRows rows(args, input);
  const int32_t zero_code = 1 << (args.bits - 1);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t g = 0; g < rows.num_groups; ++g) {
      const int64_t first = g * args.group_size, count = std::min(args.group_size, args.k - first);
      int8_t* codes = rows.codes + row * rows.stride + first;
      float* scale = rows.scales + row * rows.num_groups + g;
      const int64_t offset = row * args.x_stride + first;
      switch (args.dtype) {
        case DType::f32:
          quantize_group(static_cast<const float*>(args.x) + offset, count, args.group_size, codes, scale);
          break;
        case DType::bf16:
          quantize_group(static_cast<const bf16*>(args.x) + offset, count, args.group_size, codes, scale);
          break;
        case DType::f16:
          quantize_group(static_cast<const f16*>(args.x) + offset, count, args.group_size, codes, scale);
          break;
      }
      int32_t sum = 0;
      for (int64_t i = 0; i < args.group_size; ++i) sum += codes[i];
      rows.zero_sums[row * rows.num_groups + g] = zero_code * sum;
    }
  }
}

// 4-bit codes of `quads` quads (an even number) to one code per byte, from 0 to 15, or from -8 to 7 when kSigned.
template <bool kSigned>
inline void unpack_4bit(const uint8_t* from, int64_t quads, uint8_t* to, Prefetch prefetch) {
  for (int64_t pair = 0; pair < quads / 2; ++pair, from += kQuadBytes, to += 2 * kQuadBytes) {
    prefetch.fetch();
    prefetch.fetch();
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
    const __m512i low_half = _mm512_set1_epi8(0x0f), zero_code = _mm512_set1_epi8(kSigned ? 8 : 0);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kQuadBytes; i += 64) {
      const __m512i x = _mm512_load_si512(from + i);
      const __m512i low = _mm512_and_si512(x, low_half), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), low_half);
      _mm512_store_si512(to + i, _mm512_sub_epi8(low, zero_code));
      _mm512_store_si512(to + kQuadBytes + i, _mm512_sub_epi8(high, zero_code));
    }
#else
    constexpr int kZeroCode = kSigned ? 8 : 0;
    for (int64_t i = 0; i < kQuadBytes; ++i) {
      to[i] = static_cast<uint8_t>((from[i] & 0x0f) - kZeroCode);
      to[kQuadBytes + i] = static_cast<uint8_t>((from[i] >> 4) - kZeroCode);
    }
#endif
  }
}

// sums[rows][64] of one group, finished, are scaled and added to float[rows][64]. kSigned: the codes had a sign, so
// that no share of the zero is in the sums.
template <bool kSigned>
inline void add_group(const QuantizedRows& input, int64_t row, int64_t num_rows, int64_t group, const float* scales,
                      const int32_t* sums, float* totals) {
  constexpr int kVectors = kPanelWidth / F32::kWidth;
  F32 column_scales[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) column_scales[v] = load(scales + v * F32::kWidth);
  for (int64_t r = 0; r < num_rows; ++r, sums += kPanelWidth, totals += kPanelWidth) {
    const int64_t at = (row + r) * input.num_groups + group;
    const F32 row_scale = broadcast(input.scales[at]);
    const int32_t zero_sum = kSigned ? 0 : input.zero_sums[at];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* const total = totals + v * F32::kWidth;
      const F32 sum = kSigned ? to_float(sums + v * F32::kWidth) : to_float(sums + v * F32::kWidth, zero_sum);
      store(total, fma(sum, row_scale * column_scales[v], group == 0 ? zero() : load(total)));
    }
  }
}

enum class Codes { bytes, packed, unpacked };  // 8 bits; 4 bits as stored; 4 bits brought to bytes a block at a time

// Tile::kMaxRows   rows of the largest tile, a multiple of
// Tile::kRowUnit   whole rows of sums that run() may write
// Tile::reads_packed(rows)  run<kPacked> takes 4-bit codes as they are stored: worth it where few rows share them
// Tile::kSigned    run<kUnpacked> takes 4-bit codes with a sign
// Tile::run<codes>(rows, codes, stride, weights, quads, sums, is_first, prefetch)
//                  sums[rows][64] = (is_first ? 0 : sums) + codes[rows][quads] * weights[quads][64][4], and
//                  prefetch.fetch() once per quad
template <class Tile, Codes kCodes>
inline void run_codes(const GemmBlock& block) {
  constexpr bool kUnpacks = kCodes == Codes::unpacked;  // which is one more pass over a block
  constexpr int64_t kWeightBytes = kCodes == Codes::packed ? kQuadBytes / 2 : kQuadBytes;
  const GemmArgs& args = *block.args;
  const GroupedShape shape(args);
  const QuantizedRows input(args, const_cast<void*>(block.input));
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t num_tiles = (num_rows + Tile::kMaxRows - 1) / Tile::kMaxRows;
  // nearly equal heights: 7 rows are 4 + 3
  const int64_t tile_rows =
      ((num_rows + num_tiles - 1) / num_tiles + Tile::kRowUnit - 1) / Tile::kRowUnit * Tile::kRowUnit;
  const int64_t sums_rows = num_rows + kPaddedRows;
  uint8_t* const unpacked = static_cast<uint8_t*>(
      scratch(Scratch::gemm_tiles, kUnpackedQuads * kQuadBytes + 2 * 4 * kPanelWidth * sums_rows));
  int32_t* const sums = reinterpret_cast<int32_t*>(unpacked + kUnpackedQuads * kQuadBytes);
  float* const totals = reinterpret_cast<float*>(sums + kPanelWidth * sums_rows);
  // blocks are whole groups, or parts of one
  constexpr int64_t kMaxQuads = kUnpacks ? kUnpackedQuads : kBlockQuads;
  const int64_t block_quads =
      shape.group_quads > kMaxQuads ? kMaxQuads : kMaxQuads / shape.group_quads * shape.group_quads;
  alignas(64) float bias[kPanelWidth];

  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const char* const packed = static_cast<const char*>(args.packed) + panel * shape.panel_bytes;
    const float* const scales = reinterpret_cast<const float*>(packed);
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(scales + shape.num_groups * kPanelWidth);
    load_bias(args, panel, bias);
    for (int64_t line = 0; line < shape.num_groups * kPanelWidth * 4; line += 64)
      __builtin_prefetch(packed + shape.panel_bytes + line, 0, 2);
    for (int64_t begin = 0, end; begin < shape.num_quads; begin = end) {
      const int64_t group_end = (begin / shape.group_quads + 1) * shape.group_quads;
      end = std::min(begin + block_quads, shape.group_quads > kMaxQuads ? group_end : shape.num_quads);
      const uint8_t* weights = codes + shape.stored_bytes(begin);
      const uint8_t* const next_codes =
          end < shape.num_quads ? codes + shape.stored_bytes(end) : codes + shape.panel_bytes;
      const PrefetchPlan plan{reinterpret_cast<const char*>(next_codes), static_cast<int>(shape.stored_bytes(1) / 64),
                              end - begin, static_cast<int>(num_tiles) + kUnpacks};
      if constexpr (kUnpacks) {
        unpack_4bit<Tile::kSigned>(weights, end - begin, unpacked, plan.of_pass(0));
        weights = unpacked;
      }
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = tile * tile_rows, rows = std::min(tile_rows, num_rows - row);
        Prefetch prefetch = plan.of_pass(static_cast<int>(tile) + kUnpacks);
        for (int64_t quad = begin, next; quad < end; quad = next) {
          const int64_t group = quad / shape.group_quads;
          next = std::min(end, (group + 1) * shape.group_quads);
          int32_t* const tile_sums = sums + row * kPanelWidth;
          Tile::template run<kCodes>(static_cast<int>(rows),
                                     input.codes + (block.row_begin + row) * input.stride + quad * kQuad, input.stride,
                                     weights + (quad - begin) * kWeightBytes, next - quad, tile_sums,
                                     quad == group * shape.group_quads, prefetch);
          if (next == (group + 1) * shape.group_quads)
            add_group<kUnpacks && Tile::kSigned>(input, block.row_begin + row, rows, group,
                                                 scales + group * kPanelWidth, tile_sums, totals + row * kPanelWidth);
        }
      }
    }
    store_finished(args, {totals, kPanelWidth, block.row_begin, num_rows, panel * kPanelWidth, kPanelWidth, bias});
  }
}

template <class Tile>
inline void run_grouped(const GemmBlock& block) {
  const int64_t num_rows = block.row_end - block.row_begin;
  if (block.args->bits == 8) {
    run_codes<Tile, Codes::bytes>(block);
  } else if (Tile::reads_packed(num_rows)) {
    run_codes<Tile, Codes::packed>(block);
  } else {
    run_codes<Tile, Codes::unpacked>(block);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
