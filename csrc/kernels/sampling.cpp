// Choice of the next token. A row is reduced to the maxima of its blocks in one pass; whatever lies under a threshold
// is then skipped block by block, and only the few candidates above it are looked at one by one.
//
// Probabilities are counted in whole units of 2^-44 of the largest one, so sums are exact: they do not depend on their
// order, on threads or on which tokens were skipped, and "the smallest set whose mass is at least p" has one answer.
#include "quire/kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "quire/simd.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kLanes = F32::kWidth;
constexpr int64_t kBlock = 256;          // elements per maximum
constexpr int64_t kRange = 32 * kBlock;  // elements per task when threads share a row
constexpr float kUnits = 0x1p44f;        // of the largest probability; 2^19 of them still fit in 63 bits
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline F32 load_part(const float* p, int64_t left) {
  return left >= kLanes ? load(p) : load_n(p, static_cast<int>(left), -kInfinity);
}

// Integer order of the key is float order; -0 and 0 are one value.
inline uint32_t order_key(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x + 0.0f);
  return u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
}

struct Candidate {
  uint32_t key;  // order_key of the logit
  int32_t id;
  uint64_t units;
};

// One row of logits and the memory to work on it, one per thread, reused.
class Row {
 public:
  void scan(const float* logits, int64_t size) {
    logits_ = logits;
    size_ = size;
    const int64_t blocks = (size + kBlock - 1) / kBlock;
    block_max_.resize(blocks);
    range_nan_.assign(num_ranges(), 0);
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; b += kBlock) block_max_[b / kBlock] = scan_block(b, range_nan_[range]);
    });
    max_ = *std::max_element(block_max_.begin(), block_max_.end());
    has_nan_ = std::find(range_nan_.begin(), range_nan_.end(), 1) != range_nan_.end();
  }

  float max() const { return max_; }
  bool has_nan() const { return has_nan_; }
  // False when softmax is not defined: NaN or +infinity in the row, or nothing but -infinity.
  bool has_softmax() const { return !has_nan_ && std::isfinite(max_); }

  int64_t first_maximum() const {
    int64_t i = (std::find(block_max_.begin(), block_max_.end(), max_) - block_max_.begin()) * kBlock;
    while (logits_[i] != max_) ++i;
    return i;
  }

  int64_t sample(float temperature, int32_t top_k, float top_p, float min_p, double uniform) {
    inverse_temperature_ = 1.0f / temperature;
    const bool use_k = top_k > 0 && top_k < size_, use_p = top_p < 1.0f;
    const float floor = min_p > 0 ? logit_at(temperature, min_p) : -kInfinity;
    if (!use_k && !use_p) return draw_streamed(floor, uniform);
    if (use_k) {
      const float kth = kth_largest(top_k);
      collect(std::max(floor, kth));
      weigh();
    } else {
      collect_mass(temperature, floor, static_cast<double>(top_p));
    }
    return use_p ? draw_nucleus(static_cast<double>(top_p), use_k ? units_of_candidates() : total_, uniform)
                 : draw(0, 0, units_of_candidates(), uniform);
  }

  // log of the sum of exp(logit - max).
  double log_sum() {
    sums_.resize(num_ranges());
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      const F32 top = broadcast(max_);
      F32 sum = zero();
      for (int64_t i = begin; i < end; i += kLanes) sum = sum + exp(load_part(logits_ + i, end - i) - top);
      sums_[range] = reduce_add(sum);
    });
    double sum = 0;
    for (const float x : sums_) sum += static_cast<double>(x);
    return std::log(sum);
  }

  int64_t count_above(float x) {
    counts_.resize(num_ranges());
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      uint64_t count = 0;
      for (int64_t i = begin; i < end; i += kLanes) {
        count += static_cast<uint64_t>(__builtin_popcount(mask_less(broadcast(x), load_part(logits_ + i, end - i))));
      }
      counts_[range] = count;
    });
    uint64_t sum = 0;
    for (const uint64_t count : counts_) sum += count;
    return static_cast<int64_t>(sum);
  }

  // The k tokens with the highest logits, descending, ties by ascending id.
  const std::vector<Candidate>& top(int64_t k) {
    const auto blocks = static_cast<int64_t>(block_max_.size());
    collect(k <= blocks ? kth_of(block_max_, k) : -kInfinity);
    const auto before = [](const Candidate& x, const Candidate& y) {
      return x.key != y.key ? x.key > y.key : x.id < y.id;
    };
    std::partial_sort(candidates_.begin(), candidates_.begin() + k, candidates_.end(), before);
    candidates_.resize(k);
    return candidates_;
  }

 private:
  int64_t num_ranges() const { return (size_ + kRange - 1) / kRange; }

  // fn(range, begin, end) for each range of the row; threads share them unless the rows are dealt to threads already.
  template <class Fn>
  void for_ranges(const Fn& fn) const {
    parallel_for(static_cast<int>(num_ranges()),
                 [&](int range, int) { fn(range, range * kRange, std::min((range + 1) * kRange, size_)); });
  }

  float scan_block(int64_t begin, uint8_t& nan) const {
    const int64_t end = std::min(begin + kBlock, size_);
    F32 top = broadcast(-kInfinity);
    bool any_nan = false;
    for (int64_t i = begin; i < end; i += kLanes) {
      const F32 x = load_part(logits_ + i, end - i);
      any_nan |= QUIRE_ISA::has_nan(x);
      top = QUIRE_ISA::max(x, top);
    }
    if (any_nan) nan = 1;
    return reduce_max(top);
  }

  // The lowest logit whose probability is at least `ratio` times the largest one.
  float logit_at(float temperature, float ratio) const {
    const double exact =
        static_cast<double>(max_) + static_cast<double>(temperature) * std::log(static_cast<double>(ratio));
    const auto rounded = static_cast<float>(exact);
    return static_cast<double>(rounded) < exact ? std::nextafter(rounded, kInfinity) : rounded;
  }

  // Probabilities of n logits in units.
  void units_of(const float* logits, int64_t n, uint64_t* units) const {
    float weights[kBlock];
    const F32 top = broadcast(max_), scale = broadcast(inverse_temperature_), unit = broadcast(kUnits);
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      for (int64_t i = 0; i < count; i += kLanes) {
        store(weights + i, exp((load_part(logits + begin + i, count - i) - top) * scale) * unit);
      }
      for (int64_t i = 0; i < count; ++i) units[begin + i] = static_cast<uint64_t>(static_cast<int64_t>(weights[i]));
    }
  }

  uint64_t units_in_range(int64_t begin, int64_t end, float floor, uint64_t* units) const {
    uint64_t sum = 0;
    for (int64_t b = begin; b < end; b += kBlock) {
      const int64_t count = std::min(kBlock, end - b);
      uint64_t* block = units + (b - begin);
      if (block_max_[b / kBlock] < floor) {
        std::fill_n(block, count, 0);
        continue;
      }
      units_of(logits_ + b, count, block);
      for (int64_t i = 0; i < count; ++i) {
        block[i] = logits_[b + i] >= floor ? block[i] : 0;
        sum += block[i];
      }
    }
    return sum;
  }

  // Units of every range, and of the whole row, counting the logits from `floor` up.
  void sum_units(float floor) {
    counts_.resize(num_ranges());
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      uint64_t units[kRange];
      counts_[range] = units_in_range(begin, end, floor, units);
    });
    total_ = 0;
    for (const uint64_t units : counts_) total_ += units;
  }

  static float kth_of(const std::vector<float>& values, int64_t k) {
    thread_local std::vector<float> copy;
    copy = values;
    std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(), std::greater<>());
    return copy[k - 1];
  }

  float kth_largest(int64_t k) {
    // k blocks with a maximum of at least x hold k logits of at least x.
    const auto blocks = static_cast<int64_t>(block_max_.size());
    collect(k <= blocks ? kth_of(block_max_, k) : -kInfinity);
    const auto greater = [](const Candidate& x, const Candidate& y) { return x.key > y.key; };
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end(), greater);
    return logits_[candidates_[k - 1].id];
  }

  // Candidates: the tokens with logits from `floor` up, by ascending id.
  void collect(float floor) {
    candidates_.clear();
    const F32 limit = broadcast(floor);
    for (int64_t b = 0; b < size_; b += kBlock) {
      if (block_max_[b / kBlock] < floor) continue;
      const int64_t end = std::min(b + kBlock, size_);
      for (int64_t i = b; i < end; i += kLanes) {
        const auto lanes = static_cast<int>(std::min(kLanes, end - i));
        uint32_t mask = ~mask_less(load_part(logits_ + i, lanes), limit) & ((uint32_t{1} << lanes) - 1);
        for (; mask != 0; mask &= mask - 1) {
          const auto id = static_cast<int32_t>(i + __builtin_ctz(mask));
          candidates_.push_back({order_key(logits_[id]), id, 0});
        }
      }
    }
  }

  void weigh() {
    thread_local std::vector<float> logits;
    thread_local std::vector<uint64_t> units;
    logits.resize(candidates_.size());
    units.resize(candidates_.size());
    for (size_t i = 0; i < candidates_.size(); ++i) logits[i] = logits_[candidates_[i].id];
    units_of(logits.data(), static_cast<int64_t>(logits.size()), units.data());
    for (size_t i = 0; i < candidates_.size(); ++i) candidates_[i].units = units[i];
  }

  uint64_t units_of_candidates() const {
    uint64_t sum = 0;
    for (const Candidate& c : candidates_) sum += c.units;
    return sum;
  }

  static uint64_t needed_units(double top_p, uint64_t total) {
    const auto needed = static_cast<uint64_t>(std::ceil(top_p * static_cast<double>(total)));
    return std::clamp<uint64_t>(needed, 1, total);
  }

  // Collects candidates that certainly hold the share top_p of the mass: those near the maximum if that is enough.
  void collect_mass(float temperature, float floor, double top_p) {
    sum_units(floor);
    for (const float distance : {8.0f, 16.0f, kInfinity}) {
      const float limit = std::max(floor, max_ - distance * temperature);
      collect(limit);
      weigh();
      if (limit == floor || units_of_candidates() >= needed_units(top_p, total_)) return;
    }
  }

  // Draws among the smallest set of highest candidates that holds the share top_p of `total` units. The lowest key of
  // the set is found by bisection over the keys, the candidates in question shrinking with the interval.
  int64_t draw_nucleus(double top_p, uint64_t total, double uniform) {
    uint64_t missing = needed_units(top_p, total), above = 0;
    open_ = candidates_;
    uint32_t low = 0xffffffffu, high = 0;
    for (const Candidate& c : open_) low = std::min(low, c.key), high = std::max(high, c.key);
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;  // the upper part is keys > middle
      const auto upper_end =
          std::partition(open_.begin(), open_.end(), [&](const Candidate& c) { return c.key > middle; });
      uint64_t upper = 0;
      for (auto c = open_.begin(); c != upper_end; ++c) upper += c->units;
      if (upper >= missing) {
        open_.erase(upper_end, open_.end());
        low = middle + 1;
      } else {
        missing -= upper;
        above += upper;
        open_.erase(open_.begin(), upper_end);
        high = middle;
      }
    }
    const uint64_t tied_units = open_.front().units;
    const uint64_t num_tied = (missing + tied_units - 1) / tied_units;  // of those with key `low`, lowest ids first
    return draw(low, num_tied, above + num_tied * tied_units, uniform);
  }

  // Inverse CDF over the candidates with a key above `key` and the first num_tied with that key; `total` is their
  // units.
  int64_t draw(uint32_t key, uint64_t num_tied, uint64_t total, double uniform) const {
    uint64_t target = scaled(uniform, total);
    for (const Candidate& c : candidates_) {
      if (c.key < key) continue;
      if (c.key == key) {
        if (num_tied == 0) continue;
        --num_tied;
      }
      if (target < c.units) return c.id;
      target -= c.units;
    }
    __builtin_unreachable();
  }

  // Inverse CDF over all tokens with logits from `floor` up.
  int64_t draw_streamed(float floor, double uniform) {
    sum_units(floor);
    uint64_t target = scaled(uniform, total_);
    int64_t range = 0;
    for (; target >= counts_[range]; ++range) target -= counts_[range];
    uint64_t units[kRange];
    const int64_t begin = range * kRange;
    units_in_range(begin, std::min(begin + kRange, size_), floor, units);
    int64_t i = 0;
    for (; target >= units[i]; ++i) target -= units[i];
    return begin + i;
  }

  // floor(uniform * total), exact for the 53 bits of uniform; below total.
  static uint64_t scaled(double uniform, uint64_t total) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(std::ldexp(uniform, 53)) * total >> 53);
  }

  const float* logits_ = nullptr;
  int64_t size_ = 0;
  float max_ = 0, inverse_temperature_ = 1;
  bool has_nan_ = false;
  uint64_t total_ = 0;
  std::vector<float> block_max_, sums_;
  std::vector<uint8_t> range_nan_;
  std::vector<uint64_t> counts_;
  std::vector<Candidate> candidates_, open_;
};

// fn(row index, row) for each row: a thread per row, or all threads for one row after the other when rows are few.
template <class Fn>
void for_rows(const LogitsArgs& a, const Fn& fn) {
  const auto run = [&](int64_t r) {
    thread_local Row row;
    row.scan(a.logits + r * a.row_stride, a.vocab_size);
    fn(r, row);
  };
  if (a.num_rows >= num_threads()) {
    parallel_for(static_cast<int>(a.num_rows), [&](int r, int) { run(r); });
  } else {
    for (int64_t r = 0; r < a.num_rows; ++r) run(r);
  }
}

void greedy(const LogitsArgs& a, int64_t* token_ids) {
  for_rows(a, [&](int64_t r, const Row& row) { token_ids[r] = row.has_nan() ? -1 : row.first_maximum(); });
}

void sample(const SampleArgs& a) {
  for_rows(a.logits, [&](int64_t r, Row& row) {
    const bool is_greedy = !(1.0f / a.temperature[r] < kInfinity);  // 0, or too small to divide by
    if (is_greedy) {
      a.token_ids[r] = row.has_nan() ? -1 : row.first_maximum();
    } else if (!row.has_softmax()) {
      a.token_ids[r] = -1;
    } else {
      a.token_ids[r] = row.sample(a.temperature[r], a.top_k[r], a.top_p[r], a.min_p[r], a.uniform[r]);
    }
  });
}

void logprobs(const LogprobsArgs& a) {
  for_rows(a.logits, [&](int64_t r, Row& row) {
    int64_t* ids = a.top_ids + r * a.num_top;
    float* values = a.top_logprobs + r * a.num_top;
    if (!row.has_softmax()) {
      a.token_logprobs[r] = kNaN;
      a.ranks[r] = -1;
      std::fill_n(ids, a.num_top, -1);
      std::fill_n(values, a.num_top, kNaN);
      return;
    }
    const float* logits = a.logits.logits + r * a.logits.row_stride;
    const double offset = static_cast<double>(row.max()) + row.log_sum();
    const float token_logit = logits[a.token_ids[r]];
    a.token_logprobs[r] = static_cast<float>(static_cast<double>(token_logit) - offset);
    a.ranks[r] = row.count_above(token_logit) + 1;
    if (a.num_top == 0) return;
    const std::vector<Candidate>& top = row.top(a.num_top);
    for (int64_t i = 0; i < a.num_top; ++i) {
      ids[i] = top[i].id;
      values[i] = static_cast<float>(static_cast<double>(logits[top[i].id]) - offset);
    }
  });
}

}  // namespace

extern const SamplingKernels sampling_table;
const SamplingKernels sampling_table = {greedy, sample, logprobs};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(SamplingKernels, sampling_kernels, sampling_table)
