// Products of bfloat16 tiles on AMX: 16 rows x 32 k times 32 k x 16 columns, kept in float32 tiles over all steps of k.
//
// A tile row of the left operand has 32 k. A tile row of the right operand has pairs of k for 16 columns. All functions
// here sum every element over k in the same order. They need tiles of 16 rows of 64 bytes.
#pragma once

#include <cstdint>

#include "attention_tile.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "amx_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

// In the first step, the 16 rows of an operand are `stride` bytes apart. The next step begins `step` bytes further.
struct TileOperand {
  const char* data;
  int64_t stride, step;
  const char* at(int s) const { return data + s * step; }
};

// out[i] = a[i] * b for kCount values of i. Rows of out are out_stride bytes apart. The prefetcher follows the tiles of
// a; an element of a takes kElementBytes in the cache.
template <int kCount, int kElementBytes>
inline void multiply_column(const TileOperand* a, TileOperand b, int steps, float* const* out, int64_t out_stride,
                            Prefetcher& prefetcher) {
  written_for_tiles();
  _tile_zero(0);
  if constexpr (kCount > 1) _tile_zero(1);
  if constexpr (kCount > 2) _tile_zero(2);
  if constexpr (kCount > 3) _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    _tile_loadd(4, b.at(s), b.stride);
    _tile_loadd(5, a[0].at(s), a[0].stride);
    _tile_dpbf16ps(0, 5, 4);
    prefetcher.follow(512 * kElementBytes);
    if constexpr (kCount > 1) {
      _tile_loadd(6, a[1].at(s), a[1].stride);
      _tile_dpbf16ps(1, 6, 4);
      prefetcher.follow(512 * kElementBytes);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(7, a[2].at(s), a[2].stride);
      _tile_dpbf16ps(2, 7, 4);
      prefetcher.follow(512 * kElementBytes);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(5, a[3].at(s), a[3].stride);
      _tile_dpbf16ps(3, 5, 4);
      prefetcher.follow(512 * kElementBytes);
    }
  }
  _tile_stored(0, out[0], out_stride);
  if constexpr (kCount > 1) _tile_stored(1, out[1], out_stride);
  if constexpr (kCount > 2) _tile_stored(2, out[2], out_stride);
  if constexpr (kCount > 3) _tile_stored(3, out[3], out_stride);
}

// out + 16 i = a * b_i for 2 or 4 values of i. b_i lies i * b_distance bytes after b.
template <int kCount>
inline void multiply_row(TileOperand a, TileOperand b, int64_t b_distance, int steps, float* out, int64_t out_stride) {
  written_for_tiles();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kCount == 4) _tile_zero(2);
  if constexpr (kCount == 4) _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    _tile_loadd(4, a.at(s), a.stride);
    _tile_loadd(5, b.at(s), b.stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, b.at(s) + b_distance, b.stride);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (kCount == 4) {
      _tile_loadd(7, b.at(s) + 2 * b_distance, b.stride);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, b.at(s) + 3 * b_distance, b.stride);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + 16, out_stride);
  if constexpr (kCount == 4) _tile_stored(2, out + 32, out_stride);
  if constexpr (kCount == 4) _tile_stored(3, out + 48, out_stride);
}

// The four products of two left operands (a_distance bytes apart) and two right ones. The second row of products goes
// to out + 16 rows.
inline void multiply_two_rows(TileOperand a, int64_t a_distance, TileOperand b, int64_t b_distance, int steps,
                              float* out, int64_t out_stride) {
  written_for_tiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    _tile_loadd(4, a.at(s), a.stride);
    _tile_loadd(6, b.at(s), b.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a.at(s) + a_distance, a.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, b.at(s) + b_distance, b.stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* second = reinterpret_cast<float*>(reinterpret_cast<char*>(out) + 16 * out_stride);
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + 16, out_stride);
  _tile_stored(2, second, out_stride);
  _tile_stored(3, second + 16, out_stride);
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
