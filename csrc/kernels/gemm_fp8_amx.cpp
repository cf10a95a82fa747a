// Matrix product of bfloat16 with FP8 weights on AMX tiles.
#include "gemm_amx_rows.h"
#include "gemm_fp8_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

struct AmxRows {
  using Number = bf16;
  static int64_t num_tiles(int64_t rows) { return ceil_div(rows, kGroupRows); }
  static int64_t first_row(int64_t tile, int64_t rows) { return std::min(tile * kGroupRows, rows); }
  static int64_t num_fetches(int64_t rows) {
    const int64_t rest = rows % kGroupRows;
    return 2 * (rows / kGroupRows) + (rest == 0 ? 0 : rest <= kTileRows ? 1 : 2);
  }

  static void run(const GemmBlock& block, int64_t row, int64_t rows, int64_t step, const Number* weights, int64_t steps,
                  float* sums, bool is_first, Unpacking<Number>& unpacking) {
    written_for_tiles();
    const int64_t num_steps = num_k_steps(block.args->weight.k), first = block.row_begin + row;
    const int64_t step_rows = rows > kTileRows ? kGroupRows : tile_rows(block.args->m);
    const char* x = static_cast<const char*>(block.input) + (first * num_steps + step * step_rows) * kRowBytes;
    const char* w = reinterpret_cast<const char*>(weights);
    if (rows <= kTileRows) {
      run_1x4(x, step_rows * kRowBytes, w, steps, sums, is_first, unpacking);
      return;
    }
    PendingRows none;
    run_2x2(x, w, steps, sums, kPanelWidth, is_first, unpacking, none);
    run_2x2(x, w + 2 * kWeightTileBytes, steps, sums + kHalfColumns, kPanelWidth, is_first, unpacking, none);
  }
};

void run(const GemmBlock& block) {
  configure_tiles(tile_rows(block.args->m));
  const bool has_few_rows = block.row_end - block.row_begin <= 64;
  run_fp8<AmxRows>(block, has_few_rows ? Fp8Blocking{4, 1} : Fp8Blocking{kMaxStepsPerBlock, kMaxPanelsPerBlock});
  _tile_release();
}

#endif

}  // namespace

extern const GemmKernels gemm_fp8_amx_table;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
const GemmKernels gemm_fp8_amx_table = {kGroupRows, amx_input_bytes, amx_prepare, amx_rows_per_block, run};
#else
const GemmKernels gemm_fp8_amx_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_fp8_amx_kernels, gemm_fp8_amx_table)
