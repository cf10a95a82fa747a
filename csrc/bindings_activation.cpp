// Python name of the gated activations.
#include "bindings.h"
#include "checks.h"
#include "quire/kernels/activation.h"

namespace quire {
namespace {

void run(const ActivationArgs& args) {
  if (args.factors != nullptr) check_indices({"order"}, args.order, args.rows, args.num_factors);
  if (args.begins == nullptr) return activation_kernels().gated(args);
  const int64_t begin = args.begins[0], end = args.begins[args.num_begins - 1];
  if (begin < 0 || begin > end || end > args.rows) refuse("rows ", begin, " to ", end, " of ", args.rows);
  const auto item = static_cast<int64_t>(size_of(args.dtype));
  ActivationArgs own = args;
  own.x.data = static_cast<const char*>(args.x.data) + begin * args.x.stride * item;
  own.out.data = static_cast<char*>(args.out.data) + begin * args.out.stride * item;
  own.rows = end - begin;
  if (args.order != nullptr) own.order += begin;
  activation_kernels().gated(own);
}
using GatedActivation = CallOf<ActivationArgs, run>;

}  // namespace

void bind_activation(nanobind::module_& m) {
  bind_struct<GatedActivation, KernelCall>(
      m, "GatedActivation",
      [](GatedActivation* self, int activation, TensorView x, TensorView factors, TensorView order, TensorView out,
         TensorView begins) {
        new (self) GatedActivation({.dtype = x.dtype(),
                                    .activation = enum_of("activation", activation, Activation::clamped_swiglu),
                                    .x = x.rows<const void>(),
                                    .out = out.rows<void>(),
                                    .rows = out.size(0),
                                    .inner = out.size(1),
                                    .factors = factors.data<const float>(),
                                    .num_factors = factors.is_given() ? factors.size(0) : 0,
                                    .order = order.data<const int32_t>(),
                                    .begins = begins.data<const int32_t>(),
                                    .num_begins = begins.is_given() ? begins.size(0) : 0});
      },
      "activation"_a, "x"_a, "factors"_a.none(), "order"_a.none(), "out"_a, "begins"_a.none());
}

}  // namespace quire
