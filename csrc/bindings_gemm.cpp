// Python names of the matrix products and of the functions that pack their weights.
#include "bindings.h"
#include "checks.h"
#include "quire/kernels/gemm_fp8.h"

namespace nb = nanobind;

namespace quire {
namespace {

void run(const GemmArgs& args) {
  if (args.adapter_slots != nullptr) check_slots(args.adapter_slots, args.m, args.adapters.num_slots);
  gemm(args);
}
using Gemm = CallOf<GemmArgs, run>;

void run(const WeightRowsArgs& args) {
  check_indices({"rows"}, args.rows, args.count, args.weight.n);
  if (args.weight.fp8_group_size != 0) return gemm_fp8_rows(args);
  if (args.weight.form.bits != 0) return gemm_grouped_rows(args);
  gemm_rows(args);
}
using WeightRows = CallOf<WeightRowsArgs, run>;

void run(const HeadGemmArgs& args) { gemm_heads(args); }
using HeadGemm = CallOf<HeadGemmArgs, run>;

PlainWeight plain(const TensorView& weight) {
  return {.rows = weight.rows<const void>(), .dtype = weight.dtype(), .n = weight.size(0), .k = weight.size(1)};
}

void bind_form(nb::module_& m) {
  bind_struct<GroupedForm>(
      m, "GroupedForm",
      [](GroupedForm* self, int bits, int64_t group_size, int scales, int offsets, int64_t super_size) {
        const GroupedForm form{bits, group_size, enum_of("scales", scales, GroupNumbers::e8m0),
                               enum_of("offsets", offsets, GroupNumbers::e8m0), super_size};
        if (form.has_factors() && group_size * super_size > kMaxSuperElements)
          refuse("a super-group of ", group_size * super_size, " elements, at most ", kMaxSuperElements);
        new (self) GroupedForm(form);
      },
      "bits"_a, "group_size"_a, "scales"_a, "offsets"_a, "super_size"_a);
}

void bind_weight(nb::module_& m) {
  bind_struct<PackedWeight>(
      m, "PackedWeight",
      [](PackedWeight* self, TensorView data, int64_t n, int64_t k, const GroupedForm* form, TensorView order,
         int64_t fp8_group_size) {
        new (self) PackedWeight{.data = data.data<const void>(),
                                .n = n,
                                .k = k,
                                .form = form == nullptr ? GroupedForm{} : *form,
                                .order = order.data<const int32_t>(),
                                .fp8_group_size = fp8_group_size};
      },
      "data"_a, "n"_a, "k"_a, "form"_a.none() = nb::none(), "order"_a.none() = nb::none(), "fp8_group_size"_a = 0);
}

void bind_products(nb::module_& m) {
  bind_struct<Gemm, KernelCall>(
      m, "Gemm",
      [](Gemm* self, TensorView x, const PackedWeight& weight, TensorView bias, TensorView out,
         const LoraTable* adapters, TensorView adapter_slots) {
        new (self) Gemm({.x = x.rows<const void>(),
                         .dtype = x.dtype(),
                         .m = x.size(0),
                         .weight = weight,
                         .bias = bias.data<const void>(),
                         .bias_dtype = bias.is_given() ? bias.dtype() : DType::f32,
                         .out = out.rows<void>(),
                         .out_dtype = out.dtype(),
                         .adapters = adapters == nullptr ? LoraTable{} : *adapters,
                         .adapter_slots = adapter_slots.data<const int32_t>()});
      },
      "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "adapters"_a.none() = nb::none(),
      "adapter_slots"_a.none() = nb::none());
  bind_struct<HeadGemm, KernelCall>(
      m, "HeadGemm",
      [](HeadGemm* self, TensorView x, const PackedWeight& weight, TensorView out) {
        new (self) HeadGemm({.x = x.heads<const void>(),
                             .dtype = x.dtype(),
                             .num_tokens = x.size(0),
                             .num_heads = x.size(1),
                             .weight = weight,
                             .out = out.heads<void>()});
      },
      "x"_a, "weight"_a, "out"_a);
  bind_struct<WeightRows, KernelCall>(
      m, "WeightRows",
      [](WeightRows* self, const PackedWeight& weight, TensorView rows, TensorView out) {
        new (self) WeightRows({.weight = weight,
                               .rows = rows.data<const int64_t>(),
                               .count = rows.size(0),
                               .dtype = out.dtype(),
                               .out = out.data<void>()});
      },
      "weight"_a, "rows"_a, "out"_a);
}

void bind_packing(nb::module_& m) {
  m.def(
      "gemm_packed_bytes",
      [](int dtype, int64_t n, int64_t k) { return gemm_packed_bytes(enum_of("dtype", dtype, DType::f16), n, k); },
      nb::kw_only(), "dtype"_a, "n"_a, "k"_a);
  m.def(
      "gemm_pack",
      [](TensorView weight, TensorView packed) {
        const PlainWeight from = plain(weight);
        const nb::gil_scoped_release release;
        gemm_pack(from, packed.data<void>());
      },
      nb::kw_only(), "weight"_a, "packed"_a);
}

void bind_grouped_packing(nb::module_& m) {
  m.def("gemm_grouped_packed_bytes", gemm_grouped_packed_bytes, nb::kw_only(), "n"_a, "k"_a, "form"_a);
  m.def(
      "gemm_grouped_pack",
      [](TensorView codes, TensorView scales, TensorView offsets, TensorView super_scales, TensorView super_minima,
         const GroupedForm& form, TensorView packed) {
        const GroupedSource source = {.codes = codes.rows<const uint8_t>(),
                                      .scales = scales.data<const void>(),
                                      .offsets = offsets.data<const void>(),
                                      .super_scales = super_scales.data<const void>(),
                                      .super_minima = super_minima.data<const void>()};
        const int64_t n = codes.size(0), k = codes.size(1);
        const nb::gil_scoped_release release;
        gemm_grouped_pack(source, n, k, form, packed.data<void>());
      },
      nb::kw_only(), "codes"_a, "scales"_a, "offsets"_a.none(), "super_scales"_a.none(), "super_minima"_a.none(),
      "form"_a, "packed"_a);
  m.def(
      "gemm_grouped_quantize",
      [](TensorView weight, int bits, int64_t group_size, TensorView codes, TensorView scales) {
        const PlainWeight from = plain(weight);
        const nb::gil_scoped_release release;
        gemm_grouped_quantize(from, bits, group_size, codes.data<uint8_t>(), scales.data<float>());
      },
      nb::kw_only(), "weight"_a, "bits"_a, "group_size"_a, "codes"_a, "scales"_a);
}

void bind_fp8_packing(nb::module_& m) {
  m.def("gemm_fp8_packed_bytes", gemm_fp8_packed_bytes, nb::kw_only(), "n"_a, "k"_a, "group_size"_a);
  m.def(
      "gemm_fp8_pack",
      [](TensorView codes, TensorView scales, int64_t group_size, TensorView packed) {
        const auto rows = codes.rows<const uint8_t>();
        const int64_t n = codes.size(0), k = codes.size(1);
        const nb::gil_scoped_release release;
        gemm_fp8_pack(rows, scales.data<const float>(), n, k, group_size, packed.data<void>());
      },
      nb::kw_only(), "codes"_a, "scales"_a, "group_size"_a, "packed"_a);
  m.def(
      "gemm_fp8_quantize",
      [](TensorView weight, TensorView codes, TensorView scales) {
        const PlainWeight from = plain(weight);
        const nb::gil_scoped_release release;
        gemm_fp8_quantize(from, codes.data<uint8_t>(), scales.data<float>());
      },
      nb::kw_only(), "weight"_a, "codes"_a, "scales"_a);
}

}  // namespace

void bind_gemm(nb::module_& m) {
  bind_form(m);
  bind_weight(m);
  bind_products(m);
  bind_packing(m);
  bind_grouped_packing(m);
  bind_fp8_packing(m);
}

}  // namespace quire
