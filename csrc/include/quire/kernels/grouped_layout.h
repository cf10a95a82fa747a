// Integer weights in groups along K ("grouped"), and their layout in memory. Codes have 2 to 6 or 8 bits without sign.
// There are three forms:
//   weight = scale * (code - zero)     zero is 2^(bits - 1), or one number of 8 bits per group
//   weight = scale * code - minimum
//   weight = scale * e2m1(code)        MXFP4 (OCP Microscaling Formats 1.0): 4 bits; a scale is a power of two
// Scales and minima are numbers (float, half). Or both are 8-bit factors with sign, which multiply a half per
// super-group of `super_size` groups, as in GGUF's K-quants. This product is exact in float.
//
// Packed layout: panels of 64 output columns. In a panel
//   numbers    [groups]  scales [64], then zeros or minima [64] if there are any
//   halves     [supers]  if scales and minima are factors: halves of the scales [64], then of the minima [64]
//   codes      8 bits: [K / 4][64][4], a quad of k of one column together, which is what one vpdpbusd lane takes; 16
//              quads of 16 columns are an AMX tile. 4 bits: [K / 8][64][4], two quads in the low and the high halves of
//              the bytes. Other bits: see CodePlanes
// K is rounded up to whole groups. Sums must fit into 32 bits. So a group has at most 65,536 elements, because 255 *
// 127 * 65,536 < 2^31, and a super-group at most 256, because 255 * 127 * 128 * 256 < 2^31.
#pragma once

#include <cstdint>

#include "quire/dtype.h"
#include "quire/round_up.h"
#include "quire/strided.h"

namespace quire {

inline constexpr int64_t kPanelWidth = 64;
inline constexpr int64_t kUnpackedRowsPerTask = 16;         // when rows are read from panels
inline constexpr int64_t kQuad = 4;                         // neighbours in K with codes that lie together
inline constexpr int64_t kQuadBytes = kQuad * kPanelWidth;  // the bytes of the 8-bit codes of a quad in one panel

// Codes of 2, 4 and 8 bits form one plane: [64][4] bytes hold a fixed number of quads, and the first quad is in the
// lowest bits. Codes of 3, 5 and 6 bits are split: their 2 or 4 low bits form a plane like codes of 2 or 4 bits, and
// their upper bits form another plane. The planes alternate, so that a panel is read in order: the low bits of `quads`
// quads come first, and then their high bits [64][4]. K is rounded up to whole planes too.
struct CodePlanes {
  int low_bits, high_bits;  // the bits of a code
  int64_t quads;            // the quads that share their last [64][4] bytes

  constexpr explicit CodePlanes(int bits)
      : low_bits(bits == 8   ? 8
                 : bits >= 4 ? 4
                             : 2),
        high_bits(bits - low_bits),
        quads(8 / (high_bits == 0 ? low_bits : high_bits)) {}

  constexpr int64_t low_bytes() const { return kQuadBytes * quads * low_bits / 8; }
  constexpr int64_t bytes() const { return kQuadBytes * quads * (low_bits + high_bits) / 8; }
};

inline constexpr int64_t kMaxSuperElements = 256;  // elements of a super-group: the limit of 32-bit sums, see above

// The storage of the numbers of groups. The values are part of the Python interface (kernels/cpu.py).
enum class GroupNumbers : int { none = 0, f32 = 1, f16 = 2, i8 = 3, u8 = 4, e8m0 = 5 };

constexpr int64_t size_of(GroupNumbers numbers) {
  switch (numbers) {
    case GroupNumbers::none:
      return 0;
    case GroupNumbers::f32:
      return 4;
    case GroupNumbers::f16:
      return 2;
    case GroupNumbers::i8:
    case GroupNumbers::u8:
    case GroupNumbers::e8m0:
      return 1;
  }
  return 0;
}

// Products take a code in e2m1 as an integer without sign: twice its value, plus kE2m1Zero. So scales are halved when
// they are decoded. Both are exact.
inline constexpr int kE2m1Zero = 12, kE2m1Bits = 5;  // the bits of such an integer
alignas(16) inline constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// With 3 and 5 bits, a super-group of several groups has a multiple of 32 elements, so that it fills whole planes.
struct GroupedForm {
  int bits = 0;                               // of a code: 2 to 6 or 8; 0: the weight is not grouped
  int64_t group_size = 0;                     // a multiple of 16; with 3 and 5 bits 16, or a multiple of 32
  GroupNumbers scales = GroupNumbers::f32;    // f32, f16, e8m0: codes are e2m1, or i8: factors
  GroupNumbers offsets = GroupNumbers::none;  // u8: zeros; f32, f16, or, beside factors, i8 (factors): minima
  int64_t super_size = 1;                     // groups that share the numbers behind factors

  bool has_factors() const { return scales == GroupNumbers::i8; }
  bool has_floats() const { return scales == GroupNumbers::e8m0; }
  // The integers that products take: their bits, and their zero if groups have no zeros of their own.
  int product_bits() const { return has_floats() ? kE2m1Bits : bits; }
  int middle() const { return has_floats() ? kE2m1Zero : 1 << (bits - 1); }
};

// Byte offsets and sizes in a panel of the packed layout.
struct GroupedLayout {
  int64_t num_groups, num_supers;
  int64_t scale_bytes, group_bytes;        // bytes of one group: its scales; all its numbers
  int64_t super_scale_bytes, super_bytes;  // bytes of one super-group, likewise
  int64_t supers_at, codes_at, panel_bytes;

  GroupedLayout(const GroupedForm& form, int64_t k)
      : num_groups(ceil_div(k, form.group_size)),
        num_supers(ceil_div(num_groups, form.super_size)),
        scale_bytes(kPanelWidth * size_of(form.scales)),
        group_bytes(scale_bytes + kPanelWidth * size_of(form.offsets)),
        super_scale_bytes(form.scales == GroupNumbers::i8 ? kPanelWidth * 2 : 0),
        super_bytes(super_scale_bytes + (form.offsets == GroupNumbers::i8 ? kPanelWidth * 2 : 0)),
        supers_at(num_groups * group_bytes),
        codes_at(supers_at + num_supers * super_bytes),
        panel_bytes(codes_at + kQuadBytes * form.bits *
                                   round_up(num_groups * form.group_size / kQuad, CodePlanes(form.bits).quads) / 8) {}
};

// A weight before packing: codes [n, k], numbers of groups [n, groups] and of super-groups [n, supers]. A pointer is
// nullptr if the form has no such numbers.
struct GroupedSource {
  StridedRows<const uint8_t> codes;
  const void *scales, *offsets, *super_scales, *super_minima;
};

int64_t gemm_grouped_packed_bytes(int64_t n, int64_t k, const GroupedForm& form);
void gemm_grouped_pack(const GroupedSource& source, int64_t n, int64_t k, const GroupedForm& form, void* packed);

}  // namespace quire
