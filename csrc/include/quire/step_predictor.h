// The time of a step from its rows: the twin of StepArithmetic.load, StepArithmetic.demand and step_time in cost/,
// which say what is counted and why. The numbers are the same, bit by bit.
//
// It is compiled because a step drives everything out of the caches: benchmarks/NOTES.md, "What a prediction costs".
#pragma once

#include <array>
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
  int64_t other_tokens = 0;               // of other lanes
};

struct StepConstants {
  double per_step, per_logit_row, per_weight_byte, per_operation, per_kv_byte, per_attention_flop, per_rescanned_byte,
      overlap;
};

// What depends on the number of tokens, of rows of logits, and of others' tokens alone: amounts, and the seconds of the
// exchanges of ranks.
struct StepProducts {
  double weight_bytes, operations, rescanned_bytes, exchange_seconds;
};

// What most of the time goes to, in the order of kBounds.
enum class StepBound : uint8_t { kMemory, kArithmetic, kAttention, kHost, kLinks };
inline constexpr std::array kBounds{"memory", "arithmetic", "attention", "host", "links"};

struct PredictedTime {
  double seconds, low, high;
  StepBound bound;
};

class StepPredictor {
 public:
  using Products = std::function<StepProducts(int64_t num_tokens, int64_t num_logits, int64_t other_tokens)>;

  // `products` is asked once for each of the last sizes of steps. Their times are kept with them: powers and logarithms
  // of each step would bring further pages of code and tables into the caches.
  StepPredictor(std::vector<LayersOfKind> kinds, const StepConstants& constants, Products products);

  size_t num_kinds() const { return kinds_.size(); }

  // `load` has the rows that were added since `begin_load`.
  void begin_load(int64_t num_logits, int64_t other_tokens);
  void add_row(int64_t start, int64_t count);
  const StepLoad& load() const { return load_; }

  PredictedTime time(const StepLoad& load, double spread, double factor, double further);

 private:
  using Size = std::array<int64_t, 3>;  // num_tokens, num_logits, other_tokens
  struct Hash {
    size_t operator()(const Size& size) const;
  };

  // Seconds: of the host, of reading weights and of computing, each alone and as they overlap, of reading weights
  // again, and of exchanges.
  struct SizeTimes {
    double host, reading, computing, linear, again, exchanges;
  };

  const SizeTimes& times(const Size& size);

  const std::vector<LayersOfKind> kinds_;
  const StepConstants constants_;
  const Products count_products_;
  std::unordered_map<Size, SizeTimes, Hash> times_;
  StepLoad load_;
};

}  // namespace quire
