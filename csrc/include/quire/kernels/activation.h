// Gated activations of the feed-forward block.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/strided.h"

namespace quire {

// The numbers are part of the Python interface (kernels/cpu.py).
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2 };

// out[t, i] = activation(x[t, i]) * x[t, i + inner].
struct ActivationArgs {
  DType dtype;
  Activation activation;
  StridedRows<const void> x;  // [rows, 2 * inner]
  StridedRows<void> out;      // [rows, inner]
  int64_t rows, inner;
};

struct ActivationKernels {
  void (*gated)(const ActivationArgs&);
};
const ActivationKernels& activation_kernels();

}  // namespace quire
