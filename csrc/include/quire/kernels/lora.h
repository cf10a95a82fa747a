// Low-rank additions to the results of products (LoRA): out = round(base + scale * B (A x)), with an A and a B for each
// row of x, or none.
//
// The columns of the result are cut into parts (q, k, v of a fused product). Each part has an A and a B of its own, or
// none. Sums are float. A row's bits depend on the row alone. A x is a sum over k in the lanes of one vector, and the
// lanes are added at the end. B (A x) is a sum over the ranks in ascending order. Then there is one addition to base,
// and one rounding. With AMX, an A x of bfloat16 has the order of its tiles (csrc/kernels/lora_amx.h). Where nothing is
// added, base is rounded and keeps its bits.
//
// Products (quire/kernels/gemm.h) compute A x before they begin and add B (A x) to finished sums before they round
// them. The look-up of an embedding is no product. Its base is in memory, and `add` is called.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/strided.h"

namespace quire {

inline constexpr int64_t kLoraColumns = 16;  // columns of a panel of B
inline constexpr int kLoraParts = 4;

// The addition of one adapter to one part: four words of 64 bits, which Python writes (kernels/lora.py).
struct LoraDelta {
  const void* a;  // [rank][k]; for a table that looks rows up: [k][rank]
  const void* b;  // [columns / 16][rank][16], padded with zeros
  int64_t rank;   // 0: nothing is added
  double scale;
};

// The additions to one layer, which change between calls and never during one.
struct LoraTable {
  const LoraDelta* deltas;  // [num_slots][num_parts]
  int64_t num_slots, k;
  DType dtype;  // dtype of A and B
  int num_parts;
  int64_t columns[kLoraParts];  // columns of each part
};

// Rows, and the adapter of each.
struct LoraInput {
  LoraTable table;
  StridedRows<const void> x;  // [rows, k]
  DType dtype;                // dtype of x
  const int64_t* token_ids;   // [rows], for an embedding: x is the unit vector of a token; else nullptr
  const int32_t* slots;       // [rows]; -1: the row has no adapter
  int64_t rows;
};

// A piece of A x. Units of one adapter follow each other, in the order of their memory.
struct LoraUnit {
  const LoraDelta* delta;
  int64_t row, row_end;  // in LoraPlan::order
  int64_t sums;          // first place of the part's A x in a row of sums
  int64_t begin, end;    // ranks of A
};

// scale * A x of an input, in tasks that may run at the same time. The memory is the planning thread's, until it plans
// again.
struct LoraPlan {
  LoraInput input;
  const int32_t* order;  // rows by adapter
  const LoraUnit* units;
  int64_t num_units;
  int num_tasks;
  float* sums;  // [rows][stride], the sums of the parts side by side
  int64_t stride;
};

// A rectangle of the result: at most 64 columns, and 32 rows.
struct LoraBlock {
  int64_t row, num_rows, column, num_columns;
};
inline constexpr int64_t kLoraRows = 32, kLoraBlockColumns = 64;
inline constexpr int64_t kLoraPitch = kLoraBlockColumns + kLoraColumns;  // floats between two rows in a LoraSpace

// Room for the addition to a block. Panels of B need not begin or end where the block does, so there are columns around
// each row.
struct LoraSpace {
  alignas(64) float memory[kLoraColumns + kLoraRows * kLoraPitch];
  float* rows() { return memory + kLoraColumns; }
};

// Finished sums of the rows and columns of a rectangle, and the place of the result.
struct LoraFinish {
  StridedRows<const float> sums;
  const float* bias;      // [64]
  StridedRows<void> out;  // `sums` itself if it is float
  DType out_dtype;
};

struct LoraArgs {
  LoraInput input;
  StridedRows<const float> base;
  StridedRows<void> out;  // base itself if it is float
  DType out_dtype;
};

struct LoraKernels {
  LoraPlan (*plan)(const LoraInput&);
  void (*run)(const LoraPlan&, int task);
  // Called when all tasks are done. to[row][column] = the addition, in the rows of a LoraSpace, or -0 where nothing is
  // added: -0 keeps the bits of every number that it is added to. Returns `to`.
  const float* (*expand)(const LoraPlan&, const LoraBlock&, float* to);
  // out = round(sums + bias + the addition), for a rectangle with at most 64 columns and any number of rows. Called
  // when all tasks are done.
  void (*finish)(const LoraPlan&, const LoraBlock&, const LoraFinish&);
  void (*add)(const LoraArgs&);
};
const LoraKernels& lora_kernels();

}  // namespace quire
