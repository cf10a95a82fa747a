// Python names of paged attention.
#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "bindings.h"
#include "checks.h"
#include "quire/kernels/attention.h"
#include "quire/round_up.h"

namespace nb = nanobind;

namespace quire {
namespace {

constexpr int64_t kMaxSeqLen = (1 << 24) - 1;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Every sequence has its query tokens in q, its positions in its table, and the blocks that it sees in the cache.
void check(const AttentionArgs& a) {
  const int32_t* const cu = a.cu_seqlens_q;
  if (cu[0] < 0) refuse("cu_seqlens_q[0] is ", cu[0], ", expected 0 or more");
  const int64_t most = std::min(a.blocks_per_table * a.block_size, kMaxSeqLen);
  for (int s = 0; s < a.num_seqs; ++s) {
    if (cu[s + 1] < cu[s] || cu[s + 1] > a.num_tokens)
      refuse("cu_seqlens_q[", s + 1, "] is ", cu[s + 1], ", expected ", cu[s], " to ", a.num_tokens);
    const int query_len = cu[s + 1] - cu[s], seq_len = a.seq_lens[s];
    if (seq_len < query_len || seq_len > most)
      refuse("seq_lens[", s, "] is ", seq_len, ", expected ", query_len, " to ", most, ": ", query_len,
             " query tokens, ", a.blocks_per_table, " blocks of ", a.block_size);
    const int first = a.sliding_window > 0 ? std::max(seq_len - query_len - a.sliding_window + 1, 0) : 0;
    const int first_block = first / a.block_size;
    check_indices({"block_tables", s}, a.block_tables + s * a.block_table_stride, ceil_div(seq_len, a.block_size),
                  a.num_blocks, first_block);
  }
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def(
      "paged_attention",
      [](int dtype, int cache_type, uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, uintptr_t k_cache,
         int64_t k_block_stride, int64_t k_head_stride, uintptr_t v_cache, int64_t v_block_stride,
         int64_t v_head_stride, uintptr_t k_scales, uintptr_t v_scales, int64_t scales_block_stride, int64_t num_blocks,
         uintptr_t block_tables, int64_t block_table_stride, int64_t blocks_per_table, uintptr_t seq_lens,
         uintptr_t cu_seqlens_q, int num_tokens, int num_seqs, int num_q_heads, int num_kv_heads, int head_dim,
         int block_size, float scale, int sliding_window, float soft_cap, uintptr_t out, int64_t out_token_stride,
         int64_t out_head_stride) {
        const bool has_codes = static_cast<CacheType>(cache_type) != CacheType::model;
        const AttentionKernels& kernels = has_codes ? attention_codes_kernels() : attention_kernels();
        const AttentionArgs args = {.dtype = static_cast<DType>(dtype),
                                    .cache_type = static_cast<CacheType>(cache_type),
                                    .q = pointer<const void>(q),
                                    .q_token_stride = q_token_stride,
                                    .q_head_stride = q_head_stride,
                                    .k_cache = pointer<const void>(k_cache),
                                    .k_block_stride = k_block_stride,
                                    .k_head_stride = k_head_stride,
                                    .v_cache = pointer<const void>(v_cache),
                                    .v_block_stride = v_block_stride,
                                    .v_head_stride = v_head_stride,
                                    .k_scales = pointer<const float>(k_scales),
                                    .v_scales = pointer<const float>(v_scales),
                                    .scales_block_stride = scales_block_stride,
                                    .num_blocks = num_blocks,
                                    .block_tables = pointer<const int32_t>(block_tables),
                                    .block_table_stride = block_table_stride,
                                    .blocks_per_table = blocks_per_table,
                                    .seq_lens = pointer<const int32_t>(seq_lens),
                                    .cu_seqlens_q = pointer<const int32_t>(cu_seqlens_q),
                                    .num_tokens = num_tokens,
                                    .num_seqs = num_seqs,
                                    .num_q_heads = num_q_heads,
                                    .num_kv_heads = num_kv_heads,
                                    .head_dim = head_dim,
                                    .block_size = block_size,
                                    .scale = scale,
                                    .sliding_window = sliding_window,
                                    .soft_cap = soft_cap,
                                    .out = pointer<void>(out),
                                    .out_token_stride = out_token_stride,
                                    .out_head_stride = out_head_stride};
        check(args);
        kernels.paged_attention(args);
      },
      nb::arg("dtype"), nb::arg("cache_type"), nb::arg("q"), nb::arg("q_token_stride"), nb::arg("q_head_stride"),
      nb::arg("k_cache"), nb::arg("k_block_stride"), nb::arg("k_head_stride"), nb::arg("v_cache"),
      nb::arg("v_block_stride"), nb::arg("v_head_stride"), nb::arg("k_scales"), nb::arg("v_scales"),
      nb::arg("scales_block_stride"), nb::arg("num_blocks"), nb::arg("block_tables"), nb::arg("block_table_stride"),
      nb::arg("blocks_per_table"), nb::arg("seq_lens"), nb::arg("cu_seqlens_q"), nb::arg("num_tokens"),
      nb::arg("num_seqs"), nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("block_size"),
      nb::arg("scale"), nb::arg("sliding_window"), nb::arg("soft_cap"), nb::arg("out"), nb::arg("out_token_stride"),
      nb::arg("out_head_stride"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
