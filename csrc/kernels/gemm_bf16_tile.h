// The tiles of bfloat16 products: vdpbf16ps, 6 rows x 64 columns of sums in registers, or bfmmla, 6 rows x 16 columns;
// and the rows of x that they read.
#pragma once

#include "gemm_row_tiles.h"

#define QUIRE_HAS_BF16_PRODUCTS (QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16 || QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM)

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

inline __m512bh as_bf16(__m512i x) { return reinterpret_cast<__m512bh>(x); }

// kInOrder: weights are read in the order of their addresses, tile after tile, which the CPU's own prefetching follows;
// each row of x is loaded once per tile. Else pair after pair from the four tiles of a step: a row is loaded once.
template <bool kInOrder>
struct DotTiles {
  using Input = bf16;
  using Weight = bf16;
  static constexpr int64_t kStepK = kBf16KUnit;
  static constexpr int64_t kFetches = kBf16KUnit / 2;
  static constexpr bool kIsInOrder = kInOrder;
  static constexpr int kVectors = 4;

  template <int kRows, class Fetch>
  static void run(const bf16* a, int64_t a_stride, const bf16* b, int64_t steps, float* out, bool is_first,
                  Fetch& prefetch) {
    constexpr int kPairs = kBf16KUnit / 2;
    __m512 sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(out + r * kPanelWidth + v * 16);
    const auto weights = [&](int v, int pair) {
      return in_register(_mm512_load_si512(b + v * kBf16TileElements + pair * kBf16TileColumns * 2));
    };
    const auto two_of_row = [&](int r, int pair) {
      int two;
      __builtin_memcpy(&two, a + r * a_stride + pair * 2, sizeof(two));
      return _mm512_set1_epi32(two);
    };
    for (int64_t step = 0; step < steps; ++step, a += kBf16KUnit, b += kVectors * kBf16TileElements) {
      if constexpr (kInOrder) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
          for (int pair = 0; pair < kPairs; ++pair) {
            if (pair % kVectors == 0) prefetch.fetch();
            const __m512i w = weights(v, pair);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
              sums[r][v] = _mm512_dpbf16_ps(sums[r][v], as_bf16(two_of_row(r, pair)), as_bf16(w));
          }
        }
      } else {
        for (int pair = 0; pair < kPairs; ++pair) {
          prefetch.fetch();
          __m512i w[kVectors];
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) w[v] = weights(v, pair);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const __m512i x = in_register(two_of_row(r, pair));
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], as_bf16(x), as_bf16(w[v]));
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) _mm512_store_ps(out + r * kPanelWidth + v * 16, sums[r][v]);
  }
};

using DotTile = DotTiles<false>;

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM

// bfmmla multiplies 2 columns by 2 rows, 4 k each. One row is multiplied as two, so that it has the same bits as among
// other rows.
struct DotTile {
  using Input = bf16;
  using Weight = bf16;
  static constexpr int64_t kStepK = kBf16KUnit;
  static constexpr int64_t kFetches = kBf16KUnit / 2;
  static constexpr bool kIsInOrder = false;
  static constexpr int64_t kColumnsPerVector = 4, kTileColumns = kBf16TileColumns;

  template <int kRows, class Fetch>
  static void run(const bf16* a, int64_t a_stride, const bf16* b, int64_t steps, float* out, bool is_first,
                  Fetch& prefetch) {
    constexpr int kPairs = (kRows + 1) / 2, kVectors = kPairs == 1 ? 8 : 4;
    constexpr int64_t kColumns = kVectors * kColumnsPerVector;
    // The second row of a pair, the first again behind the last row.
    constexpr auto second = [](int pair) { return std::min(2 * pair + 1, kRows - 1); };
    constexpr int kParts = Fetch::kIsSpread ? kPanelWidth / kColumns : 1;
    Spread<kParts, Fetch> share(prefetch);
    for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
      float32x4_t sums[kPairs][kVectors][2];  // sums of two columns each: [column][row]
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const float* const from = out + column + v * kColumnsPerVector;
          const float32x4_t x = is_first ? vdupq_n_f32(0) : vld1q_f32(from + 2 * p * kPanelWidth);
          const float32x4_t y = is_first ? vdupq_n_f32(0) : vld1q_f32(from + second(p) * kPanelWidth);
          sums[p][v][0] = vzip1q_f32(x, y);
          sums[p][v][1] = vzip2q_f32(x, y);
        }
      const bf16* x = a;
      const bf16* tiles = b + column / kTileColumns * kBf16TileElements;
      for (int64_t step = 0; step < steps; ++step, tiles += kBf16KUnit * kPanelWidth) {
        for (int64_t k = 0; k < kBf16KUnit; k += 8, x += 8) {
          if (kParts > 1 || column == 0)
            for (int i = 0; i < 4; ++i) share.fetch();
          bfloat16x8_t rows[kPairs][2];  // [half of k][row][4]
#pragma GCC unroll 8
          for (int p = 0; p < kPairs; ++p) {
            const uint64x2_t first = load_8(x + 2 * p * a_stride), other = load_8(x + second(p) * a_stride);
            rows[p][0] = vreinterpretq_bf16_u64(vzip1q_u64(first, other));
            rows[p][1] = vreinterpretq_bf16_u64(vzip2q_u64(first, other));
          }
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              const int64_t offset = v * kColumnsPerVector;  // in columns
              const bf16* const pairs = tiles + offset / kTileColumns * kBf16TileElements + offset % kTileColumns * 2 +
                                        (k / 2 + 2 * half) * kTileColumns * 2;
              const uint32x4_t w0 = load_4(pairs), w1 = load_4(pairs + kTileColumns * 2);
              const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(w0, w1)),
                                 high = vreinterpretq_bf16_u32(vzip2q_u32(w0, w1));
#pragma GCC unroll 8
              for (int p = 0; p < kPairs; ++p) {
                sums[p][v][0] = vbfmmlaq_f32(sums[p][v][0], low, rows[p][half]);
                sums[p][v][1] = vbfmmlaq_f32(sums[p][v][1], high, rows[p][half]);
              }
            }
        }
      }
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          float* const to = out + column + v * kColumnsPerVector;
          vst1q_f32(to + 2 * p * kPanelWidth, vuzp1q_f32(sums[p][v][0], sums[p][v][1]));
          if (2 * p + 1 < kRows) vst1q_f32(to + (2 * p + 1) * kPanelWidth, vuzp2q_f32(sums[p][v][0], sums[p][v][1]));
        }
    }
  }

 private:
  static uint64x2_t load_8(const bf16* p) { return vreinterpretq_u64_u16(vld1q_u16(&p->bits)); }
  static uint32x4_t load_4(const bf16* p) { return vreinterpretq_u32_u16(vld1q_u16(&p->bits)); }  // pairs of k
};

#endif

#if QUIRE_HAS_BF16_PRODUCTS

inline int64_t dot_input_bytes(const GemmArgs& args) {
  return args.m * input_stride<bf16>(args.weight.k) * static_cast<int64_t>(sizeof(bf16));
}

inline void dot_prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const int64_t stride = input_stride<bf16>(args.weight.k);
  for (int64_t row = row_begin; row < row_end; ++row) {
    bf16* to = static_cast<bf16*>(input) + row * stride;
    std::memcpy(to, row_of_x<bf16>(args, row), sizeof(bf16) * args.weight.k);
    std::memset(to + args.weight.k, 0, sizeof(bf16) * (stride - args.weight.k));
  }
}

#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
