// A x of bfloat16 on AMX tiles. A is read as it is packed for all instruction sets, a row for each rank.
//
// Of few rows of x, A is the first operand of a tile's product, and a row of x is a column of the second: pairs of k
// below each other, as they are in memory. Of more rows, x is the first operand, and each step of A is transposed for
// all of them. Both give the same bits, because the arithmetic of TDPBF16PS is exactly defined and does not tell its
// operands apart: sums of the first and of the second numbers of pairs, in ascending order and with one rounding for a
// product and its addition, then one addition of both, and one to the tile. Subnormal numbers are zeros (Intel SDM,
// volume 2, TDPBF16PS).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx_tiles.h"
#include "quire/dtype.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileRanks = 16;
constexpr int64_t kStepK = 32;         // of A x
constexpr int64_t kRowsOfColumns = 4;  // rows of x up to which A is the first operand: a row is a column of the second

// Another configuration of the tiles, and afterwards the one before.
class TilesAs {
 public:
  explicit TilesAs(const TileConfig& wanted) {
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    changes_ = std::memcmp(&before_, &wanted, sizeof(wanted)) != 0;
    if (changes_) load_config(wanted);
  }
  TilesAs(const TilesAs&) = delete;
  ~TilesAs() {
    if (!changes_) return;
    if (before_.palette == 0) {
      _tile_release();
    } else {
      load_config(before_);
    }
  }

 private:
  TileConfig before_;
  bool changes_;
};

// Rows of 32 numbers each, zeros behind the first `count` rows and `num_k` numbers of a row.
template <class Row>
inline void copy_rows(const Row& row, int64_t count, int64_t num_k, void* to) {
  const __mmask32 mask = num_k >= kStepK ? ~__mmask32{0} : (__mmask32{1} << num_k) - 1;
  for (int64_t i = 0; i < kTileRows; ++i)
    _mm512_store_si512(static_cast<char*>(to) + i * kRowBytes,
                       i < count ? _mm512_maskz_loadu_epi16(mask, row(i)) : _mm512_setzero_si512());
}

// Pairs of 16 ranks: [rank][pair] to [pair][rank], 32 k of each. Ranks from `count` on are zeros.
inline void transpose_pairs(const bf16* a, int64_t k, int64_t count, int64_t num_k, void* to) {
  const __mmask32 mask = num_k >= kStepK ? ~__mmask32{0} : (__mmask32{1} << num_k) - 1;
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = i < count ? _mm512_maskz_loadu_epi16(mask, a + i * k) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 * b + j] has pair 4 * l + j of ranks 4 * b to 4 * b + 3 in its quarter l
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);      // quarters 0 and 2 of ranks 0 to 7
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);  // 1 and 3
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  char* const out = static_cast<char*>(to);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm512_store_si512(out + j * kRowBytes, _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88));
    _mm512_store_si512(out + (4 + j) * kRowBytes, _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88));
    _mm512_store_si512(out + (8 + j) * kRowBytes, _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd));
    _mm512_store_si512(out + (12 + j) * kRowBytes, _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd));
  }
}

// Tiles of A x in which ranks are rows: A is read as it is, and a row of x is a column of pairs.
inline TileConfig config_for_columns(int64_t ranks) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_a = tile == 4 || tile == 5, is_x = tile > 5;
    config.bytes_per_row[tile] = is_a ? kRowBytes : 4;
    config.rows[tile] = static_cast<uint8_t>(is_x ? kTileRows : ranks);
  }
  return config;
}

// sums[row][rank] of at most kRowsOfColumns rows.
template <int kRows>
inline void shrink_columns(const bf16* const* x, const bf16* a, int64_t k, int64_t ranks, float* sums,
                           const char* next) {
  _tile_zero(0);
  if constexpr (kRows > 1) _tile_zero(1);
  if constexpr (kRows > 2) _tile_zero(2);
  if constexpr (kRows > 3) _tile_zero(3);
  const auto add = [](const bf16* from_a, int64_t pitch, const bf16* x0, const bf16* x1, const bf16* x2,
                      const bf16* x3) {
    _tile_loadd(4, from_a, pitch);
    _tile_loadd(6, x0, 4);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRows > 1) {
      _tile_loadd(7, x1, 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows > 2) {
      _tile_loadd(6, x2, 4);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kRows > 3) {
      _tile_loadd(7, x3, 4);
      _tile_dpbf16ps(3, 4, 7);
    }
  };
  const bf16 *x0 = x[0], *x1 = x[kRows > 1 ? 1 : 0], *x2 = x[kRows > 2 ? 2 : 0], *x3 = x[kRows > 3 ? 3 : 0];
  int64_t i = 0;
  for (; i + kStepK <= k; i += kStepK) {
    if (next != nullptr)
      for (int64_t rank = 0; rank < ranks; ++rank) __builtin_prefetch(next + (rank * k + i) * 2, 0, 3);
    add(a + i, k * 2, x0 + i, x1 + i, x2 + i, x3 + i);
  }
  if (i < k) {
    alignas(64) bf16 last_a[kTileRows * kStepK], last_x[kTileRows * kStepK];
    copy_rows([&](int64_t rank) { return a + rank * k + i; }, ranks, k - i, last_a);
    copy_rows([&](int64_t row) { return x[row] + i; }, kRows, k - i, last_x);
    written_for_tiles();
    add(last_a, kRowBytes, last_x, last_x + kStepK, last_x + 2 * kStepK, last_x + 3 * kStepK);
  }
  _tile_stored(0, sums, 4);
  if constexpr (kRows > 1) _tile_stored(1, sums + kTileRanks, 4);
  if constexpr (kRows > 2) _tile_stored(2, sums + 2 * kTileRanks, 4);
  if constexpr (kRows > 3) _tile_stored(3, sums + 3 * kTileRanks, 4);
}

// Rows of x for tiles of 16.
struct TiledRows {
  const bf16* x;
  int64_t stride;        // in elements
  const int32_t* order;  // of the rows
  int64_t count;

  bool follow_each_other() const { return order[count - 1] - order[0] == count - 1; }
};

// sums[row][rank] of at most 64 rows: ranks are columns. Each step of A is transposed once for all rows.
template <int kTiles>
inline void shrink_rows(const TiledRows& rows, const bf16* a, int64_t k, int64_t ranks, float* sums, const char* next) {
  _tile_zero(0);
  if constexpr (kTiles > 1) _tile_zero(1);
  if constexpr (kTiles > 2) _tile_zero(2);
  if constexpr (kTiles > 3) _tile_zero(3);
  alignas(64) char pairs[kTileRows * kRowBytes], copies[kTiles][kTileRows * kRowBytes];
  const int64_t whole = rows.follow_each_other() ? rows.count / kTileRows : 0;  // tiles that are read from x itself
  const bf16* const first = rows.x + rows.order[0] * rows.stride;
  for (int64_t i = 0; i < k; i += kStepK) {
    const int64_t num_k = std::min(kStepK, k - i);
    if (next != nullptr)
      for (int64_t rank = 0; rank < ranks; ++rank) __builtin_prefetch(next + (rank * k + i) * 2, 0, 3);
    const void* from[kTiles];
    int64_t pitch[kTiles];
#pragma GCC unroll 4
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t row = tile * kTileRows;
      if (tile < whole && num_k == kStepK) {
        from[tile] = first + row * rows.stride + i;
        pitch[tile] = rows.stride * 2;
      } else {
        copy_rows([&](int64_t at) { return rows.x + rows.order[row + at] * rows.stride + i; },
                  std::min(kTileRows, rows.count - row), num_k, copies[tile]);
        from[tile] = copies[tile];
        pitch[tile] = kRowBytes;
      }
    }
    transpose_pairs(a + i, k, ranks, num_k, pairs);
    written_for_tiles();
    _tile_loadd(6, pairs, kRowBytes);
    _tile_loadd(4, from[0], pitch[0]);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTiles > 1) {
      _tile_loadd(5, from[1], pitch[1]);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(4, from[2], pitch[2]);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(5, from[3], pitch[3]);
      _tile_dpbf16ps(3, 5, 6);
    }
    written_for_tiles();
  }
  constexpr int64_t kTileSums = kTileRows * kTileRanks;
  _tile_stored(0, sums, kRowBytes);
  if constexpr (kTiles > 1) _tile_stored(1, sums + kTileSums, kRowBytes);
  if constexpr (kTiles > 2) _tile_stored(2, sums + 2 * kTileSums, kRowBytes);
  if constexpr (kTiles > 3) _tile_stored(3, sums + 3 * kTileSums, kRowBytes);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
