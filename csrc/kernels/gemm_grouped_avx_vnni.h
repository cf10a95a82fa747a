// Whole groups and super-groups of a panel on AVX-VNNI, for 3 to 6 rows: parts of 16 columns, integer sums in 12
// registers, float sums and sums of super-groups in L1. A run has at least one group, and a group a multiple of four
// quads.
//
// Assembly, because g++ 12 stores all sums after every four quads, and copies or spills them again at the end of a
// group.
//
// Registers: ymm0, 1 weights, then factors or products of scales; ymm2 a quad of the input, then the scale of a row;
// ymm3 a mask of the low halves, then a row's number for the offsets; ymm4..15 the sums, row r from 4 + 2 r on.
#pragma once

#include <cstddef>

#include "gemm_grouped_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kPartColumns = 16, kNumParts = kPanelWidth / kPartColumns;
constexpr int64_t kStepQuads = 4;
constexpr int kMinPartRows = 3, kMostPartRows = 6;

// Operands that the assembly reads from memory, because there are not enough registers.
struct PartTile {
  int64_t num_groups;     // counts down
  int64_t steps;          // of four quads in a group
  int64_t number_pitch;   // bytes between the numbers of rows for consecutive groups
  int64_t factor_pitch;   // bytes between the factors of consecutive groups
  int64_t lines;          // fetched ahead in each step, 0 to 4
  int64_t fetched_bytes;  // in each step
  int64_t low_halves = 0x0f0f0f0f;

  // A step fetches as much as one call of prefetch.fetch(); with packed codes, half as much. A line whose halves belong
  // to two steps is fetched in both.
  PartTile(int64_t num_groups, int64_t group_quads, const QuantizedRows& input, int64_t factor_pitch,
           const Prefetch& prefetch, bool is_packed)
      : num_groups(num_groups),
        steps(group_quads / kStepQuads),
        number_pitch(4 * input.number_pitch),
        factor_pitch(factor_pitch),
        lines(is_packed ? (prefetch.lines + 1) / 2 : prefetch.lines),
        fetched_bytes((is_packed ? 32 : 64) * prefetch.lines) {}
};

// clang-format off

#ifdef __AVXVNNI__
#define QUIRE_VPDPBUSD "%{vex%} vpdpbusd"
#else  // QUIRE_EVEX_VNNI of CMakeLists.txt
#define QUIRE_VPDPBUSD "vpdpbusd"
#endif

// F(row, place of its quads, its two sums, argument) for each row. The assembler leaves out rows that a tile does not
// have, so one text serves every height.
#define QUIRE_ROWS(F, argument)                   \
  F(0, "(%[x])", 4, 5, argument)                  \
  F(1, "(%[x], %[stride])", 6, 7, argument)       \
  F(2, "(%[x], %[stride], 2)", 8, 9, argument)    \
  F(3, "(%[x3])", 10, 11, argument)               \
  F(4, "(%[x3], %[stride])", 12, 13, argument)    \
  F(5, "(%[x3], %[stride], 2)", 14, 15, argument)
#define QUIRE_IF_ROW(row) ".if %c[rows] > " #row "\n"
#define QUIRE_IF(condition) ".if %c[" #condition "]\n"
#define QUIRE_END ".endif\n"

#define QUIRE_FETCH_AHEAD              \
  "cmpq $1, %c[lines](%[tile])\n"      \
  "jb 9f\n"                            \
  "prefetcht1 (%[next])\n"             \
  "je 9f\n"                            \
  "prefetcht1 64(%[next])\n"           \
  "cmpq $3, %c[lines](%[tile])\n"      \
  "jb 9f\n"                            \
  "prefetcht1 128(%[next])\n"          \
  "je 9f\n"                            \
  "prefetcht1 192(%[next])\n"          \
  "9:\n"                               \
  "add %c[fetched_bytes](%[tile]), %[next]\n"

#define QUIRE_ZERO_ROW(row, x, s0, s1, argument)                 \
  QUIRE_IF_ROW(row)                                              \
  "vpxor %%ymm" #s0 ", %%ymm" #s0 ", %%ymm" #s0 "\n"             \
  "vpxor %%ymm" #s1 ", %%ymm" #s1 ", %%ymm" #s1 "\n"             \
  QUIRE_END

// One quad of a row times one quad of the weights.
#define QUIRE_DOT_ROW(row, x, s0, s1, quad)                      \
  QUIRE_IF_ROW(row)                                              \
  "vpbroadcastd 4*" #quad x ", %%ymm2\n"                         \
  QUIRE_VPDPBUSD " %%ymm2, %%ymm0, %%ymm" #s0 "\n"               \
  QUIRE_VPDPBUSD " %%ymm2, %%ymm1, %%ymm" #s1 "\n"               \
  QUIRE_END

#define QUIRE_DOT_BYTES(quad)                                    \
  "vmovdqu 256*" #quad "(%[weights]), %%ymm0\n"                  \
  "vmovdqu 256*" #quad "+32(%[weights]), %%ymm1\n"               \
  QUIRE_ROWS(QUIRE_DOT_ROW, quad)
#define QUIRE_DOT_HALVES(pair, low, high)                        \
  "vpand 256*" #pair "(%[weights]), %%ymm3, %%ymm0\n"            \
  "vpand 256*" #pair "+32(%[weights]), %%ymm3, %%ymm1\n"         \
  QUIRE_ROWS(QUIRE_DOT_ROW, low)                                 \
  "vmovdqu 256*" #pair "(%[weights]), %%ymm0\n"                  \
  "vmovdqu 256*" #pair "+32(%[weights]), %%ymm1\n"               \
  "vpsrlw $4, %%ymm0, %%ymm0\n"                                  \
  "vpsrlw $4, %%ymm1, %%ymm1\n"                                  \
  "vpand %%ymm0, %%ymm3, %%ymm0\n"                               \
  "vpand %%ymm1, %%ymm3, %%ymm1\n"                               \
  QUIRE_ROWS(QUIRE_DOT_ROW, high)

// The products of a group.
#define QUIRE_DOT_GROUP                                          \
  "mov %c[steps](%[tile]), %[step]\n"                            \
  QUIRE_IF(packed)                                               \
  "vpbroadcastd %c[low_halves](%[tile]), %%ymm3\n"               \
  QUIRE_END                                                      \
  "2:\n"                                                         \
  QUIRE_FETCH_AHEAD                                              \
  QUIRE_IF(packed)                                               \
  QUIRE_DOT_HALVES(0, 0, 1)                                      \
  QUIRE_DOT_HALVES(1, 2, 3)                                      \
  "add $512, %[weights]\n"                                       \
  ".else\n"                                                      \
  QUIRE_DOT_BYTES(0) QUIRE_DOT_BYTES(1)                          \
  QUIRE_DOT_BYTES(2) QUIRE_DOT_BYTES(3)                          \
  "add $1024, %[weights]\n"                                      \
  QUIRE_END                                                      \
  "add $16, %[x]\n"                                              \
  "add $16, %[x3]\n"                                             \
  "dec %[step]\n"                                                \
  "jnz 2b\n"

// add_group() for a row
#define QUIRE_ADD_ROW(row, x, s0, s1, argument)                                                       \
  QUIRE_IF_ROW(row)                                                                                   \
  "vbroadcastss 4*" #row "(%[factors]), %%ymm3\n"                                                     \
  QUIRE_IF(middle)                                                                                    \
  "vpsubd %%ymm3, %%ymm" #s0 ", %%ymm" #s0 "\n"                                                       \
  "vpsubd %%ymm3, %%ymm" #s1 ", %%ymm" #s1 "\n"                                                       \
  QUIRE_END                                                                                           \
  "vcvtdq2ps %%ymm" #s0 ", %%ymm" #s0 "\n"                                                            \
  "vcvtdq2ps %%ymm" #s1 ", %%ymm" #s1 "\n"                                                            \
  QUIRE_IF(zeros)                                                                                     \
  "vfmadd231ps 256(%[numbers]), %%ymm3, %%ymm" #s0 "\n"                                               \
  "vfmadd231ps 256+32(%[numbers]), %%ymm3, %%ymm" #s1 "\n"                                            \
  QUIRE_END                                                                                           \
  "vbroadcastss 4*" #row "(%[scales]), %%ymm2\n"                                                      \
  "vmulps (%[numbers]), %%ymm2, %%ymm0\n"                                                             \
  "vmulps 32(%[numbers]), %%ymm2, %%ymm1\n"                                                           \
  "vfmadd213ps 256*" #row "(%[totals]), %%ymm0, %%ymm" #s0 "\n"                                       \
  "vfmadd213ps 256*" #row "+32(%[totals]), %%ymm1, %%ymm" #s1 "\n"                                    \
  QUIRE_IF(minima)                                                                                    \
  "vfmadd231ps 256(%[numbers]), %%ymm3, %%ymm" #s0 "\n"                                               \
  "vfmadd231ps 256+32(%[numbers]), %%ymm3, %%ymm" #s1 "\n"                                            \
  QUIRE_END                                                                                           \
  "vmovups %%ymm" #s0 ", 256*" #row "(%[totals])\n"                                                   \
  "vmovups %%ymm" #s1 ", 256*" #row "+32(%[totals])\n"                                                \
  QUIRE_END

// The sums of a row begin with a number for the zero in the middle.
#define QUIRE_BEGIN_ROW(row, x, s0, s1, argument)                                                     \
  QUIRE_IF_ROW(row)                                                                                   \
  "vpbroadcastd 4*" #row "(%[zeros]), %%ymm2\n"                                                       \
  "vpsubd %%ymm2, %%ymm0, %%ymm" #s0 "\n"                                                             \
  "vmovdqa %%ymm" #s0 ", %%ymm" #s1 "\n"                                                              \
  QUIRE_END

// add_factor_group() for a row
#define QUIRE_ADD_FACTOR_ROW(row, x, s0, s1, argument)                                                \
  QUIRE_IF_ROW(row)                                                                                   \
  "vpmulld %%ymm0, %%ymm" #s0 ", %%ymm" #s0 "\n"                                                      \
  "vpmulld %%ymm1, %%ymm" #s1 ", %%ymm" #s1 "\n"                                                      \
  "vpaddd 256*" #row "(%[before]), %%ymm" #s0 ", %%ymm" #s0 "\n"                                      \
  "vpaddd 256*" #row "+32(%[before]), %%ymm" #s1 ", %%ymm" #s1 "\n"                                   \
  "vmovdqu %%ymm" #s0 ", 256*" #row "(%[supers])\n"                                                   \
  "vmovdqu %%ymm" #s1 ", 256*" #row "+32(%[supers])\n"                                                \
  QUIRE_END

#define QUIRE_TILE_OPERANDS                                                                           \
  [lines] "i"(offsetof(PartTile, lines)), [fetched_bytes] "i"(offsetof(PartTile, fetched_bytes)),     \
  [groups] "i"(offsetof(PartTile, num_groups)), [steps] "i"(offsetof(PartTile, steps)),               \
  [pitch] "i"(offsetof(PartTile, number_pitch)), [low_halves] "i"(offsetof(PartTile, low_halves))
#define QUIRE_CLOBBERS                                                                                \
  "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",     \
  "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"

// clang-format on

// Adds the groups of the run to run.totals[kRows][64], with the bits of add_group().
template <int kRows, bool kPacked, Offset kOffset>
void add_groups_of_parts(const GroupRun& run, Prefetch& prefetch) {
  static_assert(kRows >= kMinPartRows && kRows <= kMostPartRows);
  static_assert(sizeof(DecodedGroup) == 512 && offsetof(DecodedGroup, offsets) == 256);
  const QuantizedRows& input = *run.input;
  if (run.first_group == 0) std::fill(run.totals, run.totals + kRows * kPanelWidth, 0.0f);
  for (int64_t part = 0; part < kNumParts; ++part) {
    PartTile tile(run.num_groups, run.group_quads, input, 0, prefetch, kPacked);
    const int8_t *x = input.codes + run.row * input.stride + run.first_group * run.group_quads * kQuad,
                 *x3 = x + 3 * input.stride;
    const uint8_t* weights = run.weights + part * kPartColumns * kQuad;
    const char* numbers = reinterpret_cast<const char*>(run.numbers) + part * kPartColumns * 4;
    const float *scales = input.scales + input.at(run.row, run.first_group),
                *factors = input.offset_factors + input.at(run.row, run.first_group);
    float* const totals = run.totals + part * kPartColumns;
    int64_t step;
    // clang-format off
    __asm__ volatile(
        "1:\n"  // a group
        QUIRE_ROWS(QUIRE_ZERO_ROW, 0)
        QUIRE_DOT_GROUP
        QUIRE_ROWS(QUIRE_ADD_ROW, 0)
        "add $512, %[numbers]\n"
        "add %c[pitch](%[tile]), %[scales]\n"
        "add %c[pitch](%[tile]), %[factors]\n"
        "decq %c[groups](%[tile])\n"
        "jnz 1b\n"
        : [x] "+&r"(x), [x3] "+&r"(x3), [weights] "+&r"(weights), [numbers] "+&r"(numbers), [scales] "+&r"(scales),
          [factors] "+&r"(factors), [next] "+&r"(prefetch.next), [step] "=&r"(step)
        : [tile] "r"(&tile), [stride] "r"(input.stride), [totals] "r"(totals), [rows] "i"(kRows), [packed] "i"(kPacked),
          [middle] "i"(kOffset == Offset::middle), [zeros] "i"(kOffset == Offset::zeros),
          [minima] "i"(kOffset == Offset::minima), QUIRE_TILE_OPERANDS
        : QUIRE_CLOBBERS);
    // clang-format on
  }
}

// Adds the super-groups of the run to run.totals[kRows][64], with the bits of add_super(). `supers` [kRows][64] is its
// own.
template <int kRows, bool kPacked, Offset kOffset>
void add_supers_of_parts(const SuperRun& run, int32_t* supers, Prefetch prefetch) {
  static_assert(kRows >= kMinPartRows && kRows <= kMostPartRows && kOffset != Offset::zeros);
  static constexpr int32_t kNone[kRows * kPanelWidth] = {};  // sums before the first group
  const QuantizedRows& input = *run.input;
  const int64_t super_quads = run.super_groups * run.group_quads;
  const int8_t* codes = input.codes + run.row * input.stride + run.first_group() * run.group_quads * kQuad;
  const int32_t* zeros_of_super = input.zero_sums + input.at(run.row, run.first_super * input.sums_per_scale);
  const uint8_t* weights_of_super = run.weights;
  FactorNumbers numbers = run.numbers;
  for (int64_t super = 0; super < run.num_supers; ++super, numbers.next_super(run.super_groups)) {
    for (int64_t part = 0; part < kNumParts; ++part) {
      PartTile tile(run.super_groups, run.group_quads, input, numbers.group_bytes, prefetch, kPacked);
      const int8_t *x = codes, *x3 = x + 3 * input.stride;
      const uint8_t* weights = weights_of_super + part * kPartColumns * kQuad;
      const int8_t* factors = numbers.factors + part * kPartColumns;
      const int32_t *zeros = zeros_of_super, *before = kNone;
      int32_t* const to = supers + part * kPartColumns;
      int64_t step;
      // clang-format off
      __asm__ volatile(
          "1:\n"  // a group
          QUIRE_IF(middle)
          "vpxor %%ymm0, %%ymm0, %%ymm0\n"
          QUIRE_ROWS(QUIRE_BEGIN_ROW, 0)
          "add %c[pitch](%[tile]), %[zeros]\n"
          ".else\n"
          QUIRE_ROWS(QUIRE_ZERO_ROW, 0)
          QUIRE_END
          QUIRE_DOT_GROUP
          "vpmovsxbd (%[factors]), %%ymm0\n"
          "vpmovsxbd 8(%[factors]), %%ymm1\n"
          QUIRE_ROWS(QUIRE_ADD_FACTOR_ROW, 0)
          "mov %[supers], %[before]\n"
          "add %c[factor_pitch](%[tile]), %[factors]\n"
          "decq %c[groups](%[tile])\n"
          "jnz 1b\n"
          : [x] "+&r"(x), [x3] "+&r"(x3), [weights] "+&r"(weights), [factors] "+&r"(factors), [zeros] "+&r"(zeros),
            [before] "+&r"(before), [next] "+&r"(prefetch.next), [step] "=&r"(step)
          : [tile] "r"(&tile), [stride] "r"(input.stride), [supers] "r"(to), [rows] "i"(kRows), [packed] "i"(kPacked),
            [middle] "i"(kOffset == Offset::middle), [factor_pitch] "i"(offsetof(PartTile, factor_pitch)),
            QUIRE_TILE_OPERANDS
          : QUIRE_CLOBBERS);
      // clang-format on
    }
    add_super_of_rows<kOffset>(run, numbers, super, kRows, supers);
    codes += super_quads * kQuad;
    weights_of_super += super_quads / (kPacked ? 2 : 1) * kQuadBytes;
    zeros_of_super += input.sums_per_scale * input.number_pitch;
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
