// Shared parts of the matrix product kernels of all instruction sets: prefetch plan, bias, conversion of finished rows.
#pragma once

#include <algorithm>
#include <concepts>

#include "quire/isa.h"
#include "quire/kernels/gemm.h"
#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"

// g++ 12 leaves these loops as calls. With AVX2 inlining gains; with AVX-512 without VNNI it loses (4-bit codes, 8
// rows).
#if QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX2
#define QUIRE_INLINE_ON_AVX2 __attribute__((always_inline))
#else
#define QUIRE_INLINE_ON_AVX2
#endif

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
// Keeps a value in a register. Otherwise g++ 12 folds the same load into each product that uses it, and the load ports
// cannot serve so many loads.
inline __m512i in_register(__m512i x) {
  __asm__("" : "+v"(x));
  return x;
}
#endif

// While several row tiles in turn ("passes") use a block of weights, the next block is fetched from memory into the L2
// cache. Each pass takes its share, so that memory and arithmetic overlap evenly. A pass calls fetch() at even
// intervals, and each call takes `lines` cache lines.
struct Prefetch {
  // L1 as well, if that was measured: 1.00 to 1.08 times as fast from 1 to 256 rows (bfloat16, int8; Zen 5)
  static constexpr int kLocality =
      QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX512_VNNI || QUIRE_ISA_LEVEL == QUIRE_LEVEL_AVX512_BF16 ? 3 : 2;
  static constexpr bool kIsSpread = true;  // see Spread

  const char* next;
  int lines;

  // Several calls at once, where a tile has few instructions to spare.
  inline void fetch(int calls = 1) { fetch_to<kLocality>(calls); }

 protected:
  template <int kTo>
  inline void fetch_to(int calls) {
    for (int i = 0; i < calls * lines; ++i) __builtin_prefetch(next + 64 * i, 0, kTo);
    next += 64 * calls * lines;
  }
};

// The same into L1, where that has room for two blocks.
struct NearPrefetch : Prefetch {
  inline void fetch(int calls = 1) { fetch_to<3>(calls); }
};

// For a pass that goes through its block once for each of kParts parts of the columns, and calls fetch() in each. Every
// part fetches as much as the others. If the first one fetched all, memory would have nothing to do in the others: 4
// rows took 1.4 times and 8 rows 1.2 times as long (Zen 3, bfloat16 and int8; benchmarks/NOTES.md).
template <int kParts, class Fetch>
class Spread {
 public:
  explicit Spread(Fetch& whole) : whole_(whole), now_(whole) {}
  Spread(const Spread&) = delete;
  ~Spread() { whole_ = now_; }

  void fetch() {
    if (kParts > 1 && ++due_ < kParts) return;
    due_ = 0;
    now_.fetch();
  }
  QUIRE_INLINE_ON_AVX2 void fetch(int calls) {
    if (kParts == 1) return now_.fetch(calls);
    due_ += calls;
    if (due_ < kParts) return;
    now_.fetch(due_ / kParts);
    due_ %= kParts;
  }

 private:
  Fetch& whole_;
  Fetch now_;    // a copy, which stays in registers
  int due_ = 0;  // calls whose share was not fetched yet
};

// 1.17 to 1.27 times as fast as a block of 8 KiB ahead at 1 to 6 rows in 4 bits, the same in 8 bits (newer Xeon;
// benchmarks/NOTES.md).
constexpr int64_t kCloseBytes = 2048;

struct PrefetchPlan {
  const char* begin;   // beginning of the next block
  int lines_per_call;  // `calls` calls with this number of lines fetch the block in one pass
  int64_t calls;
  int num_passes;
  bool is_in_order = true;    // passes read the block in the order of its addresses
  const char* now = nullptr;  // this block, if the weights after it may be fetched close ahead

  Prefetch of_pass(int pass) const {
    // At the end of a panel this fetches its neighbour's numbers, and the neighbour's first weights come without it.
    if (num_passes == 1 && now != nullptr && fetches_close()) return {now + kCloseBytes, lines_per_call};
    // The only pass waits for memory. Without prefetching it is 1.1 to 1.3 times as fast there (Zen 4, 1 to 6 rows in 8
    // and 4 bits; benchmarks/NOTES.md).
    if (num_passes == 1 && is_in_order && follows_streams()) return {begin, 0};
    return of_part(pass, pass + 1, num_passes);
  }

  // Of a pass with the part [first, end) of the work of all passes, `whole`. Early passes fetch more than late ones,
  // because lines of the last pass come too late for the first rows of the next block.
  Prefetch of_part(int64_t first, int64_t end, int64_t whole) const {
    const auto lines_before = [&](int64_t work) { return static_cast<int>(ceil_div(lines_per_call * work, whole)); };
    return {begin + 64 * calls * lines_before(first), lines_before(end) - lines_before(first)};
  }
};

// The row of x that row `row` of the product reads.
template <class T>
inline const T* row_of_x(const GemmArgs& args, int64_t row) {
  return static_cast<const T*>(args.x.data) + (args.x_rows == nullptr ? row : args.x_rows[row]) * args.x.stride;
}

// The 64 bias values of one panel as float, zeros without a bias or a column.
inline void load_bias(const GemmArgs& args, int64_t panel, float* bias_64) {
  const int64_t first = panel * kPanelWidth;
  const int64_t count = args.bias == nullptr ? 0 : std::min(kPanelWidth, args.weight.n - first);
  with_type_of(args.bias_dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < count; ++i) bias_64[i] = to_f32(static_cast<const T*>(args.bias)[first + i]);
  });
  std::fill(bias_64 + count, bias_64 + kPanelWidth, 0.0f);
}

// The place of finished rows of a panel in the output, and the panel's bias [64].
struct Finished {
  int64_t row, num_rows, panel;
  const float* bias;
};

// number(row, column), a vector, rounded to the output type. Rows count from f.row, columns from the first column of
// the panel; columns after the last are cut off.
template <std::invocable<int64_t, int64_t> Number>
inline void store_rounded(const GemmArgs& args, const Finished& f, const Number& number) {
  constexpr int W = F32::kWidth;
  const int64_t first = f.panel * kPanelWidth, count = std::min(kPanelWidth, args.weight.n - first);
  with_type_of(args.out_dtype, [&]<class T>(T) {
    T* out = static_cast<T*>(args.out.data) + f.row * args.out.stride + first;
    for (int64_t r = 0; r < f.num_rows; ++r, out += args.out.stride) {
      int64_t c = 0;
      for (; c + W <= count; c += W) store(out + c, number(r, c));
      if (c < count) store_n(out + c, number(r, c), static_cast<int>(count - c));
    }
  });
}

// The same, with the additions of adapters. It is not inline: kernels have one way to finish rows, and this part of it
// is rarer.
template <std::invocable<int64_t, int64_t> Number>
__attribute__((noinline)) void store_with_adapters(const GemmArgs& args, const Finished& f, const Number& number) {
  LoraSpace space;
  const int64_t first = f.panel * kPanelWidth, count = std::min(kPanelWidth, args.weight.n - first);
  for (int64_t row = 0; row < f.num_rows; row += kLoraRows) {
    const Finished some = {f.row + row, std::min(kLoraRows, f.num_rows - row), f.panel, f.bias};
    const float* const added = lora_kernels().expand(*args.lora, {some.row, some.num_rows, first, count}, space.rows());
    store_rounded(args, some,
                  [&](int64_t r, int64_t c) { return number(row + r, c) + load(added + r * kLoraPitch + c); });
  }
}

// sums(row, column) plus bias, plus the additions of adapters, rounded to the output type. sums gives a vector.
template <std::invocable<int64_t, int64_t> Sums>
inline void store_finished(const GemmArgs& args, const Finished& f, const Sums& sums) {
  const auto number = [&](int64_t r, int64_t c) { return sums(r, c) + load(f.bias + c); };
  if (args.lora == nullptr) return store_rounded(args, f, number);
  store_with_adapters(args, f, number);
}

// The same for sums [rows][64]. Additions of adapters need not pass through memory.
inline void store_finished(const GemmArgs& args, const Finished& f, const float* sums) {
  if (args.lora == nullptr)
    return store_rounded(args, f,
                         [&](int64_t r, int64_t c) { return load(sums + r * kPanelWidth + c) + load(f.bias + c); });
  const int64_t first = f.panel * kPanelWidth, count = std::min(kPanelWidth, args.weight.n - first);
  char* const out = static_cast<char*>(args.out.data) +
                    (f.row * args.out.stride + first) * static_cast<int64_t>(size_of(args.out_dtype));
  lora_kernels().finish(*args.lora, {f.row, f.num_rows, first, count},
                        {{sums, kPanelWidth}, f.bias, {out, args.out.stride}, args.out_dtype});
}

}  // namespace
}  // namespace quire::QUIRE_ISA
