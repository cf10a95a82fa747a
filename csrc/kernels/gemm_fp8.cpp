// Matrix product with FP8 weights in vector registers: dot products of bfloat16 (vdpbf16ps) for x in bfloat16 if the
// instruction set has them, else float multiply-adds. On AVX2 few rows take weights as halves, and all other products
// take them as bfloat16.
#include "gemm_bf16_tile.h"
#include "gemm_f32_tiles.h"
#include "gemm_fp8_blocks.h"
#include "gemm_fp8_few_rows.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2

// Weights of halves in the order of gemm_fp8_blocks.h.
struct HalfTile {
  using Input = float;
  using Weight = f16;
  static constexpr int64_t kFetches = kBf16KUnit / 4;

  template <int kRows, class Fetch>
  static void run(const float* a, int64_t a_stride, const f16* b, int64_t steps, float* out, bool is_first,
                  Fetch& fetch) {
    constexpr int kVectors = num_vectors(kRows), kColumns = kVectors * F32::kWidth;
    for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
      F32 sums[kRows][kVectors];
      load_sums(out + column, is_first, sums);
      const float* x = a;
      const f16* from = b + place_of(column);
      for (int64_t step = 0; step < steps; ++step, from += kStepCodes) {
        for (int64_t line = 0; line < kBf16KUnit / 4; ++line, x += 4) {
          if (column == 0) fetch.fetch();
#pragma GCC unroll 4
          for (int64_t k = 0; k < 4; ++k) {
            const auto weights = [&](int v) {
              return load(from + line * kFp8LineCodes + place_of(v * F32::kWidth) + fp8_place(k));
            };
            if constexpr (kRows == 1) {  // one vector of weights at a time: there are no registers for more
              const F32 x_k = broadcast(x[k]);
#pragma GCC unroll 8
              for (int v = 0; v < kVectors; ++v) sums[0][v] = fma(x_k, weights(v), sums[0][v]);
            } else {
              F32 w[kVectors];
#pragma GCC unroll 8
              for (int v = 0; v < kVectors; ++v) w[v] = weights(v);
              multiply_add(x + k, a_stride, w, sums);
            }
          }
        }
      }
      store_sums(out + column, sums);
    }
  }

 private:
  // Of 8 columns in a step.
  static constexpr int64_t place_of(int64_t column) {
    return column / kBf16TileColumns * kBf16TileElements + column % kBf16TileColumns / F32::kWidth * 32;
  }
};

// From 13 rows on the loop of bfloat16 takes as long, and less from 100 on (Zen 4; benchmarks/NOTES.md).
constexpr int64_t kMostRowsOfHalves = 12;

#endif

template <class Tile>
struct VectorRows {
  using Input = typename Tile::Input;
  using Number = typename Tile::Weight;
  static int64_t num_tiles(int64_t rows) { return ceil_div(rows, kMaxRows); }
  static int64_t first_row(int64_t tile, int64_t rows) { return first_tile_row(tile, rows); }
  static int64_t num_fetches(int64_t rows) { return num_tiles(rows) * Tile::kFetches; }

  static void run(const GemmBlock& block, int64_t row, int64_t rows, int64_t step, const Number* weights, int64_t steps,
                  float* sums, bool is_first, Unpacking<Number>& unpacking) {
    using Fetch = Unpacking<Number>;
    using Run = void (*)(const Input*, int64_t, const Number*, int64_t, float*, bool, Fetch&);
    static constexpr Run kRun[kMaxRows] = {Tile::template run<1, Fetch>, Tile::template run<2, Fetch>,
                                           Tile::template run<3, Fetch>, Tile::template run<4, Fetch>,
                                           Tile::template run<5, Fetch>, Tile::template run<6, Fetch>};
    const int64_t stride = input_stride<Input>(block.args->weight.k);
    const Input* x = static_cast<const Input*>(block.input) + (block.row_begin + row) * stride + step * kBf16KUnit;
    kRun[rows - 1](x, stride, weights, steps, sums, is_first, unpacking);
  }
};

constexpr Fp8Blocking kBlocking = {4, 1};  // 16 KiB of numbers, in L1 beside sums and rows of x

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
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2
  if (block.row_end - block.row_begin <= kMostRowsOfHalves) return run_fp8<VectorRows<HalfTile>>(block, {2, 1});
#endif
  run_fp8<VectorRows<Bf16Tile>>(block, kBlocking);
}

}  // namespace

extern const GemmKernels gemm_fp8_table;
const GemmKernels gemm_fp8_table = {1, input_bytes, prepare, rows_per_block, run};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_fp8_kernels, gemm_fp8_table)
