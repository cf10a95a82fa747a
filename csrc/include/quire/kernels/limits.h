// Measures the limits of this machine: streaming reads, and multiply-adds that touch only registers. Benchmarks and the
// cost model give results as a share of these limits.
#pragma once

#include <cstdint>

#include "quire/dtype.h"

namespace quire {

struct LimitKernels {
  // Reads [begin, begin + bytes) once, 64 bytes at a time, with software prefetch; returns a checksum.
  uint32_t (*read)(const char* begin, int64_t bytes);
  // Runs `rounds` rounds of multiply-adds with bfloat16 operands (for other types: float). Returns the number of
  // floating point operations.
  int64_t (*multiply)(DType dtype, int64_t rounds);
  // Does the same with codes of at most 8 bits times 8-bit integers, as in products with grouped weights. Returns the
  // number of multiplications and additions.
  int64_t (*multiply_codes)(int bits, int64_t rounds);
};

const LimitKernels& limit_kernels();

}  // namespace quire
