// Matrix product with grouped integer weights on AMX tiles (16 rows x 64 k times 64 k x 16 columns, TDPBSUD). Integer
// sums are exact, so the result has the bits of gemm_grouped.cpp.
#include "gemm_grouped_blocks.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "amx_tiles.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

constexpr int64_t kStepQuads = kAmxKUnit / kQuad;
constexpr int64_t kPitch = kPanelWidth * sizeof(int32_t);

inline void fetch(Prefetch& prefetch, int64_t calls) {
  for (int64_t i = 0; i < calls; ++i) prefetch.fetch();
}

// sums += input * weights; the codes of weights have a sign when they come unpacked. A macro, because tiles are named
// by literals.
#define QUIRE_MULTIPLY_TILES(sums, input, weights) \
  if constexpr (kCodes == Codes::unpacked) {       \
    _tile_dpbssd(sums, input, weights);            \
  } else {                                         \
    _tile_dpbsud(sums, input, weights);            \
  }

// 64 columns for up to 16 rows.
template <Codes kCodes>
void run_1x4(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t steps, int32_t* sums, bool is_first,
             Prefetch& prefetch) {
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
  for (int64_t step = 0; step < steps; ++step, codes += kAmxKUnit, weights += kStepQuads * kQuadBytes) {
    fetch(prefetch, kStepQuads);
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
  _tile_stored(0, sums, kPitch);
  _tile_stored(1, sums + 16, kPitch);
  _tile_stored(2, sums + 32, kPitch);
  _tile_stored(3, sums + 48, kPitch);
}

// 32 columns for 17 to 32 rows.
template <Codes kCodes>
void run_2x2(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t steps, int32_t* sums, bool is_first,
             Prefetch& prefetch) {
  int32_t* const low = sums + kTileRows * kPanelWidth;
  if (is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kPitch);
    _tile_loadd(1, sums + 16, kPitch);
    _tile_loadd(2, low, kPitch);
    _tile_loadd(3, low + 16, kPitch);
  }
  for (int64_t step = 0; step < steps; ++step, codes += kAmxKUnit, weights += kStepQuads * kQuadBytes) {
    fetch(prefetch, kStepQuads / 2);  // the other half comes with the other columns
    _tile_loadd(6, weights, kQuadBytes);
    _tile_loadd(4, codes, stride);
    _tile_loadd(7, weights + 64, kQuadBytes);
    _tile_loadd(5, codes + kTileRows * stride, stride);
    QUIRE_MULTIPLY_TILES(0, 4, 6)
    QUIRE_MULTIPLY_TILES(2, 5, 6)
    QUIRE_MULTIPLY_TILES(1, 4, 7)
    QUIRE_MULTIPLY_TILES(3, 5, 7)
  }
  _tile_stored(0, sums, kPitch);
  _tile_stored(1, sums + 16, kPitch);
  _tile_stored(2, low, kPitch);
  _tile_stored(3, low + 16, kPitch);
}

struct AmxTile {
  static constexpr int64_t kMaxRows = 2 * kTileRows, kRowUnit = kTileRows;
  static constexpr bool kSigned = true;
  static bool reads_packed(int64_t) { return false; }

  template <Codes kCodes>
  static void run(int rows, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int32_t* sums,
                  bool is_first, Prefetch& prefetch) {
    const int64_t steps = quads / kStepQuads;
    if (rows <= kTileRows) {
      run_1x4<kCodes>(codes, stride, weights, steps, sums, is_first, prefetch);
    } else {
      run_2x2<kCodes>(codes, stride, weights, steps, sums, is_first, prefetch);
      run_2x2<kCodes>(codes, stride, weights + 128, steps, sums + 32, is_first, prefetch);
    }
  }
};

int64_t rows_per_block(int64_t) { return 256; }

void run(const GemmBlock& block) {
  configure_tiles(std::min(block.args->m, kTileRows));
  run_grouped<AmxTile>(block);
  _tile_release();
}

#endif

}  // namespace

extern const GemmKernels gemm_grouped_amx_table;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
const GemmKernels gemm_grouped_amx_table = {2 * kTileRows, grouped_input_bytes, grouped_prepare, rows_per_block, run};
#else
const GemmKernels gemm_grouped_amx_table = {};
#endif

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_grouped_amx_kernels, gemm_grouped_amx_table)
