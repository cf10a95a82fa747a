// Thread-local scratch memory that grows and is kept. A kernel may get no other memory on the hot path.
#pragma once

#include <cstddef>

namespace quire {

// There is one buffer per thread and use, so that nested uses never overlap.
enum class Scratch : int {
  gemm_input,
  gemm_tiles,
  gemm_row,
  gemm_head,
  attention_unit,
  attention_partials,
  attention_merge,
  attention_tables,
  attention_states,
  expert_pieces,
  expert_tasks,
  expert_places,
  route_row,
  lora_order,
  lora_units,
  lora_sums,
  count
};

// 64-byte aligned, at least `bytes` long, content undefined. It is valid until this thread asks for more with the same
// use.
void* scratch(Scratch use, size_t bytes);

}  // namespace quire
