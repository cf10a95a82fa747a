"""Masks, greedy choice and random sampling with top-k, top-p and min-p, without sorting, with exact integer sums.

Probabilities count in units of 2^-44 of the largest (see ops.sample). So sums do not depend on the order in which
programs add, and a row gets the same token in any batch. A row is cut into slices, with one program for each. Eight
rounds find the thresholds of top-k and top-p among the 2^32 floats. Each round sums the weights above 15 pivots, and so
makes the range 16 times smaller.

Dimensions: R rows, V vocabulary, B slices of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.reference import SMALLEST_TEMPERATURE
from quire.kernels.triton.launch import ceil_div, next_power_of_2, row_strides

SLICE = 4096
_ROUNDS = tl.constexpr(8)  # 16^8 = 2^32 keys
_PIVOTS = tl.constexpr(16)
_LOWEST_KEY = tl.constexpr(-(1 << 31))
_NO_TOKEN = tl.constexpr((1 << 31) - 1)
_UNITS = tl.constexpr(2.0**44)


@triton.jit
def _key(x):
    """int64 keys in the order of the floats. Both zeros have the same key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _highest_kernel(logits_ptr, highest_ptr, token_ptr, logits_stride, V, SLICE: tl.constexpr):
    """Find the highest logit of each slice (NaN if the slice has a NaN), and the lowest token id that has it."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits_ptr + row * logits_stride + tokens, mask=tokens < V, other=float("-inf"))
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    highest = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    token = tl.min(tl.where((x == highest) & (tokens < V), tokens, V), axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(highest_ptr + at, tl.where(has_nan, float("nan"), highest))
    tl.store(token_ptr + at, token)


@triton.jit
def _join_highest_kernel(highest_ptr, token_ptr, row_highest_ptr, row_token_ptr, num_slices, BLOCK_B: tl.constexpr):
    """Find the same for whole rows. A row with a NaN gets the token id -1."""
    row = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    is_slice = b < num_slices
    highest_B = tl.load(highest_ptr + row * num_slices + b, mask=is_slice, other=float("-inf"))
    token_B = tl.load(token_ptr + row * num_slices + b, mask=is_slice, other=_NO_TOKEN)
    has_nan = tl.max((highest_B != highest_B).to(tl.int32), axis=0) > 0
    highest = tl.max(tl.where(highest_B != highest_B, float("-inf"), highest_B), axis=0)
    token = tl.min(tl.where(highest_B == highest, token_B, _NO_TOKEN), axis=0)
    tl.store(row_highest_ptr + row, tl.where(has_nan, float("nan"), highest))
    tl.store(row_token_ptr + row, tl.where(has_nan, -1, token).to(tl.int64))


@triton.jit
def _threshold(masses_ptr, row, wanted, num_rows, NUM_ROUNDS: tl.constexpr):
    """The lower end of the range of keys after some rounds: the highest pivot with `wanted` or more above it."""
    pivots = tl.arange(0, _PIVOTS)
    low = tl.full([], _LOWEST_KEY, tl.int64)
    for i in tl.static_range(NUM_ROUNDS):
        masses = tl.load(masses_ptr + (i * num_rows + row) * _PIVOTS + pivots)
        found = tl.max(tl.where((masses >= wanted) | (pivots == 0), pivots, 0), axis=0)
        low += found.to(tl.int64) << (28 - 4 * i)
    return low


@triton.jit
def _wanted_units(total, top_p):
    """The units that the kept set must reach."""
    wanted = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(wanted, 1), total)


@triton.jit
def _keys_and_units(
    logits_ptr,
    logits_stride,
    V,
    row,
    slice_index,
    highest_ptr,
    temperature_ptr,
    min_p_ptr,
    k_threshold,
    SLICE: tl.constexpr,
):
    """The keys and units of a slice. A token that min-p or top-k leaves out has 0 units."""
    tokens = slice_index * SLICE + tl.arange(0, SLICE)
    is_token = tokens < V
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + tokens, mask=is_token, other=float("-inf"))
    highest = tl.load(highest_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    units = (tl.exp((x - highest) * (1.0 / temperature)).to(tl.float64) * _UNITS).to(tl.int64)
    # With min_p = 0, this is minus infinity.
    lowest = highest.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
    key = _key(x)
    is_kept = is_token & (x.to(tl.float64) >= lowest) & (key >= k_threshold)
    return key, tl.where(is_kept, units, 0)


@triton.jit
def _k_threshold(k_masses_ptr, row, top_k_ptr, V, num_rows):
    """The key of the top_k-th highest logit; the lowest key if top-k is off."""
    top_k = tl.load(top_k_ptr + row)
    if (top_k <= 0) | (top_k >= V):
        threshold = tl.full([], _LOWEST_KEY, tl.int64)
    else:
        threshold = _threshold(k_masses_ptr, row, top_k, num_rows, _ROUNDS)
    return threshold


@triton.jit
def _add_masses(masses_ptr, key, weights, low, row, num_rows, ROUND: tl.constexpr):
    """Add the weights above each pivot of this round to masses[ROUND, row]."""
    pivots = tl.arange(0, _PIVOTS)
    masses = tl.zeros([_PIVOTS], tl.int64)
    for j in tl.static_range(1, _PIVOTS):
        pivot = low + (j << (28 - 4 * ROUND))
        masses = tl.where(pivots == j, tl.sum(tl.where(key >= pivot, weights, 0), axis=0), masses)
    tl.atomic_add(masses_ptr + (ROUND * num_rows + row) * _PIVOTS + pivots, masses, mask=pivots > 0)


@triton.jit
def _search_k_kernel(
    logits_ptr, logits_stride, V, top_k_ptr, k_masses_ptr, num_rows, ROUND: tl.constexpr, SLICE: tl.constexpr
):
    row = tl.program_id(0)
    top_k = tl.load(top_k_ptr + row)
    if (top_k <= 0) | (top_k >= V):
        return
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    is_token = tokens < V
    key = _key(tl.load(logits_ptr + row.to(tl.int64) * logits_stride + tokens, mask=is_token, other=float("-inf")))
    low = _threshold(k_masses_ptr, row, top_k, num_rows, ROUND)
    _add_masses(k_masses_ptr, key, is_token.to(tl.int64), low, row, num_rows, ROUND)


@triton.jit
def _total_kernel(
    logits_ptr,
    logits_stride,
    V,
    highest_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    k_masses_ptr,
    total_ptr,
    num_rows,
    SLICE: tl.constexpr,
):
    """Sum the units of a row after min-p and top-k."""
    row = tl.program_id(0)
    k_threshold = _k_threshold(k_masses_ptr, row, top_k_ptr, V, num_rows)
    _, units = _keys_and_units(
        logits_ptr, logits_stride, V, row, tl.program_id(1), highest_ptr, temperature_ptr, min_p_ptr, k_threshold, SLICE
    )
    tl.atomic_add(total_ptr + row, tl.sum(units, axis=0))


@triton.jit
def _search_p_kernel(
    logits_ptr,
    logits_stride,
    V,
    highest_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    k_masses_ptr,
    top_p_ptr,
    total_ptr,
    p_masses_ptr,
    num_rows,
    ROUND: tl.constexpr,
    SLICE: tl.constexpr,
):
    row = tl.program_id(0)
    top_p = tl.load(top_p_ptr + row)
    if top_p >= 1:
        return
    k_threshold = _k_threshold(k_masses_ptr, row, top_k_ptr, V, num_rows)
    key, units = _keys_and_units(
        logits_ptr, logits_stride, V, row, tl.program_id(1), highest_ptr, temperature_ptr, min_p_ptr, k_threshold, SLICE
    )
    wanted = _wanted_units(tl.load(total_ptr + row), top_p)
    low = _threshold(p_masses_ptr, row, wanted, num_rows, ROUND)
    _add_masses(p_masses_ptr, key, units, low, row, num_rows, ROUND)


@triton.jit
def _p_threshold(p_masses_ptr, row, top_p, total, num_rows):
    """The last key that top-p keeps. Higher keys are kept, and the first tokens with this key.

    If top-p is off, it is a key below all keys.
    """
    if top_p >= 1:
        threshold = tl.full([], _LOWEST_KEY, tl.int64) - 1
    else:
        threshold = _threshold(p_masses_ptr, row, _wanted_units(total, top_p), num_rows, _ROUNDS)
    return threshold


@triton.jit
def _weigh_slices_kernel(
    logits_ptr,
    logits_stride,
    V,
    highest_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    k_masses_ptr,
    top_p_ptr,
    total_ptr,
    p_masses_ptr,
    above_ptr,
    ties_ptr,
    tie_units_ptr,
    num_rows,
    SLICE: tl.constexpr,
):
    """For each slice: the units above top-p's threshold, the number of tokens at it, and the units of such a token."""
    row, slice_index = tl.program_id(0), tl.program_id(1)
    k_threshold = _k_threshold(k_masses_ptr, row, top_k_ptr, V, num_rows)
    key, units = _keys_and_units(
        logits_ptr, logits_stride, V, row, slice_index, highest_ptr, temperature_ptr, min_p_ptr, k_threshold, SLICE
    )
    threshold = _p_threshold(p_masses_ptr, row, tl.load(top_p_ptr + row), tl.load(total_ptr + row), num_rows)
    is_tie = (key == threshold) & (units > 0)
    at = row * tl.num_programs(1) + slice_index
    tl.store(above_ptr + at, tl.sum(tl.where(key > threshold, units, 0), axis=0))
    tl.store(ties_ptr + at, tl.sum(is_tie.to(tl.int64), axis=0))
    tl.store(tie_units_ptr + at, tl.max(tl.where(is_tie, units, 0), axis=0))


@triton.jit
def _share(uniform, total):
    """uniform * total with all bits: 53 bits times 63 bits, shifted right by 53. It is computed in int64 halves."""
    u = (uniform * 9007199254740992.0).to(tl.int64)  # 2^53
    u_high, u_low = u >> 26, u & ((1 << 26) - 1)
    total_high, total_low = total >> 27, total & ((1 << 27) - 1)
    low = u_high * total_low + ((u_low * total_low) >> 26)
    return u_high * total_high + (((low >> 1) + u_low * total_high) >> 26)


@triton.jit
def _draw_kernel(
    logits_ptr,
    logits_stride,
    V,
    highest_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    k_masses_ptr,
    top_p_ptr,
    total_ptr,
    p_masses_ptr,
    above_ptr,
    ties_ptr,
    tie_units_ptr,
    uniform_ptr,
    greedy_ptr,
    token_ptr,
    num_rows,
    num_slices,
    smallest_temperature,
    SLICE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Draw by inverse CDF over ascending token ids. It finds the slice first, and then the token in the slice."""
    row = tl.program_id(0)
    highest = tl.load(highest_ptr + row)
    if tl.load(temperature_ptr + row) < smallest_temperature:
        tl.store(token_ptr + row, tl.load(greedy_ptr + row))
        return
    if (highest != highest) | (tl.abs(highest) == float("inf")):
        tl.store(token_ptr + row, tl.full([], -1, tl.int64))
        return
    total, top_p = tl.load(total_ptr + row), tl.load(top_p_ptr + row)
    b = tl.arange(0, BLOCK_B)
    is_slice = b < num_slices
    above_B = tl.load(above_ptr + row * num_slices + b, mask=is_slice, other=0)
    ties_B = tl.load(ties_ptr + row * num_slices + b, mask=is_slice, other=0)
    tie_units = tl.max(tl.load(tie_units_ptr + row * num_slices + b, mask=is_slice, other=0), axis=0)
    missing = _wanted_units(total, top_p) - tl.sum(above_B, axis=0)
    num_ties_kept = (missing + tl.maximum(tie_units, 1) - 1) // tl.maximum(tie_units, 1)
    kept_B = tl.minimum(tl.maximum(num_ties_kept - (tl.cumsum(ties_B, axis=0) - ties_B), 0), ties_B)
    units_B = above_B + kept_B * tie_units
    ends_B = tl.cumsum(units_B, axis=0)
    target = _share(tl.load(uniform_ptr + row), tl.sum(units_B, axis=0))
    chosen = tl.sum(((ends_B <= target) & is_slice).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(b == chosen, ends_B - units_B, 0), axis=0)
    ties_left = tl.sum(tl.where(b == chosen, kept_B, 0), axis=0)

    k_threshold = _k_threshold(k_masses_ptr, row, top_k_ptr, V, num_rows)
    key, units = _keys_and_units(
        logits_ptr, logits_stride, V, row, chosen, highest_ptr, temperature_ptr, min_p_ptr, k_threshold, SLICE
    )
    threshold = _p_threshold(p_masses_ptr, row, top_p, total, num_rows)
    is_tie = (key == threshold) & (units > 0)
    is_kept = (key > threshold) | (is_tie & (tl.cumsum(is_tie.to(tl.int64), axis=0) <= ties_left))
    ends = tl.cumsum(tl.where(is_kept, units, 0), axis=0)
    token = chosen * SLICE + tl.sum((ends <= target).to(tl.int32), axis=0)
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit
def _forbid_kernel(logits_ptr, masks_ptr, rows_ptr, logits_stride, V, SLICE: tl.constexpr):
    """Write -inf where the bit of a token is 0. Other logits are not touched."""
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    tokens = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    is_token = tokens < V
    words = tl.load(masks_ptr + mask * tl.cdiv(V, 32) + tokens // 32, mask=is_token, other=-1)
    is_forbidden = is_token & ((words >> (tokens % 32)) & 1 == 0)
    tl.store(logits_ptr + row * logits_stride + tokens, float("-inf"), mask=is_forbidden)


def forbid_tokens(logits_RV: Tensor, masks_MW: Tensor, rows_M: Tensor, slice_size: int = SLICE) -> None:
    """See ops.forbid_tokens. Row numbers are not checked, because the host would have to wait for the device."""
    V = logits_RV.shape[1]
    grid = (len(rows_M), ceil_div(V, slice_size))
    _forbid_kernel[grid](
        logits_ptr=logits_RV,
        masks_ptr=masks_MW,
        rows_ptr=rows_M,
        **row_strides(logits=logits_RV),
        V=V,
        SLICE=slice_size,
    )


def _highest(logits_RV: Tensor, tokens_R: Tensor, slice_size: int) -> Tensor:
    R, V = logits_RV.shape
    B, device = ceil_div(V, slice_size), logits_RV.device
    highest_RB = torch.empty((R, B), dtype=torch.float32, device=device)
    tokens_RB = torch.empty((R, B), dtype=torch.int32, device=device)
    highest_R = torch.empty(R, dtype=torch.float32, device=device)
    of_slices = {"highest_ptr": highest_RB, "token_ptr": tokens_RB}
    _highest_kernel[(R, B)](logits_ptr=logits_RV, **row_strides(logits=logits_RV), V=V, **of_slices, SLICE=slice_size)
    _join_highest_kernel[(R,)](
        **of_slices, row_highest_ptr=highest_R, row_token_ptr=tokens_R, num_slices=B, BLOCK_B=next_power_of_2(B)
    )
    return highest_R


def greedy(logits_RV: Tensor, token_ids_R: Tensor, slice_size: int = SLICE) -> None:
    """See ops.greedy."""
    _highest(logits_RV, token_ids_R, slice_size)


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    uniform_R: Tensor,
    token_ids_R: Tensor,
    slice_size: int = SLICE,
) -> None:
    """See ops.sample. Parameters of rows are not checked, because the host would have to wait for the device."""
    R, V = logits_RV.shape
    B, device = ceil_div(V, slice_size), logits_RV.device
    greedy_R = torch.empty_like(token_ids_R)
    highest_R = _highest(logits_RV, greedy_R, slice_size)
    k_masses, p_masses = torch.zeros((2, _ROUNDS.value, R, _PIVOTS.value), dtype=torch.int64, device=device)
    total_R = torch.zeros(R, dtype=torch.int64, device=device)
    above_RB, ties_RB, tie_units_RB = torch.empty((3, R, B), dtype=torch.int64, device=device)
    by_k = {
        **{"logits_ptr": logits_RV, "V": V, "top_k_ptr": top_k_R, "k_masses_ptr": k_masses, "num_rows": R},
        **row_strides(logits=logits_RV),
        "SLICE": slice_size,
    }
    of_units = {"highest_ptr": highest_R, "temperature_ptr": temperature_R, "min_p_ptr": min_p_R, "total_ptr": total_R}
    kept_by_k = {**by_k, **of_units}
    kept = {**kept_by_k, "top_p_ptr": top_p_R, "p_masses_ptr": p_masses}
    of_slices = {"above_ptr": above_RB, "ties_ptr": ties_RB, "tie_units_ptr": tie_units_RB}
    grid = (R, B)
    for i in range(_ROUNDS.value):
        _search_k_kernel[grid](**by_k, ROUND=i)
    _total_kernel[grid](**kept_by_k)
    for i in range(_ROUNDS.value):
        _search_p_kernel[grid](**kept, ROUND=i)
    _weigh_slices_kernel[grid](**kept, **of_slices)
    _draw_kernel[(R,)](
        **kept,
        **of_slices,
        uniform_ptr=uniform_R,
        greedy_ptr=greedy_R,
        token_ptr=token_ids_R,
        num_slices=B,
        smallest_temperature=SMALLEST_TEMPERATURE,
        BLOCK_B=next_power_of_2(B),
    )
