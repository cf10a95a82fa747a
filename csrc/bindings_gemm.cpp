// Python names of the matrix products.
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/gemm_fp8.h"

namespace nb = nanobind;

namespace quire {
namespace {

GroupedForm form_of(int bits, int64_t group_size, int scales, int offsets, int64_t super_size) {
  const GroupedForm form{bits, group_size, static_cast<GroupNumbers>(scales), static_cast<GroupNumbers>(offsets),
                         super_size};
  if (form.has_factors() && group_size * super_size > kMaxSuperElements)
    throw std::invalid_argument("a super-group of " + std::to_string(group_size * super_size) + " elements, at most " +
                                std::to_string(kMaxSuperElements));
  return form;
}

const int64_t* checked_rows(uintptr_t rows, int64_t count, int64_t n) {
  const auto* const found = pointer<const int64_t>(rows);
  check_indices({"rows"}, found, count, n);
  return found;
}

}  // namespace

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
  m.def(
      "gemm_rows",
      [](uintptr_t packed, int dtype, int64_t n, int64_t k, uintptr_t rows, int64_t count, uintptr_t out) {
        gemm_rows(pointer<const void>(packed), static_cast<DType>(dtype), k, checked_rows(rows, count, n), count,
                  pointer<void>(out));
      },
      nb::arg("packed"), nb::arg("dtype"), nb::arg("n"), nb::arg("k"), nb::arg("rows"), nb::arg("count"),
      nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm_grouped_packed_bytes",
      [](int64_t n, int64_t k, int bits, int64_t group_size, int scales, int offsets, int64_t super_size) {
        return gemm_grouped_packed_bytes(n, k, form_of(bits, group_size, scales, offsets, super_size));
      },
      nb::arg("n"), nb::arg("k"), nb::arg("bits"), nb::arg("group_size"), nb::arg("scales"), nb::arg("offsets"),
      nb::arg("super_size"));
  m.def(
      "gemm_grouped_pack",
      [](uintptr_t codes, int64_t code_stride, uintptr_t scales, uintptr_t offsets, uintptr_t super_scales,
         uintptr_t super_minima, int64_t n, int64_t k, uintptr_t packed, int bits, int64_t group_size,
         int scale_numbers, int offset_numbers, int64_t super_size) {
        gemm_grouped_pack(
            {pointer<const uint8_t>(codes), code_stride, pointer<const void>(scales), pointer<const void>(offsets),
             pointer<const void>(super_scales), pointer<const void>(super_minima)},
            n, k, form_of(bits, group_size, scale_numbers, offset_numbers, super_size), pointer<void>(packed));
      },
      nb::arg("codes"), nb::arg("code_stride"), nb::arg("scales"), nb::arg("offsets"), nb::arg("super_scales"),
      nb::arg("super_minima"), nb::arg("n"), nb::arg("k"), nb::arg("packed"), nb::arg("bits"), nb::arg("group_size"),
      nb::arg("scale_numbers"), nb::arg("offset_numbers"), nb::arg("super_size"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm_grouped_rows",
      [](uintptr_t packed, int64_t n, int64_t k, uintptr_t order, uintptr_t rows, int64_t count, int dtype,
         uintptr_t out, int bits, int64_t group_size, int scales, int offsets, int64_t super_size) {
        gemm_grouped_rows(pointer<const void>(packed), k, form_of(bits, group_size, scales, offsets, super_size),
                          pointer<const int32_t>(order), checked_rows(rows, count, n), count, static_cast<DType>(dtype),
                          pointer<void>(out));
      },
      nb::arg("packed"), nb::arg("n"), nb::arg("k"), nb::arg("order"), nb::arg("rows"), nb::arg("count"),
      nb::arg("dtype"), nb::arg("out"), nb::arg("bits"), nb::arg("group_size"), nb::arg("scales"), nb::arg("offsets"),
      nb::arg("super_size"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm_grouped_quantize",
      [](uintptr_t weight, int dtype, int64_t weight_stride, int64_t n, int64_t k, int bits, int64_t group_size,
         uintptr_t codes, uintptr_t scales) {
        gemm_grouped_quantize(pointer<const void>(weight), static_cast<DType>(dtype), weight_stride, n, k, bits,
                              group_size, pointer<uint8_t>(codes), pointer<float>(scales));
      },
      nb::arg("weight"), nb::arg("dtype"), nb::arg("weight_stride"), nb::arg("n"), nb::arg("k"), nb::arg("bits"),
      nb::arg("group_size"), nb::arg("codes"), nb::arg("scales"), nb::call_guard<nb::gil_scoped_release>());
  m.def("gemm_fp8_packed_bytes", gemm_fp8_packed_bytes, nb::arg("n"), nb::arg("k"), nb::arg("group_size"));
  m.def(
      "gemm_fp8_pack",
      [](uintptr_t codes, int64_t code_stride, uintptr_t scales, int64_t n, int64_t k, int64_t group_size,
         uintptr_t packed) {
        gemm_fp8_pack(pointer<const uint8_t>(codes), code_stride, pointer<const float>(scales), n, k, group_size,
                      pointer<void>(packed));
      },
      nb::arg("codes"), nb::arg("code_stride"), nb::arg("scales"), nb::arg("n"), nb::arg("k"), nb::arg("group_size"),
      nb::arg("packed"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm_fp8_rows",
      [](uintptr_t packed, int64_t n, int64_t k, int64_t group_size, uintptr_t rows, int64_t count, int dtype,
         uintptr_t out) {
        gemm_fp8_rows(pointer<const void>(packed), k, group_size, checked_rows(rows, count, n), count,
                      static_cast<DType>(dtype), pointer<void>(out));
      },
      nb::arg("packed"), nb::arg("n"), nb::arg("k"), nb::arg("group_size"), nb::arg("rows"), nb::arg("count"),
      nb::arg("dtype"), nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm_fp8_quantize",
      [](uintptr_t weight, int dtype, int64_t weight_stride, int64_t n, int64_t k, uintptr_t codes, uintptr_t scales) {
        gemm_fp8_quantize(pointer<const void>(weight), static_cast<DType>(dtype), weight_stride, n, k,
                          pointer<uint8_t>(codes), pointer<float>(scales));
      },
      nb::arg("weight"), nb::arg("dtype"), nb::arg("weight_stride"), nb::arg("n"), nb::arg("k"), nb::arg("codes"),
      nb::arg("scales"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "gemm",
      [](uintptr_t x, int dtype, int64_t x_stride, uintptr_t packed, int64_t m, int64_t n, int64_t k, uintptr_t bias,
         int bias_dtype, uintptr_t out, int out_dtype, int64_t out_stride, int bits, int64_t group_size, int scales,
         int offsets, int64_t super_size, uintptr_t order, int64_t fp8_group_size) {
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
              .form = form_of(bits, group_size, scales, offsets, super_size),
              .order = pointer<const int32_t>(order),
              .fp8_group_size = fp8_group_size});
      },
      nb::arg("x"), nb::arg("dtype"), nb::arg("x_stride"), nb::arg("packed"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
      nb::arg("bias"), nb::arg("bias_dtype"), nb::arg("out"), nb::arg("out_dtype"), nb::arg("out_stride"),
      nb::arg("bits") = 0, nb::arg("group_size") = 0, nb::arg("scales") = 0, nb::arg("offsets") = 0,
      nb::arg("super_size") = 1, nb::arg("order") = 0, nb::arg("fp8_group_size") = 0,
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
