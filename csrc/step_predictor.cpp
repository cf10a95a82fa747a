#include "quire/step_predictor.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace quire {
namespace {

// The constants of cost/arithmetic.py and cost/step_time.py.
constexpr size_t kKeptSizes = 256;
constexpr double kCachedShare = 0.4, kCachedBytes = 16e6;
constexpr double kMinSpread = 0.03;

// Sums of bytes and operations are exact, as in Python, until they become a double.
using Wide = __int128;

int64_t triangle(int64_t count) { return count * (count + 1) / 2; }

double overlapped(double first, double second, double overlap) {
  const double longer = std::max(first, second), shorter = std::min(first, second);
  return longer > 0 ? longer * std::exp(std::log1p(std::pow(shorter / longer, overlap)) / overlap) : 0.0;
}

double uncached(double kv_bytes) {
  return kv_bytes * (kv_bytes + kCachedShare * kCachedBytes) / (kv_bytes + kCachedBytes);
}

}  // namespace

int64_t LayersOfKind::span(int64_t start, int64_t count) const {
  switch (sight) {
    case Sight::kNothing:
      return 0;
    case Sight::kWindow:
      return std::min(start + count, window + count - 1);
    case Sight::kChunk:
      return start % window + count;
    case Sight::kAll:
      break;
  }
  return start + count;
}

int64_t LayersOfKind::area(int64_t start, int64_t count) const {
  return sight == Sight::kNothing ? 0 : pairs_up_to(start + count) - pairs_up_to(start);
}

int64_t LayersOfKind::pairs_up_to(int64_t end) const {
  if (sight == Sight::kChunk) return end / window * triangle(window) + triangle(end % window);
  if (sight == Sight::kWindow && end > window) return triangle(window) + (end - window) * window;
  return triangle(end);
}

StepPredictor::StepPredictor(std::vector<LayersOfKind> kinds, const StepConstants& constants, Products products)
    : kinds_(std::move(kinds)), constants_(constants), count_products_(std::move(products)) {
  load_.kv_tokens.resize(kinds_.size());
  load_.pairs.resize(kinds_.size());
}

void StepPredictor::begin_load(int64_t num_logits, int64_t other_tokens) {
  load_.num_tokens = load_.num_rows = 0;
  load_.num_logits = num_logits;
  load_.other_tokens = other_tokens;
  std::ranges::fill(load_.kv_tokens, 0);
  std::ranges::fill(load_.pairs, 0);
}

void StepPredictor::add_row(int64_t start, int64_t count) {
  load_.num_tokens += count;
  load_.num_rows += 1;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const int64_t span = kinds_[kind].span(start, count);
    load_.kv_tokens[kind] += span;
    // One token sees what it spans.
    load_.pairs[kind] += count == 1 ? span : kinds_[kind].area(start, count);
  }
}

PredictedTime StepPredictor::time(const StepLoad& load, double spread, double factor, double further) {
  Wide kv_sum = 0, attention_sum = 0;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    kv_sum += Wide(kinds_[kind].token_bytes) * load.kv_tokens[kind] + Wide(kinds_[kind].state_bytes) * load.num_rows;
    attention_sum += Wide(kinds_[kind].flops_per_pair) * load.pairs[kind];
  }
  const SizeTimes& of_size = times({load.num_tokens, load.num_logits, load.other_tokens});
  const double kv = uncached(static_cast<double>(kv_sum)) * constants_.per_kv_byte;
  const double attention = static_cast<double>(attention_sum) * constants_.per_attention_flop;
  const double seconds =
      factor * (of_size.host + of_size.linear + of_size.again + kv + attention + of_size.exchanges) + further;
  const double memory = of_size.reading + of_size.again + kv, ratio = 1 + std::max(spread, kMinSpread);
  const double products = std::max(memory, of_size.computing);
  StepBound bound = memory >= of_size.computing ? StepBound::kMemory : StepBound::kArithmetic;
  if (of_size.exchanges > std::max({products, of_size.host, attention})) {
    bound = StepBound::kLinks;
  } else if (of_size.host > std::max(products, attention)) {
    bound = StepBound::kHost;
  } else if (attention > products) {
    bound = StepBound::kAttention;
  }
  return {seconds, seconds / ratio, seconds * ratio, bound};
}

size_t StepPredictor::Hash::operator()(const Size& size) const {
  uint64_t hash = 0;
  for (const int64_t number : size) hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15;
  return hash ^ hash >> 32;
}

const StepPredictor::SizeTimes& StepPredictor::times(const Size& size) {
  if (const auto known = times_.find(size); known != times_.end()) return known->second;
  const StepProducts counted = count_products_(size[0], size[1], size[2]);
  const double reading = counted.weight_bytes * constants_.per_weight_byte;
  const double computing = counted.operations * constants_.per_operation;
  const SizeTimes found{.host = constants_.per_step + static_cast<double>(size[1]) * constants_.per_logit_row,
                        .reading = reading,
                        .computing = computing,
                        .linear = overlapped(reading, computing, constants_.overlap),
                        .again = counted.rescanned_bytes * constants_.per_rescanned_byte,
                        .exchanges = counted.exchange_seconds};
  if (times_.size() == kKeptSizes) times_.clear();
  return times_[size] = found;
}

}  // namespace quire
