// Low-rank additions to the result of a product, see quire/kernels/lora.h. Rows are grouped by adapter, so that each
// adapter is read once for all its rows. Two phases: A x for all rows, and B of it, added to the base.
#include "quire/kernels/lora.h"

#include <algorithm>

#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;
constexpr int64_t kRowsPerChunk = 1024;  // grouped at a time: bounds the scratch memory
constexpr int64_t kMinMacs = 32 * 1024;  // multiply-adds worth a wake-up of another thread
constexpr int64_t kShrinkRows = 32;      // rows of x that stay in the L2 cache while the ranks of A pass by
constexpr int64_t kShrinkRanks = 4;      // of a unit: 8 KiB of A with k = 1024
constexpr int64_t kExpandRows = 48;      // with kExpandColumns, 48 KiB of sums to read
constexpr int64_t kExpandColumns = 256;  // of a unit: 8 KiB of B at rank 16
constexpr int64_t kTileColumns = 64;     // four panels of B
constexpr int kTilePanels = kTileColumns / kLoraColumns;
constexpr int kVectors = kLoraColumns / kLanes;  // of a panel

// Rows of tiles: 4 x 4 sums and 6 x 4 sums in the 32 registers of AVX-512, half of it in 16 registers.
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
constexpr int kShrinkTile = 4, kExpandTile = 6, kPanelsTogether = 4;
#else
constexpr int kShrinkTile = 2, kExpandTile = QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX2 ? 6 : 3, kPanelsTogether = 1;
#endif

// A piece of work. Pieces of one adapter follow each other, in the order of their memory.
struct Unit {
  const LoraDelta* delta;  // nullptr: nothing is added
  int64_t row, row_end;    // in Plan::order
  int64_t sums;            // first of the part's A x in a row of them
  int64_t first_column;    // of the part in the output
  int64_t begin, end;      // ranks of A, or columns of B in the part
};

// Rows with the same adapter.
struct Group {
  int64_t slot, begin, end;
};

struct Plan {
  const LoraArgs* args;
  const int32_t* order;  // rows by adapter
  const Group* groups;
  int64_t num_groups;
  float* sums;  // scale * A x, in the order of `order`
  int64_t sums_stride;

  const LoraDelta* delta(const Group& group, int part) const {
    return group.slot < 0 ? nullptr : args->table.deltas + group.slot * args->table.num_parts + part;
  }
};

template <class Fn>
inline void for_shrinks(const Plan& plan, const Fn& fn) {
  const LoraTable& table = plan.args->table;
  for (const Group* group = plan.groups; group < plan.groups + plan.num_groups; ++group) {
    if (group->slot < 0) continue;
    for (int64_t row = group->begin; row < group->end; row += kShrinkRows) {
      const int64_t row_end = std::min(group->end, row + kShrinkRows);
      int64_t sums = 0;
      for (int part = 0; part < table.num_parts; ++part) {
        const LoraDelta* delta = plan.delta(*group, part);
        for (int64_t rank = 0; rank < delta->rank; rank += kShrinkRanks)
          fn(Unit{delta, row, row_end, sums, 0, rank, std::min(delta->rank, rank + kShrinkRanks)});
        sums += delta->rank;
      }
    }
  }
}

template <class Fn>
inline void for_expands(const Plan& plan, const Fn& fn) {
  const LoraArgs& args = *plan.args;
  const LoraTable& table = args.table;
  const bool in_place = args.out.data == args.base.data;
  for (const Group* group = plan.groups; group < plan.groups + plan.num_groups; ++group) {
    for (int64_t row = group->begin; row < group->end; row += kExpandRows) {
      const int64_t row_end = std::min(group->end, row + kExpandRows);
      int64_t sums = 0, first_column = 0;
      for (int part = 0; part < table.num_parts; first_column += table.columns[part], ++part) {
        const LoraDelta* delta = plan.delta(*group, part);
        if (delta != nullptr && delta->rank == 0) delta = nullptr;
        if (delta == nullptr && in_place) continue;
        for (int64_t column = 0; column < table.columns[part]; column += kExpandColumns)
          fn(Unit{delta, row, row_end, sums, first_column, column,
                  std::min(table.columns[part], column + kExpandColumns)});
        if (delta != nullptr) sums += delta->rank;
      }
    }
  }
}

// Runs all units, each with the memory of the next one, which it fetches meanwhile.
template <class ForUnits, class Run>
inline void run_units(const ForUnits& for_units, int64_t macs, const Run& run) {
  int64_t count = 0;
  for_units([&](const Unit&) { ++count; });
  Unit* units = static_cast<Unit*>(scratch(Scratch::lora_units, sizeof(Unit) * std::max<int64_t>(count, 1)));
  Unit* end = units;
  for_units([&](const Unit& unit) { *end++ = unit; });
  const auto run_one = [&](int64_t i) { run(units[i], units[std::min(i + 1, count - 1)]); };
  if (macs < kMinMacs || count == 1) {
    for (int64_t i = 0; i < count; ++i) run_one(i);
    return;
  }
  parallel_for(static_cast<int>(count), [&](int task, int) { run_one(task); });
}

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
inline __m512i load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
inline __m512i load_pairs_n(const bf16* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
}
inline __m512bh as_pairs(__m512i x) { return reinterpret_cast<__m512bh>(x); }

// Elements of a cache line in one instruction: two products in each lane.
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

// to[row][rank] = scale * sum of x[row] * a[rank] over k.
template <class Step, int kRows, int kRanks, class X, class A>
inline void shrink_tile(const X* const* x, const A* a, int64_t k, float scale, float* to, int64_t to_stride,
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
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 8
    for (int rank = 0; rank < kRanks; ++rank) to[row * to_stride + rank] = scale * reduce_add(sums[row][rank]);
}

template <class Step, class X, class A>
void shrink(const Plan& plan, const Unit& unit, const Unit& following) {
  const LoraArgs& args = *plan.args;
  const int64_t k = args.table.k;
  const auto scale = static_cast<float>(unit.delta->scale);
  const A* next = static_cast<const A*>(following.delta->a) + following.begin * k;
  const X* x[kShrinkTile];
  for (int64_t row = unit.row, count; row < unit.row_end; row += count) {
    count = unit.row_end - row >= kShrinkTile ? kShrinkTile : 1;
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<const X*>(args.x.data) + plan.order[row + i] * args.x.stride;
    float* to = plan.sums + row * plan.sums_stride + unit.sums;
    const char* fetched = row == unit.row ? reinterpret_cast<const char*>(next) : nullptr;
    for (int64_t rank = unit.begin, ranks; rank < unit.end; rank += ranks) {
      ranks = unit.end - rank >= kShrinkRanks ? kShrinkRanks : 1;
      const A* a = static_cast<const A*>(unit.delta->a) + rank * k;
      const auto tile = ranks == 1
                            ? (count == 1 ? shrink_tile<Step, 1, 1, X, A> : shrink_tile<Step, kShrinkTile, 1, X, A>)
                        : count == 1 ? shrink_tile<Step, 1, kShrinkRanks, X, A>
                                     : shrink_tile<Step, kShrinkTile, kShrinkRanks, X, A>;
      tile(x, a, k, scale, to + rank, plan.sums_stride, fetched);
    }
  }
}

template <class X, class A>
inline void shrink_of(const Plan& plan, const Unit& unit, const Unit& next) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  if constexpr (std::is_same_v<X, bf16> && std::is_same_v<A, bf16>) return shrink<Pairs, X, A>(plan, unit, next);
#endif
  shrink<Floats, X, A>(plan, unit, next);
}

// A x of unit vectors: rows of a transposed A.
template <class A>
void look_up(const Plan& plan, const Unit& unit) {
  const LoraArgs& args = *plan.args;
  const auto scale = static_cast<float>(unit.delta->scale);
  for (int64_t row = unit.row; row < unit.row_end; ++row) {
    const A* a = static_cast<const A*>(unit.delta->a) + args.token_ids[plan.order[row]] * unit.delta->rank;
    float* to = plan.sums + row * plan.sums_stride + unit.sums;
    for (int64_t rank = unit.begin; rank < unit.end; ++rank) to[rank] = scale * to_f32(a[rank]);
  }
}

// to[row][64] = sums[row] * panels of b, over the ranks.
template <int kRows, int kPanels, class B>
inline void expand_panels(const float* sums, int64_t sums_stride, const B* b, int64_t rank, float* to,
                          const char* next) {
  constexpr int kColumns = kPanels * kVectors;
  F32 totals[kRows][kColumns];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < kColumns; ++v) totals[row][v] = zero();
  for (int64_t r = 0; r < rank; ++r) {
    F32 w[kColumns];
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
      const B* from = b + (panel * rank + r) * kLoraColumns;
      if (next != nullptr) __builtin_prefetch(next + (panel * rank + r) * kLoraColumns * sizeof(B), 0, 3);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) w[panel * kVectors + v] = load(from + v * kLanes);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const F32 h = broadcast(sums[row * sums_stride + r]);
#pragma GCC unroll 16
      for (int v = 0; v < kColumns; ++v) totals[row][v] = fma(h, w[v], totals[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < kColumns; ++v) store(to + row * kTileColumns + v * kLanes, totals[row][v]);
}

// The same for the panels of a tile, some at a time.
template <int kRows, class B>
inline void expand_tile(const float* sums, int64_t sums_stride, const B* b, int64_t rank, int64_t panels, float* to,
                        const char* next) {
  const int64_t elements = rank * kLoraColumns;
  int64_t panel = 0;
  for (; panel + kPanelsTogether <= panels; panel += kPanelsTogether)
    expand_panels<kRows, kPanelsTogether, B>(sums, sums_stride, b + panel * elements, rank, to + panel * kLoraColumns,
                                             next == nullptr ? next : next + panel * elements * sizeof(B));
  for (; panel < panels; ++panel)
    expand_panels<kRows, 1, B>(sums, sums_stride, b + panel * elements, rank, to + panel * kLoraColumns, nullptr);
}

// out = round(base + added), or round(base) without `added`.
template <class Out>
inline void finish_row(const float* base, const float* added, int64_t count, Out* out) {
  int64_t i = 0;
  if (added == nullptr) {
    for (; i + kLanes <= count; i += kLanes) store(out + i, load(base + i));
    if (i < count) store_n(out + i, load_n(base + i, static_cast<int>(count - i)), static_cast<int>(count - i));
    return;
  }
  for (; i + kLanes <= count; i += kLanes) store(out + i, load(base + i) + load(added + i));
  if (i < count) {
    const int left = static_cast<int>(count - i);
    store_n(out + i, load_n(base + i, left) + load_n(added + i, left), left);
  }
}

inline void fetch_row(const float* base, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(float)) __builtin_prefetch(base + i, 0, 3);
}

template <class B, class Out>
void expand(const Plan& plan, const Unit& unit, const Unit& following) {
  const LoraArgs& args = *plan.args;
  const auto base_of = [&](int64_t row) { return args.base.data + row * args.base.stride + unit.first_column; };
  const auto out_of = [&](int64_t row) {
    return static_cast<Out*>(args.out.data) + row * args.out.stride + unit.first_column;
  };
  if (unit.delta == nullptr) {
    for (int64_t row = unit.row; row < unit.row_end; ++row) {
      const int64_t at = plan.order[row];
      finish_row<Out>(base_of(at) + unit.begin, nullptr, unit.end - unit.begin, out_of(at) + unit.begin);
    }
    return;
  }
  alignas(64) float added[kExpandTile * kTileColumns];
  const int64_t rank = unit.delta->rank;
  const B* b = static_cast<const B*>(unit.delta->b);
  const char* next = following.delta == nullptr
                         ? nullptr
                         : reinterpret_cast<const char*>(static_cast<const B*>(following.delta->b) +
                                                         following.begin * following.delta->rank);
  for (int64_t row = unit.row, rows; row < unit.row_end; row += rows) {
    rows = unit.row_end - row >= kExpandTile ? kExpandTile : 1;
    const auto tile = rows == 1 ? expand_tile<1, B> : expand_tile<kExpandTile, B>;
    const float* sums = plan.sums + row * plan.sums_stride + unit.sums;
    for (int64_t column = unit.begin; column < unit.end; column += kTileColumns) {
      const int64_t count = std::min(kTileColumns, unit.end - column);
      for (int64_t i = 0; i < rows; ++i) fetch_row(base_of(plan.order[row + i]) + column, count);
      const int64_t ahead = (column - unit.begin) * rank * static_cast<int64_t>(sizeof(B));
      tile(sums, plan.sums_stride, b + column * rank, rank, ceil_div(count, kLoraColumns), added,
           row == unit.row && next != nullptr ? next + ahead : nullptr);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = plan.order[row + i];
        finish_row<Out>(base_of(at) + column, added + i * kTileColumns, count, out_of(at) + column);
      }
    }
  }
}

// Rows [0, args.rows) by their slots, -1 first.
Plan make_plan(const LoraArgs& args) {
  const LoraTable& table = args.table;
  const int64_t num_slots = table.num_slots + 1;
  auto* memory = static_cast<int32_t*>(
      scratch(Scratch::lora_order, sizeof(int32_t) * (num_slots + args.rows) + sizeof(Group) * num_slots + 64));
  int32_t *order = memory, *counts = order + round_up(args.rows + num_slots, 2) - num_slots;
  auto* groups = reinterpret_cast<Group*>(counts + num_slots);
  std::fill_n(counts, num_slots, 0);
  for (int64_t row = 0; row < args.rows; ++row) ++counts[args.slots[row] + 1];
  int64_t num_groups = 0, begin = 0, most_sums = 0, rows_with = 0;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t count = counts[slot];
    if (count == 0) continue;
    counts[slot] = static_cast<int32_t>(begin);
    groups[num_groups++] = {slot - 1, begin, begin + count};
    begin += count;
    if (slot == 0) continue;
    rows_with += count;
    int64_t sums = 0;
    for (int part = 0; part < table.num_parts; ++part) sums += table.deltas[(slot - 1) * table.num_parts + part].rank;
    most_sums = std::max(most_sums, sums);
  }
  for (int64_t row = 0; row < args.rows; ++row) order[counts[args.slots[row] + 1]++] = static_cast<int32_t>(row);
  float* sums = rows_with == 0 || most_sums == 0
                    ? nullptr
                    : static_cast<float*>(scratch(Scratch::lora_sums, sizeof(float) * args.rows * most_sums));
  return {&args, order, groups, num_groups, sums, most_sums};
}

void add_chunk(const LoraArgs& args) {
  const LoraTable& table = args.table;
  const Plan plan = make_plan(args);
  int64_t num_columns = 0;
  for (int part = 0; part < table.num_parts; ++part) num_columns += table.columns[part];
  const int64_t products = args.rows * plan.sums_stride;
  const auto shrinks = [&](const auto& fn) { for_shrinks(plan, fn); };
  const auto expands = [&](const auto& fn) { for_expands(plan, fn); };
  if (args.token_ids != nullptr) {
    run_units(shrinks, products, [&](const Unit& unit, const Unit&) {
      with_type_of(table.dtype, [&]<class A>(A) { look_up<A>(plan, unit); });
    });
  } else {
    run_units(shrinks, products * table.k, [&](const Unit& unit, const Unit& next) {
      with_type_of(args.dtype, [&]<class X>(X) {
        with_type_of(table.dtype, [&]<class A>(A) { shrink_of<X, A>(plan, unit, next); });
      });
    });
  }
  run_units(expands, (products / table.num_parts + args.rows) * num_columns, [&](const Unit& unit, const Unit& next) {
    with_type_of(table.dtype, [&]<class B>(B) {
      with_type_of(args.out_dtype, [&]<class Out>(Out) { expand<B, Out>(plan, unit, next); });
    });
  });
}

void add(const LoraArgs& args) {
  for (int64_t row = 0; row < args.rows; row += kRowsPerChunk) {
    LoraArgs chunk = args;
    chunk.rows = std::min(kRowsPerChunk, args.rows - row);
    chunk.slots += row;
    if (args.token_ids != nullptr) {
      chunk.token_ids += row;
    } else {
      chunk.x.data =
          static_cast<const char*>(args.x.data) + row * args.x.stride * static_cast<int64_t>(size_of(args.dtype));
    }
    chunk.base.data += row * args.base.stride;
    chunk.out.data =
        static_cast<char*>(args.out.data) + row * args.out.stride * static_cast<int64_t>(size_of(args.out_dtype));
    add_chunk(chunk);
  }
}

}  // namespace

extern const LoraKernels lora_table;
const LoraKernels lora_table = {add};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(LoraKernels, lora_kernels, lora_table)
