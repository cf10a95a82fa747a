#include "quire/lora_pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "quire/kernels/lora.h"
#include "quire/round_up.h"

namespace quire {
namespace {

// Reads from any address, because a file need not keep its tensors aligned.
template <class To, class From>
To converted(const char* from, int64_t index) {
  From x;
  std::memcpy(&x, from + index * static_cast<int64_t>(sizeof(From)), sizeof(From));
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else {
    return from_f32<To>(to_f32(x));
  }
}

template <class To, class From>
void pack(const Factor& factor, const char* from, To* to) {
  const int64_t rows = factor.rows, columns = factor.columns;
  switch (factor.form) {
    case FactorForm::rows:
      for (int64_t i = 0; i < rows * columns; ++i) to[i] = converted<To, From>(from, i);
      return;
    case FactorForm::transposed:
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t column = 0; column < columns; ++column)
          to[column * rows + row] = converted<To, From>(from, row * columns + column);
      return;
    case FactorForm::panels:
      for (int64_t row = 0; row < rows; row += kLoraColumns, to += columns * kLoraColumns) {
        const int64_t count = std::min(kLoraColumns, rows - row);
        if (count < kLoraColumns) std::memset(to, 0, sizeof(To) * columns * kLoraColumns);
        for (int64_t i = 0; i < count; ++i)
          for (int64_t column = 0; column < columns; ++column)
            to[column * kLoraColumns + i] = converted<To, From>(from, (row + i) * columns + column);
      }
      return;
  }
}

// Bytes of the source and elements of the memory must not overflow, so every number is bounded before it is multiplied.
void check(const FactorPacking& packing, const Factor& factor) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const bool is_known = factor.dtype >= 0 && factor.dtype <= 2 && static_cast<int64_t>(factor.form) >= 0 &&
                        factor.form <= FactorForm::panels;
  const bool is_sized = factor.rows > 0 && factor.rows < kMost && factor.columns > 0 && factor.columns < kMost;
  if (is_known && is_sized && factor.from >= 0 && factor.to >= 0) {
    const int64_t rows = factor.form == FactorForm::panels ? round_up(factor.rows, kLoraColumns) : factor.rows;
    const auto item = static_cast<int64_t>(size_of(static_cast<DType>(factor.dtype)));
    if (factor.rows * factor.columns <= (packing.source_bytes - factor.from) / item &&
        rows * factor.columns <= packing.num_elements - factor.to)
      return;
  }
  throw std::invalid_argument("a factor of [" + std::to_string(factor.rows) + ", " + std::to_string(factor.columns) +
                              "] from byte " + std::to_string(factor.from) + " to element " +
                              std::to_string(factor.to) + ", expected one inside the source and the memory");
}

}  // namespace

void pack_factors(const FactorPacking& packing) {
  for (int64_t i = 0; i < packing.num_factors; ++i) check(packing, packing.factors[i]);
  for (int64_t i = 0; i < packing.num_factors; ++i) {
    const Factor& factor = packing.factors[i];
    with_type_of(packing.dtype, [&]<class To>(To) {
      with_type_of(static_cast<DType>(factor.dtype), [&]<class From>(From) {
        pack<To, From>(factor, packing.source + factor.from, static_cast<To*>(packing.memory) + factor.to);
      });
    });
  }
}

}  // namespace quire
