// What the matrix product kernels of every instruction set share: prefetch plan, bias, conversion of finished rows.
#pragma once

#include <algorithm>

#include "quire/kernels/gemm.h"
#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
// Keeps a value in a register: g++ 12 would otherwise fold the same load into each product that uses it, and the loads
// would then outnumber what the load ports can serve.
inline __m512i in_register(__m512i x) {
  __asm__("" : "+v"(x));
  return x;
}
#endif

// While a block of weights is multiplied with several row tiles in turn ("passes"), the next block is fetched from
// memory into the L2 cache: each pass takes an equal share, so that memory and arithmetic overlap evenly. A pass calls
// fetch() at even intervals; each call takes `lines` cache lines.
struct Prefetch {
  const char* next;
  int lines;

  inline void fetch() {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(next + 64 * i, 0, 2);
    next += 64 * lines;
  }
};

struct PrefetchPlan {
  const char* begin;   // of the next block
  int lines_per_call;  // so many calls, so many lines each, would fetch it in one pass
  int64_t calls;
  int num_passes;

  Prefetch of_pass(int pass) const {
    const int share = ceil_div(lines_per_call, num_passes);
    const int first = std::min(pass * share, lines_per_call);
    return {begin + 64 * calls * first, std::min(share, lines_per_call - first)};
  }
};

// The 64 bias values of one panel as float, zeros where there is no bias or no column.
inline void load_bias(const GemmArgs& args, int64_t panel, float* bias_64) {
  const int64_t first = panel * kPanelWidth;
  const int64_t count = args.bias == nullptr ? 0 : std::min(kPanelWidth, args.n - first);
  for (int64_t i = 0; i < kPanelWidth; ++i) {
    if (i >= count) {
      bias_64[i] = 0;
    } else if (args.bias_dtype == DType::f32) {
      bias_64[i] = static_cast<const float*>(args.bias)[first + i];
    } else if (args.bias_dtype == DType::bf16) {
      bias_64[i] = to_f32(static_cast<const bf16*>(args.bias)[first + i]);
    } else {
      bias_64[i] = to_f32(static_cast<const f16*>(args.bias)[first + i]);
    }
  }
}

// A rectangle of finished sums [rows][columns], rows `pitch` floats apart, and its place in the output. Columns past N
// are cut off.
struct Finished {
  const float* sums;
  int64_t pitch;
  int64_t row, num_rows;
  int64_t column, num_columns;
  const float* bias;  // of the first column
};

template <class T>
inline void store_as(const GemmArgs& args, const Finished& f) {
  constexpr int W = F32::kWidth;
  const int count = static_cast<int>(std::min(f.num_columns, args.n - f.column));
  const float* sums = f.sums;
  T* out = static_cast<T*>(args.out) + f.row * args.out_stride + f.column;
  for (int64_t r = 0; r < f.num_rows; ++r, sums += f.pitch, out += args.out_stride) {
    int i = 0;
    for (; i + W <= count; i += W) store(out + i, load(sums + i) + load(f.bias + i));
    if (i < count) store_n(out + i, load(sums + i) + load(f.bias + i), count - i);
  }
}

// Sums plus bias, rounded to the output type.
inline void store_finished(const GemmArgs& args, const Finished& f) {
  switch (args.out_dtype) {
    case DType::f32:
      return store_as<float>(args, f);
    case DType::bf16:
      return store_as<bf16>(args, f);
    case DType::f16:
      return store_as<f16>(args, f);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
