// The loop over panels, K blocks and row tiles for kernels that hold up to kMaxRows x 64 sums in vector registers
// (gemm_f32, gemm_bf16). The tile kernel itself is a template parameter.
#pragma once

#include "gemm_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

inline constexpr int kMaxRows = 6;  // with 4 vectors of 16 columns: 24 accumulators of the 32 AVX-512 registers

// Bytes of a K block of weights, and the distance of the prefetch. Sums of a tile go through scratch between K blocks.
// With 16 KiB the second and later row tiles find the block in L1: best of 8, 16, 32 and 64 (Zen 5; on Emerald Rapids
// without AMX, 32 was best of 32 and 128, and 16 was not tried).
inline constexpr int64_t kBlockBytes = 16 * 1024;

// Distance between rows of `input` in elements: whole steps of K, and an odd number of cache lines, so that rows fall
// into different cache sets.
template <class A>
inline int64_t input_stride(int64_t k) {
  constexpr int64_t kPerLine = 64 / sizeof(A);
  return (round_up(k, kBf16KUnit) / kPerLine | 1) * kPerLine;
}

// The first row of a tile, of the ceil_div(num_rows, kMaxRows) tiles of a block. The tiles have nearly equal heights: 7
// rows are 3 + 4. But with 16 registers, 7 rows are 6 + 1, 8 are 6 + 2, 13 are 6 + 6 + 1, and so on: tiles of 6 rows
// have 12 sums to hide the latency of a multiply-add. This was 1.04 to 1.14 times as fast with 7 and 8 rows
// (results/epyc-zen5-2core/gemm_against_00c4b098_2026-11-30.md).
inline int64_t first_tile_row(int64_t tile, int64_t num_rows) {
  const int64_t num_tiles = ceil_div(num_rows, kMaxRows), rest = num_rows % kMaxRows;
  if (!kHas32Registers && (rest == 1 || rest == 2)) return std::min(tile * kMaxRows, num_rows);
  return num_rows * tile / num_tiles;
}

// Tile::Input       element of the prepared rows
// Tile::Weight      element of the packed weight
// Tile::kStepK      k per step: 1, or 32 where a panel is made of tiles
// Tile::kFetches    calls of prefetch.fetch() per step
// Tile::kIsInOrder  weights are read in the order of their addresses
// Tile::run<R, Fetch>(a, a_stride, b, steps, sums, is_first, prefetch)   sums[R][64] = (is_first ? 0 : sums) + a * b
// Fetch             Prefetch or NearPrefetch
template <class Tile, class Fetch = Prefetch>
inline void run_row_tiles(const GemmBlock& block) {
  const GemmArgs& args = *block.args;
  using Input = typename Tile::Input;
  using Weight = typename Tile::Weight;
  constexpr int64_t kStepElements = Tile::kStepK * kPanelWidth;
  constexpr int64_t kStepBytes = kStepElements * sizeof(Weight);
  constexpr int64_t kStepsPerBlock = kBlockBytes / kStepBytes;
  using Run = void (*)(const Input*, int64_t, const Weight*, int64_t, float*, bool, Fetch&);
  static constexpr Run kRun[kMaxRows] = {Tile::template run<1, Fetch>, Tile::template run<2, Fetch>,
                                         Tile::template run<3, Fetch>, Tile::template run<4, Fetch>,
                                         Tile::template run<5, Fetch>, Tile::template run<6, Fetch>};

  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t num_tiles = ceil_div(num_rows, kMaxRows);
  const int64_t num_steps = ceil_div(args.weight.k, Tile::kStepK);
  const int64_t a_stride = input_stride<Input>(args.weight.k);
  const Input* a = static_cast<const Input*>(block.input) + block.row_begin * a_stride;
  float* sums = static_cast<float*>(scratch(Scratch::gemm_tiles, sizeof(float) * kPanelWidth * num_rows));
  alignas(64) float bias[kPanelWidth];

  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const Weight* b = static_cast<const Weight*>(args.weight.data) + panel * num_steps * kStepElements;
    load_bias(args, panel, bias);
    for (int64_t step = 0; step < num_steps; step += kStepsPerBlock) {
      const int64_t steps = std::min(kStepsPerBlock, num_steps - step);
      const PrefetchPlan plan{reinterpret_cast<const char*>(b + (step + steps) * kStepElements),
                              static_cast<int>(kStepBytes / 64 / Tile::kFetches), steps * Tile::kFetches,
                              static_cast<int>(num_tiles), Tile::kIsInOrder};
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = first_tile_row(tile, num_rows), rows = first_tile_row(tile + 1, num_rows) - row;
        float* tile_sums = sums + row * kPanelWidth;
        Fetch prefetch{num_tiles == 1 ? plan.of_pass(0) : plan.of_part(row, row + rows, num_rows)};
        kRun[rows - 1](a + row * a_stride + step * Tile::kStepK, a_stride, b + step * kStepElements, steps, tile_sums,
                       step == 0, prefetch);
        if (step + steps == num_steps) store_finished(args, {block.row_begin + row, rows, panel, bias}, tile_sums);
      }
    }
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
