// Attention of ranks that share the pages of one cache, for one arithmetic path.
//
// A rank writes the partial results of its ranges into its slot of a turn of the group, and then reads the results of
// its own heads from all slots. Work that exceeds a slot takes several turns. All ranks derive the same turns from the
// lengths and tables that they share. Partial results are joined in the order of the ranges, as merge_item does, so the
// bits are those of one rank.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "attention_run.h"
#include "quire/shared_group.h"

namespace quire::QUIRE_ISA {
namespace {

// One range of an item. `item` is cut to this range, and its `partials` is the offset in the owner's slot.
struct Part {
  Item item;
  int owner;
  bool is_first, is_last;  // whether it is the first or the last of the item's ranges
};

// The consecutive parts of one item in a turn.
struct Joint {
  int begin, end;
  int state;  // which state is kept between turns; -1: the turn has all parts of the item
};

// The memory of a call. It is kept for the next call.
struct SharedWork {
  Plan own;  // items and units of this rank in a turn
  std::vector<Part> parts;
  std::vector<Joint> joints;
};

template <class Path>
class SharedRun {
 public:
  // `a` has the block tables with this rank's numbers of its pages.
  SharedRun(const SharedAttentionArgs& shared, const AttentionArgs& a, Turns& turns, SharedWork& work)
      : shared_(shared),
        a_(a),
        turns_(turns),
        work_(work),
        width_(Path::width(a.value_dim)),
        state_floats_(static_cast<int64_t>(kMostRows) * (width_ + 2)),
        states_(static_cast<float*>(
            quire::scratch(Scratch::attention_states, sizeof(float) * 2 * static_cast<size_t>(state_floats_)))) {
    clear();
  }

  void run() {
    const int group = query_group(a_);
    for (int s = 0; s < a_.num_seqs; ++s) {
      const int rows = (a_.cu_seqlens_q[s + 1] - a_.cu_seqlens_q[s]) * group, offset = first_query_position(a_, s);
      for (int row = 0; row < rows; row += Path::kMaxRows) {
        const int num_rows = std::min(Path::kMaxRows, rows - row);
        Item item{.sequence = s,
                  .kv_head = 0,
                  .first_row = row,
                  .num_rows = num_rows,
                  .head_rows = num_rows,
                  .first_position = first_visible(a_, offset + row / group),
                  .last_position = offset + (row + num_rows - 1) / group,
                  .first_split = 0,
                  .num_splits = 1,
                  .partials = 0};
        const int first = item.first_position / kSplit, last = item.last_position / kSplit;
        for (item.first_split = first; item.first_split <= last; ++item.first_split) {
          if (!add(item, first, last)) return;
        }
      }
    }
    if (!work_.parts.empty()) turn();
  }

 private:
  // Adds the ranges [first, last) of an item. False: a turn has failed, and the call ends.
  bool add(Item item, int first, int last) {
    const auto& tables = shared_.attention.block_tables;
    const int32_t page = tables.data[item.sequence * tables.stride + item.first_split * kSplit / a_.cache.block_size];
    const int owner = page % shared_.num_owners;
    const int64_t size = partial_size(item, width_);
    if (filled_[owner] + size > turns_.slot_floats() && !turn()) return false;
    item.partials = filled_[owner];
    filled_[owner] += size;
    work_.parts.push_back({item, owner, item.first_split == first, item.first_split == last});
    if (owner == shared_.owner) {
      work_.own.units.push_back({static_cast<int>(work_.own.items.size()), item.first_split, 1});
      work_.own.items.push_back(item);
    }
    return true;
  }

  void clear() {
    work_.own.items.clear();
    work_.own.units.clear();
    work_.parts.clear();
    work_.joints.clear();
    filled_.fill(0);
  }

  bool turn() {
    float* const slot = turns_.begin();
    if (slot == nullptr) return false;
    run_units<Path>(a_, work_.own, slot);
    if (!turns_.end(kSignature + work_.parts.size(), filled_[shared_.owner])) return false;
    find_joints();
    parallel_for(static_cast<int>(work_.joints.size()), [&](int task, int) { join(work_.joints[task]); });
    clear();
    return true;
  }

  void find_joints() {
    const std::vector<Part>& parts = work_.parts;
    const int count = static_cast<int>(parts.size());
    for (int begin = 0, end = 0; begin < count; begin = end) {
      while (end < count && !parts[end].is_last) ++end;
      end = std::min(end + 1, count);
      const bool begins = parts[begin].is_first, ends = parts[end - 1].is_last;
      if (begins && !ends) state_ = 1 - state_;  // the other state may belong to the item that ends in this turn
      work_.joints.push_back({begin, end, begins && ends ? -1 : state_});
    }
  }

  void join(const Joint& joint) {
    const Part &first = work_.parts[joint.begin], &last = work_.parts[joint.end - 1];
    const Item& item = first.item;
    float* const state_memory =
        joint.state >= 0 ? states_ + joint.state * state_floats_
                         : static_cast<float*>(quire::scratch(Scratch::attention_merge,
                                                              sizeof(float) * static_cast<size_t>(state_floats_)));
    for (int t = 0; t * kLanes < item.num_rows; ++t) {
      const int num_rows = std::min(item.num_rows - t * kLanes, kLanes);
      const TileState state = partial_tile(state_memory, t, width_);
      if (first.is_first) reset(state, num_rows, width_);
      bool is_own[kLanes];
      RowCursor row(a_, item, t * kLanes);
      for (int r = 0; r < num_rows; ++r, row.advance()) is_own[r] = has_result(a_, row.head);
      for (int p = joint.begin; p < joint.end; ++p) {
        const Part& part = work_.parts[p];
        auto* const slot = const_cast<float*>(turns_.slot_of(part.owner));  // the slot is only read
        const TileState range = partial_tile(slot + part.item.partials, t, width_);
        merge(state, {load(range.max), load(range.sum)}, range.values, num_rows, width_,
              [&](int r) { return is_own[r]; });
      }
      if (last.is_last) write_output<Path>(a_, item, t * kLanes, state, num_rows, width_);
    }
  }

  static constexpr uint64_t kSignature = uint64_t{0xa77e} << 48;

  const SharedAttentionArgs& shared_;
  const AttentionArgs& a_;
  Turns& turns_;
  SharedWork& work_;
  int width_;
  int64_t state_floats_;
  float* states_;  // the states of two items that turns cut
  int state_ = 0;
  std::array<int64_t, kMaxRanks> filled_;  // floats of the owners' slots
};

template <class Path>
void run_shared(const SharedAttentionArgs& shared, Turns& turns) {
  thread_local SharedWork work;
  AttentionArgs a = shared.attention;
  const int64_t stride = a.blocks_per_table;
  auto* const tables = static_cast<int32_t*>(
      quire::scratch(Scratch::attention_tables, sizeof(int32_t) * static_cast<size_t>(a.num_seqs * stride)));
  for (int s = 0; s < a.num_seqs; ++s) {
    const int32_t* const pages = a.block_tables.data + s * a.block_tables.stride;
    // Entries for pages of other ranks become meaningless, but they are not read.
    for (int64_t b = 0; b < stride; ++b) tables[s * stride + b] = pages[b] / shared.num_owners;
  }
  a.block_tables = {tables, stride};
  SharedRun<Path>(shared, a, turns, work).run();
}

}  // namespace
}  // namespace quire::QUIRE_ISA
