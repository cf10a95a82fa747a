// Rows of the input in the form of the matrix products with grouped weights: 8-bit codes, one scale per row and group
// of the weight (with factors: super-group), and numbers for the weight's zeros or minima.
#pragma once

#include <type_traits>

#include "gemm_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kPaddedRows = 16;  // tiles read whole tiles

// Tiles keep sums of products in 16 bits, see gemm_grouped_words.h.
constexpr bool kHasWords = QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2 || QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX512;
constexpr int64_t kPieceSize = 16;  // elements that share a sum for the zero there

// The correction of a sum for a weight's form: a zero in the middle of the codes, a zero per group, or a minimum per
// group.
enum class Offset { middle, zeros, minima };

inline Offset offset_of(const GroupedForm& form) {
  if (form.offsets == GroupNumbers::none) return Offset::middle;
  return form.offsets == GroupNumbers::u8 ? Offset::zeros : Offset::minima;
}

// The rows of x after prepare(). A row has codes and two kinds of numbers: scales, one per group (with factors: per
// super-group), and factors for the weight's offsets. With s the sum of a group's codes, the factor of each group is
// middle * s (an integer), -s, or -scale * s. With factors in the weight it is -s as a 16-bit integer, in pairs of two
// groups of a super-group, which is the form of vpdpwssd. With factors and a zero in the middle, tiles with sums in 16
// bits want -middle * s of each piece, in pairs too: of the first two and of the last two elements of its quads.
struct QuantizedRows {
  int64_t stride;  // an odd number of cache lines, so that rows fall into different cache sets
  int64_t num_groups;
  int64_t scale_groups, num_scales;  // groups that share a scale
  int64_t sums_per_scale;            // numbers for the offsets beside each scale
  int64_t number_pitch;  // numbers from one group to the next, an odd number of cache lines; rows lie together
  int8_t* codes;
  float* scales;
  float* offset_factors;
  int32_t* zero_sums;     // the same memory
  int16_t* minimum_sums;  // the same, in pairs
  bool has_piece_sums;    // and these pairs belong to pieces

  QuantizedRows(const GemmArgs& args, void* input) {
    const GroupedForm& form = args.weight.form;
    const GroupedLayout layout(form, args.weight.k);
    const bool has_pairs = form.has_factors() && offset_of(form) == Offset::minima;
    num_groups = layout.num_groups;
    scale_groups = form.has_factors() ? form.super_size : 1;
    num_scales = ceil_div(num_groups, scale_groups);
    has_piece_sums = kHasWords && form.has_factors() && offset_of(form) == Offset::middle && form.bits <= 6;
    sums_per_scale = has_piece_sums ? scale_groups * form.group_size / kPieceSize
                     : has_pairs    ? ceil_div(scale_groups, 2)
                                    : scale_groups;
    stride = (ceil_div(num_groups * form.group_size, 64) | 1) * 64;
    codes = static_cast<int8_t*>(input);
    number_pitch = (padded_rows(args.m) / kPaddedRows | 1) * kPaddedRows;
    scales = reinterpret_cast<float*>(codes + padded_rows(args.m) * stride);
    offset_factors = scales + number_pitch * num_scales;
    zero_sums = reinterpret_cast<int32_t*>(offset_factors);
    minimum_sums = reinterpret_cast<int16_t*>(offset_factors);
  }

  // the place of the scale, or of the number for offsets, with this index
  int64_t at(int64_t row, int64_t index) const { return index * number_pitch + row; }
  int64_t num_sums() const { return num_scales * sums_per_scale; }
  static int64_t padded_rows(int64_t m) { return round_up(m, kPaddedRows); }
  int64_t bytes(int64_t m) const { return padded_rows(m) * stride + 4 * number_pitch * (num_scales + num_sums()); }
};

inline int64_t grouped_input_bytes(const GemmArgs& args) { return QuantizedRows(args, nullptr).bytes(args.m); }

// Some elements of a row, with zeros after the last.
template <class T>
struct Elements {
  const T* x;
  int64_t count;

  F32 load_at(int64_t i) const {
    return i + F32::kWidth <= count ? load(x + i) : load_n(x + i, static_cast<int>(std::max<int64_t>(0, count - i)));
  }
};

// The conversion of elements to codes in [-127, 127] and back. With an element that is not finite the scale is NaN, so
// that the whole row of the output is NaN, and codes are zeros.
struct InputScale {
  float scale;
  F32 inverse;
  bool is_finite;

  template <class T>
  explicit InputScale(const Elements<T>& elements) {
    F32 largest = zero(), check = zero();
    for (int64_t i = 0; i < elements.count; i += F32::kWidth) {
      const F32 v = elements.load_at(i);
      largest = max(largest, max(v, zero() - v));
      check = fma(v, zero(), check);
    }
    const float max_abs = reduce_max(largest);
    const bool is_zero = max_abs < 1e-30f;
    is_finite = !has_nan(check);
    inverse = broadcast(is_zero ? 0 : 127 / max_abs);
    scale = is_zero ? 0 : max_abs / 127;
    if (!is_finite) scale = std::nanf("");
  }
};

// `size` elements become codes. Returns their sum, which is exact: 127 * 65,536 < 2^24.
template <class T>
inline float quantize_group(const Elements<T>& elements, int64_t size, const InputScale& scale, int8_t* codes) {
  F32 sums = zero();
  for (int64_t i = 0; i < size; i += F32::kWidth) {
    const F32 code = scale.is_finite ? round(elements.load_at(i) * scale.inverse) : zero();
    store(codes + i, code);
    sums = sums + code;
  }
  return reduce_add(sums);
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
// -middle times the sum of the first two elements of the four quads of a piece, and of their last two: with codes up to
// 6 bits at least -32 * 127 * 8 > -2^15.
inline int32_t piece_sums(const int8_t* codes, int middle) {
  const __m128i piece = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), piece);
  const __m128i half = _mm_add_epi16(pairs, _mm_srli_si128(pairs, 8));
  const __m128i sums = _mm_add_epi16(half, _mm_srli_si128(half, 4));
  return _mm_cvtsi128_si32(_mm_mullo_epi16(sums, _mm_set1_epi16(static_cast<int16_t>(-middle))));
}
#endif

// One row, in the order of the weight's columns.
template <class T>
inline void quantize_row(const GemmArgs& args, const T* x, int64_t row, const QuantizedRows& rows) {
  const int64_t group_size = args.weight.form.group_size;
  const Offset offset = offset_of(args.weight.form);
  int8_t* const codes = rows.codes + row * rows.stride;
  for (int64_t s = 0; s < rows.num_scales; ++s) {
    const int64_t first_group = s * rows.scale_groups, begin = first_group * group_size;
    const int64_t num_groups = std::min(rows.scale_groups, rows.num_groups - first_group);
    const InputScale scale(Elements<T>{x + begin, std::min(num_groups * group_size, args.weight.k - begin)});
    rows.scales[rows.at(row, s)] = scale.scale;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t first = begin + g * group_size;
      const float sum = quantize_group(Elements<T>{x + first, std::min(group_size, args.weight.k - first)}, group_size,
                                       scale, codes + first);
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
      if (rows.has_piece_sums) {
        const int64_t pieces = group_size / kPieceSize;
        int32_t* const sums = rows.zero_sums + rows.at(row, s * rows.sums_per_scale + g * pieces);
        for (int64_t i = 0; i < pieces; ++i)
          sums[i * rows.number_pitch] = piece_sums(codes + first + i * kPieceSize, args.weight.form.middle());
        continue;
      }
#endif
      if (offset == Offset::middle) {
        rows.zero_sums[rows.at(row, first_group + g)] = static_cast<int32_t>(sum) * args.weight.form.middle();
      } else if (args.weight.form.has_factors()) {
        int16_t* const pair = rows.minimum_sums + 2 * rows.at(row, s * rows.sums_per_scale + g / 2);
        pair[g % 2] = static_cast<int16_t>(-sum);
        if (g % 2 == 0) pair[1] = 0;
      } else {
        rows.offset_factors[rows.at(row, first_group + g)] = offset == Offset::minima ? -sum * scale.scale : -sum;
      }
    }
  }
}

template <class T>
inline void quantize_rows(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const QuantizedRows rows(args, input);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = row_of_x<T>(args, row);
    if (args.weight.order != nullptr) {
      T* const ordered = static_cast<T*>(scratch(Scratch::gemm_row, args.weight.k * sizeof(T)));
      for (int64_t i = 0; i < args.weight.k; ++i) ordered[i] = x[args.weight.order[i]];
      x = ordered;
    }
    quantize_row(args, x, row, rows);
  }
}

inline void grouped_prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  with_type_of(args.dtype, [&]<class T>(T) { quantize_rows<T>(args, row_begin, row_end, input); });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
