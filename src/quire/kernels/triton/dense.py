"""Deterministic products with floating-point weights: a row of the result does not depend on the number of rows.

cuBLAS chooses tiles and parts of K by the number of rows. So it is used only if results need not be deterministic. Here
K is cut into parts as in products with quantized weights: see parts.py.

Dimensions: M rows, K in-features, N out-features.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import has_wgmma, row_strides
from quire.kernels.triton.parts import ExpertRows, Launch, Tile, choose_tile, rows_of_program, rows_of_tiles, store_tile


@triton.jit(do_not_specialize=["M"])
def _dense_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    begins_ptr,
    order_ptr,
    num_experts,
    num_slots,
    M,
    N,
    K,
    part_len,
    x_stride,
    weight_stride,
    out_stride,
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
    """If it is split, a program takes one part of K, out is float32 [PARTS, M, N], and there is no bias."""
    expert, m, is_m, row_of_x, length = rows_of_program(
        begins_ptr, order_ptr, num_experts, num_slots, M, K, EXPERTS, OF_TOKENS, BLOCK_M
    )
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n, column = n < N, n.to(tl.int64) + expert * N
    x_ptrs = x_ptr + row_of_x.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + column[:, None] * weight_stride + k[None, :]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for turn in range(1 if IS_SPLIT else PARTS):
        part = tl.program_id(2) if IS_SPLIT else turn
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(part * part_len, tl.minimum(length, (part + 1) * part_len), BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + start, mask=is_m[:, None], other=0.0)
                w = tl.load(weight_ptrs + start, mask=is_n[:, None], other=0.0)
            else:
                is_k = (start + k < K)[None, :]
                x = tl.load(x_ptrs + start, mask=is_m[:, None] & is_k, other=0.0)
                w = tl.load(weight_ptrs + start, mask=is_n[:, None] & is_k, other=0.0)
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        total += acc

    if EXPERTS > 0 and HAS_BIAS:
        bias_ptr += expert * N
    store_tile(total, bias_ptr, out_ptr, m, n, is_m, is_n, M, N, out_stride, IS_SPLIT, HAS_BIAS)


def for_dense(tile: Tile) -> Tile:
    """Tiles of 64 rows are spread over 8 warps, because with 4 warps the split form spills on sm_80."""
    return replace(tile, num_warps=8) if tile.block_m == 64 else tile


def linear(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor, experts: ExpertRows | None = None
) -> None:
    """Compute out = x @ weight.T + bias, in float32 and rounded once. The last dimension of all tensors is contiguous.

    With experts, weight and bias have the rows of all experts, and out has a row for each pair of token and expert.
    """
    M, N = x_MK.shape[0], out_MN.shape[1]
    tile = for_dense(choose_tile(rows_of_tiles(M, experts), N, x_MK.dtype, has_wgmma(x_MK.device)))
    launch = Launch(tile, x_MK, N, bias_N, out_MN, experts)
    _dense_kernel[launch.grid](
        weight_ptr=weight_NK,
        **row_strides(weight=weight_NK),
        **launch.arguments,
    )
    launch.join()
