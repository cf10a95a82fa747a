"""Low-rank additions to the results of products: see kernels.lora.

A block of rows is taken once for each adapter that it has. Program g of a block takes the g-th different slot, and ends
at once if there are fewer. A prompt has one adapter in all its blocks, and each row of a decode may have its own. A
row's sums do not depend on the other rows of its block.

Dimensions: T tokens, K in-features, N out-features, R rank, S slots, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.formats.weight_format import LORA_PANEL
from quire.kernels.lora import LoraTable
from quire.kernels.triton.launch import IS_INTERPRETED, ceil_div, row_strides

_BLOCK_T = 16  # rows of a block: the least that tensor cores multiply
_BLOCK_R = 16
_BLOCK_K = 128
_BLOCK_N = 64
_NONE = 1 << 30  # the value for "no slot"


@triton.jit
def _slot_of_program(slots_ptr, t, is_t, ordinal, NONE: tl.constexpr):
    """The different slots of a block in ascending order: the one with this number, or NONE; and the rows' slots."""
    slots = tl.load(slots_ptr + t, mask=is_t, other=NONE)
    slot = tl.min(slots, axis=0)
    for _ in range(ordinal):
        slot = tl.min(tl.where(slots > slot, slots, NONE), axis=0)
    return slot, slots


@triton.jit(do_not_specialize=["T"])
def _shrink_kernel(
    x_ptr,
    slots_ptr,
    table_ptr,
    like_ptr,
    sums_ptr,
    T,
    K,
    x_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    LOOKS_UP: tl.constexpr,
    NONE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """sums [T, PARTS, MAX_RANK] = scale * A x. `like`: a tensor of A's dtype."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_t = t < T
    part = tl.program_id(1) % PARTS
    first_rank = tl.program_id(1) // PARTS * BLOCK_R
    slot, slots = _slot_of_program(slots_ptr, t, is_t, tl.program_id(2), NONE)
    if slot >= 0 and slot < NONE:
        words_ptr = table_ptr + (slot.to(tl.int64) * PARTS + part) * 4
        rank = tl.load(words_ptr + 2)
        if first_rank < rank:
            a_ptr = tl.multiple_of(tl.load(words_ptr), 16).to(like_ptr.dtype)
            scale = tl.load(words_ptr + 3).to(tl.float64, bitcast=True).to(tl.float32)
            r = first_rank + tl.arange(0, BLOCK_R)
            is_r, is_row = r < rank, slots == slot
            if LOOKS_UP:
                token_ids = tl.load(x_ptr + t, mask=is_row, other=0)
                a = tl.load(
                    a_ptr + token_ids[:, None] * rank + r[None, :], mask=is_row[:, None] & is_r[None, :], other=0.0
                )
                total = a.to(tl.float32)
            else:
                k = tl.arange(0, BLOCK_K)
                x_ptrs = x_ptr + t.to(tl.int64)[:, None] * x_stride + k[None, :]
                a_ptrs = a_ptr + r.to(tl.int64)[:, None] * K + k[None, :]
                total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for start in range(0, K, BLOCK_K):
                    is_k = (start + k < K)[None, :]
                    x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_k, other=0.0)
                    a = tl.load(a_ptrs + start, mask=is_r[:, None] & is_k, other=0.0)
                    if UPCAST:
                        x, a = x.to(tl.float32), a.to(tl.float32)
                    total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
            to_ptrs = sums_ptr + (t.to(tl.int64)[:, None] * PARTS + part) * MAX_RANK + r[None, :]
            tl.store(to_ptrs, scale * total, mask=is_row[:, None] & is_r[None, :])


@triton.jit(do_not_specialize=["T"])
def _expand_kernel(
    base_ptr,
    slots_ptr,
    table_ptr,
    like_ptr,
    sums_ptr,
    out_ptr,
    T,
    columns,
    first_column,
    part,
    base_stride,
    out_stride,
    PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    NONE: tl.constexpr,
    PANEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The columns of one part: out = round(base + B sums), float32 products."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_t, is_n = t < T, n < columns
    slot, slots = _slot_of_program(slots_ptr, t, is_t, tl.program_id(2), NONE)
    if slot < NONE:
        is_row = is_t & (slots == slot)
        is_out = is_row[:, None] & is_n[None, :]
        rows = t.to(tl.int64)[:, None]
        y = tl.load(base_ptr + rows * base_stride + first_column + n[None, :], mask=is_out, other=0.0)
        if slot >= 0:
            words_ptr = table_ptr + (slot.to(tl.int64) * PARTS + part) * 4
            rank = tl.load(words_ptr + 2)
            if rank > 0:
                b_ptr = tl.multiple_of(tl.load(words_ptr + 1), 16).to(like_ptr.dtype)
                r = tl.arange(0, BLOCK_R)
                total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
                for start in range(0, rank, BLOCK_R):
                    is_r = start + r < rank
                    sums_ptrs = sums_ptr + (rows * PARTS + part) * MAX_RANK + start + r[None, :]
                    h = tl.load(sums_ptrs, mask=is_row[:, None] & is_r[None, :], other=0.0)
                    at = ((n // PANEL)[None, :] * rank + (start + r)[:, None]) * PANEL + (n % PANEL)[None, :]
                    b = tl.load(b_ptr + at, mask=is_r[:, None] & is_n[None, :], other=0.0)
                    total = tl.dot(h, b.to(tl.float32), total, input_precision="ieee")
                y += total
        tl.store(out_ptr + rows * out_stride + first_column + n[None, :], y.to(out_ptr.dtype.element_ty), mask=is_out)


def add_lora(base_TN: Tensor, x: Tensor, slots_T: Tensor, table: LoraTable, out_TN: Tensor) -> None:
    """See kernels.lora.add_lora. Nothing of the launches depends on what the table holds: they can be captured."""
    T, parts = len(slots_T), len(table.columns)
    if T == 0:
        return
    like = torch.empty(0, dtype=table.dtype, device=x.device)
    sums_TPR = torch.empty((T, parts, table.max_rank), dtype=torch.float32, device=x.device)
    blocks, ordinals = ceil_div(T, _BLOCK_T), min(_BLOCK_T, T, len(table.deltas) + 1)
    shared = {
        **{"slots_ptr": slots_T, "table_ptr": table.words_SP4, "like_ptr": like, "sums_ptr": sums_TPR, "T": T},
        **{"PARTS": parts, "MAX_RANK": table.max_rank, "NONE": _NONE, "BLOCK_T": _BLOCK_T, "BLOCK_R": _BLOCK_R},
    }
    _shrink_kernel[(blocks, parts * ceil_div(table.max_rank, _BLOCK_R), ordinals)](
        x_ptr=x,
        K=table.K,
        **row_strides(x=None if table.looks_up else x),
        **shared,
        LOOKS_UP=table.looks_up,
        BLOCK_K=_BLOCK_K,
        UPCAST=IS_INTERPRETED or x.dtype != table.dtype,
        num_warps=4,
    )
    first_column = 0
    for part, columns in enumerate(table.columns):
        _expand_kernel[(blocks, ceil_div(columns, _BLOCK_N), ordinals)](
            base_ptr=base_TN,
            out_ptr=out_TN,
            columns=columns,
            first_column=first_column,
            part=part,
            **row_strides(base=base_TN, out=out_TN),
            **shared,
            PANEL=LORA_PANEL,
            BLOCK_N=_BLOCK_N,
            num_warps=4,
        )
        first_column += columns
