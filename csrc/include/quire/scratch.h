// Thread-local scratch memory, which grows and is kept. Kernels allocate no other memory while they run.
#pragma once

#include <cstddef>

namespace quire {

// There is one buffer for each thread and use, so that nested uses never overlap.
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

// Memory of at least `bytes`, aligned to 64 bytes, with undefined content. It is valid until this thread asks for more
// memory with the same use.
void* scratch(Scratch use, size_t bytes);

}  // namespace quire
