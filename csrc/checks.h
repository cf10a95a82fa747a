// Checks of the numbers in tensors that lead to memory or set the length of a loop. Python checks shapes, dtypes and
// strides (kernels/ops.py). The numbers are checked here at every call, also if a recorded call is repeated.
//
// std::out_of_range becomes IndexError, std::invalid_argument ValueError.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace quire {

// A text or a number as text. It uses no stream, because the constructor of a stream needs a newer libstdc++
// (QUIRE_PORTABLE).
template <class Part>
std::string text_of(const Part& part) {
  if constexpr (std::is_floating_point_v<Part>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    return digits;
  } else if constexpr (std::is_arithmetic_v<Part>) {
    return std::to_string(part);
  } else {
    return part;
  }
}

// Throws ValueError with these parts as its text.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument((text_of(parts) + ...));
}

// The enumerator with a number that Python gives. Throws ValueError if `last` has a lower number.
template <class Enum>
Enum enum_of(const char* name, int64_t number, Enum last) {
  if (number < 0 || number > static_cast<int64_t>(last))
    refuse(name, " is ", number, ", expected 0 to ", static_cast<int64_t>(last));
  return static_cast<Enum>(number);
}

// The name of the numbers in an error: a tensor, or one row of it.
struct NumbersOf {
  const char* tensor;
  int64_t row = -1;
};

// Throws an Error for the first illegal number among `values`, from index `first` on. Its text is "tensor[row, i] is v,
// expected ...". A first pass looks at all numbers without branches, so that the compiler vectorises it.
template <class Error, class T, class Legal, class Expected>
void check_each(NumbersOf of, const T* values, int64_t count, const Legal& legal, const Expected& expected,
                int64_t first = 0) {
  bool all_are_legal = true;
  for (int64_t i = first; i < count; ++i) all_are_legal &= legal(values[i]);
  if (all_are_legal) return;
  const int64_t i = std::find_if_not(values + first, values + count, legal) - values;
  const std::string row = of.row >= 0 ? text_of(of.row) + ", " : "";
  throw Error(of.tensor + ("[" + row) + text_of(i) + "] is " + text_of(values[i]) + ", expected " +
              text_of(expected()));
}

// Throws IndexError for a value, from index `first` on, that is not in [0, end).
template <class T>
void check_indices(NumbersOf of, const T* values, int64_t count, int64_t end, int64_t first = 0) {
  using Unsigned = std::make_unsigned_t<T>;
  constexpr auto kAll = static_cast<Unsigned>(std::numeric_limits<T>::max()) + Unsigned{1};
  const auto limit = static_cast<Unsigned>(std::min<uint64_t>(std::max<int64_t>(end, 0), kAll));
  check_each<std::out_of_range>(
      of, values, count, [limit](T value) { return static_cast<Unsigned>(value) < limit; },
      [end] { return "0 or more, and less than " + std::to_string(end); }, first);
}

// Throws IndexError for an adapter's slot that is not in [-1, num_slots).
inline void check_slots(const int32_t* slots, int64_t count, int64_t num_slots) {
  check_each<std::out_of_range>(
      {"slots"}, slots, count, [num_slots](int32_t slot) { return slot >= -1 && slot < num_slots; },
      [num_slots] { return "-1 or more, and less than " + std::to_string(num_slots); });
}

}  // namespace quire
