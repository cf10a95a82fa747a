// Attention arithmetic in float32 FMAs, for every instruction set and cache type.
#pragma once

#include "attention_code_rows.h"
#include "attention_rows.h"
#include "attention_tile.h"

namespace quire::QUIRE_ISA {
namespace {

struct F32Lanes {
  using Element = float;
  using Vector = F32;
  static Vector zero() { return QUIRE_ISA::zero(); }
  static Vector load(const float* p) { return QUIRE_ISA::load(p); }
  static Vector multiply_add(Vector acc, Vector x, const float* y) { return fma(x, broadcast(*y), acc); }
  static void store(float* p, Vector x) { QUIRE_ISA::store(p, x); }
};

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
// The arithmetic for the first 8 lanes only, if the other lanes are 0. It gives the same bits, and is twice as fast on
// CPUs that split 512-bit operations (Zen 4).
struct F32HalfLanes {
  using Element = float;
  using Vector = __m256;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const float* p) { return _mm256_load_ps(p); }
  static Vector multiply_add(Vector acc, Vector x, const float* y) {
    return _mm256_fmadd_ps(x, _mm256_broadcast_ss(y), acc);
  }
  static void store(float* p, Vector x) { _mm512_store_ps(p, _mm512_zextps256_ps512(x)); }
};
#endif

// The products of a few rows, with the interface of CodeRows.
template <class T>
struct WordRows {
  static void scores(Rows<T> keys, Range range, int head_dim, const float* query, LaneRange lanes, float* words,
                     float* scores, Prefetcher& prefetcher) {
    scores_of_rows<F32Rows<T>>(keys, range, head_dim, query + lanes.first, lanes.count, words, scores + lanes.first,
                               prefetcher);
    multiply_by_scales(scores, keys, range, lanes);
  }
  static void values(Rows<T> values, Range range, int head_dim, const float* probabilities, int rows, float* out,
                     int stride, Prefetcher& prefetcher) {
    values_of_rows<F32Rows<T>>(values, range, head_dim, probabilities, rows, out, stride, prefetcher);
  }
};

// T is the element type of the cache. The type of queries and results is an argument.
//
// If rows of keys or values have scales, a scale multiplies the scores or the probabilities of its row, and not the
// elements of the row.
template <class T>
class F32Path {
 public:
  using Cache = T;
  static constexpr int kMaxRows = 128;
  static constexpr int kTilesTogether = 1;  // row tiles that need the same range of positions

  struct Session {};

  // has_lanes() says whether the functions for a range of lanes accept these sizes of keys and values. wants_lanes()
  // says whether these functions are faster for this number of rows of one KV head.
  static bool has_lanes(int head_dim, int value_dim) {
    return is_whole<F32Rows<T>>(head_dim) && is_whole<F32Rows<T>>(value_dim);
  }
  static bool wants_lanes(int rows) { return rows <= std::max(kLanes / 2, kRowsAtOnce); }

  static size_t scratch_bytes(int head_dim, int row_tiles) {
    return sizeof(float) * (static_cast<size_t>(row_tiles) * head_dim * kLanes + kTile * kKeyStride + kValueFloats +
                            kTile * kLanes) +
           256;
  }
  // The floats in a row of an output tile: the size of values, and padding.
  static int width(int value_dim) { return round_up(value_dim, kTile); }

  // Writes a row of an output tile, times scale.
  static void write_row(void* out, DType dtype, const float* values, F32 scale, int value_dim) {
    const F32 factor = scale * broadcast(kUnit<T>);
    with_type_of(dtype, [&]<class Q>(Q) {
      Q* row = static_cast<Q*>(out);
      for (int e = 0; e < value_dim; e += kLanes) store_part(row + e, load(values + e) * factor, value_dim - e);
    });
  }

  F32Path(int head_dim, int value_dim, int num_rows, Carver& scratch)
      : head_dim_(head_dim),
        value_dim_(value_dim),
        num_rows_(num_rows),
        queries_(scratch.take<float>(static_cast<size_t>(round_up(num_rows, kLanes)) * head_dim)),
        keys_(scratch.take<float>(kTile * kKeyStride)),
        values_(scratch.take<float>(kValueFloats)),
        block_(scratch.take<float>(kTile * kLanes)) {}

  void load_queries(const void* const* rows, DType dtype) {
    with_type_of(dtype, [&]<class Q>(Q) {
      for (int r = 0; r < round_up(num_rows_, kLanes); ++r) {
        float* lane = queries_ + static_cast<size_t>(r / kLanes) * head_dim_ * kLanes + r % kLanes;
        const Q* row = r < num_rows_ ? static_cast<const Q*>(rows[r]) : nullptr;
        for (int e = 0; e < head_dim_; ++e) lane[e * kLanes] = row != nullptr ? to_f32(row[e]) * kUnit<T> : 0.0f;
      }
    });
  }

  // scores[row tile][position][lane] = q . k for the positions of `range`. tile_ranges gives the positions that each
  // row tile needs.
  void scores(Rows<T> key_rows, Range range, const Range* tile_ranges, float* scores, Prefetcher& prefetcher) {
    for (int p = range.begin; p < range.end; p += kTile) {
      prefetcher.follow(kTile * head_dim_ * static_cast<int>(sizeof(T)));
      for (int i = 0; i < kTile; ++i) convert_row(key_rows, p + i, keys_ + i * kKeyStride);
      for (int t = 0; t * kLanes < num_rows_; ++t) {
        if (p < tile_ranges[t].begin || p >= tile_ranges[t].end) continue;
        const float* q = queries_ + static_cast<size_t>(t) * head_dim_ * kLanes;
        float* tile_scores = scores + static_cast<size_t>(t) * kSplit * kLanes;
        product<true>(q, keys_, kKeyStride, head_dim_, tile_scores + p * kLanes);
        multiply_by_scales(tile_scores, key_rows, {p, p + kTile}, {0, kLanes});
      }
    }
  }

  // The same for a range of lanes of one row tile; the other lanes of `scores` are kept.
  void scores_of_lanes(Rows<T> key_rows, Range range, LaneRange lanes, float* scores, Prefetcher& prefetcher) {
    Few::scores(key_rows, range, head_dim_, queries_, lanes, values_, scores, prefetcher);
  }

  // Replaces the scores of two positions by their probabilities.
  static void store_probabilities(float* tile_scores, int position, F32 p0, F32 p1) {
    store(tile_scores + position * kLanes, p0);
    store(tile_scores + (position + 1) * kLanes, p1);
  }

  void arrange_probabilities(float*, const Range*) const {}

  // out[row tile][lane][width] = probabilities x values; tiles with an empty range are skipped. A few columns of values
  // at a time stay in the first-level cache for all row tiles.
  void weighted_values(Rows<T> value_rows, Range range, float* probabilities, const Range* tile_ranges, float* out,
                       Prefetcher& prefetcher) {
    const int stride = width(value_dim_);
    for (int t = 0; t * kLanes < num_rows_; ++t) {
      multiply_by_scales(probabilities + static_cast<size_t>(t) * kSplit * kLanes, value_rows, tile_ranges[t],
                         {0, kLanes});
    }
    for (int e = 0; e < stride; e += kTile) {
      load_values(value_rows, range, e, prefetcher);
      for (int t = 0; t * kLanes < num_rows_; ++t) {
        const Range seen = tile_ranges[t];
        if (seen.size() <= 0) continue;
        const float* a = probabilities + (static_cast<size_t>(t) * kSplit + seen.begin) * kLanes;
        product<false>(a, values_ + seen.begin * kTile, kTile, seen.size(), block_);
        transpose_lanes(block_, out + static_cast<size_t>(t) * kLanes * stride + e, stride);
      }
    }
  }

  // The same for a range of lanes of one row tile; the other rows of `out` are kept.
  void weighted_values_of_lanes(Rows<T> value_rows, Range range, LaneRange lanes, float* probabilities, float* out,
                                Prefetcher& prefetcher) {
    const int stride = width(value_dim_);
    multiply_by_scales(probabilities, value_rows, range, lanes);
    Few::values(value_rows, range, value_dim_, probabilities + lanes.first, lanes.count, out + lanes.first * stride,
                stride, prefetcher);
  }

 private:
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2 && QUIRE_ISA_LEVEL < QUIRE_LEVEL_AVX512
  using Few = std::conditional_t<sizeof(T) == 1, CodeRows<T>, WordRows<T>>;
#else
  using Few = WordRows<T>;
#endif
  static constexpr int kKeyStride = kMaxHeadDim + 16;  // not a power of two: rows spread over the sets of the cache
  static constexpr int kValueFloats = std::max(kSplit * kTile, kWordFloats);

  template <bool kAlongK>
  void product(const float* a, const float* b, int64_t stride, int size, float* out) const {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
    if (num_rows_ <= 8) return outer<F32HalfLanes, kAlongK>(a, b, stride, size, out);
#endif
    outer<F32Lanes, kAlongK>(a, b, stride, size, out);
  }

  // Loads the columns e to e + kTile - 1 of the values. Columns from value_dim on are zeros.
  void load_values(Rows<T> rows, Range range, int e, Prefetcher& prefetcher) {
    for (int p = range.begin; p < range.end; ++p) {
      if (p % 2 == 0) prefetcher.follow(2 * kTile * sizeof(T));
      for (int i = 0; i < kTile; i += kLanes) {
        store(values_ + p * kTile + i, rows.load(p, e + i, value_dim_ - e - i));
      }
    }
  }

  // The memory after a row has room for a vector.
  void convert_row(Rows<T> rows, int row, float* dst) const {
    for (int e = 0; e < head_dim_; e += kLanes) store(dst + e, rows.load(row, e, head_dim_ - e));
  }

  int head_dim_, value_dim_, num_rows_;
  float* queries_;  // [row tile][head_dim][lane]
  float* keys_;     // [kTile][kKeyStride]
  float* values_;   // [kSplit][kTile], or words of keys
  float* block_;    // [kTile][lane]
};

}  // namespace
}  // namespace quire::QUIRE_ISA
