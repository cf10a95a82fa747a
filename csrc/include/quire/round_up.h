// Integer division rounded up, and multiples, for numbers >= 0 and a positive divisor.
#pragma once

#include <type_traits>

namespace quire {
namespace {  // internal linkage, see dtype.h

template <class Int>
constexpr Int ceil_div(Int n, std::type_identity_t<Int> divisor) {
  return (n + divisor - 1) / divisor;
}

template <class Int>
constexpr Int round_up(Int n, std::type_identity_t<Int> multiple) {
  return ceil_div(n, multiple) * multiple;
}

}  // namespace
}  // namespace quire
