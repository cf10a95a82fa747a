// Additions of bfloat16 on AMX tiles. A and B are read as they are packed for all instruction sets.
//
// A x: for few rows of x, A is the first operand of a tile's product. A row of x is a column of the second operand: its
// pairs of k are below each other, as they are in memory. For more rows, x is the first operand, and each step of A is
// transposed once for all rows. Both ways give the same bits, because the arithmetic of TDPBF16PS is exactly defined
// and treats both operands alike. It sums the first numbers of all pairs, and it sums the second numbers of all pairs.
// Each of these sums is in ascending order, with one rounding for a product and its addition. Then it adds both sums,
// and adds the result to the tile. Subnormal numbers count as zeros (Intel SDM, volume 2, TDPBF16PS).
//
// B (A x): scale * A x is kept as two terms of bfloat16, which form a pair. Both terms multiply the same number of B,
// so a step of a tile has 16 ranks. Tiles compute many rows. Vectors with the same arithmetic compute few rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx_tiles.h"
#include "quire/dtype.h"
#include "quire/kernels/lora.h"
#include "transpose16.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileRanks = 16;
constexpr int64_t kStepK = 32;         // elements of k in a step of A x
constexpr int64_t kRowsOfColumns = 4;  // with more rows of x, x is the first operand

// Sets another configuration of the tiles. Its destructor restores the earlier configuration.
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

// Copies `count` rows of `num_k` numbers to a tile of 16 rows of 32 numbers. The rest of the tile becomes zeros.
template <class Row>
inline void copy_rows(const Row& row, int64_t count, int64_t num_k, void* to) {
  const __mmask32 mask = num_k >= kStepK ? ~__mmask32{0} : (__mmask32{1} << num_k) - 1;
  for (int64_t i = 0; i < kTileRows; ++i)
    _mm512_store_si512(static_cast<char*>(to) + i * kRowBytes,
                       i < count ? _mm512_maskz_loadu_epi16(mask, row(i)) : _mm512_setzero_si512());
}

// Transposes the 16 pairs of k of 16 ranks: [rank][pair] becomes [pair][rank]. Ranks from `count` on are zeros.
inline void transpose_pairs(const bf16* a, int64_t k, int64_t count, int64_t num_k, void* to) {
  const __mmask32 mask = num_k >= kStepK ? ~__mmask32{0} : (__mmask32{1} << num_k) - 1;
  __m512i x[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = i < count ? _mm512_maskz_loadu_epi16(mask, a + i * k) : _mm512_setzero_si512();
  transpose16(x);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(static_cast<char*>(to) + i * kRowBytes, x[i]);
}

// The configuration for tiles of A x whose rows are ranks: A is read as it is, and a row of x is a column of pairs.
inline TileConfig config_for_columns(int64_t ranks) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_a = tile == 4 || tile == 5, is_x = tile > 5;
    config.bytes_per_row[tile] = is_a ? kRowBytes : 4;
    config.rows[tile] = static_cast<uint8_t>(is_x ? kTileRows : ranks);
  }
  return config;
}

// Computes sums[row][rank] for at most kRowsOfColumns rows.
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
  const int32_t* order;  // the order of the rows
  int64_t count;

  bool follow_each_other() const { return order[count - 1] - order[0] == count - 1; }
};

// Computes sums[row][rank] for at most 64 rows: ranks are columns. Each step of A is transposed once for all rows.
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

// Splits each number into two terms: its bfloat16, and the bfloat16 of the rest. The error is at most 2^-17 of it.
// Infinity and NaN have no rest.
inline __m512i two_terms(__m512 x) {
  constexpr int kInfiniteOrNan = 0x99;  // classes of VFPCLASSPS
  const auto rounded = [](__m512 v) { return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v))); };
  const __m512i first = rounded(x);
  const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(first, 16));
  const auto is_finite = static_cast<__mmask16>(~_mm512_fpclass_ps_mask(value, kInfiniteOrNan));
  const __m512i rest = rounded(_mm512_maskz_sub_ps(is_finite, x, value));
  return _mm512_or_si512(first, _mm512_slli_epi32(rest, 16));
}

// scale * A x of consecutive rows with one adapter, in two terms, and a part's panels of its B. After the last rank
// there are zeros up to the next multiple of 16.
struct TermExpansion {
  const float* terms;  // the pairs, in the memory of sums
  int64_t stride;
  const bf16* b;
  int64_t rank, panels;
  float* to;

  const bf16* step_of_b(int64_t panel, int64_t rank_begin) const {
    return b + (panel * rank + rank_begin) * kLoraColumns;
  }
  int64_t ahead() const { return rank * kLoraBlockColumns; }  // the next block of B, to be fetched
};

// Copies a step of a panel of B, with each number twice. Ranks from `ranks` on become zeros.
inline void copy_twice(const bf16* b, int64_t ranks, int64_t ahead, char* to) {
  const __m512i columns = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5,
                                           4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  for (int64_t rank = 0; rank < ranks; ++rank, b += kLoraColumns) {
    if (rank % 2 == 0) __builtin_prefetch(b + ahead, 0, 2);
    const __m512i numbers = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    _mm512_store_si512(to + rank * kRowBytes, _mm512_permutexvar_epi16(columns, numbers));
  }
  for (int64_t rank = ranks; rank < kTileRanks; ++rank)
    _mm512_store_si512(to + rank * kRowBytes, _mm512_setzero_si512());
}

// Computes 16 or 32 columns of up to kTiles x 16 rows. All rows of the tiles are written.
template <int kTiles, int kPanels>
inline void expand_tiles(const TermExpansion& e, int64_t panel) {
  alignas(64) char b[kPanels][kTileRows * kRowBytes];
  const int64_t pitch = e.stride * 4;
  _tile_zero(0);
  if constexpr (kPanels > 1) _tile_zero(1);
  if constexpr (kTiles > 1) _tile_zero(2);
  if constexpr (kTiles > 1 && kPanels > 1) _tile_zero(3);
  for (int64_t rank = 0; rank < e.rank; rank += kTileRanks) {
    const int64_t ranks = std::min(kTileRanks, e.rank - rank);
    for (int i = 0; i < kPanels; ++i) copy_twice(e.step_of_b(panel + i, rank), ranks, e.ahead(), b[i]);
    written_for_tiles();
    _tile_loadd(4, e.terms + rank, pitch);
    _tile_loadd(6, b[0], kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, b[1], kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTiles > 1) {
      _tile_loadd(5, e.terms + kTileRows * e.stride + rank, pitch);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kPanels > 1) _tile_dpbf16ps(3, 5, 7);
    }
    written_for_tiles();
  }
  float* const to = e.to + panel * kLoraColumns;
  constexpr int64_t kToPitch = kLoraPitch * sizeof(float);
  _tile_stored(0, to, kToPitch);
  if constexpr (kPanels > 1) _tile_stored(1, to + kLoraColumns, kToPitch);
  if constexpr (kTiles > 1) _tile_stored(2, to + kTileRows * kLoraPitch, kToPitch);
  if constexpr (kTiles > 1 && kPanels > 1) _tile_stored(3, to + kTileRows * kLoraPitch + kLoraColumns, kToPitch);
}

template <int kTiles>
void expand_on_tiles(const TermExpansion& e) {
  int64_t panel = 0;
  for (; panel + 2 <= e.panels; panel += 2) expand_tiles<kTiles, 2>(e, panel);
  if (panel < e.panels) expand_tiles<kTiles, 1>(e, panel);
}

// While it lives, subnormal numbers count as zeros in vectors too.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZeros); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  ~WithoutSubnormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZeros = 0x40;
  const unsigned before_;
};

// Computes the same as expand_tiles for one or two rows, in vectors. It needs WithoutSubnormals.
template <int kRows, int kPanels>
inline void expand_vectors(const TermExpansion& e, int64_t panel) {
  const __m512i upper_halves = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0,
                                                4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  constexpr __mmask32 kIsUpper = 0xaaaaaaaa;
  __m512 totals[kRows][kPanels];
#pragma GCC unroll 2
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int i = 0; i < kPanels; ++i) totals[row][i] = _mm512_setzero_ps();
  for (int64_t rank = 0; rank < e.rank; rank += kTileRanks) {
    alignas(64) float terms[kRows][2][kTileRanks];
    __m512 sums[kRows][2][kPanels];
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      const __m512i pairs = _mm512_loadu_si512(e.terms + row * e.stride + rank);
      _mm512_store_si512(terms[row][0], _mm512_slli_epi32(pairs, 16));
      _mm512_store_si512(terms[row][1], _mm512_andnot_si512(_mm512_set1_epi32(0xffff), pairs));
#pragma GCC unroll 4
      for (int i = 0; i < kPanels; ++i) sums[row][0][i] = sums[row][1][i] = _mm512_setzero_ps();
    }
    const int64_t ranks = std::min(kTileRanks, e.rank - rank);
    for (int64_t r = 0; r < ranks; ++r) {
      __m512 w[kPanels];
#pragma GCC unroll 4
      for (int i = 0; i < kPanels; ++i) {
        const bf16* const from = e.step_of_b(panel + i, rank + r);
        __builtin_prefetch(from + e.ahead(), 0, 2);
        const __m512i numbers = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        w[i] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(kIsUpper, upper_halves, numbers));
      }
#pragma GCC unroll 2
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int term = 0; term < 2; ++term) {
          const __m512 h = _mm512_set1_ps(terms[row][term][r]);
#pragma GCC unroll 4
          for (int i = 0; i < kPanels; ++i) sums[row][term][i] = _mm512_fmadd_ps(h, w[i], sums[row][term][i]);
        }
    }
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int i = 0; i < kPanels; ++i)
        totals[row][i] = _mm512_add_ps(totals[row][i], _mm512_add_ps(sums[row][0][i], sums[row][1][i]));
  }
#pragma GCC unroll 2
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int i = 0; i < kPanels; ++i)
      _mm512_storeu_ps(e.to + row * kLoraPitch + (panel + i) * kLoraColumns, totals[row][i]);
}

template <int kRows>
__attribute__((noinline)) void expand_in_vectors(const TermExpansion& e) {
  int64_t panel = 0;
  for (; panel + 4 <= e.panels; panel += 4) expand_vectors<kRows, 4>(e, panel);
  for (; panel + 2 <= e.panels; panel += 2) expand_vectors<kRows, 2>(e, panel);
  for (; panel < e.panels; ++panel) expand_vectors<kRows, 1>(e, panel);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
