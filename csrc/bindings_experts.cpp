// Python names of the kernels of mixture-of-experts layers.
#include "bindings.h"
#include "checks.h"
#include "quire/kernels/experts.h"

namespace nb = nanobind;

namespace quire {
namespace {

void check_size(const char* name, int64_t size, int64_t expected) {
  if (size != expected) refuse(name, " has the size ", size, ", expected ", expected);
}

void check_rows(const char* name, const TensorView& tensor, int64_t rows, int64_t columns) {
  check_size(name, tensor.size(0), rows);
  check_size(name, tensor.size(1), columns);
}

void check_rule(const RoutingRule& rule) {
  const bool has_groups = rule.num_experts >= 1 && rule.num_groups >= 1 && rule.num_experts % rule.num_groups == 0 &&
                          rule.num_active_groups >= 1 && rule.num_active_groups <= rule.num_groups;
  if (!has_groups || rule.num_active < 1 ||
      rule.num_active > rule.num_experts / rule.num_groups * rule.num_active_groups)
    refuse(rule.num_active, " of ", rule.num_experts, " experts in ", rule.num_groups,
           " groups, expected groups of equal size, and experts in the active ones");
}

void run(const RouteArgs& args) {
  if (args.places != nullptr)
    check_indices({"places"}, args.places, args.rule.num_experts * args.num_copies, args.num_places);
  route(args);
}
using Route = CallOf<RouteArgs, run>;

void check_begins(const ExpertProductArgs& args) {
  const int32_t* const begins = args.begins;
  const int64_t count = args.num_places + 1;
  check_indices({"begins"}, begins, count, args.num_pairs + 1);
  for (int64_t e = 0; e + 1 < count; ++e)
    if (begins[e] > begins[e + 1])
      refuse("begins[", e + 1, "] is ", begins[e + 1], ", expected ", begins[e], " or more, like the number before it");
  if (begins[0] != 0 || begins[count - 1] != args.num_pairs)
    refuse("begins go from ", begins[0], " to ", begins[count - 1], ", expected 0 to ", args.num_pairs);
}

void run(const ExpertProductArgs& args) {
  check_indices({"order"}, args.order, args.num_pairs, args.num_pairs);
  check_begins(args);
  multiply_experts(args);
}
using ExpertProduct = CallOf<ExpertProductArgs, run>;

void run(const CombineArgs& args) {
  check_indices({"order"}, args.order, args.rows * args.num_slots, args.rows * args.num_slots);
  combine_experts(args);
}
using CombineExperts = CallOf<CombineArgs, run>;

void bind_routing(nb::module_& m) {
  bind_struct<RoutingRule>(
      m, "RoutingRule",
      [](RoutingRule* self, int64_t num_experts, int64_t num_active, int scoring, int64_t num_groups,
         int64_t num_active_groups, int group_score, bool normalizes, float scale, float jitter) {
        new (self) RoutingRule{.num_experts = num_experts,
                               .num_active = num_active,
                               .scoring = enum_of("scoring", scoring, Scoring::sparsemixer),
                               .num_groups = num_groups,
                               .num_active_groups = num_active_groups,
                               .group_score = enum_of("group_score", group_score, GroupScore::top2),
                               .normalizes = normalizes,
                               .scale = scale,
                               .jitter = jitter};
        check_rule(*self);
      },
      "num_experts"_a, "num_active"_a, "scoring"_a, "num_groups"_a, "num_active_groups"_a, "group_score"_a,
      "normalizes"_a, "scale"_a, "jitter"_a);
  bind_struct<Route, KernelCall>(
      m, "Route",
      [](Route* self, TensorView logits, const RoutingRule& rule, TensorView bias, TensorView experts,
         TensorView weights, TensorView order, TensorView begins, TensorView places) {
        const int64_t rows = logits.size(0), num_places = begins.size(0) - 1;
        check_rows("logits", logits, rows, rule.num_experts);
        if (bias.is_given()) check_size("bias", bias.size(0), rule.num_experts);
        check_rows("experts", experts, rows, rule.num_active);
        check_rows("weights", weights, rows, rule.num_active);
        check_size("order", order.size(0), rows * rule.num_active);
        if (places.is_given())
          check_size("places", places.size(0), rule.num_experts);
        else
          check_size("begins", begins.size(0), rule.num_experts + 1);
        new (self) Route({.logits = logits.rows<const float>(),
                          .rows = rows,
                          .rule = rule,
                          .bias = bias.data<const float>(),
                          .experts = experts.data<int32_t>(),
                          .weights = weights.data<float>(),
                          .order = order.data<int32_t>(),
                          .begins = begins.data<int32_t>(),
                          .places = places.data<const int32_t>(),
                          .num_places = num_places,
                          .num_copies = places.is_given() ? places.size(1) : 1});
      },
      "logits"_a, "rule"_a, "bias"_a.none(), "experts"_a, "weights"_a, "order"_a, "begins"_a, "places"_a.none());
}

void bind_products(nb::module_& m) {
  bind_struct<ExpertStack>(
      m, "ExpertStack",
      [](ExpertStack* self, const PackedWeight& first, int64_t num_experts) {
        if (num_experts < 1) refuse("a stack of ", num_experts, " experts");
        new (self) ExpertStack{.first = first, .num_experts = num_experts};
      },
      "first"_a, "num_experts"_a);
  bind_struct<ExpertProduct, KernelCall>(
      m, "ExpertProduct",
      [](ExpertProduct* self, TensorView x, const ExpertStack& stack, TensorView order, TensorView begins,
         int64_t num_slots, bool of_tokens, TensorView bias, TensorView out, int64_t first_place) {
        const int64_t num_pairs = order.size(0), num_places = begins.size(0) - 1;
        if (num_slots < 1 || num_pairs % num_slots)
          refuse(num_pairs, " pairs with ", num_slots, " slots of a token, expected a multiple of 1 or more");
        if (first_place < 0 || first_place + stack.num_experts > num_places)
          refuse("experts from place ", first_place, ", expected ", stack.num_experts, " of ", num_places);
        check_rows("x", x, of_tokens ? num_pairs / num_slots : num_pairs, stack.first.k);
        check_rows("out", out, num_pairs, stack.first.n);
        if (bias.is_given()) check_rows("bias", bias, stack.num_experts, stack.first.n);
        new (self) ExpertProduct({.x = x.rows<const void>(),
                                  .dtype = x.dtype(),
                                  .stack = stack,
                                  .order = order.data<const int32_t>(),
                                  .begins = begins.data<const int32_t>(),
                                  .num_places = num_places,
                                  .first_place = first_place,
                                  .num_pairs = num_pairs,
                                  .num_slots = num_slots,
                                  .of_tokens = of_tokens,
                                  .bias = bias.data<const void>(),
                                  .bias_dtype = bias.is_given() ? bias.dtype() : DType::f32,
                                  .out = out.rows<void>(),
                                  .out_dtype = out.dtype()});
      },
      "x"_a, "stack"_a, "order"_a, "begins"_a, "num_slots"_a, "of_tokens"_a, "bias"_a.none(), "out"_a, "first_place"_a);
}

}  // namespace

void bind_experts(nb::module_& m) {
  bind_routing(m);
  bind_products(m);
  bind_struct<CombineExperts, KernelCall>(
      m, "CombineExperts",
      [](CombineExperts* self, TensorView y, TensorView order, TensorView weights, TensorView shared,
         TensorView shared_gate, TensorView out) {
        const int64_t rows = weights.size(0), num_slots = weights.size(1), columns = y.size(1);
        check_size("order", order.size(0), rows * num_slots);
        check_rows("y", y, rows * num_slots, columns);
        check_rows("out", out, rows, columns);
        if (shared.is_given()) check_rows("shared", shared, rows, columns);
        if (shared_gate.is_given()) check_rows("shared_gate", shared_gate, rows, 1);
        new (self) CombineExperts({.y = y.rows<const void>(),
                                   .dtype = y.dtype(),
                                   .order = order.data<const int32_t>(),
                                   .weights = weights.data<const float>(),
                                   .rows = rows,
                                   .num_slots = num_slots,
                                   .columns = columns,
                                   .shared = shared.rows<const void>(),
                                   .shared_gate = shared_gate.rows<const float>(),
                                   .out = out.rows<void>()});
      },
      "y"_a, "order"_a, "weights"_a, "shared"_a.none(), "shared_gate"_a.none(), "out"_a);
}

}  // namespace quire
