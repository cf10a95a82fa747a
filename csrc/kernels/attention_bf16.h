// Attention arithmetic on bfloat16 caches: dot products of pairs (vdpbf16ps) or AMX tiles, float32 accumulation.
// Probabilities are rounded to bfloat16 for the second product, after they are summed.
//
// Codes of a quantized cache become bfloat16 when rows are converted to the form for products. Only keys in bfloat16
// may be used in place.
//
// A dword holds two neighbours in the summed dimension: head_dim for queries and keys, positions for probabilities and
// values.
#pragma once

#include <algorithm>

#include "attention_amx.h"
#include "attention_rows.h"
#include "attention_tile.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

namespace quire::QUIRE_ISA {
namespace {

constexpr int kPairs = 16;  // dwords of one vector, rows of one AMX tile

struct PairLanes {
  using Element = uint32_t;
  using Vector = __m512;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector load(const uint32_t* p) { return _mm512_load_ps(p); }
  static Vector multiply_add(Vector acc, Vector x, const uint32_t* y) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(*y));
    return _mm512_dpbf16_ps(acc, std::bit_cast<__m512bh>(x), std::bit_cast<__m512bh>(pair));
  }
  static void store(float* p, Vector x) { _mm512_store_ps(p, x); }
};

// The arithmetic for the first 8 lanes only, if the other lanes are 0. It gives the same bits, and is twice as fast on
// CPUs that split 512-bit operations (Zen 4).
struct PairHalfLanes {
  using Element = uint32_t;
  using Vector = __m256;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector load(const uint32_t* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
  static Vector multiply_add(Vector acc, Vector x, const uint32_t* y) {
    const __m256i pair = _mm256_set1_epi32(static_cast<int>(*y));
    return _mm256_dpbf16_ps(acc, std::bit_cast<__m256bh>(x), std::bit_cast<__m256bh>(pair));
  }
  static void store(float* p, Vector x) { _mm512_store_ps(p, _mm512_zextps256_ps512(x)); }
};

// The arithmetic of the row kernels on caches of C, in dot products of pairs.
template <class C>
struct Bf16Rows {
  using Query = uint32_t;  // [pair][lane]
  static constexpr int kElementsPerWord = 2, kQueriesPerWord = 1;
  static constexpr int kFewestVectors = 2;

  static constexpr bool kIsFp8 = std::is_same_v<C, e4m3> || std::is_same_v<C, e5m2>;
  static constexpr int kWordsAtOnce = kIsFp8 ? kMostWords : kLanes;

  // Writes words[word][stride] of kLanes rows, from element e on.
  template <int kWords>
    requires(kWords == kLanes)
  [[gnu::always_inline]] static void load_words(Rows<C> rows, int e, float* words, int stride) {
    F32 x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i].v = _mm512_castsi512_ps(rows.load_bf16(i, e, 32));
    transpose(x);
    for (int i = 0; i < kLanes; ++i) store(words + i * stride, x[i]);
  }
  // 64 FP8 codes are transposed in groups of four, and then become two words per group. This halves the work.
  template <int kWords>
    requires(kWords == kMostWords)
  [[gnu::noinline]] static void load_words(Rows<C> rows, int e, float* words, int stride) {
    __m512i x[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(rows[i] + e);
    transpose16(x);
    for (int i = 0; i < 16; ++i, words += 2 * stride) {
      const Bf16Halves halves = bf16_halves(x[i], C{});
      const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(halves.lower, halves.upper));
      const __m512 last = _mm512_castsi512_ps(_mm512_unpackhi_epi8(halves.lower, halves.upper));
      _mm512_store_ps(words, _mm512_shuffle_ps(first, last, 0x88));
      _mm512_store_ps(words + stride, _mm512_shuffle_ps(first, last, 0xdd));
    }
  }

  template <int kRows, int kVectors>
  static void multiply_keys(F32 (&sums)[kRows][kVectors], const float* words, const uint32_t* query) {
    for (int v = 0; v < kVectors; ++v) {
      const F32 x = load(words + v * kLanes);
      for (int r = 0; r < kRows; ++r) sums[r][v].v = PairLanes::multiply_add(sums[r][v].v, x.v, query + r);
    }
  }

  // Computes out[row][column] = probabilities x values for kVectors vectors of columns. Bf16Path::width says their
  // order.
  template <int kRows, int kVectors>
  [[gnu::noinline]] static void multiply_values(Rows<C> rows, Range range, int column, const float* probabilities,
                                                float* out, int stride, Prefetcher& prefetcher) {
    constexpr int kTogether = kIsFp8 && kVectors % 4 == 0 ? 4 : 2;
    __m512 sums[kRows][kVectors];
    for (auto& of_row : sums) {
      for (__m512& sum : of_row) sum = _mm512_setzero_ps();
    }
    const auto* weights = reinterpret_cast<const uint32_t*>(probabilities) + range.begin / 2 * kLanes;
    for (int p = range.begin; p < range.end; p += 2, weights += kLanes) {
      prefetcher.follow(kVectors * kLanes * 2 * static_cast<int>(sizeof(C)));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v += kTogether) {
        __m512 pairs[kTogether];
        load_pairs(rows, p, column + v * kLanes, pairs);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
          for (int i = 0; i < kTogether; ++i) {
            sums[r][v + i] = PairLanes::multiply_add(sums[r][v + i], pairs[i], weights + r);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(out + r * stride + column + v * kLanes, sums[r][v]);
    }
  }

 private:
  // Loads the values of positions p and p + 1, from column e on, interleaved.
  static void load_pairs(Rows<C> rows, int p, int e, __m512 (&pairs)[2]) {
    const __m512i even = rows.load_bf16(p, e, 32), odd = rows.load_bf16(p + 1, e, 32);
    pairs[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(even, odd));
    pairs[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(even, odd));
  }
  static void load_pairs(Rows<C> rows, int p, int e, __m512 (&pairs)[4])
    requires kIsFp8
  {
    const __m512i halves_in_turns = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i even = _mm512_permutexvar_epi64(halves_in_turns, _mm512_loadu_si512(rows[p] + e));
    const __m512i odd = _mm512_permutexvar_epi64(halves_in_turns, _mm512_loadu_si512(rows[p + 1] + e));
    const Bf16Halves low = bf16_halves(_mm512_unpacklo_epi8(even, odd), C{});
    const Bf16Halves high = bf16_halves(_mm512_unpackhi_epi8(even, odd), C{});
    pairs[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low.lower, low.upper));
    pairs[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low.lower, low.upper));
    pairs[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi8(high.lower, high.upper));
    pairs[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi8(high.lower, high.upper));
  }
};

// C is the element type of the cache; queries and results are bfloat16.
template <class C>
class Bf16Path {
 public:
  using Cache = C;
  static constexpr bool kAmx = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX;
  static constexpr int kMaxRows = kAmx ? 256 : 128;
  static constexpr int kTilesTogether = kAmx ? 2 : 1;  // row tiles that need the same range of positions

  // has_lanes() says whether the functions for a range of lanes accept these sizes of keys and values. wants_lanes()
  // says whether these functions are faster for this number of rows of one KV head.
  static bool has_lanes(int head_dim, int value_dim) {
    return kAmx || (is_whole<Bf16Rows<C>>(head_dim) && is_whole<Bf16Rows<C>>(value_dim));
  }
  static bool wants_lanes(int rows) { return !kAmx && rows <= kLanes / 2; }

  // The object lives as long as one task.
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  struct Session {
    Session() { configure_tiles(kTileRows); }
    ~Session() { _tile_release(); }
  };
#else
  struct Session {};
#endif

  static size_t scratch_bytes(int head_dim, int row_tiles) {
    return sizeof(uint32_t) * (static_cast<size_t>(row_tiles) * query_pairs(head_dim) * kLanes + kKeyDwords +
                               kMostPanelDwords + kBlockFloats) +
           256;
  }
  // The floats in a row of an output tile: the size of values, and padding. In each 32 columns, the first 16 places
  // hold the low halves of the 8-column groups (columns 0-3, 8-11, 16-19, 24-27), because two rows are interleaved
  // inside 128-bit lanes. The other 16 places hold the other columns.
  static int width(int value_dim) { return round_up(value_dim, 2 * kTile); }

  // Writes a row of an output tile, times scale.
  static void write_row(void* row, DType, const float* values, F32 scale, int value_dim) {
    bf16* out = static_cast<bf16*>(row);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int e = 0; e < value_dim; e += 2 * kLanes) {
      const F32 low = load(values + e) * scale, high = load(values + e + kLanes) * scale;
      store_part(out + e, {_mm512_permutex2var_ps(low.v, first, high.v)}, value_dim - e);
      if (e + kLanes >= value_dim) break;
      store_part(out + e + kLanes, {_mm512_permutex2var_ps(low.v, second, high.v)}, value_dim - e - kLanes);
    }
  }

  Bf16Path(int head_dim, int value_dim, int num_rows, Carver& scratch)
      : head_dim_(head_dim),
        value_dim_(value_dim),
        num_rows_(num_rows),
        queries_(scratch.take<uint32_t>(static_cast<size_t>(round_up(num_rows, kLanes)) * query_pairs(head_dim))),
        keys_(scratch.take<uint32_t>(kKeyDwords)),
        values_(scratch.take<uint32_t>(kMostPanelDwords)),
        block_(scratch.take<float>(kBlockFloats)) {}

  void load_queries(const void* const* rows, DType) {
    const int pairs = query_pairs(head_dim_);
    const Rows<bf16> queries{reinterpret_cast<const bf16* const*>(rows), nullptr};
    for (int t = 0; t * kLanes < num_rows_; ++t) {
      for (int e = 0; e < pairs; e += kPairs) {
        __m512i x[16];
        for (int i = 0; i < 16; ++i) {
          const int r = t * kLanes + i;
          x[i] = r < num_rows_ ? queries.load_bf16(r, 2 * e, head_dim_ - 2 * e) : _mm512_setzero_si512();
        }
        transpose16(x);
        uint32_t* dst = queries_ + (static_cast<size_t>(t) * pairs + e) * kLanes;
        for (int i = 0; i < 16; ++i) _mm512_store_si512(dst + i * kLanes, x[i]);
      }
    }
  }

  // Replaces the scores of two positions by their probabilities, as [pair][lane]. They are rounded to nearest, and
  // halves are rounded up.
  static void store_probabilities(float* tile_scores, int position, F32 p0, F32 p1) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(p0.v), half), 16);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(p1.v), half);
    _mm512_store_si512(tile_scores + position / 2 * kLanes, _mm512_mask_blend_epi16(0xaaaaaaaa, low, high));
  }

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX

  // scores[row tile][position][lane] = q . k for the positions of `range`. tile_ranges gives the positions that each
  // row tile needs.
  void scores(Rows<C> key_rows, Range range, const Range* tile_ranges, float* scores, Prefetcher& prefetcher) {
    constexpr int kGroup = 4 * kTile;
    const int pairs = query_pairs(head_dim_);
    for (int p = range.begin; p < range.end; p += kGroup) {
      const int count = std::min(range.end - p, kGroup) / kTile;
      TileOperand keys[4];
      key_tiles(key_rows.from(p), count, keys);
      for (int t = 0; t * kLanes < num_rows_; ++t) {
        if (p + kGroup <= tile_ranges[t].begin || p >= tile_ranges[t].end) continue;
        float* out[4];
        for (int i = 0; i < count; ++i) out[i] = scores + (static_cast<size_t>(t) * kSplit + p + i * kTile) * kLanes;
        const TileOperand queries = tile_of(queries_ + static_cast<size_t>(t) * pairs * kLanes);
        if (count == 4) {
          multiply_column<4, sizeof(C)>(keys, queries, pairs / kPairs, out, 64, prefetcher);
        } else {
          multiply_column<2, sizeof(C)>(keys, queries, pairs / kPairs, out, 64, prefetcher);
        }
      }
    }
  }

  // The same for a range of lanes of one row tile; the other lanes of `scores` are kept.
  void scores_of_lanes(Rows<C> key_rows, Range range, LaneRange lanes, float* scores, Prefetcher& prefetcher) {
    constexpr int kGroup = 4 * kTile;
    const __mmask16 mask = static_cast<__mmask16>(first_lanes(lanes.count) << lanes.first);
    float* const out[4] = {block_, block_ + kTile * kLanes, block_ + 2 * kTile * kLanes, block_ + 3 * kTile * kLanes};
    for (int p = range.begin; p < range.end; p += kGroup) {
      const int count = std::min(range.end - p, kGroup) / kTile;
      TileOperand keys[4];
      key_tiles(key_rows.from(p), count, keys);
      if (count == 4) {
        multiply_column<4, sizeof(C)>(keys, tile_of(queries_), query_pairs(head_dim_) / kPairs, out, 64, prefetcher);
      } else {
        multiply_column<2, sizeof(C)>(keys, tile_of(queries_), query_pairs(head_dim_) / kPairs, out, 64, prefetcher);
      }
      for (int i = 0; i < count * kTile; ++i) {
        _mm512_mask_store_ps(scores + (p + i) * kLanes, mask, _mm512_load_ps(block_ + i * kLanes));
      }
    }
  }

  // Reorders the probabilities of every step from [pair][lane] to [lane][pair], for weighted_values.
  void arrange_probabilities(float* probabilities, const Range* tile_ranges) const {
    for (int t = 0; t * kLanes < num_rows_; ++t) {
      float* tile = probabilities + static_cast<size_t>(t) * kSplit * kLanes;
      for (int p = tile_ranges[t].begin; p < tile_ranges[t].end; p += kStep) {
        transpose_lanes(tile + p / 2 * kLanes, tile + p / 2 * kLanes, kLanes);
      }
    }
  }

  // out[row tile][lane][width] = probabilities x values; tiles with an empty range are skipped. A few columns of values
  // at a time stay in the first-level cache for all row tiles.
  void weighted_values(Rows<C> value_rows, Range range, const float* probabilities, const Range* tile_ranges,
                       float* out, Prefetcher& prefetcher) {
    const int row_tiles = ceil_div(num_rows_, kLanes), stride = width(value_dim_);
    const int panels = stride / kTile, most_panels = row_tiles > 1 ? 2 : 4;
    for (int panel = 0; panel < panels; panel += most_panels) {
      const int count = std::min(panels - panel, most_panels);
      load_values(value_rows, range, panel * kTile, count, prefetcher);
      float* columns = out + panel * kTile;
      for (int t = 0; t < row_tiles; t += 2) {
        if (tile_ranges[t].size() <= 0) continue;
        multiply(probabilities + static_cast<size_t>(t) * kSplit * kLanes, tile_ranges[t], count, row_tiles - t > 1,
                 columns + static_cast<size_t>(t) * kLanes * stride, stride);
      }
    }
  }

  // The same for a range of lanes of one row tile; the other rows of `out` are kept.
  void weighted_values_of_lanes(Rows<C> value_rows, Range range, LaneRange lanes, const float* probabilities,
                                float* out, Prefetcher& prefetcher) {
    constexpr int kMostPanels = 4;
    const int stride = width(value_dim_), panels = stride / kTile;
    for (int panel = 0; panel < panels; panel += kMostPanels) {
      const int count = std::min(panels - panel, kMostPanels);
      load_values(value_rows, range, panel * kTile, count, prefetcher);
      multiply(probabilities, range, count, false, block_, kMostPanels * kTile);
      for (int r = lanes.first; r < lanes.first + lanes.count; ++r) {
        for (int i = 0; i < count; ++i) {
          store(out + r * stride + (panel + i) * kTile, load(block_ + (r * kMostPanels + i) * kTile));
        }
      }
    }
  }

#else

  // scores[row tile][position][lane] = q . k for the positions of `range`. tile_ranges gives the positions that each
  // row tile needs.
  void scores(Rows<C> key_rows, Range range, const Range* tile_ranges, float* scores, Prefetcher& prefetcher) {
    const int pairs = query_pairs(head_dim_), row_tiles = ceil_div(num_rows_, kLanes);
    for (int p = range.begin; p < range.end; p += kTile) {
      prefetcher.follow(kTile * head_dim_ * static_cast<int>(sizeof(C)));
      copy_keys(key_rows.from(p), keys_);
      const auto sees = [&](int t) { return p >= tile_ranges[t].begin && p < tile_ranges[t].end; };
      for (int t = 0; t < row_tiles; ++t) {
        if (!sees(t)) continue;
        const uint32_t* q = queries_ + static_cast<size_t>(t) * pairs * kLanes;
        float* out = scores + (static_cast<size_t>(t) * kSplit + p) * kLanes;
        const bool two = t + 1 < row_tiles && sees(t + 1);
        product<true>(q, two ? pairs * kLanes : 0, keys_, kKeyStride, (head_dim_ + 1) / 2, out, kSplit * kLanes);
        if (two) ++t;
      }
    }
  }

  // out[row tile][lane][width] = probabilities x values; tiles with an empty range are skipped. A few columns of values
  // at a time stay in the first-level cache for all row tiles.
  void weighted_values(Rows<C> value_rows, Range range, const float* probabilities, const Range* tile_ranges,
                       float* out, Prefetcher& prefetcher) {
    const int stride = width(value_dim_), panels = stride / kTile, row_tiles = ceil_div(num_rows_, kLanes);
    constexpr int kMostPanels = 2;  // they hold a cache line of the values
    for (int panel = 0; panel < panels; panel += kMostPanels) {
      const int count = std::min(panels - panel, kMostPanels);
      load_values(value_rows, range, panel * kTile, count, prefetcher);
      for (int t = 0; t < row_tiles; ++t) {
        const Range seen = tile_ranges[t];
        if (seen.size() <= 0) continue;
        const bool two =
            t + 1 < row_tiles && tile_ranges[t + 1].begin == seen.begin && tile_ranges[t + 1].end == seen.end;
        const float* a = probabilities + (static_cast<size_t>(t) * kSplit + seen.begin / 2) * kLanes;
        float* columns = out + static_cast<size_t>(t) * kLanes * stride + panel * kTile;
        for (int i = 0; i < count; ++i) {
          product<false>(reinterpret_cast<const uint32_t*>(a), two ? kSplit * kLanes : 0, value_pairs(i, seen.begin),
                         kTile, seen.size() / 2, block_, kTile * kLanes);
          for (int j = 0; j <= two; ++j) {
            transpose_lanes(block_ + j * kTile * kLanes, columns + i * kTile + j * kLanes * stride, stride);
          }
        }
        if (two) ++t;
      }
    }
  }

  // The same for a range of lanes of one row tile; the other lanes of `scores` are kept.
  void scores_of_lanes(Rows<C> key_rows, Range range, LaneRange lanes, float* scores, Prefetcher& prefetcher) {
    scores_of_rows<Bf16Rows<C>>(key_rows, range, head_dim_, queries_ + lanes.first, lanes.count,
                                reinterpret_cast<float*>(values_), scores + lanes.first, prefetcher);
  }

  void arrange_probabilities(float*, const Range*) const {}

  // The same for a range of lanes of one row tile; the other rows of `out` are kept.
  void weighted_values_of_lanes(Rows<C> value_rows, Range range, LaneRange lanes, const float* probabilities,
                                float* out, Prefetcher& prefetcher) {
    const int stride = width(value_dim_);
    values_of_rows<Bf16Rows<C>>(value_rows, range, value_dim_, probabilities + lanes.first, lanes.count,
                                out + lanes.first * stride, stride, prefetcher);
  }

#endif

 private:
  static constexpr int kKeyStride = kMaxHeadDim / 2 + 16;  // dwords; not a power of two: rows spread over cache sets
  static constexpr int kMostPanelDwords = 4 * (kSplit / 2) * kTile;
  static_assert(kMostPanelDwords >= kWordFloats);  // the memory is used for both
  static constexpr int kBlockFloats = (kAmx ? 4 : 2) * kTile * kLanes;
  static constexpr int kKeyDwords = (kAmx ? 4 : 1) * kTile * kKeyStride;

  // The dwords of a query row, in whole vectors.
  static int query_pairs(int head_dim) { return round_up(head_dim, 2 * kPairs) / 2; }

  // The place of the values at positions position and position + 1 in panel `panel`.
  uint32_t* value_pairs(int panel, int position) const {
    return values_ + (panel * (kSplit / 2) + position / 2) * kTile;
  }

  // Fills `count` panels (an even number) with the columns from e on. Columns from value_dim on are zeros.
  void load_values(Rows<C> rows, Range range, int e, int count, Prefetcher& prefetcher) {
    for (int p = range.begin; p < range.end; p += 2) {
      prefetcher.follow(2 * count * kTile * static_cast<int>(sizeof(C)));
      for (int i = 0; i < count; i += 2) {
        const int left = value_dim_ - e - i * kTile;
        const __m512i even = rows.load_bf16(p, e + i * kTile, left), odd = rows.load_bf16(p + 1, e + i * kTile, left);
        _mm512_store_si512(value_pairs(i, p), _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(value_pairs(i + 1, p), _mm512_unpackhi_epi16(even, odd));
      }
    }
  }

  void copy_keys(Rows<C> rows, uint32_t* dst) const {
    for (int i = 0; i < kTile; ++i) {
      for (int e = 0; e < query_pairs(head_dim_); e += kPairs) {
        _mm512_store_si512(dst + i * kKeyStride + e, rows.load_bf16(i, 2 * e, head_dim_ - 2 * e));
      }
    }
  }

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  // An operand whose tiles follow each other without gaps.
  static TileOperand tile_of(const void* data) { return {static_cast<const char*>(data), 64, 64 * 16}; }

  // Computes columns of one row tile, or of two consecutive row tiles, from `count` panels of values.
  void multiply(const float* probabilities, Range range, int count, bool two_tiles, float* out, int out_stride) const {
    constexpr int64_t kTileDistance = sizeof(float) * kSplit * kLanes,
                      kPanelDistance = sizeof(uint32_t) * kSplit / 2 * kTile;
    const int64_t row_bytes = sizeof(float) * out_stride;
    const int steps = range.size() / kStep;
    const TileOperand a = tile_of(probabilities + range.begin / 2 * kLanes), b = tile_of(value_pairs(0, range.begin));
    if (two_tiles) {
      return multiply_two_rows(a, kTileDistance, b, kPanelDistance, steps, out, row_bytes);
    }
    return count == 2 ? multiply_row<2>(a, b, kPanelDistance, steps, out, row_bytes)
                      : multiply_row<4>(a, b, kPanelDistance, steps, out, row_bytes);
  }

  // Tiles with the keys of 16 positions each. Keys that lie in the cache in the form of tiles are read from there.
  void key_tiles(Rows<C> rows, int count, TileOperand* tiles) const {
    for (int t = 0; t < count; ++t, rows = rows.from(kTile)) {
      bool in_place = std::is_same_v<C, bf16> && head_dim_ % 32 == 0;
      for (int i = 1; i < kTile; ++i) in_place &= rows[i] - rows[i - 1] == head_dim_;
      uint32_t* copy = keys_ + t * kTile * kKeyStride;
      if (!in_place) copy_keys(rows, copy);
      tiles[t] = in_place ? TileOperand{reinterpret_cast<const char*>(rows[0]), 2 * head_dim_, 64}
                          : TileOperand{reinterpret_cast<const char*>(copy), 4 * kKeyStride, 64};
    }
  }
#else
  // Calls outer() for one row tile, or for two if `next` is not 0. The second `a` lies `next` dwords further, and its
  // `out` lies `out_next` floats further.
  template <bool kAlongK>
  void product(const uint32_t* a, int64_t next, const uint32_t* b, int64_t stride, int size, float* out,
               int64_t out_next) const {
    if (next != 0) return outer_of_two<kAlongK>(a, next, b, stride, size, out, out_next);
    if (num_rows_ <= 8) return outer<PairHalfLanes, kAlongK>(a, b, stride, size, out);
    outer<PairLanes, kAlongK>(a, b, stride, size, out);
  }

  // Each element of b is loaded once for both tiles.
  template <bool kAlongK>
  static void outer_of_two(const uint32_t* a, int64_t next, const uint32_t* b, int64_t stride, int size, float* out,
                           int64_t out_next) {
    constexpr int kBlock = 8;
    for (int first = 0; first < kTile; first += kBlock, out += kBlock * kLanes) {
      const uint32_t* elements = b + (kAlongK ? first * stride : first);
      __m512 sums[kBlock][2];
#pragma GCC unroll 8
      for (int j = 0; j < kBlock; ++j) sums[j][0] = sums[j][1] = _mm512_setzero_ps();
      for (int k = 0; k < size; ++k, elements += kAlongK ? 1 : stride) {
        const auto x0 = std::bit_cast<__m512bh>(_mm512_load_si512(a + k * kLanes));
        const auto x1 = std::bit_cast<__m512bh>(_mm512_load_si512(a + next + k * kLanes));
#pragma GCC unroll 8
        for (int j = 0; j < kBlock; ++j) {
          const auto y =
              std::bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(elements[kAlongK ? j * stride : j])));
          sums[j][0] = _mm512_dpbf16_ps(sums[j][0], x0, y);
          sums[j][1] = _mm512_dpbf16_ps(sums[j][1], x1, y);
        }
      }
#pragma GCC unroll 8
      for (int j = 0; j < kBlock; ++j) {
        _mm512_store_ps(out + j * kLanes, sums[j][0]);
        _mm512_store_ps(out + out_next + j * kLanes, sums[j][1]);
      }
    }
  }
#endif

  int head_dim_, value_dim_, num_rows_;
  uint32_t* queries_;  // [row tile][query_pairs][lane]
  uint32_t* keys_;     // copies of keys, [kTile or 4 * kTile][kKeyStride]
  uint32_t* values_;   // up to 4 panels [kSplit / 2][kTile]
  float* block_;       // [2 * kTile or 4 * kTile][lane]
};

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
