// The time of a step from its rows: the twin of StepArithmetic.load, StepArithmetic.demand and step_time in cost/,
// which say what is counted and why. The numbers are the same, bit by bit.
//
// It is compiled because a step drives everything out of the caches: benchmarks/NOTES.md, "What a prediction costs".
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

namespace quire {

// Layers in which a token sees the same tokens. Sizes are sums over these layers.
struct LayersOfKind {
  enum class Sight { kAll, kWindow, kChunk, kNothing };
  Sight sight;
  int64_t window, token_bytes, state_bytes, flops_per_pair;

  int64_t span(int64_t start, int64_t count) const;
  int64_t area(int64_t start, int64_t count) const;

 private:
  int64_t pairs_up_to(int64_t end) const;
};

struct StepLoad {
  int64_t num_tokens = 0, num_rows = 0, num_logits = 0;
  std::vector<int64_t> kv_tokens, pairs;  // by kind of layers
};

struct StepConstants {
  double per_step, per_logit_row, per_weight_byte, per_operation, per_kv_byte, per_attention_flop, per_rescanned_byte,
      overlap;
};

// The amounts that depend on the number of tokens and of rows of logits alone.
struct StepProducts {
  double weight_bytes, operations, rescanned_bytes;
};

struct PredictedTime {
  double seconds, low, high;
  const char* bound;
};

class StepPredictor {
 public:
  using Products = std::function<StepProducts(int64_t num_tokens, int64_t num_logits)>;

  // `products` is asked once for each of the last sizes of steps.
  StepPredictor(std::vector<LayersOfKind> kinds, const StepConstants& constants, Products products);

  size_t num_kinds() const { return kinds_.size(); }

  // `load` has the rows that were added since `begin_load`.
  void begin_load(int64_t num_logits);
  void add_row(int64_t start, int64_t count);
  const StepLoad& load() const { return load_; }

  PredictedTime time(const StepLoad& load, double spread, double factor, double further);

 private:
  const StepProducts& products(int64_t num_tokens, int64_t num_logits);

  const std::vector<LayersOfKind> kinds_;
  const StepConstants constants_;
  const Products count_products_;
  std::unordered_map<uint64_t, StepProducts> products_;
  StepLoad load_;
};

}  // namespace quire
