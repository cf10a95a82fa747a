// Quantizes weights to integers in groups: see quire/kernels/gemm.h.
#include <algorithm>

#include "quire/kernels/gemm.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

template <class T>
void quantize(const T* weight, int64_t count, int bits, uint8_t* codes, float* scale) {
  constexpr int W = F32::kWidth;
  F32 highest = zero(), lowest = zero();
  for (int64_t i = 0; i < count; i += W) {
    const F32 w = load_part(weight + i, count - i);
    highest = max(highest, w);
    lowest = min(lowest, w);
  }
  const float up = reduce_max(highest), down = reduce_max(zero() - lowest);
  const float zero_code = static_cast<float>(1 << (bits - 1));
  // With 8 bits, codes are 1 to 255 around 128. With 4 bits, codes are 0 to 15 around 8, and the element of the largest
  // magnitude gets code 0.
  const float step = bits == 8 ? std::fmax(up, down) / 127 : up > down ? up / -8 : down / 8;
  const float inverse = step == 0 ? 0 : 1 / step;
  *scale = step;
  const F32 middle = broadcast(zero_code), limit = broadcast(2 * zero_code - 1);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t n = std::min<int64_t>(count - i, W);
    float lanes[W];
    store(lanes, min(max(round(load_part(weight + i, count - i) * broadcast(inverse)) + middle, zero()), limit));
    for (int64_t lane = 0; lane < n; ++lane) codes[i + lane] = static_cast<uint8_t>(lanes[lane]);
  }
}

void quantize_group(const void* weight, DType dtype, int64_t count, int bits, uint8_t* codes, float* scale) {
  with_type_of(dtype, [&]<class T>(T) { quantize(static_cast<const T*>(weight), count, bits, codes, scale); });
}

}  // namespace

extern const QuantizeKernels quantize_table;
const QuantizeKernels quantize_table = {quantize_group};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(QuantizeKernels, quantize_kernels, quantize_table)
