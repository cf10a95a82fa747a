// One bind function per kernel family, each in csrc/bindings_<family>.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace quire {

void bind_activation(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_limits(nanobind::module_& m);
void bind_norm_rope(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

// Tensors arrive as the integer value of Tensor.data_ptr().
template <class T>
inline T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace quire
