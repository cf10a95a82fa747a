// From logits to token ids: greedy choice, filtered random choice, log-probabilities. The vocabulary is never sorted.
#pragma once

#include <cstdint>

namespace quire {

// R rows, V vocabulary; rows of logits are contiguous, row_stride in elements.
struct LogitsArgs {
  const float* logits;
  int64_t row_stride, num_rows, vocab_size;
};

// One entry per row; see kernels/ops.py for the meaning and the order of the filters.
struct SampleArgs {
  LogitsArgs logits;
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const double* uniform;  // in [0, 1)
  int64_t* token_ids;     // out
};

struct LogprobsArgs {
  LogitsArgs logits;
  const int64_t* token_ids;
  int64_t num_top;
  float* token_logprobs;  // out [R]
  int64_t* ranks;         // out [R]
  int64_t* top_ids;       // out [R, num_top]
  float* top_logprobs;    // out [R, num_top]
};

struct SamplingKernels {
  void (*greedy)(const LogitsArgs&, int64_t* token_ids);
  void (*sample)(const SampleArgs&);
  void (*logprobs)(const LogprobsArgs&);
};
const SamplingKernels& sampling_kernels();

}  // namespace quire
