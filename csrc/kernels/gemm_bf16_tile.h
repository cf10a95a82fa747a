// The tile of vdpbf16ps dot products, 6 rows x 64 columns of sums in registers, and the rows of x that it reads.
#pragma once

#include "gemm_row_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

inline __m512bh as_bf16(__m512i x) { return reinterpret_cast<__m512bh>(x); }

struct DotTile {
  using Input = bf16;
  using Weight = bf16;
  static constexpr int64_t kStepK = kBf16KUnit;
  static constexpr int64_t kFetches = kBf16KUnit / 2;
  static constexpr int kVectors = 4;

  template <int kRows, class Fetch>
  static void run(const bf16* a, int64_t a_stride, const bf16* b, int64_t steps, float* out, bool is_first,
                  Fetch& prefetch) {
    __m512 sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = is_first ? _mm512_setzero_ps() : _mm512_load_ps(out + r * kPanelWidth + v * 16);
    for (int64_t step = 0; step < steps; ++step, b += kVectors * kBf16TileElements) {
      for (int64_t pair = 0; pair < kBf16KUnit / 2; ++pair, a += 2) {
        prefetch.fetch();
        __m512i w[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          w[v] = in_register(_mm512_load_si512(b + v * kBf16TileElements + pair * kBf16TileColumns * 2));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int two;
          __builtin_memcpy(&two, a + r * a_stride, sizeof(two));
          const __m512i x = in_register(_mm512_set1_epi32(two));
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], as_bf16(x), as_bf16(w[v]));
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) _mm512_store_ps(out + r * kPanelWidth + v * 16, sums[r][v]);
  }
};

inline int64_t dot_input_bytes(const GemmArgs& args) {
  return args.m * input_stride<bf16>(args.weight.k) * static_cast<int64_t>(sizeof(bf16));
}

inline void dot_prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const int64_t stride = input_stride<bf16>(args.weight.k);
  for (int64_t row = row_begin; row < row_end; ++row) {
    bf16* to = static_cast<bf16*>(input) + row * stride;
    std::memcpy(to, static_cast<const bf16*>(args.x.data) + row * args.x.stride, sizeof(bf16) * args.weight.k);
    std::memset(to + args.weight.k, 0, sizeof(bf16) * (stride - args.weight.k));
  }
}

#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
