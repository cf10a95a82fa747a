// Matrix product with grouped integer weights on AMX tiles (16 rows x 64 k times 64 k x 16 columns, TDPBSUD). Integer
// sums are exact, so the result has the same bits as gemm_grouped.cpp. This file has large groups;
// gemm_grouped_amx_groups.h has small groups.
#include "quire/isa.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "gemm_grouped_amx_groups.h"
#else
#include "quire/kernels/gemm.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

constexpr int64_t kStepQuads = kAmxKUnit / kQuad;
constexpr int64_t kPitch = kPanelWidth * sizeof(int32_t);

inline void fetch(Prefetch& prefetch, int64_t calls) {
  for (int64_t i = 0; i < calls; ++i) prefetch.fetch();
}

// 64 columns for up to 16 rows.
template <bool kSigned>
void run_1x4(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t steps, int32_t* sums, bool is_first,
             Prefetch& prefetch) {
  const SumTiles tiles{sums, sums + 16, sums + 32, sums + 48, kPitch};
  start_sums(tiles, is_first);
  for (int64_t step = 0; step < steps; ++step, codes += kAmxKUnit, weights += kStepQuads * kQuadBytes) {
    fetch(prefetch, kStepQuads);
    keep_float_unit_awake();
    _tile_loadd(4, codes, stride);
    _tile_loadd(6, weights, kQuadBytes);
    _tile_loadd(7, weights + 64, kQuadBytes);
    QUIRE_MULTIPLY_TILES(0, 4, 6)
    QUIRE_MULTIPLY_TILES(1, 4, 7)
    _tile_loadd(6, weights + 128, kQuadBytes);
    _tile_loadd(7, weights + 192, kQuadBytes);
    QUIRE_MULTIPLY_TILES(2, 4, 6)
    QUIRE_MULTIPLY_TILES(3, 4, 7)
  }
  store_sums(tiles);
}

// 32 columns for 17 to 32 rows.
template <bool kSigned>
void run_2x2(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t steps, int32_t* sums, bool is_first,
             Prefetch& prefetch) {
  int32_t* const low = sums + kTileRows * kPanelWidth;
  const SumTiles tiles{sums, sums + 16, low, low + 16, kPitch};
  start_sums(tiles, is_first);
  for (int64_t step = 0; step < steps; ++step, codes += kAmxKUnit, weights += kStepQuads * kQuadBytes) {
    fetch(prefetch, kStepQuads / 2);  // the other half comes with the other columns
    keep_float_unit_awake();
    _tile_loadd(6, weights, kQuadBytes);
    _tile_loadd(4, codes, stride);
    _tile_loadd(7, weights + 64, kQuadBytes);
    _tile_loadd(5, codes + kTileRows * stride, stride);
    QUIRE_MULTIPLY_TILES(0, 4, 6)
    QUIRE_MULTIPLY_TILES(2, 5, 6)
    QUIRE_MULTIPLY_TILES(1, 4, 7)
    QUIRE_MULTIPLY_TILES(3, 5, 7)
  }
  store_sums(tiles);
}

struct AmxTile {
  static constexpr int64_t kBlockQuads = 128;  // 32 KiB of 8-bit codes
  static constexpr int64_t kMaxRows = 2 * kTileRows, kRowUnit = kTileRows;
  static constexpr bool kSigned = true, kAddsGroups = false;
  static bool reads_packed(int64_t, int64_t) { return false; }
  static bool is_in_order(int64_t, Codes) { return true; }
  static int super_passes(int64_t) { return 1; }

  template <Codes kCodes, Offset kOffset, bool kSignedCodes>
  static void add_supers(int rows, const SuperRun& run, int32_t* sums, int32_t* supers, const PrefetchPlan& plan,
                         int pass) {
    add_supers_through_memory<AmxTile, kCodes, kOffset, kSignedCodes>(rows, run, sums, supers, plan.of_pass(pass));
  }

  template <Codes, bool kSignedCodes>
  static void run(int rows, int, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads,
                  int32_t* sums, bool is_first, Prefetch& prefetch) {
    written_for_tiles();
    const int64_t steps = quads / kStepQuads;
    if (rows <= kTileRows) {
      run_1x4<kSignedCodes>(codes, stride, weights, steps, sums, is_first, prefetch);
    } else {
      run_2x2<kSignedCodes>(codes, stride, weights, steps, sums, is_first, prefetch);
      run_2x2<kSignedCodes>(codes, stride, weights + 128, steps, sums + 32, is_first, prefetch);
    }
  }
};

int64_t rows_per_block(int64_t) { return 256; }

// Rows that fill up the last tile get scales of zero. Their sums are not stored, but numbers left from other calls may
// be subnormal, which is slow.
void prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  grouped_prepare(args, row_begin, row_end, input);
  if (row_end < args.m) return;
  const QuantizedRows rows(args, input);
  for (int64_t row = args.m; row < QuantizedRows::padded_rows(args.m); ++row) {
    for (int64_t s = 0; s < rows.num_scales; ++s) rows.scales[rows.at(row, s)] = 0;
    for (int64_t s = 0; s < rows.num_sums(); ++s) rows.offset_factors[rows.at(row, s)] = 0;
  }
}

void run(const GemmBlock& block) {
  const GemmArgs& args = *block.args;
  const int64_t group_size = args.weight.form.group_size;
  // The limits are measured.
  const int64_t largest_small = args.weight.form.bits != 8 ? kAmxSmallGroup : kAmxKUnit;
  if (group_size > largest_small && group_size % kAmxKUnit == 0) {
    configure_tiles(std::min(args.m, kTileRows), kAmxKUnit);
    run_grouped<AmxTile>(block);
  } else {
    configure_tiles(std::min(args.m, kTileRows), step_of(group_size));
    run_small_groups(block);
  }
  _tile_release();
}

#endif

}  // namespace

extern const GemmKernels gemm_grouped_amx_table;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
const GemmKernels gemm_grouped_amx_table = {kTileRows, grouped_input_bytes, prepare, rows_per_block, run};
#else
const GemmKernels gemm_grouped_amx_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_grouped_amx_kernels, gemm_grouped_amx_table)
