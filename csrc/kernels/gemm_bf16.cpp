// Matrix product of bfloat16 by vdpbf16ps (AVX512-BF16) or bfmmla (ARM64).
#include "gemm_bf16_tile.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_HAS_BF16_PRODUCTS

int64_t rows_per_block(int64_t) { return 240; }

void run(const GemmBlock& block) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  // Products of few rows wait for memory. From 3 tiles on, the loads of rows of x cost more than the order brings
  // (benchmarks/NOTES.md, Zen 4).
  if (follows_streams() && block.row_end - block.row_begin <= 2 * kMaxRows) return run_row_tiles<DotTiles<true>>(block);
#endif
  run_row_tiles<DotTile>(block);
}

#endif

}  // namespace

extern const GemmKernels gemm_bf16_table;
#if QUIRE_HAS_BF16_PRODUCTS
const GemmKernels gemm_bf16_table = {1, dot_input_bytes, dot_prepare, rows_per_block, run};
#else
const GemmKernels gemm_bf16_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_bf16_kernels, gemm_bf16_table)
