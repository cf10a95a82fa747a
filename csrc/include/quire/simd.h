// One float vector type per instruction set, for every kernel. F32 has loads and stores that convert from and to float,
// bfloat16 and half, arithmetic, reductions and exp. Its width is F32::kWidth (4, 8 or 16).
//
// load(p) / store(p, v) move kWidth elements. load_n(p, n, fill) / store_n(p, v, n) move the first n elements (0 <= n
// <= kWidth) and touch no other memory. Stores to int8_t round to the nearest integers of [-128, 127]. Include this
// header only from csrc/kernels, because its content depends on QUIRE_ISA.
#pragma once

#include <cmath>
#include <cstring>

#include "quire/dtype.h"
#include "quire/isa.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
#include <immintrin.h>
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON
#include <arm_neon.h>
#endif

namespace quire::QUIRE_ISA {
namespace {

// With 32 vector registers, kernels hold more sums in registers.
constexpr bool kHas32Registers = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512 || QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON;

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512

struct F32 {
  static constexpr int kWidth = 16;
  __m512 v;
};

inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }

inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 ldexp(F32 a, F32 n) { return {_mm512_scalef_ps(a.v, n.v)}; }  // a * 2^n, n integral
// In each lane: a < b ? yes : no.
inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Bit i is set if a < b in lane i.
inline uint32_t mask_less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
inline bool has_nan(F32 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
inline float reduce_add(F32 a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(F32 a) { return _mm512_reduce_max_ps(a.v); }

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline __m512 widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline __m256i narrow_bf16(__m512 x) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  // vcvtneps2bf16 treats subnormals as zero. They are below 2^-126, smaller than any number that a model needs.
  return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet));
#endif
}

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load(const bf16* p) { return {widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline F32 load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
// The first and the second elements of kWidth pairs.
inline F32 load_even(const bf16* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline F32 load_odd(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)))};
}
inline F32 load_n(const float* p, int n, float fill = 0) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first_lanes(n), p)};
}
inline F32 load_n(const bf16* p, int n, float fill = 0) {
  const __m512 x = widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), first_lanes(n), x)};
}
inline F32 load_n(const f16* p, int n, float fill = 0) {
  const __m512 x = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), first_lanes(n), x)};
}

inline __m256i narrow_f16(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline void store(bf16* p, F32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a.v)); }
inline void store(f16* p, F32 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_f16(a.v)); }
inline __m128i narrow_int8(__m512 x) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)); }
inline void store(int8_t* p, F32 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_int8(a.v)); }
inline void store_n(float* p, F32 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline void store_n(bf16* p, F32 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a.v)); }
inline void store_n(f16* p, F32 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_f16(a.v)); }
inline void store_n(int8_t* p, F32 a, int n) { _mm_mask_storeu_epi8(p, first_lanes(n), narrow_int8(a.v)); }
// Stores the lanes with a set bit side by side, and returns their number. It may overwrite up to kWidth floats at p.
inline int store_compressed(float* p, F32 a, uint32_t mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), a.v));
  return __builtin_popcount(mask);
}

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2

struct F32 {
  static constexpr int kWidth = 8;
  __m256 v;
};

inline F32 zero() { return {_mm256_setzero_ps()}; }
inline F32 broadcast(float x) { return {_mm256_set1_ps(x)}; }

inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32 round(F32 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n, n integral in [-252, 254]. Two factors are used, so that neither leaves the range of normal exponents.
inline F32 ldexp(F32 a, F32 n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, low), high)};
}
inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline uint32_t mask_less(F32 a, F32 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
}
inline bool has_nan(F32 a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)) != 0; }
inline float reduce_add(F32 a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float reduce_max(F32 a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline __m128i narrow_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i top = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline __m128i narrow_f16(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F32 load(const bf16* p) { return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline F32 load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
// The first and the second elements of kWidth pairs.
inline __m256i load_words(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline F32 load_even(const bf16* p) { return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16))}; }
inline F32 load_odd(const bf16* p) {
  return {_mm256_castsi256_ps(_mm256_and_si256(load_words(p), _mm256_set1_epi32(-65536)))};
}
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
inline void store(bf16* p, F32 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a.v)); }
inline void store(f16* p, F32 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_f16(a.v)); }
inline void store(int8_t* p, F32 a) {
  const __m256i words = _mm256_cvtps_epi32(a.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
}

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
// In each lane: sums + the products of four bytes without sign and four bytes with sign.
inline __m256i dot_bytes(__m256i sums, __m256i unsigned_bytes, __m256i signed_bytes) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(sums, unsigned_bytes, signed_bytes);
#else  // QUIRE_EVEX_VNNI of CMakeLists.txt
  return _mm256_dpbusd_epi32(sums, unsigned_bytes, signed_bytes);
#endif
}

// In each lane: sums + the products of two pairs of 16 bits.
inline __m256i dot_pairs(__m256i sums, __m256i x, __m256i y) {
#ifdef __AVXVNNI__
  return _mm256_dpwssd_avx_epi32(sums, x, y);
#else  // QUIRE_EVEX_VNNI of CMakeLists.txt
  return _mm256_dpwssd_epi32(sums, x, y);
#endif
}
#endif

// For every mask: the numbers of its set bits, one byte each.
struct SetBits {
  uint64_t of[256] = {};
  constexpr SetBits() {
    for (int mask = 0; mask < 256; ++mask) {
      for (int bit = 7; bit >= 0; --bit) {
        if (mask >> bit & 1) of[mask] = of[mask] << 8 | static_cast<uint64_t>(bit);
      }
    }
  }
};
inline constexpr SetBits kSetBits;
inline int store_compressed(float* p, F32 a, uint32_t mask) {
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kSetBits.of[mask])));
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(a.v, lanes));
  return __builtin_popcount(mask);
}

#else

// Compiler vectors: SSE2 or NEON where the target has them, and NEON by name where that says more. GCC and Clang.
typedef float Vector4f __attribute__((vector_size(16)));
typedef int32_t Vector4i __attribute__((vector_size(16)));
typedef uint32_t Vector4u __attribute__((vector_size(16)));

struct F32 {
  static constexpr int kWidth = 4;
  Vector4f v;
};

inline F32 zero() { return {Vector4f{0, 0, 0, 0}}; }
inline F32 broadcast(float x) { return {Vector4f{x, x, x, x}}; }

inline F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
inline F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
inline F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
inline F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
inline F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
inline F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
// a * 2^n, n integral in [-252, 254], see the AVX2 variant.
inline F32 ldexp(F32 a, F32 n) {
  const Vector4i whole = __builtin_convertvector(n.v, Vector4i);
  const Vector4i half = whole >> 1;
  const Vector4i low = (half + 127) << 23, high = (whole - half + 127) << 23;
  return {a.v * reinterpret_cast<Vector4f>(low) * reinterpret_cast<Vector4f>(high)};
}
inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) { return {a.v < b.v ? yes.v : no.v}; }
inline float reduce_add(F32 a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float reduce_max(F32 a) {
  const float x = a.v[0] > a.v[2] ? a.v[0] : a.v[2], y = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return x > y ? x : y;
}

// The first and the second elements of kWidth pairs.
inline Vector4i load_words(const bf16* p) {
  static_assert(std::endian::native == std::endian::little, "the first of a pair is the low half of a word");
  Vector4i words;
  std::memcpy(&words, p, sizeof(words));
  return words;
}
inline F32 load_even(const bf16* p) { return {reinterpret_cast<Vector4f>(load_words(p) << 16)}; }
inline F32 load_odd(const bf16* p) { return {reinterpret_cast<Vector4f>(load_words(p) & -65536)}; }

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON

inline F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline F32 round(F32 a) { return {vrndnq_f32(a.v)}; }
inline uint32_t mask_less(F32 a, F32 b) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcltq_f32(a.v, b.v), bits));
}
inline bool has_nan(F32 a) { return vminvq_u32(vceqq_f32(a.v, a.v)) == 0; }

inline uint16x4_t narrow_bf16(float32x4_t x) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  const uint32x4_t u = vreinterpretq_u32_f32(x), top = vshrq_n_u32(u, 16);
  const uint32x4_t odd = vandq_u32(top, vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  const uint32x4_t quiet = vorrq_u32(top, vdupq_n_u32(0x40));
  return vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet));
#endif
}

inline F32 load(const float* p) { return {vld1q_f32(p)}; }
inline F32 load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16))}; }
inline F32 load(const f16* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))}; }
// Four elements of 8 bits in the lower half.
inline uint8x8_t load_bytes(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof(word));
  return vcreate_u8(word);
}
inline F32 load(const uint8_t* p) { return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_bytes(p)))))}; }

inline void store(float* p, F32 a) { vst1q_f32(p, a.v); }
inline void store(bf16* p, F32 a) { vst1_u16(&p->bits, narrow_bf16(a.v)); }
inline void store(f16* p, F32 a) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(a.v))); }
inline void store(int8_t* p, F32 a) {
  const int16x4_t halves = vqmovn_s32(vcvtnq_s32_f32(a.v));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(halves, halves));
  std::memcpy(p, &bytes, 4);
}

// For every mask: the bytes of its set lanes.
struct SetLanes {
  uint8_t of[16][16] = {};
  constexpr SetLanes() {
    for (int mask = 0; mask < 16; ++mask) {
      int n = 0;
      for (int lane = 0; lane < 4; ++lane) {
        for (int byte = 0; (mask >> lane & 1) && byte < 4; ++byte)
          of[mask][n++] = static_cast<uint8_t>(4 * lane + byte);
      }
    }
  }
};
inline constexpr SetLanes kSetLanes;
inline int store_compressed(float* p, F32 a, uint32_t mask) {
  vst1q_f32(p, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(a.v), vld1q_u8(kSetLanes.of[mask]))));
  return __builtin_popcount(mask);
}

#else

inline F32 fma(F32 a, F32 b, F32 c) {
#ifdef __FP_FAST_FMAF
  F32 r;
  for (int i = 0; i < 4; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
#else
  return {a.v * b.v + c.v};  // rounded twice, the same everywhere (-ffp-contract=off)
#endif
}
// Rounds to nearest even for |a| < 2^22: the addition pushes the fraction out of the mantissa.
inline F32 round(F32 a) {
  const F32 magic = broadcast(0x1.8p23f);
  return (a + magic) - magic;
}
inline uint32_t mask_less(F32 a, F32 b) {
  const Vector4i less = a.v < b.v;
  return static_cast<uint32_t>((less[0] & 1) | (less[1] & 2) | (less[2] & 4) | (less[3] & 8));
}
inline bool has_nan(F32 a) {
  const Vector4i is_nan = a.v != a.v;
  return (is_nan[0] | is_nan[1] | is_nan[2] | is_nan[3]) != 0;
}

template <class T>
inline F32 load(const T* p) {
  return {Vector4f{to_f32(p[0]), to_f32(p[1]), to_f32(p[2]), to_f32(p[3])}};
}
template <class T>
inline void store(T* p, F32 a) {
  for (int i = 0; i < 4; ++i) p[i] = from_f32<T>(a.v[i]);
}
inline void store(int8_t* p, F32 a) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<int8_t>(std::lrint(a.v[i]));
}
inline int store_compressed(float* p, F32 a, uint32_t mask) {
  int n = 0;
  for (int i = 0; i < 4; ++i) {
    p[n] = a.v[i];
    n += static_cast<int>(mask >> i & 1);
  }
  return n;
}

#endif

#endif

#if QUIRE_ISA_LEVEL < QUIRE_LEVEL_AVX512

template <class T>
inline F32 load_n(const T* p, int n, float fill = 0) {
  float lanes[F32::kWidth];
  for (int i = 0; i < F32::kWidth; ++i) lanes[i] = i < n ? to_f32(p[i]) : fill;
  return load(lanes);
}
template <class T>
inline void store_n(T* p, F32 a, int n) {
  T lanes[F32::kWidth];
  store(lanes, a);
  std::memcpy(p, lanes, sizeof(T) * n);
}

#endif

// load_part / store_part move kWidth elements, or fewer at the end of a row. `left` is the number of elements from p to
// the end of the row. It is at least 1.
template <class T>
inline F32 load_part(const T* p, int64_t left, float fill = 0) {
  return left >= F32::kWidth ? load(p) : load_n(p, static_cast<int>(left), fill);
}
template <class T>
inline void store_part(T* p, F32 a, int64_t left) {
  if (left >= F32::kWidth) {
    store(p, a);
  } else {
    store_n(p, a, static_cast<int>(left));
  }
}

// y, or 0 if x < limit. exp and exp2 use it to return 0 in place of subnormal numbers, which cost over 100 cycles on
// many CPUs.
inline F32 zero_below(F32 x, float limit, F32 y) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), y.v)};
#else
  return select_less(x, broadcast(limit), zero(), y);
#endif
}

// e^x with a relative error under 2e-7; 0 below -87, infinity above 88.73, NaN for NaN. Range reduction to [-ln2/2,
// ln2/2] and the degree-6 Taylor-like minimax polynomial of Cephes expf (S. Moshier, netlib.org/cephes).
inline F32 exp(F32 x) {
  const F32 y = max(broadcast(-87.0f), min(broadcast(89.0f), x));  // this order of operands keeps NaN
  const F32 n = round(y * broadcast(1.44269504088896341f));
  F32 r = fma(n, broadcast(-0.693359375f), y);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F32 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  return zero_below(x, -87.0f, ldexp(p, n));
}

// 2^x for x <= 127 with a relative error under 2e-7; exactly 1 at 0, 0 below -125, NaN for NaN (without payload bits).
// Adding 1.5 * 2^23 rounds x to an integer in the low bits, which are added to the exponent of 2^(rest). The
// minimax polynomial on [-1/2, 1/2] has degree 5, is exact at 0, and has a relative error of 9.2e-8 (Lawson's
// iteratively reweighted least squares).
inline F32 exp2(F32 x) {
  const F32 magic = broadcast(0x1.8p23f);
  const F32 shifted = x + magic;
  const F32 f = x - (shifted - magic);
  F32 p = broadcast(1.326472731307149e-3f);
  p = fma(p, f, broadcast(9.671512991189957e-3f));
  p = fma(p, f, broadcast(5.550733581185341e-2f));
  p = fma(p, f, broadcast(2.402224242687225e-1f));
  p = fma(p, f, broadcast(6.931470036506653e-1f));
  p = fma(p, f, broadcast(1.0f));
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(keep, _mm512_castps_si512(p.v), exponent))};
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  const F32 y{_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.v), exponent))};
  return zero_below(x, -125.0f, y);
#else
  const Vector4u exponent = std::bit_cast<Vector4u>(shifted.v) << 23;
  return zero_below(x, -125.0f, {std::bit_cast<Vector4f>(std::bit_cast<Vector4u>(p.v) + exponent)});
#endif
}

// tanh(x) with an absolute error under 2e-7.
inline F32 tanh(F32 x) {
  const F32 one = broadcast(1.0f), two = broadcast(2.0f);
  return one - two / (exp(two * x) + one);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
