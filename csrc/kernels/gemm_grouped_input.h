// Rows of the input as the matrix products with grouped weights read them: 8-bit codes, one scale per row and group of
// the weight, and what takes the weight's zeros or minima off a sum.
#pragma once

#include <type_traits>

#include "gemm_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kPaddedRows = 16;  // tiles read whole tiles

// What a weight's form asks of a sum: a zero in the middle of the codes, a zero per group, or a minimum per group.
enum class Offset { middle, zeros, minima };

inline Offset offset_of(const GroupedForm& form) {
  if (form.offsets == GroupNumbers::none) return Offset::middle;
  return form.offsets == GroupNumbers::u8 ? Offset::zeros : Offset::minima;
}

// The rows of x after prepare(). Beside the codes, two numbers per row and group: the scale, and a factor of the
// weight's offset; with s the sum of the group's codes it is middle * s (an integer), -s, or -scale * s.
struct QuantizedRows {
  int64_t stride;  // an odd number of cache lines, so that rows fall into different cache sets
  int64_t num_groups;
  int64_t number_pitch;  // scales of rows lie together; from one group to the next it is an odd number of cache lines
  int8_t* codes;
  float* scales;
  float* offset_factors;
  int32_t* zero_sums;  // the same memory

  QuantizedRows(const GemmArgs& args, void* input) {
    const GroupedLayout layout(args.form, args.k);
    num_groups = layout.num_groups;
    stride = (ceil_div(num_groups * args.form.group_size, 64) | 1) * 64;
    codes = static_cast<int8_t*>(input);
    number_pitch = (padded_rows(args.m) / kPaddedRows | 1) * kPaddedRows;
    scales = reinterpret_cast<float*>(codes + padded_rows(args.m) * stride);
    offset_factors = scales + number_pitch * num_groups;
    zero_sums = reinterpret_cast<int32_t*>(offset_factors);
  }

  int64_t at(int64_t row, int64_t group) const { return group * number_pitch + row; }
  static int64_t padded_rows(int64_t m) { return round_up(m, kPaddedRows); }
  int64_t bytes(int64_t m) const { return padded_rows(m) * stride + 8 * number_pitch * num_groups; }
};

inline int64_t grouped_input_bytes(const GemmArgs& args) { return QuantizedRows(args, nullptr).bytes(args.m); }

// Elements [0, count) of one group of a row become codes in [-127, 127], the rest up to group_size zeros. A group with
// an element that is not finite gets the scale NaN, so that its whole row of the output says so. Returns the sum of the
// codes, which is exact: 127 * 65,536 < 2^24.
template <class T>
inline float quantize_group(const T* x, int64_t count, int64_t group_size, int8_t* codes, float* scale) {
  constexpr int W = F32::kWidth;
  const auto load_at = [&](int64_t i) {
    return i + W <= count ? load(x + i) : load_n(x + i, static_cast<int>(std::max<int64_t>(0, count - i)));
  };
  F32 largest = zero(), check = zero();
  for (int64_t i = 0; i < count; i += W) {
    const F32 v = load_at(i);
    largest = max(largest, max(v, zero() - v));
    check = fma(v, zero(), check);
  }
  const float max_abs = reduce_max(largest);
  const bool is_zero = max_abs < 1e-30f, is_finite = !has_nan(check);
  const F32 inverse = broadcast(is_zero ? 0 : 127 / max_abs);
  *scale = is_zero ? 0 : max_abs / 127;
  if (!is_finite) *scale = std::nanf("");
  F32 sums = zero();
  for (int64_t i = 0; i < group_size; i += W) {
    const F32 code = is_finite ? round(load_at(i) * inverse) : zero();
    store(codes + i, code);
    sums = sums + code;
  }
  return reduce_add(sums);
}

// One row, in the order of the weight's columns.
template <class T>
inline void quantize_row(const GemmArgs& args, const T* x, int64_t row, const QuantizedRows& rows) {
  const int64_t group_size = args.form.group_size;
  const Offset offset = offset_of(args.form);
  for (int64_t g = 0; g < rows.num_groups; ++g) {
    const int64_t first = g * group_size;
    float* const scale = rows.scales + rows.at(row, g);
    const float sum = quantize_group(x + first, std::min(group_size, args.k - first), group_size,
                                     rows.codes + row * rows.stride + first, scale);
    if (offset == Offset::middle) {
      rows.zero_sums[rows.at(row, g)] = static_cast<int32_t>(sum) * (1 << (args.form.bits - 1));
    } else {
      rows.offset_factors[rows.at(row, g)] = offset == Offset::minima ? -sum * *scale : -sum;
    }
  }
}

template <class T>
inline void quantize_rows(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const QuantizedRows rows(args, input);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    if (args.order != nullptr) {
      T* const ordered = static_cast<T*>(scratch(Scratch::gemm_row, args.k * sizeof(T)));
      for (int64_t i = 0; i < args.k; ++i) ordered[i] = x[args.order[i]];
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
