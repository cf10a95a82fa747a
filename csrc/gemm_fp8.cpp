// Packs and quantizes FP8 weights; see quire/kernels/gemm_fp8.h. The products run through gemm() (csrc/gemm.cpp).
#include "quire/kernels/gemm_fp8.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "quire/thread_pool.h"

namespace quire {
namespace {

// The place of k and its neighbour in K in the codes of a panel, for one column: tiles [step][4][16 pairs][16
// columns][2], in which the lines of two rows of pairs are interleaved.
constexpr int64_t place_of_pair(int64_t k, int64_t column) {
  constexpr int64_t kRowCodes = 2 * kBf16TileColumns, kPiece = 8;
  const int64_t step = k / kBf16KUnit, pair = k % kBf16KUnit / 2;
  const int64_t tile = step * (kPanelWidth / kBf16TileColumns) + column / kBf16TileColumns;
  const int64_t in_row = column % kBf16TileColumns * 2, line = tile * kBf16TileElements + pair / 2 * 2 * kRowCodes;
  return line + in_row / kPiece * 2 * kPiece + pair % 2 * kPiece + in_row % kPiece;
}

void pack_codes(const uint8_t* codes, int64_t stride, int64_t columns, int64_t k, uint8_t* panel) {
  for (int64_t first = 0; first < k; first += 2)
    for (int64_t c = 0; c < columns; ++c)
      std::memcpy(panel + place_of_pair(first, c), codes + c * stride + first, std::min<int64_t>(2, k - first));
}

// The places of the codes of one column in a step, relative to its first code.
constexpr std::array<int, kBf16KUnit> kPlaces = [] {
  std::array<int, kBf16KUnit> places = {};
  for (int i = 0; i < kBf16KUnit; ++i) places[i] = static_cast<int>(place_of_pair(i, 0)) + i % 2;
  return places;
}();

constexpr std::array<float, 256> kValues = [] {
  std::array<float, 256> values = {};
  for (int code = 0; code < 256; ++code) values[code] = to_f32(e4m3{static_cast<uint8_t>(code)});
  return values;
}();

template <class T>
void unpack_column(const char* panel, int64_t column, int64_t k, const Fp8Layout& layout, T* out) {
  const auto* scales = reinterpret_cast<const float*>(panel) + column;
  const auto* codes = reinterpret_cast<const uint8_t*>(panel + layout.scale_bytes);
  for (int64_t step = 0; step < layout.num_steps; ++step) {
    const int64_t first = step * kBf16KUnit, count = std::min(kBf16KUnit, k - first);
    const float scale = scales[step / layout.group_steps * kPanelWidth];
    const uint8_t* const step_codes = codes + place_of_pair(first, column);
    for (int64_t i = 0; i < count; ++i) out[first + i] = from_f32<T>(scale * kValues[step_codes[kPlaces[i]]]);
  }
}

}  // namespace

int64_t gemm_fp8_packed_bytes(int64_t n, int64_t k, int64_t group_size) {
  return ceil_div(n, kPanelWidth) * Fp8Layout(k, group_size).panel_bytes;
}

void gemm_fp8_pack(StridedRows<const uint8_t> codes, const float* scales, int64_t n, int64_t k, int64_t group_size,
                   void* packed) {
  const Fp8Layout layout(k, group_size);
  parallel_for(static_cast<int>(ceil_div(n, kPanelWidth)), [&](int panel, int) {
    const int64_t first = panel * kPanelWidth, columns = std::min(kPanelWidth, n - first);
    char* const to = static_cast<char*>(packed) + panel * layout.panel_bytes;
    std::memset(to, 0, layout.panel_bytes);
    float* const panel_scales = reinterpret_cast<float*>(to);
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t g = 0; g < layout.num_groups; ++g)
        panel_scales[g * kPanelWidth + c] = scales[(first + c) * layout.num_groups + g];
    pack_codes(codes.data + first * codes.stride, codes.stride, columns, k,
               reinterpret_cast<uint8_t*>(to + layout.scale_bytes));
  });
}

void gemm_fp8_rows(const WeightRowsArgs& args) {
  const PackedWeight& weight = args.weight;
  const int64_t k = weight.k;
  const Fp8Layout layout(k, weight.fp8_group_size);
  parallel_for(static_cast<int>(ceil_div(args.count, kUnpackedRowsPerTask)), [&](int task, int) {
    const int64_t first = task * kUnpackedRowsPerTask;
    for (int64_t i = first; i < std::min(args.count, first + kUnpackedRowsPerTask); ++i) {
      const char* const panel = static_cast<const char*>(weight.data) + args.rows[i] / kPanelWidth * layout.panel_bytes;
      with_type_of(args.dtype, [&]<class T>(T) {
        unpack_column(panel, args.rows[i] % kPanelWidth, k, layout, static_cast<T*>(args.out) + i * k);
      });
    }
  });
}

void gemm_fp8_quantize(const PlainWeight& weight, uint8_t* codes, float* scales) {
  const int64_t k = weight.k, row_bytes = weight.rows.stride * static_cast<int64_t>(size_of(weight.dtype));
  const Fp8QuantizeKernels& kernels = fp8_quantize_kernels();
  parallel_for(static_cast<int>(weight.n), [&](int row, int) {
    kernels.row(static_cast<const char*>(weight.rows.data) + row * row_bytes, weight.dtype, k, codes + row * k,
                scales + row);
  });
}

}  // namespace quire
