// Streaming reads and register-only multiply-adds, see quire/kernels/limits.h.
#include "quire/kernels/limits.h"

#include "quire/simd.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "amx_tiles.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

uint32_t read(const char* begin, int64_t bytes) {
  constexpr int64_t kDistance = 2048;  // bytes ahead
  F32 a = zero(), b = zero();
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(begin + i + kDistance, 0, 2);
    for (int64_t j = 0; j < 64; j += 2 * F32::kWidth * 4) {
      a = max(a, load(reinterpret_cast<const float*>(begin + i + j)));
      if (j + F32::kWidth * 4 < 64) b = max(b, load(reinterpret_cast<const float*>(begin + i + j + F32::kWidth * 4)));
    }
  }
  return std::bit_cast<uint32_t>(reduce_max(max(a, b)));
}

// Twelve chains hide the latency of a multiply-add on every CPU so far (4 or 5 cycles, two per cycle).
constexpr int kChains = 12;

template <class Vector>
inline void keep(Vector& x) {
#if defined(__x86_64__)
  __asm__ volatile("" : "+v"(x));
#else
  __asm__ volatile("" : "+w"(x));
#endif
}

int64_t multiply_f32(int64_t rounds) {
  F32 sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = zero();
  F32 x = broadcast(1.0f);
  keep(x.v);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = fma(x, x, sums[i]);
      keep(sums[i].v);
    }
  }
  return rounds * kChains * F32::kWidth * 2;
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
int64_t multiply_bf16(int64_t rounds) {
  configure_tiles(kTileRows);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
  return rounds * 6 * (16 * 16 * 32 * 2);
}
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
int64_t multiply_bf16(int64_t rounds) {
  __m512 sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_setzero_ps();
  __m512i x = _mm512_set1_epi32(0x3f803f80);
  keep(x);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = _mm512_dpbf16_ps(sums[i], reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(x));
      keep(sums[i]);
    }
  }
  return rounds * kChains * 16 * 2 * 2;
}
#else
int64_t multiply_bf16(int64_t rounds) { return multiply_f32(rounds); }
#endif

int64_t multiply(DType dtype, int64_t rounds) {
  return dtype == DType::bf16 ? multiply_bf16(rounds) : multiply_f32(rounds);
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
int64_t multiply_int8(int64_t rounds) {
  configure_tiles(kTileRows);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbusd(0, 6, 7);
    _tile_dpbusd(1, 6, 7);
    _tile_dpbusd(2, 6, 7);
    _tile_dpbusd(3, 6, 7);
    _tile_dpbusd(4, 6, 7);
    _tile_dpbusd(5, 6, 7);
  }
  _tile_release();
  return rounds * 6 * (16 * 16 * 64 * 2);
}
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
using I32 = __m512i;
constexpr int kInt8Products = 64;  // of one vpdpbusd
inline I32 dot(I32 sum, I32 x) { return _mm512_dpbusd_epi32(sum, x, x); }
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
using I32 = __m512i;
constexpr int kInt8Products = 32;  // widened to 16 bits
inline I32 dot(I32 sum, I32 x) { return _mm512_add_epi32(sum, _mm512_madd_epi16(x, x)); }
#else
using I32 = __m256i;
constexpr int kInt8Products = 16;
inline I32 dot(I32 sum, I32 x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, x)); }
#endif

int64_t multiply_int8(int64_t rounds) {
  I32 sums[kChains] = {}, x = {};
  for (int64_t round = 0; round < rounds; ++round) {
    keep(x);
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = dot(sums[i], x);
      keep(sums[i]);
    }
  }
  return rounds * kChains * kInt8Products * 2;
}
#else
int64_t multiply_int8(int64_t rounds) { return multiply_f32(rounds); }
#endif

}  // namespace

extern const LimitKernels limit_table;
const LimitKernels limit_table = {read, multiply, multiply_int8};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(LimitKernels, limit_kernels, limit_table)
