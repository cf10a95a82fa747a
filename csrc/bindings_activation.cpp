// Python name of the gated activations.
#include "bindings.h"
#include "quire/kernels/activation.h"

namespace quire {
namespace {

void run(const ActivationArgs& args) { activation_kernels().gated(args); }
using GatedActivation = CallOf<ActivationArgs, run>;

}  // namespace

void bind_activation(nanobind::module_& m) {
  bind_struct<GatedActivation, KernelCall>(
      m, "GatedActivation",
      [](GatedActivation* self, int activation, TensorView x, TensorView out) {
        new (self) GatedActivation({.dtype = x.dtype(),
                                    .activation = static_cast<Activation>(activation),
                                    .x = x.rows<const void>(),
                                    .out = out.rows<void>(),
                                    .rows = out.size(0),
                                    .inner = out.size(1)});
      },
      "activation"_a, "x"_a, "out"_a);
}

}  // namespace quire
