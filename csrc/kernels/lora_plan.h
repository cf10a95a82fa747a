// The plan of a LoraInput: rows are grouped by adapter, so that each adapter is read once for all its rows. The A x of
// a group is cut into units.
#pragma once

#include <algorithm>

#include "quire/isa.h"
#include "quire/kernels/lora.h"
#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
#include "lora_amx.h"
#endif

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;
constexpr int64_t kMinMacs = 32 * 1024;  // fewer multiply-adds cost less than waking a thread
constexpr int64_t kShrinkRows = 64;      // rows of x that stay in the L2 cache while the ranks of A pass by
constexpr int64_t kShrinkRanks = 4;      // ranks of a unit: 8 KiB of A with k = 1024

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AMX
constexpr int64_t kRowsPerUnit = 4 * kTileRows;  // on tiles
constexpr int64_t kFewGroups = 4;                // groups of rows that get small units
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

}  // namespace
}  // namespace quire::QUIRE_ISA
