// Matrix product with grouped integer weights in vector registers: VNNI dot products (vpdpbusd) if the instruction set
// has them, else 16-bit multiply-adds (vpmaddwd), which are exact too; on ARM64 see gemm_grouped_neon.h.
#include "gemm_grouped_blocks.h"

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
#include "gemm_grouped_vnni_factors.h"
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_NEON
#include "gemm_grouped_neon.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL < QUIRE_LEVEL_NEON

// The place of a register of codes, and its conversion: bytes, or the low or high halves of bytes.
enum class Half { none, low, high };

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512

template <Half kHalf>
inline I32 load_codes(const uint8_t* p) {
  const I32 x = load_i32(p), low_half = _mm512_set1_epi8(0x0f);
  if constexpr (kHalf == Half::none) return x;
  return _mm512_and_si512(kHalf == Half::low ? x : _mm512_srli_epi16(x, 4), low_half);
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
constexpr int kVectors = 4;
struct Quads {
  I32 all;
};
inline Quads weight_quads(I32 codes) { return {in_register(codes)}; }
inline Quads input_quads(int x) { return {in_register(broadcast_i32(x))}; }
inline I32 dot(I32 sum, Quads w, Quads x) { return _mm512_dpbusd_epi32(sum, w.all, x.all); }
#else
constexpr int kVectors = 2;  // two registers per vector of weights leave room for 12 sums
struct Quads {
  I32 even, odd;  // 16-bit values
};
inline Quads weight_quads(I32 codes) {
  return {in_register(_mm512_and_si512(codes, _mm512_set1_epi16(0xff))), in_register(_mm512_srli_epi16(codes, 8))};
}
inline Quads input_quads(int x) {
  const I32 v = broadcast_i32(x);
  return {_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), _mm512_srai_epi16(v, 8)};
}
inline I32 dot(I32 sum, Quads w, Quads x) {
  const I32 products = _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), _mm512_madd_epi16(w.odd, x.odd));
  return _mm512_add_epi32(sum, products);
}
#endif

#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2

constexpr int kVectors = 1;
struct Quads {
  I32 even, odd;
};
template <Half kHalf>
inline I32 load_codes(const uint8_t* p) {
  const I32 x = load_i32(p), low_half = _mm256_set1_epi8(0x0f);
  if constexpr (kHalf == Half::none) return x;
  return _mm256_and_si256(kHalf == Half::low ? x : _mm256_srli_epi16(x, 4), low_half);
}
inline Quads weight_quads(I32 codes) {
  return {_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(codes, 8)};
}
inline Quads input_quads(int x) {
  const I32 v = _mm256_set1_epi32(x);
  return {_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), _mm256_srai_epi16(v, 8)};
}
inline I32 dot(I32 sum, Quads w, Quads x) {
  const I32 products = _mm256_add_epi32(_mm256_madd_epi16(w.even, x.even), _mm256_madd_epi16(w.odd, x.odd));
  return _mm256_add_epi32(sum, products);
}

#endif

constexpr int kMaxRows = 6;

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2

constexpr int kLanes = sizeof(I32) / 4, kColumns = kVectors * kLanes;

// One quad of each row times one quad of kColumns columns.
template <int kRows, Half kHalf>
inline void add_quad(const int8_t* codes, int64_t stride, const uint8_t* weights, I32 (&sums)[kRows][kVectors]) {
  Quads w[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) w[v] = weight_quads(load_codes<kHalf>(weights + v * kLanes * kQuad));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    int four;
    std::memcpy(&four, codes + r * stride, sizeof(four));
    const Quads x = input_quads(four);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[r][v] = dot(sums[r][v], w[v], x);
  }
}

template <int kRows, bool kPacked>
void run_rows(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int32_t* out, bool is_first,
              Prefetch& prefetch) {
  for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
    I32 sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = is_first ? zero_i32() : load_i32(out + r * kPanelWidth + column + v * kLanes);
    Prefetch local = prefetch;
    const uint8_t* w = weights + column * kQuad;
    const int8_t* x = codes;
    if constexpr (kPacked) {
      for (int64_t pair = 0; pair < quads / 2; ++pair, w += kQuadBytes, x += 2 * kQuad) {
        if (column == 0) local.fetch();
        add_quad<kRows, Half::low>(x, stride, w, sums);
        add_quad<kRows, Half::high>(x + kQuad, stride, w, sums);
      }
    } else {
      for (int64_t quad = 0; quad < quads; ++quad, w += kQuadBytes, x += kQuad) {
        if (column == 0) local.fetch();
        add_quad<kRows, Half::none>(x, stride, w, sums);
      }
    }
    if (column == 0) prefetch = local;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store_i32(out + r * kPanelWidth + column + v * kLanes, sums[r][v]);
  }
}

#if QUIRE_ISA_LEVEL < QUIRE_LEVEL_AVX512_BF16

constexpr int kMaxRowsBesideTotals = 3;  // with as many float sums

// All groups of a block, for kRows rows: integer sums and float sums stay in registers. This is 1.05 to 1.25 times as
// fast as through memory (groups of 16 and 32). More rows would need tiles of half the columns, which is slower.
template <int kRows, bool kPacked, Offset kOffset>
void add_groups(const GroupRun& run, Prefetch& prefetch) {
  const QuantizedRows& input = *run.input;
  const int8_t* const codes = input.codes + run.row * input.stride + run.first_group * run.group_quads * kQuad;
  int64_t at[kRows];
  for (int r = 0; r < kRows; ++r) at[r] = input.at(run.row + r, run.first_group);
  for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
    F32 totals[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        totals[r][v] = run.first_group == 0 ? zero() : load(run.totals + r * kPanelWidth + column + v * kLanes);
    const uint8_t* w = run.weights + column * kQuad;
    const int8_t* x = codes;
    for (int64_t g = 0; g < run.num_groups; ++g) {
      I32 sums[kRows][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = zero_i32();
      for (int64_t quad = 0; quad < run.group_quads; quad += 1 + kPacked, w += kQuadBytes, x += (1 + kPacked) * kQuad) {
        if (column == 0) prefetch.fetch();
        if constexpr (kPacked) {
          add_quad<kRows, Half::low>(x, input.stride, w, sums);
          add_quad<kRows, Half::high>(x + kQuad, input.stride, w, sums);
        } else {
          add_quad<kRows, Half::none>(x, input.stride, w, sums);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const RowNumbers of_row(input, at[r] + g * input.number_pitch);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const F32 scales = load(run.numbers[g].scales + column + v * kLanes);
          const F32 offsets = kOffset == Offset::middle ? zero() : load(run.numbers[g].offsets + column + v * kLanes);
          totals[r][v] = add_group<kOffset, false>(totals[r][v], sums[r][v], of_row, scales, offsets);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(run.totals + r * kPanelWidth + column + v * kLanes, totals[r][v]);
  }
}

#endif

#else

template <int kRows, bool kPacked>
void run_rows(const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int32_t* out, bool is_first,
              Prefetch&) {
  for (int r = 0; r < kRows; ++r, codes += stride, out += kPanelWidth) {
    if (is_first) std::memset(out, 0, sizeof(int32_t) * kPanelWidth);
    for (int64_t quad = 0; quad < quads; ++quad)
      for (int64_t c = 0; c < kPanelWidth; ++c)
        for (int64_t i = 0; i < kQuad; ++i) {
          const int64_t at = c * kQuad + i;
          const int code =
              kPacked ? weights[quad / 2 * kQuadBytes + at] >> (quad % 2 * 4) & 0x0f : weights[quad * kQuadBytes + at];
          out[c] += codes[quad * kQuad + i] * code;
        }
  }
}

#endif

struct DotTile {
  static constexpr int64_t kBlockQuads = 64;  // 16 KiB of 8-bit codes: 1.03 to 1.06 times as fast as 32 KiB (Zen 5)
  static constexpr int64_t kMaxRows = QUIRE_ISA::kMaxRows, kRowUnit = 1;
  static constexpr bool kSigned = false;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  static constexpr bool kAddsGroups = true;
  static bool adds_groups(int64_t) { return true; }
  static int super_passes(int64_t rows) { return super_passes_vnni(rows); }
  // parts of a group, but not whole groups: 1.17 to 1.36 times as fast from 7 to 10 rows as after unpacking, 0.9 to 1.0
  // above (Zen 5)
  static bool reads_packed(int64_t rows, int64_t group_quads) { return rows <= 10 || group_quads <= kBlockQuads; }

  template <Codes kCodes, Offset kOffset>
  static void add_groups(int rows, const GroupRun& run, Prefetch& prefetch) {
    using Add = void (*)(const GroupRun&, Prefetch&);
    constexpr bool kPacked = kCodes == Codes::packed;
    static constexpr Add kAdd[kMaxRows] = {add_groups_vnni<1, kPacked, kOffset>, add_groups_vnni<2, kPacked, kOffset>,
                                           add_groups_vnni<3, kPacked, kOffset>, add_groups_vnni<4, kPacked, kOffset>,
                                           add_groups_vnni<5, kPacked, kOffset>, add_groups_vnni<6, kPacked, kOffset>};
    kAdd[rows - 1](run, prefetch);
  }
#else
  static bool reads_packed(int64_t rows, int64_t) { return rows <= 10; }
  static int super_passes(int64_t) { return 1; }
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2
  static constexpr bool kAddsGroups = true;
  static bool adds_groups(int64_t rows) { return rows <= kMaxRowsBesideTotals; }

  template <Codes kCodes, Offset kOffset>
  static void add_groups(int rows, const GroupRun& run, Prefetch& prefetch) {
    using Add = void (*)(const GroupRun&, Prefetch&);
    constexpr bool kPacked = kCodes == Codes::packed;
    static constexpr Add kAdd[kMaxRowsBesideTotals] = {QUIRE_ISA::add_groups<1, kPacked, kOffset>,
                                                       QUIRE_ISA::add_groups<2, kPacked, kOffset>,
                                                       QUIRE_ISA::add_groups<3, kPacked, kOffset>};
    kAdd[rows - 1](run, prefetch);
  }
#else
  static constexpr bool kAddsGroups = false;
#endif
#endif

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  template <Codes kCodes, Offset kOffset, bool>
  static void add_supers(int rows, const SuperRun& run, int32_t*, int32_t*, const PrefetchPlan& plan, int pass) {
    using Add = void (*)(const SuperRun&, const PrefetchPlan&, int);
    constexpr bool kPacked = kCodes == Codes::packed;
    static constexpr Add kAdd[kMaxRows] = {add_supers_vnni<1, kPacked, kOffset>, add_supers_vnni<2, kPacked, kOffset>,
                                           add_supers_vnni<3, kPacked, kOffset>, add_supers_vnni<4, kPacked, kOffset>,
                                           add_supers_vnni<5, kPacked, kOffset>, add_supers_vnni<6, kPacked, kOffset>};
    kAdd[rows - 1](run, plan, pass);
  }
#else
  template <Codes kCodes, Offset kOffset, bool kSignedCodes>
  static void add_supers(int rows, const SuperRun& run, int32_t* sums, int32_t* supers, const PrefetchPlan& plan,
                         int pass) {
    add_supers_through_memory<DotTile, kCodes, kOffset, kSignedCodes>(rows, run, sums, supers, plan.of_pass(pass));
  }
#endif

  template <Codes kCodes, bool>
  static void run(int rows, const int8_t* codes, int64_t stride, const uint8_t* weights, int64_t quads, int32_t* sums,
                  bool is_first, Prefetch& prefetch) {
    using Run = void (*)(const int8_t*, int64_t, const uint8_t*, int64_t, int32_t*, bool, Prefetch&);
    constexpr bool kPacked = kCodes == Codes::packed;
    static constexpr Run kRun[] = {run_rows<1, kPacked>, run_rows<2, kPacked>, run_rows<3, kPacked>,
                                   run_rows<4, kPacked>, run_rows<5, kPacked>, run_rows<6, kPacked>};
    kRun[rows - 1](codes, stride, weights, quads, sums, is_first, prefetch);
  }
};

using Tile = DotTile;

#else

using Tile = NeonTile;

#endif

int64_t rows_per_block(int64_t) { return 240; }

void run(const GemmBlock& block) { run_grouped<Tile>(block); }

}  // namespace

extern const GemmKernels gemm_grouped_table;
const GemmKernels gemm_grouped_table = {1, grouped_input_bytes, grouped_prepare, rows_per_block, run};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(GemmKernels, gemm_grouped_kernels, gemm_grouped_table)
