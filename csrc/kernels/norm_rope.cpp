// RMS norm and layer norm, with and without residual; and the norm of each head, rotary embedding and the KV cache
// write. All are computed in float32 and rounded once.
#include "quire/kernels/norm_rope.h"

#include <algorithm>
#include <cmath>

#include "kv_codes.h"
#include "rows.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kLanes = F32::kWidth;

// The sum of a row, by add(sum, x). next(i, left) gives kLanes values from i on, and zeros after the end. Four sums
// hide the latency of an addition. Their order depends only on dim.
template <class Next, class Add>
inline float sum_of_row(int64_t dim, const Next& next, const Add& add) {
  F32 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= dim; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      sums[j] = add(sums[j], next(i + j * kLanes, kLanes));
    }
  }
  for (; i < dim; i += kLanes) sums[0] = add(sums[0], next(i, dim - i));
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// 1 / sqrt(mean(x^2) + eps)
template <class Next>
inline float inverse_rms(int64_t dim, float eps, const Next& next) {
  const float sum = sum_of_row(dim, next, [](F32 sum, F32 x) { return fma(x, x, sum); });
  return 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
}

// Calls measure(next) for a row of x, or for the sum of residual and x, which it stores. Returns the row that was read.
template <class T, class Measure>
inline const T* measured_row(const NormArgs& a, int64_t row, const Measure& measure) {
  const T* x = static_cast<const T*>(a.x.data) + row * a.x.stride;
  if (a.residual.data == nullptr) {
    measure([&](int64_t i, int64_t left) { return load_part(x + i, left); });
    return x;
  }
  T* residual = static_cast<T*>(a.residual.data) + row * a.residual.stride;
  if (a.multiplier == 1.0f) {
    measure([&](int64_t i, int64_t left) {
      store_part(residual + i, load_part(residual + i, left) + load_part(x + i, left), left);
      return load_part(residual + i, left);
    });
  } else {
    const F32 multiplier = broadcast(a.multiplier);
    measure([&](int64_t i, int64_t left) {
      const F32 before = load_part(residual + i, left);
      store_part(residual + i, load_part(x + i, left) * multiplier, left);
      store_part(residual + i, before + load_part(residual + i, left), left);
      return load_part(residual + i, left);
    });
  }
  return residual;
}

template <class T, class W>
void rms_norm_row(const NormArgs& a, int64_t row) {
  float scale = 0;
  const T* x = measured_row<T>(a, row, [&](const auto& next) { scale = inverse_rms(a.dim, a.eps, next); });
  const W* weight = static_cast<const W*>(a.weight);
  T* out = static_cast<T*>(a.out.data) + row * a.out.stride;
  const F32 scales = broadcast(scale), offset = broadcast(a.weight_offset);
  for (int64_t i = 0; i < a.dim; i += kLanes) {
    const int64_t left = a.dim - i;
    store_part(out + i, load_part(x + i, left) * scales * (load_part(weight + i, left) + offset), left);
  }
}

template <class T, class W>
void layer_norm_row(const NormArgs& a, int64_t row) {
  float mean = 0;
  const T* x = measured_row<T>(a, row, [&](const auto& next) {
    mean = sum_of_row(a.dim, next, [](F32 sum, F32 x) { return sum + x; }) / static_cast<float>(a.dim);
  });
  const F32 means = broadcast(mean);
  const auto centred = [&](int64_t i, int64_t left) { return load_part(x + i, left, mean) - means; };
  const F32 scales = broadcast(inverse_rms(a.dim, a.eps, centred));
  const W *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
  T* out = static_cast<T*>(a.out.data) + row * a.out.stride;
  for (int64_t i = 0; i < a.dim; i += kLanes) {
    const int64_t left = a.dim - i;
    store_part(out + i, fma(centred(i, left) * scales, load_part(weight + i, left), load_part(bias + i, left)), left);
  }
}

template <class T, class W>
void norm_rows(const NormArgs& a) {
  if (a.bias == nullptr) {
    for_rows(a.rows, a.dim, [&](int64_t row) { rms_norm_row<T, W>(a, row); });
  } else {
    for_rows(a.rows, a.dim, [&](int64_t row) { layer_norm_row<T, W>(a, row); });
  }
}

void norm(const NormArgs& a) {
  with_type_of(a.dtype, [&]<class T>(T) { a.weight_dtype == a.dtype ? norm_rows<T, T>(a) : norm_rows<T, float>(a); });
}

// Computes the norm (if weight is not null) and the rotation (if cos_sin is not null) of one head. write(i, x, left)
// takes kLanes elements from i on; only the first `left` of them are valid.
template <class T, class W, class Write>
inline void rotate_head(const RopeCacheArgs& a, const T* head, const W* weight, float inverse_rms, const float* cos_sin,
                        const Write& write) {
  const int64_t half = cos_sin == nullptr ? 0 : a.rotation.rotary_dim / 2;
  const F32 scale = broadcast(inverse_rms), offset = broadcast(a.rotation.norm_weight_offset);
  const auto normed = [&](int64_t i, int64_t left) {
    const F32 x = load_part(head + i, left);
    return weight == nullptr ? x : x * scale * (load_part(weight + i, left) + offset);
  };
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const F32 c = load_part(cos_sin + i, left), s = load_part(cos_sin + half + i, left);
    const F32 x = normed(i, left), y = normed(half + i, left);
    write(i, fma(x, c, zero() - y * s), left);
    write(half + i, fma(y, c, x * s), left);
  }
  for (int64_t i = 2 * half; i < a.head_dim; i += kLanes) write(i, normed(i, a.head_dim - i), a.head_dim - i);
}

// Calls run(h, head, inverse) for all heads of a token, where inverse is 1 / RMS of the head if `normed`. The norms of
// several heads are computed first, side by side, because each norm is a chain of slow instructions.
template <class T, class Run>
inline void for_heads(const RopeCacheArgs& a, T* heads, int64_t stride, int64_t count, bool normed, const Run& run) {
  constexpr int64_t kTogether = 8;
  float inverse[kTogether] = {};
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t end = std::min(count, first + kTogether);
    for (int64_t h = first; normed && h < end; ++h) {
      const T* head = heads + h * stride;
      inverse[h - first] = inverse_rms(a.head_dim, a.rotation.norm_eps,
                                       [&](int64_t i, int64_t left) { return load_part(head + i, left); });
    }
    for (int64_t h = first; h < end; ++h) run(h, heads + h * stride, inverse[h - first]);
  }
}

// Writes a head to row `row` of a cache of codes, and to its scales.
template <class T, class W, class C>
void encode_head(const RopeCacheArgs& a, const T* head, const W* weight, float inverse_rms, const float* cos_sin, C* to,
                 float* scales, int64_t row) {
  alignas(64) float rotated[kMaxHeadDim + kLanes];
  store(rotated + a.head_dim / kLanes * kLanes, zero());  // encode_row reads whole vectors
  rotate_head(a, head, weight, inverse_rms, cos_sin,
              [&](int64_t i, F32 x, int64_t left) { store_part(rotated + i, x, left); });
  encode_row(rotated, static_cast<int>(a.head_dim), to, scales, row);
}

template <class T, class W, class C>
void rope_and_cache_token(const RopeCacheArgs& a, int64_t token) {
  const float* cos_sin =
      a.rotation.cos_sin == nullptr ? nullptr : a.rotation.cos_sin + a.positions[token] * a.rotation.rotary_dim;
  const W *q_weight = static_cast<const W*>(a.rotation.q_norm_weight),
          *k_weight = static_cast<const W*>(a.rotation.k_norm_weight);
  const auto change_queries = [&](const auto& finished) {
    for_heads(a, static_cast<T*>(a.q.data) + token * a.q.token_stride, a.q.head_stride, a.num_q_heads,
              q_weight != nullptr, [&](int64_t, T* q, float inverse) {
                rotate_head(a, q, q_weight, inverse, cos_sin,
                            [&](int64_t i, F32 x, int64_t left) { store_part(q + i, finished(x), left); });
              });
  };
  if (a.rotation.temperature != 0) {
    const float steps = std::floor(static_cast<float>(a.positions[token] + 1) / a.rotation.temperature_floor);
    const F32 factor = broadcast(1 + a.rotation.temperature * std::log1p(steps));
    change_queries([factor](F32 x) { return x * factor; });
  } else if (q_weight != nullptr || cos_sin != nullptr) {
    change_queries([](F32 x) { return x; });
  }
  const int64_t slot = a.slot_mapping[token];
  if (slot < 0) return;
  const KvCache& cache = a.cache;
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  const T* values = static_cast<const T*>(a.v.data) + token * a.v.token_stride;
  C* k_row = static_cast<C*>(cache.k.data) + block * cache.k.block_stride + offset * a.head_dim;
  C* v_row = static_cast<C*>(cache.v.data) + block * cache.v.block_stride + offset * a.head_dim;
  for_heads(a, static_cast<const T*>(a.k.data) + token * a.k.token_stride, a.k.head_stride, cache.num_kv_heads,
            k_weight != nullptr, [&](int64_t g, const T* k, float inverse) {
              const T* v = values + g * a.v.head_stride;
              C *k_to = k_row + g * cache.k.head_stride, *v_to = v_row + g * cache.v.head_stride;
              if constexpr (std::is_same_v<T, C>) {
                rotate_head(a, k, k_weight, inverse, cos_sin,
                            [&](int64_t i, F32 x, int64_t left) { store_part(k_to + i, x, left); });
                std::copy_n(v, a.head_dim, v_to);
              } else {
                const auto row_of = [&](const StridedBlocks<float>& scales) {
                  return block * scales.block_stride + g * scales.head_stride + offset;
                };
                encode_head(a, k, k_weight, inverse, cos_sin, k_to, cache.k_scales.data, row_of(cache.k_scales));
                encode_head<T, W>(a, v, nullptr, 0.0f, nullptr, v_to, cache.v_scales.data, row_of(cache.v_scales));
              }
            });
}

template <class T, class C>
void rope_and_cache_to(const RopeCacheArgs& a) {
  const int64_t elements = (a.num_q_heads + 2 * a.cache.num_kv_heads) * a.head_dim;
  if (a.rotation.norm_weight_dtype == a.dtype) {
    for_rows(a.num_tokens, elements, [&](int64_t token) { rope_and_cache_token<T, T, C>(a, token); });
  } else {
    for_rows(a.num_tokens, elements, [&](int64_t token) { rope_and_cache_token<T, float, C>(a, token); });
  }
}

void rope_and_cache(const RopeCacheArgs& a) {
  with_type_of(a.dtype, [&]<class T>(T) {
    with_type_of_cache<T>(a.cache.type, [&]<class C>(C) { rope_and_cache_to<T, C>(a); });
  });
}

}  // namespace

extern const NormRopeKernels norm_rope_table;
const NormRopeKernels norm_rope_table = {norm, rope_and_cache};

}  // namespace quire::QUIRE_ISA

QUIRE_DEFINE_DISPATCH(NormRopeKernels, norm_rope_kernels, norm_rope_table)
