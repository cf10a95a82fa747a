// Storage types of tensors (float, bfloat16, IEEE half, codes of a quantized KV cache), and their scalar conversions
// from and to float. Conversions from float round to nearest even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace quire {

// The numbers are part of the Python interface (kernels/cpu.py).
enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// The elements of a KV cache: the model's DType, or codes of 8 bits.
enum class CacheType : int { model = 0, e4m3 = 1, e5m2 = 2, int8 = 3 };

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
// 8-bit floating point of the Open Compute Project (OFP8). e4m3 has no infinity, and one NaN for each sign. e5m2 is the
// upper half of an f16.
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
// A power of two, stored as its exponent + 127 (OCP Microscaling Formats 1.0). 255 is NaN.
struct e8m0 {
  uint8_t bits;
};

inline constexpr size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Internal linkage is needed: this header is compiled for several instruction sets, and a variant must never use the
// copy of another variant.
namespace {

[[maybe_unused]] inline float to_f32(float x) { return x; }

[[maybe_unused]] inline float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

[[maybe_unused]] constexpr float to_f32(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
}

[[maybe_unused]] constexpr float to_f32(e5m2 x) { return to_f32(f16{static_cast<uint16_t>(x.bits << 8)}); }

[[maybe_unused]] constexpr float to_f32(e4m3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 8) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9f));
}

// The bits 0 mean 2^-127, which is subnormal.
[[maybe_unused]] inline float to_f32(e8m0 x) {
  if (x.bits == 255) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(x.bits == 0 ? 0x00400000u : static_cast<uint32_t>(x.bits) << 23);
}

[[maybe_unused]] inline float to_f32(int8_t x) { return static_cast<float>(x); }
[[maybe_unused]] inline float to_f32(uint8_t x) { return static_cast<float>(x); }

template <class T>
inline T from_f32(float x);

template <>
[[maybe_unused]] inline float from_f32<float>(float x) {
  return x;
}

template <>
[[maybe_unused]] inline bf16 from_f32<bf16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // quiet NaN
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <>
[[maybe_unused]] inline f16 from_f32<f16>(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 puts the rounding at bit 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13))};
}

// Calls fn with a value of the C++ type of `dtype`.
template <class Fn>
inline void with_type_of(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::f32:
      return fn(float{});
    case DType::bf16:
      return fn(bf16{});
    case DType::f16:
      return fn(f16{});
  }
}

// Calls fn with a value of the C++ type of the elements of a KV cache. T is the model's type.
template <class T, class Fn>
inline void with_type_of_cache(CacheType type, const Fn& fn) {
  switch (type) {
    case CacheType::model:
      return fn(T{});
    case CacheType::e4m3:
      return fn(e4m3{});
    case CacheType::e5m2:
      return fn(e5m2{});
    case CacheType::int8:
      return fn(int8_t{});
  }
}

}  // namespace
}  // namespace quire
