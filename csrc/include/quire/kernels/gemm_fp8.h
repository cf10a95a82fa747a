// Matrix products with FP8 weights (e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, 0x7f and
// 0xff are NaN), one float scale per output column and group of elements along K:
//   out = sum over groups of scale * (sum of x * code), plus bias
// Codes are converted to bfloat16, which represents each of them exactly, one block at a time. They are multiplied like
// weights in bfloat16 (see gemm.h), and sums of a group are scaled and added in float. On AVX2, codes become numbers
// with the factor 2^-8, and scales get the factor 2^8: few rows take these numbers as halves (f16), many rows as
// bfloat16, and both are exact. So a product reads a byte per weight, and on one instruction set its bits depend only
// on the row of x. A group is a multiple of 32; the last group may be shorter.
//
// Packed layout: panels of 64 output columns. A panel has float scales [groups][64], then the codes in the order of the
// bfloat16 tiles, except that the two rows of 32 codes of each 64-byte line alternate every 8 codes. So unpacking bytes
// to words needs no permutation. K is rounded up to 32 with zeros.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/kernels/gemm.h"

namespace quire {

inline constexpr int64_t kFp8LineCodes = 64;

// Steps of 32 k, and sizes in the packed layout.
struct Fp8Layout {
  int64_t num_steps, group_steps, num_groups;
  int64_t scale_bytes, panel_bytes;  // bytes of the scales of a panel; bytes of a whole panel

  Fp8Layout(int64_t k, int64_t group_size)
      : num_steps(ceil_div(k, kBf16KUnit)),
        group_steps(group_size / kBf16KUnit),
        num_groups(ceil_div(num_steps, group_steps)),
        scale_bytes(kPanelWidth * 4 * num_groups),
        panel_bytes(scale_bytes + kPanelWidth * kBf16KUnit * num_steps) {}
};

int64_t gemm_fp8_packed_bytes(int64_t n, int64_t k, int64_t group_size);
// codes [n, k]; scales [n, ceil(k / group_size)].
void gemm_fp8_pack(StridedRows<const uint8_t> codes, const float* scales, int64_t n, int64_t k, int64_t group_size,
                   void* packed);
// Scale times code.
void gemm_fp8_rows(const WeightRowsArgs& args);
// The nearest codes, and one scale per row: max |w| / 448, so that the largest element gets the largest code. A row
// with an element that is not finite gets the scale NaN.
void gemm_fp8_quantize(const PlainWeight& weight, uint8_t* codes, float* scales);

const GemmKernels& gemm_fp8_kernels();      // every dtype of x
const GemmKernels& gemm_fp8_amx_kernels();  // x in bfloat16 on AMX tiles; run == nullptr if the active ISA has none

struct Fp8QuantizeKernels {
  void (*row)(const void* weight, DType dtype, int64_t count, uint8_t* codes, float* scale);
};
const Fp8QuantizeKernels& fp8_quantize_kernels();

}  // namespace quire
