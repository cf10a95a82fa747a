// Python name of the gated activations.
#include "bindings.h"
#include "checks.h"
#include "quire/kernels/activation.h"

namespace quire {
namespace {

void run(const ActivationArgs& args) {
  if (args.factors != nullptr) check_indices({"order"}, args.order, args.rows, args.num_factors);
  activation_kernels().gated(args);
}
using GatedActivation = CallOf<ActivationArgs, run>;

}  // namespace

void bind_activation(nanobind::module_& m) {
  bind_struct<GatedActivation, KernelCall>(
      m, "GatedActivation",
      [](GatedActivation* self, int activation, TensorView x, TensorView factors, TensorView order, TensorView out) {
        new (self) GatedActivation({.dtype = x.dtype(),
                                    .activation = static_cast<Activation>(activation),
                                    .x = x.rows<const void>(),
                                    .out = out.rows<void>(),
                                    .rows = out.size(0),
                                    .inner = out.size(1),
                                    .factors = factors.data<const float>(),
                                    .num_factors = factors.is_given() ? factors.size(0) : 0,
                                    .order = order.data<const int32_t>()});
      },
      "activation"_a, "x"_a, "factors"_a.none(), "order"_a.none(), "out"_a);
}

}  // namespace quire
