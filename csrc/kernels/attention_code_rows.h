// Both products of attention for a few rows (decode) on caches of 8-bit codes, in float32 FMAs on AVX2.
//
// Codes are transposed as bytes, before they become numbers. So keys of 8 positions by 32 elements take 24
// instructions; in float32 they would take four times as many. Elements are summed in the same order as in row tiles,
// so the bits are the same. Numbers are as from Rows::load: without the scale of their row, and in units of kUnit.
#pragma once

#include "attention_rows.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2 && QUIRE_ISA_LEVEL < QUIRE_LEVEL_AVX512

namespace quire::QUIRE_ISA {
namespace {

template <class C>
struct CodeRows {
  static constexpr int kMostRows = 4;  // the most rows at once; 3 or 4 rows have two vectors of sums each, fewer four

  // Computes scores[position][lane] = q . k, times the scales of the keys. Other lanes are kept. `words` is memory for
  // kWordFloats floats.
  static void scores(Rows<C> keys, Range range, int head_dim, const float* query, LaneRange lanes, float* words,
                     float* scores, Prefetcher& prefetcher) {
    const int rows = lanes.count;
    query += lanes.first, scores += lanes.first;
    auto* const codes = reinterpret_cast<uint8_t*>(words);
    for (int p = range.begin; p < range.end; p += kStep) {
      alignas(64) float sums[kLanes][kStep] = {};
      int e = 0;
      const auto add = [&]<int kElements>() {
        load_keys<kElements>(keys.from(p), e, codes, prefetcher);
        in_groups_of_rows<kMostRows>(rows, [&]<int kRows>(int row) {
          constexpr int kVectors = kRows > 2 ? 2 : 4;
          for (int v = 0; v < kStep / kLanes; v += kVectors) {
            multiply_keys<kRows, kVectors, kElements>(codes + v * kVectorBytes, query + e * kLanes + row,
                                                      sums[row] + v * kLanes);
          }
        });
        e += kElements;
      };
      while (e + 32 <= head_dim) add.template operator()<32>();
      if (e + 16 <= head_dim) add.template operator()<16>();
      if (e < head_dim) add.template operator()<8>();
      for (int r = 0; r < rows; ++r) {
        if constexpr (Rows<C>::kHasScales) {
          for (int i = 0; i < kStep; i += kLanes) store(sums[r] + i, load(sums[r] + i) * load(keys.scales + p + i));
        }
        for (int i = 0; i < kStep; ++i) scores[(p + i) * kLanes + r] = sums[r][i];
      }
    }
  }

  // Computes out[row][stride] = probabilities x values for `rows` rows.
  static void values(Rows<C> values, Range range, int head_dim, const float* probabilities, int rows, float* out,
                     int stride, Prefetcher& prefetcher) {
    in_groups_of_rows<kMostRows>(rows, [&]<int kRows>(int row) {
      constexpr int kVectors = kRows > 2 ? 2 : 4;
      const auto multiply = [&]<int kCount>(int column) {
        const auto run = [&]<bool kMayHaveNan>() {
          return multiply_values<kRows, kCount, kMayHaveNan>(values, range, column, probabilities + row,
                                                             out + row * stride, stride, prefetcher);
        };
        if (!run.template operator()<false>()) {
          if constexpr (kHasNan) run.template operator()<true>();
        }
      };
      int column = 0;
      for (; column + kVectors * kLanes <= head_dim; column += kVectors * kLanes) {
        multiply.template operator()<kVectors>(column);
      }
      for (; column < head_dim; column += kLanes) multiply.template operator()<1>(column);
    });
  }

 private:
  static constexpr bool kIsFp8 = !std::is_same_v<C, int8_t>;
  static constexpr bool kHasNan = std::is_same_v<C, e4m3>;  // a NaN code does not become a NaN of f16 by itself
  // Transposed keys: 32 elements x 8 positions; FP8 codes are f16. A register has the elements 2 j and 2 j + 1 in its
  // lower half, and the elements 2 j + 16 and 2 j + 17 in its upper half.
  static constexpr int kElementBytes = kIsFp8 ? 16 : 8, kVectorBytes = 32 * kElementBytes;
  static_assert(kStep / kLanes * kVectorBytes <= kWordFloats * static_cast<int>(sizeof(float)));

  // Notes the largest codes of e4m3 without their sign, as twice the code in 8 bits.
  static void note(__m256i& largest, __m256i codes) {
    if constexpr (kHasNan) largest = _mm256_max_epu8(largest, _mm256_add_epi8(codes, codes));
  }
  static bool has_nan(__m256i largest) {
    return kHasNan && _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(static_cast<char>(0xfe)))) != 0;
  }

  // The lower bytes for words that have these codes in their upper bytes.
  static __m256i below(__m256i codes) { return kHasNan ? codes : _mm256_setzero_si256(); }

  // Writes the elements e to e + kElements - 1 of the keys of kStep positions.
  template <int kElements>
  static void load_keys(Rows<C> keys, int e, uint8_t* out, Prefetcher& prefetcher) {
    __m256i largest = _mm256_setzero_si256();
    for (int v = 0; v < kStep / kLanes; ++v) {
      prefetcher.follow(kLanes * kElements);
      __m256i x[8], t[8];
      for (int i = 0; i < 8; ++i) {
        x[i] = load_codes<kElements>(keys[v * kLanes + i] + e);
        note(largest, x[i]);
      }
      for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi8(x[i], x[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi8(x[i], x[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
          x[i + 2 * j] = _mm256_unpacklo_epi16(t[i + j], t[i + j + 2]);
          x[i + 2 * j + 1] = _mm256_unpackhi_epi16(t[i + j], t[i + j + 2]);
        }
      }
      for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(x[i], x[i + 4]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 4]);
      }
      auto* const to = reinterpret_cast<__m256i*>(out + v * kVectorBytes);
      for (int j = 0; j < 8; ++j) {
        if constexpr (kIsFp8) {
          _mm256_store_si256(to + 2 * j, halves_of_words(_mm256_unpacklo_epi8(below(t[j]), t[j]), C{}));
          _mm256_store_si256(to + 2 * j + 1, halves_of_words(_mm256_unpackhi_epi8(below(t[j]), t[j]), C{}));
        } else {
          _mm256_store_si256(to + j, t[j]);
        }
      }
    }
    if (has_nan(largest)) [[unlikely]] {
      for (int i = 0; i < kStep / kLanes * kVectorBytes; i += 32) {
        auto* const x = reinterpret_cast<__m256i*>(out + i);
        *x = with_nans(*x);
      }
    }
  }
  template <int kElements>
  static __m256i load_codes(const C* p) {
    const auto* codes = reinterpret_cast<const __m128i*>(p);
    if constexpr (kElements == 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (kElements == 16) return _mm256_zextsi128_si256(_mm_loadu_si128(codes));
    return _mm256_zextsi128_si256(_mm_loadl_epi64(codes));
  }

  // sums[row][kStep] += q . k of kElements elements, for kVectors vectors of positions.
  template <int kRows, int kVectors, int kElements>
  static void multiply_keys(const uint8_t* codes, const float* query, float* all_sums) {
    F32 sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(all_sums + r * kStep + v * kLanes);
    }
    for (int first = 0; first < kElements; first += 16) {
      const uint8_t* pair = codes + first;  // the 16 bytes of the upper half follow those of the lower half
      for (int e = 0; e < std::min(kElements, 16); e += 2, pair += 2 * kElementBytes * 2) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i, query += kLanes) {
          const uint8_t* element = pair + i * (kIsFp8 ? 32 : 8);
          for (int v = 0; v < kVectors; ++v) {
            const F32 x = transposed(element + v * kVectorBytes);
            for (int r = 0; r < kRows; ++r) sums[r][v] = fma(x, broadcast(query[r]), sums[r][v]);
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(all_sums + r * kStep + v * kLanes, sums[r][v]);
    }
  }
  static F32 transposed(const uint8_t* element) {
    if constexpr (kIsFp8) {
      return {_mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(element)))};
    } else {
      return load(reinterpret_cast<const int8_t*>(element));
    }
  }

  // Returns false if there are NaNs; then the result is wrong, because it lacks them.
  template <int kRows, int kVectors, bool kMayHaveNan>
  [[gnu::noinline]] static bool multiply_values(Rows<C> rows, Range range, int column, const float* probabilities,
                                                float* out, int stride, Prefetcher& prefetcher) {
    constexpr int kTogether = 8;
    F32 sums[kRows][kVectors];
    for (auto& of_row : sums) {
      for (F32& sum : of_row) sum = zero();
    }
    __m256i largest = _mm256_setzero_si256();  // e4m3 codes as f16 without their sign: twice the bits
    alignas(32) __m128i f16[kTogether][std::max(kVectors, 2)];
    for (int p = range.begin; p < range.end; p += kTogether) {
      prefetcher.follow(kTogether * kVectors * kLanes);
      if constexpr (kIsFp8) {
        for (int i = 0; i < kTogether; ++i) load_values<kMayHaveNan, kVectors>(rows[p + i] + column, f16[i], largest);
      }
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) {
        const float* weights = probabilities + (p + i) * kLanes;
        for (int v = 0; v < kVectors; ++v) {
          F32 x;
          if constexpr (kIsFp8) {
            x = {_mm256_cvtph_ps(_mm_load_si128(&f16[i][v]))};
          } else {
            x = load(rows[p + i] + column + v * kLanes);
          }
          for (int r = 0; r < kRows; ++r) sums[r][v] = fma(x, broadcast(weights[r]), sums[r][v]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(out + r * stride + column + v * kLanes, sums[r][v]);
    }
    if constexpr (kMayHaveNan || !kHasNan) return true;
    return _mm256_movemask_epi8(_mm256_cmpeq_epi16(largest, _mm256_set1_epi16(2 * kNanHalf))) == 0;
  }
  template <bool kMayHaveNan, int kVectors>
  static void load_values(const C* p, __m128i* out, __m256i& largest) {
    const auto put = [&](int v, __m256i f16) {
      if constexpr (kMayHaveNan) {
        f16 = with_nans(f16);
      } else if constexpr (kHasNan) {
        largest = _mm256_max_epu16(largest, _mm256_add_epi16(f16, f16));
      }
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + v), f16);
    };
    for (int v = 0; v < kVectors; v += 2) {
      const auto* codes = reinterpret_cast<const __m128i*>(p + v * kLanes);
      put(v, halves(kVectors > 1 ? _mm_loadu_si128(codes) : _mm_loadl_epi64(codes), C{}));
    }
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
