// Causal attention over a paged KV cache, for any mix of prefill and decode in one call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quire/dtype.h"
#include "quire/kernels/kv_cache.h"
#include "quire/strided.h"

namespace quire {

// Constants of a layer, equal for all steps.
struct AttentionRule {
  float scale;
  int sliding_window;  // attends to positions > pos - sliding_window; 0 = all
  float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0 = off
  int chunk;           // attends to positions in the own one of the chunks of this size; 0 = all

  // The first position that a token at `position` attends to.
  int first_visible(int position) const {
    if (chunk > 0) return position / chunk * chunk;
    return sliding_window > 0 ? std::max(position - sliding_window + 1, 0) : 0;
  }
};

// T tokens, H query heads, E head_dim, V value_dim, S sequences, M blocks per table row.
struct AttentionArgs {
  DType dtype;                 // of q and out
  StridedHeads<const void> q;  // [T, H, E]
  KvCache cache;
  StridedRows<const int32_t> block_tables;  // [S, M]
  int64_t blocks_per_table;                 // M
  const int32_t* seq_lens;                  // [S] positions in the cache, this call's tokens included
  const int32_t* cu_seqlens_q;  // [S + 1] the tokens cu[s] to cu[s + 1] are the last positions of sequence s
  int num_tokens, num_seqs, num_q_heads, head_dim;
  int value_dim;  // V, at most E: below E the values are the first elements of the keys
  AttentionRule rule;
  const void* sinks;       // [H] of dtype: a score that takes weight and has no value; nullptr: there are none
  StridedHeads<void> out;  // [T, H, V]
};

struct AttentionKernels {
  void (*paged_attention)(const AttentionArgs&);
};
const AttentionKernels& attention_kernels();        // of a cache of CacheType::model
const AttentionKernels& attention_codes_kernels();  // the other cache types

}  // namespace quire
