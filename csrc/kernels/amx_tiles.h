// The use of AMX tiles in all kernels of matrix products: tiles 0 to 3 hold sums, 4 and 5 rows of the input, 6 and 7
// weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "quire/isa.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kRowBytes = 64;  // the bytes of a row of a tile

// LDTILECFG operand, palette 1 (Intel SDM, volume 1, chapter 18).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

inline void load_config(const TileConfig& config) {
  __asm__ volatile("" : : "r"(&config) : "memory");  // g++ 12's intrinsic claims to read only 8 bytes
  _tile_loadconfig(&config);
}

// Sums and input have `input_rows` rows. Rows of the input have `step_bytes`, and weights have one row per four of
// these bytes.
inline TileConfig config_of(int64_t input_rows, int64_t step_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_input = tile == 4 || tile == 5, is_weight = tile > 5;
    config.bytes_per_row[tile] = static_cast<uint16_t>(is_input ? step_bytes : kRowBytes);
    config.rows[tile] = static_cast<uint8_t>(is_weight ? step_bytes / 4 : input_rows);
  }
  return config;
}

inline void configure_tiles(int64_t input_rows, int64_t step_bytes = kRowBytes) {
  load_config(config_of(input_rows, step_bytes));
}

// The tile loads of g++ 12 do not declare that they read memory. Before tile loads, this keeps earlier writes before
// them. After tile loads, it keeps later writes after them.
inline void written_for_tiles() { __asm__ volatile("" : : : "memory"); }

// It is for loops of tile products without other float instructions. After about 0.7 us of such a loop, the next tile
// store takes 0.3 us longer, as if a unit of the core had gone to sleep (Granite Rapids; benchmarks/NOTES.md). One
// addition of floats every 16 steps prevents this, and one in each step costs nothing. Additions of integers do not
// help.
inline void keep_float_unit_awake() {
  __m128 sum;
  __asm__ volatile("vaddps %1, %1, %0" : "=x"(sum) : "x"(_mm_setzero_ps()));
}

// The memory for the four tiles of sums. Its rows are `pitch` bytes apart.
struct SumTiles {
  void *first, *second, *third, *fourth;
  int64_t pitch;
};

inline void start_sums(const SumTiles& sums, bool from_zero) {
  if (from_zero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, sums.first, sums.pitch);
  _tile_loadd(1, sums.second, sums.pitch);
  _tile_loadd(2, sums.third, sums.pitch);
  _tile_loadd(3, sums.fourth, sums.pitch);
}

inline void store_sums(const SumTiles& sums) {
  _tile_stored(0, sums.first, sums.pitch);
  _tile_stored(1, sums.second, sums.pitch);
  _tile_stored(2, sums.third, sums.pitch);
  _tile_stored(3, sums.fourth, sums.pitch);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
