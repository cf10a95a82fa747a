// Paged attention over caches that hold codes of 8 bits. The tokens of the present call are read from the cache too. So
// the result of a row does not depend on which step has written its keys and values.
#include "attention_bf16.h"
#include "attention_f32.h"
#include "attention_run.h"
#include "attention_shared.h"
#include "quire/kernels/attention.h"

namespace quire::QUIRE_ISA {
namespace {

// run.operator()<Path>() with the path for these queries and a cache of type C.
template <class C, class Run>
void with_path_of([[maybe_unused]] const AttentionArgs& a, const Run& run) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  if (a.dtype == DType::bf16) return run.template operator()<Bf16Path<C>>();
#endif
  run.template operator()<F32Path<C>>();
}

template <class Run>
void with_path(const AttentionArgs& a, const Run& run) {
  switch (a.cache.type) {
    case CacheType::e4m3:
      return with_path_of<e4m3>(a, run);
    case CacheType::e5m2:
      return with_path_of<e5m2>(a, run);
    default:
      return with_path_of<int8_t>(a, run);
  }
}

void paged_attention(const AttentionArgs& a) {
  with_path(a, [&]<class Path>() { run_all<Path>(a); });
}

void shared_attention(const SharedAttentionArgs& shared, Turns& turns) {
  with_path(shared.attention, [&]<class Path>() { run_shared<Path>(shared, turns); });
}

}  // namespace

extern const AttentionKernels attention_codes_table;
const AttentionKernels attention_codes_table = {paged_attention, shared_attention};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(AttentionKernels, attention_codes_kernels, attention_codes_table)
