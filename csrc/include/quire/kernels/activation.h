// Gated activations of the feed-forward block.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/strided.h"

namespace quire {

// The numbers are part of the Python interface (kernels/cpu.py).
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, clamped_swiglu = 3 };

// out[t, i] = activation(x[t, i]) * x[t, i + inner]. clamped_swiglu has a formula of its own: see kernels/ops.py. If
// there are factors, row t of x is multiplied by factors[order[t]] first.
struct ActivationArgs {
  DType dtype;
  Activation activation;
  StridedRows<const void> x;  // [rows, 2 * inner]
  StridedRows<void> out;      // [rows, inner]
  int64_t rows, inner;
  const float* factors;  // [num_factors] or null
  int64_t num_factors;
  const int32_t* order;  // [rows]
  // Only the rows from the first of these numbers to the last one are computed. The numbers are read when the kernel
  // runs. nullptr: all rows are computed.
  const int32_t* begins;
  int64_t num_begins;
};

struct ActivationKernels {
  void (*gated)(const ActivationArgs&);
};
const ActivationKernels& activation_kernels();

}  // namespace quire
