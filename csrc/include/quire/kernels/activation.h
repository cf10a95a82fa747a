// Gated activations of the feed-forward block.
#pragma once

#include <cstdint>

#include "quire/dtype.h"

namespace quire {

// The numbers are part of the Python interface (kernels/cpu.py).
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2 };

// out[t, i] = activation(x[t, i]) * x[t, i + inner]; strides in elements, rows contiguous.
struct ActivationArgs {
  DType dtype;
  Activation activation;
  const void* x;  // [rows, 2 * inner]
  int64_t x_stride;
  void* out;  // [rows, inner]
  int64_t out_stride;
  int64_t rows, inner;
};

struct ActivationKernels {
  void (*gated)(const ActivationArgs&);
};
const ActivationKernels& activation_kernels();

}  // namespace quire
