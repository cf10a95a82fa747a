// Matrix products with packed weights: out[M, N] = x[M, K] * weight[N, K]^T + bias, float accumulation, one rounding.
//
// Packed layout: panels of 64 output columns, one after the other; N is padded with zero columns. In a panel
//   f32, f16   [K][64]                   element (k, column)
//   bf16       [K32 / 32][4][16][16][2]  step of 32 k, tile of 16 columns, pair of k, column, k in the pair; K32 = K
//   rounded
//                                        up to 32 with zeros. A tile is what one AMX register takes, a row of it what
//                                        one vdpbf16ps takes.
// Every instruction set reads the same layout.
//
// The sum of one output element runs over k in ascending order, into one accumulator, whatever M, the threads, or the
// position of the row: rows are bit-equal for any batch on one instruction set.
#pragma once

#include <cstdint>

#include "quire/dtype.h"

namespace quire {

inline constexpr int64_t kPanelWidth = 64;
inline constexpr int64_t kBf16KUnit = 32;
inline constexpr int64_t kBf16TileColumns = 16;
inline constexpr int64_t kBf16TileElements = kBf16KUnit * kBf16TileColumns;

struct GemmArgs {
  const void* x;  // [m, k] of dtype, rows x_stride elements apart
  DType dtype;    // of x and of the packed weight
  int64_t x_stride;
  const void* packed;
  int64_t m, n, k;
  const void* bias;  // [n] of bias_dtype, or nullptr
  DType bias_dtype;
  void* out;  // [m, n] of out_dtype, rows out_stride elements apart
  DType out_dtype;
  int64_t out_stride;
};

int64_t gemm_packed_bytes(DType dtype, int64_t n, int64_t k);
void gemm_pack(const void* weight, DType dtype, int64_t n, int64_t k, int64_t row_stride, void* packed);
void gemm(const GemmArgs& args);

// ---- between the driver (csrc/gemm.cpp) and the kernels of one instruction set (csrc/kernels/gemm_*.cpp)
// ----------------

// A rectangle of the output: rows [row_begin, row_end) of the prepared input, panels [panel_begin, panel_end).
struct GemmBlock {
  const GemmArgs* args;  // args->x is not read: `input` holds the prepared rows of x
  const void* input;
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};

struct GemmKernels {
  int64_t row_unit;  // rows are prepared, and blocks cut, at multiples of this
  int64_t (*input_bytes)(int64_t m, int64_t k);
  // Brings rows [row_begin, row_end) of args.x into the form run() reads, at their place in `input`.
  void (*prepare)(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input);
  int64_t (*rows_per_block)(int64_t k);  // rows whose prepared form stays in the L2 cache; a multiple of row_unit
  void (*run)(const GemmBlock& block);
};

const GemmKernels& gemm_f32_kernels();   // every dtype, by float arithmetic
const GemmKernels& gemm_bf16_kernels();  // vdpbf16ps; run == nullptr where the active ISA lacks it
const GemmKernels& gemm_amx_kernels();   // AMX tiles; run == nullptr where the active ISA lacks them

}  // namespace quire
