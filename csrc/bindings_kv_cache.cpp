// Python name of a layer's KV cache, which several kernels take.
#include "bindings.h"
#include "quire/kernels/kv_cache.h"

namespace quire {

void bind_kv_cache(nanobind::module_& m) {
  bind_struct<KvCache>(
      m, "KvCache",
      [](KvCache* self, TensorView k, TensorView v, TensorView k_scales, TensorView v_scales) {
        new (self) KvCache{.type = k.cache_type(),
                           .k = k.blocks<void>(4),
                           .v = v.blocks<void>(4),
                           .k_scales = k_scales.blocks<float>(3),
                           .v_scales = v_scales.blocks<float>(3),
                           .num_blocks = k.size(0),
                           .num_kv_heads = static_cast<int>(k.size(1)),
                           .block_size = static_cast<int>(k.size(2))};
      },
      "k"_a, "v"_a, "k_scales"_a.none(), "v_scales"_a.none());
}

}  // namespace quire
