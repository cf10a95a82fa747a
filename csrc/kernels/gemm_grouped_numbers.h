// The numbers of groups, converted from the storage of each form of a grouped weight to floats, and the step from the
// exact integer sums of a group to the float sums. Factors stay integers: sums are exact over a super-group, and then
// this step follows.
#pragma once

#include "gemm_grouped_input.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
inline F32 load(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load(const e8m0* p) {
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_slli_epi32(exponents, 23), _mm512_set1_epi32(0x00400000)))};
}
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
inline F32 load(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load(const e8m0* p) {
  const __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_max_epu32(_mm256_slli_epi32(exponents, 23), _mm256_set1_epi32(0x00400000)))};
}
#else
inline F32 load(const e8m0* p) {
  float x[F32::kWidth];
  for (int i = 0; i < F32::kWidth; ++i) x[i] = to_f32(p[i]);
  return load(x);
}
#endif

// Numbers of one group and the columns of a panel.
struct DecodedGroup {
  alignas(64) float scales[kPanelWidth];
  float offsets[kPanelWidth];

  // For codes that are stored as multiples.
  void divide_codes(float by, Offset offset) {
    for (int64_t c = 0; c < kPanelWidth; c += F32::kWidth) {
      store(scales + c, load(scales + c) * broadcast(1 / by));
      if (offset == Offset::zeros) store(offsets + c, load(offsets + c) * broadcast(by));
    }
  }
};

constexpr int64_t kDecodedFloats = sizeof(DecodedGroup) / sizeof(float);

// Converts one kind of numbers of `count` groups, `group_bytes` apart, to floats; `to` is [groups][kDecodedFloats].
template <class T>
inline void decode_numbers(const char* numbers, int64_t group_bytes, int64_t count, float* to) {
  for (int64_t group = 0; group < count; ++group, numbers += group_bytes, to += kDecodedFloats) {
#pragma GCC unroll 16
    for (int64_t c = 0; c < kPanelWidth; c += F32::kWidth) {
      F32 x = load(reinterpret_cast<const T*>(numbers) + c);
      if constexpr (std::is_same_v<T, e8m0>) x = fma(x, zero(), x * broadcast(0.5f));  // infinity, of 255, becomes NaN
      store(to + c, x);
    }
  }
}

inline void decode_numbers(GroupNumbers kind, const char* numbers, int64_t group_bytes, int64_t count, float* to) {
  switch (kind) {
    case GroupNumbers::f32:
      return decode_numbers<float>(numbers, group_bytes, count, to);
    case GroupNumbers::f16:
      return decode_numbers<f16>(numbers, group_bytes, count, to);
    case GroupNumbers::u8:
      return decode_numbers<uint8_t>(numbers, group_bytes, count, to);
    case GroupNumbers::e8m0:
      return decode_numbers<e8m0>(numbers, group_bytes, count, to);
    case GroupNumbers::none:
    case GroupNumbers::i8:  // factors stay integers, see FactorNumbers
      return;
  }
}

// Groups [begin, end) of a panel.
inline void decode_groups(const GroupedForm& form, const GroupedLayout& layout, const char* panel, int64_t begin,
                          int64_t end, DecodedGroup* to) {
  const char* const numbers = panel + begin * layout.group_bytes;
  decode_numbers(form.scales, numbers, layout.group_bytes, end - begin, to->scales);
  decode_numbers(form.offsets, numbers + layout.scale_bytes, layout.group_bytes, end - begin, to->offsets);
}

// A vector of integer sums with the lanes of F32. load_factor_pairs gives a pair of 16 bits in each lane, as
// multiply_pairs takes it: a factor from `low` and one from `high`.
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
using I32 = __m512i;
inline I32 load_i32(const void* p) { return _mm512_loadu_si512(p); }
inline I32 load_factors(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_i32(void* p, I32 x) { _mm512_storeu_si512(p, x); }
inline I32 broadcast_i32(int32_t x) { return _mm512_set1_epi32(x); }
inline I32 add(I32 x, I32 y) { return _mm512_add_epi32(x, y); }
inline I32 subtract(I32 x, int32_t y) { return _mm512_sub_epi32(x, broadcast_i32(y)); }
inline I32 multiply(I32 x, I32 y) { return _mm512_mullo_epi32(x, y); }
inline I32 load_factor_pairs(const int8_t* low, const int8_t* high) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low)),
                y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
}
inline I32 multiply_pairs(I32 x, I32 y) { return _mm512_madd_epi16(x, y); }
inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x)}; }
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
using I32 = __m256i;
inline I32 load_i32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline I32 load_factors(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline void store_i32(void* p, I32 x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline I32 broadcast_i32(int32_t x) { return _mm256_set1_epi32(x); }
inline I32 add(I32 x, I32 y) { return _mm256_add_epi32(x, y); }
inline I32 subtract(I32 x, int32_t y) { return _mm256_sub_epi32(x, broadcast_i32(y)); }
inline I32 multiply(I32 x, I32 y) { return _mm256_mullo_epi32(x, y); }
inline I32 load_factor_pairs(const int8_t* low, const int8_t* high) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                y = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high));
  return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y));
}
inline I32 multiply_pairs(I32 x, I32 y) { return _mm256_madd_epi16(x, y); }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x)}; }
#else
using I32 = Vector4i;
inline I32 load_i32(const void* p) {
  I32 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline I32 load_factors(const int8_t* p) { return I32{p[0], p[1], p[2], p[3]}; }
inline void store_i32(void* p, I32 x) { std::memcpy(p, &x, sizeof(x)); }
inline I32 broadcast_i32(int32_t x) { return I32{x, x, x, x}; }
inline I32 add(I32 x, I32 y) { return x + y; }
inline I32 subtract(I32 x, int32_t y) { return x - y; }
inline I32 multiply(I32 x, I32 y) { return x * y; }
inline I32 load_factor_pairs(const int8_t* low, const int8_t* high) {
  return (load_factors(low) & 0xffff) | (load_factors(high) << 16);
}
inline I32 multiply_pairs(I32 x, I32 y) { return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16); }
inline F32 to_float(I32 x) { return {__builtin_convertvector(x, Vector4f)}; }
#endif
inline I32 zero_i32() { return broadcast_i32(0); }

inline I32 add_pairs(I32 sums, I32 x, I32 y) {
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
  return dot_pairs(sums, x, y);
#else
  return add(sums, multiply_pairs(x, y));
#endif
}

// The numbers of an input row for a group of the weight, see QuantizedRows.
struct RowNumbers {
  F32 scale, offset_factor;
  int32_t zero_sum;

  // An offset factor may be a zero sum: they share memory.
  RowNumbers(float row_scale, float row_factor)
      : scale(broadcast(row_scale)),
        offset_factor(broadcast(row_factor)),
        zero_sum(std::bit_cast<int32_t>(row_factor)) {}

  RowNumbers(const QuantizedRows& input, int64_t at) : RowNumbers(input.scales[at], input.offset_factors[at]) {}
};

// The float sums of a row with one more group. `sums` are its codes times the codes of the weight; `scales` and
// `offsets` belong to the group. kSigned: the codes of the weight had a sign, so the sums contain no part for the zero.
template <Offset kOffset, bool kSigned>
inline F32 add_group(F32 total, I32 sums, const RowNumbers& row, F32 scales, F32 offsets) {
  if constexpr (kOffset == Offset::middle && !kSigned) sums = subtract(sums, row.zero_sum);
  F32 sum = to_float(sums);
  if constexpr (kOffset == Offset::zeros) sum = fma(offsets, row.offset_factor, sum);
  total = fma(sum, row.scale * scales, total);
  if constexpr (kOffset == Offset::minima) total = fma(offsets, row.offset_factor, total);
  return total;
}

// Factors and halves of a panel in packed memory, from the first group of a super-group on.
struct FactorNumbers {
  const int8_t* factors;  // of a group: the scales' [64], then the minima's [64]
  const f16* halves;      // of a super-group, likewise
  int64_t group_bytes, super_bytes;

  FactorNumbers(const GroupedLayout& layout, const char* panel, int64_t super, int64_t super_size)
      : factors(reinterpret_cast<const int8_t*>(panel + super * super_size * layout.group_bytes)),
        halves(reinterpret_cast<const f16*>(panel + layout.supers_at + super * layout.super_bytes)),
        group_bytes(layout.group_bytes),
        super_bytes(layout.super_bytes) {}

  void next_super(int64_t super_size) {
    factors += super_size * group_bytes;
    halves += super_bytes / 2;
  }
};

// The integer sums of a super-group with one more group, exact like all of them.
template <Offset kOffset, bool kSigned>
inline I32 add_factor_group(I32 super, I32 sums, int32_t zero_sum, I32 factors) {
  if constexpr (kOffset == Offset::middle && !kSigned) sums = subtract(sums, zero_sum);
  return add(super, multiply(sums, factors));
}

// The factors of the minima of a super-group's groups, in pairs of 16-bit integers, for one vector of columns. kPairs:
// as many pairs, which then stay in registers; 0: a number that the compiler does not know.
template <int kPairs = 0>
struct MinimumPairs {
  int64_t count;
  I32 factors[kPairs > 0 ? kPairs : kMaxSuperElements / 16 / 2];

  MinimumPairs(const FactorNumbers& numbers, int64_t num_groups, int64_t column)
      : count(kPairs > 0 ? kPairs : ceil_div(num_groups, 2)) {
    const int8_t* from = numbers.factors + kPanelWidth + column;
    static constexpr int8_t kNone[kPanelWidth] = {};
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < (kPairs > 0 ? kPairs : count); ++pair, from += 2 * numbers.group_bytes)
      factors[pair] = load_factor_pairs(from, 2 * pair + 1 < num_groups ? from + numbers.group_bytes : kNone);
  }

  // The integer sum of the minima; `sums` belong to a row, see QuantizedRows.
  I32 times(const int16_t* sums, int64_t number_pitch) const {
    I32 total = zero_i32();
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < (kPairs > 0 ? kPairs : count); ++pair, sums += 2 * number_pitch) {
      int32_t both;
      std::memcpy(&both, sums, sizeof(both));
      total = add_pairs(total, factors[pair], broadcast_i32(both));
    }
    return total;
  }
};

// The float sums of a row with one more super-group. Its integer sums are below 2^31 and are rounded here, once.
template <Offset kOffset>
inline F32 add_super(F32 total, I32 sums, I32 minima, F32 row_scale, F32 scales, F32 minimum_scales) {
  F32 sum = to_float(sums) * scales;
  if constexpr (kOffset == Offset::minima) sum = fma(to_float(minima), minimum_scales, sum);
  return fma(sum, row_scale, total);
}

inline void prefetch_lines(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
