// Low-rank additions in bfloat16 on AMX tiles.
//
// h = scale * A x is kept as three bfloat16 numbers, which hold its 24 bits: h = h1 + h2 + h3. A row of them has a word
// (h1, h2) for each rank, and behind those a word (h3, 0) for each rank. The words of a part fill up whole tiles of 16
// ranks with zeros. B h is then a product of bfloat16, in which a weight is a pair of the same number:
//
//   B h = sum over the tiles of ranks of (sum of h1 b + sum of h2 b) + sum of h3 b
//
// That is the arithmetic of TDPBF16PS, which is exactly defined: sums of the first and of the second numbers of pairs,
// each in ascending order and with one rounding for a product and its addition, then one addition of both, and one to
// the tile; subnormal numbers are zeros. So fused multiply-adds give the same bits to a few rows, and A x has the same
// bits whichever of A and x is the first operand (Intel SDM, volume 2, TDPBF16PS).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx_tiles.h"
#include "quire/kernels/lora.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kTileRanks = 16;
constexpr int64_t kStepK = 32;          // of A x
constexpr int64_t kRowsOfColumns = 4;   // rows of x up to which A is the first operand: a row is a column of the second
constexpr int64_t kMinTiledRows = 4;    // from which B h is faster on tiles

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

// Subnormal numbers are zeros, as on tiles.
class SubnormalsAreZeros {
 public:
  SubnormalsAreZeros() : before_(_mm_getcsr()) { set(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  SubnormalsAreZeros(const SubnormalsAreZeros&) = delete;
  ~SubnormalsAreZeros() { set(before_); }

 private:
  static void set(unsigned csr) {
    _mm_setcsr(csr);
    __asm__ volatile("" : : : "memory");
  }
  unsigned before_;
};

// The first `count` of 16 ranks. `pitch` words lie between (h1, h2) and (h3, 0) of a rank.
inline void store_terms(float* to, int64_t pitch, __m512 h, __mmask16 count) {
  const __m512i high_half = _mm512_set1_epi32(-65536);
  constexpr int kNotFinite = 0x99;  // NaN and infinity have no rest
  const __mmask16 has_rest = _knot_mask16(_mm512_fpclass_ps_mask(h, kNotFinite));
  const __m512i first = _mm512_and_si512(_mm512_castps_si512(h), high_half);
  const __m512 rest = _mm512_maskz_sub_ps(has_rest, h, _mm512_castsi512_ps(first));
  const __m512i second = _mm512_and_si512(_mm512_castps_si512(rest), high_half);
  const __m512 third = _mm512_sub_ps(rest, _mm512_castsi512_ps(second));
  _mm512_mask_storeu_epi32(to, count, _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
  _mm512_mask_storeu_epi32(to + pitch, count, _mm512_srli_epi32(_mm512_castps_si512(third), 16));
}

// ---- A x --------------------------------------------------------------------------------------------------------------

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
  for (int i = 0; i < 16; ++i)
    r[i] = i < count ? _mm512_maskz_loadu_epi16(mask, a + i * k) : _mm512_setzero_si512();
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
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);        // quarters 0 and 2 of ranks 0 to 7
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);    // 1 and 3
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

// ---- B h --------------------------------------------------------------------------------------------------------------

// Words of consecutive rows with one adapter, and a part's panels of its B.
struct TermsExpansion {
  const float* words;  // of the part
  int64_t stride;      // from row to row
  int64_t pitch;       // from (h1, h2) to (h3, 0)
  const bf16* b;
  int64_t rank, panels;
  float* to;
};

// 16 columns of B, each number twice.
inline __m512i twice(const bf16* b) {
  const __m512i places = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5,
                                          4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_epi16(
      places, _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b))));
}

inline __m512 first_of_pairs(__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline __m512 second_of_pairs(__m512i x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
}

// Of few rows. Meanwhile the panels of the next block are fetched.
template <int kRows, int kPanels>
__attribute__((noinline)) void expand_terms(const TermsExpansion& e, int64_t first_panel) {
  const bf16* const b = e.b + first_panel * e.rank * kLoraColumns;
  const int64_t ahead = e.rank * kLoraBlockColumns;
  __m512 totals[kRows][kPanels];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel) totals[row][panel] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < e.rank; begin += kTileRanks) {
    __m512 sums[kRows][kPanels][3];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 3
        for (int term = 0; term < 3; ++term) sums[row][panel][term] = _mm512_setzero_ps();
    for (int64_t r = begin; r < std::min(e.rank, begin + kTileRanks); ++r) {
      __m512 w[kPanels];
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel) {
        const bf16* const from = b + (panel * e.rank + r) * kLoraColumns;
        __builtin_prefetch(from + ahead, 0, 2);
        w[panel] = second_of_pairs(twice(from));
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const __m512i two = _mm512_castps_si512(_mm512_set1_ps(e.words[row * e.stride + r]));
        const __m512i third = _mm512_castps_si512(_mm512_set1_ps(e.words[row * e.stride + e.pitch + r]));
        const __m512 h[] = {first_of_pairs(two), second_of_pairs(two), first_of_pairs(third)};
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel)
#pragma GCC unroll 3
          for (int term = 0; term < 3; ++term)
            sums[row][panel][term] = _mm512_fmadd_ps(h[term], w[panel], sums[row][panel][term]);
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int panel = 0; panel < kPanels; ++panel) {
        const __m512 of_two = _mm512_add_ps(sums[row][panel][0], sums[row][panel][1]);
        totals[row][panel] = _mm512_add_ps(_mm512_add_ps(totals[row][panel], of_two), sums[row][panel][2]);
      }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
    for (int panel = 0; panel < kPanels; ++panel)
      _mm512_storeu_ps(e.to + row * kLoraPitch + (first_panel + panel) * kLoraColumns, totals[row][panel]);
}

template <int kRows>
inline void expand_terms_of_rows(const TermsExpansion& e) {
  int64_t panel = 0;
  for (; panel + 4 <= e.panels; panel += 4) expand_terms<kRows, 4>(e, panel);
  for (; panel + 2 <= e.panels; panel += 2) expand_terms<kRows, 2>(e, panel);
  if (panel < e.panels) expand_terms<kRows, 1>(e, panel);
}

// Each number twice, side by side: 16 ranks x 16 columns of B. Ranks from `count` on are zeros.
inline void repeat_in_pairs(const bf16* b, int64_t count, int64_t ahead, char* to) {
  for (int64_t r = 0; r < count; ++r) {
    const bf16* const from = b + r * kLoraColumns;
    __builtin_prefetch(from + ahead, 0, 2);
    _mm512_store_si512(to + r * kRowBytes, twice(from));
  }
  for (int64_t r = count; r < kTileRanks; ++r) _mm512_store_si512(to + r * kRowBytes, _mm512_setzero_si512());
}

// Of 16 or 32 rows. Those that are too many have sums of any words, and whoever asks ignores them.
template <int kTiles, int kPanels>
inline void expand_tiles(const TermsExpansion& e, int64_t first_panel) {
  alignas(64) char pairs[kPanels][kTileRows * kRowBytes];
  const int64_t stride = e.stride * 4, next_rows = kTileRows * e.stride;
  _tile_zero(0);
  if constexpr (kPanels > 1) _tile_zero(1);
  if constexpr (kTiles > 1) _tile_zero(2);
  if constexpr (kTiles > 1 && kPanels > 1) _tile_zero(3);
  for (int64_t begin = 0; begin < e.rank; begin += kTileRanks) {
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel)
      repeat_in_pairs(e.b + ((first_panel + panel) * e.rank + begin) * kLoraColumns,
                      std::min(kTileRanks, e.rank - begin), e.rank * kLoraBlockColumns, pairs[panel]);
    written_for_tiles();
    _tile_loadd(6, pairs[0], kRowBytes);
    if constexpr (kPanels > 1) _tile_loadd(7, pairs[kPanels - 1], kRowBytes);
    const auto add = [&](const float* words) {
      _tile_loadd(4, words, stride);
      if constexpr (kTiles > 1) _tile_loadd(5, words + next_rows, stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kPanels > 1) _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTiles > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTiles > 1 && kPanels > 1) _tile_dpbf16ps(3, 5, 7);
    };
    add(e.words + begin);
    add(e.words + e.pitch + begin);
    written_for_tiles();
  }
  float* const to = e.to + first_panel * kLoraColumns;
  constexpr int64_t kNextRows = kTileRows * kLoraPitch, kPitchBytes = kLoraPitch * 4;
  _tile_stored(0, to, kPitchBytes);
  if constexpr (kPanels > 1) _tile_stored(1, to + kLoraColumns, kPitchBytes);
  if constexpr (kTiles > 1) _tile_stored(2, to + kNextRows, kPitchBytes);
  if constexpr (kTiles > 1 && kPanels > 1) _tile_stored(3, to + kNextRows + kLoraColumns, kPitchBytes);
}

template <int kTiles>
inline void expand_tiles_of_rows(const TermsExpansion& e) {
  int64_t panel = 0;
  for (; panel + 2 <= e.panels; panel += 2) expand_tiles<kTiles, 2>(e, panel);
  if (panel < e.panels) expand_tiles<kTiles, 1>(e, panel);
}

inline void expand_on_tiles(TermsExpansion e, int64_t num_rows) {
  const TilesAs configured(config_of(kTileRows, kRowBytes));
  for (int64_t row = 0; row < num_rows; row += 2 * kTileRows) {
    if (num_rows - row > kTileRows) {
      expand_tiles_of_rows<2>(e);
    } else {
      expand_tiles_of_rows<1>(e);
    }
    e.words += 2 * kTileRows * e.stride;
    e.to += 2 * kTileRows * kLoraPitch;
  }
}

inline void expand_few_rows(TermsExpansion e, int64_t num_rows) {
  for (; num_rows >= 2; num_rows -= 2) {
    expand_terms_of_rows<2>(e);
    e.words += 2 * e.stride;
    e.to += 2 * kLoraPitch;
  }
  if (num_rows > 0) expand_terms_of_rows<1>(e);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
