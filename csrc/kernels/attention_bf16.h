// Attention arithmetic on bfloat16 caches: dot products of pairs (vdpbf16ps) or AMX tiles, float32 accumulation. Probabilities
// are rounded to bfloat16 for the second product; their sum is taken before rounding.
//
// A dword holds two neighbours of the summed dimension: of head_dim in queries and keys, of positions in probabilities and
// values.
#pragma once

#include "attention_tile.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

namespace quire::QUIRE_ISA {
namespace {

constexpr int kPairs = 16;  // dwords of one vector, rows of one AMX tile

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

// Eight tiles of 16 rows of 64 bytes.
inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile("" : : "r"(&config) : "memory");  // g++ 12's intrinsic claims to read 8 bytes only
  _tile_loadconfig(&config);
}

// g++ 12's tile loads do not say that they read memory: what was written before must be there.
inline void written_for_tiles() { __asm__ volatile("" : : : "memory"); }

// Tile operand: address of the first of 16 rows, and the distance between rows in bytes.
struct TileRows {
  const void* data;
  int64_t stride;
};

// out[i] (16 x 16 floats, rows `out_stride` bytes apart) = sum over s of a_i(s) b(s), for kCount <= 4 values of i. Step s of an
// operand begins a_step (b_step) bytes after the last one.
template <int kCount>
inline void amx_products_a(const TileRows* a, int64_t a_step, TileRows b, int64_t b_step, int steps, float* const* out,
                           int64_t out_stride) {
  written_for_tiles();
  _tile_zero(0);
  if constexpr (kCount > 1) _tile_zero(1);
  if constexpr (kCount > 2) _tile_zero(2);
  if constexpr (kCount > 3) _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    const auto at = [&](int i) { return static_cast<const char*>(a[i].data) + s * a_step; };
    _tile_loadd(4, static_cast<const char*>(b.data) + s * b_step, b.stride);
    _tile_loadd(5, at(0), a[0].stride);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (kCount > 1) {
      _tile_loadd(6, at(1), a[1].stride);
      _tile_dpbf16ps(1, 6, 4);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(7, at(2), a[2].stride);
      _tile_dpbf16ps(2, 7, 4);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(5, at(3), a[3].stride);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
  _tile_stored(0, out[0], out_stride);
  if constexpr (kCount > 1) _tile_stored(1, out[1], out_stride);
  if constexpr (kCount > 2) _tile_stored(2, out[2], out_stride);
  if constexpr (kCount > 3) _tile_stored(3, out[3], out_stride);
}

// The same with one left operand and kCount right ones: out[i] = sum over s of a(s) b_i(s), b_i = b + i * 64 bytes.
template <int kCount>
inline void amx_products_b(TileRows a, int64_t a_step, TileRows b, int64_t b_step, int steps, float* out,
                           int64_t out_stride) {
  written_for_tiles();
  _tile_zero(0);
  if constexpr (kCount > 1) _tile_zero(1);
  if constexpr (kCount > 2) _tile_zero(2);
  if constexpr (kCount > 3) _tile_zero(3);
  for (int s = 0; s < steps; ++s) {
    const char* right = static_cast<const char*>(b.data) + s * b_step;
    _tile_loadd(4, static_cast<const char*>(a.data) + s * a_step, a.stride);
    _tile_loadd(5, right, b.stride);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kCount > 1) {
      _tile_loadd(6, right + 64, b.stride);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(7, right + 128, b.stride);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(5, right + 192, b.stride);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, out, out_stride);
  if constexpr (kCount > 1) _tile_stored(1, out + 16, out_stride);
  if constexpr (kCount > 2) _tile_stored(2, out + 32, out_stride);
  if constexpr (kCount > 3) _tile_stored(3, out + 48, out_stride);
}

#else

struct PairLanes {
  using Element = uint32_t;
  using Vector = __m512;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const uint32_t* p) { return _mm512_load_ps(p); }
  static Vector multiply_add(Vector acc, Vector x, const uint32_t* y) {
    return _mm512_dpbf16_ps(acc, std::bit_cast<__m512bh>(x), std::bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*y))));
  }
  static void store(float* p, Vector x) { _mm512_store_ps(p, x); }
};

// The first 8 lanes: the same arithmetic, twice as fast on CPUs that split 512-bit operations (Zen 4). The others are 0.
struct PairHalfLanes {
  using Element = uint32_t;
  using Vector = __m256;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const uint32_t* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
  static Vector multiply_add(Vector acc, Vector x, const uint32_t* y) {
    return _mm256_dpbf16_ps(acc, std::bit_cast<__m256bh>(x), std::bit_cast<__m256bh>(_mm256_set1_epi32(static_cast<int>(*y))));
  }
  static void store(float* p, Vector x) { _mm512_store_ps(p, _mm512_zextps256_ps512(x)); }
};

#endif

class Bf16Path {
 public:
  using Cache = bf16;

  static size_t scratch_bytes(int head_dim, int row_tiles) {
    return sizeof(uint32_t) * (static_cast<size_t>(row_tiles) * query_pairs(head_dim) * kLanes + kKeyDwords +
                               static_cast<size_t>(kSplit / 2) * width(head_dim) + kTile * kLanes) + 256;
  }
  static int width(int head_dim) { return round_up(head_dim, kTile); }

  Bf16Path(int head_dim, int num_rows, Carver& scratch)
      : head_dim_(head_dim),
        num_rows_(num_rows),
        queries_(scratch.take<uint32_t>(static_cast<size_t>(round_up(num_rows, kLanes)) * query_pairs(head_dim))),
        keys_(scratch.take<uint32_t>(kKeyDwords)),
        values_(scratch.take<uint32_t>(static_cast<size_t>(kSplit / 2) * width(head_dim))),
        block_(scratch.take<float>(kTile * kLanes)) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
    configure_tiles();
#endif
  }
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  ~Bf16Path() { _tile_release(); }
#endif
  Bf16Path(const Bf16Path&) = delete;
  Bf16Path& operator=(const Bf16Path&) = delete;

  void load_queries(const bf16* const* rows) {
    const int pairs = query_pairs(head_dim_);
    for (int t = 0; t * kLanes < num_rows_; ++t) {
      for (int e = 0; e < pairs; e += kPairs) {
        __m512i x[16];
        for (int i = 0; i < 16; ++i) {
          const int r = t * kLanes + i;
          x[i] = r < num_rows_ ? load_dwords(rows[r], e) : _mm512_setzero_si512();
        }
        transpose16(x);
        uint32_t* dst = queries_ + (static_cast<size_t>(t) * pairs + e) * kLanes;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * kLanes, x[i]);
      }
    }
  }

  void load_values(const bf16* const* value_rows, Range range) {
    const int stride = width(head_dim_);
    for (int p = range.begin; p < range.end; p += 2) {
      if (p % kTile == 0 && p + 3 * kTile <= range.end) prefetch_rows(value_rows + p + 2 * kTile, head_dim_);
      uint32_t* dst = values_ + static_cast<size_t>(p / 2) * stride;
      const bf16 *even = value_rows[p], *odd = value_rows[p + 1];
      for (int e = 0; e < stride; e += kPairs) {
        const int left = head_dim_ - e;
        const __mmask16 mask = left >= kPairs ? 0xffff : first_lanes(left);
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + e));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd + e));
        _mm512_store_si512(dst + e, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }

  static void store_probabilities(float* tile_scores, int position, F32 p0, F32 p1) {
    const __m512i low = _mm512_cvtepu16_epi32(narrow_bf16(p0.v));
    const __m512i high = _mm512_cvtepu16_epi32(narrow_bf16(p1.v));
    _mm512_store_si512(tile_scores + position / 2 * kLanes, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

  void scores(const bf16* const* key_rows, Range range, const Range* tile_ranges, float* scores) {
    constexpr int kGroup = 4 * kTile;
    for (int p = range.begin; p < range.end; p += kGroup) {
      const int count = (range.end - p < kGroup ? range.end - p : kGroup) / kTile;
      TileRows keys[4];
      for (int i = 0; i < count; ++i) {
        keys[i] = key_tile(key_rows + p + i * kTile, keys_ + i * kTile * kKeyStride);
        if (p + kGroup + (i + 1) * kTile <= range.end) prefetch_rows(key_rows + p + kGroup + i * kTile, head_dim_);
      }
      for (int t = 0; t * kLanes < num_rows_; ++t) {
        if (p + kGroup <= tile_ranges[t].begin || p >= tile_ranges[t].end) continue;
        float* out[4];
        for (int i = 0; i < count; ++i) out[i] = scores + (static_cast<size_t>(t) * kSplit + p + i * kTile) * kLanes;
        const int pairs = query_pairs(head_dim_);
        const TileRows queries{queries_ + static_cast<size_t>(t) * pairs * kLanes, 64};
        const int steps = pairs / kPairs;
        if (count == 4) {
          amx_products_a<4>(keys, 64, queries, 64 * kPairs, steps, out, 64);
        } else {
          amx_products_a<2>(keys, 64, queries, 64 * kPairs, steps, out, 64);
        }
      }
    }
  }

  void weighted_values(float* probabilities, Range range, float* out) {
    float* first = probabilities + range.begin / 2 * kLanes;
    const int steps = range.size() / kStep;
    for (int s = 0; s < steps; ++s) {  // [pair][lane] to [lane][pair]
      float* tile = first + s * kPairs * kLanes;
      transpose_lanes(tile, tile, kLanes);
    }
    const int stride = width(head_dim_);
    const int64_t row_bytes = stride * 4;
    const TileRows a{first, 64};
    for (int e = 0; e < stride; e += 4 * kTile) {
      const TileRows b{values_ + static_cast<size_t>(range.begin / 2) * stride + e, row_bytes};
      switch ((stride - e) / kTile) {
        case 1: amx_products_b<1>(a, 64 * kPairs, b, row_bytes * kPairs, steps, out + e, row_bytes); break;
        case 2: amx_products_b<2>(a, 64 * kPairs, b, row_bytes * kPairs, steps, out + e, row_bytes); break;
        case 3: amx_products_b<3>(a, 64 * kPairs, b, row_bytes * kPairs, steps, out + e, row_bytes); break;
        default: amx_products_b<4>(a, 64 * kPairs, b, row_bytes * kPairs, steps, out + e, row_bytes);
      }
    }
  }

#else

  void scores(const bf16* const* key_rows, Range range, const Range* tile_ranges, float* scores) {
    const int pairs = query_pairs(head_dim_);
    for (int p = range.begin; p < range.end; p += kTile) {
      if (p + 3 * kTile <= range.end) prefetch_rows(key_rows + p + 2 * kTile, head_dim_);
      copy_keys(key_rows + p, keys_);
      for (int t = 0; t * kLanes < num_rows_; ++t) {
        if (p < tile_ranges[t].begin || p >= tile_ranges[t].end) continue;
        const uint32_t* q = queries_ + static_cast<size_t>(t) * pairs * kLanes;
        product<true>(q, keys_, kKeyStride, (head_dim_ + 1) / 2, scores + (static_cast<size_t>(t) * kSplit + p) * kLanes);
      }
    }
  }

  void weighted_values(float* probabilities, Range range, float* out) {
    const int stride = width(head_dim_);
    const uint32_t* a = reinterpret_cast<const uint32_t*>(probabilities) + range.begin / 2 * kLanes;
    for (int e = 0; e < stride; e += kTile) {
      const uint32_t* b = values_ + static_cast<size_t>(range.begin / 2) * stride + e;
      product<false>(a, b, stride, range.size() / 2, block_);
      transpose_lanes(block_, out + e, stride);
    }
  }

#endif

 private:
  static constexpr int kKeyStride = kMaxHeadDim / 2 + 16;  // dwords; not a power of two: rows spread over the cache's sets
  static constexpr int kKeyDwords = (QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX ? 4 : 1) * kTile * kKeyStride;

  // Dwords per query row, a whole number of vectors.
  static int query_pairs(int head_dim) { return round_up(head_dim, 2 * kPairs) / 2; }

  // Dwords pair .. pair + 15 of a row of head_dim elements, zeros behind its end.
  __m512i load_dwords(const bf16* row, int pair) const {
    const int left = head_dim_ - 2 * pair;
    return left >= 32 ? _mm512_loadu_si512(row + 2 * pair)
                      : _mm512_maskz_loadu_epi16((__mmask32{1} << left) - 1, row + 2 * pair);
  }

  void copy_keys(const bf16* const* rows, uint32_t* dst) const {
    for (int i = 0; i < kTile; ++i) {
      for (int e = 0; e < query_pairs(head_dim_); e += kPairs) {
        _mm512_store_si512(dst + i * kKeyStride + e, load_dwords(rows[i], e));
      }
    }
  }

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  // Keys that lie in the cache as the tile wants them are read from there.
  TileRows key_tile(const bf16* const* rows, uint32_t* copy) const {
    bool in_place = head_dim_ % 32 == 0;
    for (int i = 1; i < kTile; ++i) in_place &= rows[i] - rows[i - 1] == head_dim_;
    if (in_place) return {rows[0], 2 * head_dim_};
    copy_keys(rows, copy);
    return {copy, 4 * kKeyStride};
  }
#else
  template <bool kAlongK>
  void product(const uint32_t* a, const uint32_t* b, int64_t stride, int size, float* out) const {
    if (num_rows_ <= 8) return outer<PairHalfLanes, kAlongK>(a, b, stride, size, out);
    outer<PairLanes, kAlongK>(a, b, stride, size, out);
  }
#endif

  int head_dim_, num_rows_;
  uint32_t* queries_;  // [row tile][query_pairs][lane]
  uint32_t* keys_;     // copies of keys, [kTile or 4 * kTile][kKeyStride]
  uint32_t* values_;   // [kSplit / 2][width]
  float* block_;       // [kTile][lane]
};

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
