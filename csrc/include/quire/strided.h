// Tensors in the form for kernels: an address, and the strides in elements. The last dimension is contiguous.
#pragma once

#include <cstdint>

namespace quire {

// [rows, columns]
template <class T>
struct StridedRows {
  T* data;
  int64_t stride;
};

// [tokens, heads, head_dim]
template <class T>
struct StridedHeads {
  T* data;
  int64_t token_stride, head_stride;
};

// [blocks, heads, ...]: the part of a head in a block is contiguous.
template <class T>
struct StridedBlocks {
  T* data;
  int64_t block_stride, head_stride;
};

}  // namespace quire
