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
  if (a.cos_sin != nullptr) check_indices({"positions"}, a.positions, a.num_tokens, a.num_positions);
  const int64_t num_slots = a.num_blocks * a.block_size;
  check_each<std::out_of_range>(
      {"slot_mapping"}, a.slot_mapping, a.num_tokens, [num_slots](int64_t slot) { return slot < num_slots; },
      [num_slots] { return "less than the " + std::to_string(num_slots) + " slots of the cache"; });
}

}  // namespace

void bind_norm_rope(nb::module_& m) {
  m.def(
      "rms_norm",
      [](int dtype, uintptr_t x, int64_t x_stride, uintptr_t residual, int64_t residual_stride, uintptr_t weight,
         int weight_dtype, float eps, float weight_offset, uintptr_t out, int64_t out_stride, int64_t rows,
         int64_t dim) {
        norm_rope_kernels().rms_norm({.dtype = static_cast<DType>(dtype),
                                      .x = pointer<const void>(x),
                                      .x_stride = x_stride,
                                      .residual = pointer<void>(residual),
                                      .residual_stride = residual_stride,
                                      .weight = pointer<const void>(weight),
                                      .weight_dtype = static_cast<DType>(weight_dtype),
                                      .eps = eps,
                                      .weight_offset = weight_offset,
                                      .out = pointer<void>(out),
                                      .out_stride = out_stride,
                                      .rows = rows,
                                      .dim = dim});
      },
      nb::arg("dtype"), nb::arg("x"), nb::arg("x_stride"), nb::arg("residual"), nb::arg("residual_stride"),
      nb::arg("weight"), nb::arg("weight_dtype"), nb::arg("eps"), nb::arg("weight_offset"), nb::arg("out"),
      nb::arg("out_stride"), nb::arg("rows"), nb::arg("dim"), nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "rope_and_cache",
      [](int dtype, int cache_type, uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, uintptr_t k,
         int64_t k_token_stride, int64_t k_head_stride, uintptr_t v, int64_t v_token_stride, int64_t v_head_stride,
         uintptr_t positions, uintptr_t cos_sin, int64_t rotary_dim, int64_t num_positions, uintptr_t slot_mapping,
         uintptr_t k_cache, int64_t k_block_stride, int64_t k_cache_head_stride, uintptr_t v_cache,
         int64_t v_block_stride, int64_t v_cache_head_stride, uintptr_t k_scales, uintptr_t v_scales,
         int64_t scales_block_stride, int64_t num_tokens, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
         int64_t block_size, int64_t num_blocks, uintptr_t q_norm_weight, uintptr_t k_norm_weight,
         int norm_weight_dtype, float norm_eps, float norm_weight_offset) {
        const RopeCacheArgs args = {.dtype = static_cast<DType>(dtype),
                                    .cache_type = static_cast<CacheType>(cache_type),
                                    .q = pointer<void>(q),
                                    .q_token_stride = q_token_stride,
                                    .q_head_stride = q_head_stride,
                                    .k = pointer<const void>(k),
                                    .k_token_stride = k_token_stride,
                                    .k_head_stride = k_head_stride,
                                    .v = pointer<const void>(v),
                                    .v_token_stride = v_token_stride,
                                    .v_head_stride = v_head_stride,
                                    .positions = pointer<const int64_t>(positions),
                                    .cos_sin = pointer<const float>(cos_sin),
                                    .rotary_dim = rotary_dim,
                                    .num_positions = num_positions,
                                    .slot_mapping = pointer<const int64_t>(slot_mapping),
                                    .k_cache = pointer<void>(k_cache),
                                    .k_block_stride = k_block_stride,
                                    .k_cache_head_stride = k_cache_head_stride,
                                    .v_cache = pointer<void>(v_cache),
                                    .v_block_stride = v_block_stride,
                                    .v_cache_head_stride = v_cache_head_stride,
                                    .k_scales = pointer<float>(k_scales),
                                    .v_scales = pointer<float>(v_scales),
                                    .scales_block_stride = scales_block_stride,
                                    .num_tokens = num_tokens,
                                    .num_q_heads = num_q_heads,
                                    .num_kv_heads = num_kv_heads,
                                    .head_dim = head_dim,
                                    .block_size = block_size,
                                    .num_blocks = num_blocks,
                                    .q_norm_weight = pointer<const void>(q_norm_weight),
                                    .k_norm_weight = pointer<const void>(k_norm_weight),
                                    .norm_weight_dtype = static_cast<DType>(norm_weight_dtype),
                                    .norm_eps = norm_eps,
                                    .norm_weight_offset = norm_weight_offset};
        check(args);
        norm_rope_kernels().rope_and_cache(args);
      },
      nb::arg("dtype"), nb::arg("cache_type"), nb::arg("q"), nb::arg("q_token_stride"), nb::arg("q_head_stride"),
      nb::arg("k"), nb::arg("k_token_stride"), nb::arg("k_head_stride"), nb::arg("v"), nb::arg("v_token_stride"),
      nb::arg("v_head_stride"), nb::arg("positions"), nb::arg("cos_sin"), nb::arg("rotary_dim"),
      nb::arg("num_positions"), nb::arg("slot_mapping"), nb::arg("k_cache"), nb::arg("k_block_stride"),
      nb::arg("k_cache_head_stride"), nb::arg("v_cache"), nb::arg("v_block_stride"), nb::arg("v_cache_head_stride"),
      nb::arg("k_scales"), nb::arg("v_scales"), nb::arg("scales_block_stride"), nb::arg("num_tokens"),
      nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("block_size"),
      nb::arg("num_blocks"), nb::arg("q_norm_weight"), nb::arg("k_norm_weight"), nb::arg("norm_weight_dtype"),
      nb::arg("norm_eps"), nb::arg("norm_weight_offset"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
