// Python names of the choice of the next token.
#include "bindings.h"
#include "quire/kernels/sampling.h"

namespace nb = nanobind;

namespace quire {

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
        sampling_kernels().sample({.logits = {pointer<const float>(logits), row_stride, num_rows, vocab_size},
                                   .temperature = pointer<const float>(temperature),
                                   .top_k = pointer<const int32_t>(top_k),
                                   .top_p = pointer<const float>(top_p),
                                   .min_p = pointer<const float>(min_p),
                                   .uniform = pointer<const double>(uniform),
                                   .token_ids = pointer<int64_t>(token_ids)});
      },
      nb::arg("logits"), nb::arg("row_stride"), nb::arg("num_rows"), nb::arg("vocab_size"), nb::arg("temperature"),
      nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("uniform"), nb::arg("token_ids"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "logprobs",
      [](uintptr_t logits, int64_t row_stride, int64_t num_rows, int64_t vocab_size, uintptr_t token_ids,
         int64_t num_top, uintptr_t token_logprobs, uintptr_t ranks, uintptr_t top_ids, uintptr_t top_logprobs) {
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
