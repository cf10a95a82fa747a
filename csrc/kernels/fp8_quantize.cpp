// Quantizes weights to FP8: see quire/kernels/gemm_fp8.h.
#include <algorithm>

#include "quire/kernels/gemm_fp8.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kLargestCode = 448;

// The nearest code of a value in [-448, 448], ties to even. Below 2^-6, numbers of codes are multiples of 2^-9, and 8
// of these steps are 2^-6. From 2^-6 on, the float is rounded to 3 bits of mantissa.
inline uint8_t code_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  constexpr float kToInteger = 8388608.0f;  // 2^23: adding it rounds to an integer
  const float steps = std::fabs(value) * 512.0f + kToInteger;
  const uint32_t subnormal = std::bit_cast<uint32_t>(steps) & 0xfu;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? subnormal : normal));
}

template <class T>
void quantize(const T* weight, int64_t count, uint8_t* codes, float* scale) {
  constexpr int W = F32::kWidth;
  F32 largest = zero(), check = zero();
  for (int64_t i = 0; i < count; i += W) {
    const F32 w = load_part(weight + i, count - i);
    largest = max(largest, max(w, zero() - w));
    check = fma(w, zero(), check);
  }
  const float not_finite = reduce_add(check);
  *scale = reduce_max(largest) / kLargestCode + not_finite;
  const bool is_usable = *scale > 0;  // not zero, not NaN
  const F32 divisor = broadcast(is_usable ? *scale : 1), limit = broadcast(is_usable ? kLargestCode : 0);
  for (int64_t i = 0; i < count; i += W) {
    float lanes[W];
    store(lanes, max(min(load_part(weight + i, count - i) / divisor, limit), zero() - limit));
    uint8_t rounded[W];
    for (int lane = 0; lane < W; ++lane) rounded[lane] = code_of(lanes[lane]);
    std::memcpy(codes + i, rounded, std::min<int64_t>(count - i, W));
  }
}

void quantize_row(const void* weight, DType dtype, int64_t count, uint8_t* codes, float* scale) {
  with_type_of(dtype, [&]<class T>(T) { quantize(static_cast<const T*>(weight), count, codes, scale); });
}

}  // namespace

extern const Fp8QuantizeKernels fp8_quantize_table;
const Fp8QuantizeKernels fp8_quantize_table = {quantize_row};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(Fp8QuantizeKernels, fp8_quantize_kernels, fp8_quantize_table)
