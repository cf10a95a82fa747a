// Rotary embedding and KV cache write of latent attention. float32 inside, rounded once.
#include "quire/kernels/latent.h"

#include <algorithm>

#include "kv_codes.h"
#include "rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;

// Converts elements to float32. `to` has room for whole vectors.
template <class T>
inline void load_row(const T* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load_part(from + i, count - i));
}

template <class T>
inline void store_row(const float* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += kLanes) store_part(to + i, load(from + i), count - i);
}

// Writes the rotated pair i of x to out[i] and out[i + R / 2]. `out` must not be x.
inline void rotate(const LatentCacheArgs& a, const float* x, const float* cos_sin, float* out) {
  const int64_t half = a.rotary_dim / 2, step = a.is_interleaved ? 2 : 1, second = a.is_interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float first = x[i * step], other = x[i * step + second], c = cos_sin[i], s = cos_sin[half + i];
    out[i] = first * c - other * s;
    out[half + i] = other * c + first * s;
  }
}

template <class T, class C>
void rope_and_cache_token(const LatentCacheArgs& a, int64_t token) {
  alignas(64) float x[kMaxHeadDim + kLanes], row[kMaxHeadDim + kLanes];
  const float* cos_sin = a.cos_sin + a.positions[token] * a.rotary_dim;
  for (int64_t h = 0; h < a.num_heads; ++h) {
    load_row(static_cast<const T*>(a.q.data) + token * a.q.token_stride + h * a.q.head_stride, a.rotary_dim, x);
    rotate(a, x, cos_sin, row);
    store_row(row, a.rotary_dim, static_cast<T*>(a.out.data) + token * a.out.token_stride + h * a.out.head_stride);
  }
  const int64_t slot = a.slot_mapping[token];
  if (slot < 0) return;
  const KvCache& cache = a.cache;
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size, size = a.rank + a.rotary_dim;
  const T* from = static_cast<const T*>(a.rows.data) + token * a.rows.stride;
  C* to = static_cast<C*>(cache.k.data) + block * cache.k.block_stride + offset * size;
  load_row(from + a.rank, a.rotary_dim, x);
  if constexpr (std::is_same_v<T, C>) {
    std::copy_n(from, a.rank, to);
    rotate(a, x, cos_sin, row);
    store_row(row, a.rotary_dim, to + a.rank);
  } else {
    load_row(from, a.rank, row);
    rotate(a, x, cos_sin, row + a.rank);
    std::fill_n(row + size, kLanes, 0.0f);  // encode_row reads whole vectors
    encode_row(row, static_cast<int>(size), to, cache.k_scales.data, block * cache.k_scales.block_stride + offset);
  }
}

template <class T, class C>
void rope_and_cache_to(const LatentCacheArgs& a) {
  const int64_t elements = a.num_heads * a.rotary_dim + a.rank + a.rotary_dim;
  for_rows(a.num_tokens, elements, [&](int64_t token) { rope_and_cache_token<T, C>(a, token); });
}

void rope_and_cache(const LatentCacheArgs& a) {
  with_type_of(a.dtype, [&]<class T>(T) {
    with_type_of_cache<T>(a.cache.type, [&]<class C>(C) { rope_and_cache_to<T, C>(a); });
  });
}

}  // namespace

extern const LatentKernels latent_table;
const LatentKernels latent_table = {rope_and_cache};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(LatentKernels, latent_kernels, latent_table)
