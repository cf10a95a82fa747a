// The paged KV cache of one layer.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/strided.h"

namespace quire {

// The most elements of a row of keys or values. It holds for attention and for writes to the cache, so both run or
// neither.
inline constexpr int kMaxHeadDim = 576;

// B blocks, G KV heads, P block_size, E head_dim.
struct KvCache {
  CacheType type;
  // [B, G, P, E]. v may be the beginnings of the rows of k.
  StridedBlocks<void> k, v;
  StridedBlocks<float> k_scales, v_scales;  // [B, G, P], a factor for each row of E codes; null but for int8
  int64_t num_blocks;                       // B
  int num_kv_heads, block_size;             // G, P
};

}  // namespace quire
