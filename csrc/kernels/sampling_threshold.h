// Weighted selection: the value above which a set of logits has a given weight, without sorting the set.
//
// A small sorted sample gives an interval that probably contains this value. One pass sums the weights above the
// interval, and moves the values inside it to a buffer. The buffer has about a tenth of the set. It is narrowed in the
// same way until it is small enough to sort. A bad sample costs another pass, but the result is always exact.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "quire/round_up.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kLanes = F32::kWidth;
constexpr uint32_t kAllLanes = (uint32_t{1} << kLanes) - 1;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kUnits = 0x1p44f;  // units of the largest probability; 2^19 such numbers still fit in 63 bits

inline F32 load_logits(const float* p, int64_t left) { return load_part(p, left, -kInfinity); }

inline float next_up(float x) { return std::nextafter(x, kInfinity); }
inline float next_down(float x) { return std::nextafter(x, -kInfinity); }

// A key whose integer order is the order of the floats. -0 and 0 have the same key.
inline uint32_t order_key(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x + 0.0f);
  return u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
}

inline float value_of_key(uint32_t key) { return std::bit_cast<float>(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Sums the whole parts of non-negative floats over all lanes.
class WholeSum {
 public:
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  void add(F32 x) {
    low_ = _mm512_add_epi64(low_, _mm512_cvttps_epi64(_mm512_castps512_ps256(x.v)));
    high_ = _mm512_add_epi64(high_, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(x.v, 1)));
  }
  uint64_t total() const { return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(low_, high_))); }

 private:
  __m512i low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
  void add(F32 x) {
    const __m256 whole = _mm256_round_ps(x.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    low_ = _mm256_add_epi64(low_, to_int64(_mm256_castps256_ps128(whole)));
    high_ = _mm256_add_epi64(high_, to_int64(_mm256_extractf128_ps(whole, 1)));
  }
  uint64_t total() const {
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(low_, high_));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }

 private:
  // It takes whole numbers below 2^52. When 2^52 is added, the number is in the mantissa.
  static __m256i to_int64(__m128 x) {
    const __m256d magic = _mm256_set1_pd(0x1p52);
    return _mm256_castpd_si256(_mm256_xor_pd(_mm256_add_pd(_mm256_cvtps_pd(x), magic), magic));
  }
  __m256i low_ = _mm256_setzero_si256(), high_ = _mm256_setzero_si256();
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON
  void add(F32 x) {
    low_ = vaddq_u64(low_, vcvtq_u64_f64(vcvt_f64_f32(vget_low_f32(x.v))));
    high_ = vaddq_u64(high_, vcvtq_u64_f64(vcvt_high_f64_f32(x.v)));
  }
  uint64_t total() const { return vaddvq_u64(vaddq_u64(low_, high_)); }

 private:
  uint64x2_t low_ = vdupq_n_u64(0), high_ = vdupq_n_u64(0);
#else
  void add(F32 x) {
    for (int i = 0; i < F32::kWidth; ++i) total_ += static_cast<uint64_t>(static_cast<int64_t>(x.v[i]));
  }
  uint64_t total() const { return total_; }

 private:
  uint64_t total_ = 0;
#endif
};

// The weight of a logit is its probability in units. Sums are exact in any order.
struct Units {
  F32 top, scale;  // the row's maximum, 1 / temperature

  F32 operator()(F32 x) const { return exp((x - top) * scale) * broadcast(kUnits); }

  class Sum {
   public:
    void add_above(const Units& units, F32 x, F32 limit) { sum_.add(select_less(limit, x, units(x), zero())); }
    uint64_t total() const { return sum_.total(); }

   private:
    WholeSum sum_;
  };
};

// The weight of a logit is 1.
struct Ones {
  F32 operator()(F32) const { return broadcast(1.0f); }

  class Sum {
   public:
    void add_above(const Ones&, F32 x, F32 limit) {
      total_ += static_cast<uint64_t>(__builtin_popcount(mask_less(limit, x)));
    }
    uint64_t total() const { return total_; }

   private:
    uint64_t total_ = 0;
  };
};

template <class Weight>
inline uint64_t weight_above(const Weight& weight, const float* values, int64_t n, float limit) {
  typename Weight::Sum sum;
  for (int64_t i = 0; i < n; i += kLanes) sum.add_above(weight, load_logits(values + i, n - i), broadcast(limit));
  return sum.total();
}

inline uint64_t count_equal(const float* values, int64_t n, float x) {
  uint64_t different = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 y = load_logits(values + i, n - i);
    different += static_cast<uint64_t>(__builtin_popcount(mask_less(y, broadcast(x)) | mask_less(broadcast(x), y)));
  }
  return static_cast<uint64_t>(round_up(n, kLanes)) - different;
}

// An interval of values. Both ends belong to it, and no end is infinite.
struct Interval {
  float low, high;
};

// Sums the weights of the values above the interval, and appends the values inside it to `inside`. The memory must have
// room for kLanes further floats. Returns the new end of `inside`.
template <class Weight>
inline float* split(const Weight& weight, const float* values, int64_t n, Interval interval,
                    typename Weight::Sum& above, float* inside) {
  constexpr int64_t kChunk = 256;
  const F32 low = broadcast(interval.low), high = broadcast(interval.high);
  for (; n > 0; n -= kChunk, values += kChunk) {
    // Weights cost the most time. So they are computed only for values that are not below the interval, side by side.
    float kept[kChunk + kLanes];
    float* kept_end = kept;
    for (int64_t i = 0; i < std::min(n, kChunk); i += kLanes) {
      const F32 x = load_logits(values + i, n - i);
      kept_end += store_compressed(kept_end, x, ~mask_less(x, low) & kAllLanes);
    }
    for (const float* p = kept; p < kept_end; p += kLanes) {
      const F32 x = load_logits(p, kept_end - p);
      const uint32_t higher = mask_less(high, x);
      if (higher != 0) above.add_above(weight, x, high);
      inside += store_compressed(inside, x, ~(higher | mask_less(x, low)) & kAllLanes);
    }
  }
  return inside;
}

constexpr int64_t kSample = 256;  // the most values of a sample
constexpr int64_t kSorted = 64;   // at most this number of values is sorted

// Estimates an interval for the value that has the weight `below` under it. Its ends are values of a sample, three
// standard deviations to either side. Or it is a single value of the sample (is_point). Only values in `bounds` count.
template <class Weight>
inline Interval estimate(const Weight& weight, const float* values, int64_t n, Interval bounds, uint64_t below,
                         bool is_point) {
  float sample[kSample], weights[kSample + kLanes];
  const int64_t step = std::max<int64_t>(ceil_div(n, kSample), std::min<int64_t>(n / 32, 16));
  int64_t size = 0;
  for (int64_t i = step / 2; i < n; i += step) {
    sample[size] = values[i];
    size += values[i] >= bounds.low && values[i] <= bounds.high;
  }
  if (size < 16) return bounds;
  std::sort(sample, sample + size);
  for (int64_t i = 0; i < size; i += kLanes) store(weights + i, weight(load_logits(sample + i, size - i)));
  const double target = static_cast<double>(below) / static_cast<double>(step);
  double sum = 0, squares = 0;
  Interval guess = bounds;
  for (int64_t i = 0; i < size; ++i) {
    const auto w = static_cast<double>(weights[i]);
    sum += w;
    squares += w * w;
    if (is_point && (sum > target || i == size - 1)) return {sample[i], sample[i]};
    const bool is_far = (sum - target) * (sum - target) > 9 * squares;
    if (is_far && sum < target) guess.low = sample[i];
    if (is_far && sum > target) {
      guess.high = sample[i];
      break;
    }
  }
  return guess;
}

struct Threshold {
  float value;
  uint64_t above;  // the weight of all higher values
};

// The highest value with a weight of at least `needed` at or above it. `above` is the weight of what lies above all
// values. The answer must be among the values, and all values must be in `bounds`. Both vectors change, and they need
// kLanes spare floats.
template <class Weight>
inline Threshold find_threshold(const Weight& weight, std::vector<float>& values, std::vector<float>& scratch,
                                int64_t n, Interval bounds, uint64_t above, uint64_t needed) {
  uint64_t total = weight_above(weight, values.data(), n, -kInfinity);
  int stalled = 0;           // consecutive passes that kept more than half of the values, because many are equal
  bool has_outside = false;  // some values are outside bounds
  while (n > kSorted && (has_outside || bounds.low < bounds.high)) {
    Interval guess = bounds;
    if (!has_outside && stalled < 2) {
      guess = estimate(weight, values.data(), n, bounds, total - (needed - above), stalled == 1);
    } else if (!has_outside) {
      const uint32_t low = order_key(bounds.low), high = order_key(bounds.high);
      guess.low = value_of_key(low + (high - low) / 2 + 1);
    }
    typename Weight::Sum sum;
    const int64_t count = split(weight, values.data(), n, guess, sum, scratch.data()) - scratch.data();
    const uint64_t higher = above + sum.total(), inside = weight_above(weight, scratch.data(), count, -kInfinity);
    has_outside = true;
    if (needed <= higher) {
      bounds.low = next_up(guess.high);
    } else if (needed > higher + inside) {
      bounds.high = next_down(guess.low);
    } else {
      stalled = count > n / 2 ? stalled + 1 : 0;
      bounds = guess, above = higher, total = inside, n = count, has_outside = false;
      std::swap(values, scratch);
    }
  }
  if (!has_outside && bounds.low >= bounds.high) return {bounds.high, above};
  std::sort(values.begin(), values.begin() + n, std::greater<>());
  float weights[kSorted + kLanes];
  for (int64_t i = 0; i < n; i += kLanes) store(weights + i, weight(load_logits(values.data() + i, n - i)));
  for (int64_t i = 0;;) {
    const float value = values[i];
    uint64_t at_value = 0;
    for (; i < n && values[i] == value; ++i) at_value += static_cast<uint64_t>(static_cast<int64_t>(weights[i]));
    if (above + at_value >= needed) return {value, above};
    above += at_value;
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
