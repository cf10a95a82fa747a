// Divides the work of a call. Query rows form items, and an item is cut into units. A task takes several units.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_tile.h"
#include "quire/kernels/attention.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

// Query rows of one sequence. They lie side by side in the lanes of row tiles. Row r of a KV head is query token r /
// group of the sequence, with query head r % group of the KV head. If a KV head has few rows (decode), one tile takes
// all rows of several KV heads: the first `head_rows` lanes belong to kv_head, and the next lanes to the next KV head.
struct Item {
  int sequence, kv_head;
  int first_row, num_rows;
  int head_rows;                      // num_rows if there is one KV head
  int first_position, last_position;  // the positions that its rows see
  int first_split, num_splits;
  int64_t partials;  // offset of the results of the splits in shared memory, in floats; -1 = the item is one unit

  int num_heads() const { return num_rows / head_rows; }
};

// Some consecutive splits of an item.
struct Unit {
  int item, first_split, num_splits;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Unit> units;
  std::vector<int> split_items;  // items with splits in several units
  int64_t partials_size = 0;     // floats
};

inline int first_visible(const AttentionArgs& a, int position) { return a.rule.first_visible(position); }

inline int query_group(const AttentionArgs& a) { return a.num_q_heads / a.cache.num_kv_heads; }

inline int first_query_position(const AttentionArgs& a, int sequence) {
  return a.seq_lens[sequence] - (a.cu_seqlens_q[sequence + 1] - a.cu_seqlens_q[sequence]);
}

// The floats of the result of one split of an item: maxima, sums and rows of values for each row tile.
inline int64_t partial_size(const Item& item, int width) {
  return round_up(item.num_rows, kLanes) * 2 + static_cast<int64_t>(item.num_rows) * width;
}

// The rows of an item: up to max_rows, so that keys and values are read rarely, but few enough to keep all threads
// busy.
inline int choose_rows(const AttentionArgs& a, int max_rows, int wanted_items) {
  const int group = query_group(a);
  int rows = max_rows;
  for (; rows > 16; rows /= 2) {
    int64_t items = 0;
    for (int s = 0; s < a.num_seqs; ++s) {
      items += ceil_div(static_cast<int64_t>(a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s]) * group, rows);
    }
    if (items * a.cache.num_kv_heads >= wanted_items) break;
  }
  return rows;
}

// The KV heads of an item of a sequence with few query rows: all that fit into a row tile, but at most `most`.
inline int heads_together(const AttentionArgs& a, int head_rows, int most) {
  return std::clamp(kLanes / head_rows, 1, std::min(most, a.cache.num_kv_heads));
}

// The largest number of KV heads of an item with which all threads have work.
inline int choose_heads(const AttentionArgs& a, int wanted_units) {
  const int group = query_group(a);
  int most = kLanes;
  for (; most > 1; most /= 2) {
    int64_t units = 0;
    for (int s = 0; s < a.num_seqs && units < wanted_units; ++s) {
      const int tokens = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s];
      if (tokens == 0) continue;
      const int heads = heads_together(a, tokens * group, most), offset = first_query_position(a, s);
      const int splits = a.seq_lens[s] / kSplit + 1 - first_visible(a, offset) / kSplit;
      units += static_cast<int64_t>(splits) * ceil_div(a.cache.num_kv_heads, heads);
    }
    if (units >= wanted_units) break;
  }
  return most;
}

template <class Path>
inline void make_plan(const AttentionArgs& a, Plan& plan) {
  constexpr int64_t kMaxPartials = 16 << 20;  // floats
  constexpr int kUnitsPerThread = 4;
  const int threads = num_threads(), wanted = threads > 1 ? threads * kUnitsPerThread : 1;
  const int group = query_group(a), max_rows = choose_rows(a, Path::kMaxRows, wanted);
  const int width = Path::width(a.value_dim);
  const int most_heads = Path::has_lanes(a.head_dim, a.value_dim) ? choose_heads(a, wanted) : 1;
  plan.items.clear();
  plan.units.clear();
  plan.split_items.clear();
  plan.partials_size = 0;
  int64_t total_splits = 0;
  for (int s = 0; s < a.num_seqs; ++s) {
    const int query_rows = (a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s]) * group, offset = first_query_position(a, s);
    for (int row = 0; row < query_rows; row += max_rows) {
      const int head_rows = std::min(max_rows, query_rows - row);
      const int heads = row == 0 ? heads_together(a, query_rows, most_heads) : 1;
      const int first_position = first_visible(a, offset + row / group);
      const int last_position = offset + (row + head_rows - 1) / group;
      const int first_split = first_position / kSplit, num_splits = last_position / kSplit + 1 - first_split;
      for (int g = 0; g < a.cache.num_kv_heads; g += heads) {
        total_splits += num_splits;
        plan.items.push_back({.sequence = s,
                              .kv_head = g,
                              .first_row = row,
                              .num_rows = head_rows * std::min(heads, a.cache.num_kv_heads - g),
                              .head_rows = head_rows,
                              .first_position = first_position,
                              .last_position = last_position,
                              .first_split = first_split,
                              .num_splits = num_splits,
                              .partials = -1});
      }
    }
  }
  const int num_items = static_cast<int>(plan.items.size());
  const bool may_split = num_items < wanted;
  const int unit_splits = may_split ? static_cast<int>(std::max<int64_t>(total_splits / wanted, 1)) : 0;
  for (int i = 0; i < num_items; ++i) {
    Item& item = plan.items[i];
    const int64_t size = item.num_splits * partial_size(item, width);
    if (!may_split || item.num_splits < 2 * unit_splits || plan.partials_size + size > kMaxPartials) {
      plan.units.push_back({i, item.first_split, item.num_splits});
      continue;
    }
    item.partials = plan.partials_size;
    plan.partials_size += size;
    plan.split_items.push_back(i);
    for (int split = 0; split < item.num_splits; split += unit_splits) {
      plan.units.push_back({i, item.first_split + split, std::min(unit_splits, item.num_splits - split)});
    }
  }
  // Long units come first, so that no thread starts a long unit when the other threads have finished.
  constexpr int kRowsOfOneHead = 32;  // reading the keys and values of a head costs as much as this number of rows
  const auto cost = [&](const Unit& u) {
    const Item& item = plan.items[u.item];
    return u.num_splits * std::max(item.num_rows, item.num_heads() * kRowsOfOneHead);
  };
  const auto longer = [&](const Unit& x, const Unit& y) { return cost(x) > cost(y); };
  if (threads > 1 && !std::is_sorted(plan.units.begin(), plan.units.end(), longer)) {
    std::sort(plan.units.begin(), plan.units.end(), longer);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
