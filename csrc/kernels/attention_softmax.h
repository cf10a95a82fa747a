// Softmax of one row tile over a split, and the merge of splits.
//
// The softmax is online (Milakov and Gimelshein, arXiv 1805.02867). Splits are merged by their maxima and sums, as in
// FlashDecoding.
#pragma once

#include <algorithm>
#include <cfloat>
#include <limits>

#include "attention_plan.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The positions that a row may see, for the lanes of one row tile. Lanes without a row see none.
struct RowLimits {
  alignas(64) float first[kLanes], last[kLanes];
  int min_first, max_first, min_last, max_last;

  bool all_visible(int begin, int end) const { return begin >= max_first && end - 1 <= min_last; }
};

// Whether a query head has results on this rank.
inline bool has_result(const AttentionArgs& a, int head) {
  return head >= a.first_result && head < a.first_result + a.num_results;
}

// Walks over the rows of an item: consecutive heads of a group, then the next token, then the next KV head.
class RowCursor {
 public:
  int token, head;  // the token in the sequence's query, and the query head
  RowCursor(const AttentionArgs& a, const Item& item, int row)
      : token((item.first_row + row) / query_group(a)),
        head(item.kv_head * query_group(a) + (item.first_row + row) % query_group(a)),
        group_(query_group(a)),
        head_rows_(item.head_rows),
        left_(item.head_rows - row),
        next_head_((item.kv_head + 1) * group_) {}
  void advance() {
    ++head;
    if (--left_ == 0) {
      token = 0, head = next_head_, next_head_ += group_, left_ = head_rows_;
    } else if (head == next_head_) {
      head -= group_, ++token;
    }
  }

 private:
  int group_, head_rows_, left_, next_head_;
};

inline RowLimits row_limits(const AttentionArgs& a, const Item& item, int first_row) {
  RowLimits limits;
  const int num_rows = std::min(item.num_rows - first_row, kLanes), offset = first_query_position(a, item.sequence);
  RowCursor row(a, item, first_row);
  for (int i = 0; i < kLanes; ++i, row.advance()) {
    const int position = i < num_rows ? offset + row.token : -1;
    limits.first[i] = static_cast<float>(first_visible(a, position));
    limits.last[i] = static_cast<float>(position);
  }
  const auto bound = [&](const float* x, int lane) { return static_cast<int>(x[lane]); };
  limits.min_first = bound(limits.first, 0), limits.max_first = bound(limits.first, num_rows - 1);
  limits.min_last = bound(limits.last, 0), limits.max_last = bound(limits.last, num_rows - 1);
  return limits;
}

// The state of the online softmax of one row tile: the maximum score times log2(e), the sum of the probabilities
// relative to it, and the values weighted with these probabilities, [lane][width].
struct TileState {
  float *max, *sum, *values;
};

struct TileResult {
  F32 max, sum;
};

// Turns the scores of one row tile into probabilities relative to the tile's own maximum.
template <class Path>
TileResult softmax(float* scores, Range range, int start, const RowLimits& limits, const AttentionArgs& a) {
  const F32 cap = broadcast(a.rule.soft_cap),
            cap_scale = broadcast(a.rule.soft_cap > 0 ? a.rule.scale / a.rule.soft_cap : 0.0f);
  const F32 first = load(limits.first), last = load(limits.last), minus_infinity = broadcast(-kInfinity);
  F32 max0 = minus_infinity, max1 = minus_infinity;
  for (int p = range.begin; p < range.end; p += kTile) {
    float* block = scores + p * kLanes;
    if (a.rule.soft_cap > 0) {
      for (int i = 0; i < kTile; ++i) store(block + i * kLanes, cap * tanh(load(block + i * kLanes) * cap_scale));
    }
    if (!limits.all_visible(start + p, start + p + kTile)) {
      for (int i = 0; i < kTile; ++i) {
        const F32 position = broadcast(static_cast<float>(start + p + i));
        const F32 x = select_less(position, first, minus_infinity, load(block + i * kLanes));
        store(block + i * kLanes, select_less(last, position, minus_infinity, x));
      }
    }
    for (int i = 0; i < kTile; i += 2) {
      max0 = max(max0, load(block + i * kLanes));
      max1 = max(max1, load(block + (i + 1) * kLanes));
    }
  }
  const F32 scale = broadcast(a.rule.soft_cap > 0 ? kLog2E : a.rule.scale * kLog2E);
  const F32 top = max(max0, max1) * scale;
  const F32 base = zero() - select_less(top, broadcast(-FLT_MAX), zero(), top);
  F32 sum = zero();
  for (int p = range.begin; p < range.end; p += 2) {
    const F32 p0 = exp2(fma(load(scores + p * kLanes), scale, base));
    const F32 p1 = exp2(fma(load(scores + (p + 1) * kLanes), scale, base));
    sum = sum + (p0 + p1);
    Path::store_probabilities(scores, p, p0, p1);
  }
  return {top, sum};
}

// Adds the result of one split to the state. If a row sees nothing in a split (its maximum is -infinity), its state
// does not change. The values of a row are added if wanted(row) is true.
template <class Wanted>
inline void merge(const TileState& state, TileResult split, const float* values, int num_rows, int width,
                  const Wanted& wanted) {
  const F32 old_max = load(state.max);
  const F32 new_max = max(old_max, split.max);
  const F32 base = select_less(new_max, broadcast(-FLT_MAX), zero(), new_max);
  alignas(64) float keep[kLanes], add[kLanes];
  const F32 keep_lanes = exp2(old_max - base), add_lanes = exp2(split.max - base);
  store(keep, keep_lanes);
  store(add, add_lanes);
  store(state.max, new_max);
  store(state.sum, fma(split.sum, add_lanes, load(state.sum) * keep_lanes));
  for (int r = 0; r < num_rows; ++r) {
    if (!wanted(r)) continue;
    const F32 k = broadcast(keep[r]), x = broadcast(add[r]);
    float* row = state.values + r * width;
    for (int e = 0; e < width; e += kLanes) store(row + e, fma(load(values + r * width + e), x, load(row + e) * k));
  }
}

inline void merge(const TileState& state, TileResult split, const float* values, int num_rows, int width) {
  merge(state, split, values, num_rows, width, [](int) { return true; });
}

inline void reset(const TileState& state, int num_rows, int width) {
  store(state.max, broadcast(-kInfinity));
  store(state.sum, zero());
  std::fill_n(state.values, static_cast<size_t>(num_rows) * width, 0.0f);
}

// Adds the sinks of the rows' heads to the sums. If a sink is the largest score of a row, the `weights` of the row's
// values become smaller.
inline void add_sinks(const AttentionArgs& a, const Item& item, int first_row, const TileState& state, int num_rows,
                      float* weights) {
  alignas(64) float sinks[kLanes] = {};
  RowCursor row(a, item, first_row);
  with_type_of(a.dtype, [&]<class T>(T) {
    for (int i = 0; i < num_rows; ++i, row.advance()) {
      if (!has_result(a, row.head)) continue;
      sinks[i] = to_f32(static_cast<const T*>(a.sinks)[row.head - a.first_result]) * kLog2E;
    }
  });
  const F32 scores = load(sinks), old_max = load(state.max), top = max(old_max, scores), keep = exp2(old_max - top);
  store(state.sum, fma(load(state.sum), keep, exp2(scores - top)));
  store(weights, keep);
}

template <class Path>
inline void write_output(const AttentionArgs& a, const Item& item, int first_row, const TileState& state, int num_rows,
                         int width) {
  alignas(64) float weights[kLanes];
  std::fill_n(weights, kLanes, 1.0f);
  if (a.sinks != nullptr) add_sinks(a, item, first_row, state, num_rows, weights);
  RowCursor row(a, item, first_row);
  for (int i = 0; i < num_rows; ++i, row.advance()) {
    if (!has_result(a, row.head)) continue;
    const int64_t token = a.cu_seqlens_q[item.sequence] + row.token;
    const int64_t element = token * a.out.token_stride + (row.head - a.first_result) * a.out.head_stride;
    char* out = static_cast<char*>(a.out.data) + element * static_cast<int64_t>(size_of(a.dtype));
    Path::write_row(out, a.dtype, state.values + i * width, broadcast(weights[i] / state.sum[i]), a.value_dim);
  }
}

inline TileState partial_tile(float* partial, int row_tile, int width) {
  float* tile = partial + row_tile * (2 * kLanes + kLanes * width);
  return {tile, tile + kLanes, tile + 2 * kLanes};
}

}  // namespace
}  // namespace quire::QUIRE_ISA
