// Matrix product of bfloat16 on AMX tiles (16 rows x 32 k times 32 k x 16 columns).
//
// Prepared input: groups of 32 rows; in a group, for each step of 32 k, two tiles of 16 rows x 64 bytes (one tile when
// the last group has at most 16 rows). With fewer than 16 rows in all, tiles have just these rows; otherwise missing
// rows are zeros.
#include "gemm_blocks.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "amx_tiles.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

constexpr int64_t kGroupRows = 2 * kTileRows;
constexpr int64_t kWeightTileBytes = 16 * kRowBytes;  // 32 k x 16 columns
constexpr int64_t kStepBytes = 4 * kWeightTileBytes;  // of a panel per 32 k
constexpr int64_t kHalfColumns = kPanelWidth / 2;
constexpr int64_t kHalfSums = kGroupRows * kHalfColumns;
constexpr int64_t kMaxStepsPerBlock = 64;       // 2048 k: half a panel of weights is 128 KiB of L2
constexpr int64_t kInputBytes = 1 << 20;        // of L2 for the input of a block
constexpr int64_t kMaxPanelsPerBlock = 16;      // bounds the scratch for sums between K blocks
constexpr int64_t kStreamDistance = 64 * 1024;  // prefetch distance where weights are used once

int64_t num_k_steps(int64_t k) { return (k + kBf16KUnit - 1) / kBf16KUnit; }
int64_t tile_rows(int64_t m) { return std::min(m, kTileRows); }

// Columns [0, 64) of a panel for one input tile; sums[rows][64].
void run_1x4(const char* a, int64_t a_step, const char* b, int64_t steps, float* sums, bool is_first,
             Prefetch prefetch) {
  constexpr int64_t kPitch = kPanelWidth * sizeof(float);
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kPitch);
    _tile_loadd(1, sums + 16, kPitch);
    _tile_loadd(2, sums + 32, kPitch);
    _tile_loadd(3, sums + 48, kPitch);
  }
  for (int64_t step = 0; step < steps; ++step, a += a_step, b += kStepBytes) {
    prefetch.fetch();
    _tile_loadd(4, a, kRowBytes);
    _tile_stream_loadd(6, b, kRowBytes);
    _tile_stream_loadd(7, b + kWeightTileBytes, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(6, b + 2 * kWeightTileBytes, kRowBytes);
    _tile_stream_loadd(7, b + 3 * kWeightTileBytes, kRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kPitch);
  _tile_stored(1, sums + 16, kPitch);
  _tile_stored(2, sums + 32, kPitch);
  _tile_stored(3, sums + 48, kPitch);
}

// Finished sums of 32 columns on their way to the output. They are stored a row per step between the products of the
// next tiles, which hides the stores' cache misses.
class PendingRows {
 public:
  PendingRows() = default;
  PendingRows(const GemmArgs& args, const float* sums, int64_t row, int64_t num_rows, int64_t column, const float* bias)
      : sums_(sums),
        bias_(bias),
        out_(static_cast<char*>(args.out) + (row * args.out_stride + column) * size_of(args.out_dtype)),
        out_stride_bytes_(args.out_stride * size_of(args.out_dtype)),
        rows_left_(num_rows),
        columns_(static_cast<int>(std::clamp<int64_t>(args.n - column, 0, kHalfColumns))),
        dtype_(args.out_dtype) {}

  int64_t rows_left() const { return rows_left_; }

  void store(int64_t max_rows) {
    for (; rows_left_ > 0 && max_rows > 0; --rows_left_, --max_rows) {
      store_row();
      sums_ += kHalfColumns;
      out_ += out_stride_bytes_;
    }
  }

 private:
  void store_row() {
    const __m512 low = _mm512_add_ps(_mm512_load_ps(sums_), _mm512_load_ps(bias_));
    const __m512 high = _mm512_add_ps(_mm512_load_ps(sums_ + 16), _mm512_load_ps(bias_ + 16));
    const __mmask32 mask = columns_ == 32 ? ~__mmask32{0} : (__mmask32{1} << columns_) - 1;
    if (dtype_ == DType::bf16) {
      _mm512_mask_storeu_epi16(out_, mask, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    } else if (dtype_ == DType::f16) {
      _mm512_mask_storeu_epi16(out_, mask,
                               _mm512_inserti64x4(_mm512_castsi256_si512(narrow_f16(low)), narrow_f16(high), 1));
    } else {
      _mm512_mask_storeu_ps(out_, static_cast<__mmask16>(mask), low);
      _mm512_mask_storeu_ps(out_ + 64, static_cast<__mmask16>(mask >> 16), high);
    }
  }

  const float* sums_ = nullptr;
  const float* bias_ = nullptr;
  char* out_ = nullptr;
  int64_t out_stride_bytes_ = 0, rows_left_ = 0;
  int columns_ = 0;
  DType dtype_ = DType::f32;
};

// 32 columns of a panel for the two tiles of a group; sums[32][32]. Both operands come from L2, whose bandwidth is the
// limit; loads that ask not to be kept in L1 (TILELOADDT1) and all loads ahead of the products gave 2400 GFLOP/s per
// core where the plain order gave 2000 (of 2700; Emerald Rapids).
void run_2x2(const char* a, const char* b, int64_t steps, float* sums, bool is_first, Prefetch prefetch,
             PendingRows& pending) {
  constexpr int64_t kPitch = kHalfColumns * sizeof(float);
  float* sums_low = sums + kTileRows * kHalfColumns;
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kPitch);
    _tile_loadd(1, sums + 16, kPitch);
    _tile_loadd(2, sums_low, kPitch);
    _tile_loadd(3, sums_low + 16, kPitch);
  }
  const int64_t pending_per_step = (pending.rows_left() + steps - 1) / steps;
  for (int64_t step = 0; step < steps; ++step, a += kGroupRows * kRowBytes, b += kStepBytes) {
    prefetch.fetch();
    _tile_stream_loadd(6, b, kRowBytes);
    _tile_stream_loadd(4, a, kRowBytes);
    _tile_stream_loadd(7, b + kWeightTileBytes, kRowBytes);
    _tile_stream_loadd(5, a + kTileRows * kRowBytes, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    pending.store(pending_per_step);
  }
  _tile_stored(0, sums, kPitch);
  _tile_stored(1, sums + 16, kPitch);
  _tile_stored(2, sums_low, kPitch);
  _tile_stored(3, sums_low + 16, kPitch);
}

int64_t input_bytes(const GemmArgs& args) {
  const int64_t padded = args.m < kTileRows ? args.m : (args.m + kTileRows - 1) / kTileRows * kTileRows;
  return padded * num_k_steps(args.k) * kRowBytes;
}

void prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const int64_t steps = num_k_steps(args.k), rows_of_tile = tile_rows(args.m);
  for (int64_t group = row_begin; group < row_end; group += kGroupRows) {
    const int64_t group_rows = std::min(kGroupRows, args.m - group);
    const int64_t step_rows = group_rows > kTileRows ? kGroupRows : rows_of_tile;
    char* tiles = static_cast<char*>(input) + group * steps * kRowBytes;
    for (int64_t row = 0; row < step_rows; ++row) {
      char* to = tiles + row * kRowBytes;
      if (row >= group_rows) {
        for (int64_t step = 0; step < steps; ++step)
          _mm512_store_si512(to + step * step_rows * kRowBytes, _mm512_setzero_si512());
        continue;
      }
      const bf16* from = static_cast<const bf16*>(args.x) + (group + row) * args.x_stride;
      const int64_t full_steps = args.k / kBf16KUnit;
      for (int64_t step = 0; step < full_steps; ++step)
        _mm512_store_si512(to + step * step_rows * kRowBytes, _mm512_loadu_si512(from + step * kBf16KUnit));
      if (full_steps < steps) {
        const __mmask32 rest = (1u << (args.k % kBf16KUnit)) - 1u;
        _mm512_store_si512(to + full_steps * step_rows * kRowBytes,
                           _mm512_maskz_loadu_epi16(rest, from + full_steps * kBf16KUnit));
      }
    }
  }
}

// K is cut evenly into blocks of at most kMaxStepsPerBlock steps.
int64_t steps_per_block(int64_t num_steps) {
  const int64_t blocks = (num_steps + kMaxStepsPerBlock - 1) / kMaxStepsPerBlock;
  return (num_steps + blocks - 1) / blocks;
}

int64_t rows_per_block(int64_t k) {
  const int64_t rows = kInputBytes / (steps_per_block(num_k_steps(k)) * kRowBytes) / kGroupRows * kGroupRows;
  return std::min(rows, 16 * kGroupRows);
}

// At most 16 rows: each weight is used once, straight through the panel.
void stream_panels(const GemmBlock& block) {
  const GemmArgs& args = *block.args;
  const int64_t steps = num_k_steps(args.k), num_rows = block.row_end - block.row_begin;
  const int64_t a_step = tile_rows(args.m) * kRowBytes;
  const char* a = static_cast<const char*>(block.input) + block.row_begin * steps * kRowBytes;
  alignas(64) float sums[kTileRows * kPanelWidth];
  alignas(64) float bias[kPanelWidth];
  for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
    const char* b = static_cast<const char*>(args.packed) + panel * steps * kStepBytes;
    load_bias(args, panel, bias);
    run_1x4(a, a_step, b, steps, sums, true, {b + kStreamDistance, static_cast<int>(kStepBytes / 64)});
    store_finished(args, {sums, kPanelWidth, block.row_begin, num_rows, panel * kPanelWidth, kPanelWidth, bias});
  }
}

// More rows: the weights of one panel and K block are used by group after group of rows while they are in L2. Sums stay
// in scratch while there are K blocks to come.
void multiply_panels(const GemmBlock& block) {
  const GemmArgs& args = *block.args;
  const int64_t num_steps = num_k_steps(args.k), max_steps = steps_per_block(num_steps);
  const int64_t num_rows = block.row_end - block.row_begin, num_panels = block.panel_end - block.panel_begin;
  const int64_t rest = num_rows % kGroupRows;
  const bool has_half_group = rest != 0 && rest <= kTileRows;
  const int64_t num_groups = (num_rows + kGroupRows - 1) / kGroupRows, num_full = num_groups - has_half_group;
  const int num_passes = static_cast<int>(2 * num_full + has_half_group);
  // One K block: two buffers, one of them pending. More: every group, half and panel has its own.
  const int64_t num_buffers = max_steps == num_steps ? 2 : 2 * num_groups * num_panels;
  float* const buffers = static_cast<float*>(scratch(Scratch::gemm_tiles, sizeof(float) * kHalfSums * num_buffers));
  const char* input = static_cast<const char*>(block.input) + block.row_begin * num_steps * kRowBytes;
  alignas(64) float biases[2][kPanelWidth];
  PendingRows pending;

  for (int64_t step = 0; step < num_steps; step += max_steps) {
    const int64_t steps = std::min(max_steps, num_steps - step);
    const bool is_first = step == 0, is_last = step + steps == num_steps;
    int64_t buffer = 0;
    for (int64_t panel = block.panel_begin; panel < block.panel_end; ++panel) {
      const char* b = static_cast<const char*>(args.packed) + (panel * num_steps + step) * kStepBytes;
      const PrefetchPlan plan{b + num_steps * kStepBytes, static_cast<int>(kStepBytes / 64), steps, num_passes};
      float* bias = biases[panel % 2];
      if (is_last) load_bias(args, panel, bias);
      int pass = 0;
      for (int64_t half = 0; half < kPanelWidth; half += kHalfColumns) {
        for (int64_t group = 0; group < num_full; ++group, ++buffer) {
          const int64_t row = group * kGroupRows;
          float* sums = buffers + buffer % num_buffers * kHalfSums;
          run_2x2(input + (row * num_steps + step * kGroupRows) * kRowBytes, b + half / 16 * kWeightTileBytes, steps,
                  sums, is_first, plan.of_pass(pass++), pending);
          if (is_last)
            pending = {args,
                       sums,
                       block.row_begin + row,
                       std::min(kGroupRows, num_rows - row),
                       panel * kPanelWidth + half,
                       bias + half};
        }
      }
      if (has_half_group) {
        const int64_t row = num_full * kGroupRows;
        float* sums = buffers + buffer % num_buffers * kHalfSums;
        pending.store(kGroupRows);
        run_1x4(input + (row * num_steps + step * kTileRows) * kRowBytes, kTileRows * kRowBytes, b, steps, sums,
                is_first, plan.of_pass(pass));
        if (is_last)
          store_finished(
              args, {sums, kPanelWidth, block.row_begin + row, num_rows - row, panel * kPanelWidth, kPanelWidth, bias});
        ++buffer;
      }
    }
  }
  pending.store(kGroupRows);
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
const GemmKernels gemm_amx_table = {kGroupRows, input_bytes, prepare, rows_per_block, run};
#else
const GemmKernels gemm_amx_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_amx_kernels, gemm_amx_table)
