// Integer products of rows with grouped weights on NEON, exact on each step of the ladder:
//   neon_i8mm     2 rows times 2 columns, 8 k each (smmla, or usmmla for codes of 8 bits); one row by dot products
//   neon_dotprod  dot products of 4 k (sdot)
//   neon          16-bit products of two quads, added in pairs to 32 bits
// Without usmmla codes of 8 bits are taken minus 128. Then a 16-bit sum is at most 2 * 128 * 127 < 2^15.
#pragma once

#include <utility>

#include "gemm_grouped_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr bool kHasDots = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_DOTPROD,
               kHasMatrices = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM;
constexpr int64_t kStepQuads = 4;  // a register of a row's codes; groups and their parts are multiples
constexpr int kColumnsPerVector = 4;

template <Codes kCodes>
constexpr int64_t kStepBytes = kStepQuads * kQuadBytes / (is_packed(kCodes) ? 2 : 1);

// Whether the sums of these codes contain no part for a zero in the middle of the codes.
template <Codes kCodes, Offset kOffset>
constexpr bool kWithoutMiddle =
    kOffset == Offset::middle && (kCodes == Codes::unpacked || (kCodes == Codes::bytes && !kHasMatrices));

// Two quads of four columns.
struct QuadPair {
  int8x16_t first, second;
};

// Pair 0 or 1 of a step.
template <Codes kCodes>
[[gnu::always_inline]] inline QuadPair load_pair(const uint8_t* weights, int pair) {
  if constexpr (is_packed(kCodes)) {
    const uint8x16_t both = vld1q_u8(weights + pair * kQuadBytes);
    uint8x16_t first = vandq_u8(both, vdupq_n_u8(0x0f)), second = vshrq_n_u8(both, 4);
    if constexpr (kCodes == Codes::floats) {
      const uint8x16_t table = vld1q_u8(kE2m1);
      first = vqtbl1q_u8(table, first), second = vqtbl1q_u8(table, second);
    }
    return {vreinterpretq_s8_u8(first), vreinterpretq_s8_u8(second)};
  } else {
    uint8x16_t first = vld1q_u8(weights + 2 * pair * kQuadBytes),
               second = vld1q_u8(weights + (2 * pair + 1) * kQuadBytes);
    if constexpr (kCodes == Codes::bytes && !kHasMatrices) {
      first = veorq_u8(first, vdupq_n_u8(0x80));
      second = veorq_u8(second, vdupq_n_u8(0x80));
    }
    return {vreinterpretq_s8_u8(first), vreinterpretq_s8_u8(second)};
  }
}

// The sum of a row's codes times 128, for codes of the weight that were taken minus 128.
template <bool kIsNeeded>
struct MiddlePart {
  int32x4_t sums = vdupq_n_s32(0);

  [[gnu::always_inline]] void add(int8x16_t x) {
    if constexpr (kIsNeeded) sums = vpadalq_s16(sums, vpaddlq_s8(x));
  }
  [[gnu::always_inline]] I32 add_to(I32 x) const {
    if constexpr (!kIsNeeded) return x;
    return vaddq_s32(x, vdupq_n_s32(vaddvq_s32(sums) * 128));
  }
};

// Sums of kRows rows and kVectors vectors of columns. add() takes a step of the rows and of the weights.
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_DOTPROD

template <Codes kCodes, int kLane>
[[gnu::always_inline]] inline int32x4_t dot(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM
  if constexpr (kCodes == Codes::bytes) return vusdotq_laneq_s32(sum, vreinterpretq_u8_s8(w), x, kLane);
#endif
  return vdotq_laneq_s32(sum, w, x, kLane);
}

template <int kRows, Codes kCodes, bool kNeedsMiddle>
struct DotSums {
  static constexpr int kVectors = kRows == 1 ? 16 : kRows <= 3 ? 8 : 4;

  int32x4_t sums[kRows][kVectors] = {};
  MiddlePart<kNeedsMiddle> middle[kRows];

  template <int kPair>
  [[gnu::always_inline]] void add_pair(const int8x16_t (&x)[kRows], const uint8_t* weights) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const QuadPair w = load_pair<kCodes>(weights + v * 16, kPair);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][v] = dot<kCodes, 2 * kPair>(sums[r][v], w.first, x[r]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][v] = dot<kCodes, 2 * kPair + 1>(sums[r][v], w.second, x[r]);
    }
  }

  [[gnu::always_inline]] void add(const int8_t* codes, int64_t stride, const uint8_t* weights) {
    int8x16_t x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      x[r] = vld1q_s8(codes + r * stride);
      middle[r].add(x[r]);
    }
    add_pair<0>(x, weights);
    add_pair<1>(x, weights);
  }

  [[gnu::always_inline]] I32 of(int row, int v) const { return middle[row].add_to(sums[row][v]); }
};

#else

template <int kRows, Codes kCodes, bool kNeedsMiddle>
struct DotSums {
  static constexpr int kVectors = kRows == 1 ? 8 : 4;

  int32x4_t low[kRows][kVectors] = {}, high[kRows][kVectors] = {};  // of two columns each: pairs of k
  MiddlePart<kNeedsMiddle> middle[kRows];

  template <int kPair>
  [[gnu::always_inline]] void add_pair(const int8x16_t (&x)[kRows], const uint8_t* weights) {
    int8x16_t first[kRows], second[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      first[r] = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x[r]), 2 * kPair));
      second[r] = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x[r]), 2 * kPair + 1));
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const QuadPair w = load_pair<kCodes>(weights + v * 16, kPair);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const int16x8_t of_low = vmull_s8(vget_low_s8(w.first), vget_low_s8(first[r])),
                        of_high = vmull_high_s8(w.first, first[r]);
        low[r][v] = vpadalq_s16(low[r][v], vmlal_s8(of_low, vget_low_s8(w.second), vget_low_s8(second[r])));
        high[r][v] = vpadalq_s16(high[r][v], vmlal_high_s8(of_high, w.second, second[r]));
      }
    }
  }

  [[gnu::always_inline]] void add(const int8_t* codes, int64_t stride, const uint8_t* weights) {
    int8x16_t x[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      x[r] = vld1q_s8(codes + r * stride);
      middle[r].add(x[r]);
    }
    add_pair<0>(x, weights);
    add_pair<1>(x, weights);
  }

  [[gnu::always_inline]] I32 of(int row, int v) const {
    return middle[row].add_to(vpaddq_s32(low[row][v], high[row][v]));
  }
};

#endif

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON_I8MM

template <Codes kCodes>
[[gnu::always_inline]] inline int32x4_t multiply_matrices(int32x4_t sum, int8x16_t w, int8x16_t x) {
  if constexpr (kCodes == Codes::bytes) return vusmmlaq_s32(sum, vreinterpretq_u8_s8(w), x);
  return vmmlaq_s32(sum, w, x);
}

template <int kRows, Codes kCodes>
struct MatrixSums {
  static constexpr int kPairs = (kRows + 1) / 2, kVectors = kPairs == 1 ? 8 : 4;

  int32x4_t sums[kPairs][kVectors][2] = {};  // of two columns each: [column][row]

  template <int kPair>
  [[gnu::always_inline]] void add_pair(const int8x16_t (&x)[kPairs], const uint8_t* weights) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const QuadPair w = load_pair<kCodes>(weights + v * 16, kPair);
      const int32x4_t first = vreinterpretq_s32_s8(w.first), second = vreinterpretq_s32_s8(w.second);
      const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(first, second)),
                      high = vreinterpretq_s8_s32(vzip2q_s32(first, second));
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p) {
        sums[p][v][0] = multiply_matrices<kCodes>(sums[p][v][0], low, x[p]);
        sums[p][v][1] = multiply_matrices<kCodes>(sums[p][v][1], high, x[p]);
      }
    }
  }

  [[gnu::always_inline]] void add(const int8_t* codes, int64_t stride, const uint8_t* weights) {
    int8x16_t first[kPairs], second[kPairs];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      const int8_t* const even = codes + 2 * p * stride;
      const int8_t* const odd = 2 * p + 1 < kRows ? even + stride : even;
      const int64x2_t x = vreinterpretq_s64_s8(vld1q_s8(even)), y = vreinterpretq_s64_s8(vld1q_s8(odd));
      first[p] = vreinterpretq_s8_s64(vzip1q_s64(x, y));
      second[p] = vreinterpretq_s8_s64(vzip2q_s64(x, y));
    }
    add_pair<0>(first, weights);
    add_pair<1>(second, weights);
  }

  [[gnu::always_inline]] I32 of(int row, int v) const {
    const auto& both = sums[row / 2][v];
    return row % 2 == 0 ? vuzp1q_s32(both[0], both[1]) : vuzp2q_s32(both[0], both[1]);
  }
};

template <int kRows, Codes kCodes, bool kNeedsMiddle>
using Sums = std::conditional_t<kRows == 1, DotSums<1, kCodes, kNeedsMiddle>, MatrixSums<kRows, kCodes>>;

#else

template <int kRows, Codes kCodes, bool kNeedsMiddle>
using Sums = DotSums<kRows, kCodes, kNeedsMiddle>;

#endif

template <class RowSums>
constexpr int64_t kColumnsOf = RowSums::kVectors * kColumnsPerVector;

template <class RowSums>
using ShareOf = Spread<kPanelWidth / kColumnsOf<RowSums>, Prefetch>;

// The calls of fetch() that a step makes.
template <Codes kCodes>
constexpr int kStepCalls = kStepQuads / (is_packed(kCodes) ? 2 : 1);

template <int kRows, Codes kCodes, bool kSigned>
void run_rows(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int32_t* out, bool is_first,
              Prefetch& prefetch) {
  using RowSums = Sums<kRows, kCodes, kCodes == Codes::bytes && !kSigned && !kHasMatrices>;
  constexpr int64_t kColumns = kColumnsOf<RowSums>;
  ShareOf<RowSums> share(prefetch);
  for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
    RowSums sums;
    const uint8_t* w = weights + column * kQuad;
    const int8_t* x = codes;
    for (int64_t quad = 0; quad < quads; quad += kStepQuads, w += kStepBytes<kCodes>, x += kStepQuads * kQuad) {
      share.fetch(kStepCalls<kCodes>);
      sums.add(x, stride, w);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < RowSums::kVectors; ++v) {
        int32_t* const to = out + r * kPanelWidth + column + v * kColumnsPerVector;
        store_i32(to, is_first ? sums.of(r, v) : add(load_i32(to), sums.of(r, v)));
      }
  }
}

// All groups of a block, for kRows rows: integer sums stay in registers.
template <int kRows, Codes kCodes, Offset kOffset>
void add_groups(const GroupRun& run, Prefetch& prefetch) {
  constexpr bool kSigned = kWithoutMiddle<kCodes, kOffset>;
  using RowSums = Sums<kRows, kCodes, kCodes == Codes::bytes && !kSigned && !kHasMatrices>;
  constexpr int kVectors = RowSums::kVectors;
  constexpr int64_t kColumns = kColumnsOf<RowSums>;
  const QuantizedRows& input = *run.input;
  const int8_t* const codes = input.codes + run.row * input.stride + run.first_group * run.group_quads * kQuad;
  ShareOf<RowSums> share(prefetch);
  for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
    const uint8_t* w = run.weights + column * kQuad;
    const int8_t* x = codes;
    float* const totals = run.totals + column;
    for (int64_t g = 0; g < run.num_groups; ++g) {
      RowSums sums;
      for (int64_t quad = 0; quad < run.group_quads;
           quad += kStepQuads, w += kStepBytes<kCodes>, x += kStepQuads * kQuad) {
        share.fetch(kStepCalls<kCodes>);
        sums.add(x, input.stride, w);
      }
      const float* const scales = run.numbers[g].scales + column;
      const float* const offsets = run.numbers[g].offsets + column;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const RowNumbers of_row(input, input.at(run.row + r, run.first_group + g));
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = v * kColumnsPerVector;
          const F32 total = run.first_group + g == 0 ? zero() : load(totals + r * kPanelWidth + at);
          const F32 offset = kOffset == Offset::middle ? zero() : load(offsets + at);
          store(totals + r * kPanelWidth + at,
                add_group<kOffset, kSigned>(total, sums.of(r, v), of_row, load(scales + at), offset));
        }
      }
    }
  }
}

struct DotTile {
  static constexpr int64_t kBlockQuads = 64;
  static constexpr int64_t kMaxRows = kHasDots ? 6 : 2, kRowUnit = 1;
  static constexpr bool kSigned = true, kAddsGroups = true;
  static bool adds_groups(int64_t) { return true; }
  static bool reads_packed(int64_t rows, int64_t) { return rows <= 2 * kMaxRows; }
  static bool is_in_order(int64_t, Codes) { return true; }
  static int super_passes(int64_t) { return 1; }

  template <Codes kCodes, Offset kOffset>
  static void add_groups(int rows, const GroupRun& run, Prefetch& prefetch) {
    of_rows(rows, [&]<int kRows>() { QUIRE_ISA::add_groups<kRows, kCodes, kOffset>(run, prefetch); });
  }

  template <Codes kCodes, Offset kOffset, bool kSignedCodes>
  static void add_supers(int rows, const SuperRun& run, int32_t* sums, int32_t* supers, const PrefetchPlan& plan,
                         int pass) {
    add_supers_through_memory<DotTile, kCodes, kOffset, kSignedCodes>(rows, run, sums, supers, plan.of_pass(pass));
  }

  template <Codes kCodes, bool kSignedCodes>
  static void run(int rows, int, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads,
                  int32_t* sums, bool is_first, Prefetch& prefetch) {
    of_rows(rows, [&]<int kRows>() {
      run_rows<kRows, kCodes, kSignedCodes>(codes, stride, weights, quads, sums, is_first, prefetch);
    });
  }

 private:
  // Calls run.template operator()<kRows>() with kRows = rows.
  template <class Run>
  static void of_rows(int rows, const Run& run) {
    [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
      static_cast<void>(((rows == kRow + 1 && (run.template operator()<kRow + 1>(), true)) || ...));
    }(std::make_integer_sequence<int, kMaxRows>());
  }
};

}  // namespace
}  // namespace quire::QUIRE_ISA
