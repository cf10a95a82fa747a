#include "quire/step_correction.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

namespace quire {
namespace {

// The constants of cost/correct.py.
constexpr double kNewestWeight = 1.0 / 16;
constexpr double kMostWeight = 1.0 / 2, kSignalWeight = 1.0 / 4;
constexpr double kLeastScatter = 0.05;
constexpr int64_t kPriorSteps = 4;
constexpr double kForgottenShare = 1.0 / 256;
constexpr double kNeighbourShare = 0.95;
constexpr int64_t kFollowingSteps = 8;
constexpr double kMaxRatio = 20.0;
constexpr double kMaxLog = 50.0;
constexpr double kSpreadQuantile = 1.65;
constexpr double kHalfColdSeconds = 2.0;

double neighbour_share(int distance) {
  static const auto by_distance = [] {
    std::array<double, StepCorrection::kLargestSize + 1> shares;
    for (size_t i = 0; i < shares.size(); ++i) shares[i] = std::pow(kNeighbourShare, static_cast<double>(i));
    return shares;
  }();
  return by_distance[distance];
}

int size_of_step(int64_t num_tokens) { return std::bit_width(static_cast<uint64_t>(std::abs(num_tokens - 1))); }

}  // namespace

double cooled(double pause) { return pause / (pause + kHalfColdSeconds); }

double StepCorrection::Size::signal() const {
  return std::min(std::abs(error) / std::max(scatter, kLeastScatter), kMostWeight);
}

void StepCorrection::Size::add(double new_error) {
  error += kSignalWeight * (new_error - error);
  scatter += kSignalWeight * (std::abs(new_error) - scatter);
  num_steps += 1;
  weight = std::max(1.0 / static_cast<double>(num_steps + kPriorSteps), kNewestWeight);
}

StepCorrection::StepCorrection(double spread, const std::vector<std::pair<int, double>>& factors,
                               std::function<double(int)> reading_share)
    : reading_share_(std::move(reading_share)) {
  known_.reserve(sizes_.size());
  for (const auto& [size, factor] : factors) begin(size, std::log(factor));
  set_spread(spread);
}

void StepCorrection::set_spread(double spread) {
  const double deviation = std::log1p(spread) / kSpreadQuantile;
  variance_ = deviation * deviation;
  spread_ = spread;
}

std::vector<std::pair<int, double>> StepCorrection::factors() const {
  std::vector<std::pair<int, double>> all;
  for (const int size : known_)
    all.emplace_back(size, std::min(std::max(std::exp(sizes_[size].log), 1 / kMaxRatio), kMaxRatio));
  return all;
}

double StepCorrection::factor(int64_t num_tokens) const {
  return known_.empty() ? 1.0 : std::exp(log_of(size_of_step(num_tokens)));
}

void StepCorrection::add(int64_t num_tokens, double predicted, double measured) {
  const int number = size_of_step(num_tokens);
  const double error = std::log(std::min(std::max(measured / predicted, 1 / kMaxRatio), kMaxRatio));
  if (!sizes_[number].is_known) begin(number, std::log(factor(num_tokens)));
  Size& own = sizes_[number];
  const double weight = own.weight, signal = own.signal();
  own.log = std::min(std::max(own.log + std::max(weight, signal) * error, -kMaxLog), kMaxLog);
  for (const int other : known_) {
    if (other == number) continue;
    Size& each = sizes_[other];
    const double likeness = 1 - std::abs(reading_share(own, number) - reading_share(each, other));
    const double share = likeness * neighbour_share(std::abs(other - number));
    double moved = std::min(weight, each.weight);
    const int64_t rested = num_steps_ - each.last_step;
    if (rested < kFollowingSteps) moved *= static_cast<double>(rested) / kFollowingSteps;
    if (own.last_step > each.last_step) moved = std::max(moved, signal);
    const double moved_log = each.log + moved * share * error;
    each.log = moved_log + kForgottenShare * (own.log - moved_log);
  }
  own.add(error);
  own.last_step = num_steps_;
  num_steps_ += 1;
  variance_ += kNewestWeight * (error * error - variance_);
  spread_ = std::exp(kSpreadQuantile * std::sqrt(variance_)) - 1;
}

double StepCorrection::log_of(int size) const {
  if (sizes_[size].is_known) return sizes_[size].log;
  const auto distance = [size](int other) { return std::abs(other - size); };
  return sizes_[*std::ranges::min_element(known_, {}, distance)].log;
}

void StepCorrection::begin(int size, double log) {
  sizes_[size] = {.log = log, .weight = 1.0 / kPriorSteps, .last_step = -kFollowingSteps, .is_known = true};
  known_.push_back(size);
}

double StepCorrection::reading_share(Size& size, int number) {
  if (!size.has_share) {
    size.reading_share = reading_share_(number);
    size.has_share = true;
  }
  return size.reading_share;
}

}  // namespace quire
