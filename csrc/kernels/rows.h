// Tasks of whole rows of elements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "quire/isa.h"
#include "quire/round_up.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

// With fewer elements (a few microseconds of work), waking other threads costs more than it saves.
constexpr int64_t kElementsPerTask = 16384;

// Runs row(i) for every row, in tasks of at least kElementsPerTask elements.
template <class Fn>
void for_rows(int64_t rows, int64_t elements_per_row, const Fn& row) {
  const int64_t rows_per_task = std::max<int64_t>(kElementsPerTask / elements_per_row, 1);
  const auto tasks = static_cast<int>(ceil_div(rows, rows_per_task));
  if (tasks <= 1) {
    for (int64_t i = 0; i < rows; ++i) row(i);
    return;
  }
  parallel_for(tasks, [&](int task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i) row(i);
  });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
