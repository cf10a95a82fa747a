// Tiles of the product with grouped integer weights where no instruction of 512 bits adds four products of bytes to 32
// bits. AVX-VNNI has one of 256 bits (vpdpbusd): its sums have 32 bits from the start, and gemm_grouped_avx_vnni.h has
// whole groups of 3 to 6 rows. AVX2, and AVX-512 without VNNI, multiply
//   codes up to 6 bits   by vpmaddubsw. Its sums of two products stay in 16 bits for as many quads as cannot overflow:
//                        8 with codes up to 4 bits, 4 with 5 bits, 2 with 6.
//   codes of 8 bits      by vpmaddwd, widened to 16 bits, because vpmaddubsw would saturate. Rows of x are widened once
//                        per block.
// All give exact sums.
#pragma once

#include "gemm_grouped_blocks.h"
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
#include "gemm_grouped_avx_vnni.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

constexpr int kMaxRows = 6, kLanes = sizeof(I32) / 4;
constexpr bool kHasEights = QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2;  // see add_eights
constexpr int64_t kBlockQuads = 64;  // 16 KiB of 8-bit codes: 1.03 to 1.06 times as fast as 32 KiB (Zen 5)

// Vectors of columns of a tile: up to 12 sums in 16 registers, or 24 in 32.
constexpr int num_vectors([[maybe_unused]] int rows) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  return 4;
#else
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
#endif
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
inline I32 even_bytes(I32 x) { return _mm512_and_si512(x, _mm512_set1_epi16(0xff)); }
inline I32 odd_bytes(I32 x) { return _mm512_srli_epi16(x, 8); }
inline I32 even_signed(I32 x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline I32 odd_signed(I32 x) { return _mm512_srai_epi16(x, 8); }
inline I32 ones() { return _mm512_set1_epi16(1); }
#else
inline I32 even_bytes(I32 x) { return _mm256_and_si256(x, _mm256_set1_epi16(0xff)); }
inline I32 odd_bytes(I32 x) { return _mm256_srli_epi16(x, 8); }
inline I32 even_signed(I32 x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline I32 odd_signed(I32 x) { return _mm256_srai_epi16(x, 8); }
inline I32 ones() { return _mm256_set1_epi16(1); }
#endif

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
inline I32 add_byte_products(I32 sums, I32 w, I32 x) { return dot_bytes(sums, w, x); }
#else
// Assembly, because g++ 12 would add the products of two steps first, and spill them.
inline I32 add_byte_products(I32 words, I32 w, I32 x) {
  I32 products;
  __asm__("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0" : "+v"(words), "=&v"(products) : "v"(x), "v"(w));
  return words;
}
#endif
inline I32 byte_products(I32 w, I32 x) {
  I32 products;
  __asm__("vpmaddubsw %1, %2, %0" : "=v"(products) : "v"(x), "v"(w));
  return products;
}
inline I32 add_pair_products(I32 sums, I32 w, I32 x) {
  I32 products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+v"(sums), "=&v"(products) : "v"(x), "v"(w));
  return sums;
}

// quads, products in a sum, the largest element of x, the largest code
static_assert(8 * 2 * 127 * 15 <= 32767 && 4 * 2 * 127 * 31 <= 32767 && 2 * 2 * 127 * 63 <= 32767);

// Quads of kRows rows of x: codes, or, for codes of 8 bits, even and odd elements in 16 bits.
template <int kRows, bool kWide>
struct Quads;

template <int kRows>
struct Quads<kRows, false> {
  const int8_t* codes;
  int64_t stride;

  Quads(const int8_t* codes, int64_t stride, int64_t) : codes(codes), stride(stride) {}
  I32 at(int row, int64_t quad) const {
    int32_t four;
    std::memcpy(&four, codes + row * stride + quad * kQuad, sizeof(four));
    return broadcast_i32(four);
  }
};

template <int kRows>
struct Quads<kRows, true> {
  alignas(64) int32_t even_pairs[kRows][kBlockQuads], odd_pairs[kRows][kBlockQuads];

  Quads(const int8_t* codes, int64_t stride, int64_t quads) {
    for (int row = 0; row < kRows; ++row)
      for (int64_t quad = 0; quad < quads; quad += kLanes) {
        const I32 x = load_i32(codes + row * stride + quad * kQuad);
        store_i32(even_pairs[row] + quad, even_signed(x));
        store_i32(odd_pairs[row] + quad, odd_signed(x));
      }
  }
  I32 even(int row, int64_t quad) const { return broadcast_i32(even_pairs[row][quad]); }
  I32 odd(int row, int64_t quad) const { return broadcast_i32(odd_pairs[row][quad]); }
};

template <int kRows, int kVectors>
using Sums = I32[kRows][kVectors];

// What one of the parts of the columns fetches, of kVectors vectors.
template <int kVectors>
using Share = Spread<kPanelWidth / (kVectors * kLanes), Prefetch>;

template <int kRows, int kVectors>
inline void set_zero(Sums<kRows, kVectors>& sums) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero_i32();
}

// The calls of fetch() that this number of quads makes.
template <Codes kCodes>
constexpr int calls_of(int quads) {
  return is_packed(kCodes) ? quads / 2 : quads;
}

// One quad of kRows rows of x times one of the weights, in 16 bits; with AVX-VNNI in 32.
template <int kRows, int kVectors>
inline void add_quad(const Quads<kRows, false>& x, int64_t quad, const Sums<1, kVectors>& w,
                     Sums<kRows, kVectors>& words) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const I32 four = x.at(r, quad);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) words[r][v] = add_byte_products(words[r][v], w[0][v], four);
  }
}

// words += quads [first, first + count), where count is a multiple of kUnit
template <Codes kCodes, int kUnit, int kRows, int kVectors>
inline void add_words(const Quads<kRows, false>& x, int64_t first, int64_t count, const uint8_t* w,
                      Share<kVectors>& share, Sums<kRows, kVectors>& words) {
  constexpr int kHalves = is_packed(kCodes) ? 2 : 1;
  for (const int64_t last = first + count; first < last; first += kUnit, w += kUnit / kHalves * kQuadBytes) {
    share.fetch(calls_of<kCodes>(kUnit));
#pragma GCC unroll 4
    for (int quad = 0; quad < kUnit; ++quad) {
      Sums<1, kVectors> codes;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        codes[0][v] = load_i32(w + quad / kHalves * kQuadBytes + v * sizeof(I32));
        if constexpr (kHalves == 2) codes[0][v] = quad % 2 == 0 ? low_halves(codes[0][v]) : high_halves(codes[0][v]);
        if constexpr (kCodes == Codes::floats) codes[0][v] = of_floats(codes[0][v]);
      }
      add_quad<kRows, kVectors>(x, first + quad, codes, words);
    }
  }
}

// sums += quads [first, first + count)
template <int kRows, int kVectors>
QUIRE_INLINE_ON_AVX2 inline void add_wide(const Quads<kRows, true>& x, int64_t first, int64_t count, const uint8_t* w,
                                          Share<kVectors>& share, Sums<kRows, kVectors>& sums) {
  constexpr int kUnit = 2;
  // Quads at once: of 2, 4, 8 and 32, 8 were best for 4 to 32 rows, and 2 for one (Zen 3).
  constexpr int64_t kFetched = 2 * kPanelWidth / (kVectors * kLanes);
  for (const int64_t last = first + count; first < last; first += kUnit, w += kUnit * kQuadBytes) {
    if (kFetched == kUnit || first % kFetched == 0) share.fetch(static_cast<int>(std::min(kFetched, last - first)));
#pragma GCC unroll 4
    for (int i = 0; i < 2 * kUnit; ++i) {
      const uint8_t* const from = w + i / 2 * kQuadBytes;
      I32 pairs[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        pairs[v] = load_i32(from + v * sizeof(I32));
        pairs[v] = i % 2 == 0 ? even_bytes(pairs[v]) : odd_bytes(pairs[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const I32 pair = i % 2 == 0 ? x.even(r, first + i / 2) : x.odd(r, first + i / 2);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = add_pair_products(sums[r][v], pairs[v], pair);
      }
    }
  }
}

template <Codes kCodes>
constexpr bool kIsWide = kHasWords && kCodes == Codes::bytes;

// Quads with sums that fit into 16 bits, for codes without sign.
template <Codes kCodes>
inline int64_t chunk_quads(int bits) {
  if (kCodes == Codes::floats || (kCodes == Codes::unpacked && bits == 5)) return 4;
  return kCodes == Codes::unpacked && bits == 6 ? 2 : 8;
}

// words = 8 quads of 4-bit codes, which fit into 16 bits
template <int kRows, int kVectors>
QUIRE_INLINE_ON_AVX2 inline void set_words(const Quads<kRows, false>& x, int64_t first, const uint8_t* w,
                                           Share<kVectors>& share, Sums<kRows, kVectors>& words) {
  share.fetch(calls_of<Codes::packed>(8));
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    Sums<1, kVectors> codes;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const I32 both = load_i32(w + quad / 2 * kQuadBytes + v * sizeof(I32));
      codes[0][v] = quad % 2 == 0 ? low_halves(both) : high_halves(both);
    }
    if (quad > 0) {
      add_quad<kRows, kVectors>(x, first + quad, codes, words);
      continue;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const I32 four = x.at(r, first);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) words[r][v] = byte_products(codes[0][v], four);
    }
  }
}

// sums += quads [first, first + count) of 4-bit codes, where count is a multiple of 8. Without a loop over the quads of
// a chunk, and with sums that begin with a product and not with zero, 1.05 to 1.12 times as fast from 3 rows on (Zen
// 3).
template <int kRows, int kVectors>
QUIRE_INLINE_ON_AVX2 inline void add_eights(const Quads<kRows, false>& x, int64_t first, int64_t count,
                                            const uint8_t* w, Share<kVectors>& share, Sums<kRows, kVectors>& sums) {
  for (const int64_t last = first + count; first < last; first += 8, w += 4 * kQuadBytes) {
    Sums<kRows, kVectors> words;
    set_words<kRows, kVectors>(x, first, w, share, words);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add(sums[r][v], multiply_pairs(words[r][v], ones()));
  }
}

// sums += quads [first, first + count), kUnit at a time. Sums of `chunk` quads fit into 16 bits.
template <Codes kCodes, int kUnit, int kRows, int kVectors>
inline void add_chunks(const Quads<kRows, false>& x, int64_t first, int64_t count, int64_t chunk, const uint8_t* w,
                       Share<kVectors>& share, Sums<kRows, kVectors>& sums) {
  constexpr int64_t kQuadsPerByte = is_packed(kCodes) ? 2 : 1;
  for (const int64_t last = first + count; first < last; first += chunk, w += chunk / kQuadsPerByte * kQuadBytes) {
    Sums<kRows, kVectors> words;
    set_zero<kRows, kVectors>(words);
    add_words<kCodes, kUnit, kRows, kVectors>(x, first, std::min(chunk, last - first), w, share, words);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add(sums[r][v], multiply_pairs(words[r][v], ones()));
  }
}

template <Codes kCodes, int kRows, int kVectors>
inline void add_quads(const Quads<kRows, kIsWide<kCodes>>& x, int64_t first, int64_t count, int bits, const uint8_t* w,
                      Share<kVectors>& share, Sums<kRows, kVectors>& sums) {
  if constexpr (kIsWide<kCodes>) {
    add_wide<kRows, kVectors>(x, first, count, w, share, sums);
  } else if constexpr (!kHasWords) {
    add_words<kCodes, 4, kRows, kVectors>(x, first, count, w, share, sums);
  } else if (kCodes == Codes::unpacked && bits == 6) {
    add_chunks<kCodes, 2, kRows, kVectors>(x, first, count, 2, w, share, sums);
  } else {
    if constexpr (kHasEights && kCodes == Codes::packed) {
      if (count % 8 == 0) return add_eights<kRows, kVectors>(x, first, count, w, share, sums);
    }
    add_chunks<kCodes, 4, kRows, kVectors>(x, first, count, chunk_quads<kCodes>(bits), w, share, sums);
  }
}

// Part of a group: sums[rows][64] = (is_first ? 0 : sums) + codes * weights
template <int kRows, Codes kCodes>
void run_part(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int bits, int32_t* out,
              bool is_first, Prefetch& prefetch) {
  constexpr int kVectors = num_vectors(kRows);
  const Quads<kRows, kIsWide<kCodes>> x(codes, stride, quads);
  Share<kVectors> share(prefetch);
  for (int64_t column = 0; column < kPanelWidth; column += kVectors * kLanes) {
    Sums<kRows, kVectors> sums;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = is_first ? zero_i32() : load_i32(out + r * kPanelWidth + column + v * kLanes);
    add_quads<kCodes, kRows, kVectors>(x, 0, quads, bits, weights + column * kQuad, share, sums);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store_i32(out + r * kPanelWidth + column + v * kLanes, sums[r][v]);
  }
}

// Adds the finished sums of a group to the float sums of kRows rows, in L1. `scales` and `factors` belong to the rows,
// `numbers` to the columns.
template <int kRows, int kVectors, Offset kOffset>
QUIRE_INLINE_ON_AVX2 inline void add_sums(const Sums<kRows, kVectors>& sums, const float* scales, const float* factors,
                                          const DecodedGroup& numbers, int64_t column, float* totals) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const RowNumbers of_row(scales[r], factors[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* const total = totals + r * kPanelWidth + v * kLanes;
      const F32 offset = kOffset == Offset::middle ? zero() : load(numbers.offsets + column + v * kLanes);
      store(total, add_group<kOffset, false>(load(total), sums[r][v], of_row,
                                             load(numbers.scales + column + v * kLanes), offset));
    }
  }
}

// Whole groups of a block, for kRows rows. The float sums are in L1. kIsEight: a group is 8 quads of 4-bit codes, so
// its sums in 16 bits are all that it has.
template <int kRows, Codes kCodes, Offset kOffset, bool kIsEight>
void add_groups(const GroupRun& run, Prefetch& prefetch) {
  constexpr int kVectors = num_vectors(kRows);
  const QuantizedRows& input = *run.input;
  const int64_t group_quads = kIsEight ? 8 : run.group_quads, quads = run.num_groups * group_quads;
  const int64_t group_bytes = group_quads * kQuadBytes / (is_packed(kCodes) ? 2 : 1);
  const Quads<kRows, kIsWide<kCodes>> x(input.codes + run.row * input.stride + run.first_group * group_quads * kQuad,
                                        input.stride, quads);
  if (run.first_group == 0) std::fill(run.totals, run.totals + kRows * kPanelWidth, 0.0f);
  // copies, which no store through a pointer can change
  const DecodedGroup* const numbers = run.numbers;
  const int64_t num_groups = run.num_groups, pitch = input.number_pitch;
  Share<kVectors> share(prefetch);
  for (int64_t column = 0; column < kPanelWidth; column += kVectors * kLanes) {
    const float* scales = input.scales + input.at(run.row, run.first_group);
    const float* factors = input.offset_factors + input.at(run.row, run.first_group);
    const uint8_t* w = run.weights + column * kQuad;
    float* totals = run.totals + column;
    for (int64_t g = 0; g < num_groups; ++g, w += group_bytes, scales += pitch, factors += pitch) {
      if constexpr (kHasEights) __asm__("" : "+r"(totals));  // otherwise g++ 12 keeps the addresses of totals in memory
      Sums<kRows, kVectors> sums;
      if constexpr (kIsEight) {
        set_words<kRows, kVectors>(x, g * group_quads, w, share, sums);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_pairs(sums[r][v], ones());
      } else {
        set_zero<kRows, kVectors>(sums);
        add_quads<kCodes, kRows, kVectors>(x, g * group_quads, group_quads, run.bits, w, share, sums);
      }
      add_sums<kRows, kVectors, kOffset>(sums, scales, factors, numbers[g], column, totals);
    }
  }
}

template <int kRows, Codes kCodes, Offset kOffset>
void add_groups(const GroupRun& run, Prefetch& prefetch) {
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
  if constexpr (kRows >= kMinPartRows && kCodes != Codes::floats)
    return add_groups_of_parts<kRows, is_packed(kCodes), kOffset>(run, prefetch);
#endif
  if constexpr (kHasEights && kCodes == Codes::packed) {
    if (run.group_quads == 8) return add_groups<kRows, kCodes, kOffset, true>(run, prefetch);
  }
  add_groups<kRows, kCodes, kOffset, false>(run, prefetch);
}

// Whole super-groups of a block, for kRows rows. The sums in 16 bits are multiplied by the factor as they become sums
// in 32 bits: two of them, times -128, stay below 2^23. `supers`, [rows][64], and the float sums are in L1.
//
// A zero in the middle is taken off before the products, so that the sums of a piece fit although its codes have 6
// bits: 32 * 127 * 8 < 2^15. On the way to them sums wrap around.
//
// With AVX-VNNI sums of a whole group have 32 bits, and a chunk is a group. kIsEight: chunks are 8 quads of 4-bit
// codes.
template <int kRows, Codes kCodes, Offset kOffset, int kUnit, bool kIsEight = false>
void add_supers(const SuperRun& run, int64_t chunk, int32_t* supers, Prefetch prefetch) {
  constexpr int kVectors = num_vectors(kRows);
  constexpr int64_t kHalves = is_packed(kCodes) ? 2 : 1;
  const QuantizedRows& input = *run.input;
  const int8_t* codes = input.codes + run.row * input.stride + run.first_group() * run.group_quads * kQuad;
  const int32_t* zeros = input.zero_sums + input.at(run.row, run.first_super * input.sums_per_scale);
  const uint8_t* weights = run.weights;
  FactorNumbers numbers = run.numbers;
  for (int64_t super = 0; super < run.num_supers; ++super, numbers.next_super(run.super_groups)) {
    const int64_t quads = run.super_groups * run.group_quads;
    const Quads<kRows, false> x(codes, input.stride, quads);
    Share<kVectors> share(prefetch);
    for (int64_t column = 0; column < kPanelWidth; column += kVectors * kLanes) {
      int32_t* const to = supers + column;
      const uint8_t* w = weights + column * kQuad;
      const int8_t* factors_of_group = numbers.factors + column;
      for (int64_t quad = 0; quad < quads; factors_of_group += numbers.group_bytes) {
        I32 factors[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const int8_t* const from = factors_of_group + v * kLanes;
          factors[v] = kHasWords ? load_factor_pairs(from, from) : load_factors(from);
        }
        for (const int64_t group_end = quad + run.group_quads; quad < group_end;) {
          const int64_t count = std::min(chunk, group_end - quad);
          Sums<kRows, kVectors> words;
          if constexpr (kIsEight) {
            set_words<kRows, kVectors>(x, quad, w, share, words);
          } else {
            if constexpr (kOffset == Offset::middle) {
              const int32_t* const zero_of_chunk = zeros + quad / chunk * input.number_pitch;
#pragma GCC unroll 8
              for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v)
                  words[r][v] = broadcast_i32(kHasWords ? zero_of_chunk[r] : -zero_of_chunk[r]);
            } else {
              set_zero<kRows, kVectors>(words);
            }
            add_words<kCodes, kUnit, kRows, kVectors>(x, quad, count, w, share, words);
          }
          w += count / kHalves * kQuadBytes;
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
              int32_t* const sum = to + r * kPanelWidth + v * kLanes;
              const I32 before = quad == 0 ? zero_i32() : load_i32(sum);
              const I32 times_factor =
                  kHasWords ? multiply_pairs(words[r][v], factors[v]) : multiply(words[r][v], factors[v]);
              store_i32(sum, add(before, times_factor));
            }
          quad += count;
        }
      }
    }
    add_super_of_rows<kOffset>(run, numbers, super, kRows, supers);
    codes += quads * kQuad;
    weights += quads / kHalves * kQuadBytes;
    zeros += input.sums_per_scale * input.number_pitch;
  }
}

template <int kRows, Codes kCodes, Offset kOffset>
void add_supers(const SuperRun& run, int32_t* supers, const Prefetch& prefetch) {
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX_VNNI
  if constexpr (kRows >= kMinPartRows)
    return add_supers_of_parts<kRows, is_packed(kCodes), kOffset>(run, supers, prefetch);
#endif
  if (!kHasWords) {
    add_supers<kRows, kCodes, kOffset, 4>(run, run.group_quads, supers, prefetch);
  } else if (kOffset == Offset::middle) {
    add_supers<kRows, kCodes, kOffset, 4>(run, kPieceSize / kQuad, supers, prefetch);
  } else if (kCodes == Codes::unpacked && run.bits == 6) {
    add_supers<kRows, kCodes, kOffset, 2>(run, 2, supers, prefetch);
  } else {
    if constexpr (kHasEights && kCodes == Codes::packed && kOffset != Offset::middle) {
      if (run.group_quads % 8 == 0) return add_supers<kRows, kCodes, kOffset, 8, true>(run, 8, supers, prefetch);
    }
    add_supers<kRows, kCodes, kOffset, 4>(run, chunk_quads<kCodes>(run.bits), supers, prefetch);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
