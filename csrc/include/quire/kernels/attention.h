// Causal attention over a paged KV cache, for any mix of prefill and decode in one call.
#pragma once

#include <cstdint>

#include "quire/dtype.h"

namespace quire {

// T tokens, H query heads, G KV heads, E head_dim, B cache blocks, P block_size, S sequences, M blocks per table row.
// Strides are in elements; the last dimension of every tensor is contiguous, and so are P and E of the caches.
struct AttentionArgs {
  DType dtype;           // of q and out
  CacheType cache_type;  // of the caches
  const void* q;         // [T, H, E]
  int64_t q_token_stride, q_head_stride;
  const void* k_cache;  // [B, G, P, E]
  int64_t k_block_stride, k_head_stride;
  const void* v_cache;  // [B, G, P, E]
  int64_t v_block_stride, v_head_stride;
  const float *k_scales, *v_scales;  // [B, G, P], G and P contiguous, a factor for each row of E codes; only of int8
  int64_t scales_block_stride;       // of both
  int64_t num_blocks;                // B
  const int32_t* block_tables;       // [S, M] read where a query token of the sequence sees the block
  int64_t block_table_stride, blocks_per_table;
  const int32_t* seq_lens;      // [S] positions in the cache, this call's tokens included
  const int32_t* cu_seqlens_q;  // [S + 1] the tokens cu[s] to cu[s + 1] are the last positions of sequence s
  int num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, block_size;
  float scale;
  int sliding_window;  // attends to positions > pos - sliding_window; 0 = all
  float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0 = off
  void* out;           // [T, H, E]
  int64_t out_token_stride, out_head_stride;
};

struct AttentionKernels {
  void (*paged_attention)(const AttentionArgs&);
};
const AttentionKernels& attention_kernels();        // CacheType::model
const AttentionKernels& attention_codes_kernels();  // the others

}  // namespace quire
