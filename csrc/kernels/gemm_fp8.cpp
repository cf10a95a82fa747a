// Matrix product with FP8 weights in vector registers: dot products of bfloat16 (vdpbf16ps) for x in bfloat16 if the
// instruction set has them, else float multiply-adds.
#include "gemm_bf16_tile.h"
#include "gemm_f32_tiles.h"
#include "gemm_fp8_blocks.h"
#include "gemm_fp8_few_rows.h"

namespace quire::QUIRE_ISA {
namespace {

template <class Tile>
struct VectorRows {
  using Input = typename Tile::Input;
  static int64_t num_tiles(int64_t rows) { return ceil_div(rows, kMaxRows); }
  static int64_t first_row(int64_t tile, int64_t rows) { return rows * tile / num_tiles(rows); }
  static int64_t num_fetches(int64_t rows) { return num_tiles(rows) * Tile::kFetches; }

  static void run(const GemmBlock& block, int64_t row, int64_t rows, int64_t step, const bf16* weights, int64_t steps,
                  float* sums, bool is_first, Unpacking& unpacking) {
    using Run = void (*)(const Input*, int64_t, const bf16*, int64_t, float*, bool, Unpacking&);
    static constexpr Run kRun[kMaxRows] = {Tile::template run<1, Unpacking>, Tile::template run<2, Unpacking>,
                                           Tile::template run<3, Unpacking>, Tile::template run<4, Unpacking>,
                                           Tile::template run<5, Unpacking>, Tile::template run<6, Unpacking>};
    const int64_t stride = input_stride<Input>(block.args->weight.k);
    const Input* x = static_cast<const Input*>(block.input) + (block.row_begin + row) * stride + step * kBf16KUnit;
    kRun[rows - 1](x, stride, weights, steps, sums, is_first, unpacking);
  }
};

constexpr Fp8Blocking kBlocking = {4, 1};  // 16 KiB of bfloat16, in L1 beside sums and rows of x

#if QUIRE_HAS_BF16_PRODUCTS
bool takes_dots(const GemmArgs& args) { return args.dtype == DType::bf16; }
#endif

int64_t input_bytes(const GemmArgs& args) {
#if QUIRE_HAS_BF16_PRODUCTS
  if (takes_dots(args)) return dot_input_bytes(args);
#endif
  return float_input_bytes(args);
}

void prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
#if QUIRE_HAS_BF16_PRODUCTS
  if (takes_dots(args)) return dot_prepare(args, row_begin, row_end, input);
#endif
  float_prepare(args, row_begin, row_end, input);
}

int64_t rows_per_block(int64_t) { return 120; }

void run(const GemmBlock& block) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  // measured on Zen 4 only (benchmarks/NOTES.md)
  if (takes_dots(*block.args) && follows_streams() && block.row_end - block.row_begin <= kMostFewRows)
    return run_fp8_few_rows(block);
#endif
#if QUIRE_HAS_BF16_PRODUCTS
  if (takes_dots(*block.args)) return run_fp8<VectorRows<DotTile>>(block, kBlocking);
#endif
  run_fp8<VectorRows<Bf16Tile>>(block, kBlocking);
}

}  // namespace

extern const GemmKernels gemm_fp8_table;
const GemmKernels gemm_fp8_table = {1, input_bytes, prepare, rows_per_block, run};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_fp8_kernels, gemm_fp8_table)
