// Shared parts of the matrix product kernels for FP8 weights: codes to numbers of 16 bits, the loop over panels, blocks
// of K and tiles of rows, and the scaling of finished sums. The layout is in quire/kernels/gemm_fp8.h.
#pragma once

#include <array>
#include <utility>

#include "gemm_blocks.h"
#include "quire/kernels/gemm_fp8.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kStepCodes = kBf16KUnit * kPanelWidth;
constexpr int64_t kStepLines = kStepCodes / kFp8LineCodes;
constexpr int64_t kPaddedSums = 32;  // rows: tiles write whole tiles

// Unpacked numbers are codes times 2^-kUnitExponent. On AVX2 few rows take halves, which are easily made of codes times
// 2^-8. Many rows take bfloat16. Both have the same numbers, so the bits of a row do not depend on the number of rows.
constexpr int kUnitExponent = QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2 ? 8 : 0;

// The upper bytes of numbers, divided by 2^kUnitExponent. An upper byte has all but the last bit of the exponent. So
// subtracting 1 from an upper byte divides by 4.
constexpr std::array<uint8_t, 16> of_unit(std::array<uint8_t, 16> upper) {
  for (uint8_t& byte : upper) byte -= byte == 0 ? 0 : kUnitExponent / 2;
  return upper;
}

// The upper and the lower byte of a code's bfloat16, by lookups in 16 bytes. With an exponent above 0 the upper byte
// depends only on the exponent, and the lower byte is the code shifted by 4. Exponent 0 means mantissa * 2^-9, a normal
// bfloat16: codes 1 to 7 have entries 9 to 15 of two further tables. Other codes miss these tables, because their index
// saturates above 127, and the lookup gives zero.
constexpr std::array<uint8_t, 16> kUpperOfExponent =
    of_unit({0, 0x3c, 0x3d, 0x3d, 0x3e, 0x3e, 0x3f, 0x3f, 0x40, 0x40, 0x41, 0x41, 0x42, 0x42, 0x43, 0x43});
constexpr std::array<uint8_t, 16> kUpperOfSubnormal =
    of_unit({0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c});
constexpr std::array<uint8_t, 16> kLowerOfSubnormal = {0, 0,    0,    0,    0,    0,    0,    0,  // to be xor-ed with
                                                       0, 0x10, 0xa0, 0xf0, 0x40, 0x70, 0x20, 0x10};  // code << 4
constexpr uint8_t kFirstSubnormal = 0x78;  // added with saturation to a code without sign: index of the tables above

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512

// The lookups of fp8_to_bf16.h took 1.2 times as long for 1 and 4 rows (benchmarks/NOTES.md).
inline __m512i table(const std::array<uint8_t, 16>& entries) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries.data())));
}

inline void unpack_line(const uint8_t* from, bf16* to) {
  const __m512i codes = _mm512_load_si512(from), magnitude_bits = _mm512_set1_epi8(0x7f);
  const __m512i magnitudes = _mm512_and_si512(codes, magnitude_bits);
  const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(magnitudes, 3), _mm512_set1_epi8(0x0f));
  const __m512i subnormals = _mm512_adds_epu8(magnitudes, _mm512_set1_epi8(kFirstSubnormal));
  __m512i upper = _mm512_or_si512(_mm512_shuffle_epi8(table(kUpperOfExponent), exponents),
                                  _mm512_shuffle_epi8(table(kUpperOfSubnormal), subnormals));
  upper = _mm512_ternarylogic_epi32(upper, codes, magnitude_bits, 0xf4);  // upper | (codes & ~magnitude_bits)
  const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(magnitudes, magnitude_bits);
  upper = _mm512_mask_mov_epi8(upper, is_nan, magnitude_bits);
  const __m512i lower =
      _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 4), _mm512_set1_epi8(static_cast<char>(0xf0)),
                                _mm512_shuffle_epi8(table(kLowerOfSubnormal), subnormals), 0x6a);
  _mm512_store_si512(to, _mm512_unpacklo_epi8(lower, upper));
  _mm512_store_si512(to + 32, _mm512_unpackhi_epi8(lower, upper));
}

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2

inline __m256i table(const std::array<uint8_t, 16>& entries) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries.data())));
}

inline void unpack_line(const uint8_t* from, bf16* to) {
  const __m256i magnitude_bits = _mm256_set1_epi8(0x7f), upper_half = _mm256_set1_epi8(static_cast<char>(0xf0));
  for (int64_t i = 0; i < 2; ++i, from += 32, to += 16) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i magnitudes = _mm256_and_si256(codes, magnitude_bits);
    const __m256i exponents = _mm256_and_si256(_mm256_srli_epi16(magnitudes, 3), _mm256_set1_epi8(0x0f));
    const __m256i subnormals = _mm256_adds_epu8(magnitudes, _mm256_set1_epi8(kFirstSubnormal));
    __m256i upper = _mm256_or_si256(_mm256_shuffle_epi8(table(kUpperOfExponent), exponents),
                                    _mm256_shuffle_epi8(table(kUpperOfSubnormal), subnormals));
    upper = _mm256_or_si256(upper, _mm256_andnot_si256(magnitude_bits, codes));
    upper = _mm256_or_si256(upper, _mm256_cmpeq_epi8(magnitudes, magnitude_bits));  // NaN
    const __m256i lower = _mm256_xor_si256(_mm256_and_si256(_mm256_slli_epi16(codes, 4), upper_half),
                                           _mm256_shuffle_epi8(table(kLowerOfSubnormal), subnormals));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi8(lower, upper));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32), _mm256_unpackhi_epi8(lower, upper));
  }
}

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON

inline void unpack_line(const uint8_t* from, bf16* to) {
  const uint8x16_t magnitude_bits = vdupq_n_u8(0x7f), upper_of_exponent = vld1q_u8(kUpperOfExponent.data()),
                   upper_of_subnormal = vld1q_u8(kUpperOfSubnormal.data()),
                   lower_of_subnormal = vld1q_u8(kLowerOfSubnormal.data());
  for (int64_t i = 0; i < kFp8LineCodes; i += 16) {
    const uint8x16_t codes = vld1q_u8(from + i), magnitudes = vandq_u8(codes, magnitude_bits);
    const uint8x16_t subnormals = vaddq_u8(magnitudes, vdupq_n_u8(8));  // above 15, which gives zero, for other codes
    uint8x16_t upper =
        vorrq_u8(vqtbl1q_u8(upper_of_exponent, vshrq_n_u8(magnitudes, 3)), vqtbl1q_u8(upper_of_subnormal, subnormals));
    upper = vorrq_u8(upper, vbicq_u8(codes, magnitude_bits));
    upper = vorrq_u8(upper, vandq_u8(vceqq_u8(magnitudes, magnitude_bits), magnitude_bits));  // NaN
    const uint8x16_t lower = veorq_u8(vshlq_n_u8(codes, 4), vqtbl1q_u8(lower_of_subnormal, subnormals));
    uint8_t* const place = reinterpret_cast<uint8_t*>(to + i / 2);
    vst1q_u8(place, vzip1q_u8(lower, upper));
    vst1q_u8(place + 64, vzip2q_u8(lower, upper));
  }
}

#else

inline bf16 bf16_of_code(uint8_t code) {
  const uint8_t magnitude = code & 0x7f, exponent = magnitude >> 3;
  const uint8_t subnormal = magnitude < 8 ? 8 + magnitude : 0;
  const uint8_t upper = magnitude == 0x7f ? 0x7f : kUpperOfExponent[exponent] | kUpperOfSubnormal[subnormal];
  const uint8_t lower = static_cast<uint8_t>(code << 4) ^ kLowerOfSubnormal[subnormal];
  return std::bit_cast<bf16>(static_cast<uint16_t>((upper | (code & 0x80)) << 8 | lower));
}

inline void unpack_line(const uint8_t* from, bf16* to) {
  for (int64_t i = 0; i < kFp8LineCodes; ++i) to[i / 8 % 2 * 32 + i / 16 * 8 + i % 8] = bf16_of_code(from[i]);
}

#endif

inline void unpack_lines(const uint8_t* codes, int64_t num_lines, bf16* to, int64_t prefetch_distance) {
  for (const uint8_t* const end = codes + num_lines * kFp8LineCodes; codes < end;
       codes += kFp8LineCodes, to += kFp8LineCodes) {
    __builtin_prefetch(codes + prefetch_distance, 0, 2);
    unpack_line(codes, to);
  }
}

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2

// For few rows codes become halves, in less than half of the instructions. The magnitude of a code, moved to the place
// of a half's, is the code's times 2^-8, also where it is subnormal. Each 32 codes, of 8 columns and 4 k, become [8]
// for k = 0, 2, 1, 3. So the product converts 8 columns of a k from memory, which costs as much as a
// shift. fp8_place is the place of one of the 4 k.
constexpr int64_t fp8_place(int64_t k) { return k % 2 * 16 + k / 2 * 8; }

// Writes the NaN among the codes of some lines, whose halves are not NaN.
__attribute__((noinline)) void write_nans(const uint8_t* codes, int64_t count, f16* to) {
  for (int64_t i = 0; i < count; ++i) {
    if ((codes[i] & 0x7f) != 0x7f) continue;
    const int64_t column = i / 16 % 2 * 4 + i % 8 / 2, k = i / 8 % 2 * 2 + i % 2;
    to[i / 32 * 32 + fp8_place(k) + column].bits = 0x7e00;
  }
}

inline void unpack_lines(const uint8_t* codes, int64_t num_lines, f16* to, int64_t prefetch_distance) {
  const __m256i bits = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  const int64_t num_codes = num_lines * kFp8LineCodes;
  __m256i greatest = _mm256_setzero_si256();
  for (int64_t line = 0; line < num_codes; line += kFp8LineCodes) {
    __builtin_prefetch(codes + line + prefetch_distance, 0, 2);
#pragma GCC unroll 2
    for (int64_t i = line; i < line + kFp8LineCodes; i += 32) {
      const __m256i pairs =
          _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)), 0xd8);
      greatest = _mm256_max_epu8(greatest, _mm256_add_epi8(pairs, pairs));
      const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 1), bits);
      const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(pairs, 1), bits);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), even);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 16), odd);
    }
  }
  const __m256i is_nan = _mm256_cmpeq_epi8(greatest, _mm256_set1_epi8(static_cast<char>(0xfe)));
  if (_mm256_movemask_epi8(is_nan) != 0) [[unlikely]]
    write_nans(codes, num_codes, to);
}

#endif

// Sums [rows][64] of one group and the totals of the groups before it, which the first group does not read.
struct Fp8Sums {
  const float* sums;
  float* totals;
  int64_t num_rows;
  const float* scales;  // [64]
  bool is_first_group;

  // The totals with the sums of this group, scaled.
  F32 total(int64_t row, int64_t column) const {
    const int64_t at = row * kPanelWidth + column;
    F32 scale = load(scales + column);
    if constexpr (kUnitExponent != 0) scale = scale * broadcast(1 << kUnitExponent);
    return fma(load(sums + at), scale, is_first_group ? zero() : load(totals + at));
  }
};

inline void add_group(const Fp8Sums& s) {
  for (int64_t r = 0; r < s.num_rows; ++r)
    for (int64_t c = 0; c < kPanelWidth; c += F32::kWidth) store(s.totals + r * kPanelWidth + c, s.total(r, c));
}

struct Fp8Blocking {
  int64_t steps;   // steps of K that are unpacked at a time
  int64_t panels;  // panels that use one block of K in turn, so that rows of x stay in the cache
};

// The blocks of a product in the order of multiplication: panels in chunks, in a chunk blocks of K, then panels.
class Fp8Blocks {
 public:
  int64_t begin = 0, end = 0;  // steps
  int64_t panel;

  Fp8Blocks(const GemmBlock& block, const Fp8Layout& layout, Fp8Blocking blocking)
      : panel(block.panel_begin),
        // blocks are whole groups, or parts of one
        block_steps_(blocking.steps < layout.group_steps ? blocking.steps
                                                         : blocking.steps / layout.group_steps * layout.group_steps),
        max_panels_(block_steps_ >= layout.num_steps ? 1
                                                     : std::min(blocking.panels, block.panel_end - block.panel_begin)),
        first_panel_(panel),
        last_panel_(block.panel_end),
        num_steps_(layout.num_steps),
        group_steps_(layout.group_steps) {
    set_end();
  }

  int64_t max_panels() const { return max_panels_; }
  int64_t max_lines() const { return block_steps_ * kStepLines; }
  int64_t num_lines() const { return (end - begin) * kStepLines; }
  int64_t panel_of_chunk() const { return panel - first_panel_; }
  // Sums of a group that one block does not finish wait for the next block; other sums are finished at once.
  bool sums_wait() const { return block_steps_ < std::min(group_steps_, num_steps_); }

  // False if there is no further block.
  bool advance() {
    const int64_t chunk_end = std::min(first_panel_ + max_panels_, last_panel_);
    if (++panel < chunk_end) return true;
    begin = end;
    if (begin == num_steps_) {
      begin = 0;
      first_panel_ = chunk_end;
    }
    panel = first_panel_;
    set_end();
    return panel < last_panel_;
  }

 private:
  void set_end() {
    const int64_t group_end = (begin / group_steps_ + 1) * group_steps_;
    end = std::min({begin + block_steps_, num_steps_, block_steps_ < group_steps_ ? group_end : num_steps_});
  }

  int64_t block_steps_, max_panels_, first_panel_, last_panel_, num_steps_, group_steps_;
};

// Unpacks a block a few lines at a time while another block is multiplied. fetch() is called at even intervals.
template <class Number>
class Unpacking {
 public:
  static constexpr bool kIsSpread = false;  // the parts of the columns without a call are faster: 1.03 to 1.08 (Zen 3)

  Unpacking(const uint8_t* from, int64_t num_lines, Number* to, int64_t num_calls)
      : from_(from), to_(to), lines_left_(num_lines), lines_per_call_(ceil_div(num_lines, num_calls)) {}

  void fetch() {
    if constexpr (kHas32Registers)
      unpack(lines_per_call_);
    else if (lines_left_ > 0)
      unpack_apart(std::max(lines_per_call_, kLinesApart));
  }
  void finish() { unpack(lines_left_); }

 private:
  static constexpr int64_t kDistance = 8 * 1024;  // in bytes of codes: the distance of the prefetch before unpacking

  // Inline, a tile would keep its sums in memory: unpacking takes as many of 16 registers. More lines at a time,
  // because each call stores and loads the sums.
  static constexpr int64_t kLinesApart = 16;
  __attribute__((noinline)) void unpack_apart(int64_t max_lines) { unpack(max_lines); }

  void unpack(int64_t max_lines) {
    const int64_t lines = std::min(max_lines, lines_left_);
    lines_left_ -= lines;
    unpack_lines(from_, lines, to_, kDistance);
    from_ += lines * kFp8LineCodes;
    to_ += lines * kFp8LineCodes;
  }

  const uint8_t* from_;
  Number* to_;
  int64_t lines_left_, lines_per_call_;
};

// Rows::Number                what codes are unpacked to
// Rows::num_tiles(rows), Rows::first_row(tile, rows)  how rows are cut into tiles
// Rows::num_fetches(rows)     calls of unpacking.fetch() per step over all tiles
// Rows::run(block, row, rows, step, weights, steps, sums, is_first, unpacking)
//                             sums[rows][64] = (is_first ? 0 : sums) + x[row ...][step ...] * weights[steps][...]
template <class Rows>
inline void run_fp8(const GemmBlock& block, Fp8Blocking blocking) {
  using Number = typename Rows::Number;
  const GemmArgs& args = *block.args;
  const Fp8Layout layout(args.weight.k, args.weight.fp8_group_size);
  const int64_t num_rows = block.row_end - block.row_begin, num_tiles = Rows::num_tiles(num_rows);
  const int64_t panel_sums = (num_rows + kPaddedSums) * kPanelWidth;
  Fp8Blocks current(block, layout, blocking);
  const int64_t all_panel_sums = panel_sums * current.max_panels(), max_codes = current.max_lines() * kFp8LineCodes;
  float* const all_sums = static_cast<float*>(
      scratch(Scratch::gemm_tiles, 2 * sizeof(float) * all_panel_sums + 2 * sizeof(Number) * max_codes));
  float* const all_totals = all_sums + all_panel_sums;
  Number* weights = reinterpret_cast<Number*>(all_totals + all_panel_sums);
  Number* next_weights = weights + max_codes;
  alignas(64) float bias[kPanelWidth];
  const auto scales_of = [&](const Fp8Blocks& b) {
    return reinterpret_cast<const float*>(static_cast<const char*>(args.weight.data) + b.panel * layout.panel_bytes);
  };
  const auto codes_of = [&](const Fp8Blocks& b) {
    return reinterpret_cast<const uint8_t*>(scales_of(b) + layout.num_groups * kPanelWidth) + b.begin * kStepCodes;
  };

  Unpacking<Number>(codes_of(current), current.num_lines(), weights, 1).finish();
  for (bool has_next = true; has_next; std::swap(weights, next_weights)) {
    Fp8Blocks next = current;
    has_next = next.advance();
    const int64_t begin = current.begin, end = current.end, num_calls = (end - begin) * Rows::num_fetches(num_rows);
    Unpacking<Number> unpacking(has_next ? codes_of(next) : nullptr, has_next ? next.num_lines() : 0, next_weights,
                                num_calls);
    const float* const scales = scales_of(current);
    if (end == layout.num_steps) load_bias(args, current.panel, bias);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t row = Rows::first_row(tile, num_rows), rows = Rows::first_row(tile + 1, num_rows) - row;
      const int64_t slot = current.panel_of_chunk() * panel_sums + row * kPanelWidth;
      float *const sums = all_sums + (current.sums_wait() ? slot : 0), *const totals = all_totals + slot;
      for (int64_t step = begin, next_step; step < end; step = next_step) {
        const int64_t group = step / layout.group_steps, group_end = (group + 1) * layout.group_steps;
        next_step = std::min(end, group_end);
        Rows::run(block, row, rows, step, weights + (step - begin) * kStepCodes, next_step - step, sums,
                  step == group * layout.group_steps, unpacking);
        const Fp8Sums finished{sums, totals, rows, scales + group * kPanelWidth, group == 0};
        if (next_step == layout.num_steps)
          store_finished(args, {block.row_begin + row, rows, current.panel, bias},
                         [&](int64_t r, int64_t c) { return finished.total(r, c); });
        else if (next_step == group_end)
          add_group(finished);
      }
    }
    unpacking.finish();
    current = next;
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
