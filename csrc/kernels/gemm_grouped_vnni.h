// Whole groups of a panel on VNNI: up to 6 rows x 64 columns, integer sums in 24 registers, float sums in L1.
//
// This is assembly to control the registers: g++ 12 spills or copies 24 accumulators as soon as their float form is
// needed too, and the sums then go through memory once more. On Zen 5 the unpacking of 4-bit codes and the conversion
// to float run beside two dot products a cycle. A group costs a multiplication and a multiply-add per vector (two with
// zeros or minima), and some of the cycles that store vectors.
//
// The next block is fetched into L1, not only into L2: 1.05 to 1.15 times as fast at 1 to 8 rows, the same at 32.
//
// Registers: zmm0..3 weights, then scales; zmm4 a quad of the input, then the scale of a row; zmm5 the integers of e2m1
// codes, then products of scales; zmm6 a row's factor of the offsets; zmm7 a mask of the low halves; zmm8..31 the sums,
// row r from 8 + 4 r on.
#pragma once

#include <cstddef>

#include "gemm_grouped_blocks.h"

namespace quire::QUIRE_ISA {
namespace {

// Operands that the assembly reads from memory, because there are not enough registers.
struct GroupTile {
  int64_t num_groups;    // counts down
  int64_t steps;         // of 256 bytes of weights in a group
  int64_t number_pitch;  // bytes between the numbers of rows for consecutive groups
  int64_t lines;         // fetched ahead in each step, 0 to 4
  int64_t line_bytes;    // the same
  int64_t low_halves = 0x0f0f0f0f;
  const uint8_t* floats = kE2m1;
};

// clang-format off

// F(row, place of its quads, its four sums, argument) for each row. The assembler leaves out rows that a tile does not
// have, so one text serves every height.
#define QUIRE_ROWS(F, argument)                           \
  F(0, "(%[x])", 8, 9, 10, 11, argument)                  \
  F(1, "(%[x], %[stride])", 12, 13, 14, 15, argument)     \
  F(2, "(%[x], %[stride], 2)", 16, 17, 18, 19, argument)  \
  F(3, "(%[x3])", 20, 21, 22, 23, argument)               \
  F(4, "(%[x3], %[stride])", 24, 25, 26, 27, argument)    \
  F(5, "(%[x3], %[stride], 2)", 28, 29, 30, 31, argument)
#define QUIRE_IF_ROW(row) ".if %c[rows] > " #row "\n"
#define QUIRE_IF(condition) ".if %c[" #condition "]\n"
#define QUIRE_END ".endif\n"

// Prefetch::fetch(), of 0 to 4 lines
#define QUIRE_FETCH_AHEAD              \
  "cmpq $1, %c[lines](%[tile])\n"      \
  "jb 9f\n"                            \
  "prefetcht0 (%[next])\n"             \
  "je 9f\n"                            \
  "prefetcht0 64(%[next])\n"           \
  "cmpq $3, %c[lines](%[tile])\n"      \
  "jb 9f\n"                            \
  "prefetcht0 128(%[next])\n"          \
  "je 9f\n"                            \
  "prefetcht0 192(%[next])\n"          \
  "9:\n"                               \
  "add %c[line_bytes](%[tile]), %[next]\n"

#define QUIRE_ZERO(sum) "vpxord %%zmm" #sum ", %%zmm" #sum ", %%zmm" #sum "\n"
#define QUIRE_ZERO_ROW(row, x, s0, s1, s2, s3, argument) \
  QUIRE_IF_ROW(row) QUIRE_ZERO(s0) QUIRE_ZERO(s1) QUIRE_ZERO(s2) QUIRE_ZERO(s3) QUIRE_END

// One quad of a row times one quad of the weights.
#define QUIRE_DOT(sum, v) "vpdpbusd %%zmm4, %%zmm" #v ", %%zmm" #sum "\n"
#define QUIRE_DOT_ROW(row, x, s0, s1, s2, s3, quad)                      \
  QUIRE_IF_ROW(row)                                                      \
  "vpbroadcastd 4*" #quad x ", %%zmm4\n"                                 \
  QUIRE_DOT(s0, 0) QUIRE_DOT(s1, 1) QUIRE_DOT(s2, 2) QUIRE_DOT(s3, 3)    \
  QUIRE_END

// instruction <vector of the weights>, ..., zmm0..3
#define QUIRE_FROM_WEIGHTS(instruction, middle)                                                       \
  instruction " (%[weights])" middle ", %%zmm0\n" instruction " 64(%[weights])" middle ", %%zmm1\n"    \
  instruction " 128(%[weights])" middle ", %%zmm2\n" instruction " 192(%[weights])" middle ", %%zmm3\n"

// The integers of the codes in zmm0..3.
#define QUIRE_LOOK_UP                                                                                  \
  QUIRE_IF(floats)                                                                                     \
  "vpshufb %%zmm0, %%zmm5, %%zmm0\n" "vpshufb %%zmm1, %%zmm5, %%zmm1\n"                                \
  "vpshufb %%zmm2, %%zmm5, %%zmm2\n" "vpshufb %%zmm3, %%zmm5, %%zmm3\n"                                \
  QUIRE_END

// add_group() for one vector
#define QUIRE_ADD(row, sum, v)                                                                        \
  QUIRE_IF(middle) "vpsubd %%zmm6, %%zmm" #sum ", %%zmm" #sum "\n" QUIRE_END                          \
  "vmulps %%zmm4, %%zmm" #v ", %%zmm5\n"                                                              \
  "vcvtdq2ps %%zmm" #sum ", %%zmm" #sum "\n"                                                          \
  QUIRE_IF(zeros) "vfmadd231ps 256+64*" #v "(%[numbers]), %%zmm6, %%zmm" #sum "\n" QUIRE_END          \
  "vfmadd213ps 256*" #row "+64*" #v "(%[totals]), %%zmm5, %%zmm" #sum "\n"                            \
  QUIRE_IF(minima) "vfmadd231ps 256+64*" #v "(%[numbers]), %%zmm6, %%zmm" #sum "\n" QUIRE_END         \
  "vmovaps %%zmm" #sum ", 256*" #row "+64*" #v "(%[totals])\n"
#define QUIRE_ADD_ROW(row, x, s0, s1, s2, s3, argument)                                               \
  QUIRE_IF_ROW(row)                                                                                   \
  "vbroadcastss 4*" #row "(%[scales]), %%zmm4\n"                                                      \
  "vbroadcastss 4*" #row "(%[factors]), %%zmm6\n"                                                     \
  QUIRE_ADD(row, s0, 0) QUIRE_ADD(row, s1, 1) QUIRE_ADD(row, s2, 2) QUIRE_ADD(row, s3, 3)             \
  QUIRE_END

// clang-format on

// Adds the groups of the run to run.totals[kRows][64], with the bits of add_group(). Calls prefetch.fetch() once per
// 256 bytes of weights.
template <int kRows, Codes kCodes, Offset kOffset>
void add_groups_vnni(const GroupRun& run, Prefetch& prefetch) {
  constexpr bool kPacked = is_packed(kCodes);
  static_assert(sizeof(DecodedGroup) == 512 && offsetof(DecodedGroup, offsets) == 256);
  const QuantizedRows& input = *run.input;
  GroupTile tile{.num_groups = run.num_groups,
                 .steps = run.group_quads / (kPacked ? 2 : 1),
                 .number_pitch = 4 * input.number_pitch,
                 .lines = prefetch.lines,
                 .line_bytes = 64 * prefetch.lines};
  const int8_t *x = input.codes + run.row * input.stride + run.first_group * run.group_quads * kQuad,
               *x3 = x + 3 * input.stride;
  const uint8_t* weights = run.weights;
  const DecodedGroup* numbers = run.numbers;
  const float *scales = input.scales + input.at(run.row, run.first_group),
              *factors = input.offset_factors + input.at(run.row, run.first_group);
  int64_t step;
  if (run.first_group == 0) std::fill(run.totals, run.totals + kRows * kPanelWidth, 0.0f);
  // clang-format off
  __asm__ volatile(
      "vpbroadcastd %c[low_halves](%[tile]), %%zmm7\n"
      "1:\n"  // a group
      QUIRE_ROWS(QUIRE_ZERO_ROW, 0)
      QUIRE_IF(floats) "mov %c[floats](%[tile]), %[step]\n" "vbroadcasti32x4 (%[step]), %%zmm5\n" QUIRE_END
      "mov %c[steps](%[tile]), %[step]\n"

      "2:\n"  // a step
      QUIRE_FETCH_AHEAD
      QUIRE_IF(packed)
      QUIRE_FROM_WEIGHTS("vpandd", ", %%zmm7")
      QUIRE_LOOK_UP
      QUIRE_ROWS(QUIRE_DOT_ROW, 0)
      QUIRE_FROM_WEIGHTS("vpsrlw $4,", "")
      "vpandd %%zmm0, %%zmm7, %%zmm0\n"
      "vpandd %%zmm1, %%zmm7, %%zmm1\n"
      "vpandd %%zmm2, %%zmm7, %%zmm2\n"
      "vpandd %%zmm3, %%zmm7, %%zmm3\n"
      QUIRE_LOOK_UP
      QUIRE_ROWS(QUIRE_DOT_ROW, 1)
      ".else\n"
      QUIRE_FROM_WEIGHTS("vmovdqu64", "")
      QUIRE_ROWS(QUIRE_DOT_ROW, 0)
      QUIRE_END
      "add $4 + 4*%c[packed], %[x]\n"
      "add $4 + 4*%c[packed], %[x3]\n"
      "add $256, %[weights]\n"
      "dec %[step]\n"
      "jnz 2b\n"

      "vmovaps (%[numbers]), %%zmm0\n"
      "vmovaps 64(%[numbers]), %%zmm1\n"
      "vmovaps 128(%[numbers]), %%zmm2\n"
      "vmovaps 192(%[numbers]), %%zmm3\n"
      QUIRE_ROWS(QUIRE_ADD_ROW, 0)
      "add $512, %[numbers]\n"
      "add %c[pitch](%[tile]), %[scales]\n"
      "add %c[pitch](%[tile]), %[factors]\n"
      "decq %c[groups](%[tile])\n"
      "jnz 1b\n"
      : [x] "+&r"(x), [x3] "+&r"(x3), [weights] "+&r"(weights), [numbers] "+&r"(numbers), [scales] "+&r"(scales),
        [factors] "+&r"(factors), [next] "+&r"(prefetch.next), [step] "=&r"(step)
      : [tile] "r"(&tile), [stride] "r"(input.stride), [totals] "r"(run.totals), [rows] "i"(kRows),
        [packed] "i"(kPacked), [floats] "i"(kCodes == Codes::floats ? offsetof(GroupTile, floats) : 0), [middle] "i"(kOffset == Offset::middle), [zeros] "i"(kOffset == Offset::zeros),
        [minima] "i"(kOffset == Offset::minima), [groups] "i"(offsetof(GroupTile, num_groups)),
        [steps] "i"(offsetof(GroupTile, steps)), [pitch] "i"(offsetof(GroupTile, number_pitch)),
        [lines] "i"(offsetof(GroupTile, lines)), [line_bytes] "i"(offsetof(GroupTile, line_bytes)),
        [low_halves] "i"(offsetof(GroupTile, low_halves))
      : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
        "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");
  // clang-format on
}

}  // namespace
}  // namespace quire::QUIRE_ISA
