// Matrix product with grouped integer weights in vector registers: VNNI of 512 bits (vpdpbusd), VNNI of 256 bits or
// products of bytes that need more instructions (gemm_grouped_words.h), NEON (gemm_grouped_neon.h), or plain loops.
#include "quire/isa.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_VNNI
#include "gemm_grouped_vnni_factors.h"
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
#include "gemm_grouped_words.h"
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON
#include "gemm_grouped_neon.h"
#else
#include "gemm_grouped_blocks.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_VNNI

constexpr int kVectors = 4, kLanes = sizeof(I32) / 4;

template <Codes kCodes, bool kHigh>
inline I32 load_codes(const uint8_t* p) {
  const I32 x = load_i32(p);
  if constexpr (!is_packed(kCodes)) return x;
  const I32 codes = kHigh ? high_halves(x) : low_halves(x);
  return kCodes == Codes::floats ? of_floats(codes) : codes;
}

// One quad of each row times one quad of a panel.
template <int kRows, Codes kCodes, bool kHigh>
inline void add_quad(const int8_t* codes, int64_t stride, const uint8_t* weights, I32 (&sums)[kRows][kVectors]) {
  I32 w[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) w[v] = in_register(load_codes<kCodes, kHigh>(weights + v * kLanes * kQuad));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    int four;
    std::memcpy(&four, codes + r * stride, sizeof(four));
    const I32 x = in_register(broadcast_i32(four));
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], w[v], x);
  }
}

template <int kRows, Codes kCodes>
void run_rows(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int32_t* out, bool is_first,
              Prefetch& prefetch) {
  constexpr bool kPacked = is_packed(kCodes);
  I32 sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = is_first ? zero_i32() : load_i32(out + r * kPanelWidth + v * kLanes);
  Prefetch local = prefetch;
  for (int64_t quad = 0; quad < quads; quad += 1 + kPacked, weights += kQuadBytes, codes += (1 + kPacked) * kQuad) {
    local.fetch();
    add_quad<kRows, kCodes, false>(codes, stride, weights, sums);
    if constexpr (kPacked) add_quad<kRows, kCodes, true>(codes + kQuad, stride, weights, sums);
  }
  prefetch = local;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_i32(out + r * kPanelWidth + v * kLanes, sums[r][v]);
}

struct DotTile {
  static constexpr int64_t kBlockQuads = 64;  // 16 KiB of 8-bit codes: 1.03 to 1.06 times as fast as 32 KiB (Zen 5)
  static constexpr int64_t kMaxRows = 6, kRowUnit = 1;
  static constexpr bool kSigned = false, kAddsGroups = true;
  static bool adds_groups(int64_t) { return true; }
  static bool is_in_order(int64_t, Codes) { return true; }
  static int super_passes(int64_t rows) { return super_passes_vnni(rows); }
  // parts of a group, but not whole groups: 1.17 to 1.36 times as fast from 7 to 10 rows as after unpacking, 0.9 to 1.0
  // above (Zen 5)
  static bool reads_packed(int64_t rows, int64_t group_quads) { return rows <= 10 || group_quads <= kBlockQuads; }

  template <Codes kCodes, Offset kOffset>
  static void add_groups(int rows, const GroupRun& run, Prefetch& prefetch) {
    using Add = void (*)(const GroupRun&, Prefetch&);
    static constexpr Add kAdd[kMaxRows] = {add_groups_vnni<1, kCodes, kOffset>, add_groups_vnni<2, kCodes, kOffset>,
                                           add_groups_vnni<3, kCodes, kOffset>, add_groups_vnni<4, kCodes, kOffset>,
                                           add_groups_vnni<5, kCodes, kOffset>, add_groups_vnni<6, kCodes, kOffset>};
    kAdd[rows - 1](run, prefetch);
  }

  template <Codes kCodes, Offset kOffset, bool>
  static void add_supers(int rows, const SuperRun& run, int32_t*, int32_t*, const PrefetchPlan& plan, int pass) {
    using Add = void (*)(const SuperRun&, const PrefetchPlan&, int);
    constexpr bool kPacked = kCodes == Codes::packed;
    static constexpr Add kAdd[kMaxRows] = {add_supers_vnni<1, kPacked, kOffset>, add_supers_vnni<2, kPacked, kOffset>,
                                           add_supers_vnni<3, kPacked, kOffset>, add_supers_vnni<4, kPacked, kOffset>,
                                           add_supers_vnni<5, kPacked, kOffset>, add_supers_vnni<6, kPacked, kOffset>};
    kAdd[rows - 1](run, plan, pass);
  }

  template <Codes kCodes, bool>
  static void run(int rows, int, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads,
                  int32_t* sums, bool is_first, Prefetch& prefetch) {
    using Run = void (*)(const int8_t*, int64_t, const uint8_t*, int64_t, int32_t*, bool, Prefetch&);
    static constexpr Run kRun[] = {run_rows<1, kCodes>, run_rows<2, kCodes>, run_rows<3, kCodes>,
                                   run_rows<4, kCodes>, run_rows<5, kCodes>, run_rows<6, kCodes>};
    kRun[rows - 1](codes, stride, weights, quads, sums, is_first, prefetch);
  }
};

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2

struct DotTile {
  static constexpr int64_t kBlockQuads = QUIRE_ISA::kBlockQuads;
  static constexpr int64_t kMaxRows = QUIRE_ISA::kMaxRows, kRowUnit = 1;
  static constexpr bool kSigned = false, kAddsGroups = true;
  static bool adds_groups(int64_t) { return true; }
  // A tile that takes a part of the columns at a time does not read in that order. Without fetching it had 0.38 to 0.43
  // of the speed with 2 rows (int8 0.64), 0.44 to 0.55 with 4 and 0.58 to 0.69 with 6. One row of packed codes reads in
  // that order, but in registers of 256 bits it had 0.64 to 0.83, for a reason that is not known. One row of 8 bits had
  // 1.17 (Q8_0) and 1.51 (int8). All of this is about Zen 4 held to AVX2, one thread; other CPUs are always given the
  // fetches, and 512 bits keep the rule that was measured with VNNI.
  static bool is_in_order(int64_t rows, Codes codes) {
    return num_vectors(static_cast<int>(rows)) * kLanes == kPanelWidth && (kLanes == 16 || codes == Codes::bytes);
  }
  static int super_passes(int64_t) { return 1; }
  // From 16 rows on 1.04 to 1.09 times as fast as after unpacking (Zen 3). The others were measured up to 12 rows.
  static bool reads_packed(int64_t rows, int64_t) { return kHasEights || rows <= 12; }

  template <Codes kCodes, Offset kOffset>
  static void add_groups(int rows, const GroupRun& run, Prefetch& prefetch) {
    using Add = void (*)(const GroupRun&, Prefetch&);
    static constexpr Add kAdd[] = {
        QUIRE_ISA::add_groups<1, kCodes, kOffset>, QUIRE_ISA::add_groups<2, kCodes, kOffset>,
        QUIRE_ISA::add_groups<3, kCodes, kOffset>, QUIRE_ISA::add_groups<4, kCodes, kOffset>,
        QUIRE_ISA::add_groups<5, kCodes, kOffset>, QUIRE_ISA::add_groups<6, kCodes, kOffset>};
    kAdd[rows - 1](run, prefetch);
  }

  template <Codes kCodes, Offset kOffset, bool kSignedCodes>
  static void add_supers(int rows, const SuperRun& run, int32_t* sums, int32_t* supers, const PrefetchPlan& plan,
                         int pass) {
    if constexpr (kIsWide<kCodes>) {
      add_supers_through_memory<DotTile, kCodes, kOffset, kSignedCodes>(rows, run, sums, supers, plan.of_pass(pass));
    } else {
      using Add = void (*)(const SuperRun&, int32_t*, const Prefetch&);
      static constexpr Add kAdd[] = {
          QUIRE_ISA::add_supers<1, kCodes, kOffset>, QUIRE_ISA::add_supers<2, kCodes, kOffset>,
          QUIRE_ISA::add_supers<3, kCodes, kOffset>, QUIRE_ISA::add_supers<4, kCodes, kOffset>,
          QUIRE_ISA::add_supers<5, kCodes, kOffset>, QUIRE_ISA::add_supers<6, kCodes, kOffset>};
      kAdd[rows - 1](run, supers, plan.of_pass(pass));
    }
  }

  template <Codes kCodes, bool>
  static void run(int rows, int bits, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads,
                  int32_t* sums, bool is_first, Prefetch& prefetch) {
    using Run = void (*)(const int8_t*, int64_t, const uint8_t*, int64_t, int, int32_t*, bool, Prefetch&);
    static constexpr Run kRun[] = {run_part<1, kCodes>, run_part<2, kCodes>, run_part<3, kCodes>,
                                   run_part<4, kCodes>, run_part<5, kCodes>, run_part<6, kCodes>};
    kRun[rows - 1](codes, stride, weights, quads, bits, sums, is_first, prefetch);
  }
};

#elif QUIRE_ISA_LEVEL < QUIRE_LEVEL_NEON

struct DotTile {
  static constexpr int64_t kBlockQuads = 64;
  static constexpr int64_t kMaxRows = 6, kRowUnit = 1;
  static constexpr bool kSigned = false, kAddsGroups = false;
  static bool reads_packed(int64_t rows, int64_t) { return rows <= 10; }
  static bool is_in_order(int64_t, Codes) { return true; }
  static int super_passes(int64_t) { return 1; }

  template <Codes kCodes, Offset kOffset, bool kSignedCodes>
  static void add_supers(int rows, const SuperRun& run, int32_t* sums, int32_t* supers, const PrefetchPlan& plan,
                         int pass) {
    add_supers_through_memory<DotTile, kCodes, kOffset, kSignedCodes>(rows, run, sums, supers, plan.of_pass(pass));
  }

  template <Codes kCodes, bool>
  static void run(int rows, int, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads,
                  int32_t* out, bool is_first, Prefetch&) {
    constexpr bool kPacked = is_packed(kCodes);
    for (int r = 0; r < rows; ++r, codes += stride, out += kPanelWidth) {
      if (is_first) std::memset(out, 0, sizeof(int32_t) * kPanelWidth);
      for (int64_t quad = 0; quad < quads; ++quad)
        for (int64_t c = 0; c < kPanelWidth; ++c)
          for (int64_t i = 0; i < kQuad; ++i) {
            const int64_t at = c * kQuad + i;
            const int code = kPacked ? weights[quad / 2 * kQuadBytes + at] >> (quad % 2 * 4) & 0x0f
                                     : weights[quad * kQuadBytes + at];
            out[c] += codes[quad * kQuad + i] * (kCodes == Codes::floats ? kE2m1[code] : code);
          }
    }
  }
};

#endif

int64_t rows_per_block(int64_t) { return 240; }

void run(const GemmBlock& block) { run_grouped<DotTile>(block); }

}  // namespace

extern const GemmKernels gemm_grouped_table;
const GemmKernels gemm_grouped_table = {1, grouped_input_bytes, grouped_prepare, rows_per_block, run};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_grouped_kernels, gemm_grouped_table)
