// The second product of low-rank additions: B (A x) for blocks of the result.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "lora_plan.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kVectors = kLoraColumns / kLanes;  // vectors in a row of a panel
// Rows of a tile and panels beside each other: 6 x 4 sums in the 32 registers of AVX-512, half of them in 16 registers.
constexpr int kExpandTile = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2 ? 6 : 3;
constexpr int kPanelsTogether = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512 ? 4 : 1;
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
constexpr int64_t kMinExpandTileRows = 3;  // fewer rows are faster in vectors
#endif

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

}  // namespace
}  // namespace quire::QUIRE_ISA
