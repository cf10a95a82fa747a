// Rotary embedding and the KV cache write of multi-head latent attention.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/kernels/kv_cache.h"
#include "quire/strided.h"

namespace quire {

// T tokens, H query heads, L rank, R rotary dims.
struct LatentCacheArgs {
  DType dtype;                   // the type of q, rows and out
  StridedHeads<const void> q;    // [T, H, R] the parts that rotate
  StridedRows<const void> rows;  // [T, L + R] normed latents, and then the part of the key that rotates
  const int64_t* positions;      // [T]
  const int64_t* slot_mapping;   // [T] block * block_size + offset; negative = do not write
  KvCache cache;                 // one KV head, rows of L + R
  const float* cos_sin;          // [num_positions, R]: R / 2 cosines, then R / 2 sines
  int64_t num_positions, rotary_dim;
  bool is_interleaved;     // pairs are 2 i and 2 i + 1, else i and i + R / 2; in results they are i and i + R / 2
  StridedHeads<void> out;  // [T, H, R] the rotated parts of q
  int64_t num_tokens, num_heads, rank;
};
struct LatentKernels {
  void (*rope_and_cache)(const LatentCacheArgs&);
};
const LatentKernels& latent_kernels();

}  // namespace quire
