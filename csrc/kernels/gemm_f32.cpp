// Matrix product by float multiply-adds, for every storage type of the weights and every instruction set. Rows of x are
// converted to float once per call, weights in registers.
#include "gemm_f32_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2
constexpr int64_t kMostRowsInOrder = 2;
#endif

int64_t rows_per_block(int64_t) { return 120; }

void run(const GemmBlock& block) {
  switch (block.args->dtype) {
    case DType::f32:
      return run_row_tiles<FloatTile<float>>(block);
    case DType::bf16:
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2
      // 1.4 times as fast at 1 row and 1.2 times at 2, no faster from 3 on (Zen 4; benchmarks/NOTES.md)
      if (follows_streams() && block.row_end - block.row_begin <= kMostRowsInOrder)
        return run_row_tiles<Bf16TileInOrder>(block);
      // 1.04 times as fast at 8 rows (Zen 5; benchmarks/NOTES.md)
      if (has_large_l1()) return run_row_tiles<Bf16Tile, NearPrefetch>(block);
#endif
      return run_row_tiles<Bf16Tile>(block);
    case DType::f16:
      return run_row_tiles<FloatTile<f16>>(block);
  }
}

}  // namespace

extern const GemmKernels gemm_f32_table;
const GemmKernels gemm_f32_table = {1, float_input_bytes, float_prepare, rows_per_block, run};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_f32_kernels, gemm_f32_table)
