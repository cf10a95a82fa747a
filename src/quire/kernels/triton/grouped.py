"""Products with integer weights in groups along K, read in the panel layout of the CPU kernels.

This layout is good for a GPU too. A word of 32 bits holds 8 codes of 4 bits (or 4 of 8) of one output column, and the
64 words of a panel lie side by side. So a tile is read in whole lines, and a thread splits the words it has loaded.
Codes of 3, 5 and 6 bits are words of 2-bit or 4-bit codes; after every few of them comes a word with the upper bits.
csrc/include/quire/kernels/grouped_layout.h describes the layout.

K is cut into parts by the shape of the weight. Each part is summed separately, and parts are added in order, in one
program or in several. So a row of the result does not depend on the number of rows.

Dimensions: M rows, K in-features, N out-features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels.triton.launch import ceil_div, has_wgmma
from quire.kernels.triton.parts import ExpertRows, Launch, choose_tile, rows_of_program, rows_of_tiles, store_tile

_PANEL_WIDTH = 64  # kPanelWidth of grouped_layout.h


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 128), half of the scale, because the kernel doubles codes. 255 gives NaN."""
    bits = tl.maximum(exponent.to(tl.int32) << 23, 0x00400000)
    bits = tl.where(bits == 0x7F800000, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True) * 0.5


@triton.jit(do_not_specialize=["M"])
def _grouped_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    halves_ptr,
    bias_ptr,
    out_ptr,
    begins_ptr,
    order_ptr,
    num_experts,
    num_slots,
    M,
    N,
    K,
    group_size,
    super_size,
    part_len,
    x_stride,
    out_stride,
    panel_bytes,
    group_bytes,
    super_bytes,
    offsets_at,
    supers_at,
    codes_at,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    HAS_FLOATS: tl.constexpr,
    OFFSETS: tl.constexpr,
    OFFSET_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """If it is split, a program takes one part of K, out is float32 [PARTS, M, N], and there is no bias.

    `ROWS` rows of scales and offsets serve a tile. All pointers except x, bias and out point into the packed weight,
    each with its own dtype.
    """
    # See struct CodePlanes: WORDS words of CODES codes; if codes are split, a word with their high bits follows.
    CODES: tl.constexpr = 4 if BITS == 8 else 8 if BITS >= 4 else 16
    LOW_BITS: tl.constexpr = 32 // CODES
    HIGH_BITS: tl.constexpr = BITS - LOW_BITS
    WORDS: tl.constexpr = 1 if HIGH_BITS == 0 else LOW_BITS // HIGH_BITS
    PITCH: tl.constexpr = WORDS if HIGH_BITS == 0 else WORDS + 1
    expert, m, is_m, row_of_x, length = rows_of_program(
        begins_ptr, order_ptr, num_experts, num_slots, M, K, EXPERTS, OF_TOKENS, BLOCK_M
    )
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    panel = (n // 64).to(tl.int64) + expert * tl.cdiv(N, 64)
    column = n % 64
    k = tl.arange(0, BLOCK_K)
    word = tl.arange(0, BLOCK_K // CODES)
    row = tl.arange(0, ROWS) * (BLOCK_K // ROWS)
    # The bytes of a word hold the codes 0 to 3. Codes of 4 bits or fewer are in the lowest bits, and 4 to 7 above them.
    quad = tl.arange(0, CODES // 4)
    byte = tl.arange(0, 4) * 8
    x_ptrs = x_ptr + row_of_x.to(tl.int64)[:, None] * x_stride + k[None, :]
    word_ptrs = words_ptr + (panel * (panel_bytes // 4) + codes_at // 4 + column)[None, :]
    word_ptrs += (word // WORDS * PITCH + word % WORDS)[:, None] * 64
    to_high = (WORDS - word % WORDS)[:, None] * 64
    scale_ptrs = scales_ptr + (panel * (panel_bytes // SCALE_BYTES) + column)[None, :]
    if OFFSETS != "none":
        offset_ptrs = (
            offsets_ptr + (panel * (panel_bytes // OFFSET_BYTES) + offsets_at // OFFSET_BYTES + column)[None, :]
        )
    if (SCALE_BYTES == 1 and not HAS_FLOATS) or (OFFSETS == "minima" and OFFSET_BYTES == 1):
        half_ptrs = halves_ptr + (panel * (panel_bytes // 2) + supers_at // 2 + column)[None, :]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for turn in range(1 if IS_SPLIT else PARTS):
        part = tl.program_id(2) if IS_SPLIT else turn
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(part * part_len, tl.minimum(length, (part + 1) * part_len), BLOCK_K):
            group = ((start + row) // group_size)[:, None]
            tile_ptrs = word_ptrs + start // (CODES * WORDS) * (PITCH * 64)
            if EVEN_K:
                x = tl.load(x_ptrs + start, mask=is_m[:, None], other=0.0)
                words = tl.load(tile_ptrs)
                if HIGH_BITS != 0:
                    highs = tl.load(tile_ptrs + to_high)
            else:
                # Words end where groups end, because a group is packed as a whole.
                x = tl.load(x_ptrs + start, mask=is_m[:, None] & (start + k < K)[None, :], other=0.0)
                is_word = (start + word * CODES < tl.cdiv(K, group_size) * group_size)[:, None]
                words = tl.load(tile_ptrs, mask=is_word, other=0)
                if HIGH_BITS != 0:
                    highs = tl.load(tile_ptrs + to_high, mask=is_word, other=0)
                group = tl.minimum(group, (K - 1) // group_size)
            scale = tl.load(scale_ptrs + group * (group_bytes // SCALE_BYTES))
            if HAS_FLOATS:
                scale = _power_of_two(scale)
            else:
                scale = scale.to(tl.float32)
            if SCALE_BYTES == 1 and not HAS_FLOATS:
                scale = scale * tl.load(half_ptrs + group // super_size * (super_bytes // 2)).to(tl.float32)
            codes = words.reshape(ROWS, BLOCK_K // CODES // ROWS, 1, 1, BLOCK_N)
            if BITS != 8:
                codes = codes >> (quad * LOW_BITS)[None, None, :, None, None]
                codes &= 0x01010101 * ((1 << LOW_BITS) - 1)
            if HIGH_BITS != 0:
                highs = highs >> (word % WORDS * (CODES // 4 * HIGH_BITS))[:, None]
                highs = highs.reshape(ROWS, BLOCK_K // CODES // ROWS, 1, 1, BLOCK_N)
                highs = highs >> (quad * HIGH_BITS)[None, None, :, None, None]
                codes |= (highs & (0x01010101 * ((1 << HIGH_BITS) - 1))) << LOW_BITS
            codes = (codes >> byte[None, None, None, :, None]) & 0xFF
            if HAS_FLOATS:  # codes become twice the value, plus 16
                magnitude = codes & 7
                exponent = tl.maximum(magnitude >> 1, 1) - 1
                double = tl.where(magnitude < 2, magnitude, (2 + (magnitude & 1)) << exponent)
                codes = tl.where(codes > 7, 16 - double, 16 + double)
            # With the code in the lowest bits of 2^23, the float32 number is 2^23 + code.
            w = (codes | 0x4B000000).to(tl.float32, bitcast=True)
            scale = scale[:, None, None, None, :]
            if OFFSETS == "none":
                w = (w - (8388608.0 + (16 if HAS_FLOATS else 1 << (BITS - 1)))) * scale
            else:
                offset = tl.load(offset_ptrs + group * (group_bytes // OFFSET_BYTES)).to(tl.float32)
                if OFFSETS == "zeros":
                    w = (w - (8388608.0 + offset)[:, None, None, None, :]) * scale
                else:
                    if OFFSET_BYTES == 1:
                        at = group // super_size * (super_bytes // 2) + (64 if SCALE_BYTES == 1 else 0)
                        offset = offset * tl.load(half_ptrs + at).to(tl.float32)
                    w = (w - 8388608.0) * scale - offset[:, None, None, None, :]
            w = w.to(x.dtype).reshape(BLOCK_K, BLOCK_N)
            if UPCAST:
                acc = tl.dot(x.to(tl.float32), w.to(tl.float32), acc)
            else:
                acc = tl.dot(x, w, acc, input_precision="ieee")
        total += acc

    if EXPERTS > 0 and HAS_BIAS:
        bias_ptr += expert * N
    store_tile(total, bias_ptr, out_ptr, m, n, is_m, n < N, M, N, out_stride, IS_SPLIT, HAS_BIAS)


def grouped_linear(
    x_MK: Tensor,
    packed: Tensor,
    N: int,
    weight_format: GroupedFormat,
    bias_N: Tensor | None,
    out_MN: Tensor,
    experts: ExpertRows | None = None,
) -> None:
    """Compute out = x @ w.T + bias, where w is the weight rounded to x's dtype. Sums are float32. See kernels.grouped.

    Columns of x have the order of the packed columns. The last dimension of x, bias and out is contiguous. With experts
    of N rows each, weight and bias have the rows of all experts, and out has a row for each pair of token and expert.
    """
    M, K = x_MK.shape
    tile = choose_tile(rows_of_tiles(M, experts), N, x_MK.dtype, has_wgmma(x_MK.device))
    launch = Launch(tile, x_MK, N, bias_N, out_MN, experts)
    assert weight_format.group_size is not None
    num_panels = ceil_div(N, _PANEL_WIDTH) * (1 if experts is None else experts.num_experts)
    sections = _Sections(weight_format, packed, num_panels, K)
    step = min(weight_format.group_size & -weight_format.group_size, tile.block_k)
    _grouped_kernel[launch.grid](
        words_ptr=packed.view(torch.int32),
        scales_ptr=packed.view(sections.scales),
        offsets_ptr=None if sections.offsets is None else packed.view(sections.offsets),
        halves_ptr=packed.view(torch.float16) if sections.super_bytes else None,
        group_size=weight_format.group_size,
        super_size=weight_format.super_size,
        panel_bytes=sections.panel_bytes,
        group_bytes=sections.group_bytes,
        super_bytes=sections.super_bytes,
        offsets_at=sections.offsets_at,
        supers_at=sections.supers_at,
        codes_at=sections.codes_at,
        BITS=weight_format.bits,
        ROWS=tile.block_k // step,
        SCALE_BYTES=sections.scales.itemsize,
        HAS_FLOATS=weight_format.scales == "e8m0",
        OFFSETS=sections.kind,
        OFFSET_BYTES=1 if sections.offsets is None else sections.offsets.itemsize,
        **launch.arguments,
    )
    launch.join()


class _Sections:
    """The bytes and dtypes of the sections of a panel: see GroupedLayout in grouped_layout.h."""

    def __init__(self, weight_format: GroupedFormat, packed: Tensor, num_panels: int, K: int) -> None:
        assert weight_format.group_size is not None
        num_groups = ceil_div(K, weight_format.group_size)
        self.scales = torch.uint8 if weight_format.scales == "e8m0" else getattr(torch, weight_format.scales)
        self.offsets: torch.dtype | None = (
            None if weight_format.offsets is None else getattr(torch, weight_format.offsets)
        )
        self.kind = "none" if self.offsets is None else "zeros" if self.offsets == torch.uint8 else "minima"
        self.offsets_at = _PANEL_WIDTH * self.scales.itemsize
        self.group_bytes = self.offsets_at + (0 if self.offsets is None else _PANEL_WIDTH * self.offsets.itemsize)
        self.super_bytes = 2 * _PANEL_WIDTH * ((self.scales == torch.int8) + (self.offsets == torch.int8))
        self.supers_at = num_groups * self.group_bytes
        self.panel_bytes = packed.numel() // num_panels
        self.codes_at = self.panel_bytes - _PANEL_WIDTH * weight_format.padded(K) * weight_format.bits // 8
