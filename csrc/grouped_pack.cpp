// Packs grouped integer weights, and unpacks rows of them: see quire/kernels/grouped_layout.h.
#include <algorithm>
#include <cstring>

#include "quire/kernels/gemm.h"
#include "quire/thread_pool.h"

namespace quire {
namespace {

// The place of the bits of a quad of column 0 in a plane. The place is the same in each of four bytes.
struct PlacedBits {
  int64_t at;
  int shift;
  uint32_t mask;  // the mask before the shift

  PlacedBits(int64_t begin, int64_t quad, int bits)
      : at(begin + quad * bits / 8 * kQuadBytes),
        shift(static_cast<int>(quad * bits % 8)),
        mask(0x01010101u * ((1u << bits) - 1)) {}

  void add(uint32_t codes, uint8_t* column) const {
    uint32_t word;
    std::memcpy(&word, column + at, sizeof(word));
    word |= (codes & mask) << shift;
    std::memcpy(column + at, &word, sizeof(word));
  }

  uint32_t read(const uint8_t* column) const {
    uint32_t word;
    std::memcpy(&word, column + at, sizeof(word));
    return word >> shift & mask;
  }
};

// A quad of codes as one word, in the planes of a panel.
struct PlacedQuad {
  int low_bits;
  PlacedBits low, high;

  PlacedQuad(const CodePlanes& planes, int64_t quad)
      : low_bits(planes.low_bits),
        low(quad / planes.quads * planes.bytes(), quad % planes.quads, planes.low_bits),
        high(quad / planes.quads * planes.bytes() + planes.low_bytes(), quad % planes.quads, planes.high_bits) {}

  void write(uint32_t codes, int64_t column, uint8_t* panel) const {
    low.add(codes, panel + column * kQuad);
    if (high.mask != 0) high.add(codes >> low_bits, panel + column * kQuad);
  }

  uint32_t read(int64_t column, const uint8_t* panel) const {
    const uint32_t codes = low.read(panel + column * kQuad);
    return high.mask == 0 ? codes : codes | high.read(panel + column * kQuad) << low_bits;
  }
};

// Writes codes into a panel of zeros. It copies bands of 16 columns at a time, so that writes fill cache lines.
void pack_codes(const uint8_t* codes, int64_t stride, int64_t columns, int64_t k, int bits, uint8_t* panel) {
  constexpr int64_t kBand = 16;
  const CodePlanes planes(bits);
  for (int64_t band = 0; band < columns; band += kBand) {
    for (int64_t first = 0; first < k; first += kQuad) {
      const int64_t count = std::min(kQuad, k - first);
      const PlacedQuad quad(planes, first / kQuad);
      for (int64_t c = band; c < std::min(band + kBand, columns); ++c) {
        const uint8_t* const from = codes + c * stride + first;
        uint32_t word = 0;
        if (count == kQuad) {  // the compiler knows the size here, which makes the copy four times as fast
          std::memcpy(&word, from, kQuad);
        } else {
          std::memcpy(&word, from, count);
        }
        quad.write(word, c, panel);
      }
    }
  }
}

// Copies numbers [columns][count] of `size` bytes each to [count][64], `pitch` bytes apart.
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
    case GroupNumbers::e8m0:
      return read<e8m0>(from, index) * 0.5f;
  }
  return 0;
}

template <class T>
void unpack_row(const char* panel, int64_t column, int64_t k, const GroupedForm& form, const GroupedLayout& layout,
                const int32_t* order, T* out) {
  const auto* codes = reinterpret_cast<const uint8_t*>(panel + layout.codes_at);
  const CodePlanes planes(form.bits);
  const bool has_minima = form.offsets != GroupNumbers::none && form.offsets != GroupNumbers::u8;
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    const char* const group = panel + g * layout.group_bytes;
    const char* const super = panel + layout.supers_at + g / form.super_size * layout.super_bytes;
    float scale = read_number(form.scales, group, column);
    float offset = read_number(form.offsets, group + layout.scale_bytes, column);
    if (form.scales == GroupNumbers::i8) scale *= read<f16>(super, column);
    if (form.offsets == GroupNumbers::i8) offset *= read<f16>(super + layout.super_scale_bytes, column);
    if (form.offsets == GroupNumbers::none) offset = static_cast<float>(form.middle());
    const int64_t end = std::min(k, (g + 1) * form.group_size);
    for (int64_t first = g * form.group_size; first < end; first += kQuad) {
      uint32_t quad = PlacedQuad(planes, first / kQuad).read(column, codes);
      for (int64_t i = first; i < std::min(end, first + kQuad); ++i, quad >>= 8) {
        const auto code = static_cast<float>(form.has_floats() ? kE2m1[quad & 0xf] : quad & 0xff);
        out[order == nullptr ? i : order[i]] =
            from_f32<T>(has_minima ? code * scale - offset : (code - offset) * scale);
      }
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
    pack_codes(source.codes.data + first * source.codes.stride, source.codes.stride, columns, k, form.bits,
               reinterpret_cast<uint8_t*>(to + layout.codes_at));
  });
}

void gemm_grouped_rows(const WeightRowsArgs& args) {
  const PackedWeight& weight = args.weight;
  const int64_t k = weight.k;
  const GroupedLayout layout(weight.form, k);
  parallel_for(static_cast<int>(ceil_div(args.count, kUnpackedRowsPerTask)), [&](int task, int) {
    const int64_t first = task * kUnpackedRowsPerTask;
    for (int64_t i = first; i < std::min(args.count, first + kUnpackedRowsPerTask); ++i) {
      const char* const panel = static_cast<const char*>(weight.data) + args.rows[i] / kPanelWidth * layout.panel_bytes;
      with_type_of(args.dtype, [&]<class T>(T) {
        unpack_row(panel, args.rows[i] % kPanelWidth, k, weight.form, layout, weight.order,
                   static_cast<T*>(args.out) + i * k);
      });
    }
  });
}

}  // namespace quire
