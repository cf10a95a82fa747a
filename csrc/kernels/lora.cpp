// Low-rank additions, see quire/kernels/lora.h. For A x, rows are grouped by adapter, so that each adapter is read once
// for all its rows.
#include "quire/kernels/lora.h"

#include <algorithm>
#include <array>
#include <utility>

#include "quire/isa.h"
#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"
#include "quire/thread_pool.h"
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "lora_amx.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;
constexpr int64_t kRowsPerChunk = 1024;          // rows that are added at a time: this bounds the scratch memory
constexpr int64_t kMinMacs = 32 * 1024;          // fewer multiply-adds cost less than waking a thread
constexpr int64_t kShrinkRows = 64;              // rows of x that stay in the L2 cache while the ranks of A pass by
constexpr int64_t kShrinkRanks = 4;              // ranks of a unit: 8 KiB of A with k = 1024
constexpr int kVectors = kLoraColumns / kLanes;  // vectors in a row of a panel

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
constexpr int64_t kRowsPerUnit = 4 * kTileRows;  // on tiles
constexpr int64_t kFewGroups = 4;                // groups of rows that get small units
constexpr int64_t kMinExpandTileRows = 3;        // fewer rows are faster in vectors
#endif

// Rows of tiles: 4 x 4 sums and 6 x 4 sums in the 32 registers of AVX-512, half of it in 16 registers.
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
constexpr int kShrinkTile = 4, kExpandTile = 6, kPanelsTogether = 4;
#else
constexpr int kShrinkTile = 2, kExpandTile = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2 ? 6 : 3, kPanelsTogether = 1;
#endif

// Rows with the same adapter.
struct Group {
  int64_t slot, begin, end;
};

// Whether AMX tiles compute A x. They also compute B (A x), if there are enough rows.
inline bool takes_tiles([[maybe_unused]] const LoraInput& input) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  return input.table.dtype == DType::bf16 && input.dtype == DType::bf16 && input.token_ids == nullptr;
#else
  return false;
#endif
}

// The size of units. On tiles, few adapters with few rows get small units, so that each thread has work.
struct UnitSize {
  int64_t rows, ranks;
};
inline UnitSize unit_size([[maybe_unused]] const LoraInput& input, [[maybe_unused]] const Group& group,
                          [[maybe_unused]] int64_t num_groups) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  const bool is_small = group.end - group.begin <= kRowsOfColumns && num_groups <= kFewGroups;
  if (takes_tiles(input) && !is_small) return {kRowsPerUnit, kTileRanks};
#endif
  return {kShrinkRows, kShrinkRanks};
}

// The number of sums of a part's A x in a row: one for each rank. For tiles, a sum is a pair of bfloat16 (lora_amx.h),
// and the number is rounded up to whole steps.
inline int64_t num_sums([[maybe_unused]] const LoraInput& input, int64_t rank) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  if (takes_tiles(input)) return round_up(rank, kTileRanks);
#endif
  return rank;
}

template <class Fn>
inline void for_units(const LoraInput& input, const Group* groups, int64_t num_groups, const Fn& fn) {
  const LoraTable& table = input.table;
  for (const Group* group = groups; group < groups + num_groups; ++group) {
    if (group->slot < 0) continue;
    const LoraDelta* const deltas = table.deltas + group->slot * table.num_parts;
    const UnitSize size = unit_size(input, *group, num_groups);
    for (int64_t row = group->begin; row < group->end; row += size.rows) {
      const int64_t row_end = std::min(group->end, row + size.rows);
      int64_t sums = 0;
      for (const LoraDelta* delta = deltas; delta < deltas + table.num_parts; sums += num_sums(input, delta++->rank))
        for (int64_t rank = 0; rank < delta->rank; rank += size.ranks)
          fn(LoraUnit{delta, row, row_end, sums, rank, std::min(delta->rank, rank + size.ranks)});
    }
  }
}

LoraPlan plan(const LoraInput& input) {
  const LoraTable& table = input.table;
  // Rows are sorted by slot. Rows without an adapter (-1) come first.
  const int64_t num_slots = table.num_slots + 1;
  auto* memory = static_cast<int32_t*>(
      scratch(Scratch::lora_order, sizeof(int32_t) * (num_slots + input.rows) + sizeof(Group) * num_slots + 64));
  int32_t *order = memory, *counts = order + round_up(input.rows + num_slots, 2) - num_slots;
  auto* groups = reinterpret_cast<Group*>(counts + num_slots);
  std::fill_n(counts, num_slots, 0);
  for (int64_t row = 0; row < input.rows; ++row) ++counts[input.slots[row] + 1];
  int64_t num_groups = 0, begin = 0, stride = 0;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t count = counts[slot];
    if (count == 0) continue;
    counts[slot] = static_cast<int32_t>(begin);
    groups[num_groups++] = {slot - 1, begin, begin + count};
    begin += count;
    if (slot == 0) continue;
    int64_t sums = 0;
    for (int part = 0; part < table.num_parts; ++part)
      sums += num_sums(input, table.deltas[(slot - 1) * table.num_parts + part].rank);
    stride = std::max(stride, sums);
  }
  for (int64_t row = 0; row < input.rows; ++row) order[counts[input.slots[row] + 1]++] = static_cast<int32_t>(row);

  int64_t num_units = 0, products = 0;
  for_units(input, groups, num_groups, [&](const LoraUnit& unit) {
    ++num_units;
    products += (unit.row_end - unit.row) * (unit.end - unit.begin);
  });
  auto* const units = static_cast<LoraUnit*>(scratch(Scratch::lora_units, sizeof(LoraUnit) * num_units));
  LoraUnit* end = units;
  for_units(input, groups, num_groups, [&](const LoraUnit& unit) { *end++ = unit; });
  const bool is_worth = products * (input.token_ids != nullptr ? 1 : table.k) >= kMinMacs;
  return {.input = input,
          .order = order,
          .units = units,
          .num_units = num_units,
          .num_tasks = static_cast<int>(is_worth ? num_units : std::min<int64_t>(num_units, 1)),
          .sums = static_cast<float*>(scratch(Scratch::lora_sums, sizeof(float) * (input.rows + kLoraRows) * stride)),
          .stride = stride};
}

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

// Sums of consecutive rows with one adapter, and panels of its B.
template <class B>
struct Factors {
  const float* sums;
  int64_t stride;
  const B* b;
  int64_t rank;
};

// Calls done(row, column, total) for kPanels panels of b. The total is a vector of sums[row] * b. Meanwhile the panels
// of the next block are prefetched, because products ask for one block after the other.
template <int kRows, int kPanels, class B, class Done>
inline void expand_panels(const Factors<B>& f, const Done& done) {
  constexpr int kColumns = kPanels * kVectors;
  const int64_t ahead = f.rank * kLoraBlockColumns;
  F32 totals[kRows][kColumns];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < kColumns; ++v) totals[row][v] = zero();
  for (int64_t r = 0; r < f.rank; ++r) {
    F32 w[kColumns];
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
      const B* from = f.b + (panel * f.rank + r) * kLoraColumns;
      __builtin_prefetch(from + ahead, 0, 2);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) w[panel * kVectors + v] = load(from + v * kLanes);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const F32 h = broadcast(f.sums[row * f.stride + r]);
#pragma GCC unroll 16
      for (int v = 0; v < kColumns; ++v) totals[row][v] = fma(h, w[v], totals[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < kColumns; ++v) done(row, v * kLanes, totals[row][v]);
}

// Sums of consecutive rows with one adapter, a part's panels of its B, and rows of a LoraSpace.
struct Expansion {
  const float* sums;
  int64_t stride;
  const void* b;
  int64_t rank, panels;
  float* to;
};

template <int kRows, class B>
void expand_rows(const Expansion& e) {
  const auto expand_some = [&]<int kPanels>(std::integral_constant<int, kPanels>, int64_t panel) {
    float* const to = e.to + panel * kLoraColumns;
    expand_panels<kRows, kPanels, B>(
        {e.sums, e.stride, static_cast<const B*>(e.b) + panel * e.rank * kLoraColumns, e.rank},
        [to](int row, int column, F32 total) { store(to + row * kLoraPitch + column, total); });
  };
  int64_t panel = 0;
  for (; panel + kPanelsTogether <= e.panels; panel += kPanelsTogether)
    expand_some(std::integral_constant<int, kPanelsTogether>(), panel);
  if constexpr (kPanelsTogether > 2)
    for (; panel + 2 <= e.panels; panel += 2) expand_some(std::integral_constant<int, 2>(), panel);
  for (; panel < e.panels; ++panel) expand_some(std::integral_constant<int, 1>(), panel);
}

template <class B, int... kRows>
constexpr auto expansions(std::integer_sequence<int, kRows...>) {
  return std::array{expand_rows<kRows + 1, B>...};
}

// The addition of a row's adapter to a part, and the row's A x for this part. The rank is 0 if nothing is added.
struct PartOfRow {
  LoraDelta delta;
  const float* sums;
};
inline PartOfRow part_of_row(const LoraPlan& plan, int64_t row, int part) {
  const int32_t slot = plan.input.slots[row];
  const float* sums = plan.sums + row * plan.stride;
  if (slot < 0) return {{}, sums};
  const LoraDelta* const deltas = plan.input.table.deltas + slot * plan.input.table.num_parts;
  for (int i = 0; i < part; ++i) sums += num_sums(plan.input, deltas[i].rank);
  return {deltas[part], sums};
}

// Computes the additions to a block of rows that have one adapter or none. expand_part takes the fields of Expansion.
template <class B, class ExpandPart>
void expand_rows_of_slot(const LoraPlan& plan, const LoraBlock& block, float* to, const ExpandPart& expand_part) {
  const LoraTable& table = plan.input.table;
  int64_t first = -block.column, end;  // first of the part's columns, counted from the block's first column
  // The last panel of a part may have columns beyond the part. The next part overwrites them, because it comes later.
  for (int part = 0; part < table.num_parts && first < block.num_columns; ++part, first = end) {
    end = first + table.columns[part];
    const int64_t begin = std::max<int64_t>(first, 0), count = std::min(end, block.num_columns) - begin;
    if (count <= 0) continue;
    const auto [delta, sums] = part_of_row(plan, block.row, part);
    if (delta.rank == 0) {
      for (int64_t row = 0; row < block.num_rows; ++row) std::fill_n(to + row * kLoraPitch + begin, count, -0.0f);
    } else {
      const int64_t panel = (begin - first) / kLoraColumns;
      const B* const b = static_cast<const B*>(delta.b) + panel * delta.rank * kLoraColumns;
      expand_part({sums, plan.stride, b, delta.rank, ceil_div(begin + count - first, kLoraColumns) - panel,
                   to + first + panel * kLoraColumns});
    }
  }
}

// Calls fn(rows) for rows of a block that follow each other and have one adapter or none, at most `most` at a time.
template <class Fn>
inline void for_rows_of_slots(const LoraPlan& plan, const LoraBlock& block, int64_t most, const Fn& fn) {
  const int32_t* const slots = plan.input.slots;
  const int64_t row_end = block.row + block.num_rows;
  for (int64_t row = block.row, end; row < row_end; row = end) {
    const int64_t limit = std::min(row_end, row + most);
    for (end = row + 1; end < limit && slots[end] == slots[row];) ++end;
    fn(LoraBlock{row, end - row, block.column, block.num_columns});
  }
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
// Tiles write all their rows, also the rows after the last row of an adapter. The next adapter overwrites these,
// because it comes later. If tiles would write beyond the end of the block, vectors compute the rows. They give the
// same bits.
void expand_terms(const LoraPlan& plan, const LoraBlock& block, float* to) {
  const int64_t tile_rows = std::min(plan.input.rows, kTileRows);
  const WithoutSubnormals flushing;  // once for all rows, because vectors wait for a change
  const auto to_row = [&](int64_t row) { return to + (row - block.row) * kLoraPitch; };
  for_rows_of_slots(plan, block, kLoraRows, [&](const LoraBlock& rows) {
    const int64_t written = round_up(rows.num_rows, tile_rows);
    if (rows.num_rows >= kMinExpandTileRows && rows.row - block.row + written <= kLoraRows) {
      const TilesAs configured(config_of(tile_rows, kRowBytes));
      expand_rows_of_slot<bf16>(plan, rows, to_row(rows.row),
                                rows.num_rows > kTileRows ? expand_on_tiles<2> : expand_on_tiles<1>);
      return;
    }
    for_rows_of_slots(plan, rows, 2, [&](const LoraBlock& few) {
      expand_rows_of_slot<bf16>(plan, few, to_row(few.row),
                                few.num_rows > 1 ? expand_in_vectors<2> : expand_in_vectors<1>);
    });
  });
}
#endif

const float* expand(const LoraPlan& plan, const LoraBlock& block, float* to) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
  if (takes_tiles(plan.input)) {
    expand_terms(plan, block, to);
    return to;
  }
#endif
  with_type_of(plan.input.table.dtype, [&]<class B>(B) {
    static constexpr auto kExpand = expansions<B>(std::make_integer_sequence<int, kExpandTile>());
    for_rows_of_slots(plan, block, kExpandTile, [&](const LoraBlock& rows) {
      expand_rows_of_slot<B>(plan, rows, to + (rows.row - block.row) * kLoraPitch, kExpand[rows.num_rows - 1]);
    });
  });
  return to;
}

// Stores the vectors number(row, column), rounded to the type of `out`. Columns after the last one are left out.
template <class Out, class Number>
inline void store_rounded(const LoraBlock& block, Out* out, int64_t stride, const Number& number) {
  for (int64_t row = 0; row < block.num_rows; ++row, out += stride) {
    int64_t i = 0;
    for (; i + kLanes <= block.num_columns; i += kLanes) store(out + i, number(row, i));
    if (i < block.num_columns) store_n(out + i, number(row, i), static_cast<int>(block.num_columns - i));
  }
}

// A part of the result, and a column of the result, counted from the part's first column.
struct ColumnOfPart {
  int part;
  int64_t column;
};
inline ColumnOfPart part_of_column(const LoraTable& table, int64_t column) {
  int part = 0;
  while (column >= table.columns[part]) column -= table.columns[part++];
  return {part, column};
}

// Finishes 64 columns of consecutive rows with one adapter. Their additions stay in registers.
template <int kRows, class T>
void finish_rows(const Factors<T>& factors, const LoraFinish& finish) {
  for (int64_t first = 0; first < kLoraBlockColumns; first += kPanelsTogether * kLoraColumns) {
    const float *const sums = finish.sums.data + first, *const bias = finish.bias + first;
    T* const out = static_cast<T*>(finish.out.data) + first;
    expand_panels<kRows, kPanelsTogether, T>(
        {factors.sums, factors.stride, factors.b + first * factors.rank, factors.rank},
        [&](int row, int column, F32 added) {
          store(out + row * finish.out.stride + column,
                load(sums + row * finish.sums.stride + column) + load(bias + column) + added);
        });
  }
}

template <class T, int... kRows>
constexpr auto finishes(std::integer_sequence<int, kRows...>) {
  return std::array{finish_rows<kRows + 1, T>...};
}

void finish(const LoraPlan& plan, const LoraBlock& block, const LoraFinish& whole) {
  const LoraTable& table = plan.input.table;
  const auto from_row = [&](int64_t row) {
    LoraFinish rest = whole;
    rest.sums.data += (row - block.row) * whole.sums.stride;
    rest.out.data = static_cast<char*>(whole.out.data) +
                    (row - block.row) * whole.out.stride * static_cast<int64_t>(size_of(whole.out_dtype));
    return rest;
  };
  const ColumnOfPart first = part_of_column(table, block.column);
  const bool has_whole_panels = block.num_columns == kLoraBlockColumns && first.column % kLoraColumns == 0 &&
                                first.column + kLoraBlockColumns <= table.columns[first.part];
  with_type_of(whole.out_dtype, [&]<class Out>(Out) {
    if (has_whole_panels && whole.out_dtype == table.dtype && !takes_tiles(plan.input)) {
      static constexpr auto kFinish = finishes<Out>(std::make_integer_sequence<int, kExpandTile>());
      for_rows_of_slots(plan, block, kExpandTile, [&](const LoraBlock& rows) {
        const LoraFinish f = from_row(rows.row);
        const auto [delta, sums] = part_of_row(plan, rows.row, first.part);
        if (delta.rank == 0)
          return store_rounded(rows, static_cast<Out*>(f.out.data), f.out.stride, [&](int64_t r, int64_t c) {
            return load(f.sums.data + r * f.sums.stride + c) + load(f.bias + c);
          });
        const Out* const b = static_cast<const Out*>(delta.b) + first.column * delta.rank;
        kFinish[rows.num_rows - 1]({sums, plan.stride, b, delta.rank}, f);
      });
      return;
    }
    LoraSpace space;
    for (int64_t row = block.row; row < block.row + block.num_rows; row += kLoraRows) {
      const LoraBlock rows = {row, std::min(kLoraRows, block.row + block.num_rows - row), block.column,
                              block.num_columns};
      const LoraFinish f = from_row(row);
      const float* const added = expand(plan, rows, space.rows());
      store_rounded(rows, static_cast<Out*>(f.out.data), f.out.stride, [&](int64_t r, int64_t c) {
        const float* const sum = f.sums.data + r * f.sums.stride + c;
        return load_part(sum, block.num_columns - c) + load(f.bias + c) + load(added + r * kLoraPitch + c);
      });
    }
  });
}

void add_chunk(const LoraArgs& args) {
  const LoraPlan planned = plan(args.input);
  parallel_for(planned.num_tasks, [&](int task, int) { run(planned, task); });
  const LoraTable& table = args.input.table;
  int64_t num_columns = 0;
  for (int part = 0; part < table.num_parts; ++part) num_columns += table.columns[part];
  const int64_t macs = args.input.rows * num_columns * (planned.stride / table.num_parts + 1);
  const int64_t blocks = ceil_div(num_columns, kLoraBlockColumns), tasks = macs < kMinMacs ? 1 : blocks;
  float bias[kLoraBlockColumns];
  std::fill_n(bias, kLoraBlockColumns, -0.0f);  // keeps the bits of every number that it is added to
  parallel_for(static_cast<int>(tasks), [&](int task, int) {
    for (int64_t block = blocks * task / tasks; block < blocks * (task + 1) / tasks; ++block) {
      const int64_t column = block * kLoraBlockColumns, count = std::min(kLoraBlockColumns, num_columns - column);
      const int64_t out_offset = column * static_cast<int64_t>(size_of(args.out_dtype));
      finish(planned, {0, args.input.rows, column, count},
             {.sums = {args.base.data + column, args.base.stride},
              .bias = bias,
              .out = {static_cast<char*>(args.out.data) + out_offset, args.out.stride},
              .out_dtype = args.out_dtype});
    }
  });
}

void add(const LoraArgs& args) {
  const LoraInput& input = args.input;
  for (int64_t row = 0; row < input.rows; row += kRowsPerChunk) {
    LoraArgs chunk = args;
    chunk.input.rows = std::min(kRowsPerChunk, input.rows - row);
    chunk.input.slots += row;
    if (input.token_ids != nullptr) {
      chunk.input.token_ids += row;
    } else {
      chunk.input.x.data =
          static_cast<const char*>(input.x.data) + row * input.x.stride * static_cast<int64_t>(size_of(input.dtype));
    }
    chunk.base.data += row * args.base.stride;
    chunk.out.data =
        static_cast<char*>(args.out.data) + row * args.out.stride * static_cast<int64_t>(size_of(args.out_dtype));
    add_chunk(chunk);
  }
}

}  // namespace

extern const LoraKernels lora_table;
const LoraKernels lora_table = {plan, run, expand, finish, add};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(LoraKernels, lora_kernels, lora_table)
