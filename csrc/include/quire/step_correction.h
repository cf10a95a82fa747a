// Running steps correct the predictions: the twin of Correction in cost/correct.py, which says what it does and why.
// The numbers are the same, bit by bit.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace quire {

// The share of `cold` (see Pause) that a step after a pause of these seconds takes longer.
double cooled(double pause);

class StepCorrection {
 public:
  static constexpr int kLargestSize = 64;  // steps of n bits have size n

  // `factors`: (size of a step, factor) of an earlier start. `reading_share` is asked once for each size that has
  // steps.
  StepCorrection(double spread, const std::vector<std::pair<int, double>>& factors,
                 std::function<double(int)> reading_share);

  void set_spread(double spread);
  double spread() const { return spread_; }
  int64_t num_steps() const { return num_steps_; }

  // (size, factor) of every size that has steps.
  std::vector<std::pair<int, double>> factors() const;

  double factor(int64_t num_tokens) const;
  void add(int64_t num_tokens, double predicted, double measured);

 private:
  struct Size {
    double log = 0, weight = 0, error = 0, scatter = 0, reading_share = 0;
    int64_t last_step = 0, num_steps = 0;
    bool is_known = false, has_share = false;

    double signal() const;
    void add(double new_error);
  };
  using BySize = std::array<Size, kLargestSize + 1>;

  double log_of(int size) const;  // of the factor
  void begin(int size, double log);
  double reading_share(Size& size, int number);

  double variance_ = 0, spread_ = 0;
  int64_t num_steps_ = 0;
  std::vector<int> known_;  // sizes that have steps, the oldest first
  BySize sizes_;
  std::function<double(int)> reading_share_;
};

}  // namespace quire
