// The drivers of mixture-of-experts layers. They sort pairs of a token and a slot by expert, and cut the products of
// all experts in use into tasks for the threads.
#include "quire/kernels/experts.h"

#include <algorithm>

#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/thread_pool.h"

namespace quire {
namespace {

constexpr int64_t kMostRows = 1024;     // rows of all experts that are prepared at a time: it limits scratch memory
constexpr int64_t kTasksPerThread = 8;  // so that other threads can take tasks over from a thread that lost its core
// With fewer multiply-adds, waking another thread costs more time than it saves (some microseconds).
constexpr int64_t kMinTaskMacs = 64 * 1024;
constexpr int64_t kMinPrepareElements = 16 * 1024;
constexpr int64_t kMinRouteElements = 16 * 1024;
constexpr int64_t kMinCombineElements = 16 * 1024;
// The cost of reading a panel, as a number of rows: at about this number, arithmetic takes as long as reading.
constexpr int64_t kRowsOfBytes = 16;

// Some rows of one expert. They form a product of their own.
struct Piece {
  GemmArgs args;
  const GemmKernels* kernels;
  void* input;
};

// The work of a thread at a time.
struct Task {
  const Piece* piece;
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// The pieces of some experts, with their prepared rows, and the tasks that compute them.
struct Plan {
  Piece* pieces;
  int64_t num_pieces = 0, num_rows = 0, input_bytes = 0, cost = 0;
};

int64_t cost_of(const Piece& piece, int64_t panels) { return panels * (kRowsOfBytes + piece.args.m); }

GemmArgs args_of(const ExpertProductArgs& args, const int32_t* tokens, int64_t expert, int64_t begin, int64_t end) {
  const PackedWeight& first = args.stack.first;
  const int64_t panels = ceil_div(first.n, kPanelWidth);
  GemmArgs piece = {.x = args.x,
                    .dtype = args.dtype,
                    .m = end - begin,
                    .weight = first,
                    .bias = args.bias,
                    .bias_dtype = args.bias_dtype,
                    .out = args.out,
                    .out_dtype = args.out_dtype,
                    .x_rows = nullptr};
  piece.weight.data = static_cast<const char*>(first.data) + expert * panels * gemm_panel_bytes(first, args.dtype);
  if (first.order != nullptr) piece.weight.order = first.order + expert * first.k;
  if (args.bias != nullptr)
    piece.bias =
        static_cast<const char*>(args.bias) + expert * first.n * static_cast<int64_t>(size_of(args.bias_dtype));
  piece.out.data =
      static_cast<char*>(args.out.data) + begin * args.out.stride * static_cast<int64_t>(size_of(args.out_dtype));
  if (args.of_tokens) {
    piece.x_rows = tokens + begin;
  } else {
    piece.x.data =
        static_cast<const char*>(args.x.data) + begin * args.x.stride * static_cast<int64_t>(size_of(args.dtype));
  }
  return piece;
}

void prepare(const Plan& plan, int64_t k, Task* tasks) {
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < plan.num_pieces; ++i) {
    const Piece& piece = plan.pieces[i];
    const int64_t m = piece.args.m, rows = round_up(ceil_div(kMinPrepareElements, k), piece.kernels->row_unit);
    for (int64_t row = 0; row < m; row += rows) tasks[num_tasks++] = {&piece, row, std::min(m, row + rows), 0, 0};
  }
  const auto prepare_rows = [&](int i, int) {
    const Piece& piece = *tasks[i].piece;
    piece.kernels->prepare(piece.args, tasks[i].row_begin, tasks[i].row_end, piece.input);
  };
  if (plan.num_rows * k >= 2 * kMinPrepareElements) return parallel_for(static_cast<int>(num_tasks), prepare_rows);
  for (int i = 0; i < num_tasks; ++i) prepare_rows(i, 0);
}

// Cuts the pieces into tasks of about equal cost.
int64_t cut(const Plan& plan, Task* tasks) {
  const GemmArgs& any = plan.pieces[0].args;
  const int64_t panels = ceil_div(any.weight.n, kPanelWidth);
  const int64_t worth = std::max<int64_t>(1, plan.num_rows * any.weight.n * any.weight.k / kMinTaskMacs);
  const int64_t wanted = std::min(worth, kTasksPerThread * num_threads());
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < plan.num_pieces; ++i) {
    const Piece& piece = plan.pieces[i];
    const int64_t m = piece.args.m, row_blocks = ceil_div(m, piece.kernels->rows_per_block(any.weight.k));
    const int64_t rows = round_up(ceil_div(m, row_blocks), piece.kernels->row_unit);
    const int64_t share = cost_of(piece, panels) * wanted / (plan.cost * row_blocks);
    const int64_t blocks = std::clamp<int64_t>(share, 1, panels);
    for (int64_t row = 0; row < m; row += rows)
      for (int64_t b = 0; b < blocks; ++b)
        tasks[num_tasks++] = {&piece, row, std::min(m, row + rows), panels * b / blocks, panels * (b + 1) / blocks};
  }
  return num_tasks;
}

// An upper limit for the number of tasks of a plan.
int64_t most_tasks(const Plan& plan) {
  int64_t row_blocks = 0;
  for (int64_t i = 0; i < plan.num_pieces; ++i)
    row_blocks += ceil_div(plan.pieces[i].args.m, plan.pieces[i].kernels->row_unit);
  return row_blocks + kTasksPerThread * num_threads();
}

void run(Plan& plan) {
  char* input = static_cast<char*>(scratch(Scratch::gemm_input, plan.input_bytes));
  for (int64_t i = 0; i < plan.num_pieces; ++i) {
    plan.pieces[i].input = input;
    input += round_up(plan.pieces[i].kernels->input_bytes(plan.pieces[i].args), 64);
  }
  Task* const tasks = static_cast<Task*>(scratch(Scratch::expert_tasks, most_tasks(plan) * sizeof(Task)));
  prepare(plan, plan.pieces[0].args.weight.k, tasks);
  parallel_for(static_cast<int>(cut(plan, tasks)), [&](int i, int) {
    const Task& task = tasks[i];
    task.piece->kernels->run(
        {&task.piece->args, task.piece->input, task.row_begin, task.row_end, task.panel_begin, task.panel_end});
  });
}

}  // namespace

void route(const RouteArgs& args) {
  const RoutingRule& rule = args.rule;
  const int64_t rows_per_task = std::max<int64_t>(1, kMinRouteElements / rule.num_experts);
  const auto choose = [&](int task, int) {
    const int64_t begin = task * rows_per_task;
    expert_kernels().choose(args, begin, std::min(args.rows, begin + rows_per_task));
  };
  parallel_for(static_cast<int>(ceil_div(args.rows, rows_per_task)), choose);
  const int64_t num_pairs = args.rows * rule.num_active;
  const auto place_of = [&](int64_t pair) {
    const int64_t expert = args.experts[pair];
    if (args.places == nullptr) return expert;
    return int64_t{args.places[expert * args.num_copies + pair / rule.num_active % args.num_copies]};
  };
  std::fill_n(args.begins, args.num_places + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) ++args.begins[place_of(pair) + 1];
  for (int64_t e = 0; e < args.num_places; ++e) args.begins[e + 1] += args.begins[e];
  // While pairs are placed, begins[e] moves to the end of place e. Then it moves back.
  for (int64_t pair = 0; pair < num_pairs; ++pair)
    args.order[args.begins[place_of(pair)]++] = static_cast<int32_t>(pair);
  std::copy_backward(args.begins, args.begins + args.num_places, args.begins + args.num_places + 1);
  args.begins[0] = 0;
}

void multiply_experts(const ExpertProductArgs& args) {
  const int64_t num_experts = args.stack.num_experts, panels = ceil_div(args.stack.first.n, kPanelWidth);
  const int64_t most_pieces = std::min(args.num_pairs, num_experts + args.num_pairs / kMostRows);
  auto* const pieces = static_cast<Piece*>(
      scratch(Scratch::expert_pieces, most_pieces * sizeof(Piece) + args.num_pairs * sizeof(int32_t)));
  int32_t* const tokens = reinterpret_cast<int32_t*>(pieces + most_pieces);
  if (args.of_tokens)
    for (int64_t p = 0; p < args.num_pairs; ++p) tokens[p] = args.order[p] / static_cast<int32_t>(args.num_slots);
  Plan plan{.pieces = pieces};
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t place = args.first_place + e;
    for (int64_t begin = args.begins[place], end; begin < args.begins[place + 1]; begin = end) {
      end = std::min<int64_t>(args.begins[place + 1], begin + kMostRows);
      if (plan.num_rows + end - begin > kMostRows) {
        run(plan);
        plan = {.pieces = pieces};
      }
      Piece& piece = pieces[plan.num_pieces++];
      piece.args = args_of(args, tokens, e, begin, end);
      piece.kernels = &gemm_kernels_for(piece.args);
      plan.num_rows += end - begin;
      plan.input_bytes += round_up(piece.kernels->input_bytes(piece.args), 64);
      plan.cost += cost_of(piece, panels);
    }
  }
  if (plan.num_pieces > 0) run(plan);
}

void combine_experts(const CombineArgs& args) {
  const int64_t num_pairs = args.rows * args.num_slots;
  int32_t* const places = static_cast<int32_t*>(scratch(Scratch::expert_places, num_pairs * sizeof(int32_t)));
  std::fill_n(places, num_pairs, 0);  // 0 is the place of a pair that `order` lacks
  for (int64_t p = 0; p < num_pairs; ++p) places[args.order[p]] = static_cast<int32_t>(p);
  const int64_t rows_per_task = std::max<int64_t>(1, kMinCombineElements / (args.columns * args.num_slots));
  parallel_for(static_cast<int>(ceil_div(args.rows, rows_per_task)), [&](int task, int) {
    const int64_t begin = task * rows_per_task;
    expert_kernels().combine(args, places, begin, std::min(args.rows, begin + rows_per_task));
  });
}

}  // namespace quire
