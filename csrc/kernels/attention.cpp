// Paged attention over caches that hold the model's dtype.
#include "quire/kernels/attention.h"

#include "attention_bf16.h"
#include "attention_f32.h"
#include "attention_run.h"

namespace quire::QUIRE_ISA {
namespace {

void paged_attention(const AttentionArgs& a) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  using PathForBf16 = Bf16Path<bf16>;
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
