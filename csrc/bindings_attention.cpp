// Python names of paged attention.
#include <algorithm>
#include <exception>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/attention.h"
#include "quire/round_up.h"
#include "quire/shared_group.h"

namespace quire {
namespace {

constexpr int64_t kMaxSeqLen = (1 << 24) - 1;

// Checks that q has the query tokens of every sequence, that the tables have all positions, and that the cache has all
// blocks that the sequences see. If several ranks share the cache, it has only a part of these blocks.
void check(const AttentionArgs& a, int num_owners = 1) {
  const int32_t* const cu = a.cu_seqlens_q;
  if (cu[0] < 0) refuse("cu_seqlens_q[0] is ", cu[0], ", expected 0 or more");
  const int block_size = a.cache.block_size;
  const int64_t most = std::min(a.blocks_per_table * block_size, kMaxSeqLen);
  for (int s = 0; s < a.num_seqs; ++s) {
    if (cu[s + 1] < cu[s] || cu[s + 1] > a.num_tokens)
      refuse("cu_seqlens_q[", s + 1, "] is ", cu[s + 1], ", expected ", cu[s], " to ", a.num_tokens);
    const int query_len = cu[s + 1] - cu[s], seq_len = a.seq_lens[s];
    if (seq_len < query_len || seq_len > most)
      refuse("seq_lens[", s, "] is ", seq_len, ", expected ", query_len, " to ", most, ": ", query_len,
             " query tokens, ", a.blocks_per_table, " blocks of ", block_size);
    check_indices({"block_tables", s}, a.block_tables.data + s * a.block_tables.stride, ceil_div(seq_len, block_size),
                  a.cache.num_blocks * num_owners, a.rule.first_visible(seq_len - query_len) / block_size);
  }
}

void run(const AttentionArgs& args) {
  check(args);
  const bool has_codes = args.cache.type != CacheType::model;
  (has_codes ? attention_codes_kernels() : attention_kernels()).paged_attention(args);
}
using PagedAttention = CallOf<AttentionArgs, run>;

// The turns of a group. `first_member` is the rank of the group that is owner 0. The ranks after it are the other
// owners.
class GroupTurns final : public Turns {
 public:
  GroupTurns(SharedGroup& group, int first_member) : group_(group), first_member_(first_member) {}
  float* begin() override {
    return or_end([&] { return reinterpret_cast<float*>(group_.begin_turn()); });
  }
  bool end(uint64_t signature, int64_t floats) override {
    return or_end([&] {
      group_.end_turn(signature, floats * static_cast<int64_t>(sizeof(float)));
      return true;
    });
  }
  const float* slot_of(int owner) const override {
    return reinterpret_cast<const float*>(group_.slot_of(first_member_ + owner));
  }
  int64_t slot_floats() const override { return group_.slot_bytes() / static_cast<int64_t>(sizeof(float)); }

  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  template <class Do>
  auto or_end(const Do& act) noexcept -> decltype(act()) {
    try {
      return act();
    } catch (...) {
      error_ = std::current_exception();
      return {};
    }
  }

  SharedGroup& group_;
  int first_member_;
  std::exception_ptr error_;
};

struct GroupAttentionArgs {
  SharedAttentionArgs shared;
  SharedGroup* group;
  int first_member;
};

void run(const GroupAttentionArgs& args) {
  check(args.shared.attention, args.shared.num_owners);
  const bool has_codes = args.shared.attention.cache.type != CacheType::model;
  GroupTurns turns(*args.group, args.first_member);
  (has_codes ? attention_codes_kernels() : attention_kernels()).shared_attention(args.shared, turns);
  turns.rethrow();
}
using SharedAttention = CallOf<GroupAttentionArgs, run>;

AttentionArgs arguments(const TensorView& q, const KvCache& cache, const TensorView& block_tables,
                        const TensorView& seq_lens, const TensorView& cu_seqlens_q, const AttentionRule& rule,
                        const TensorView& sinks, const TensorView& out, int first_result) {
  return {.dtype = q.dtype(),
          .q = q.heads<const void>(),
          .cache = cache,
          .block_tables = block_tables.rows<const int32_t>(),
          .blocks_per_table = block_tables.size(1),
          .seq_lens = seq_lens.data<const int32_t>(),
          .cu_seqlens_q = cu_seqlens_q.data<const int32_t>(),
          .num_tokens = static_cast<int>(q.size(0)),
          .num_seqs = static_cast<int>(seq_lens.size(0)),
          .num_q_heads = static_cast<int>(q.size(1)),
          .head_dim = static_cast<int>(q.size(2)),
          .value_dim = static_cast<int>(out.size(2)),
          .rule = rule,
          .sinks = sinks.data<const void>(),
          .out = out.heads<void>(),
          .first_result = first_result,
          .num_results = static_cast<int>(out.size(1))};
}

}  // namespace

void bind_attention(nanobind::module_& m) {
  bind_struct<AttentionRule>(
      m, "AttentionRule",
      [](AttentionRule* self, float scale, int sliding_window, float soft_cap, int chunk) {
        new (self)
            AttentionRule{.scale = scale, .sliding_window = sliding_window, .soft_cap = soft_cap, .chunk = chunk};
      },
      "scale"_a, "sliding_window"_a, "soft_cap"_a, "chunk"_a);
  bind_struct<PagedAttention, KernelCall>(
      m, "PagedAttention",
      [](PagedAttention* self, TensorView q, const KvCache& cache, TensorView block_tables, TensorView seq_lens,
         TensorView cu_seqlens_q, const AttentionRule& rule, TensorView sinks, TensorView out) {
        new (self) PagedAttention(arguments(q, cache, block_tables, seq_lens, cu_seqlens_q, rule, sinks, out, 0));
      },
      "q"_a, "cache"_a, "block_tables"_a, "seq_lens"_a, "cu_seqlens_q"_a, "rule"_a, "sinks"_a.none(), "out"_a);
  bind_struct<SharedAttention, KernelCall>(
      m, "SharedAttention",
      [](SharedAttention* self, SharedGroup* group, TensorView q, const KvCache& cache, TensorView block_tables,
         TensorView seq_lens, TensorView cu_seqlens_q, const AttentionRule& rule, TensorView sinks, TensorView out,
         int first_result, int num_owners, int owner, int first_member) {
        if (cache.num_kv_heads != 1 || cache.block_size % kAttentionRange != 0)
          refuse("the cache has ", cache.num_kv_heads, " heads and blocks of ", cache.block_size,
                 " positions, expected one head and a multiple of ", kAttentionRange);
        if (num_owners < 1 || owner < 0 || owner >= num_owners || first_member < 0 ||
            first_member + num_owners > group->size())
          refuse("owner ", owner, " of ", num_owners, " from rank ", first_member, " on, expected owners among ",
                 group->size(), " ranks");
        if (first_result < 0 || first_result + out.size(1) > q.size(1))
          refuse("results from head ", first_result, " on, expected ", out.size(1), " of ", q.size(1), " heads");
        const int64_t most_floats = kMostAttentionRows * (out.size(2) + kAttentionPadding + 2);
        if (group->slot_bytes() < most_floats * static_cast<int64_t>(sizeof(float)))
          refuse("slots have ", group->slot_bytes(), " bytes, expected ", most_floats * sizeof(float), " or more");
        const AttentionArgs attention =
            arguments(q, cache, block_tables, seq_lens, cu_seqlens_q, rule, sinks, out, first_result);
        new (self) SharedAttention({.shared = {.attention = attention, .num_owners = num_owners, .owner = owner},
                                    .group = group,
                                    .first_member = first_member});
      },
      "group"_a, "q"_a, "cache"_a, "block_tables"_a, "seq_lens"_a, "cu_seqlens_q"_a, "rule"_a, "sinks"_a.none(),
      "out"_a, "first_result"_a, "num_owners"_a, "owner"_a, "first_member"_a);
}

}  // namespace quire
