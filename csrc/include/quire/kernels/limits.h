// What this machine can do at most: streaming reads, and multiply-adds that touch registers only. Benchmarks and the
// cost model state results as a share of these.
#pragma once

#include <cstdint>

#include "quire/dtype.h"

namespace quire {

struct LimitKernels {
  // Reads [begin, begin + bytes) once, 64 bytes at a time, with software prefetch; returns a checksum.
  uint32_t (*read)(const char* begin, int64_t bytes);
  // Runs `rounds` rounds of multiply-adds with bfloat16 (or float, for the other types) operands; returns the number of
  // floating point operations done.
  int64_t (*multiply)(DType dtype, int64_t rounds);
  // The same with 8-bit integers, as the products of grouped weights compute: returns the number of multiplications and
  // additions.
  int64_t (*multiply_int8)(int64_t rounds);
};

const LimitKernels& limit_kernels();

}  // namespace quire
