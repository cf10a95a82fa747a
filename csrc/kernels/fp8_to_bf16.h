// Converts FP8 codes to bfloat16, which is exact. Both bytes of a bfloat16 are looked up (AVX-512 VBMI).
#pragma once

#include "quire/simd.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16

namespace quire::QUIRE_ISA {
namespace {

// The bytes of the bfloat16 of each code without its sign.
template <class C>
struct Bf16Bytes {
  alignas(64) uint8_t lower[128], upper[128];

  constexpr Bf16Bytes() : lower(), upper() {
    for (int code = 0; code < 128; ++code) {
      const uint32_t bits = std::bit_cast<uint32_t>(to_f32(C{static_cast<uint8_t>(code)}));
      lower[code] = static_cast<uint8_t>(bits >> 16), upper[code] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
template <class C>
constexpr Bf16Bytes<C> kBf16Bytes;

// Looks entries up. The lowest 7 bits of an element of `indices` are the index of an entry.
inline __m512i look_up(const uint8_t (&entries)[128], __m512i indices) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(entries), indices, _mm512_load_si512(entries + 64));
}

struct Bf16Halves {
  __m512i lower, upper;  // bytes
};

template <class C>
inline Bf16Halves bf16_halves(__m512i codes, C) {
  constexpr int kFirstOrBothOthers = 0xf8;
  const __m512i sign = _mm512_set1_epi8(-0x80), upper = look_up(kBf16Bytes<C>.upper, codes);
  return {look_up(kBf16Bytes<C>.lower, codes), _mm512_ternarylogic_epi32(upper, codes, sign, kFirstOrBothOthers)};
}

}  // namespace
}  // namespace quire::QUIRE_ISA

#endif
