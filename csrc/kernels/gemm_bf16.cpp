// Matrix product of bfloat16 by vdpbf16ps (AVX512-BF16): 6 rows x 64 columns of sums in registers, pairs along K.
#include "gemm_row_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

// Keeps a value in a register: g++ 12 would otherwise fold the same load into each product that uses it, and the loads
// would then outnumber what the load ports can serve.
inline __m512i in_register(__m512i x) {
  __asm__("" : "+v"(x));
  return x;
}

inline __m512bh as_bf16(__m512i x) { return reinterpret_cast<__m512bh>(x); }

struct DotTile {
  using Input = bf16;
  using Weight = bf16;
  static constexpr int64_t kStepK = kBf16KUnit;
  static constexpr int64_t kFetches = kBf16KUnit / 2;
  static constexpr int kVectors = 4;

  template <int kRows>
  static void run(const bf16* a, int64_t a_stride, const bf16* b, int64_t steps, float* out, bool is_first,
                  Prefetch prefetch) {
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

int64_t input_bytes(const GemmArgs& args) {
  return args.m * input_stride<bf16>(args.k) * static_cast<int64_t>(sizeof(bf16));
}

void prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const int64_t stride = input_stride<bf16>(args.k);
  for (int64_t row = row_begin; row < row_end; ++row) {
    bf16* to = static_cast<bf16*>(input) + row * stride;
    std::memcpy(to, static_cast<const bf16*>(args.x) + row * args.x_stride, sizeof(bf16) * args.k);
    std::memset(to + args.k, 0, sizeof(bf16) * (stride - args.k));
  }
}

int64_t rows_per_block(int64_t) { return 240; }

void run(const GemmBlock& block) { run_row_tiles<DotTile>(block); }

#endif

}  // namespace

extern const GemmKernels gemm_bf16_table;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
const GemmKernels gemm_bf16_table = {1, input_bytes, prepare, rows_per_block, run};
#else
const GemmKernels gemm_bf16_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_bf16_kernels, gemm_bf16_table)
