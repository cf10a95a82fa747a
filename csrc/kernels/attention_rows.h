// Both products of attention for a few rows (decode). The rows of one KV head would fill a vector only in part. So
// vectors run over positions for the scores, and over columns for the values. Elements are summed in the same order as
// in row tiles, so the bits are the same.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_tile.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kRowsAtOnce = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512 ? 4 : 2;  // as many as the registers can hold
// The steps of positions that are summed side by side: enough sums to hide the latency of a multiply-add for two rows.
constexpr int kMostSteps = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512 ? 2 : 1;
constexpr int kMostWords = 2 * kLanes;  // words of a row of keys at once
constexpr int kWordFloats = kMostWords * kMostSteps * kStep;

// g++ 12 keeps vectors on the stack around a call of Prefetcher::follow() or transpose(), unless these are inlined.

// x[j][i] becomes x[i][j].
[[gnu::always_inline]] inline void transpose(F32 (&x)[kLanes]) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  __m512i y[16];
  for (int i = 0; i < 16; ++i) y[i] = _mm512_castps_si512(x[i].v);
  transpose16(y);
  for (int i = 0; i < 16; ++i) x[i].v = _mm512_castsi512_ps(y[i]);
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 low0 = _mm256_unpacklo_ps(x[i].v, x[i + 1].v), high0 = _mm256_unpackhi_ps(x[i].v, x[i + 1].v);
    const __m256 low1 = _mm256_unpacklo_ps(x[i + 2].v, x[i + 3].v), high1 = _mm256_unpackhi_ps(x[i + 2].v, x[i + 3].v);
    t[i] = _mm256_shuffle_ps(low0, low1, 0x44), t[i + 1] = _mm256_shuffle_ps(low0, low1, 0xee);
    t[i + 2] = _mm256_shuffle_ps(high0, high1, 0x44), t[i + 3] = _mm256_shuffle_ps(high0, high1, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    x[i].v = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    x[i + 4].v = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON
  const float32x4x2_t low = vtrnq_f32(x[0].v, x[1].v), high = vtrnq_f32(x[2].v, x[3].v);
  for (int i = 0; i < 2; ++i) {
    x[i].v = vcombine_f32(vget_low_f32(low.val[i]), vget_low_f32(high.val[i]));
    x[i + 2].v = vcombine_f32(vget_high_f32(low.val[i]), vget_high_f32(high.val[i]));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float y = x[i].v[j];
      x[i].v[j] = x[j].v[i], x[j].v[i] = y;
    }
  }
#endif
}

// Multiplies the given lanes at each position by the scale of the position's row, if rows have scales.
template <class C>
inline void multiply_by_scales(float* tile, Rows<C> rows, Range range, LaneRange lanes) {
  if constexpr (Rows<C>::kHasScales) {
    if (lanes.count == kLanes) {
      for (int p = range.begin; p < range.end; ++p) {
        store(tile + p * kLanes, load(tile + p * kLanes) * broadcast(rows.scale(p)));
      }
      return;
    }
    alignas(64) float is_other[kLanes];
    for (int i = 0; i < kLanes; ++i) is_other[i] = i >= lanes.first && i < lanes.first + lanes.count ? 0.0f : 1.0f;
    const F32 others = load(is_other), half = broadcast(0.5f), one = broadcast(1.0f);
    for (int p = range.begin; p < range.end; ++p) {
      const F32 factors = select_less(others, half, broadcast(rows.scale(p)), one);
      store(tile + p * kLanes, load(tile + p * kLanes) * factors);
    }
  }
}

// Calls run.template operator()<kCount>(row) so that the counts add up to `rows`.
template <int kMost = kRowsAtOnce, class Run>
inline void in_groups_of_rows(int rows, const Run& run) {
  int row = 0;
  if constexpr (kMost >= 4) {
    for (; row + 4 <= rows; row += 4) run.template operator()<4>(row);
  }
  for (; row + 2 <= rows; row += 2) run.template operator()<2>(row);
  if (row < rows) run.template operator()<1>(row);
}

// The arithmetic of the row kernels on caches of T, in float32 FMAs. Keys are transposed word by word. A word is a pair
// of bfloat16, or a single element of another type as float32.
template <class T>
struct F32Rows {
  using Query = float;  // [element][lane]
  static constexpr int kElementsPerWord = std::is_same_v<T, bf16> ? 2 : 1;
  static constexpr int kQueriesPerWord = kElementsPerWord;  // rows of lanes in `query`
  static constexpr int kFewestVectors = 1;                  // the fewest vectors of columns

  static constexpr int kWordsAtOnce = kLanes;

  // words[word][stride] of kLanes rows, from element e on.
  template <int kWords>
  [[gnu::always_inline]] static void load_words(Rows<T> rows, int e, float* words, int stride) {
    F32 x[kLanes];
    for (int row = 0; row < kLanes; ++row) {
      if constexpr (std::is_same_v<T, bf16>) {
        x[row] = load(reinterpret_cast<const float*>(rows[row] + e));
      } else {
        x[row] = rows.load(row, e);
      }
    }
    transpose(x);
    for (int i = 0; i < kLanes; ++i) store(words + i * stride, x[i]);
  }

  template <int kRows, int kVectors>
  static void multiply_keys(F32 (&sums)[kRows][kVectors], const float* words, const float* query) {
    if constexpr (std::is_same_v<T, bf16>) {
      const auto* pairs = reinterpret_cast<const bf16*>(words);
      for (int v = 0; v < kVectors; ++v) {
        const F32 even = load_even(pairs + v * 2 * kLanes), odd = load_odd(pairs + v * 2 * kLanes);
        for (int r = 0; r < kRows; ++r) {
          sums[r][v] = fma(odd, broadcast(query[kLanes + r]), fma(even, broadcast(query[r]), sums[r][v]));
        }
      }
    } else {
      for (int v = 0; v < kVectors; ++v) {
        const F32 x = load(words + v * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][v] = fma(x, broadcast(query[r]), sums[r][v]);
      }
    }
  }

  // out[row][column] = probabilities x values for kVectors vectors of columns.
  template <int kRows, int kVectors>
  [[gnu::noinline]] static void multiply_values(Rows<T> rows, Range range, int column, const float* probabilities,
                                                float* out, int stride, Prefetcher& prefetcher) {
    F32 sums[kRows][kVectors];
    for (auto& of_row : sums) {
      for (F32& sum : of_row) sum = zero();
    }
    for (int p = range.begin; p < range.end; ++p) {
      const float* weights = probabilities + p * kLanes;
      prefetcher.follow(kVectors * kLanes * sizeof(T));
      for (int v = 0; v < kVectors; ++v) {
        const F32 x = rows.load(p, column + v * kLanes);
        for (int r = 0; r < kRows; ++r) sums[r][v] = fma(x, broadcast(weights[r]), sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(out + r * stride + column + v * kLanes, sums[r][v]);
    }
  }
};

// Whether the functions below accept a head size.
template <class Arithmetic>
inline bool is_whole(int head_dim) {
  return head_dim % (kLanes * std::max(Arithmetic::kElementsPerWord, Arithmetic::kFewestVectors)) == 0;
}

// Computes scores[position][row] = q . k for `rows` rows, at most kLanes, and kVectors vectors of positions. `words` is
// memory for kMostWords words of these keys.
template <class Arithmetic, int kVectors, class C>
inline void scores_of_positions(Rows<C> keys, int head_dim, const typename Arithmetic::Query* query, int rows,
                                float* words, float* scores, Prefetcher& prefetcher) {
  constexpr int kPositions = kVectors * kLanes;
  alignas(64) float sums_of_rows[kLanes][kPositions];
  const auto add = [&]<int kWords>(int w) {
    for (int v = 0; v < kVectors; ++v) {
      prefetcher.follow(kLanes * kWords * Arithmetic::kElementsPerWord * static_cast<int>(sizeof(C)));
      Arithmetic::template load_words<kWords>(keys.from(v * kLanes), w * Arithmetic::kElementsPerWord,
                                              words + v * kLanes, kPositions);
    }
    in_groups_of_rows(rows, [&]<int kRows>(int row) {
      F32 sums[kRows][kVectors];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sums[r][v] = w == 0 ? zero() : load(sums_of_rows[row + r] + v * kLanes);
      }
      const auto* q = query + w * Arithmetic::kQueriesPerWord * kLanes + row;
#pragma GCC unroll 1  // otherwise g++ 12 copies all words to the stack first
      for (int i = 0; i < kWords; ++i, q += Arithmetic::kQueriesPerWord * kLanes) {
        Arithmetic::template multiply_keys<kRows, kVectors>(sums, words + i * kPositions, q);
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) store(sums_of_rows[row + r] + v * kLanes, sums[r][v]);
      }
    });
  };
  const int num_words = head_dim / Arithmetic::kElementsPerWord;
  int w = 0;
  for (; w + Arithmetic::kWordsAtOnce <= num_words; w += Arithmetic::kWordsAtOnce) {
    add.template operator()<Arithmetic::kWordsAtOnce>(w);
  }
  if constexpr (Arithmetic::kWordsAtOnce > kLanes) {
    if (w < num_words) add.template operator()<kLanes>(w);
  }
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < kPositions; ++i) scores[i * kLanes + r] = sums_of_rows[r][i];
  }
}

// Computes scores[position][row] = q . k for `rows` rows, at most kLanes. `words` is memory for kWordFloats floats.
template <class Arithmetic, class C>
inline void scores_of_rows(Rows<C> key_rows, Range range, int head_dim, const typename Arithmetic::Query* query,
                           int rows, float* words, float* scores, Prefetcher& prefetcher) {
  constexpr int kVectors = kStep / kLanes;
  int p = range.begin;
  if constexpr (kMostSteps == 2) {
    for (; p + 2 * kStep <= range.end; p += 2 * kStep) {
      scores_of_positions<Arithmetic, 2 * kVectors>(key_rows.from(p), head_dim, query, rows, words, scores + p * kLanes,
                                                    prefetcher);
    }
  }
  for (; p < range.end; p += kStep) {
    scores_of_positions<Arithmetic, kVectors>(key_rows.from(p), head_dim, query, rows, words, scores + p * kLanes,
                                              prefetcher);
  }
}

// out[row][stride] = probabilities x values for `rows` rows.
template <class Arithmetic, class C>
inline void values_of_rows(Rows<C> value_rows, Range range, int head_dim, const float* probabilities, int rows,
                           float* out, int stride, Prefetcher& prefetcher) {
  in_groups_of_rows(rows, [&]<int kRows>(int row) {
    const auto multiply = [&]<int kVectors>(int column) {
      Arithmetic::template multiply_values<kRows, kVectors>(value_rows, range, column, probabilities + row,
                                                            out + row * stride, stride, prefetcher);
    };
    int column = 0;
    // Rows of usual sizes are computed as a whole, if the registers can hold them.
    if constexpr (kRowsAtOnce >= 4 && kRows <= 2) {
      for (; column + 8 * kLanes <= head_dim; column += 8 * kLanes) multiply.template operator()<8>(column);
    }
    for (; column + 4 * kLanes <= head_dim; column += 4 * kLanes) multiply.template operator()<4>(column);
    constexpr int kFewest = Arithmetic::kFewestVectors;
    for (; column < head_dim; column += kFewest * kLanes) multiply.template operator()<kFewest>(column);
  });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
