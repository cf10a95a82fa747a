// Mixture of experts: routing, products of each token with its experts, and weighted sums of the results.
//
// A step has rows * num_active pairs of a token and a slot. Pairs are sorted by expert, and a product reads and writes
// rows in this order. The result of a row has the bits of gemm() with the weight of its expert.
#pragma once

#include <cstdint>

#include "quire/kernels/gemm.h"

namespace quire {

// The values are part of the Python interface (kernels/cpu.py).
enum class Scoring : int { softmax = 0, sigmoid = 1, softmax_of_chosen = 2, sparsemixer = 3 };
enum class GroupScore : int { max = 0, top2 = 1 };

// See kernels/routing.py, which describes and checks the rule.
struct RoutingRule {
  int64_t num_experts, num_active;
  Scoring scoring;
  int64_t num_groups, num_active_groups;
  GroupScore group_score;
  bool normalizes;
  float scale, jitter;
};

struct RouteArgs {
  StridedRows<const float> logits;  // [rows, num_experts]
  int64_t rows;
  RoutingRule rule;
  const float* bias;  // [num_experts], or nullptr
  int32_t* experts;   // [rows, num_active], in descending order of scores; the lower of equal experts first
  float* weights;     // [rows, num_active]
  int32_t* order;     // [rows * num_active]: pairs by the place of their expert, then by number
  int32_t* begins;    // [num_places + 1]: place e has order[begins[e]] to order[begins[e + 1]]
  // The places of experts: [num_experts, num_copies], each in [0, num_places). The tokens of an expert take turns with
  // its copies. Some copies may have equal places. nullptr: the place of an expert is its number.
  const int32_t* places;
  int64_t num_places, num_copies;
};

// Experts of one shape. The weight of each expert begins with a new panel.
struct ExpertStack {
  PackedWeight first;  // the weight of expert 0, with its order [k] of orders [num_experts, k]
  int64_t num_experts;
};

// out[p] = x[row of p] * weight of p's expert^T + its bias, in sorted order.
struct ExpertProductArgs {
  StridedRows<const void> x;  // of_tokens: row order[p] / num_slots is that of p; else row p
  DType dtype;
  ExpertStack stack;
  const int32_t* order;             // [num_pairs], each in [0, num_pairs)
  const int32_t* begins;            // [num_places + 1], ascending from 0 to num_pairs
  int64_t num_places, first_place;  // expert e of the stack is at first_place + e; rows of other places are left alone
  int64_t num_pairs, num_slots;
  bool of_tokens;
  const void* bias;  // [num_experts, n] of bias_dtype, or nullptr
  DType bias_dtype;
  StridedRows<void> out;  // [num_pairs, n]
  DType out_dtype;
};

// out[t] = sum over slots of weight * y + shared[t], in float, in the order of the slots, and rounded once. If there is
// a shared_gate, shared[t] is multiplied by sigmoid(shared_gate[t]).
struct CombineArgs {
  StridedRows<const void> y;  // [rows * num_slots, columns], in sorted order
  DType dtype;                // of y, shared and out
  const int32_t* order;       // [rows * num_slots], each in [0, rows * num_slots)
  const float* weights;       // [rows, num_slots]
  int64_t rows, num_slots, columns;
  StridedRows<const void> shared;        // [rows, columns]; data nullptr: none
  StridedRows<const float> shared_gate;  // [rows, 1]; data nullptr: none
  StridedRows<void> out;
};

void route(const RouteArgs& args);
void multiply_experts(const ExpertProductArgs& args);
void combine_experts(const CombineArgs& args);

// ---- the interface between the driver (csrc/experts.cpp) and the kernels of one instruction set (kernels/experts.cpp)

struct ExpertKernels {
  // Chooses the experts and weights of rows [begin, end).
  void (*choose)(const RouteArgs& args, int64_t begin, int64_t end);
  // Computes rows [begin, end) of the result. The row of pair i is row places[i] of y.
  void (*combine)(const CombineArgs& args, const int32_t* places, int64_t begin, int64_t end);
};
const ExpertKernels& expert_kernels();

}  // namespace quire
