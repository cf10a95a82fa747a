// Chooses the next token. One pass reduces a row to the maxima of its blocks. After that, blocks below a threshold are
// skipped. Thresholds are found by weighted selection: see sampling_threshold.h.
//
// Probabilities count in whole units of 2^-44 of the largest one. So sums are exact, and they do not depend on order,
// threads or skipped tokens. The smallest set with a mass of at least p has only one answer.
#include "quire/kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "quire/simd.h"
#include "quire/thread_pool.h"
#include "sampling_threshold.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kBlock = 256;                     // elements per maximum
constexpr int64_t kRange = 32 * kBlock;             // elements per task when threads share a row
constexpr int64_t kInsideStride = kRange + kLanes;  // floats that split() may overwrite per range
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Candidate {
  uint32_t key;  // order_key of the logit
  int32_t id;
};

// One row of logits, and the memory to work on it. There is one object per thread, which is used again.
class Row {
 public:
  void scan(const float* logits, int64_t size) {
    logits_ = logits;
    size_ = size;
    const int64_t blocks = ceil_div(size, kBlock);
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
  // Whether the softmax of the row is defined. It is not if the row has NaN or +infinity, or only -infinity.
  bool has_softmax() const { return !has_nan_ && std::isfinite(max_); }

  int64_t first_maximum() const {
    int64_t i = (std::find(block_max_.begin(), block_max_.end(), max_) - block_max_.begin()) * kBlock;
    while (logits_[i] != max_) ++i;
    return i;
  }

  int64_t sample(float temperature, int32_t top_k, float top_p, float min_p, double uniform) {
    const Units units{broadcast(max_), broadcast(1.0f / temperature)};
    float floor = min_p > 0 ? logit_at(temperature, min_p) : -kInfinity;
    if (top_k > 0 && top_k < size_) floor = std::max(floor, kth_largest(top_k));
    // Lower logits have less than a unit, because e^-31 * 2^44 < 1.
    floor = std::max({floor, max_ - 31.0f * temperature, -FLT_MAX});
    const uint64_t total = sum_units(units, floor);
    Threshold kept{next_down(floor), total};
    uint64_t num_tied = 0, tied_units = 0;
    if (top_p < 1.0f) {
      const uint64_t needed = needed_units(static_cast<double>(top_p), total);
      kept = threshold(units, {floor, max_}, needed, total);
      tied_units = units_of(units, kept.value);
      num_tied = ceil_div(needed - kept.above, tied_units);  // the lowest ids among tokens with this value
    }
    return draw(units, kept, num_tied, tied_units, uniform);
  }

  // The logarithm of the sum of exp(logit - max).
  double log_sum() {
    sums_.resize(num_ranges());
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      const F32 top = broadcast(max_);
      F32 sum = zero();
      for (int64_t i = begin; i < end; i += kLanes) sum = sum + exp(load_logits(logits_ + i, end - i) - top);
      sums_[range] = reduce_add(sum);
    });
    return std::log(std::accumulate(sums_.begin(), sums_.end(), 0.0));
  }

  int64_t count_above(float x) {
    counts_.resize(num_ranges());
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      uint64_t count = 0;
      for (int64_t i = begin; i < end; i += kLanes) {
        count += static_cast<uint64_t>(__builtin_popcount(mask_less(broadcast(x), load_logits(logits_ + i, end - i))));
      }
      counts_[range] = count;
    });
    return static_cast<int64_t>(std::accumulate(counts_.begin(), counts_.end(), uint64_t{0}));
  }

  // The k tokens with the highest logits, in descending order. Ties come in ascending order of ids.
  const std::vector<Candidate>& top(int64_t k) {
    collect(k < size_ ? kth_largest(k) : -kInfinity);
    const auto before = [](const Candidate& x, const Candidate& y) {
      return x.key != y.key ? x.key > y.key : x.id < y.id;
    };
    std::partial_sort(candidates_.begin(), candidates_.begin() + k, candidates_.end(), before);
    candidates_.resize(k);
    return candidates_;
  }

 private:
  int64_t num_ranges() const { return ceil_div(size_, kRange); }

  // Calls fn(range, begin, end) for each range of the row. Threads share the ranges, unless they share the rows.
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
      const F32 x = load_logits(logits_ + i, end - i);
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

  static uint64_t units_of(const Units& units, float logit) {
    return static_cast<uint64_t>(static_cast<int64_t>(reduce_max(units(broadcast(logit)))));
  }

  // The sum of the units of all logits from `floor` up. The sums of ranges are kept too.
  uint64_t sum_units(const Units& units, float floor) {
    above_.resize(num_ranges());
    inside_size_.assign(num_ranges(), 0);
    const F32 limit = broadcast(next_down(floor));
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      Units::Sum sum;
      for (int64_t b = begin; b < end; b += kBlock) {
        if (block_max_[b / kBlock] < floor) continue;
        const int64_t block_end = std::min(b + kBlock, end);
        for (int64_t i = b; i < block_end; i += kLanes) {
          sum.add_above(units, load_logits(logits_ + i, block_end - i), limit);
        }
      }
      above_[range] = sum.total();
    });
    return std::accumulate(above_.begin(), above_.end(), uint64_t{0});
  }

  // Splits the row into above_ (weights) and inside_ (logits), both per range. Returns the weight above.
  template <class Weight>
  uint64_t split_row(const Weight& weight, Interval interval) {
    inside_.resize(num_ranges() * kInsideStride);
    above_.resize(num_ranges());
    inside_size_.resize(num_ranges());
    for_ranges([&](int64_t range, int64_t begin, int64_t end) {
      typename Weight::Sum sum;
      float* inside = inside_.data() + range * kInsideStride;
      float* inside_end = inside;
      for (int64_t b = begin; b < end; b += kBlock) {
        if (block_max_[b / kBlock] < interval.low) continue;
        inside_end = split(weight, logits_ + b, std::min(kBlock, end - b), interval, sum, inside_end);
      }
      above_[range] = sum.total();
      inside_size_[range] = inside_end - inside;
    });
    return std::accumulate(above_.begin(), above_.end(), uint64_t{0});
  }

  // Copies the logits inside to open_, and returns their number.
  int64_t gather_inside() {
    open_.resize(size_ + kLanes);
    other_.resize(size_ + kLanes);
    float* end = open_.data();
    for (int64_t range = 0; range < num_ranges(); ++range) {
      end = std::copy_n(inside_.data() + range * kInsideStride, inside_size_[range], end);
    }
    return end - open_.data();
  }

  // The highest block maximum m for which the block maxima from m up have the needed weight; -infinity: there is none.
  template <class Weight>
  float bound_by_maxima(const Weight& weight, Interval bounds, uint64_t needed) {
    const auto blocks = static_cast<int64_t>(block_max_.size());
    heap_.resize(blocks + kLanes);
    float* const begin = heap_.data();
    Ones::Sum none;
    float* end = split(Ones(), block_max_.data(), blocks, bounds, none, begin);
    if (weight_above(weight, begin, end - begin, -kInfinity) < needed) return -kInfinity;
    std::make_heap(begin, end);
    for (uint64_t sum = 0;;) {
      std::pop_heap(begin, end--);
      sum += weight_above(weight, end, 1, -kInfinity);
      if (sum >= needed) return *end;
    }
  }

  // The highest logit with a weight of at least `needed` at or above it, if the logits in `bounds` weigh `total`.
  template <class Weight>
  Threshold threshold(const Weight& weight, Interval bounds, uint64_t needed, uint64_t total) {
    const float bound = bound_by_maxima(weight, bounds, needed);
    Interval guess{bound, bounds.high};
    if (bound == -kInfinity) guess = estimate(weight, logits_, size_, bounds, total - needed, false);
    for (;;) {
      const uint64_t above = split_row(weight, guess);
      const int64_t count = gather_inside();
      if (needed <= above) {
        guess = {next_up(guess.high), bounds.high};
      } else if (needed > above + weight_above(weight, open_.data(), count, -kInfinity)) {
        guess = {bounds.low, next_down(guess.low)};
      } else {
        return find_threshold(weight, open_, other_, count, guess, above, needed);
      }
    }
  }

  // The k-th largest logit; -FLT_MAX if fewer than k logits are finite.
  float kth_largest(int64_t k) {
    const auto needed = static_cast<uint64_t>(k);
    const auto blocks = static_cast<int64_t>(block_max_.size());
    // If block maxima give a bound for the threshold, the total is not needed.
    const bool is_bounded = weight_above(Ones(), block_max_.data(), blocks, -kInfinity) >= needed;
    const auto num_finite = static_cast<uint64_t>(is_bounded ? size_ : count_above(-kInfinity));
    if (num_finite <= needed) return -FLT_MAX;
    return threshold(Ones(), {-FLT_MAX, max_}, needed, num_finite).value;
  }

  // Collects the candidates: the tokens with logits from `floor` up, in ascending order of ids.
  void collect(float floor) {
    candidates_.clear();
    const F32 limit = broadcast(floor);
    for (int64_t b = 0; b < size_; b += kBlock) {
      if (block_max_[b / kBlock] < floor) continue;
      const int64_t end = std::min(b + kBlock, size_);
      for (int64_t i = b; i < end; i += kLanes) {
        const auto lanes = static_cast<int>(std::min(kLanes, end - i));
        uint32_t mask = ~mask_less(load_logits(logits_ + i, lanes), limit) & ((uint32_t{1} << lanes) - 1);
        for (; mask != 0; mask &= mask - 1) {
          const auto id = static_cast<int32_t>(i + __builtin_ctz(mask));
          candidates_.push_back({order_key(logits_[id]), id});
        }
      }
    }
  }

  static uint64_t needed_units(double top_p, uint64_t total) {
    const auto needed = static_cast<uint64_t>(std::ceil(top_p * static_cast<double>(total)));
    return std::clamp<uint64_t>(needed, 1, total);
  }

  // Draws by inverse CDF over the kept tokens: those with logits above kept.value, which have `kept.above` units, and
  // the first num_tied tokens with exactly this logit.
  int64_t draw(const Units& units, Threshold kept, uint64_t num_tied, uint64_t tied_units, double uniform) const {
    uint64_t target = scaled(uniform, kept.above + num_tied * tied_units);
    // True if the target lies in these values with `more` units; if not, the search steps over them.
    const auto is_in = [&](const float* values, int64_t n, uint64_t more) {
      const uint64_t tied = num_tied == 0 ? 0 : std::min(num_tied, count_equal(values, n, kept.value));
      const uint64_t mass = more + weight_above(units, values, n, kept.value) + tied * tied_units;
      if (target < mass) return true;
      target -= mass;
      num_tied -= tied;
      return false;
    };
    int64_t range = 0;
    while (!is_in(inside_.data() + range * kInsideStride, inside_size_[range], above_[range])) ++range;
    int64_t b = range * kRange;
    while (block_max_[b / kBlock] < kept.value || !is_in(logits_ + b, std::min(kBlock, size_ - b), 0)) b += kBlock;
    while (!is_in(logits_ + b, 1, 0)) ++b;
    return b;
  }

  // floor(uniform * total), exact for the 53 bits of uniform; below total.
  static uint64_t scaled(double uniform, uint64_t total) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(std::ldexp(uniform, 53)) * total >> 53);
  }

  const float* logits_ = nullptr;
  int64_t size_ = 0;
  float max_ = 0;
  bool has_nan_ = false;
  std::vector<float> block_max_, heap_, sums_, open_, other_;
  std::vector<uint8_t> range_nan_;
  std::vector<uint64_t> counts_, above_;
  std::vector<float> inside_;  // kInsideStride for each range, the first inside_size_ of them hold logits
  std::vector<int64_t> inside_size_;
  std::vector<Candidate> candidates_;
};

// Calls fn(row index, row) for each row. Each thread takes rows of its own. If there are few rows, all threads share
// one row after the other.
template <class Fn>
void for_rows(const Logits& a, const Fn& fn) {
  const auto run = [&](int64_t r) {
    thread_local Row row;
    row.scan(a.rows.data + r * a.rows.stride, a.vocab_size);
    fn(r, row);
  };
  if (a.num_rows >= num_threads()) {
    parallel_for(static_cast<int>(a.num_rows), [&](int r, int) { run(r); });
  } else {
    for (int64_t r = 0; r < a.num_rows; ++r) run(r);
  }
}

void greedy(const GreedyArgs& a) {
  for_rows(a.logits, [&](int64_t r, const Row& row) { a.token_ids[r] = row.has_nan() ? -1 : row.first_maximum(); });
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
    const float* logits = a.logits.rows.data + r * a.logits.rows.stride;
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

void forbid_tokens(const ForbidTokensArgs& a) {
  constexpr int64_t kBits = 32;
  const int64_t num_words = ceil_div(a.vocab_size, kBits);
  // Threads share the columns, so that two threads never write to one logit, even if a row has several masks.
  parallel_for(static_cast<int>(ceil_div(a.vocab_size, kRange)), [&](int range, int) {
    const int64_t begin = range * kRange, end = std::min(begin + kRange, a.vocab_size);
    for (int64_t m = 0; m < a.num_masks; ++m) {
      float* row = a.logits.data + a.rows[m] * a.logits.stride;
      for (int64_t i = begin; i < end; i += kBits) {
        const uint32_t allowed = a.masks[m * num_words + i / kBits];
        if (allowed == ~uint32_t{0}) continue;
        const int64_t count = std::min(kBits, end - i);
        for (int64_t bit = 0; bit < count; ++bit) row[i + bit] = allowed >> bit & 1 ? row[i + bit] : -kInfinity;
      }
    }
  });
}

}  // namespace

extern const SamplingKernels sampling_table;
const SamplingKernels sampling_table = {greedy, sample, logprobs, forbid_tokens};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(SamplingKernels, sampling_kernels, sampling_table)
