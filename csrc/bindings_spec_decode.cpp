// Python names of the indexes in which drafts are looked up.
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "bindings.h"
#include "quire/ngram_index.h"
#include "quire/suffix_index.h"

namespace nb = nanobind;

namespace quire {

void check_at_least(const char* what, int64_t value, int64_t least) {
  if (value >= least) return;
  const std::string message =
      std::string(what) + " is " + std::to_string(value) + ", less than " + std::to_string(least);
  throw nb::value_error(message.c_str());
}

constexpr const char* kProposes = "Adds tokens to the text, and answers what may come behind it";

void bind_spec_decode(nb::module_& m) {
  nb::class_<NgramIndex>(m, "NgramIndex")
      .def(
          "__init__",
          [](NgramIndex* self, int shortest, int longest) {
            check_at_least("shortest", shortest, 1);
            check_at_least("longest", longest, shortest);
            new (self) NgramIndex(shortest, longest);
          },
          nb::kw_only(), "shortest"_a, "longest"_a)
      .def_prop_ro("num_tokens", &NgramIndex::num_tokens)
      .def_prop_ro("num_bytes", &NgramIndex::num_bytes)
      .def(
          "propose",
          [](NgramIndex& self, const std::vector<int32_t>& new_tokens, int64_t most) {
            check_at_least("most", most, 0);
            self.append(new_tokens);
            return self.following(most);
          },
          "new_tokens"_a, "most"_a, kProposes);

  nb::class_<SharedTexts>(m, "SharedTexts")
      .def(
          "__init__",
          [](SharedTexts* self, int64_t max_bytes, int64_t max_requests) {
            check_at_least("max_bytes", max_bytes, 0);
            check_at_least("max_requests", max_requests, 0);
            new (self) SharedTexts(max_bytes, max_requests);
          },
          nb::kw_only(), "max_bytes"_a, "max_requests"_a)
      .def_prop_ro("num_bytes", &SharedTexts::num_bytes)
      .def_prop_ro("num_requests", &SharedTexts::num_requests);

  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(
          "__init__",
          [](SuffixIndex* self, int max_depth, double max_spec_factor, double min_token_prob, SharedTexts* shared,
             const nb::bytes& tenant, int64_t num_prompt) {
            check_at_least("max_depth", max_depth, 1);
            check_at_least("num_prompt", num_prompt, 0);
            Tenant who;
            if (tenant.size() != sizeof(who)) throw nb::value_error("the tenant is named by 16 bytes");
            std::memcpy(&who, tenant.c_str(), sizeof(who));
            new (self) SuffixIndex({max_depth, max_spec_factor, min_token_prob}, shared, who, num_prompt);
          },
          nb::kw_only(), "max_depth"_a, "max_spec_factor"_a, "min_token_prob"_a, "shared"_a.none(), "tenant"_a,
          "num_prompt"_a, nb::keep_alive<1, 5>())
      .def_prop_ro("num_tokens", &SuffixIndex::num_tokens)
      .def_prop_ro("num_bytes", &SuffixIndex::num_bytes)
      .def(
          "propose",
          [](SuffixIndex& self, const std::vector<int32_t>& new_tokens, int64_t most) {
            check_at_least("most", most, 0);
            self.append(new_tokens);
            return self.draft(most);
          },
          "new_tokens"_a, "most"_a, kProposes)
      .def(
          "finish",
          [](SuffixIndex& self, const std::vector<int32_t>& new_tokens) {
            self.append(new_tokens);
            self.finish();
          },
          "new_tokens"_a, "Adds the last tokens, and shares what is not shared yet");
}

}  // namespace quire
