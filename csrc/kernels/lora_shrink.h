// The first product of low-rank additions: the units of scale * A x.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "lora_plan.h"

namespace quire::QUIRE_ISA {
namespace {

// Rows of a tile: 4 x 4 sums in the 32 registers of AVX-512, half of them in 16 registers.
constexpr int kShrinkTile = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512 ? 4 : 2;

#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX512_BF16
inline __m512i load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
inline __m512i load_pairs_n(const bf16* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
}
inline __m512bh as_pairs(__m512i x) { return reinterpret_cast<__m512bh>(x); }

// One instruction multiplies the 32 elements of a cache line: two products in each lane.
struct Pairs {
  using Vector = __m512i;
  static constexpr int64_t kStep = 32;
  static Vector load_full(const bf16* p) { return load_pairs(p); }
  static Vector load_part(const bf16* p, int64_t n) { return load_pairs_n(p, n); }
  static F32 multiply_add(Vector x, Vector a, F32 sum) { return {_mm512_dpbf16_ps(sum.v, as_pairs(x), as_pairs(a))}; }
};
#endif

struct Floats {
  using Vector = F32;
  static constexpr int64_t kStep = kLanes;
  template <class T>
  static Vector load_full(const T* p) {
    return load(p);
  }
  template <class T>
  static Vector load_part(const T* p, int64_t n) {
    return load_n(p, static_cast<int>(n));
  }
  static F32 multiply_add(Vector x, Vector a, F32 sum) { return fma(x, a, sum); }
};

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
// Computes a unit on tiles: see lora_amx.h. Meanwhile it prefetches the A of the next unit, if that is another A.
void shrink_on_tiles(const LoraPlan& plan, const LoraUnit& unit, const LoraUnit& following) {
  const LoraInput& input = plan.input;
  const int64_t k = input.table.k, ranks = unit.end - unit.begin, num_rows = unit.row_end - unit.row;
  const bf16* const a = static_cast<const bf16*>(unit.delta->a) + unit.begin * k;
  const bf16* const next_a = static_cast<const bf16*>(following.delta->a) + following.begin * k;
  const char* const next = next_a != a ? reinterpret_cast<const char*>(next_a) : nullptr;
  const bf16* const all_x = static_cast<const bf16*>(input.x.data);
  const int32_t* const order = plan.order + unit.row;
  alignas(64) float sums[kRowsPerUnit * kTileRanks];
  if (num_rows <= kRowsOfColumns) {
    const bf16* x[kRowsOfColumns];
    for (int64_t row = 0; row < num_rows; ++row) x[row] = all_x + order[row] * input.x.stride;
    static constexpr std::array kShrink = {shrink_columns<1>, shrink_columns<2>, shrink_columns<3>, shrink_columns<4>};
    const TilesAs configured(config_for_columns(ranks));
    kShrink[num_rows - 1](x, a, k, ranks, sums, next);
  } else {
    static constexpr std::array kShrink = {shrink_rows<1>, shrink_rows<2>, shrink_rows<3>, shrink_rows<4>};
    const TilesAs configured(config_of(kTileRows, kRowBytes));
    kShrink[(num_rows - 1) / kTileRows]({all_x, input.x.stride, order, num_rows}, a, k, ranks, sums, next);
  }
  const F32 scale = broadcast(static_cast<float>(unit.delta->scale));
  const int64_t places = unit.end < unit.delta->rank ? ranks : num_sums(input, unit.end) - unit.begin;
  for (int64_t row = 0; row < num_rows; ++row) {
    void* const to = plan.sums + order[row] * plan.stride + unit.sums + unit.begin;
    const __mmask16 computed = (1u << ranks) - 1u;
    const __m512i terms = _mm512_maskz_mov_epi32(computed, two_terms((scale * load(sums + row * kTileRanks)).v));
    _mm512_mask_storeu_epi32(to, (1u << places) - 1u, terms);
  }
}
#endif

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
// The sum of the lanes of vector(row, rank) for 4 x 4 vectors, in lane 4 * row + rank, with the bits of reduce_add:
// halves are added to halves. This takes a third of the instructions of 16 calls.
template <class Vector>
inline F32 reduce_add_4x4(const Vector& vector) {
  __m512 halves[8], quarters[4], pairs[2];
  // Vectors i and i + 8, halves i and i + 4, and so on share a vector next, so bits of their numbers change places.
  const auto at = [&](int i) { return vector((i >> 1 & 2) | (i >> 3 & 1), (i << 1 & 2) | (i >> 1 & 1)).v; };
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    halves[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(at(i), at(i + 8), 0x44), _mm512_shuffle_f32x4(at(i), at(i + 8), 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88),
                                _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    pairs[i] = _mm512_add_ps(_mm512_shuffle_ps(quarters[i], quarters[i + 2], 0x44),
                             _mm512_shuffle_ps(quarters[i], quarters[i + 2], 0xee));
  return {_mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd))};
}
#endif

// to[row][rank] = scale * sum of x[row] * a[rank] over k.
template <class Step, int kRows, int kRanks, class X, class A>
inline void shrink_tile(const X* const* x, const A* a, int64_t k, float scale, float* const* to, int64_t first,
                        const char* next) {
  using Vector = typename Step::Vector;
  F32 sums[kRows][kRanks];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int rank = 0; rank < kRanks; ++rank) sums[row][rank] = zero();
  const auto add = [&](int64_t i, const auto& load_at) {
    Vector w[kRanks];
#pragma GCC unroll 8
    for (int rank = 0; rank < kRanks; ++rank) w[rank] = load_at(a + rank * k + i);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Vector v = load_at(x[row] + i);
#pragma GCC unroll 8
      for (int rank = 0; rank < kRanks; ++rank) sums[row][rank] = Step::multiply_add(v, w[rank], sums[row][rank]);
    }
  };
  int64_t i = 0;
  for (; i + Step::kStep <= k; i += Step::kStep) {
    if (next != nullptr) {
#pragma GCC unroll 8
      for (int rank = 0; rank < kRanks; ++rank) __builtin_prefetch(next + (rank * k + i) * sizeof(A), 0, 3);
    }
    add(i, [](const auto* p) { return Step::load_full(p); });
  }
  if (i < k) add(i, [left = k - i](const auto* p) { return Step::load_part(p, left); });
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  if constexpr (kRows == 4 && kRanks == 4) {
    const F32 all = broadcast(scale) * reduce_add_4x4([&](int row, int rank) { return sums[row][rank]; });
    _mm_storeu_ps(to[0] + first, _mm512_extractf32x4_ps(all.v, 0));
    _mm_storeu_ps(to[1] + first, _mm512_extractf32x4_ps(all.v, 1));
    _mm_storeu_ps(to[2] + first, _mm512_extractf32x4_ps(all.v, 2));
    _mm_storeu_ps(to[3] + first, _mm512_extractf32x4_ps(all.v, 3));
    return;
  }
#endif
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int rank = 0; rank < kRanks; ++rank) to[row][first + rank] = scale * reduce_add(sums[row][rank]);
}

// Computes a unit. Meanwhile it prefetches the A of the next unit.
template <class Step, class X, class A>
void shrink(const LoraPlan& plan, const LoraUnit& unit, const LoraUnit& following) {
  const LoraInput& input = plan.input;
  const int64_t k = input.table.k;
  const auto scale = static_cast<float>(unit.delta->scale);
  const A* next = static_cast<const A*>(following.delta->a) + following.begin * k;
  // With one row, the time goes to reading memory. A CPU that follows streams is then faster without prefetches.
  const bool in_order = unit.row_end - unit.row == 1 && follows_streams();
  const int64_t most_ranks = in_order ? 1 : kShrinkRanks;
  const X* x[kShrinkTile];
  float* to[kShrinkTile];
  for (int64_t row = unit.row, count; row < unit.row_end; row += count) {
    count = unit.row_end - row >= kShrinkTile ? kShrinkTile : 1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = plan.order[row + i];
      x[i] = static_cast<const X*>(input.x.data) + at * input.x.stride;
      to[i] = plan.sums + at * plan.stride + unit.sums;
    }
    const char* fetched = row == unit.row && !in_order ? reinterpret_cast<const char*>(next) : nullptr;
    for (int64_t rank = unit.begin, ranks; rank < unit.end; rank += ranks) {
      ranks = unit.end - rank >= most_ranks ? most_ranks : 1;
      const A* a = static_cast<const A*>(unit.delta->a) + rank * k;
      const auto tile = ranks == 1
                            ? (count == 1 ? shrink_tile<Step, 1, 1, X, A> : shrink_tile<Step, kShrinkTile, 1, X, A>)
                        : count == 1 ? shrink_tile<Step, 1, kShrinkRanks, X, A>
                                     : shrink_tile<Step, kShrinkTile, kShrinkRanks, X, A>;
      tile(x, a, k, scale, to, rank, fetched);
    }
  }
}

template <class X, class A>
inline void shrink_of(const LoraPlan& plan, const LoraUnit& unit, const LoraUnit& next) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  if constexpr (std::is_same_v<X, bf16> && std::is_same_v<A, bf16>) return shrink_on_tiles(plan, unit, next);
#elif QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  if constexpr (std::is_same_v<X, bf16> && std::is_same_v<A, bf16>) return shrink<Pairs, X, A>(plan, unit, next);
#endif
  shrink<Floats, X, A>(plan, unit, next);
}

// Computes A x of unit vectors: it reads rows of a transposed A.
template <class A>
void look_up(const LoraPlan& plan, const LoraUnit& unit) {
  const auto scale = static_cast<float>(unit.delta->scale);
  for (int64_t row = unit.row; row < unit.row_end; ++row) {
    const int64_t at = plan.order[row];
    const A* a = static_cast<const A*>(unit.delta->a) + plan.input.token_ids[at] * unit.delta->rank;
    float* to = plan.sums + at * plan.stride + unit.sums;
    for (int64_t rank = unit.begin; rank < unit.end; ++rank) to[rank] = scale * to_f32(a[rank]);
  }
}

void run(const LoraPlan& plan, int task) {
  const LoraInput& input = plan.input;
  const int64_t begin = plan.num_units * task / plan.num_tasks, end = plan.num_units * (task + 1) / plan.num_tasks;
  with_type_of(input.table.dtype, [&]<class A>(A) {
    for (int64_t i = begin; i < end; ++i) {
      const LoraUnit &unit = plan.units[i], &next = plan.units[std::min(i + 1, plan.num_units - 1)];
      if (input.token_ids != nullptr) {
        look_up<A>(plan, unit);
      } else {
        with_type_of(input.dtype, [&]<class X>(X) { shrink_of<X, A>(plan, unit, next); });
      }
    }
  });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
