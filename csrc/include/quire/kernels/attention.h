// Causal attention over a paged KV cache, for any mix of prefill and decode in one call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quire/dtype.h"
#include "quire/kernels/kv_cache.h"
#include "quire/strided.h"

namespace quire {

// The number of positions that become one partial result, counted from position 0. Partial results are joined in the
// order of positions.
constexpr int kAttentionRange = 256;
constexpr int kMostAttentionRows = 256;  // query rows of a partial result
constexpr int kAttentionPadding = 32;    // the most elements by which a row of values may be longer there

// The constants of a layer. They are equal for all steps.
struct AttentionRule {
  float scale;
  int sliding_window;  // attends to positions > pos - sliding_window; 0 = all
  float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0 = off
  int chunk;           // attends to positions in its own chunk of this size; 0 = all

  // The first position that a token at `position` attends to.
  int first_visible(int position) const {
    if (chunk > 0) return position / chunk * chunk;
    return sliding_window > 0 ? std::max(position - sliding_window + 1, 0) : 0;
  }
};

// T tokens, H query heads, O of them with results, E head_dim, V value_dim, S sequences, M blocks per table row.
struct AttentionArgs {
  DType dtype;                 // the type of q and out
  StridedHeads<const void> q;  // [T, H, E]
  KvCache cache;
  StridedRows<const int32_t> block_tables;  // [S, M]
  int64_t blocks_per_table;                 // M
  const int32_t* seq_lens;                  // [S] positions in the cache, this call's tokens included
  const int32_t* cu_seqlens_q;  // [S + 1] the tokens cu[s] to cu[s + 1] are the last positions of sequence s
  int num_tokens, num_seqs, num_q_heads, head_dim;
  int value_dim;  // V, at most E: below E the values are the first elements of the keys
  AttentionRule rule;
  const void* sinks;              // [O] of dtype: scores that take weight and have no values; nullptr: none
  StridedHeads<void> out;         // [T, O, V]
  int first_result, num_results;  // the heads of q that have results
};

// Memory that ranks fill and read in turns. Each rank has a slot of slot_floats(). Kernels have no exceptions: if a
// turn fails, the call ends, and the owner of this object knows the reason.
class Turns {
 public:
  virtual float* begin() = 0;  // this rank's slot, in whole cache lines; nullptr: there is no turn
  // Waits until all ranks have filled their slots, this one with so many floats. False: they have not.
  virtual bool end(uint64_t signature, int64_t floats) = 0;
  virtual const float* slot_of(int owner) const = 0;  // valid until the next turn begins
  virtual int64_t slot_floats() const = 0;

 protected:
  ~Turns() = default;
};

// Attention of ranks that share the pages of one cache. Page p of the tables is page p / num_owners of owner
// p % num_owners. The size of a block is a multiple of kAttentionRange, so one rank has all of a range. Every rank
// computes the partial results of its ranges for the heads of all owners. Then it joins the results of all ranges for
// its own heads.
struct SharedAttentionArgs {
  AttentionArgs attention;  // q of the heads of all owners, results of own heads, pages of this rank, one KV head
  int num_owners;           // at most kMaxRanks
  int owner;                // this rank
};

struct AttentionKernels {
  void (*paged_attention)(const AttentionArgs&);
  // A slot must have room for a partial result of kMostAttentionRows rows.
  void (*shared_attention)(const SharedAttentionArgs&, Turns&);
};
const AttentionKernels& attention_kernels();        // for a cache of CacheType::model
const AttentionKernels& attention_codes_kernels();  // for the other cache types

}  // namespace quire
