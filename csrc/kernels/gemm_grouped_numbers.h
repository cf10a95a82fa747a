// The numbers of groups, which every form of a grouped weight stores in its own way, brought to floats, and the step
// from the exact integer sums of a group to its share of the float sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm_grouped_input.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
inline F32 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
inline F32 load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
#endif

// Of one group and the columns of a panel.
struct DecodedGroup {
  alignas(64) float scales[kPanelWidth];
  float offsets[kPanelWidth];

  // For codes that come as multiples of themselves.
  void divide_codes(float by, Offset offset) {
    for (int64_t c = 0; c < kPanelWidth; c += F32::kWidth) {
      store(scales + c, load(scales + c) * broadcast(1 / by));
      if (offset == Offset::zeros) store(offsets + c, load(offsets + c) * broadcast(by));
    }
  }
};

constexpr int64_t kDecodedFloats = sizeof(DecodedGroup) / sizeof(float);

// Groups [begin, end) of a panel, and where one kind of their numbers lies.
struct StoredNumbers {
  const char* numbers;  // of group 0, group_bytes apart
  const char* halves;   // of super-group 0, super_bytes apart: what factors are multiplied with
  int64_t group_bytes, super_bytes, super_size;
  int64_t begin, end;
};

// To floats, `to` is [groups][kDecodedFloats]. Halves are converted once for all groups that share them.
template <class T>
inline void decode_numbers(const StoredNumbers& stored, float* to) {
  constexpr int W = F32::kWidth, kVectors = kPanelWidth / W;
  for (int64_t group = stored.begin, next; group < stored.end; group = next) {
    const int64_t super = group / stored.super_size;
    next = std::min(stored.end, (super + 1) * stored.super_size);
    F32 halves[kVectors];
    if constexpr (std::is_same_v<T, int8_t>) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v)
        halves[v] = load(reinterpret_cast<const f16*>(stored.halves + super * stored.super_bytes) + v * W);
    }
    for (; group < next; ++group, to += kDecodedFloats) {
      const T* const from = reinterpret_cast<const T*>(stored.numbers + group * stored.group_bytes);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const F32 x = load(from + v * W);
        if constexpr (std::is_same_v<T, int8_t>) {
          store(to + v * W, x * halves[v]);
        } else {
          store(to + v * W, x);
        }
      }
    }
  }
}

inline void decode_numbers(GroupNumbers numbers, const StoredNumbers& stored, float* to) {
  switch (numbers) {
    case GroupNumbers::none:
      return;
    case GroupNumbers::f32:
      return decode_numbers<float>(stored, to);
    case GroupNumbers::f16:
      return decode_numbers<f16>(stored, to);
    case GroupNumbers::i8:
      return decode_numbers<int8_t>(stored, to);
    case GroupNumbers::u8:
      return decode_numbers<uint8_t>(stored, to);
  }
}

inline void decode_groups(const GroupedForm& form, const GroupedLayout& layout, const char* panel, int64_t begin,
                          int64_t end, DecodedGroup* to) {
  StoredNumbers stored{.numbers = panel,
                       .halves = panel + layout.supers_at,
                       .group_bytes = layout.group_bytes,
                       .super_bytes = layout.super_bytes,
                       .super_size = form.super_size,
                       .begin = begin,
                       .end = end};
  decode_numbers(form.scales, stored, to->scales);
  stored.numbers += layout.scale_bytes;
  stored.halves += layout.super_scale_bytes;
  decode_numbers(form.offsets, stored, to->offsets);
}

// As many integer sums as F32 has lanes.
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
using I32 = __m512i;
inline I32 load_i32(const void* p) { return _mm512_loadu_si512(p); }
inline I32 subtract(I32 x, int32_t y) { return _mm512_sub_epi32(x, _mm512_set1_epi32(y)); }
inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x)}; }
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
using I32 = __m256i;
inline I32 load_i32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline I32 subtract(I32 x, int32_t y) { return _mm256_sub_epi32(x, _mm256_set1_epi32(y)); }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x)}; }
#else
using I32 = Vector4i;
inline I32 load_i32(const void* p) {
  I32 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline I32 subtract(I32 x, int32_t y) { return x - y; }
inline F32 to_float(I32 x) { return {__builtin_convertvector(x, Vector4f)}; }
#endif

// What a row of the input has for a group of the weight, see QuantizedRows.
struct RowNumbers {
  F32 scale, offset_factor;
  int32_t zero_sum;

  RowNumbers(const QuantizedRows& input, int64_t at)
      : scale(broadcast(input.scales[at])),
        offset_factor(broadcast(input.offset_factors[at])),
        zero_sum(input.zero_sums[at]) {}
};

// The float sums of a row with one more group: `sums` are its codes times those of the weight, `scales` and `offsets`
// the group's. kSigned: the codes of the weight had a sign, so that no share of the zero is in the sums.
template <Offset kOffset, bool kSigned>
inline F32 add_group(F32 total, I32 sums, const RowNumbers& row, F32 scales, F32 offsets) {
  if constexpr (kOffset == Offset::middle && !kSigned) sums = subtract(sums, row.zero_sum);
  F32 sum = to_float(sums);
  if constexpr (kOffset == Offset::zeros) sum = fma(offsets, row.offset_factor, sum);
  total = fma(sum, row.scale * scales, total);
  if constexpr (kOffset == Offset::minima) total = fma(offsets, row.offset_factor, total);
  return total;
}

inline void prefetch_lines(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
