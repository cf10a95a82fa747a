"""Products with FP8 weights (e4m3), and rows of activations quantized to FP8.

Products decode a weight's codes exactly to the dtype of the activations. Scales multiply float32 sums. K is cut into
parts as in products with grouped weights: see parts.py.

Dimensions: M rows, K in-features, N out-features, G groups along K.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton import codes
from quire.kernels.triton.launch import has_wgmma, next_power_of_2, row_strides
from quire.kernels.triton.parts import ExpertRows, Launch, Tile, choose_tile, rows_of_program, rows_of_tiles, store_tile


@triton.jit(do_not_specialize=["M"])
def _fp8_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
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
    part_len,
    x_stride,
    codes_stride,
    scales_stride,
    out_stride,
    IS_GROUPED: tl.constexpr,
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

    If it is not grouped, a row of the weight has one scale.
    """
    expert, m, is_m, row_of_x, length = rows_of_program(
        begins_ptr, order_ptr, num_experts, num_slots, M, K, EXPERTS, OF_TOKENS, BLOCK_M
    )
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_n, column = n < N, n.to(tl.int64) + expert * N
    x_ptrs = x_ptr + row_of_x.to(tl.int64)[:, None] * x_stride + k[None, :]
    code_ptrs = codes_ptr + column[:, None] * codes_stride + k[None, :]
    scale_ptrs = scales_ptr + column * scales_stride

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for turn in range(1 if IS_SPLIT else PARTS):
        part = tl.program_id(2) if IS_SPLIT else turn
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(part * part_len, tl.minimum(length, (part + 1) * part_len), BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs + start, mask=is_m[:, None], other=0.0)
                w = tl.load(code_ptrs + start, mask=is_n[:, None], other=0)
            else:
                is_k = (start + k < K)[None, :]
                x = tl.load(x_ptrs + start, mask=is_m[:, None] & is_k, other=0.0)
                w = tl.load(code_ptrs + start, mask=is_n[:, None] & is_k, other=0)
            w = codes.decode(w, "e4m3").to(x.dtype)
            if UPCAST:
                x, w = x.to(tl.float32), w.to(tl.float32)
            if IS_GROUPED:
                scale = tl.load(scale_ptrs + start // group_size, mask=is_n, other=0.0)
                acc += tl.dot(x, tl.trans(w), input_precision="ieee") * scale[None, :]
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if not IS_GROUPED:
            acc *= tl.load(scale_ptrs, mask=is_n, other=0.0)[None, :]
        total += acc

    if EXPERTS > 0 and HAS_BIAS:
        bias_ptr += expert * N
    store_tile(total, bias_ptr, out_ptr, m, n, is_m, is_n, M, N, out_stride, IS_SPLIT, HAS_BIAS)


def in_groups(tile: Tile, group_size: int) -> Tile:
    """The tile for grouped weights. Its K lies within one group, and it has fewer columns to save registers."""
    return replace(tile, block_n=64, block_k=min(tile.block_k, group_size & -group_size))


def fp8_linear(
    x_MK: Tensor,
    codes_NK: Tensor,
    scales_NG: Tensor,
    group_size: int,
    bias_N: Tensor | None,
    out_MN: Tensor,
    experts: ExpertRows | None = None,
) -> None:
    """Compute out = x @ weight.T + bias: see kernels.fp8. The last dimension of all tensors is contiguous.

    With experts, weight and bias have the rows of all experts, and out has a row for each pair of token and expert.
    """
    M, N = x_MK.shape[0], out_MN.shape[1]
    is_grouped = scales_NG.shape[1] > 1
    tile = choose_tile(rows_of_tiles(M, experts), N, x_MK.dtype, has_wgmma(x_MK.device))
    tile = in_groups(tile, group_size) if is_grouped else tile
    launch = Launch(tile, x_MK, N, bias_N, out_MN, experts)
    _fp8_kernel[launch.grid](
        codes_ptr=codes_NK.view(torch.int8),
        scales_ptr=scales_NG,
        group_size=group_size,
        **row_strides(codes=codes_NK, scales=scales_NG),
        IS_GROUPED=is_grouped,
        enable_fp_fusion=False,  # sums of parts have equal bits in one program and in several
        **launch.arguments,
    )
    launch.join()


@triton.jit
def _quantize_rows_kernel(x_ptr, codes_ptr, scales_ptr, x_stride, K, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    is_inside = columns < K
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    codes.store_row(codes_ptr + row * K, scales_ptr + row, x, columns, is_inside)


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """See fp8.quantize_fp8: codes [M, K] in e4m3, scales [M, 1]. The last dimension of x is contiguous."""
    M, K = x_MK.shape
    codes_MK = torch.empty((M, K), dtype=torch.int8, device=x_MK.device)
    scales_M1 = torch.empty((M, 1), dtype=torch.float32, device=x_MK.device)
    block = next_power_of_2(K)
    _quantize_rows_kernel[(M,)](
        x_ptr=x_MK,
        codes_ptr=codes_MK,
        scales_ptr=scales_M1,
        **row_strides(x=x_MK),
        K=K,
        BLOCK_K=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return codes_MK.view(torch.float8_e4m3fn), scales_M1
