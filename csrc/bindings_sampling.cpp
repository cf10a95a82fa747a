// Python names of the choice of the next token.
#include <limits>
#include <stdexcept>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/sampling.h"

namespace nb = nanobind;

namespace quire {
namespace {

// Checks one number for each row. `legal` must be false for NaN, as comparisons are.
template <class T, class Legal>
void check_rows(const Logits& logits, const char* what, const T* values, const char* expected, const Legal& legal) {
  check_each<std::invalid_argument>({what}, values, logits.num_rows, legal, [expected] { return expected; });
}

void check(const SampleArgs& a) {
  const auto is_share = [](float x) { return (x >= 0.0f) & (x <= 1.0f); };
  check_rows(a.logits, "temperature", a.temperature, "a finite number, 0 or more",
             [](float x) { return (x >= 0.0f) & (x <= std::numeric_limits<float>::max()); });
  check_rows(a.logits, "top_k", a.top_k, "0 or more", [](int32_t k) { return k >= 0; });
  check_rows(a.logits, "top_p", a.top_p, "0 to 1", is_share);
  check_rows(a.logits, "min_p", a.min_p, "0 to 1", is_share);
  check_rows(a.logits, "uniform", a.uniform, "0 or more, and less than 1",
             [](double x) { return (x >= 0.0) & (x < 1.0); });
}

Logits logits_of(const TensorView& logits) {
  return {.rows = logits.rows<const float>(), .num_rows = logits.size(0), .vocab_size = logits.size(1)};
}

void run(const GreedyArgs& args) { sampling_kernels().greedy(args); }
using Greedy = CallOf<GreedyArgs, run>;

void run(const SampleArgs& args) {
  check(args);
  sampling_kernels().sample(args);
}
using Sample = CallOf<SampleArgs, run>;

void run(const LogprobsArgs& args) {
  check_indices({"token_ids"}, args.token_ids, args.logits.num_rows, args.logits.vocab_size);
  sampling_kernels().logprobs(args);
}
using Logprobs = CallOf<LogprobsArgs, run>;

void run(const ForbidTokensArgs& args) {
  check_indices({"rows"}, args.rows, args.num_masks, args.num_rows);
  sampling_kernels().forbid_tokens(args);
}
using ForbidTokens = CallOf<ForbidTokensArgs, run>;

void bind_greedy(nb::module_& m) {
  bind_struct<Greedy, KernelCall>(
      m, "Greedy",
      [](Greedy* self, TensorView logits, TensorView token_ids) {
        new (self) Greedy({.logits = logits_of(logits), .token_ids = token_ids.data<int64_t>()});
      },
      "logits"_a, "token_ids"_a);
}

void bind_sample(nb::module_& m) {
  bind_struct<Sample, KernelCall>(
      m, "Sample",
      [](Sample* self, TensorView logits, TensorView temperature, TensorView top_k, TensorView top_p, TensorView min_p,
         TensorView uniform, TensorView token_ids) {
        new (self) Sample({.logits = logits_of(logits),
                           .temperature = temperature.data<const float>(),
                           .top_k = top_k.data<const int32_t>(),
                           .top_p = top_p.data<const float>(),
                           .min_p = min_p.data<const float>(),
                           .uniform = uniform.data<const double>(),
                           .token_ids = token_ids.data<int64_t>()});
      },
      "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "token_ids"_a);
}

void bind_logprobs(nb::module_& m) {
  bind_struct<Logprobs, KernelCall>(
      m, "Logprobs",
      [](Logprobs* self, TensorView logits, TensorView token_ids, TensorView token_logprobs, TensorView ranks,
         TensorView top_ids, TensorView top_logprobs) {
        new (self) Logprobs({.logits = logits_of(logits),
                             .token_ids = token_ids.data<const int64_t>(),
                             .num_top = top_ids.size(1),
                             .token_logprobs = token_logprobs.data<float>(),
                             .ranks = ranks.data<int64_t>(),
                             .top_ids = top_ids.data<int64_t>(),
                             .top_logprobs = top_logprobs.data<float>()});
      },
      "logits"_a, "token_ids"_a, "token_logprobs"_a, "ranks"_a, "top_ids"_a, "top_logprobs"_a);
}

void bind_forbid_tokens(nb::module_& m) {
  bind_struct<ForbidTokens, KernelCall>(
      m, "ForbidTokens",
      [](ForbidTokens* self, TensorView logits, TensorView masks, TensorView rows) {
        new (self) ForbidTokens({.logits = logits.rows<float>(),
                                 .num_rows = logits.size(0),
                                 .vocab_size = logits.size(1),
                                 .masks = masks.data<const uint32_t>(),
                                 .rows = rows.data<const int32_t>(),
                                 .num_masks = rows.size(0)});
      },
      "logits"_a, "masks"_a, "rows"_a);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  bind_greedy(m);
  bind_sample(m);
  bind_logprobs(m);
  bind_forbid_tokens(m);
}

}  // namespace quire
