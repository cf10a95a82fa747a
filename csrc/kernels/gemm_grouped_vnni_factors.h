// Whole super-groups of a panel on VNNI, if the weight has factors: 6 rows x 32 columns or 3 rows x 64, with the
// integer sums of the group and of the super-group in 12 registers each. Only sums of the super-group become float, in
// L1.
//
// Assembly for the reason given in gemm_grouped_vnni.h, with the macros from there. A group costs a multiplication and
// an addition per vector beside its dot products; minima cost half a dot product per group and vector.
//
// Registers: zmm0..3 weights, then factors or halves; zmm4 for a row of the input: a quad, then sums or the scale; zmm5
// factors of a second group; zmm7 a mask of the low halves; zmm8..19 the sums of a group, later the sums of the minima;
// zmm20..31 the sums of the super-group.
#pragma once

#include <cstddef>

#include "gemm_grouped_vnni.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kMaxWideRows = 3;  // of a tile of 64 columns

// Operands that the assembly reads from memory, because there are not enough registers.
struct SuperTile {
  int64_t num_supers;    // counts down
  int64_t super_groups;  // in each
  int64_t steps;         // of 256 bytes of weights in a group
  int64_t number_pitch;  // bytes between the numbers of rows for consecutive groups
  int64_t lines;         // fetched ahead in each step, 0 to 4
  int64_t line_bytes;    // the same
  const f16* halves;     // of the columns
  const float* scales;   // of the rows
  int64_t low_halves = 0x0f0f0f0f;
};

// clang-format off

// F(row, place of its quads, sums of the group, sums of the super-group, argument) for each row of a tile of four
// vectors (wide) or two. The assembler leaves out rows and vectors that a tile does not have.
#define QUIRE_FACTOR_ROWS(F, argument)                                                 \
  QUIRE_IF(wide)                                                                       \
  F(0, "(%[x])", 8, 9, 10, 11, 20, 21, 22, 23, argument)                               \
  F(1, "(%[x], %[stride])", 12, 13, 14, 15, 24, 25, 26, 27, argument)                  \
  F(2, "(%[x], %[stride], 2)", 16, 17, 18, 19, 28, 29, 30, 31, argument)               \
  ".else\n"                                                                            \
  F(0, "(%[x])", 8, 9, 8, 9, 20, 21, 20, 21, argument)                                 \
  F(1, "(%[x], %[stride])", 10, 11, 10, 11, 22, 23, 22, 23, argument)                  \
  F(2, "(%[x], %[stride], 2)", 12, 13, 12, 13, 24, 25, 24, 25, argument)               \
  F(3, "(%[x3])", 14, 15, 14, 15, 26, 27, 26, 27, argument)                            \
  F(4, "(%[x3], %[stride])", 16, 17, 16, 17, 28, 29, 28, 29, argument)                 \
  F(5, "(%[x3], %[stride], 2)", 18, 19, 18, 19, 30, 31, 30, 31, argument)              \
  QUIRE_END

// F(vector, ...) for the vectors of a tile
#define QUIRE_VECTORS(F) F(0) F(1) QUIRE_IF(wide) F(2) F(3) QUIRE_END
#define QUIRE_VECTORS_OF(F, row, s0, s1, s2, s3) \
  F(row, 0, s0) F(row, 1, s1) QUIRE_IF(wide) F(row, 2, s2) F(row, 3, s3) QUIRE_END

#define QUIRE_IF_MIDDLE ".if %c[minima] == 0\n"

#define QUIRE_ZERO_OF(row, v, sum) QUIRE_ZERO(sum)
#define QUIRE_ZERO_GROUP(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument) \
  QUIRE_IF_ROW(row) QUIRE_VECTORS_OF(QUIRE_ZERO_OF, row, d0, d1, d2, d3) QUIRE_END
#define QUIRE_ZERO_SUPER(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument) \
  QUIRE_IF_ROW(row) QUIRE_VECTORS_OF(QUIRE_ZERO_OF, row, s0, s1, s2, s3) QUIRE_END

#define QUIRE_DOT_OF(row, v, sum) QUIRE_DOT(sum, v)
#define QUIRE_DOT_GROUP(row, x, d0, d1, d2, d3, s0, s1, s2, s3, quad)  \
  QUIRE_IF_ROW(row)                                                    \
  "vpbroadcastd 4*" #quad x ", %%zmm4\n"                               \
  QUIRE_VECTORS_OF(QUIRE_DOT_OF, row, d0, d1, d2, d3)                  \
  QUIRE_END

#define QUIRE_LOAD_CODES(v) "vmovdqu64 64*" #v "(%[weights]), %%zmm" #v "\n"
#define QUIRE_LOAD_LOW(v) "vpandd 64*" #v "(%[weights]), %%zmm7, %%zmm" #v "\n"
#define QUIRE_LOAD_HIGH(v) \
  "vpsrlw $4, 64*" #v "(%[weights]), %%zmm" #v "\n" "vpandd %%zmm" #v ", %%zmm7, %%zmm" #v "\n"
#define QUIRE_LOAD_FACTORS(v) "vpmovsxbd 16*" #v "(%[factors]), %%zmm" #v "\n"
// of the minima of two groups, the first in the low halves
#define QUIRE_LOAD_PAIR(v)                                        \
  "vpmovsxbd 64+16*" #v "(%[step]), %%zmm" #v "\n"             \
  "vpmovsxbd 192+16*" #v "(%[step]), %%zmm5\n"                 \
  "vpslld $16, %%zmm5, %%zmm5\n"                                  \
  "vmovdqu16 %%zmm5, %%zmm" #v "%{%%k1%}\n"
#define QUIRE_LOAD_HALVES(v) "vcvtph2ps 32*" #v "(%[step]), %%zmm" #v "\n"
#define QUIRE_LOAD_MINIMUM_HALVES(v) "vcvtph2ps 128+32*" #v "(%[step]), %%zmm" #v "\n"

// add_factor_group() for one vector
#define QUIRE_ADD_GROUP(row, v, sum, super)                                                           \
  QUIRE_IF_MIDDLE "vpsubd %%zmm4, %%zmm" #sum ", %%zmm" #sum "\n" QUIRE_END                          \
  "vpmulld %%zmm" #v ", %%zmm" #sum ", %%zmm" #sum "\n"                                               \
  "vpaddd %%zmm" #sum ", %%zmm" #super ", %%zmm" #super "\n"
#define QUIRE_ADD_GROUPS(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument)                            \
  QUIRE_IF_ROW(row)                                                                                   \
  QUIRE_IF_MIDDLE "vpbroadcastd 4*" #row "(%[sums]), %%zmm4\n" QUIRE_END                             \
  QUIRE_ADD_GROUP(row, 0, d0, s0) QUIRE_ADD_GROUP(row, 1, d1, s1)                                     \
  QUIRE_IF(wide) QUIRE_ADD_GROUP(row, 2, d2, s2) QUIRE_ADD_GROUP(row, 3, d3, s3) QUIRE_END            \
  QUIRE_END

#define QUIRE_ADD_MINIMA_OF(row, v, sum) "vpdpwssd %%zmm4, %%zmm" #v ", %%zmm" #sum "\n"
#define QUIRE_ADD_MINIMA(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument)                            \
  QUIRE_IF_ROW(row)                                                                                   \
  "vpbroadcastd 4*" #row "(%[sums]), %%zmm4\n"                                                        \
  QUIRE_VECTORS_OF(QUIRE_ADD_MINIMA_OF, row, d0, d1, d2, d3)                                          \
  QUIRE_END

// add_super() for all rows: the scales, the minima, the rows' scales and totals
#define QUIRE_SCALE_OF(row, v, super)                             \
  "vcvtdq2ps %%zmm" #super ", %%zmm" #super "\n"                  \
  "vmulps %%zmm" #v ", %%zmm" #super ", %%zmm" #super "\n"
#define QUIRE_SCALE(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument) \
  QUIRE_IF_ROW(row) QUIRE_VECTORS_OF(QUIRE_SCALE_OF, row, s0, s1, s2, s3) QUIRE_END
#define QUIRE_TAKE_OFF_OF(v, sum, super)                          \
  "vcvtdq2ps %%zmm" #sum ", %%zmm" #sum "\n"                      \
  "vfmadd231ps %%zmm" #v ", %%zmm" #sum ", %%zmm" #super "\n"
#define QUIRE_TAKE_OFF(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument)                          \
  QUIRE_IF_ROW(row)                                                                               \
  QUIRE_TAKE_OFF_OF(0, d0, s0) QUIRE_TAKE_OFF_OF(1, d1, s1)                                       \
  QUIRE_IF(wide) QUIRE_TAKE_OFF_OF(2, d2, s2) QUIRE_TAKE_OFF_OF(3, d3, s3) QUIRE_END              \
  QUIRE_END
#define QUIRE_TOTAL_OF(row, v, super)                                                             \
  "vfmadd213ps 256*" #row "+64*" #v "(%[totals]), %%zmm4, %%zmm" #super "\n"                      \
  "vmovaps %%zmm" #super ", 256*" #row "+64*" #v "(%[totals])\n"
#define QUIRE_TOTAL(row, x, d0, d1, d2, d3, s0, s1, s2, s3, argument)                             \
  QUIRE_IF_ROW(row)                                                                               \
  "vbroadcastss 4*" #row "(%[step]), %%zmm4\n"                                                    \
  QUIRE_VECTORS_OF(QUIRE_TOTAL_OF, row, s0, s1, s2, s3)                                           \
  QUIRE_END

// clang-format on

// Adds the super-groups of the run to run.totals[kRows][64], with the bits of add_super(), for all 64 columns (kWide)
// or for 32 columns from `column` on. Calls prefetch.fetch() once per 256 bytes of weights.
template <int kRows, bool kWide, bool kPacked, Offset kOffset>
void add_supers_vnni(const SuperRun& run, int64_t column, const Prefetch& prefetch) {
  static_assert(kOffset != Offset::zeros);
  const QuantizedRows& input = *run.input;
  SuperTile tile{.num_supers = run.num_supers,
                 .super_groups = run.super_groups,
                 .steps = run.group_quads / (kPacked ? 2 : 1),
                 .number_pitch = 4 * input.number_pitch,
                 .lines = prefetch.lines,
                 .line_bytes = 64 * prefetch.lines,
                 .halves = run.numbers.halves + column,
                 .scales = input.scales + input.at(run.row, run.first_super)};
  const int8_t *x = input.codes + run.row * input.stride + run.first_group() * run.group_quads * kQuad,
               *x3 = x + 3 * input.stride;
  const uint8_t* weights = run.weights + column * kQuad;
  const int8_t* factors = run.numbers.factors + column;
  const int32_t* sums = input.zero_sums + input.at(run.row, run.first_super * input.sums_per_scale);
  float* const totals = run.totals + column;
  const char* next = prefetch.next;
  int64_t step, group;
  // clang-format off
  __asm__ volatile(
      "vpbroadcastd %c[low_halves](%[tile]), %%zmm7\n"
      QUIRE_IF(minima) "mov $0xaaaaaaaa, %k[step]\n" "kmovd %k[step], %%k1\n" QUIRE_END
      "1:\n"  // a super-group
      QUIRE_FACTOR_ROWS(QUIRE_ZERO_SUPER, 0)
      "mov %c[groups](%[tile]), %[group]\n"

      "2:\n"  // a group
      QUIRE_FACTOR_ROWS(QUIRE_ZERO_GROUP, 0)
      "mov %c[steps](%[tile]), %[step]\n"

      "3:\n"  // a step
      QUIRE_FETCH_AHEAD
      QUIRE_IF(packed)
      QUIRE_VECTORS(QUIRE_LOAD_LOW)
      QUIRE_FACTOR_ROWS(QUIRE_DOT_GROUP, 0)
      QUIRE_VECTORS(QUIRE_LOAD_HIGH)
      QUIRE_FACTOR_ROWS(QUIRE_DOT_GROUP, 1)
      ".else\n"
      QUIRE_VECTORS(QUIRE_LOAD_CODES)
      QUIRE_FACTOR_ROWS(QUIRE_DOT_GROUP, 0)
      QUIRE_END
      "add $4 + 4*%c[packed], %[x]\n"
      "add $4 + 4*%c[packed], %[x3]\n"
      "add $256, %[weights]\n"
      "dec %[step]\n"
      "jnz 3b\n"

      QUIRE_VECTORS(QUIRE_LOAD_FACTORS)
      QUIRE_FACTOR_ROWS(QUIRE_ADD_GROUPS, 0)
      "add $64 + 64*%c[minima], %[factors]\n"
      QUIRE_IF_MIDDLE "add %c[pitch](%[tile]), %[sums]\n" QUIRE_END
      "dec %[group]\n"
      "jnz 2b\n"

      QUIRE_IF(minima)
      QUIRE_FACTOR_ROWS(QUIRE_ZERO_GROUP, 0)
      "mov %c[groups](%[tile]), %[group]\n"
      "imul $-128, %[group], %[step]\n"
      "add %[factors], %[step]\n"
      "4:\n"  // a pair of groups
      QUIRE_VECTORS(QUIRE_LOAD_PAIR)
      QUIRE_FACTOR_ROWS(QUIRE_ADD_MINIMA, 0)
      "add $256, %[step]\n"
      "add %c[pitch](%[tile]), %[sums]\n"
      "sub $2, %[group]\n"
      "jg 4b\n"
      QUIRE_END

      "mov %c[halves](%[tile]), %[step]\n"
      QUIRE_VECTORS(QUIRE_LOAD_HALVES)
      QUIRE_FACTOR_ROWS(QUIRE_SCALE, 0)
      QUIRE_IF(minima)
      QUIRE_VECTORS(QUIRE_LOAD_MINIMUM_HALVES)
      QUIRE_FACTOR_ROWS(QUIRE_TAKE_OFF, 0)
      QUIRE_END
      "add $128 + 128*%c[minima], %[step]\n"
      "mov %[step], %c[halves](%[tile])\n"
      "mov %c[scales](%[tile]), %[step]\n"
      QUIRE_FACTOR_ROWS(QUIRE_TOTAL, 0)
      "add %c[pitch](%[tile]), %[step]\n"
      "mov %[step], %c[scales](%[tile])\n"
      "decq %c[supers](%[tile])\n"
      "jnz 1b\n"
      : [x] "+&r"(x), [x3] "+&r"(x3), [weights] "+&r"(weights), [factors] "+&r"(factors), [sums] "+&r"(sums),
        [next] "+&r"(next), [step] "=&r"(step), [group] "=&r"(group)
      : [tile] "r"(&tile), [stride] "r"(input.stride), [totals] "r"(totals), [rows] "i"(kRows), [wide] "i"(kWide),
        [packed] "i"(kPacked), [minima] "i"(kOffset == Offset::minima),
        [supers] "i"(offsetof(SuperTile, num_supers)), [groups] "i"(offsetof(SuperTile, super_groups)),
        [steps] "i"(offsetof(SuperTile, steps)), [pitch] "i"(offsetof(SuperTile, number_pitch)),
        [lines] "i"(offsetof(SuperTile, lines)), [line_bytes] "i"(offsetof(SuperTile, line_bytes)),
        [halves] "i"(offsetof(SuperTile, halves)), [scales] "i"(offsetof(SuperTile, scales)),
        [low_halves] "i"(offsetof(SuperTile, low_halves))
      : "memory", "cc", "k1", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
        "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");
  // clang-format on
}

// All 64 columns of a tile, in the number of passes from super_passes_vnni().
inline int super_passes_vnni(int64_t rows) { return rows <= kMaxWideRows ? 1 : 2; }

template <int kRows, bool kPacked, Offset kOffset>
void add_supers_vnni(const SuperRun& run, const PrefetchPlan& plan, int pass) {
  if (run.first_super == 0) std::fill(run.totals, run.totals + kRows * kPanelWidth, 0.0f);
  if constexpr (kRows <= kMaxWideRows) {
    add_supers_vnni<kRows, true, kPacked, kOffset>(run, 0, plan.of_pass(pass));
  } else {
    add_supers_vnni<kRows, false, kPacked, kOffset>(run, 0, plan.of_pass(pass));
    add_supers_vnni<kRows, false, kPacked, kOffset>(run, kPanelWidth / 2, plan.of_pass(pass + 1));
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
