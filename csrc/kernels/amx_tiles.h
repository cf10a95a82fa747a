// AMX tiles as all matrix product kernels use them: 0 to 3 hold sums, 4 and 5 rows of the input, 6 and 7 weights.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "quire/isa.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kRowBytes = 64;  // of a tile

// LDTILECFG operand, palette 1 (Intel SDM, volume 1, chapter 18).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Sums and input have `input_rows` rows, weights 16.
inline void configure_tiles(int64_t input_rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = kRowBytes;
    config.rows[tile] = tile < 6 ? static_cast<uint8_t>(input_rows) : kTileRows;
  }
  __asm__ volatile("" : : "r"(&config) : "memory");  // g++ 12's intrinsic claims to read 8 bytes only
  _tile_loadconfig(&config);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
