// Python names of the matrix products.
#include "bindings.h"
#include "quire/kernels/gemm.h"

namespace nb = nanobind;

namespace quire {

void bind_gemm(nb::module_& m) {
  m.def(
      "gemm_packed_bytes",
      [](int dtype, int64_t n, int64_t k) { return gemm_packed_bytes(static_cast<DType>(dtype), n, k); },
      nb::arg("dtype"), nb::arg("n"), nb::arg("k"));
  m.def(
      "gemm_pack",
      [](uintptr_t weight, int dtype, int64_t n, int64_t k, int64_t row_stride, uintptr_t packed) {
        gemm_pack(pointer<const void>(weight), static_cast<DType>(dtype), n, k, row_stride, pointer<void>(packed));
      },
      nb::arg("weight"), nb::arg("dtype"), nb::arg("n"), nb::arg("k"), nb::arg("row_stride"), nb::arg("packed"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def("gemm_grouped_packed_bytes", gemm_grouped_packed_bytes, nb::arg("n"), nb::arg("k"), nb::arg("bits"),
        nb::arg("group_size"));
  m.def(
      "gemm_grouped_pack",
      [](uintptr_t codes, int64_t code_stride, uintptr_t scales, int64_t n, int64_t k, int bits, int64_t group_size,
         uintptr_t packed) {
        gemm_grouped_pack(pointer<const uint8_t>(codes), code_stride, pointer<const float>(scales), n, k, bits,
                          group_size, pointer<void>(packed));
      },
      nb::arg("codes"), nb::arg("code_stride"), nb::arg("scales"), nb::arg("n"), nb::arg("k"), nb::arg("bits"),
      nb::arg("group_size"), nb::arg("packed"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm_grouped_quantize",
      [](uintptr_t weight, int dtype, int64_t weight_stride, int64_t n, int64_t k, int bits, int64_t group_size,
         uintptr_t codes, uintptr_t scales) {
        gemm_grouped_quantize(pointer<const void>(weight), static_cast<DType>(dtype), weight_stride, n, k, bits,
                              group_size, pointer<uint8_t>(codes), pointer<float>(scales));
      },
      nb::arg("weight"), nb::arg("dtype"), nb::arg("weight_stride"), nb::arg("n"), nb::arg("k"), nb::arg("bits"),
      nb::arg("group_size"), nb::arg("codes"), nb::arg("scales"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm",
      [](uintptr_t x, int dtype, int64_t x_stride, uintptr_t packed, int64_t m, int64_t n, int64_t k, uintptr_t bias,
         int bias_dtype, uintptr_t out, int out_dtype, int64_t out_stride, int bits, int64_t group_size) {
        gemm({.x = pointer<const void>(x),
              .dtype = static_cast<DType>(dtype),
              .x_stride = x_stride,
              .packed = pointer<const void>(packed),
              .m = m,
              .n = n,
              .k = k,
              .bias = pointer<const void>(bias),
              .bias_dtype = static_cast<DType>(bias_dtype),
              .out = pointer<void>(out),
              .out_dtype = static_cast<DType>(out_dtype),
              .out_stride = out_stride,
              .bits = bits,
              .group_size = group_size});
      },
      nb::arg("x"), nb::arg("dtype"), nb::arg("x_stride"), nb::arg("packed"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
      nb::arg("bias"), nb::arg("bias_dtype"), nb::arg("out"), nb::arg("out_dtype"), nb::arg("out_stride"),
      nb::arg("bits") = 0, nb::arg("group_size") = 0, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
