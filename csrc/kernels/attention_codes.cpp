// Paged attention over caches that hold codes of 8 bits. A row's result does not depend on the step that wrote its keys
// and values: tokens of the present call are read from the cache too.
#include "attention_bf16.h"
#include "attention_f32.h"
#include "attention_run.h"
#include "quire/kernels/attention.h"

namespace quire::QUIRE_ISA {
namespace {

template <class C>
void run_codes(const AttentionArgs& a) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  if (a.dtype == DType::bf16) return run_all<Bf16Path<C>>(a);
#endif
  run_all<F32Path<C>>(a);
}

void paged_attention(const AttentionArgs& a) {
  switch (a.cache.type) {
    case CacheType::e4m3:
      return run_codes<e4m3>(a);
    case CacheType::e5m2:
      return run_codes<e5m2>(a);
    default:
      return run_codes<int8_t>(a);
  }
}

}  // namespace

extern const AttentionKernels attention_codes_table;
const AttentionKernels attention_codes_table = {paged_attention};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(AttentionKernels, attention_codes_kernels, attention_codes_table)
