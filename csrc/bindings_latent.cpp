// Python names of the rotation and cache write of latent attention.
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/latent.h"

namespace quire {
namespace {

void run(const LatentCacheArgs& a) {
  check_indices({"positions"}, a.positions, a.num_tokens, a.num_positions);
  const int64_t num_slots = a.cache.num_blocks * a.cache.block_size;
  check_each<std::out_of_range>(
      {"slot_mapping"}, a.slot_mapping, a.num_tokens, [num_slots](int64_t slot) { return slot < num_slots; },
      [num_slots] { return "less than the " + std::to_string(num_slots) + " slots of the cache"; });
  latent_kernels().rope_and_cache(a);
}
using LatentRopeAndCache = CallOf<LatentCacheArgs, run>;

}  // namespace

void bind_latent(nanobind::module_& m) {
  bind_struct<LatentRopeAndCache, KernelCall>(
      m, "LatentRopeAndCache",
      [](LatentRopeAndCache* self, TensorView q, TensorView rows, TensorView positions, TensorView slot_mapping,
         const KvCache& cache, TensorView cos_sin, bool is_interleaved, TensorView out) {
        new (self) LatentRopeAndCache({.dtype = q.dtype(),
                                       .q = q.heads<const void>(),
                                       .rows = rows.rows<const void>(),
                                       .positions = positions.data<const int64_t>(),
                                       .slot_mapping = slot_mapping.data<const int64_t>(),
                                       .cache = cache,
                                       .cos_sin = cos_sin.data<const float>(),
                                       .num_positions = cos_sin.size(0),
                                       .rotary_dim = cos_sin.size(1),
                                       .is_interleaved = is_interleaved,
                                       .out = out.heads<void>(),
                                       .num_tokens = q.size(0),
                                       .num_heads = q.size(1),
                                       .rank = rows.size(1) - cos_sin.size(1)});
      },
      "q"_a, "rows"_a, "positions"_a, "slot_mapping"_a, "cache"_a, "cos_sin"_a, "is_interleaved"_a, "out"_a);
}

}  // namespace quire
