// Python names of the norms and of rotary embedding with KV cache write.
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/norm_rope.h"

namespace nb = nanobind;

namespace quire {
namespace {

void check(const RopeCacheArgs& a) {
  if (a.rotation.cos_sin != nullptr) check_indices({"positions"}, a.positions, a.num_tokens, a.rotation.num_positions);
  const int64_t num_slots = a.cache.num_blocks * a.cache.block_size;
  check_each<std::out_of_range>(
      {"slot_mapping"}, a.slot_mapping, a.num_tokens, [num_slots](int64_t slot) { return slot < num_slots; },
      [num_slots] { return "less than the " + std::to_string(num_slots) + " slots of the cache"; });
}

void run(const NormArgs& args) { norm_rope_kernels().norm(args); }
using Norm = CallOf<NormArgs, run>;

void run(const RopeCacheArgs& args) {
  check(args);
  norm_rope_kernels().rope_and_cache(args);
}
using RopeAndCache = CallOf<RopeCacheArgs, run>;

void bind_norm(nb::module_& m) {
  bind_struct<Norm, KernelCall>(
      m, "Norm",
      [](Norm* self, TensorView x, TensorView residual, float multiplier, TensorView weight, TensorView bias, float eps,
         float weight_offset, TensorView out) {
        new (self) Norm({.dtype = x.dtype(),
                         .x = x.rows<const void>(),
                         .residual = residual.rows<void>(),
                         .multiplier = multiplier,
                         .weight = weight.data<const void>(),
                         .bias = bias.data<const void>(),
                         .weight_dtype = weight.dtype(),
                         .eps = eps,
                         .weight_offset = weight_offset,
                         .out = out.rows<void>(),
                         .rows = x.size(0),
                         .dim = x.size(1)});
      },
      "x"_a, "residual"_a.none(), "multiplier"_a, "weight"_a, "bias"_a.none(), "eps"_a, "weight_offset"_a, "out"_a);
}

void bind_rotation(nb::module_& m) {
  bind_struct<HeadRotation>(
      m, "HeadRotation",
      [](HeadRotation* self, TensorView cos_sin, TensorView q_norm_weight, TensorView k_norm_weight, float norm_eps,
         float norm_weight_offset, float temperature, float temperature_floor) {
        const bool rotates = cos_sin.is_given();
        const TensorView& norm_weight = q_norm_weight.is_given() ? q_norm_weight : k_norm_weight;
        new (self) HeadRotation{.cos_sin = cos_sin.data<const float>(),
                                .num_positions = rotates ? cos_sin.size(0) : 0,
                                .rotary_dim = rotates ? cos_sin.size(1) : 0,
                                .q_norm_weight = q_norm_weight.data<const void>(),
                                .k_norm_weight = k_norm_weight.data<const void>(),
                                .norm_weight_dtype = norm_weight.is_given() ? norm_weight.dtype() : DType::f32,
                                .norm_eps = norm_eps,
                                .norm_weight_offset = norm_weight_offset,
                                .temperature = temperature,
                                .temperature_floor = temperature_floor};
      },
      "cos_sin"_a.none(), "q_norm_weight"_a.none(), "k_norm_weight"_a.none(), "norm_eps"_a, "norm_weight_offset"_a,
      "temperature"_a, "temperature_floor"_a);
}

void bind_rope(nb::module_& m) {
  bind_struct<RopeAndCache, KernelCall>(
      m, "RopeAndCache",
      [](RopeAndCache* self, TensorView q, TensorView k, TensorView v, TensorView positions, TensorView slot_mapping,
         const KvCache& cache, const HeadRotation& rotation) {
        new (self) RopeAndCache({.dtype = q.dtype(),
                                 .q = q.heads<void>(),
                                 .k = k.heads<const void>(),
                                 .v = v.heads<const void>(),
                                 .positions = positions.data<const int64_t>(),
                                 .slot_mapping = slot_mapping.data<const int64_t>(),
                                 .cache = cache,
                                 .rotation = rotation,
                                 .num_tokens = q.size(0),
                                 .num_q_heads = q.size(1),
                                 .head_dim = q.size(2)});
      },
      "q"_a, "k"_a, "v"_a, "positions"_a, "slot_mapping"_a, "cache"_a, "rotation"_a);
}

}  // namespace

void bind_norm_rope(nb::module_& m) {
  bind_norm(m);
  bind_rotation(m);
  bind_rope(m);
}

}  // namespace quire
