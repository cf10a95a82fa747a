// Brings grouped integer weights into the packed layout, and rows out of it, see quire/kernels/grouped_layout.h.
#include <algorithm>
#include <cstring>

#include "quire/kernels/grouped_layout.h"
#include "quire/thread_pool.h"

namespace quire {
namespace {

// Columns are taken in bands of 16, so that writes fill cache lines.
void pack_codes(const uint8_t* codes, int64_t stride, int64_t columns, int64_t k, int bits, uint8_t* panel) {
  constexpr int64_t kBand = 16;
  for (int64_t band = 0; band < columns; band += kBand) {
    for (int64_t first = 0; first < k; first += kQuad) {
      const int64_t count = std::min(kQuad, k - first), quad = first / kQuad;
      for (int64_t c = band; c < std::min(band + kBand, columns); ++c) {
        const uint8_t* from = codes + c * stride + first;
        if (bits == 8) {
          std::memcpy(panel + (quad * kPanelWidth + c) * kQuad, from, count);
        } else {
          uint8_t* to = panel + (quad / 2 * kPanelWidth + c) * kQuad;
          for (int64_t i = 0; i < count; ++i) to[i] |= static_cast<uint8_t>(from[i] << (quad % 2 * 4));
        }
      }
    }
  }
}

// numbers [columns][count] of `size` bytes each become [count][64], `pitch` bytes apart.
void pack_numbers(const void* numbers, int64_t size, int64_t columns, int64_t count, char* to, int64_t pitch) {
  const char* from = static_cast<const char*>(numbers);
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t i = 0; i < count; ++i, from += size) std::memcpy(to + i * pitch + c * size, from, size);
}

template <class T>
float read(const char* from, int64_t index) {
  T number;
  std::memcpy(&number, from + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return to_f32(number);
}

float read_number(GroupNumbers numbers, const char* from, int64_t index) {
  switch (numbers) {
    case GroupNumbers::none:
      return 0;
    case GroupNumbers::f32:
      return read<float>(from, index);
    case GroupNumbers::f16:
      return read<f16>(from, index);
    case GroupNumbers::i8:
      return read<int8_t>(from, index);
    case GroupNumbers::u8:
      return read<uint8_t>(from, index);
  }
  return 0;
}

template <class T>
void unpack_row(const char* panel, int64_t column, int64_t k, const GroupedForm& form, const GroupedLayout& layout,
                const int32_t* order, T* out) {
  const auto* codes = reinterpret_cast<const uint8_t*>(panel + layout.codes_at);
  const bool has_minima = form.offsets != GroupNumbers::none && form.offsets != GroupNumbers::u8;
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    const char* const group = panel + g * layout.group_bytes;
    const char* const super = panel + layout.supers_at + g / form.super_size * layout.super_bytes;
    float scale = read_number(form.scales, group, column);
    float offset = read_number(form.offsets, group + layout.scale_bytes, column);
    if (form.scales == GroupNumbers::i8) scale *= read<f16>(super, column);
    if (form.offsets == GroupNumbers::i8) offset *= read<f16>(super + layout.super_scale_bytes, column);
    if (form.offsets == GroupNumbers::none) offset = static_cast<float>(1 << (form.bits - 1));
    for (int64_t i = g * form.group_size; i < std::min(k, (g + 1) * form.group_size); ++i) {
      const int64_t quad = i / kQuad, line = form.bits == 8 ? quad : quad / 2;
      const int byte = codes[(line * kPanelWidth + column) * kQuad + i % kQuad];
      const auto code = static_cast<float>(form.bits == 8 ? byte : quad % 2 == 0 ? byte & 15 : byte >> 4);
      out[order == nullptr ? i : order[i]] = from_f32<T>(has_minima ? code * scale - offset : (code - offset) * scale);
    }
  }
}

}  // namespace

int64_t gemm_grouped_packed_bytes(int64_t n, int64_t k, const GroupedForm& form) {
  return ceil_div(n, kPanelWidth) * GroupedLayout(form, k).panel_bytes;
}

void gemm_grouped_pack(const GroupedSource& source, int64_t n, int64_t k, const GroupedForm& form, void* packed) {
  const GroupedLayout layout(form, k);
  parallel_for(static_cast<int>(ceil_div(n, kPanelWidth)), [&](int panel, int) {
    const int64_t first = panel * kPanelWidth, columns = std::min(kPanelWidth, n - first);
    char* const to = static_cast<char*>(packed) + panel * layout.panel_bytes;
    std::memset(to, 0, layout.panel_bytes);
    const auto pack_part = [&](const void* numbers, int64_t size, int64_t count, char* part, int64_t pitch) {
      if (numbers != nullptr)
        pack_numbers(static_cast<const char*>(numbers) + first * count * size, size, columns, count, part, pitch);
    };
    char* const supers = to + layout.supers_at;
    pack_part(source.scales, size_of(form.scales), layout.num_groups, to, layout.group_bytes);
    pack_part(source.offsets, size_of(form.offsets), layout.num_groups, to + layout.scale_bytes, layout.group_bytes);
    pack_part(source.super_scales, 2, layout.num_supers, supers, layout.super_bytes);
    pack_part(source.super_minima, 2, layout.num_supers, supers + layout.super_scale_bytes, layout.super_bytes);
    pack_codes(source.codes + first * source.code_stride, source.code_stride, columns, k, form.bits,
               reinterpret_cast<uint8_t*>(to + layout.codes_at));
  });
}

void gemm_grouped_rows(const void* packed, int64_t k, const GroupedForm& form, const int32_t* order,
                       const int64_t* rows, int64_t count, DType dtype, void* out) {
  constexpr int64_t kRowsPerTask = 16;
  const GroupedLayout layout(form, k);
  parallel_for(static_cast<int>(ceil_div(count, kRowsPerTask)), [&](int task, int) {
    for (int64_t i = task * kRowsPerTask; i < std::min(count, (task + 1) * kRowsPerTask); ++i) {
      const char* const panel = static_cast<const char*>(packed) + rows[i] / kPanelWidth * layout.panel_bytes;
      with_type_of(dtype, [&]<class T>(T) {
        unpack_row(panel, rows[i] % kPanelWidth, k, form, layout, order, static_cast<T*>(out) + i * k);
      });
    }
  });
}

}  // namespace quire
