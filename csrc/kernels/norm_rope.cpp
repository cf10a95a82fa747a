// RMS norm (with and without residual), and per-head norm + rotary embedding + KV cache write. float32 inside, rounded
// once.
#include "quire/kernels/norm_rope.h"

#include <algorithm>

#include "kv_codes.h"
#include "quire/round_up.h"
#include "quire/simd.h"
#include "quire/thread_pool.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;
// Elements under which waking other threads costs more than it saves (a few microseconds of work).
constexpr int64_t kElementsPerTask = 16384;

// Runs row(i) for every row, in tasks of at least kElementsPerTask elements.
template <class Fn>
void for_rows(int64_t rows, int64_t elements_per_row, const Fn& row) {
  const int64_t rows_per_task = std::max<int64_t>(kElementsPerTask / elements_per_row, 1);
  const auto tasks = static_cast<int>(ceil_div(rows, rows_per_task));
  if (tasks <= 1) {
    for (int64_t i = 0; i < rows; ++i) row(i);
    return;
  }
  parallel_for(tasks, [&](int task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; ++i) row(i);
  });
}

template <class T>
inline F32 load_part(const T* p, int64_t left) {
  return left >= kLanes ? load(p) : load_n(p, static_cast<int>(left));
}
template <class T>
inline void store_part(T* p, F32 x, int64_t left) {
  if (left >= kLanes) {
    store(p, x);
  } else {
    store_n(p, x, static_cast<int>(left));
  }
}

// 1 / sqrt(mean(x^2) + eps), where next(i, left) gives kLanes values from i on, zeros behind the end. Four sums hide
// the latency of the addition; their order depends on dim alone.
template <class Next>
inline float inverse_rms(int64_t dim, float eps, const Next& next) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32 x = next(i + j * kLanes, kLanes);
      sums[j] = fma(x, x, sums[j]);
    }
  }
  for (; i < dim; i += kLanes) {
    const F32 x = next(i, dim - i);
    sums[0] = fma(x, x, sums[0]);
  }
  const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
}

template <class T, class W>
void rms_norm_row(const RmsNormArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const W* weight = static_cast<const W*>(a.weight);
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  float scale;
  if (a.residual == nullptr) {
    scale = inverse_rms(a.dim, a.eps, [&](int64_t i, int64_t left) { return load_part(x + i, left); });
  } else {
    T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
    scale = inverse_rms(a.dim, a.eps, [&](int64_t i, int64_t left) {
      store_part(residual + i, load_part(residual + i, left) + load_part(x + i, left), left);
      return load_part(residual + i, left);
    });
    x = residual;
  }
  const F32 scales = broadcast(scale), offset = broadcast(a.weight_offset);
  for (int64_t i = 0; i < a.dim; i += kLanes) {
    const int64_t left = a.dim - i;
    store_part(out + i, load_part(x + i, left) * scales * (load_part(weight + i, left) + offset), left);
  }
}

template <class T>
void rms_norm_of(const RmsNormArgs& a) {
  if (a.weight_dtype == a.dtype) {
    for_rows(a.rows, a.dim, [&](int64_t row) { rms_norm_row<T, T>(a, row); });
  } else {
    for_rows(a.rows, a.dim, [&](int64_t row) { rms_norm_row<T, float>(a, row); });
  }
}

void rms_norm(const RmsNormArgs& a) {
  with_type_of(a.dtype, [&]<class T>(T) { rms_norm_of<T>(a); });
}

// One head in float32, zeros from its end to the next whole vector.
struct Head {
  alignas(64) float data[kMaxRopeHeadDim + kLanes];
};

// Norm (weight not null) and rotation (cos_sin not null) of one head.
template <class T, class W>
void rotate_head(const RopeCacheArgs& a, const T* src, const W* weight, const float* cos_sin, Head& out) {
  const int64_t dim = a.head_dim, half = a.rotary_dim / 2;
  float* head = out.data;
  for (int64_t i = 0; i < dim; i += kLanes) store(head + i, load_part(src + i, dim - i));
  if (weight != nullptr) {
    const F32 scale = broadcast(inverse_rms(dim, a.norm_eps, [&](int64_t i, int64_t) { return load(head + i); }));
    const F32 offset = broadcast(a.norm_weight_offset);
    for (int64_t i = 0; i < dim; i += kLanes) {
      store(head + i, load(head + i) * scale * (load_part(weight + i, dim - i) + offset));
    }
  }
  if (cos_sin != nullptr) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t left = half - i;
      const F32 c = load_part(cos_sin + i, left), s = load_part(cos_sin + half + i, left);
      const F32 x = load_part(head + i, left), y = load_part(head + half + i, left);
      store_part(head + i, fma(x, c, zero() - y * s), left);
      store_part(head + half + i, fma(y, c, x * s), left);
    }
  }
}

template <class T>
void store_head(const Head& head, int64_t dim, T* dst) {
  for (int64_t i = 0; i < dim; i += kLanes) store_part(dst + i, load(head.data + i), dim - i);
}

// Keys and values of one token and KV head to row `row` of the caches' scales, and to the given places of the caches.
template <class T, class W, class C>
void write_cache(const RopeCacheArgs& a, const T* k, const T* v, const W* k_weight, const float* cos_sin, C* k_slot,
                 C* v_slot, int64_t row) {
  Head head;
  rotate_head(a, k, k_weight, cos_sin, head);
  if constexpr (std::is_same_v<T, C>) {
    store_head(head, a.head_dim, k_slot);
    std::copy_n(v, a.head_dim, v_slot);
  } else {
    const auto dim = static_cast<int>(a.head_dim);
    encode_row(head.data, dim, k_slot, a.k_scales, row);
    rotate_head<T, W>(a, v, nullptr, nullptr, head);
    encode_row(head.data, dim, v_slot, a.v_scales, row);
  }
}

template <class T, class W, class C>
void rope_and_cache_token(const RopeCacheArgs& a, int64_t token) {
  const float* cos_sin = a.cos_sin == nullptr ? nullptr : a.cos_sin + a.positions[token] * a.rotary_dim;
  const W *q_weight = static_cast<const W*>(a.q_norm_weight), *k_weight = static_cast<const W*>(a.k_norm_weight);
  if (q_weight != nullptr || cos_sin != nullptr) {
    for (int64_t h = 0; h < a.num_q_heads; ++h) {
      T* q = static_cast<T*>(a.q) + token * a.q_token_stride + h * a.q_head_stride;
      Head head;
      rotate_head(a, q, q_weight, cos_sin, head);
      store_head(head, a.head_dim, q);
    }
  }
  const int64_t slot = a.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / a.block_size, offset = slot % a.block_size;
  for (int64_t g = 0; g < a.num_kv_heads; ++g) {
    const T* k = static_cast<const T*>(a.k) + token * a.k_token_stride + g * a.k_head_stride;
    const T* v = static_cast<const T*>(a.v) + token * a.v_token_stride + g * a.v_head_stride;
    C* k_slot = static_cast<C*>(a.k_cache) + block * a.k_block_stride + g * a.k_cache_head_stride + offset * a.head_dim;
    C* v_slot = static_cast<C*>(a.v_cache) + block * a.v_block_stride + g * a.v_cache_head_stride + offset * a.head_dim;
    write_cache(a, k, v, k_weight, cos_sin, k_slot, v_slot, (block * a.num_kv_heads + g) * a.block_size + offset);
  }
}

template <class T, class C>
void rope_and_cache_to(const RopeCacheArgs& a) {
  const int64_t elements = (a.num_q_heads + 2 * a.num_kv_heads) * a.head_dim;
  if (a.norm_weight_dtype == a.dtype) {
    for_rows(a.num_tokens, elements, [&](int64_t token) { rope_and_cache_token<T, T, C>(a, token); });
  } else {
    for_rows(a.num_tokens, elements, [&](int64_t token) { rope_and_cache_token<T, float, C>(a, token); });
  }
}

template <class T>
void rope_and_cache_of(const RopeCacheArgs& a) {
  switch (a.cache_type) {
    case CacheType::model:
      return rope_and_cache_to<T, T>(a);
    case CacheType::e4m3:
      return rope_and_cache_to<T, e4m3>(a);
    case CacheType::e5m2:
      return rope_and_cache_to<T, e5m2>(a);
    case CacheType::int8:
      return rope_and_cache_to<T, int8_t>(a);
  }
}

void rope_and_cache(const RopeCacheArgs& a) {
  with_type_of(a.dtype, [&]<class T>(T) { rope_and_cache_of<T>(a); });
}

}  // namespace

extern const NormRopeKernels norm_rope_table;
const NormRopeKernels norm_rope_table = {rms_norm, rope_and_cache};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(NormRopeKernels, norm_rope_kernels, norm_rope_table)
