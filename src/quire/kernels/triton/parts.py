"""Cuts products into programs: into tiles, and into parts of K that are summed separately.

The parts, and the order of every sum, depend only on the shape of the weight. Tiles also depend on the number of rows.
On sm_90 all tiles have 64 or more rows, so that the same instruction (wgmma) multiplies for every number of rows.

Dimensions: M rows, K in-features, N out-features, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import IS_INTERPRETED, ceil_div, next_power_of_2, row_strides

# A launch should have this number of programs: four for each multiprocessor of an H100, which hide each other's waits.
_PROGRAMS_WANTED = 528
_SHORTEST_PART = 512
_MOST_PARTS = 16
_PART_UNIT = 128  # a multiple of every tile's K
_JOINED = 1024  # the columns of a program of _join_kernel


@dataclass(frozen=True)
class Tile:
    """Rows, columns and K of a program's tile, and options of the compiler."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tile(M: int, N: int, dtype: torch.dtype, is_wgmma: bool) -> Tile:
    """Tiles for M rows of activations of this dtype. `is_wgmma`: see launch.has_wgmma."""
    if dtype == torch.float32:  # tensor cores do not multiply float32
        return Tile(16, 64, 32, 4, 2)
    if M > 64:
        return Tile(128, 128 if ceil_div(N, 64) % 2 == 0 else 64, 64, 8, 3)
    return Tile(64 if is_wgmma or M > 16 else 16, 64, 64, 4, 4)


def part_length(N: int, K: int) -> int:
    """The elements of K in each part except the last: a multiple of every tile's K."""
    parts = min(_PROGRAMS_WANTED // ceil_div(N, 64), K // _SHORTEST_PART, _MOST_PARTS)
    units: int = ceil_div(ceil_div(K, max(parts, 1)), _PART_UNIT)
    return units * _PART_UNIT


def is_split(tile: Tile, M: int, N: int) -> bool:
    """Whether parts get programs of their own. They do only if there are too few programs otherwise."""
    num_programs: int = ceil_div(M, tile.block_m) * ceil_div(N, tile.block_n)
    return num_programs < _PROGRAMS_WANTED


@dataclass(frozen=True)
class ExpertRows:
    """The rows of a product with a stack of experts: see kernels.routing.Routing.

    Attributes:
        begins: int32 [num_experts + 1].
        order_P: int32; row p of the result reads row order_P[p] // num_slots of x if `of_tokens`, else row p.
    """

    begins: Tensor
    order_P: Tensor
    num_experts: int
    num_slots: int
    of_tokens: bool

    def num_tiles(self, block_m: int) -> int:
        """The most tiles that any routing can have. The host does not know the ranges of experts."""
        P = len(self.order_P)
        return P // block_m + min(P, self.num_experts)


def rows_of_tiles(M: int, experts: ExpertRows | None) -> int:
    """The number of rows for which tiles are chosen: M, or the mean number of an expert's rows.

    Tiles of experts have at most 64 rows. Larger tiles are half empty more often, and some of them spill on sm_80.
    """
    if experts is None:
        return M
    mean: int = ceil_div(len(experts.order_P), experts.num_experts)
    return min(mean, 64)


@triton.jit
def rows_of_program(
    begins_ptr,
    order_ptr,
    num_experts,
    num_slots,
    M,
    K,
    EXPERTS: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """For a program along M: its expert, its rows of the result, whether these rows exist, its rows of x, and K.

    Tiles of experts are numbered from expert to expert. A number after the last tile has no rows, and 0 in place of K.
    Without experts the expert is 0.
    """
    tile = tl.program_id(0)
    if EXPERTS > 0:
        e = tl.arange(0, EXPERTS)
        is_e = e < num_experts
        begins = tl.load(begins_ptr + e, mask=is_e, other=0)
        tiles = tl.cdiv(tl.load(begins_ptr + e + 1, mask=is_e, other=0) - begins, BLOCK_M)
        ends = tl.cumsum(tiles, axis=0)
        expert = tl.minimum(tl.sum((ends <= tile).to(tl.int32), axis=0), num_experts - 1)
        first = tl.sum(tl.where(e == expert, ends - tiles, 0), axis=0)
        m = tl.load(begins_ptr + expert) + (tile - first) * BLOCK_M + tl.arange(0, BLOCK_M)
        is_m = m < tl.load(begins_ptr + expert + 1)
        row_of_x = m
        if OF_TOKENS:
            row_of_x = tl.load(order_ptr + m, mask=is_m, other=0) // num_slots
        expert, length = expert.to(tl.int64), tl.where(tl.max(is_m.to(tl.int32), axis=0) > 0, K, 0)
    else:
        m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        expert, is_m, row_of_x, length = 0, m < M, m, K
    return expert, m, is_m, row_of_x, length


@triton.jit
def store_tile(
    total, bias_ptr, out_ptr, m, n, is_m, is_n, M, N, out_stride, IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Store the sums of rows m and columns n, with their bias. If K is split, out is float32 [PARTS, M, N]."""
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    if IS_SPLIT:
        out_ptrs += tl.program_id(2).to(tl.int64) * M * N
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_m[:, None] & is_n[None, :])


class Launch:
    """The common part of the launches of all products.

    Attributes:
        grid: the programs along M and N; if parts get programs of their own, also along the parts.
        arguments: the arguments that all products have, by name, and options of the compiler. If parts get programs of
            their own, the kernel writes to float32 [parts, M, N] and adds no bias: `join` does the rest.
    """

    def __init__(
        self, tile: Tile, x_MK: Tensor, N: int, bias_N: Tensor | None, out_MN: Tensor, experts: ExpertRows | None
    ) -> None:
        M, K = x_MK.shape
        part_len = part_length(N, K)
        parts = ceil_div(K, part_len)
        splits = parts > 1 and experts is None and is_split(tile, M, N)
        num_tiles = ceil_div(M, tile.block_m) if experts is None else experts.num_tiles(tile.block_m)
        self.grid = num_tiles, ceil_div(N, tile.block_n), parts if splits else 1
        self._bias_N, self._out_MN = bias_N, out_MN
        self._partial_PMN = torch.empty((parts, M, N), dtype=torch.float32, device=x_MK.device) if splits else None
        out = self._out_MN if self._partial_PMN is None else self._partial_PMN
        self.arguments: dict[str, Any] = {
            "x_ptr": x_MK,
            "bias_ptr": None if splits else bias_N,
            "out_ptr": out,
            "begins_ptr": None if experts is None else experts.begins,
            "order_ptr": None if experts is None else experts.order_P,
            "num_experts": 0 if experts is None else experts.num_experts,
            "num_slots": 0 if experts is None else experts.num_slots,
            "M": M,
            "N": N,
            "K": K,
            "part_len": part_len,
            **row_strides(x=x_MK, out=out),
            "PARTS": parts,
            "IS_SPLIT": splits,
            "HAS_BIAS": bias_N is not None and not splits,
            "EVEN_K": K % tile.block_k == 0,
            "EXPERTS": 0 if experts is None else next_power_of_2(experts.num_experts),
            "OF_TOKENS": experts is not None and experts.of_tokens,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "UPCAST": IS_INTERPRETED,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def join(self) -> None:
        """Add the parts up after the kernel, if they had programs of their own."""
        if self._partial_PMN is not None:
            join_parts(self._partial_PMN, self._bias_N, self._out_MN)


@triton.jit(do_not_specialize=["M"])
def _join_kernel(
    partial_ptr, bias_ptr, out_ptr, M, N, out_stride, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_n = n < N
    total = tl.zeros([BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial_ptr + (part * M + row) * N + n, mask=is_n, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=is_n)


def join_parts(partial_PMN: Tensor, bias_N: Tensor | None, out_MN: Tensor) -> None:
    """Compute out = sum over the parts in order + bias, rounded once."""
    P, M, N = partial_PMN.shape
    _join_kernel[(M, ceil_div(N, _JOINED))](
        partial_ptr=partial_PMN,
        bias_ptr=bias_N,
        out_ptr=out_MN,
        M=M,
        N=N,
        **row_strides(out=out_MN),
        PARTS=P,
        HAS_BIAS=bias_N is not None,
        BLOCK_N=_JOINED,
        num_warps=4,
    )
