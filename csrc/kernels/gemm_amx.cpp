// Matrix product of bfloat16 on AMX tiles (16 rows x 32 k times 32 k x 16 columns).
#include "gemm_amx_rows.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

constexpr int64_t kStreamDistance = 64 * 1024;  // prefetch distance if weights are used once

// At most 16 rows: each weight is used once, and the panel is read straight through.
void stream_panels(const GemmBlock& block) {
  const GemmArgs& args = *block.args;
  const int64_t steps = num_k_steps(args.weight.k), num_rows = block.row_end - block.row_begin;
  const int64_t a_step = tile_rows(args.m) * kRowBytes;
  const char* a = static_cast<const char*>(block.input) + block.row_begin * steps * kRowBytes;
  alignas(64) float sums[kTileRows * kPanelWidth];
  alignas(64) float bias[kPanelWidth];
  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const char* b = static_cast<const char*>(args.weight.data) + panel * steps * kStepBytes;
    load_bias(args, panel, bias);
    Prefetch prefetch{b + kStreamDistance, static_cast<int>(kStepBytes / 64)};
    run_1x4(a, a_step, b, steps, sums, true, prefetch);
    store_finished(args, {block.row_begin, num_rows, panel, bias}, sums);
  }
}

// More rows: the weights of one panel and K block stay in L2 and are used by one group of rows after the other. Sums
// stay in scratch until the last K block.
void multiply_panels(const GemmBlock& block) {
  const GemmArgs& args = *block.args;
  const int64_t num_steps = num_k_steps(args.weight.k), max_steps = steps_per_block(num_steps);
  const int64_t num_rows = block.row_end - block.row_begin, num_panels = block.panel_end - block.panel_begin;
  const int64_t rest = num_rows % kGroupRows;
  const bool has_half_group = rest != 0 && rest <= kTileRows;
  const int64_t num_groups = ceil_div(num_rows, kGroupRows), num_full = num_groups - has_half_group;
  const int num_passes = static_cast<int>(2 * num_full + has_half_group);
  // One K block: two buffers, one of them pending. More K blocks: every group, half and panel has its own buffer.
  const int64_t num_buffers = max_steps == num_steps ? 2 : 2 * num_groups * num_panels;
  float* const buffers = static_cast<float*>(scratch(Scratch::gemm_tiles, sizeof(float) * kHalfSums * num_buffers));
  const char* input = static_cast<const char*>(block.input) + block.row_begin * num_steps * kRowBytes;
  alignas(64) float biases[2][kPanelWidth];
  LoraSpace space;
  PendingRows pending;

  for (int64_t step = 0; step < num_steps; step += max_steps) {
    const int64_t steps = std::min(max_steps, num_steps - step);
    const bool is_first = step == 0, is_last = step + steps == num_steps;
    int64_t buffer = 0;
    for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
      const char* b = static_cast<const char*>(args.weight.data) + (panel * num_steps + step) * kStepBytes;
      const PrefetchPlan plan{b + num_steps * kStepBytes, static_cast<int>(kStepBytes / 64), steps, num_passes};
      float* bias = biases[panel % 2];
      if (is_last) load_bias(args, panel, bias);
      int pass = 0;
      for (int64_t half = 0; half < kPanelWidth; half += kHalfColumns) {
        for (int64_t group = 0; group < num_full; ++group, ++buffer) {
          const int64_t row = group * kGroupRows;
          float* sums = buffers + buffer % num_buffers * kHalfSums;
          Prefetch prefetch = plan.of_pass(pass++);
          run_2x2(input + (row * num_steps + step * kGroupRows) * kRowBytes, b + half / 16 * kWeightTileBytes, steps,
                  sums, kHalfColumns, is_first, prefetch, pending);
          if (is_last)
            pending = {args,
                       sums,
                       block.row_begin + row,
                       std::min(kGroupRows, num_rows - row),
                       panel * kPanelWidth + half,
                       bias + half,
                       space.rows()};
        }
      }
      if (has_half_group) {
        const int64_t row = num_full * kGroupRows;
        float* sums = buffers + buffer % num_buffers * kHalfSums;
        pending.store(kGroupRows);
        Prefetch prefetch = plan.of_pass(pass);
        run_1x4(input + (row * num_steps + step * kTileRows) * kRowBytes, kTileRows * kRowBytes, b, steps, sums,
                is_first, prefetch);
        if (is_last) store_finished(args, {block.row_begin + row, num_rows - row, panel, bias}, sums);
        ++buffer;
      }
    }
  }
  pending.store(kGroupRows);
  _mm_sfence();  // rows stored past the caches come before the end of the task
}

void run(const GemmBlock& block) {
  configure_tiles(tile_rows(block.args->m));
  if (block.row_end - block.row_begin <= kTileRows) {
    stream_panels(block);
  } else {
    for (int64_t panel = block.panel_begin; panel < block.panel_end; panel += kMaxPanelsPerBlock)
      multiply_panels({block.args, block.input, block.row_begin, block.row_end, panel,
                       std::min(block.panel_end, panel + kMaxPanelsPerBlock)});
  }
  _tile_release();
}

#endif

}  // namespace

extern const GemmKernels gemm_amx_table;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
const GemmKernels gemm_amx_table = {kGroupRows, amx_input_bytes, amx_prepare, amx_rows_per_block, run};
#else
const GemmKernels gemm_amx_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_amx_kernels, gemm_amx_table)
