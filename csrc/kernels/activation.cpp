// Gated activations: activation(first half) * second half, float32 inside, rounded once.
#include "quire/kernels/activation.h"

#include <algorithm>

#include "quire/round_up.h"
#include "quire/simd.h"
#include "quire/thread_pool.h"
#include "rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int64_t kLanes = F32::kWidth;

struct Silu {
  static F32 of(F32 x) { return x / (broadcast(1.0f) + exp(zero() - x)); }
};

// x * Phi(x) with Phi the normal distribution function. For -|x| the tail is t * poly(t) * exp(-x^2 / 2) / 2,
// Abramowitz and Stegun 7.1.26 for erfc: absolute error under 1.5e-7, and no cancellation for negative x.
struct Gelu {
  static F32 of(F32 x) {
    const F32 one = broadcast(1.0f), magnitude = max(x, zero() - x);
    const F32 t = one / fma(magnitude, broadcast(0.3275911f * 0.70710678118654752f), one);
    F32 p = broadcast(1.061405429f);
    p = fma(p, t, broadcast(-1.453152027f));
    p = fma(p, t, broadcast(1.421413741f));
    p = fma(p, t, broadcast(-0.284496736f));
    p = fma(p, t, broadcast(0.254829592f));
    const F32 tail = broadcast(0.5f) * (p * t) * exp(x * x * broadcast(-0.5f));
    return x * select_less(x, zero(), tail, one - tail);
  }
};

// x * (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3): Hendrycks and Gimpel, arXiv
// 1606.08415.
struct GeluTanh {
  static F32 of(F32 x) {
    const F32 u = x * fma(x * x, broadcast(0.79788456080286536f * 0.044715f), broadcast(0.79788456080286536f));
    return x / (broadcast(1.0f) + exp(broadcast(-2.0f) * u));
  }
};

template <class Function>
struct Gated {
  static F32 of(F32 gate, F32 up) { return Function::of(gate) * up; }
};

// gpt-oss: gate * sigmoid(1.702 * gate) * (up + 1), both clamped.
struct ClampedSwiglu {
  static F32 of(F32 gate, F32 up) {
    const F32 limit = broadcast(7.0f), one = broadcast(1.0f);
    gate = min(limit, gate), up = max(zero() - limit, min(limit, up));  // this order of operands keeps NaN
    return gate / (one + exp(gate * broadcast(-1.702f))) * (up + one);
  }
};

// A function of gate and up, which are first multiplied by the factor of their row.
template <class Function>
struct Scaled {
  F32 factor;
  F32 operator()(F32 gate, F32 up) const { return Function::of(gate * factor, up * factor); }
};

template <class T, class Function>
void gated_range(const T* x, int64_t inner, T* out, int64_t begin, int64_t end, const Function& function) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) store(out + i, function(load(x + i), load(x + inner + i)));
  if (i < end) {
    const int left = static_cast<int>(end - i);
    store_n(out + i, function(load_n(x + i, left), load_n(x + inner + i, left)), left);
  }
}

template <class T, class Function>
void gated_rows(const ActivationArgs& a) {
  // Ranges of a row start at multiples of the task size. The lane of an element does not change its value.
  const int64_t size = std::min(a.inner, kElementsPerTask), per_row = ceil_div(a.inner, size);
  const int64_t rows_per_task = std::max<int64_t>(kElementsPerTask / size, 1);
  const auto run = [&](int64_t task) {
    const int64_t first_row = task / per_row * rows_per_task, begin = task % per_row * size;
    for (int64_t row = first_row; row < std::min(a.rows, first_row + rows_per_task); ++row) {
      const auto run_range = [&](const auto& function) {
        gated_range(static_cast<const T*>(a.x.data) + row * a.x.stride, a.inner,
                    static_cast<T*>(a.out.data) + row * a.out.stride, begin, std::min(a.inner, begin + size), function);
      };
      if (a.factors == nullptr) {
        run_range(Function::of);
      } else {
        run_range(Scaled<Function>{broadcast(a.factors[a.order[row]])});
      }
    }
  };
  const int64_t tasks = ceil_div(a.rows, rows_per_task) * per_row;
  if (tasks == 1) return run(0);
  parallel_for(static_cast<int>(tasks), [&](int task, int) { run(task); });
}

template <class T>
void gated_of(const ActivationArgs& a) {
  switch (a.activation) {
    case Activation::silu:
      return gated_rows<T, Gated<Silu>>(a);
    case Activation::gelu:
      return gated_rows<T, Gated<Gelu>>(a);
    case Activation::gelu_tanh:
      return gated_rows<T, Gated<GeluTanh>>(a);
    case Activation::clamped_swiglu:
      return gated_rows<T, ClampedSwiglu>(a);
  }
}

void gated(const ActivationArgs& a) {
  with_type_of(a.dtype, [&]<class T>(T) { gated_of<T>(a); });
}

}  // namespace

extern const ActivationKernels activation_table;
const ActivationKernels activation_table = {gated};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(ActivationKernels, activation_kernels, activation_table)
