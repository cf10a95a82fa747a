// Products of bfloat16 on AMX tiles for up to 32 rows, and the rows of x that they read.
//
// Prepared input: groups of 32 rows. A group has, for each step of 32 k, two tiles of 16 rows x 64 bytes (one tile if
// the last group has at most 16 rows). With fewer than 16 rows in all, tiles have only these rows; otherwise missing
// rows are zeros.
#pragma once

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
constexpr int64_t kMaxStepsPerBlock = 64;   // 2048 k: half a panel of weights is 128 KiB of L2
constexpr int64_t kInputBytes = 1 << 20;    // of L2 for the input of a block
constexpr int64_t kMaxPanelsPerBlock = 16;  // bounds the scratch for sums between K blocks

constexpr int64_t kPreparedSteps = 8;        // of 32 rows, 16 KiB: read and written in a few streams
constexpr int64_t kStreamedBytes = 1 << 20;  // an output of this size does not stay in L2 until it is read

inline int64_t num_k_steps(int64_t k) { return ceil_div(k, kBf16KUnit); }
inline int64_t tile_rows(int64_t m) { return std::min(m, kTileRows); }

// Columns [0, 64) of a panel for one input tile; sums[rows][64].
template <class Fetch>
inline void run_1x4(const char* a, int64_t a_step, const char* b, int64_t steps, float* sums, bool is_first,
                    Fetch& prefetch) {
  constexpr int64_t kPitch = kPanelWidth * sizeof(float);
  const SumTiles tiles{sums, sums + 16, sums + 32, sums + 48, kPitch};
  start_sums(tiles, is_first);
  for (int64_t step = 0; step < steps; ++step, a += a_step, b += kStepBytes) {
    prefetch.fetch();
    keep_float_unit_awake();
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
  store_sums(tiles);
}

// Finished sums of 32 columns on their way to the output. A row is stored per step, between the products of the next
// tiles, which hides the cache misses of the stores. Whole cache lines of a large output are stored past the caches:
// fetching a line before it is overwritten takes as many line fill buffers as fetching weights does.
class PendingRows {
 public:
  PendingRows() = default;
  // `space` is written if adapters add to the rows, and read until all rows are stored.
  PendingRows(const GemmArgs& args, const float* sums, int64_t row, int64_t num_rows, int64_t column, const float* bias,
              float* space)
      : sums_(sums),
        bias_(bias),
        out_(static_cast<char*>(args.out.data) + (row * args.out.stride + column) * size_of(args.out_dtype)),
        out_stride_bytes_(args.out.stride * size_of(args.out_dtype)),
        rows_left_(num_rows),
        columns_(static_cast<int>(std::clamp<int64_t>(args.weight.n - column, 0, kHalfColumns))),
        dtype_(args.out_dtype),
        streams_(dtype_ == DType::bf16 && columns_ == kHalfColumns && args.m * args.weight.n * 2 >= kStreamedBytes &&
                 (reinterpret_cast<uintptr_t>(out_) | out_stride_bytes_) % 64 == 0) {
    if (args.lora != nullptr) added_ = lora_kernels().expand(*args.lora, {row, num_rows, column, columns_}, space);
  }

  int64_t rows_left() const { return rows_left_; }

  void store(int64_t max_rows) {
    for (; rows_left_ > 0 && max_rows > 0; --rows_left_, --max_rows) {
      store_row();
      if (added_ != nullptr) added_ += kLoraPitch;
      sums_ += kHalfColumns;
      out_ += out_stride_bytes_;
    }
  }

 private:
  void store_row() {
    __m512 low = _mm512_add_ps(_mm512_load_ps(sums_), _mm512_load_ps(bias_));
    __m512 high = _mm512_add_ps(_mm512_load_ps(sums_ + 16), _mm512_load_ps(bias_ + 16));
    if (added_ != nullptr) {
      low = _mm512_add_ps(low, _mm512_load_ps(added_));
      high = _mm512_add_ps(high, _mm512_load_ps(added_ + 16));
    }
    const __mmask32 mask = columns_ == 32 ? ~__mmask32{0} : (__mmask32{1} << columns_) - 1;
    if (streams_) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out_), reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
    } else if (dtype_ == DType::bf16) {
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
  const float* added_ = nullptr;
  char* out_ = nullptr;
  int64_t out_stride_bytes_ = 0, rows_left_ = 0;
  int columns_ = 0;
  DType dtype_ = DType::f32;
  bool streams_ = false;  // rows go past the caches; the owner ends with a fence
};

// 32 columns of a panel for the two tiles of a group; sums[32][32] of rows `pitch` apart. Both operands come from L2,
// and its bandwidth is the limit. Loads that ask not to be kept in L1 (TILELOADDT1), all issued before the products,
// gave 2400 GFLOP/s per core; the plain order gave 2000 (of 2700; Emerald Rapids).
template <class Fetch>
inline void run_2x2(const char* a, const char* b, int64_t steps, float* sums, int64_t pitch, bool is_first,
                    Fetch& prefetch, PendingRows& pending) {
  float* sums_low = sums + kTileRows * pitch;
  const SumTiles tiles{sums, sums + 16, sums_low, sums_low + 16, pitch * static_cast<int64_t>(sizeof(float))};
  start_sums(tiles, is_first);
  const int64_t pending_per_step = ceil_div(pending.rows_left(), steps);
  for (int64_t step = 0; step < steps; ++step, a += kGroupRows * kRowBytes, b += kStepBytes) {
    prefetch.fetch();
    keep_float_unit_awake();
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
  store_sums(tiles);
}

inline int64_t amx_input_bytes(const GemmArgs& args) {
  const int64_t padded = args.m < kTileRows ? args.m : round_up(args.m, kTileRows);
  return padded * num_k_steps(args.weight.k) * kRowBytes;
}

inline void amx_prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  const int64_t steps = num_k_steps(args.weight.k), rows_of_tile = tile_rows(args.m);
  const int64_t full_steps = args.weight.k / kBf16KUnit;
  const __mmask32 rest = (1u << (args.weight.k % kBf16KUnit)) - 1u;
  for (int64_t group = row_begin; group < row_end; group += kGroupRows) {
    const int64_t group_rows = std::min(kGroupRows, args.m - group);
    const int64_t step_rows = group_rows > kTileRows ? kGroupRows : rows_of_tile;
    char* const tiles = static_cast<char*>(input) + group * steps * kRowBytes;
    for (int64_t begin = 0; begin < steps; begin += kPreparedSteps) {
      const int64_t end = std::min(begin + kPreparedSteps, steps);
      for (int64_t row = 0; row < step_rows; ++row) {
        const bf16* const from = row_of_x<bf16>(args, group + std::min(row, group_rows - 1));
        for (int64_t step = begin; step < end; ++step) {
          const __mmask32 mask = row >= group_rows ? 0 : step < full_steps ? ~__mmask32{0} : rest;
          _mm512_store_si512(tiles + (step * step_rows + row) * kRowBytes,
                             _mm512_maskz_loadu_epi16(mask, from + step * kBf16KUnit));
        }
      }
    }
  }
}

// K is cut evenly into blocks of at most kMaxStepsPerBlock steps.
inline int64_t steps_per_block(int64_t num_steps) {
  return ceil_div(num_steps, ceil_div(num_steps, kMaxStepsPerBlock));
}

inline int64_t amx_rows_per_block(int64_t k) {
  const int64_t rows = kInputBytes / (steps_per_block(num_k_steps(k)) * kRowBytes) / kGroupRows * kGroupRows;
  return std::min(rows, 16 * kGroupRows);
}

#endif

}  // namespace
}  // namespace quire::QUIRE_ISA
