// Python name of the gated activations.
#include "bindings.h"
#include "quire/kernels/activation.h"

namespace nb = nanobind;

namespace quire {

void bind_activation(nb::module_& m) {
  m.def(
      "gated_activation",
      [](int dtype, int activation, uintptr_t x, int64_t x_stride, uintptr_t out, int64_t out_stride, int64_t rows,
         int64_t inner) {
        activation_kernels().gated({.dtype = static_cast<DType>(dtype),
                                    .activation = static_cast<Activation>(activation),
                                    .x = pointer<const void>(x),
                                    .x_stride = x_stride,
                                    .out = pointer<void>(out),
                                    .out_stride = out_stride,
                                    .rows = rows,
                                    .inner = inner});
      },
      nb::arg("dtype"), nb::arg("activation"), nb::arg("x"), nb::arg("x_stride"), nb::arg("out"), nb::arg("out_stride"),
      nb::arg("rows"), nb::arg("inner"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
