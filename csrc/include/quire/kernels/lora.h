// Low-rank additions to the result of a product (LoRA): out = round(base + scale * B (A x)), with an A and a B for each
// row of x, or none.
//
// The columns of the result are cut into parts (q, k, v of a fused product), and each has an A and a B of its own, or
// none. Sums are float. A row's bits depend on the row alone: A x is a sum over k in the lanes of one vector, which are
// added at the end; B (A x) is a sum over the ranks in ascending order; then one addition to base, and one rounding.
// Where nothing is added, base is rounded and keeps its bits.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/strided.h"

namespace quire {

inline constexpr int64_t kLoraColumns = 16;  // of a panel of B
inline constexpr int kLoraParts = 4;

// The addition of one adapter to one part: four words of 64 bits, which Python writes (kernels/lora.py).
struct LoraDelta {
  const void* a;  // [rank][k]; of a table that looks rows up: [k][rank]
  const void* b;  // [columns / 16][rank][16], padded with zeros
  int64_t rank;   // 0: nothing is added
  double scale;
};

// The additions to one layer, which change between calls and never during one.
struct LoraTable {
  const LoraDelta* deltas;  // [num_slots][num_parts]
  int64_t num_slots, k;
  DType dtype;  // of A and B
  int num_parts;
  int64_t columns[kLoraParts];  // of each part
};

struct LoraArgs {
  LoraTable table;
  StridedRows<const void> x;  // [rows, k]
  DType dtype;                // of x
  const int64_t* token_ids;   // [rows], for an embedding: x is the unit vector of a token; else nullptr
  const int32_t* slots;       // [rows]; -1: the row has no adapter
  StridedRows<const float> base;
  StridedRows<void> out;  // base itself if it is float
  DType out_dtype;
  int64_t rows;
};

struct LoraKernels {
  void (*add)(const LoraArgs&);
};
const LoraKernels& lora_kernels();

}  // namespace quire
