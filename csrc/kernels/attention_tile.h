// Shared parts of the arithmetic paths of attention: sizes, rows of a query tile, scratch memory, small matrix helpers.
//
// A tile of query rows goes over the KV positions in splits of kSplit positions, aligned to position 0 of the sequence.
// Inside a split, it goes in aligned steps of kStep. Rows are vector lanes: a score matrix is stored as
// [position][lane]. So a row is never summed together with another row, and its result does not depend on its
// neighbours. Positions that a row must not see get the probability 0, which adds nothing, and skipping them gives the
// same bits. So the choice of tile, chunk, batch and thread does not change the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kv_codes.h"
#include "quire/kernels/attention.h"
#include "quire/round_up.h"
#include "quire/scratch.h"
#include "quire/simd.h"
#include "transpose16.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;
constexpr int kSplit = kAttentionRange;
constexpr int kStep = 32;
constexpr int kTile = 16;                      // positions with keys that are multiplied at a time
constexpr int kMostRows = kMostAttentionRows;  // the largest kMaxRows of all paths
constexpr int kMaxRowTiles = kMostRows / kLanes;
static_assert(kSplit % kStep == 0 && kStep % kTile == 0 && kMostRows % kLanes == 0);

struct Range {
  int begin, end;  // multiples of kStep
  int size() const { return end - begin; }
};

// Keys or values of consecutive positions, in the form of the cache.
template <class C>
struct Rows {
  static constexpr bool kHasScales = std::is_same_v<C, int8_t>;

  const C* const* data;
  const float* scales;  // one per row if kHasScales

  const C* operator[](int row) const { return data[row]; }
  float scale(int row) const {
    if constexpr (kHasScales) return scales[row];
    return 1.0f;
  }
  Rows from(int row) const { return {data + row, kHasScales ? scales + row : nullptr}; }
  // Loads kLanes elements from e on, without the scale of the row and divided by kUnit. With `left`, elements after the
  // end of the row are zeros.
  F32 load(int row, int e) const { return QUIRE_ISA::load(data[row] + e); }
  F32 load(int row, int e, int left) const {
    if (left >= kLanes) return load(row, e);
    if (left <= 0) return zero();
    return load_n(data[row] + e, left) * broadcast(1.0f / kUnit<C>);
  }
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512_BF16
  // Loads 32 elements from e on as bfloat16, times the scale of the row. `left` is as above.
  __m512i load_bf16(int row, int e, int left) const {
    const C* p = data[row] + e;
    const __mmask32 mask = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    if constexpr (std::is_same_v<C, bf16>) {
      return left >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(mask, p);
    } else {
      const auto* codes = reinterpret_cast<const __m256i*>(p);
      return to_bf16(left >= 32 ? _mm256_loadu_si256(codes) : _mm256_maskz_loadu_epi8(mask, p), C{}, scale(row));
    }
  }
#endif
};

// Cuts a scratch buffer into 64-byte aligned arrays.
class Carver {
 public:
  explicit Carver(void* memory) : next_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(size_t count) {
    T* p = reinterpret_cast<T*>(next_);
    next_ += round_up(count * sizeof(T), 64);
    return p;
  }

 private:
  char* next_;
};

// Prefetches the next rows of keys or values during the work on the present rows, a few at a time, so that memory never
// waits for arithmetic.
//
// CPUs drop a prefetch if their buffers for missing lines are full, and values are used faster than memory delivers
// them. So rows are prefetched once more shortly before their use (benchmarks/NOTES.md, 2026-11-22, Zen 5). With AMX
// this is not done, because it was not measured.
class Prefetcher {
 public:
  // `rows` are needed after the rows of `now`.
  void start(const void* const* rows, Range range, const void* const* now, Range now_range, int row_bytes) {
    next_ = rows + range.begin, end_ = rows + range.end, row_bytes_ = row_bytes, due_ = 0;
    again_end_ = now + now_range.end, again_ = std::min(now + now_range.begin + kRowsAhead, again_end_);
    first_ = next_, first_end_ = std::min(next_ + kRowsAhead, end_);
  }
  // Prefetches as many bytes as have just been used, in whole rows. Callers should call it often, for a few bytes each
  // time: a burst fills the buffers and then stops the arithmetic after it.
  [[gnu::always_inline]] void follow(int bytes) {  // in loops that use all registers
    for (due_ += bytes; due_ >= row_bytes_ && next_ < end_; due_ -= row_bytes_) {
      fetch(*next_++);
      if (!kTwice) continue;
      if (again_ == again_end_) again_ = first_, again_end_ = first_ = first_end_;
      if (again_ < again_end_) fetch(*again_++);
    }
  }
  void finish() {
    while (next_ < end_) fetch(*next_++);
  }

 private:
  static constexpr bool kTwice = QUIRE_ISA_LEVEL < QUIRE_LEVEL_AMX;
  static constexpr int kCache = kTwice ? 3 : 2;  // first-level, second-level
  static constexpr int kRowsAhead = 32;

  void fetch(const void* row) const {
    for (int i = 0; i < row_bytes_; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i, 0, kCache);
  }

  const void *const *next_ = nullptr, *const *end_ = nullptr;
  const void *const *again_ = nullptr, *const *again_end_ = nullptr;
  const void *const *first_ = nullptr, *const *first_end_ = nullptr;  // the rows after the present rows, to fetch again
  int row_bytes_ = 0, due_ = 0;
};

// The rows of one KV head in a row tile with several KV heads.
struct LaneRange {
  int first, count;
};

// Writes dst[lane * stride + i] = src[i * kLanes + lane] for kTile values of i.
inline void transpose_lanes(const float* src, float* dst, int stride) {
#if QUIRE_ISA_LEVEL >= QUIRE_LEVEL_AVX512
  __m512i x[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(src + i * 16);
  transpose16(x);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(dst + i * stride, x[i]);
#else
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < kTile; ++i) dst[lane * stride + i] = src[i * kLanes + lane];
  }
#endif
}

// Computes out[j][lane] = sum over k, in order, of a[k][lane] * b(j, k). It is the kernel of both products of attention
// on vector units. `Lanes` is the arithmetic: element type, vector type, load, multiply-add with a broadcast element,
// and store to kLanes floats. b(j, k) is b[j * stride + k] if kAlongK, else b[k * stride + j].
template <class Lanes, int kCount, bool kAlongK>
inline void outer_block(const typename Lanes::Element* a, const typename Lanes::Element* b, int64_t stride, int size,
                        float* out) {
  typename Lanes::Vector acc[kCount];
  for (int j = 0; j < kCount; ++j) acc[j] = Lanes::zero();
  for (int k = 0; k < size; ++k) {
    const typename Lanes::Vector x = Lanes::load(a + k * kLanes);
    const typename Lanes::Element* y = kAlongK ? b + k : b + k * stride;
#pragma GCC unroll 16
    for (int j = 0; j < kCount; ++j) acc[j] = Lanes::multiply_add(acc[j], x, y + (kAlongK ? j * stride : j));
  }
  for (int j = 0; j < kCount; ++j) Lanes::store(out + j * kLanes, acc[j]);
}

// Computes the same for kTile values of j, in blocks that fit into the registers.
template <class Lanes, bool kAlongK>
inline void outer(const typename Lanes::Element* a, const typename Lanes::Element* b, int64_t stride, int size,
                  float* out) {
  constexpr int kBlock = kHas32Registers ? 16 : 8;
  for (int j = 0; j < kTile; j += kBlock) {
    outer_block<Lanes, kBlock, kAlongK>(a, b + (kAlongK ? j * stride : j), stride, size, out + j * kLanes);
  }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
