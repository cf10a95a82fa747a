// Tiles of float multiply-adds for weights in float, half and bfloat16, and the rows of x that they read, converted to
// float once per call.
#pragma once

#include "gemm_row_tiles.h"

namespace quire::QUIRE_ISA {
namespace {

// Vectors of columns of a tile with this number of rows: 6 x 4 sums in 32 registers, 6 x 2 in 16. Where 4 vectors are
// less than the panel, a tile of few rows takes more columns, so that enough independent sums hide the latency of a
// multiply-add.
constexpr int num_vectors(int rows) {
  if (F32::kWidth == 16) return 4;
  const int usual = kHas32Registers ? 4 : 2;
  return rows == 1 ? 4 * usual : rows == 2 ? 2 * usual : usual;
}

template <int kRows, int kVectors>
inline void multiply_add(const float* a, int64_t a_stride, const F32 (&w)[kVectors], F32 (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const F32 x = broadcast(a[r * a_stride]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(x, w[v], sums[r][v]);
  }
}

template <int kRows, int kVectors>
inline void load_sums(const float* from, bool is_first, F32 (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = is_first ? zero() : load(from + r * kPanelWidth + v * F32::kWidth);
}

template <int kRows, int kVectors>
inline void store_sums(float* to, const F32 (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(to + r * kPanelWidth + v * F32::kWidth, sums[r][v]);
}

// Weights [K][64] of float or half.
template <class T>
struct FloatTile {
  using Input = float;
  using Weight = T;
  static constexpr int64_t kStepK = 1;
  static constexpr int64_t kFetches = 1;
  static constexpr bool kIsInOrder = F32::kWidth == 16;  // otherwise several rows take a part of the columns at a time

  template <int kRows, class Fetch>
  static void run(const float* a, int64_t a_stride, const T* b, int64_t steps, float* out, bool is_first,
                  Fetch& prefetch) {
    constexpr int kVectors = num_vectors(kRows), kColumns = kVectors * F32::kWidth;
    Spread<kPanelWidth / kColumns, Fetch> share(prefetch);
    for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
      F32 sums[kRows][kVectors];
      load_sums(out + column, is_first, sums);
      for (int64_t step = 0; step < steps; ++step) {
        share.fetch();
        F32 w[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) w[v] = load(b + step * kPanelWidth + column + v * F32::kWidth);
        multiply_add(a + step, a_stride, w, sums);
      }
      store_sums(out + column, sums);
    }
  }
};

// Weights of bfloat16 in tiles of pairs, see quire/kernels/gemm.h.
struct Bf16Tile {
  using Input = float;
  using Weight = bf16;
  static constexpr int64_t kStepK = kBf16KUnit;
  static constexpr int64_t kFetches = kBf16KUnit / 2;
  static constexpr bool kIsInOrder = false;  // of several tiles, a line of each in turn
  static constexpr int64_t kTileColumns = kBf16TileColumns;

  template <int kRows, class Fetch>
  static void run(const float* a, int64_t a_stride, const bf16* b, int64_t steps, float* out, bool is_first,
                  Fetch& prefetch) {
    constexpr int kVectors = num_vectors(kRows), kColumns = kVectors * F32::kWidth;
    constexpr int kParts = Fetch::kIsSpread ? kPanelWidth / kColumns : 1;
    Spread<kParts, Fetch> share(prefetch);
    for (int64_t column = 0; column < kPanelWidth; column += kColumns) {
      F32 sums[kRows][kVectors];
      load_sums(out + column, is_first, sums);
      const float* x = a;
      const bf16* tiles = b + column / kTileColumns * kBf16TileElements + column % kTileColumns * 2;
      for (int64_t step = 0; step < steps; ++step, tiles += kBf16KUnit * kPanelWidth) {
        for (int64_t pair = 0; pair < kBf16KUnit / 2; ++pair, x += 2) {
          if (kParts > 1 || column == 0) share.fetch();
          const auto words_of = [&](int v) {
            const int64_t offset = v * F32::kWidth;  // in columns
            return tiles + offset / kTileColumns * kBf16TileElements +
                   (offset % kTileColumns + pair * kTileColumns) * 2;
          };
          F32 w[kVectors];  // the first of the pair, then the second: there are no registers for both
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) w[v] = load_even(words_of(v));
          multiply_add(x, a_stride, w, sums);
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) w[v] = load_odd(words_of(v));
          multiply_add(x + 1, a_stride, w, sums);
        }
      }
      store_sums(out + column, sums);
    }
  }
};

// The same sums for few rows, in the order of addresses, tile after tile, which the CPU's own prefetching follows.
struct Bf16TileInOrder {
  using Input = float;
  using Weight = bf16;
  static constexpr int64_t kStepK = kBf16KUnit;
  static constexpr int64_t kFetches = kBf16TileElements * 2 / 64 * (kPanelWidth / kBf16TileColumns);
  static constexpr bool kIsInOrder = true;

  template <int kRows, class Fetch>
  static void run(const float* a, int64_t a_stride, const bf16* b, int64_t steps, float* out, bool is_first,
                  Fetch& prefetch) {
    constexpr int kTiles = kPanelWidth / kBf16TileColumns, kVectors = kBf16TileColumns / F32::kWidth;
    Fetch local = prefetch;
    F32 sums[kTiles][kRows][kVectors];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) load_sums(out + t * kBf16TileColumns, is_first, sums[t]);
    for (int64_t step = 0; step < steps; ++step, a += kBf16KUnit)
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t, b += kBf16TileElements)
        for (int64_t pair = 0; pair < kBf16KUnit / 2; ++pair) {
          local.fetch();
          const bf16* const line = b + pair * kBf16TileColumns * 2;
          F32 w[kVectors];
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) w[v] = load_even(line + v * F32::kWidth * 2);
          multiply_add(a + pair * 2, a_stride, w, sums[t]);
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) w[v] = load_odd(line + v * F32::kWidth * 2);
          multiply_add(a + pair * 2 + 1, a_stride, w, sums[t]);
        }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) store_sums(out + t * kBf16TileColumns, sums[t]);
    prefetch = local;
  }
};

inline int64_t float_input_bytes(const GemmArgs& args) {
  return args.m * input_stride<float>(args.weight.k) * static_cast<int64_t>(sizeof(float));
}

template <class T>
inline void convert_rows(const GemmArgs& args, int64_t row_begin, int64_t row_end, float* input) {
  const int64_t stride = input_stride<float>(args.weight.k);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* from = row_of_x<T>(args, row);
    float* to = input + row * stride;
    int64_t i = 0;
    for (; i + F32::kWidth <= args.weight.k; i += F32::kWidth) store(to + i, load(from + i));
    for (; i < args.weight.k; ++i) to[i] = to_f32(from[i]);
    for (; i < stride; ++i) to[i] = 0;  // bfloat16 weights come in whole steps of 32 k
  }
}

inline void float_prepare(const GemmArgs& args, int64_t row_begin, int64_t row_end, void* input) {
  with_type_of(args.dtype, [&]<class T>(T) { convert_rows<T>(args, row_begin, row_end, static_cast<float*>(input)); });
}

}  // namespace
}  // namespace quire::QUIRE_ISA
