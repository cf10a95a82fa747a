// Codes of a quantized KV cache: conversion of float32 rows to codes, and of codes to vectors of float32 or bfloat16.
//
// e4m3 and e5m2 have no scale. Numbers above the range become the largest number. Infinities stay infinite in e5m2 and
// become NaN in e4m3. int8 has one scale per row, its largest magnitude / 127. A row that is not finite gets the scale
// NaN, so that reading it gives NaN.
#pragma once

#include <limits>

#include "fp8_to_bf16.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- codes to float32 ----

// load() gives the number of a code, without the scale of its row, divided by kUnit.
template <class C>
inline constexpr float kUnit = 1.0f;

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512

inline F32 decode(__m128i x, int8_t) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))}; }
inline F32 decode(__m128i x, e5m2) { return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 8))}; }
// Read as an f16, the bits mean the number * 2^-8, because the exponent bias of f16 is 15, and of e4m3 it is 7.
inline F32 decode(__m128i x, e4m3) {
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7), _mm256_set1_epi16(~0x4000));
  const __m512 y = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  const __m128i ones = _mm_set1_epi8(0x7f);
  const __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_and_si128(x, ones), ones);
  return {_mm512_mask_mov_ps(y, is_nan, _mm512_set1_ps(kNaN))};
}
template <class C>
  requires(sizeof(C) == 1)
inline F32 load(const C* p) {
  return decode(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), C{});
}
template <class C>
  requires(sizeof(C) == 1)
inline F32 load_n(const C* p, int n) {
  return decode(_mm_maskz_loadu_epi8(first_lanes(n), p), C{});
}

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2

// The numbers of FP8 codes as f16. Read as an f16, the bits of e4m3 mean the number * 2^-8, because the exponent bias
// of f16 is 15, and of e4m3 it is 7.
template <>
inline constexpr float kUnit<e4m3> = 256.0f;

// Converts 16 codes to f16. NaN of e4m3 becomes kNanHalf, and with_nans() turns kNanHalf into NaN.
constexpr int16_t kHalfBits = ~0x407f, kNanHalf = 0x3f80;
inline __m256i halves(__m128i codes, e5m2) { return _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 8); }
inline __m256i halves(__m128i codes, e4m3) {
  return _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(kHalfBits));
}
inline __m256i with_nans(__m256i halves) {
  const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7fff));
  const __m256i is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(kNanHalf));
  return _mm256_or_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
}
// Does the same for words with a code in the upper byte. The lower byte is 0 for e5m2; for e4m3 it may be any.
inline __m256i halves_of_words(__m256i words, e5m2) { return words; }
inline __m256i halves_of_words(__m256i words, e4m3) {
  return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(kHalfBits));
}

inline F32 decode(__m128i x, int8_t) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x))}; }
inline F32 decode(__m128i x, e5m2) { return {_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(x), 8))}; }
inline F32 decode(__m128i x, e4m3) { return {_mm256_cvtph_ps(_mm256_castsi256_si128(with_nans(halves(x, e4m3{}))))}; }
template <class C>
  requires(sizeof(C) == 1)
inline F32 load(const C* p) {
  return decode(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), C{});
}

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON

inline F32 decode(uint8x8_t x, int8_t) {
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x)))))};
}
inline F32 decode(uint8x8_t x, e5m2) { return {vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(vshll_n_u8(x, 8))))}; }
// Read as an f16, the bits mean the number * 2^-8, because the exponent bias of f16 is 15, and of e4m3 it is 7.
inline F32 decode(uint8x8_t x, e4m3) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(x));
  const int16x8_t half = vandq_s16(vshlq_n_s16(wide, 7), vdupq_n_s16(~0x4000));
  const float32x4_t y = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_s16(half))), 256.0f);
  const int32x4_t magnitude = vandq_s32(vmovl_s16(vget_low_s16(wide)), vdupq_n_s32(0x7f));
  return {vbslq_f32(vceqq_s32(magnitude, vdupq_n_s32(0x7f)), vdupq_n_f32(kNaN), y)};
}
template <class C>
  requires(sizeof(C) == 1)
inline F32 load(const C* p) {
  return decode(load_bytes(p), C{});
}

#endif

// ---- codes to bfloat16 ----
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

// Converts 32 codes. FP8 codes have no scale.
template <class C>
inline __m512i to_bf16(__m256i x, C, float) {
  const __m512i every_8_twice = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
  const Bf16Halves halves = bf16_halves(_mm512_permutexvar_epi64(every_8_twice, _mm512_castsi256_si512(x)), C{});
  return _mm512_unpacklo_epi8(halves.lower, halves.upper);
}

inline __m512i to_bf16(__m256i x, int8_t, float scale) {
  const __m512 scales = _mm512_set1_ps(scale);
  const F32 low = decode(_mm256_castsi256_si128(x), int8_t{}), high = decode(_mm256_extracti128_si256(x, 1), int8_t{});
  return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_mul_ps(high.v, scales), _mm512_mul_ps(low.v, scales)));
}

#endif

// ---- float32 to codes ----

// The bits of the nearest float with kMantissa bits of mantissa and an exponent with this bias, ties to even.
template <int kMantissa, int kBias>
inline uint32_t small_float_bits(float x, float largest, uint32_t infinity, uint32_t nan) {
  constexpr int kShift = 23 - kMantissa;
  // For subnormal results: the addition pushes bits below the smallest step out of the mantissa.
  constexpr float kMagic = std::bit_cast<float>(static_cast<uint32_t>(127 + kShift + 1 - kBias) << 23);
  const uint32_t bits = std::bit_cast<uint32_t>(x), exact = bits & 0x7fffffffu;
  const uint32_t limit = std::bit_cast<uint32_t>(largest), magnitude = exact < limit ? exact : limit;
  const uint32_t half = (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1u);
  const uint32_t usual = (magnitude + half - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kMagic) & ((1u << 23) - 1);
  uint32_t code = magnitude < static_cast<uint32_t>(128 - kBias) << 23 ? small : usual;
  code = exact == 0x7f800000u ? infinity : code;
  code = exact > 0x7f800000u ? nan : code;
  return code | (bits >> 24 & 0x80u);
}

inline void encode_row(const float* x, int dim, e4m3* out, float*, int64_t) {
  for (int i = 0; i < dim; ++i) {
    out[i].bits = static_cast<uint8_t>(small_float_bits<3, 7>(x[i], 448.0f, 0x7f, 0x7f));
  }
}
inline void encode_row(const float* x, int dim, e5m2* out, float*, int64_t) {
  for (int i = 0; i < dim; ++i) {
    out[i].bits = static_cast<uint8_t>(small_float_bits<2, 15>(x[i], 57344.0f, 0x7c, 0x7e));
  }
}
// Encodes a row. The scale goes to scales[row]. x is read in whole vectors, so zeros must follow its end.
inline void encode_row(const float* x, int dim, int8_t* out, float* scales, int64_t row) {
  constexpr float kSmallestRow = 1e-30f;  // rows of smaller numbers get codes 0, because 127 / largest could overflow
  F32 magnitudes = zero(), zeros = zero();
  for (int i = 0; i < dim; i += F32::kWidth) {
    const F32 y = load(x + i);
    magnitudes = max(magnitudes, max(y, zero() - y));
    zeros = fma(y, zero(), zeros);  // NaN for values that are not finite
  }
  const float largest = reduce_max(magnitudes), nan_or_zero = reduce_add(zeros);
  const bool is_finite = nan_or_zero == 0.0f, is_used = is_finite && largest >= kSmallestRow;
  scales[row] = is_used ? largest / 127.0f : is_finite ? 0.0f : kNaN;
  const F32 inverse = broadcast(is_used ? 127.0f / largest : 0.0f);
  for (int i = 0; i < dim; i += F32::kWidth) {
    // This order of operands turns NaN into a number.
    const F32 y = min(max(round(load(x + i) * inverse), broadcast(-127.0f)), broadcast(127.0f));
    store_part(out + i, y, dim - i);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
