// Python names of the choice of the next token.
#include <limits>
#include <stdexcept>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/sampling.h"

namespace nb = nanobind;

namespace quire {
namespace {

// One number for each row. Comparisons are false for NaN.
template <class T, class Legal>
void check_rows(const LogitsArgs& a, const char* what, const T* values, const char* expected, const Legal& legal) {
  check_each<std::invalid_argument>({what}, values, a.num_rows, legal, [expected] { return expected; });
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

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def(
      "greedy",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size, uintptr_t token_ids) {
        sampling_kernels().greedy({pointer<const float>(logits), row_stride, num_rows, vocab_size},
                                  pointer<int64_t>(token_ids));
      },
      nb::arg("logits"), nb::arg("row_stride"), nb::arg("num_rows"), nb::arg("vocab_size"), nb::arg("token_ids"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "sample",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size, uintptr_t temperature,
         uintptr_t top_k, uintptr_t top_p, uintptr_t min_p, uintptr_t uniform, uintptr_t token_ids) {
        const SampleArgs args = {.logits = {pointer<const float>(logits), row_stride, num_rows, vocab_size},
                                 .temperature = pointer<const float>(temperature),
                                 .top_k = pointer<const int32_t>(top_k),
                                 .top_p = pointer<const float>(top_p),
                                 .min_p = pointer<const float>(min_p),
                                 .uniform = pointer<const double>(uniform),
                                 .token_ids = pointer<int64_t>(token_ids)};
        check(args);
        sampling_kernels().sample(args);
      },
      nb::arg("logits"), nb::arg("row_stride"), nb::arg("num_rows"), nb::arg("vocab_size"), nb::arg("temperature"),
      nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("uniform"), nb::arg("token_ids"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "logprobs",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size, uintptr_t token_ids,
         int64_t num_top, uintptr_t token_logprobs, uintptr_t ranks, uintptr_t top_ids, uintptr_t top_logprobs) {
        check_indices({"token_ids"}, pointer<const int64_t>(token_ids), num_rows, vocab_size);
        sampling_kernels().logprobs({.logits = {pointer<const float>(logits), row_stride, num_rows, vocab_size},
                                     .token_ids = pointer<const int64_t>(token_ids),
                                     .num_top = num_top,
                                     .token_logprobs = pointer<float>(token_logprobs),
                                     .ranks = pointer<int64_t>(ranks),
                                     .top_ids = pointer<int64_t>(top_ids),
                                     .top_logprobs = pointer<float>(top_logprobs)});
      },
      nb::arg("logits"), nb::arg("row_stride"), nb::arg("num_rows"), nb::arg("vocab_size"), nb::arg("token_ids"),
      nb::arg("num_top"), nb::arg("token_logprobs"), nb::arg("ranks"), nb::arg("top_ids"), nb::arg("top_logprobs"),
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
