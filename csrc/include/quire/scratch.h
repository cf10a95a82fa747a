// Thread-local scratch memory that grows and is kept: the only memory a kernel may ask for on the hot path.
#pragma once

#include <cstddef>

namespace quire {

// One buffer per thread and use, so that nested uses never overlap.
enum class Scratch : int {
  gemm_input,
  gemm_tiles,
  gemm_row,
  attention_unit,
  attention_partials,
  attention_merge,
  count
};

// 64-byte aligned, at least `bytes` long, content undefined; valid until this thread asks for more under the same use.
void* scratch(Scratch use, size_t bytes);

}  // namespace quire
