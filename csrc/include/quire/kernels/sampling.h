// From logits to token ids: masks, greedy choice, random choice with filters, log-probabilities. The vocabulary is
// never sorted.
#pragma once

#include <cstdint>

#include "quire/strided.h"

namespace quire {

// R rows, V vocabulary.
struct Logits {
  StridedRows<const float> rows;  // [R, V]
  int64_t num_rows, vocab_size;
};

struct GreedyArgs {
  Logits logits;
  int64_t* token_ids;  // out [R]
};

// One entry per row; see kernels/ops.py for the meaning and the order of the filters.
struct SampleArgs {
  Logits logits;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* uniform;  // in [0, 1)
  int64_t* token_ids;     // out
};

struct LogprobsArgs {
  Logits logits;
  const int64_t* token_ids;
  int64_t num_top;
  float* token_logprobs;  // out [R]
  int64_t* ranks;         // out [R]
  int64_t* top_ids;       // out [R, num_top]
  float* top_logprobs;    // out [R, num_top]
};

struct ForbidTokensArgs {
  StridedRows<float> logits;  // in and out [R, V]
  int64_t num_rows, vocab_size;
  const uint32_t* masks;  // [M, ceil(V / 32)]; bit i of word w: token 32 w + i is allowed
  const int32_t* rows;    // [M], the row of logits of each mask
  int64_t num_masks;
};

struct SamplingKernels {
  void (*greedy)(const GreedyArgs&);
  void (*sample)(const SampleArgs&);
  void (*logprobs)(const LogprobsArgs&);
  void (*forbid_tokens)(const ForbidTokensArgs&);
};
const SamplingKernels& sampling_kernels();

}  // namespace quire
