// Brings grouped integer weights into the packed layout, see quire/kernels/grouped_layout.h.
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

}  // namespace quire
