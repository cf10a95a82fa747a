// Low-rank additions, see quire/kernels/lora.h: finished sums of products, and additions alone.
#include "quire/kernels/lora.h"

#include <algorithm>
#include <array>
#include <utility>

#include "lora_expand.h"
#include "lora_plan.h"
#include "lora_shrink.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kRowsPerChunk = 1024;  // rows that are added at a time: this bounds the scratch memory

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
