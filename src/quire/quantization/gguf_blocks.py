"""Converts GGUF's blocks to GroupedWeight without loss: the same numbers to a bit, in another order.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
Dimensions: N rows, K columns, R bytes of a row, B blocks (of any rows), A bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.formats.weight_format import GGUF
from quire.gguf.types import TensorType
from quire.kernels import pages
from quire.kernels.grouped_weight import GroupedWeight

_SCALES = {"float16": torch.float16, "int8": torch.int8, "e8m0": torch.uint8}
_CHUNK_BYTES = 1 << 20  # codes that are decoded at a time, so that intermediate tensors stay in the processor's cache


@dataclass(frozen=True)
class _Decoded:
    """codes [B, elements], scales and minima [B, groups], super numbers [B, 1]."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None
    super_scales: Tensor | None = None
    super_minima: Tensor | None = None


def unpack_blocks(raw_NR: Tensor, tensor_type: TensorType) -> GroupedWeight:
    """The weight in a tensor's bytes (uint8), one row per out-feature. It keeps no part of `raw_NR`."""
    form, decode = GGUF[tensor_type.name], _DECODERS[tensor_type.name]
    N, R = raw_NR.shape
    K = R // tensor_type.block_bytes * tensor_type.block_size
    G = K // form.group_size_of(K)
    is_two_level, has_minima = form.scales == "int8", form.offsets is not None
    codes_NK = pages.scratch((N, K), torch.uint8, raw_NR.device)
    scales_NG = raw_NR.new_empty((N, G), dtype=_SCALES[form.scales])
    minima_NG = torch.empty_like(scales_NG) if has_minima else None
    super_scales_NS = raw_NR.new_empty((N, G // form.super_size), dtype=torch.float16) if is_two_level else None
    super_minima_NS = torch.empty_like(super_scales_NS) if super_scales_NS is not None and has_minima else None
    rows = max(_CHUNK_BYTES // K, 1)
    for begin in range(0, N, rows):
        part = slice(begin, begin + rows)
        decoded = decode(raw_NR[part].reshape(-1, tensor_type.block_bytes))
        pairs = (
            (codes_NK, decoded.codes),
            (scales_NG, decoded.scales),
            (minima_NG, decoded.minima),
            (super_scales_NS, decoded.super_scales),
            (super_minima_NS, decoded.super_minima),
        )
        for whole, piece in pairs:
            if whole is not None:
                assert piece is not None
                whole[part] = piece.reshape(whole[part].shape)
    return GroupedWeight(
        codes_NK=codes_NK,
        bits=form.bits,
        group_size=form.group_size_of(K),
        scales_NG=scales_NG,
        minima_NG=minima_NG,
        super_scales_NS=super_scales_NS,
        super_minima_NS=super_minima_NS,
        super_size=form.super_size,
    )


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number at byte `begin` of every block, [B, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """4-bit codes: for every `run` bytes, first the low halves, then the high halves."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).flatten(1)


def _bits(packed: Tensor, width: int, run: int) -> Tensor:
    """Codes of 1 or 2 bits: for every `run` bytes, first the lowest `width` bits of each byte, then the next ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return torch.cat([runs >> shift & (1 << width) - 1 for shift in range(0, 8, width)], dim=2).flatten(1)


def _q4_0(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 4:], 16), _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> _Decoded:
    codes = _nibbles(blocks[:, 6:], 16) | _bits(blocks[:, 2:6], 1, 1) << 4
    return _Decoded(codes, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> _Decoded:
    codes = _nibbles(blocks[:, 8:], 16) | _bits(blocks[:, 4:8], 1, 1) << 4
    return _Decoded(codes, _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> _Decoded:
    return _Decoded(blocks[:, 2:] ^ 128, _halves(blocks, 0))


def _q2_k(blocks: Tensor) -> _Decoded:
    factors = blocks[:, :16]
    return _Decoded(
        _bits(blocks[:, 16:80], 2, 32),
        (factors & 15).view(torch.int8),
        (factors >> 4).view(torch.int8),
        _halves(blocks, 80),
        _halves(blocks, 82),
    )


def _q3_k(blocks: Tensor) -> _Decoded:
    codes = _bits(blocks[:, 32:96], 2, 32) | _bits(blocks[:, :32], 1, 32) << 2
    low, high = _nibbles(blocks[:, 96:104], 8), _bits(blocks[:, 104:108], 2, 4)
    factors = (low | high << 4).view(torch.int8) - 32
    return _Decoded(codes, factors, super_scales=_halves(blocks, 108))


def _six_bit_factors(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima of 6 bits in 12 bytes. The high bits of the last four are beside the first four."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=1)
    return scales.view(torch.int8), minima.view(torch.int8)


def _q4_k(blocks: Tensor) -> _Decoded:
    scales, minima = _six_bit_factors(blocks[:, 4:16])
    return _Decoded(_nibbles(blocks[:, 16:], 32), scales, minima, _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: Tensor) -> _Decoded:
    scales, minima = _six_bit_factors(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return _Decoded(codes, scales, minima, _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: Tensor) -> _Decoded:
    codes = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    factors = blocks[:, 192:208].contiguous().view(torch.int8)
    return _Decoded(codes, factors, super_scales=_halves(blocks, 208))


def _mxfp4(blocks: Tensor) -> _Decoded:
    return _Decoded(_nibbles(blocks[:, 1:], 16), blocks[:, :1])


_DECODERS: dict[str, Callable[[Tensor], _Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
