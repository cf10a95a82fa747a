// RMS norm, layer norm, and the work between the qkv projection and attention: norm of each head, rotary embedding, and
// the KV cache write.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/kernels/kv_cache.h"
#include "quire/strided.h"

namespace quire {

struct NormArgs {
  DType dtype;                // the type of x, residual and out
  StridedRows<const void> x;  // [rows, dim]
  // [rows, dim] or null. If given, residual += multiplier * x comes first, and the norm reads this sum. The product is
  // rounded to dtype, and so is the sum.
  StridedRows<void> residual;
  float multiplier;
  const void *weight, *bias;  // [dim]; bias null: RMS norm, else layer norm, which takes the mean away
  DType weight_dtype;         // the type of both: dtype or f32
  float eps, weight_offset;   // only RMS norms have an offset
  StridedRows<void> out;      // [rows, dim], may be x
  int64_t rows, dim;
};

// The transformation of each head of q and k, equal for all steps of a layer. E head_dim, R rotary dims.
struct HeadRotation {
  const float* cos_sin;  // [num_positions, R]: R / 2 cosines, then R / 2 sines; null = no rotation
  int64_t num_positions, rotary_dim;
  const void *q_norm_weight, *k_norm_weight;  // [E] or null, before the rotation
  DType norm_weight_dtype;                    // the type of q, or f32
  float norm_eps, norm_weight_offset;
  // q at position p is multiplied by 1 + temperature * log(1 + floor((p + 1) / temperature_floor)) (Llama 4); 0 = off
  float temperature, temperature_floor;
};

// T tokens, H query heads, G KV heads, E head_dim.
struct RopeCacheArgs {
  DType dtype;                  // the type of q, k and v
  StridedHeads<void> q;         // [T, H, E], changed in place
  StridedHeads<const void> k;   // [T, G, E]
  StridedHeads<const void> v;   // [T, G, E]
  const int64_t* positions;     // [T]
  const int64_t* slot_mapping;  // [T] block * block_size + offset; negative = do not write
  KvCache cache;
  HeadRotation rotation;
  int64_t num_tokens, num_q_heads, head_dim;
};
struct NormRopeKernels {
  void (*norm)(const NormArgs&);
  void (*rope_and_cache)(const RopeCacheArgs&);
};
const NormRopeKernels& norm_rope_kernels();

}  // namespace quire
