// Brings the factors of an adapter from the bytes of its file into the form of the kernels (quire/kernels/lora.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "quire/dtype.h"

namespace quire {

enum class FactorForm : int64_t {
  rows = 0,        // [rows][columns], as in the file
  transposed = 1,  // [columns][rows]: A of embeddings
  panels = 2,      // [rows / 16][columns][16], padded with zeros: B
};

// Where a factor is and comes to: six words of 64 bits, which Python writes (kernels/lora.py).
struct Factor {
  int64_t from;  // byte of the source
  int64_t dtype;
  int64_t rows, columns;
  FactorForm form;
  int64_t to;  // element of the memory
};

struct FactorPacking {
  const char* source;
  int64_t source_bytes;
  const Factor* factors;
  int64_t num_factors;
  void* memory;
  DType dtype;
  int64_t num_elements;  // of the memory
};

// Throws std::invalid_argument if a factor is not inside the source and the memory.
void pack_factors(const FactorPacking& packing);

}  // namespace quire
