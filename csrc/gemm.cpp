// The driver of all matrix products: packs weights, cuts a product into blocks for the threads, calls the kernels of
// the active instruction set.
#include "quire/kernels/gemm.h"

#include <algorithm>
#include <cstring>

#include "quire/kernels/gemm_fp8.h"
#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/thread_pool.h"

namespace quire {
namespace {

constexpr int64_t kRowsPerChunk = 1024;      // rows prepared at a time: bounds the scratch memory of a long prefill
constexpr int64_t kTasksPerThread = 8;       // leaves something to take over from a thread that lost its core
constexpr int64_t kMinTaskMacs = 64 * 1024;  // multiply-adds worth a wake-up of another thread, some microseconds
constexpr int64_t kMinPrepareElements = 64 * 1024;
constexpr int64_t kMinQuantizeElements = 16 * 1024;

int64_t padded_k(DType dtype, int64_t k) { return dtype == DType::bf16 ? round_up(k, kBf16KUnit) : k; }

int64_t panel_bytes(DType dtype, int64_t k) {
  return kPanelWidth * padded_k(dtype, k) * static_cast<int64_t>(size_of(dtype));
}

// Element (k, column) of a panel of float or half goes to [k][64]. Bands of 16 columns are copied at a time, so that
// writes fill cache lines.
template <class T>
void pack_rows(const char* weight, int64_t row_bytes, int64_t columns, int64_t k, T* panel) {
  constexpr int64_t kBand = 16;
  for (int64_t band = 0; band < columns; band += kBand) {
    const int64_t width = std::min(kBand, columns - band);
    for (int64_t i = 0; i < k; ++i)
      for (int64_t c = 0; c < width; ++c)
        std::memcpy(panel + i * kPanelWidth + band + c, weight + (band + c) * row_bytes + i * sizeof(T), sizeof(T));
  }
}

// Pairs of k go to tiles, see gemm.h.
void pack_tiles(const char* weight, int64_t row_bytes, int64_t columns, int64_t k, char* panel) {
  constexpr int64_t kTileBytes = kBf16TileElements * 2, kTilesPerStep = kPanelWidth / kBf16TileColumns;
  for (int64_t column = 0; column < columns; column += kBf16TileColumns) {
    const int64_t width = std::min(kBf16TileColumns, columns - column);
    char* tile = panel + column / kBf16TileColumns * kTileBytes;
    for (int64_t first = 0; first < k; first += kBf16KUnit, tile += kTilesPerStep * kTileBytes) {
      const int64_t count = std::min(kBf16KUnit, k - first), pairs = count / 2;
      const char* from = weight + column * row_bytes + first * 2;
      for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t c = 0; c < width; ++c)
          std::memcpy(tile + (pair * kBf16TileColumns + c) * 4, from + c * row_bytes + pair * 4, 4);
      if (count % 2 != 0)
        for (int64_t c = 0; c < width; ++c)
          std::memcpy(tile + (pairs * kBf16TileColumns + c) * 4, from + c * row_bytes + pairs * 4, 2);
    }
  }
}

void pack_panel(const char* weight, DType dtype, int64_t row_bytes, int64_t columns, int64_t k, char* panel) {
  if (columns < kPanelWidth || padded_k(dtype, k) != k) std::memset(panel, 0, panel_bytes(dtype, k));
  switch (dtype) {
    case DType::f32:
      return pack_rows(weight, row_bytes, columns, k, reinterpret_cast<float*>(panel));
    case DType::f16:
      return pack_rows(weight, row_bytes, columns, k, reinterpret_cast<uint16_t*>(panel));
    case DType::bf16:
      return pack_tiles(weight, row_bytes, columns, k, panel);
  }
}

// One column of a panel of float or half.
template <class T>
void unpack_column(const T* panel, int64_t column, int64_t k, T* out) {
  for (int64_t i = 0; i < k; ++i) out[i] = panel[i * kPanelWidth + column];
}

// One column of a panel of tiles.
void unpack_tiles(const char* panel, int64_t column, int64_t k, char* out) {
  constexpr int64_t kTileBytes = kBf16TileElements * 2, kTilesPerStep = kPanelWidth / kBf16TileColumns;
  const char* pairs = panel + column / kBf16TileColumns * kTileBytes + column % kBf16TileColumns * 4;
  for (int64_t first = 0; first < k; first += kBf16KUnit, pairs += kTilesPerStep * kTileBytes) {
    const int64_t count = std::min(kBf16KUnit, k - first);
    for (int64_t pair = 0; pair < count / 2; ++pair)
      std::memcpy(out + (first + pair * 2) * 2, pairs + pair * kBf16TileColumns * 4, 4);
    if (count % 2 != 0) std::memcpy(out + (k - 1) * 2, pairs + count / 2 * kBf16TileColumns * 4, 2);
  }
}

// The number of rows from which AMX tiles beat dot products on grouped weights. Both give the same bits. A tile product
// takes the same time for 1 row and for 16. The values are measured; with smaller groups, adding groups takes more of
// the time.
int64_t min_amx_rows(const GroupedForm& form) {
  if (form.group_size % 32 != 0) return 16;
  return form.bits != 8 || form.group_size % kAmxKUnit != 0 ? 7 : 5;
}

// Rows that products read, and the additions of adapters to them, are prepared in one round of the threads.
void run_chunk(GemmArgs args, const GemmKernels& kernels) {
  LoraPlan lora = {};
  if (args.adapter_slots != nullptr) {
    lora = lora_kernels().plan({args.adapters, args.x, args.dtype, nullptr, args.adapter_slots, args.m});
    args.lora = &lora;
  }
  void* input = scratch(Scratch::gemm_input, kernels.input_bytes(args));
  const int64_t min_elements = args.weight.form.bits != 0 ? kMinQuantizeElements : kMinPrepareElements;
  const int64_t rows_per_task =
      std::max(kernels.row_unit, ceil_div(min_elements, args.weight.k) / kernels.row_unit * kernels.row_unit);
  const auto num_tasks = static_cast<int>(ceil_div(args.m, rows_per_task));
  parallel_for(num_tasks + lora.num_tasks, [&](int task, int) {
    if (task >= num_tasks) return lora_kernels().run(lora, task - num_tasks);
    const int64_t begin = task * rows_per_task;
    kernels.prepare(args, begin, std::min(args.m, begin + rows_per_task), input);
  });

  const int64_t panels = ceil_div(args.weight.n, kPanelWidth);
  const int64_t row_blocks = ceil_div(args.m, kernels.rows_per_block(args.weight.k));
  const int64_t rows_per_block = round_up(ceil_div(args.m, row_blocks), kernels.row_unit);
  const int64_t worth = std::max<int64_t>(1, args.m * args.weight.n * args.weight.k / kMinTaskMacs);
  const int64_t column_blocks = std::min({panels, worth, kTasksPerThread * num_threads()});
  parallel_for(static_cast<int>(row_blocks * column_blocks), [&](int task, int) {
    const int64_t row = task / column_blocks * rows_per_block, column = task % column_blocks;
    kernels.run({&args, input, row, std::min(args.m, row + rows_per_block), panels * column / column_blocks,
                 panels * (column + 1) / column_blocks});
  });
}

}  // namespace

const GemmKernels& gemm_kernels_for(const GemmArgs& args) {
  if (args.weight.fp8_group_size != 0) {
    const GemmKernels& amx = gemm_fp8_amx_kernels();
    return amx.run != nullptr && args.dtype == DType::bf16 ? amx : gemm_fp8_kernels();
  }
  if (args.weight.form.bits != 0) {
    const GemmKernels& amx = gemm_grouped_amx_kernels();
    const int64_t group_size = args.weight.form.group_size;
    const bool fits =
        args.m >= min_amx_rows(args.weight.form) && (group_size <= kAmxSmallGroup || group_size % kAmxKUnit == 0);
    return amx.run != nullptr && fits ? amx : gemm_grouped_kernels();
  }
  if (args.dtype == DType::bf16) {
    if (const GemmKernels& amx = gemm_amx_kernels(); amx.run != nullptr) return amx;
    if (const GemmKernels& dot = gemm_bf16_kernels(); dot.run != nullptr) return dot;
  }
  return gemm_f32_kernels();
}

int64_t gemm_panel_bytes(const PackedWeight& weight, DType dtype) {
  if (weight.fp8_group_size != 0) return Fp8Layout(weight.k, weight.fp8_group_size).panel_bytes;
  return weight.form.bits != 0 ? GroupedLayout(weight.form, weight.k).panel_bytes : panel_bytes(dtype, weight.k);
}

int64_t gemm_packed_bytes(DType dtype, int64_t n, int64_t k) {
  return ceil_div(n, kPanelWidth) * panel_bytes(dtype, k);
}

void gemm_pack(const PlainWeight& weight, void* packed) {
  const int64_t row_bytes = weight.rows.stride * static_cast<int64_t>(size_of(weight.dtype));
  parallel_for(static_cast<int>(ceil_div(weight.n, kPanelWidth)), [&](int panel, int) {
    const int64_t first = panel * kPanelWidth;
    pack_panel(static_cast<const char*>(weight.rows.data) + first * row_bytes, weight.dtype, row_bytes,
               std::min(kPanelWidth, weight.n - first), weight.k,
               static_cast<char*>(packed) + panel * panel_bytes(weight.dtype, weight.k));
  });
}

void gemm_rows(const WeightRowsArgs& args) {
  const int64_t k = args.weight.k, bytes = panel_bytes(args.dtype, k);
  void* const out = args.out;
  parallel_for(static_cast<int>(ceil_div(args.count, kUnpackedRowsPerTask)), [&](int task, int) {
    const int64_t first = task * kUnpackedRowsPerTask;
    for (int64_t i = first; i < std::min(args.count, first + kUnpackedRowsPerTask); ++i) {
      const char* const panel = static_cast<const char*>(args.weight.data) + args.rows[i] / kPanelWidth * bytes;
      const int64_t column = args.rows[i] % kPanelWidth;
      switch (args.dtype) {
        case DType::f32:
          unpack_column(reinterpret_cast<const float*>(panel), column, k, static_cast<float*>(out) + i * k);
          break;
        case DType::f16:
          unpack_column(reinterpret_cast<const uint16_t*>(panel), column, k, static_cast<uint16_t*>(out) + i * k);
          break;
        case DType::bf16:
          unpack_tiles(panel, column, k, static_cast<char*>(out) + i * k * 2);
      }
    }
  });
}

void gemm_grouped_quantize(const PlainWeight& weight, int bits, int64_t group_size, uint8_t* codes, float* scales) {
  const int64_t k = weight.k, groups = ceil_div(k, group_size), size = static_cast<int64_t>(size_of(weight.dtype));
  const QuantizeKernels& kernels = quantize_kernels();
  parallel_for(static_cast<int>(weight.n), [&](int row, int) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * group_size;
      kernels.group(static_cast<const char*>(weight.rows.data) + (row * weight.rows.stride + first) * size,
                    weight.dtype, std::min(group_size, k - first), bits, codes + row * k + first,
                    scales + row * groups + g);
    }
  });
}

void gemm(const GemmArgs& args) {
  const GemmKernels& kernels = gemm_kernels_for(args);
  for (int64_t row = 0; row < args.m; row += kRowsPerChunk) {
    GemmArgs chunk = args;
    chunk.m = std::min(kRowsPerChunk, args.m - row);
    chunk.x.data =
        static_cast<const char*>(args.x.data) + row * args.x.stride * static_cast<int64_t>(size_of(args.dtype));
    chunk.out.data =
        static_cast<char*>(args.out.data) + row * args.out.stride * static_cast<int64_t>(size_of(args.out_dtype));
    if (args.adapter_slots != nullptr) chunk.adapter_slots += row;
    run_chunk(chunk, kernels);
  }
}

// A task has some heads, or a block of tokens of one head. It prepares their rows and multiplies them.
void gemm_heads(const HeadGemmArgs& args) {
  const auto element_bytes = static_cast<int64_t>(size_of(args.dtype));
  const int64_t weight_bytes = gemm_packed_bytes(args.dtype, args.weight.n, args.weight.k);
  GemmArgs first = {.x = {args.x.data, args.x.token_stride},
                    .dtype = args.dtype,
                    .m = args.num_tokens,
                    .weight = args.weight,
                    .bias = nullptr,
                    .bias_dtype = DType::f32,
                    .out = {args.out.data, args.out.token_stride},
                    .out_dtype = args.dtype};
  const GemmKernels& kernels = gemm_kernels_for(first);
  const int64_t most_rows = std::min(kRowsPerChunk, kernels.rows_per_block(args.weight.k));
  const int64_t blocks = ceil_div(args.num_tokens, most_rows);
  const int64_t rows = round_up(ceil_div(args.num_tokens, std::max<int64_t>(blocks, 1)), kernels.row_unit);
  const int64_t macs = std::min(rows, args.num_tokens) * args.weight.n * args.weight.k;
  const int64_t per_task = std::clamp<int64_t>(kMinTaskMacs / std::max<int64_t>(macs, 1), 1, args.num_heads);
  const int64_t groups = ceil_div(args.num_heads, per_task);
  parallel_for(static_cast<int>(groups * blocks), [&](int task, int) {
    const int64_t group = task / blocks, row = task % blocks * rows;
    for (int64_t head = group * per_task; head < std::min(args.num_heads, (group + 1) * per_task); ++head) {
      GemmArgs part = first;
      part.m = std::min(rows, args.num_tokens - row);
      if (part.m <= 0) return;
      const int64_t x = row * args.x.token_stride + head * args.x.head_stride;
      const int64_t out = row * args.out.token_stride + head * args.out.head_stride;
      part.x.data = static_cast<const char*>(args.x.data) + x * element_bytes;
      part.out.data = static_cast<char*>(args.out.data) + out * element_bytes;
      part.weight.data = static_cast<const char*>(args.weight.data) + head * weight_bytes;
      void* const input = scratch(Scratch::gemm_head, kernels.input_bytes(part));
      kernels.prepare(part, 0, part.m, input);
      kernels.run({&part, input, 0, part.m, 0, ceil_div(args.weight.n, kPanelWidth)});
    }
  });
}

}  // namespace quire
