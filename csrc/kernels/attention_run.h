// Paged attention for one arithmetic path. All threads compute units, and then items that were cut are merged. The
// products are in attention_f32.h and attention_bf16.h. attention_tile.h explains why results do not depend on the
// batch, on the chunks of prompts, and on threads.
#pragma once

#include <algorithm>

#include "attention_pieces.h"
#include "attention_softmax.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

// Computes one unit. `next` is probably the following unit of this thread.
template <class Path>
void run_unit(const AttentionArgs& a, const Plan& plan, const Unit& unit, const Unit* next, float* partials) {
  using C = typename Path::Cache;
  const Item& item = plan.items[unit.item];
  const int width = Path::width(a.value_dim), row_tiles = ceil_div(item.num_rows, kLanes);
  const int rows = row_tiles * kLanes, num_heads = item.num_heads();
  const bool by_lanes = num_heads > 1 || (Path::wants_lanes(item.num_rows) && Path::has_lanes(a.head_dim, a.value_dim));
  const size_t own_bytes = sizeof(float) * static_cast<size_t>(rows) * (kSplit + 2 * width + 2) + 512;
  Carver scratch(quire::scratch(Scratch::attention_unit, Path::scratch_bytes(a.head_dim, row_tiles) + own_bytes));
  Path path(a.head_dim, a.value_dim, item.num_rows, scratch);
  float* scores = scratch.take<float>(static_cast<size_t>(rows) * kSplit);
  float* split_values = scratch.take<float>(static_cast<size_t>(rows) * width);
  float* maxima = scratch.take<float>(rows);
  float* sums = scratch.take<float>(rows);
  float* values = scratch.take<float>(static_cast<size_t>(rows) * width);
  const auto state = [&](int t) {
    return TileState{maxima + t * kLanes, sums + t * kLanes, values + t * kLanes * width};
  };
  const auto rows_in = [&](int t) { return std::min(item.num_rows - t * kLanes, kLanes); };

  Pieces<C> pieces(a, plan, unit, next);
  const void* query_rows[kMostRows];
  const auto element_bytes = static_cast<int64_t>(size_of(a.dtype));
  RowCursor cursor(a, item, 0);
  for (int r = 0; r < item.num_rows; ++r, cursor.advance()) {
    const int64_t token = a.cu_seqlens_q[item.sequence] + cursor.token;
    const int64_t element = token * a.q.token_stride + cursor.head * a.q.head_stride;
    query_rows[r] = static_cast<const char*>(a.q.data) + element * element_bytes;
  }
  path.load_queries(query_rows, a.dtype);
  RowLimits limits[kMaxRowTiles];
  for (int t = 0; t < row_tiles; ++t) {
    limits[t] = row_limits(a, item, t * kLanes);
    reset(state(t), rows_in(t), width);
  }

  for (int split = unit.first_split; split < unit.first_split + unit.num_splits; ++split) {
    const int start = split * kSplit;
    Range ranges[kMaxRowTiles];
    for (int t = 0; t < row_tiles; t += Path::kTilesTogether) {
      const int last = std::min(t + Path::kTilesTogether, row_tiles) - 1;
      std::fill(ranges + t, ranges + last + 1, range_in_split(limits[t].min_first, limits[last].max_last, start));
    }
    Prefetcher prefetcher;
    for (int head = 0; head < num_heads; ++head) {
      const Piece<C>& keys = pieces.take(prefetcher);
      if (by_lanes) {
        path.scores_of_lanes(keys.rows(), keys.range, {head * item.head_rows, item.head_rows}, scores, prefetcher);
      } else {
        path.scores(keys.rows(), keys.range, ranges, scores, prefetcher);
      }
      prefetcher.finish();
    }
    TileResult results[kMaxRowTiles];
    for (int t = 0; t < row_tiles; ++t) {
      results[t] = softmax<Path>(scores + static_cast<size_t>(t) * kSplit * kLanes, ranges[t], start, limits[t], a);
    }
    path.arrange_probabilities(scores, ranges);
    for (int head = 0; head < num_heads; ++head) {
      const Piece<C>& of_head = pieces.take(prefetcher);
      if (by_lanes) {
        path.weighted_values_of_lanes(of_head.rows(), of_head.range, {head * item.head_rows, item.head_rows}, scores,
                                      split_values, prefetcher);
      } else {
        path.weighted_values(of_head.rows(), of_head.range, scores, ranges, split_values, prefetcher);
      }
      prefetcher.finish();
    }
    for (int t = 0; t < row_tiles; ++t) {
      const float* tile_values = split_values + t * kLanes * width;
      const bool sees_any = ranges[t].size() > 0;
      if (item.partials < 0) {
        if (sees_any) merge(state(t), results[t], tile_values, rows_in(t), width);
        continue;
      }
      float* partial = partials + item.partials + (split - item.first_split) * partial_size(item, width);
      const TileState tile = partial_tile(partial, t, width);
      store(tile.max, results[t].max);
      store(tile.sum, results[t].sum);
      if (sees_any) {
        std::copy_n(tile_values, rows_in(t) * width, tile.values);
      } else {
        std::fill_n(tile.values, rows_in(t) * width, 0.0f);
      }
    }
  }
  if (item.partials >= 0) return;
  for (int t = 0; t < row_tiles; ++t) write_output<Path>(a, item, t * kLanes, state(t), rows_in(t), width);
}

// Merges the splits of an item that several units computed, in the order of a single unit.
template <class Path>
void merge_item(const AttentionArgs& a, const Item& item, float* partials) {
  const int width = Path::width(a.value_dim);
  Carver scratch(quire::scratch(Scratch::attention_merge, sizeof(float) * kLanes * (width + 2) + 256));
  const TileState state{scratch.take<float>(kLanes), scratch.take<float>(kLanes), scratch.take<float>(kLanes * width)};
  for (int t = 0; t * kLanes < item.num_rows; ++t) {
    const int num_rows = std::min(item.num_rows - t * kLanes, kLanes);
    reset(state, num_rows, width);
    for (int i = 0; i < item.num_splits; ++i) {
      const TileState split = partial_tile(partials + item.partials + i * partial_size(item, width), t, width);
      merge(state, {load(split.max), load(split.sum)}, split.values, num_rows, width);
    }
    write_output<Path>(a, item, t * kLanes, state, num_rows, width);
  }
}

// Computes the units of a plan on all threads.
template <class Path>
void run_units(const AttentionArgs& a, const Plan& plan, float* partials) {
  // Many short units share a task, because the start of a task (tiles, the claim) takes a part of a microsecond.
  constexpr int kTasksPerThread = 8, kMostUnitsPerTask = 8;
  const int num_units = static_cast<int>(plan.units.size()), threads = num_threads();
  const int per_task = std::clamp(num_units / (threads * kTasksPerThread), 1, kMostUnitsPerTask);
  parallel_for(ceil_div(num_units, per_task), [&](int task, int) {
    [[maybe_unused]] const typename Path::Session session;
    const int begin = task * per_task, end = std::min(begin + per_task, num_units);
    for (int i = begin; i < end; ++i) {
      const int next = i + 1;
      run_unit<Path>(a, plan, plan.units[i], next < num_units ? &plan.units[next] : nullptr, partials);
    }
  });
}

template <class Path>
void run_all(const AttentionArgs& a) {
  thread_local Plan plan_memory;
  Plan& plan = plan_memory;
  make_plan<Path>(a, plan);
  auto* partials = static_cast<float*>(quire::scratch(Scratch::attention_partials, sizeof(float) * plan.partials_size));
  run_units<Path>(a, plan, partials);
  parallel_for(static_cast<int>(plan.split_items.size()),
               [&](int task, int) { merge_item<Path>(a, plan.items[plan.split_items[task]], partials); });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
