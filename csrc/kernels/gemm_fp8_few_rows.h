// Products of few rows with FP8 weights: a code is used once or twice, so it becomes bfloat16 in a register and is
// never written. The same bits as gemm_fp8_blocks.h with the dot products of gemm_bf16_tile.h.
#pragma once

#include "fp8_to_bf16.h"
#include "gemm_fp8_blocks.h"
#include "gemm_row_tiles.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kMostFewRows = 12;
constexpr int kFp8Vectors = kPanelWidth / kBf16TileColumns;
constexpr int64_t kTileLines = kStepLines / kFp8Vectors;  // of 16 columns in a step

// sums[kRows][64] = x * codes over whole steps. One row waits for memory: codes are read in the order of their
// addresses, which the CPU's own prefetching follows. More rows wait for the sums, so all tiles take turns.
template <int kRows>
inline void fp8_dots(const bf16* x, int64_t x_stride, const uint8_t* codes, int64_t steps, float* out) {
  constexpr int64_t kDistance = 4 * 1024;  // bytes; 2, 4, 8 and 16 KiB were tried (benchmarks/NOTES.md)
  __m512 sums[kRows][kFp8Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kFp8Vectors; ++v) sums[r][v] = _mm512_setzero_ps();
  const auto multiply = [&](int v, int64_t line) __attribute__((always_inline)) {
    const __m512i line_codes = _mm512_load_si512(codes + (v * kTileLines + line) * kFp8LineCodes);
    const Bf16Halves halves = bf16_halves(line_codes, e4m3{});
    const __m512i pairs[2] = {_mm512_unpacklo_epi8(halves.lower, halves.upper),
                              _mm512_unpackhi_epi8(halves.lower, halves.upper)};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        int two;
        __builtin_memcpy(&two, x + r * x_stride + (line * 2 + i) * 2, sizeof(two));
        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)),
                                      reinterpret_cast<__m512bh>(pairs[i]));
      }
  };
  for (int64_t step = 0; step < steps; ++step, x += kBf16KUnit, codes += kStepCodes) {
    if constexpr (kRows == 1) {
#pragma GCC unroll 4
      for (int v = 0; v < kFp8Vectors; ++v)
#pragma GCC unroll 8
        for (int64_t line = 0; line < kTileLines; ++line) multiply(v, line);
    } else {
      for (int64_t line = 0; line < kTileLines; ++line)
#pragma GCC unroll 4
        for (int v = 0; v < kFp8Vectors; ++v) {
          __builtin_prefetch(codes + kDistance + (line * kFp8Vectors + v) * kFp8LineCodes);
          multiply(v, line);
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kFp8Vectors; ++v) _mm512_store_ps(out + r * kPanelWidth + v * 16, sums[r][v]);
}

inline void run_fp8_few_rows(const GemmBlock& block) {
  using Run = void (*)(const bf16*, int64_t, const uint8_t*, int64_t, float*);
  static constexpr Run kRun[kMaxRows] = {fp8_dots<1>, fp8_dots<2>, fp8_dots<3>, fp8_dots<4>, fp8_dots<5>, fp8_dots<6>};
  const GemmArgs& args = *block.args;
  const Fp8Layout layout(args.weight.k, args.weight.fp8_group_size);
  const int64_t num_rows = block.row_end - block.row_begin, num_tiles = ceil_div(num_rows, kMaxRows);
  const int64_t stride = input_stride<bf16>(args.weight.k);
  const bf16* const x = static_cast<const bf16*>(block.input) + block.row_begin * stride;
  alignas(64) float sums[kMaxRows * kPanelWidth], totals[kMostFewRows * kPanelWidth], bias[kPanelWidth];
  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const char* const data = static_cast<const char*>(args.weight.data) + panel * layout.panel_bytes;
    const float* scales = reinterpret_cast<const float*>(data);
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(data + layout.scale_bytes);
    load_bias(args, panel, bias);
    for (int64_t step = 0, end; step < layout.num_steps; step = end, scales += kPanelWidth) {
      end = std::min(layout.num_steps, step + layout.group_steps);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = num_rows * tile / num_tiles, rows = num_rows * (tile + 1) / num_tiles - row;
        const Finished rows_of_tile = {block.row_begin + row, rows, panel, bias};
        fetch_added(args, rows_of_tile, {step, end, layout.num_steps});
        kRun[rows - 1](x + row * stride + step * kBf16KUnit, stride, codes + step * kStepCodes, end - step, sums);
        const Fp8Sums finished{sums, totals + row * kPanelWidth, rows, scales, step == 0};
        if (end < layout.num_steps) {
          add_group(finished);
        } else {
          store_finished(args, rows_of_tile, [&](int64_t r, int64_t c) { return finished.total(r, c); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
