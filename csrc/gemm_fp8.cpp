// Packs and quantizes FP8 weights; see quire/kernels/gemm_fp8.h. The products run through gemm() (csrc/gemm.cpp).
#include "quire/kernels/gemm_fp8.h"

#include <algorithm>
#include <cstring>

#include "quire/thread_pool.h"

namespace quire {
namespace {

// Pairs of k of one column go to tiles [step][4][16 pairs][16 columns][2], then lines of two such rows are interleaved.
void pack_codes(const uint8_t* codes, int64_t stride, int64_t columns, int64_t k, uint8_t* panel) {
  constexpr int64_t kRowCodes = 2 * kBf16TileColumns, kPiece = 8;
  for (int64_t first = 0; first < k; first += 2) {
    const int64_t count = std::min<int64_t>(2, k - first), step = first / kBf16KUnit, pair = first % kBf16KUnit / 2;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t tile = step * (kPanelWidth / kBf16TileColumns) + c / kBf16TileColumns;
      const int64_t in_row = c % kBf16TileColumns * 2;
      const int64_t line = tile * kBf16TileElements + pair / 2 * 2 * kRowCodes;
      std::memcpy(panel + line + in_row / kPiece * 2 * kPiece + pair % 2 * kPiece + in_row % kPiece,
                  codes + c * stride + first, count);
    }
  }
}

}  // namespace

int64_t gemm_fp8_packed_bytes(int64_t n, int64_t k, int64_t group_size) {
  return ceil_div(n, kPanelWidth) * Fp8Layout(k, group_size).panel_bytes;
}

void gemm_fp8_pack(const uint8_t* codes, int64_t code_stride, const float* scales, int64_t n, int64_t k,
                   int64_t group_size, void* packed) {
  const Fp8Layout layout(k, group_size);
  parallel_for(static_cast<int>(ceil_div(n, kPanelWidth)), [&](int panel, int) {
    const int64_t first = panel * kPanelWidth, columns = std::min(kPanelWidth, n - first);
    char* const to = static_cast<char*>(packed) + panel * layout.panel_bytes;
    std::memset(to, 0, layout.panel_bytes);
    float* const panel_scales = reinterpret_cast<float*>(to);
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t g = 0; g < layout.num_groups; ++g)
        panel_scales[g * kPanelWidth + c] = scales[(first + c) * layout.num_groups + g];
    pack_codes(codes + first * code_stride, code_stride, columns, k,
               reinterpret_cast<uint8_t*>(to + layout.scale_bytes));
  });
}

void gemm_fp8_quantize(const void* weight, DType dtype, int64_t weight_stride, int64_t n, int64_t k, uint8_t* codes,
                       float* scales) {
  const int64_t row_bytes = weight_stride * static_cast<int64_t>(size_of(dtype));
  const Fp8QuantizeKernels& kernels = fp8_quantize_kernels();
  parallel_for(static_cast<int>(n), [&](int row, int) {
    kernels.row(static_cast<const char*>(weight) + row * row_bytes, dtype, k, codes + row * k, scales + row);
  });
}

}  // namespace quire
