// RMS norm, and what happens between the qkv projection and attention: per-head norm, rotary embedding, KV cache write.
#pragma once

#include <cstdint>

#include "quire/dtype.h"

namespace quire {

// Strides are in elements; the last dimension of every tensor is contiguous.
struct RmsNormArgs {
  DType dtype;    // of x, residual and out
  const void* x;  // [rows, dim]
  int64_t x_stride;
  void* residual;  // [rows, dim] or null: residual += x first, rounded to dtype; the norm is of the sum
  int64_t residual_stride;
  const void* weight;  // [dim]
  DType weight_dtype;  // dtype or f32
  float eps, weight_offset;
  void* out;  // [rows, dim], may be x
  int64_t out_stride;
  int64_t rows, dim;
};

// T tokens, H query heads, G KV heads, E head_dim, R rotary dims, P block_size.
struct RopeCacheArgs {
  DType dtype;           // of q, k and v
  CacheType cache_type;  // of the caches
  void* q;               // [T, H, E], changed in place
  int64_t q_token_stride, q_head_stride;
  const void* k;  // [T, G, E]
  int64_t k_token_stride, k_head_stride;
  const void* v;  // [T, G, E]
  int64_t v_token_stride, v_head_stride;
  const int64_t* positions;  // [T]
  const float* cos_sin;      // [num_positions, R]: R / 2 cosines, then R / 2 sines; null = no rotation
  int64_t rotary_dim, num_positions;
  const int64_t* slot_mapping;  // [T] block * P + offset; negative = do not write
  void* k_cache;                // [B, G, P, E], P and E contiguous
  int64_t k_block_stride, k_cache_head_stride;
  void* v_cache;
  int64_t v_block_stride, v_cache_head_stride;
  float *k_scales, *v_scales;   // [B, G, P], G and P contiguous; only of int8
  int64_t scales_block_stride;  // of both
  int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, block_size, num_blocks;
  const void* q_norm_weight;  // [E] or null, dtype norm_weight_dtype (dtype or f32)
  const void* k_norm_weight;
  DType norm_weight_dtype;
  float norm_eps, norm_weight_offset;
};
inline constexpr int kMaxRopeHeadDim = 256;  // as kMaxHeadDim of attention: both run, or neither

struct NormRopeKernels {
  void (*rms_norm)(const RmsNormArgs&);
  void (*rope_and_cache)(const RopeCacheArgs&);
};
const NormRopeKernels& norm_rope_kernels();

}  // namespace quire
