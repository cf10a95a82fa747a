// Paged attention over caches that hold the model's dtype.
#include "quire/kernels/attention.h"

#include "attention_bf16.h"
#include "attention_f32.h"
#include "attention_run.h"
#include "attention_shared.h"

namespace quire::QUIRE_ISA {
namespace {

// run.operator()<Path>() with the path for this dtype.
template <class Run>
void with_path(DType dtype, const Run& run) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  using PathForBf16 = Bf16Path<bf16>;
#else
  using PathForBf16 = F32Path<bf16>;
#endif
  switch (dtype) {
    case DType::f32:
      return run.template operator()<F32Path<float>>();
    case DType::bf16:
      return run.template operator()<PathForBf16>();
    case DType::f16:
      return run.template operator()<F32Path<f16>>();
  }
}

void paged_attention(const AttentionArgs& a) {
  with_path(a.dtype, [&]<class Path>() { run_all<Path>(a); });
}

void shared_attention(const SharedAttentionArgs& shared, Turns& turns) {
  with_path(shared.attention.dtype, [&]<class Path>() { run_shared<Path>(shared, turns); });
}

}  // namespace

extern const AttentionKernels attention_table;
const AttentionKernels attention_table = {paged_attention, shared_attention};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(AttentionKernels, attention_kernels, attention_table)
