// Python names of the additions of adapters.
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/lora.h"
#include "quire/lora_pack.h"

namespace nb = nanobind;

namespace quire {
namespace {

void run(const LoraArgs& args) {
  const LoraInput& input = args.input;
  check_slots(input.slots, input.rows, input.table.num_slots);
  if (input.token_ids != nullptr) check_indices({"token_ids"}, input.token_ids, input.rows, input.table.k);
  lora_kernels().add(args);
}
using AddLora = CallOf<LoraArgs, run>;

}  // namespace

void bind_lora(nb::module_& m) {
  bind_struct<LoraTable>(
      m, "LoraTable",
      [](LoraTable* self, TensorView deltas, int dtype, int64_t k, const std::vector<int64_t>& columns) {
        if (columns.empty() || columns.size() > kLoraParts)
          refuse("a layer of ", columns.size(), " parts, expected 1 to ", kLoraParts);
        const int64_t num_slots = deltas.size(0), num_parts = static_cast<int64_t>(columns.size());
        if (deltas.bytes() != num_slots * num_parts * static_cast<int64_t>(sizeof(LoraDelta)))
          refuse("deltas have ", deltas.bytes(), " bytes, expected ", sizeof(LoraDelta), " for each of ", num_slots,
                 " slots and ", num_parts, " parts");
        new (self) LoraTable{.deltas = deltas.data<const LoraDelta>(),
                             .num_slots = num_slots,
                             .k = k,
                             .dtype = enum_of("dtype", dtype, DType::f16),
                             .num_parts = static_cast<int>(num_parts),
                             .columns = {}};
        std::copy(columns.begin(), columns.end(), self->columns);
      },
      "deltas"_a, "dtype"_a, "k"_a, "columns"_a);
  bind_struct<AddLora, KernelCall>(
      m, "AddLora",
      [](AddLora* self, const LoraTable& table, TensorView x, TensorView token_ids, TensorView slots, TensorView base,
         TensorView out) {
        new (self) AddLora({.input = {.table = table,
                                      .x = x.rows<const void>(),
                                      .dtype = x.is_given() ? x.dtype() : DType::f32,
                                      .token_ids = token_ids.data<const int64_t>(),
                                      .slots = slots.data<const int32_t>(),
                                      .rows = out.size(0)},
                            .base = base.rows<const float>(),
                            .out = out.rows<void>(),
                            .out_dtype = out.dtype()});
      },
      "table"_a, "x"_a.none(), "token_ids"_a.none(), "slots"_a, "base"_a, "out"_a);
  m.def(
      "pack_factors",
      [](TensorView source, TensorView factors, TensorView memory) {
        const FactorPacking packing = {.source = source.data<const char>(),
                                       .source_bytes = source.bytes(),
                                       .factors = factors.data<const Factor>(),
                                       .num_factors = factors.size(0),
                                       .memory = memory.data<void>(),
                                       .dtype = memory.dtype(),
                                       .num_elements = memory.size(0)};
        const nb::gil_scoped_release release;
        pack_factors(packing);
      },
      nb::kw_only(), "source"_a, "factors"_a, "memory"_a);
}

}  // namespace quire
