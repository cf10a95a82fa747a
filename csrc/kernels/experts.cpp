// The choice of experts by a router's logits, and weighted sums of their results.
#include "quire/kernels/experts.h"

#include <algorithm>
#include <limits>

#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kLanes = F32::kWidth;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSmallestSum = 1e-20f;  // added to sums of weights, so that weights stay zero if all scores are zero

// Calls fn(first, count) for each vector of a row. In the last vector, count may be below kLanes.
template <class Fn>
inline void for_vectors(int64_t columns, const Fn& fn) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) fn(i, static_cast<int>(kLanes));
  if (i < columns) fn(i, static_cast<int>(columns - i));
}

inline float exp_of(float x) { return reduce_max(exp(broadcast(x))); }

// The memory for one row: scores and choice [num_experts], best [num_active], is_active of groups [num_groups].
struct RowMemory {
  float *scores, *choice, *best;
  bool* is_active;

  explicit RowMemory(const RoutingRule& rule) {
    const int64_t floats = 2 * rule.num_experts + rule.num_active;
    scores = static_cast<float*>(scratch(Scratch::route_row, floats * sizeof(float) + rule.num_groups));
    choice = scores + rule.num_experts;
    best = choice + rule.num_experts;
    is_active = reinterpret_cast<bool*>(best + rule.num_active);
  }
};

inline bool is_finite(const float* x, int64_t count) {
  F32 check = zero();
  for_vectors(count, [&](int64_t i, int n) { check = fma(load_part(x + i, n), zero(), check); });
  return !has_nan(check);
}

inline void softmax(const float* x, int64_t count, float* out) {
  F32 largest = broadcast(-kInfinity), sums = zero();
  for_vectors(count, [&](int64_t i, int n) { largest = max(largest, load_part(x + i, n, -kInfinity)); });
  const F32 most = broadcast(reduce_max(largest));
  for_vectors(count, [&](int64_t i, int n) {
    const F32 y = exp(load_part(x + i, n, -kInfinity) - most);
    store_part(out + i, y, n);
    sums = sums + y;
  });
  const F32 sum = broadcast(reduce_add(sums));
  for_vectors(count, [&](int64_t i, int n) { store_part(out + i, load_part(out + i, n) / sum, n); });
}

inline void sigmoid(const float* x, int64_t count, float* out) {
  const F32 one = broadcast(1);
  for_vectors(count,
              [&](int64_t i, int n) { store_part(out + i, one / (one + exp(zero() - load_part(x + i, n))), n); });
}

// Marks the best groups. Of equal groups, the one with the lower number comes first.
void choose_groups(const RoutingRule& rule, const float* choice, bool* is_active) {
  const int64_t size = rule.num_experts / rule.num_groups;
  const auto score_of = [&](int64_t group) {
    float first = -kInfinity, second = -kInfinity;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else if (choice[i] > second) {
        second = choice[i];
      }
    }
    return rule.group_score == GroupScore::max ? first : first + second;
  };
  std::fill_n(is_active, rule.num_groups, false);
  for (int64_t i = 0; i < rule.num_active_groups; ++i) {
    int64_t best = -1;
    float most = 0;
    for (int64_t group = 0; group < rule.num_groups; ++group) {
      if (is_active[group]) continue;
      if (const float score = score_of(group); best < 0 || score > most) {
        best = group;
        most = score;
      }
    }
    is_active[best] = true;
  }
}

// Finds the best experts of the active groups, in descending order.
void choose_experts(const RoutingRule& rule, const RowMemory& memory, const float* choice, int32_t* experts) {
  const int64_t size = rule.num_experts / rule.num_groups;
  int64_t count = 0;
  for (int64_t e = 0; e < rule.num_experts; ++e) {
    if (rule.num_active_groups < rule.num_groups && !memory.is_active[e / size]) continue;
    if (count == rule.num_active && !(choice[e] > memory.best[count - 1])) continue;
    int64_t i = count < rule.num_active ? count++ : count - 1;
    for (; i > 0 && choice[e] > memory.best[i - 1]; --i) {
      memory.best[i] = memory.best[i - 1];
      experts[i] = experts[i - 1];
    }
    memory.best[i] = choice[e];
    experts[i] = static_cast<int32_t>(e);
  }
}

void choose_sparsely(const RoutingRule& rule, const float* x, float* left, int32_t* experts, float* weights) {
  std::copy_n(x, rule.num_experts, left);
  for (int64_t s = 0; s < rule.num_active; ++s) {
    const int64_t best = std::max_element(left, left + rule.num_experts) - left;
    const float most = left[best];
    float sum = 0;
    for (int64_t e = 0; e < rule.num_experts; ++e) {
      const bool is_far = (most - left[e]) / std::max(std::fabs(x[e]), most) > 2 * rule.jitter;
      if (!is_far) sum += exp_of(left[e] - most);
    }
    experts[s] = static_cast<int32_t>(best);
    weights[s] = 1 / sum;
    left[best] = -kInfinity;
  }
}

void choose_by_scores(const RouteArgs& args, const float* x, const RowMemory& memory, int32_t* experts,
                      float* weights) {
  const RoutingRule& rule = args.rule;
  const float* scores = memory.scores;
  if (rule.scoring == Scoring::softmax) {
    softmax(x, rule.num_experts, memory.scores);
  } else if (rule.scoring == Scoring::sigmoid) {
    sigmoid(x, rule.num_experts, memory.scores);
  } else {
    scores = x;
  }
  // Without a bias, scores have the same order as logits, but rounding can make scores equal.
  const float* choice = rule.num_groups == 1 || rule.group_score == GroupScore::max ? x : scores;
  if (args.bias != nullptr) {
    for (int64_t e = 0; e < rule.num_experts; ++e) memory.choice[e] = scores[e] + args.bias[e];
    choice = memory.choice;
  }
  if (rule.num_active_groups < rule.num_groups) choose_groups(rule, choice, memory.is_active);
  choose_experts(rule, memory, choice, experts);
  for (int64_t s = 0; s < rule.num_active; ++s) weights[s] = scores[experts[s]];
  if (rule.scoring == Scoring::softmax_of_chosen) softmax(weights, rule.num_active, weights);
}

void choose(const RouteArgs& args, int64_t begin, int64_t end) {
  const RoutingRule& rule = args.rule;
  const RowMemory memory(rule);
  for (int64_t row = begin; row < end; ++row) {
    const float* const x = args.logits.data + row * args.logits.stride;
    int32_t* const experts = args.experts + row * rule.num_active;
    float* const weights = args.weights + row * rule.num_active;
    if (!is_finite(x, rule.num_experts)) {
      for (int64_t s = 0; s < rule.num_active; ++s) experts[s] = static_cast<int32_t>(s);
      std::fill_n(weights, rule.num_active, std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    if (rule.scoring == Scoring::sparsemixer) {
      choose_sparsely(rule, x, memory.choice, experts, weights);
    } else {
      choose_by_scores(args, x, memory, experts, weights);
    }
    float divisor = 1;
    if (rule.normalizes) {
      divisor = 0;
      for (int64_t s = 0; s < rule.num_active; ++s) divisor += weights[s];
      divisor += kSmallestSum;
    }
    for (int64_t s = 0; s < rule.num_active; ++s) weights[s] = weights[s] / divisor * rule.scale;
  }
}

template <class T>
void combine_rows(const CombineArgs& args, const int32_t* places, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int32_t* const place = places + row * args.num_slots;
    const float* const weights = args.weights + row * args.num_slots;
    const T* const shared = static_cast<const T*>(args.shared.data) + row * args.shared.stride;
    T* const out = static_cast<T*>(args.out.data) + row * args.out.stride;
    const bool has_gate = args.shared_gate.data != nullptr;
    const F32 gate =
        has_gate ? broadcast(1 / (1 + exp_of(-args.shared_gate.data[row * args.shared_gate.stride]))) : broadcast(1);
    for_vectors(args.columns, [&](int64_t i, int n) {
      F32 sum = zero();
      for (int64_t s = 0; s < args.num_slots; ++s) {
        const T* const y = static_cast<const T*>(args.y.data) + place[s] * args.y.stride;
        sum = fma(broadcast(weights[s]), load_part(y + i, n), sum);
      }
      if (args.shared.data != nullptr) {
        const F32 x = load_part(shared + i, n);
        sum = has_gate ? fma(gate, x, sum) : sum + x;
      }
      store_part(out + i, sum, n);
    });
  }
}

void combine(const CombineArgs& args, const int32_t* places, int64_t begin, int64_t end) {
  with_type_of(args.dtype, [&]<class T>(T) { combine_rows<T>(args, places, begin, end); });
}

}  // namespace

extern const ExpertKernels expert_table;
const ExpertKernels expert_table = {choose, combine};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(ExpertKernels, expert_kernels, expert_table)
