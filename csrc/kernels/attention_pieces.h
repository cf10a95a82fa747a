// The addresses of the keys and values of a unit, piece by piece. The next piece is prefetched.
#pragma once

#include <algorithm>

#include "attention_plan.h"

namespace quire::QUIRE_ISA {
namespace {

// The positions of a split in [first, last], relative to its start and widened to whole steps.
inline Range range_in_split(int first, int last, int start) {
  return {std::clamp(first - start, 0, kSplit) / kStep * kStep,
          round_up(std::clamp(last + 1 - start, 0, kSplit), kStep)};
}

// The keys or the values of one KV head, at those positions of one split that the rows of an item see.
template <class C>
class Piece {
 public:
  Range range;

  void fill(const AttentionArgs& a, const Item& item, int split, int head, bool values) {
    const int start = split * kSplit;
    range = range_in_split(item.first_position, item.last_position, start);
    const KvCache& cache = a.cache;
    if (values) {
      fill(a, cache.v, cache.v_scales, item, item.kv_head + head, start);
    } else {
      fill(a, cache.k, cache.k_scales, item, item.kv_head + head, start);
    }
  }
  Rows<C> rows() const { return {rows_, scales_}; }
  const void* const* addresses() const { return reinterpret_cast<const void* const*>(rows_); }

 private:
  // Slots before the first position that the rows see, and slots after the end of the sequence, are read as zeros. They
  // may hold any data, and the table may have no block for them.
  void fill(const AttentionArgs& a, const StridedBlocks<void>& source, const StridedBlocks<float>& scales,
            const Item& item, int64_t kv_head, int start) {
    alignas(64) static const C zeros[kMaxHeadDim] = {};
    const C* head = static_cast<const C*>(source.data) + kv_head * source.head_stride;
    const int end = std::min(range.end, a.seq_lens[item.sequence] - start);
    const int begin = std::max(range.begin, item.first_position - start), block_size = a.cache.block_size;
    for (int p = range.begin; p < begin; ++p) rows_[p] = zeros;
    if constexpr (Rows<C>::kHasScales) std::fill(scales_ + range.begin, scales_ + begin, 0.0f);
    const int32_t* block = a.block_tables.data + item.sequence * a.block_tables.stride + (start + begin) / block_size;
    int p = begin, offset = (start + p) % block_size;
    for (; p < end; ++block, offset = 0) {
      const int run_end = std::min(p + block_size - offset, end);
      const C* row = head + *block * source.block_stride + static_cast<int64_t>(offset) * a.head_dim;
      if constexpr (Rows<C>::kHasScales) {
        const float* from = scales.data + *block * scales.block_stride + kv_head * scales.head_stride + offset;
        std::copy_n(from, run_end - p, scales_ + p);
      }
      for (; p < run_end; ++p, row += a.head_dim) rows_[p] = row;
    }
    if constexpr (Rows<C>::kHasScales) std::fill(scales_ + p, scales_ + range.end, 0.0f);
    for (; p < range.end; ++p) rows_[p] = zeros;
  }

  const C* rows_[kSplit];
  float scales_[Rows<C>::kHasScales ? kSplit : 1];
};

// The pieces of a unit in the order of use: for each split, the keys of all its KV heads and then their values. During
// the work on a piece, the following piece is prefetched. After the last piece, it is the first piece of `next`.
template <class C>
class Pieces {
 public:
  Pieces(const AttentionArgs& a, const Plan& plan, const Unit& unit, const Unit* next)
      : a_(a), plan_(plan), unit_(unit), next_(next), heads_(plan.items[unit.item].num_heads()) {
    pieces_[0].fill(a, plan.items[unit.item], unit.first_split, 0, false);
  }

  const Piece<C>& take(Prefetcher& prefetcher) {
    const Piece<C>& now = pieces_[index_ % 2];
    Piece<C>& then = pieces_[++index_ % 2];
    const int split = index_ / (2 * heads_), part = index_ % (2 * heads_);
    if (split < unit_.num_splits) {
      then.fill(a_, plan_.items[unit_.item], unit_.first_split + split, part % heads_, part >= heads_);
    } else if (next_ != nullptr) {
      then.fill(a_, plan_.items[next_->item], next_->first_split, 0, false);
    } else {
      return now;
    }
    // If values are beginnings of keys, they have just been used as keys, so they are in the caches.
    const bool is_near = split < unit_.num_splits && part >= heads_ && a_.cache.v.data == a_.cache.k.data;
    if (!is_near) {
      prefetcher.start(then.addresses(), then.range, now.addresses(), now.range,
                       a_.head_dim * static_cast<int>(sizeof(C)));
    }
    return now;
  }

 private:
  const AttentionArgs& a_;
  const Plan& plan_;
  const Unit& unit_;
  const Unit* next_;
  int heads_, index_ = 0;
  Piece<C> pieces_[2];
};

}  // namespace
}  // namespace quire::QUIRE_ISA
