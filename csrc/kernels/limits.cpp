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

// Computes sum = multiply_add(sum, x) on every chain, `rounds` times.
template <class Vector, class MultiplyAdd>
inline void run_chains(int64_t rounds, Vector x, const MultiplyAdd& multiply_add) {
  Vector sums[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) sums[i] = Vector{};
  for (int64_t round = 0; round < rounds; ++round) {
    keep(x);
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      sums[i] = multiply_add(sums[i], x);
      keep(sums[i]);
    }
  }
}

int64_t multiply_f32(int64_t rounds) {
  run_chains(rounds, broadcast(1.0f).v, [](auto sum, auto x) { return fma(F32{x}, F32{x}, F32{sum}).v; });
  return rounds * kChains * F32::kWidth * 2;
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

// A macro, because tiles are named by literals.
#define QUIRE_MULTIPLY_TILES(rounds, multiply)       \
  configure_tiles(kTileRows);                        \
  for (int64_t round = 0; round < rounds; ++round) { \
    multiply(0, 6, 7);                               \
    multiply(1, 6, 7);                               \
    multiply(2, 6, 7);                               \
    multiply(3, 6, 7);                               \
    multiply(4, 6, 7);                               \
    multiply(5, 6, 7);                               \
  }                                                  \
  _tile_release();

int64_t multiply_bf16(int64_t rounds) {
  QUIRE_MULTIPLY_TILES(rounds, _tile_dpbf16ps)
  return rounds * 6 * (16 * 16 * 32 * 2);
}

int64_t multiply_codes(int, int64_t rounds) {
  QUIRE_MULTIPLY_TILES(rounds, _tile_dpbusd)
  return rounds * 6 * (16 * 16 * 64 * 2);
}

#else

int64_t multiply_bf16(int64_t rounds) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  run_chains(rounds, std::bit_cast<__m512>(_mm512_set1_epi32(0x3f803f80)), [](__m512 sum, __m512 x) {
    return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(x), std::bit_cast<__m512bh>(x));
  });
  return rounds * kChains * 16 * 2 * 2;
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM
  run_chains(rounds, vreinterpretq_f32_u16(vdupq_n_u16(0x3f80)), [](float32x4_t sum, float32x4_t x) {
    return vbfmmlaq_f32(sum, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(x));
  });
  return rounds * kChains * 16 * 2;
#else
  return multiply_f32(rounds);
#endif
}

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX512
using Integers = __m512i;
inline Integers all_ones() { return _mm512_set1_epi8(1); }
#elif QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2
using Integers = __m256i;
inline Integers all_ones() { return _mm256_set1_epi8(1); }
#endif

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX512 || QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2

// It is assembly, so that the compiler keeps the multiplication of each chain, although all chains have equal operands.
inline Integers add_pair_products(Integers sum, Integers x) {
  Integers products;
  __asm__ volatile("vpmaddwd %2, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(x));
  return sum;
}

// One vpmaddubsw for each of kQuads quads of codes, as long as their sums fit into 16 bits, and one vpmaddwd for all.
template <int kQuads>
inline int64_t multiply_quads(int64_t rounds) {
  rounds /= kQuads;
  run_chains(rounds, all_ones(), [](Integers sum, Integers x) {
    Integers words{}, products;
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad)
      __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(words), "=&v"(products) : "v"(x));
    return add_pair_products(sum, words);
  });
  return rounds * kQuads * kChains * static_cast<int64_t>(sizeof(Integers)) * 2;
}

#endif

// It uses the instructions of gemm_grouped: vpdpbusd of 512 or 256 bits. Without vpdpbusd, it uses vpmaddwd for 8 bits
// and vpmaddubsw for fewer bits (gemm_grouped_words.h). On ARM64 it uses smmla, sdot, or products of 16 bits.
int64_t multiply_codes([[maybe_unused]] int bits, int64_t rounds) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_VNNI
  run_chains(rounds, _mm512_set1_epi8(1), [](__m512i sum, __m512i x) { return _mm512_dpbusd_epi32(sum, x, x); });
  return rounds * kChains * 64 * 2;
#elif QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
  run_chains(rounds, _mm256_set1_epi8(1), [](__m256i sum, __m256i x) { return dot_bytes(sum, x, x); });
  return rounds * kChains * 32 * 2;
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
  if (bits <= 4) return multiply_quads<8>(rounds);
  if (bits == 5) return multiply_quads<4>(rounds);
  if (bits == 6) return multiply_quads<2>(rounds);
  run_chains(rounds, all_ones(), add_pair_products);
  return rounds * kChains * static_cast<int64_t>(sizeof(Integers));
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON
  run_chains(rounds, vreinterpretq_s32_s8(vdupq_n_s8(1)), [](int32x4_t sum, int32x4_t ones) {
    keep(ones);  // so that the compiler computes the products of each chain anew
    const int8x16_t x = vreinterpretq_s8_s32(ones);
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM
    return vmmlaq_s32(sum, x, x);
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_DOTPROD
    return vdotq_s32(sum, x, x);
#else
    const int16x8_t products = vmull_s8(vget_low_s8(x), vget_low_s8(x));
    return vpadalq_s16(sum, vmlal_high_s8(products, x, x));
#endif
  });
  return rounds * kChains * (QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM ? 32 : 16) * 2;
#else
  return multiply_f32(rounds);
#endif
}

#endif

int64_t multiply(DType dtype, int64_t rounds) {
  return dtype == DType::bf16 ? multiply_bf16(rounds) : multiply_f32(rounds);
}

}  // namespace

extern const LimitKernels limit_table;
const LimitKernels limit_table = {read, multiply, multiply_codes};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(LimitKernels, limit_kernels, limit_table)
