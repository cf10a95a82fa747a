// Matrix products with packed weights: out[M, N] = x[M, K] * weight[N, K]^T + bias, float accumulation, one rounding.
// What adapters add to a row (quire/kernels/lora.h) is added before it.
//
// Packed layout: panels of 64 output columns, one after the other; N is padded with zero columns. In a panel
//   f32, f16   [K][64]                   element (k, column)
//   bf16       [K32 / 32][4][16][16][2]  step of 32 k, tile of 16 columns, pair of k, column, k in the pair; K32 is K
//                                        rounded up to 32 with zeros. A tile is what one AMX register takes, a row of
//                                        it what one vdpbf16ps takes.
// Every instruction set reads the same layout.
//
// The sum of one output element runs over k in ascending order, into one accumulator. M, the threads and the position
// of the row do not change it: on one instruction set, rows are bit-equal for any batch.
//
// Grouped integer weights (quire/kernels/grouped_layout.h): rows of x are quantized to 8 bits with sign, one scale per
// row and group of the weight, and with s the sum of a row's codes in a group, dot its product with the weight's codes,
//   out = sum over groups of (x scale * scale) * (dot - zero * s)
//   out = sum over groups of (x scale * scale) * dot - minimum * (x scale * s)
// with exact integers inside a group and float multiply-adds from group to group, so every kernel of an instruction set
// gives the same bits. Where each group has its own zero, dot - zero * s is taken in float: exact up to 2^24, that is
// for groups up to 8,806 elements of 4 bits or 518 of 8. With factors, x has one scale per row and super-group, and
//   out = sum over super-groups of x scale * (scale * sum of factor * (dot - zero * s))
//   out = sum over super-groups of x scale * (scale * sum of factor * dot - minimum * sum of minimum factor * s)
// with exact integers inside a super-group.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/kernels/grouped_layout.h"
#include "quire/kernels/lora.h"
#include "quire/strided.h"

namespace quire {

inline constexpr int64_t kBf16KUnit = 32;
inline constexpr int64_t kBf16TileColumns = 16;
inline constexpr int64_t kBf16TileElements = kBf16KUnit * kBf16TileColumns;

// A weight [n, k] in the packed layout of its kind, equal for all calls.
struct PackedWeight {
  const void* data;
  int64_t n, k;
  GroupedForm form = {};           // the form of a grouped weight
  const int32_t* order = nullptr;  // for a grouped weight: its column i belongs to x[order[i]]; nullptr: to x[i]
  int64_t fp8_group_size = 0;      // for an FP8 weight (gemm_fp8.h): elements of K that share a scale, a multiple of 32
};

struct GemmArgs {
  StridedRows<const void> x;  // [m, k]
  DType dtype;                // dtype of x, and of a packed weight that is not grouped and not FP8
  int64_t m;
  PackedWeight weight;
  const void* bias;  // [n] of bias_dtype, or nullptr
  DType bias_dtype;
  StridedRows<void> out;  // [m, n]
  DType out_dtype;
  const int32_t* x_rows = nullptr;  // [m]: row i of the product reads x[x_rows[i]]; nullptr: x[i]
  // What adapters add before the rounding, and the adapter of each row, [m], as in LoraInput. nullptr: they add
  // nothing.
  LoraTable adapters = {};
  const int32_t* adapter_slots = nullptr;
  const LoraPlan* lora = nullptr;  // set by the driver if there are slots
};

// Rows of a packed weight, each in [0, weight.n), rounded to dtype. A weight that is not grouped and not FP8 has this
// dtype.
struct WeightRowsArgs {
  PackedWeight weight;
  const int64_t* rows;  // [count]
  int64_t count;
  DType dtype;  // dtype of out
  void* out;    // [count, k]
};

// A weight [n, k] before it is quantized or packed.
struct PlainWeight {
  StridedRows<const void> rows;
  DType dtype;
  int64_t n, k;
};

inline constexpr int64_t kAmxKUnit = 64;        // 8-bit codes of a tile row
inline constexpr int64_t kAmxSmallGroup = 512;  // AMX takes groups up to this size, and larger ones of whole tile rows

int64_t gemm_packed_bytes(DType dtype, int64_t n, int64_t k);
void gemm_pack(const PlainWeight& weight, void* packed);
// Unpacks rows; the function depends on the kind of the weight. Column i of a grouped weight is element order[i] of a
// row, or i without an order.
void gemm_rows(const WeightRowsArgs& args);
void gemm_grouped_rows(const WeightRowsArgs& args);

// The nearest grouped weight: codes [n, k], scales [n, groups]. 8 bits: scale = max |w| / 127. 4 bits: the element with
// the largest magnitude gets code 0, as in GGUF's Q4_0.
void gemm_grouped_quantize(const PlainWeight& weight, int bits, int64_t group_size, uint8_t* codes, float* scales);

void gemm(const GemmArgs& args);

// Products of each head of x with a matrix of its own: out[t, h, :] = weight[h] * x[t, h, :]. T tokens, H heads.
struct HeadGemmArgs {
  StridedHeads<const void> x;  // [T, H, k]
  DType dtype;                 // dtype of x, out and the weights
  int64_t num_tokens, num_heads;
  PackedWeight weight;     // [n, k] of the first head, in the model's dtype; the other heads' weights follow
  StridedHeads<void> out;  // [T, H, n]
};
void gemm_heads(const HeadGemmArgs& args);

// ---- between the driver (csrc/gemm.cpp) and the kernels of one instruction set (csrc/kernels/gemm_*.cpp)

// A rectangle of the output: rows [row_begin, row_end) of the prepared input, panels [panel_begin, panel_end).
struct GemmBlock {
  const GemmArgs* args;  // args->x is not read: `input` holds the prepared rows of x
  const void* input;
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};

struct GemmKernels {
  int64_t row_unit;  // rows are prepared, and blocks cut, at multiples of this
  int64_t (*input_bytes)(const GemmArgs& args);
  // Converts rows [row_begin, row_end) of args.x to the form that run() reads, and writes them to their place in
  // `input`.
  void (*prepare)(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input);
  int64_t (*rows_per_block)(int64_t k);  // rows that stay in the L2 cache in prepared form; a multiple of row_unit
  void (*run)(const GemmBlock& block);
};

// The kernels for a product on the active instruction set.
const GemmKernels& gemm_kernels_for(const GemmArgs& args);
// `dtype`: the dtype of a weight that is not grouped and not FP8.
int64_t gemm_panel_bytes(const PackedWeight& weight, DType dtype);

const GemmKernels& gemm_f32_kernels();          // every dtype, by float arithmetic
const GemmKernels& gemm_bf16_kernels();         // vdpbf16ps or bfmmla; run == nullptr if the active ISA lacks both
const GemmKernels& gemm_amx_kernels();          // AMX tiles; run == nullptr if the active ISA lacks them
const GemmKernels& gemm_grouped_kernels();      // grouped weights
const GemmKernels& gemm_grouped_amx_kernels();  // grouped weights on AMX tiles, same bits; run == nullptr without AMX

struct QuantizeKernels {
  // One group of one row: codes [count] and the scale.
  void (*group)(const void* weight, DType dtype, int64_t count, int bits, uint8_t* codes, float* scale);
};
const QuantizeKernels& quantize_kernels();

}  // namespace quire
