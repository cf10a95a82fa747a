// Paged attention: softmax, the merge of KV splits, and how the work is dealt to threads. The products are in
// attention_f32.h and attention_bf16.h, the reason why results do not depend on batch, chunk and threads in
// attention_tile.h.
//
// Online softmax: Milakov and Gimelshein, arXiv 1805.02867; splits merged by their maxima and sums: FlashDecoding.
#include "quire/kernels/attention.h"

#include <algorithm>
#include <cfloat>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention_bf16.h"
#include "attention_f32.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Query rows of one sequence, lying side by side in the lanes of the row tiles. Row r of a KV head is token r / group
// and head r % group of the query tokens of the sequence. Where the rows of a KV head are few (decode), one tile takes
// all rows of several KV heads: the first `head_rows` lanes belong to kv_head, the next to the KV head behind it.
struct Item {
  int sequence, kv_head;
  int first_row, num_rows;
  int head_rows;                      // num_rows where there is one KV head
  int first_position, last_position;  // that its rows see
  int first_split, num_splits;
  int64_t partials;  // offset of the results of the splits in shared memory, in floats; -1 = the item is one unit

  int num_heads() const { return num_rows / head_rows; }
};

// A run of splits of an item: what one task does.
struct Unit {
  int item, first_split, num_splits;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Unit> units;
  std::vector<int> split_items;  // items whose splits are dealt to several units
  int64_t partials_size = 0;     // floats
};

// Which positions a row may see, for the lanes of one row tile; lanes without a row see nothing.
struct RowLimits {
  alignas(64) float first[kLanes], last[kLanes];
  int min_first, max_first, min_last, max_last;

  bool all_visible(int begin, int end) const { return begin >= max_first && end - 1 <= min_last; }
};

int first_visible(const AttentionArgs& a, int position) {
  return a.sliding_window > 0 ? std::max(position - a.sliding_window + 1, 0) : 0;
}

int query_group(const AttentionArgs& a) { return a.num_q_heads / a.num_kv_heads; }

int first_query_position(const AttentionArgs& a, int sequence) {
  return a.seq_lens[sequence] - (a.cu_seqlens_q[sequence + 1] - a.cu_seqlens_q[sequence]);
}

// Walks over the rows of an item: consecutive heads of a group, then the next token, then the next KV head.
class RowCursor {
 public:
  int token, head;  // the token within the sequence's query, the query head
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

RowLimits row_limits(const AttentionArgs& a, const Item& item, int first_row) {
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

// The positions of a split, relative to its start, that lie in [first, last], widened to whole steps.
Range range_in_split(int first, int last, int start) {
  return {std::clamp(first - start, 0, kSplit) / kStep * kStep,
          round_up(std::clamp(last + 1 - start, 0, kSplit), kStep)};
}

// State of the online softmax of one row tile: maximum score times log2(e), sum of the probabilities relative to it,
// and the values weighted with them, [lane][width].
struct TileState {
  float *max, *sum, *values;
};

struct TileResult {
  F32 max, sum;
};

// Turns the scores of one row tile into probabilities relative to the tile's own maximum.
template <class Path>
TileResult softmax(float* scores, Range range, int start, const RowLimits& limits, const AttentionArgs& a) {
  const F32 cap = broadcast(a.soft_cap), cap_scale = broadcast(a.soft_cap > 0 ? a.scale / a.soft_cap : 0.0f);
  const F32 first = load(limits.first), last = load(limits.last), minus_infinity = broadcast(-kInfinity);
  F32 max0 = minus_infinity, max1 = minus_infinity;
  for (int p = range.begin; p < range.end; p += kTile) {
    float* block = scores + p * kLanes;
    if (a.soft_cap > 0) {
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
  const F32 scale = broadcast(a.soft_cap > 0 ? kLog2E : a.scale * kLog2E);
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

// Adds the result of one split to the state. A split in which a row sees nothing (max -infinity) leaves it as it is.
void merge(const TileState& state, TileResult split, const float* values, int num_rows, int width) {
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
    const F32 k = broadcast(keep[r]), x = broadcast(add[r]);
    float* row = state.values + r * width;
    for (int e = 0; e < width; e += kLanes) store(row + e, fma(load(values + r * width + e), x, load(row + e) * k));
  }
}

void reset(const TileState& state, int num_rows, int width) {
  store(state.max, broadcast(-kInfinity));
  store(state.sum, zero());
  std::fill_n(state.values, static_cast<size_t>(num_rows) * width, 0.0f);
}

template <class Path>
void write_output(const AttentionArgs& a, const Item& item, int first_row, const TileState& state, int num_rows,
                  int width) {
  using T = typename Path::Cache;
  RowCursor row(a, item, first_row);
  for (int i = 0; i < num_rows; ++i, row.advance()) {
    const int64_t token = a.cu_seqlens_q[item.sequence] + row.token;
    T* out = static_cast<T*>(a.out) + token * a.out_token_stride + row.head * a.out_head_stride;
    Path::write_row(out, state.values + i * width, broadcast(1.0f / state.sum[i]), a.head_dim);
  }
}

// Floats that the result of one split of an item takes: per row tile maxima, sums, and the rows of values.
int64_t partial_size(const Item& item, int width) {
  return round_up(item.num_rows, kLanes) * 2 + static_cast<int64_t>(item.num_rows) * width;
}

TileState partial_tile(float* partial, int row_tile, int width) {
  float* tile = partial + row_tile * (2 * kLanes + kLanes * width);
  return {tile, tile + kLanes, tile + 2 * kLanes};
}

// Addresses of the keys or the values of one KV head at the positions of one split that the rows of an item see.
template <class T>
struct Piece {
  Range range;
  const T* rows[kSplit];

  void fill(const AttentionArgs& a, const Item& item, int split, int head, bool values) {
    const int start = split * kSplit;
    range = range_in_split(item.first_position, item.last_position, start);
    const int64_t kv_head = item.kv_head + head;
    if (values) {
      fill(static_cast<const T*>(a.v_cache) + kv_head * a.v_head_stride, a.v_block_stride, a, item, start);
    } else {
      fill(static_cast<const T*>(a.k_cache) + kv_head * a.k_head_stride, a.k_block_stride, a, item, start);
    }
  }

 private:
  // What lies behind the sequence reads as zeros, since its slots may hold anything.
  void fill(const T* head, int64_t block_stride, const AttentionArgs& a, const Item& item, int start) {
    alignas(64) static const T zeros[kMaxHeadDim] = {};
    const int end = std::min(range.end, a.seq_lens[item.sequence] - start);
    const int32_t* block = a.block_tables + item.sequence * a.block_table_stride + (start + range.begin) / a.block_size;
    int p = range.begin, offset = (start + p) % a.block_size;
    for (; p < end; ++block, offset = 0) {
      const int run_end = std::min(p + a.block_size - offset, end);
      const T* row = head + *block * block_stride + static_cast<int64_t>(offset) * a.head_dim;
      for (; p < run_end; ++p, row += a.head_dim) rows[p] = row;
    }
    for (; p < range.end; ++p) rows[p] = zeros;
  }
};

// The pieces of a unit in the order of their use: for each split the keys of all its KV heads, then their values. While
// one is worked on, the following one is fetched; behind the last one it is the first of `next`.
template <class T>
class Pieces {
 public:
  Pieces(const AttentionArgs& a, const Plan& plan, const Unit& unit, const Unit* next)
      : a_(a), plan_(plan), unit_(unit), next_(next), heads_(plan.items[unit.item].num_heads()) {
    pieces_[0].fill(a, plan.items[unit.item], unit.first_split, 0, false);
  }

  const Piece<T>& take(Prefetcher& prefetcher) {
    const Piece<T>& now = pieces_[index_ % 2];
    Piece<T>& then = pieces_[++index_ % 2];
    const int split = index_ / (2 * heads_), part = index_ % (2 * heads_);
    if (split < unit_.num_splits) {
      then.fill(a_, plan_.items[unit_.item], unit_.first_split + split, part % heads_, part >= heads_);
    } else if (next_ != nullptr) {
      then.fill(a_, plan_.items[next_->item], next_->first_split, 0, false);
    } else {
      return now;
    }
    prefetcher.start(reinterpret_cast<const void* const*>(then.rows), then.range,
                     a_.head_dim * static_cast<int>(sizeof(T)));
    return now;
  }

 private:
  const AttentionArgs& a_;
  const Plan& plan_;
  const Unit& unit_;
  const Unit* next_;
  int heads_, index_ = 0;
  Piece<T> pieces_[2];
};

// One unit of work. `next` is what this thread will probably do after it.
template <class Path>
void run_unit(const AttentionArgs& a, const Plan& plan, const Unit& unit, const Unit* next, float* partials) {
  using T = typename Path::Cache;
  const Item& item = plan.items[unit.item];
  const int width = Path::width(a.head_dim), row_tiles = (item.num_rows + kLanes - 1) / kLanes;
  const int rows = row_tiles * kLanes, num_heads = item.num_heads();
  const bool by_lanes = num_heads > 1 || (Path::wants_lanes(item.num_rows) && Path::has_lanes(a.head_dim));
  const size_t own_bytes = sizeof(float) * static_cast<size_t>(rows) * (kSplit + 2 * width + 2) + 512;
  Carver scratch(quire::scratch(Scratch::attention_unit, Path::scratch_bytes(a.head_dim, row_tiles) + own_bytes));
  Path path(a.head_dim, item.num_rows, scratch);
  float* scores = scratch.take<float>(static_cast<size_t>(rows) * kSplit);
  float* split_values = scratch.take<float>(static_cast<size_t>(rows) * width);
  float* maxima = scratch.take<float>(rows);
  float* sums = scratch.take<float>(rows);
  float* values = scratch.take<float>(static_cast<size_t>(rows) * width);
  const auto state = [&](int t) {
    return TileState{maxima + t * kLanes, sums + t * kLanes, values + t * kLanes * width};
  };
  const auto rows_in = [&](int t) { return std::min(item.num_rows - t * kLanes, kLanes); };

  Pieces<T> pieces(a, plan, unit, next);
  const T* query_rows[kMostRows];
  RowCursor cursor(a, item, 0);
  for (int r = 0; r < item.num_rows; ++r, cursor.advance()) {
    const int64_t token = a.cu_seqlens_q[item.sequence] + cursor.token;
    query_rows[r] = static_cast<const T*>(a.q) + token * a.q_token_stride + cursor.head * a.q_head_stride;
  }
  path.load_queries(query_rows);
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
      const Piece<T>& keys = pieces.take(prefetcher);
      if (by_lanes) {
        path.scores_of_lanes(keys.rows, keys.range, {head * item.head_rows, item.head_rows}, scores, prefetcher);
      } else {
        path.scores(keys.rows, keys.range, ranges, scores, prefetcher);
      }
      prefetcher.finish();
    }
    TileResult results[kMaxRowTiles];
    for (int t = 0; t < row_tiles; ++t) {
      results[t] = softmax<Path>(scores + static_cast<size_t>(t) * kSplit * kLanes, ranges[t], start, limits[t], a);
    }
    path.arrange_probabilities(scores, ranges);
    for (int head = 0; head < num_heads; ++head) {
      const Piece<T>& of_head = pieces.take(prefetcher);
      if (by_lanes) {
        path.weighted_values_of_lanes(of_head.rows, of_head.range, {head * item.head_rows, item.head_rows}, scores,
                                      split_values, prefetcher);
      } else {
        path.weighted_values(of_head.rows, of_head.range, scores, ranges, split_values, prefetcher);
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

// Merges the splits of an item that several units computed, in the order in which one unit would have.
template <class Path>
void merge_item(const AttentionArgs& a, const Item& item, float* partials) {
  const int width = Path::width(a.head_dim);
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

// Rows per item: as many as max_rows, so that keys and values are read rarely, but no fewer items than keep all threads
// busy.
int choose_rows(const AttentionArgs& a, int max_rows, int wanted_items) {
  const int group = query_group(a);
  int rows = max_rows;
  for (; rows > 16; rows /= 2) {
    int64_t items = 0;
    for (int s = 0; s < a.num_seqs; ++s) {
      items += (static_cast<int64_t>(a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s]) * group + rows - 1) / rows;
    }
    if (items * a.num_kv_heads >= wanted_items) break;
  }
  return rows;
}

// KV heads per item of a sequence with few query rows: as many as fit into a row tile, but no more than `most`.
int heads_together(const AttentionArgs& a, int head_rows, int most) {
  return std::clamp(kLanes / head_rows, 1, std::min(most, a.num_kv_heads));
}

// The most KV heads to take together so that there is work for all threads.
int choose_heads(const AttentionArgs& a, int wanted_units) {
  const int group = query_group(a);
  int most = kLanes;
  for (; most > 1; most /= 2) {
    int64_t units = 0;
    for (int s = 0; s < a.num_seqs && units < wanted_units; ++s) {
      const int tokens = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s];
      if (tokens == 0) continue;
      const int heads = heads_together(a, tokens * group, most), offset = first_query_position(a, s);
      const int splits = a.seq_lens[s] / kSplit + 1 - first_visible(a, offset) / kSplit;
      units += static_cast<int64_t>(splits) * ((a.num_kv_heads + heads - 1) / heads);
    }
    if (units >= wanted_units) break;
  }
  return most;
}

template <class Path>
void make_plan(const AttentionArgs& a, Plan& plan) {
  constexpr int64_t kMaxPartials = 16 << 20;  // floats
  constexpr int kUnitsPerThread = 4;
  const int threads = num_threads(), wanted = threads > 1 ? threads * kUnitsPerThread : 1;
  const int group = query_group(a), max_rows = choose_rows(a, Path::kMaxRows, wanted);
  const int width = Path::width(a.head_dim), most_heads = Path::has_lanes(a.head_dim) ? choose_heads(a, wanted) : 1;
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
      for (int g = 0; g < a.num_kv_heads; g += heads) {
        Item item{s, g, row, head_rows * std::min(heads, a.num_kv_heads - g), head_rows, 0, 0, 0, 0, -1};
        item.first_position = first_visible(a, offset + row / group);
        item.last_position = offset + (row + head_rows - 1) / group;
        item.first_split = item.first_position / kSplit;
        item.num_splits = item.last_position / kSplit + 1 - item.first_split;
        total_splits += item.num_splits;
        plan.items.push_back(item);
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
  // The long ones first, so that no thread starts one when the others are done.
  constexpr int kRowsOfOneHead = 32;  // reading the keys and values of a head costs as much as so many rows
  const auto cost = [&](const Unit& u) {
    const Item& item = plan.items[u.item];
    return u.num_splits * std::max(item.num_rows, item.num_heads() * kRowsOfOneHead);
  };
  const auto longer = [&](const Unit& x, const Unit& y) { return cost(x) > cost(y); };
  if (threads > 1 && !std::is_sorted(plan.units.begin(), plan.units.end(), longer)) {
    std::sort(plan.units.begin(), plan.units.end(), longer);
  }
}

template <class Path>
void run_all(const AttentionArgs& a) {
  thread_local Plan plan_memory;
  Plan& plan = plan_memory;
  make_plan<Path>(a, plan);
  auto* partials = static_cast<float*>(quire::scratch(Scratch::attention_partials, sizeof(float) * plan.partials_size));
  // Many short units share a task: starting one (tiles, the claim) costs a part of a microsecond.
  constexpr int kTasksPerThread = 8, kMostUnitsPerTask = 8;
  const int num_units = static_cast<int>(plan.units.size()), threads = num_threads();
  const int per_task = std::clamp(num_units / (threads * kTasksPerThread), 1, kMostUnitsPerTask);
  parallel_for((num_units + per_task - 1) / per_task, [&](int task, int) {
    [[maybe_unused]] const typename Path::Session session;
    const int begin = task * per_task, end = std::min(begin + per_task, num_units);
    for (int i = begin; i < end; ++i) {
      const int next = i + 1 < end ? i + 1 : begin + threads * per_task;
      run_unit<Path>(a, plan, plan.units[i], next < num_units ? &plan.units[next] : nullptr, partials);
    }
  });
  parallel_for(static_cast<int>(plan.split_items.size()),
               [&](int task, int) { merge_item<Path>(a, plan.items[plan.split_items[task]], partials); });
}

void paged_attention(const AttentionArgs& a) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  using PathForBf16 = Bf16Path;
#else
  using PathForBf16 = F32Path<bf16>;
#endif
  switch (a.dtype) {
    case DType::f32:
      return run_all<F32Path<float>>(a);
    case DType::bf16:
      return run_all<PathForBf16>(a);
    case DType::f16:
      return run_all<F32Path<f16>>(a);
  }
}

}  // namespace

extern const AttentionKernels attention_table;
const AttentionKernels attention_table = {paged_attention};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(AttentionKernels, attention_kernels, attention_table)
