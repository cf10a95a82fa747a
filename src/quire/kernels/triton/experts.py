"""Routes tokens to experts and adds their results up: see kernels.experts. Products are in dense, fp8 and grouped.

Dimensions: T tokens, E experts, S slots, P = T * S pairs, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import Routing, RoutingRule
from quire.kernels.triton.launch import ceil_div, next_power_of_2, row_strides

_BLOCK_P = 1024
_BLOCK_D = 1024


@triton.jit
def _best(choice, e, is_left):
    """The largest of the remaining numbers, and the lowest index that has it."""
    largest = tl.max(tl.where(is_left, choice, float("-inf")), axis=0)
    return largest, tl.min(tl.where(is_left & (choice == largest), e, 1 << 30), axis=0)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    weights_ptr,
    copies_ptr,
    places_ptr,
    logits_stride,
    E,
    num_copies,
    scale,
    jitter,
    S: tl.constexpr,
    SCORING: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    IS_TOP2: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A program takes one row. `copies_ptr`: the places of the copies of each expert, [E, num_copies]."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    is_e = e < E
    x = tl.load(logits_ptr + row * logits_stride + e, mask=is_e, other=0.0)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=0) > 0
    x = tl.where(is_finite, x, 0.0)
    if SCORING == "softmax":
        exps = tl.where(is_e, tl.exp(x - tl.max(tl.where(is_e, x, float("-inf")), axis=0)), 0.0)
        scores = exps / tl.sum(exps, axis=0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = x
    choice = scores if GROUPS > 1 and IS_TOP2 else x
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + e, mask=is_e, other=0.0)
    is_left = is_e
    if ACTIVE_GROUPS < GROUPS:
        group = e // (E // GROUPS)
        # For each expert, the score of its group.
        group_scores = tl.zeros([BLOCK_E], tl.float32)
        for g in tl.static_range(GROUPS):
            is_member = is_e & (group == g)
            score, best = _best(choice, e, is_member)
            if IS_TOP2:
                score += _best(choice, e, is_member & (e != best))[0]
            group_scores = tl.where(group == g, score, group_scores)
        is_active = e < 0
        for _ in tl.static_range(ACTIVE_GROUPS):
            best = _best(group_scores, e, is_e & (is_active == 0))[1]
            is_active = is_active | (group == best // (E // GROUPS))
        is_left = is_e & is_active
    slot = tl.arange(0, BLOCK_S)
    experts = tl.zeros([BLOCK_S], tl.int32)
    weights = tl.zeros([BLOCK_S], tl.float32)
    for s in tl.static_range(S):
        largest, best = _best(choice, e, is_left)
        if SCORING == "sparsemixer":
            is_near = is_left & ((largest - x) / tl.maximum(tl.abs(x), largest) <= 2 * jitter)
            is_near = is_near | (is_left & (x == largest))  # the quotient is 0 / 0 if both are 0
            weight = 1.0 / tl.sum(tl.where(is_near, tl.exp(x - largest), 0.0), axis=0)
        else:
            weight = tl.sum(tl.where(e == best, scores, 0.0), axis=0)
        experts = tl.where(slot == s, best, experts)
        weights = tl.where(slot == s, weight, weights)
        is_left = is_left & (e != best)
    if SCORING == "softmax_of_chosen":
        largest = tl.max(tl.where(slot < S, weights, float("-inf")), axis=0)
        weights = tl.where(slot < S, tl.exp(weights - largest), 0.0)
        weights = weights / tl.sum(weights, axis=0)
    if NORMALIZES:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    experts = tl.where(is_finite, experts, slot)
    weights = tl.where(is_finite, weights * scale, float("nan"))
    tl.store(experts_ptr + row * S + slot, experts, mask=slot < S)
    tl.store(weights_ptr + row * S + slot, weights, mask=slot < S)
    if copies_ptr is not None:
        places = tl.load(copies_ptr + experts * num_copies + row % num_copies, mask=slot < S, other=0)
        tl.store(places_ptr + row * S + slot, places, mask=slot < S)


@triton.jit(do_not_specialize=["P"])
def _sort_kernel(places_ptr, order_ptr, begins_ptr, P, BLOCK_P: tl.constexpr):
    """Program e writes the pairs of place e, in order, after the pairs of all places with lower numbers."""
    place = tl.program_id(0)
    p = tl.arange(0, BLOCK_P)
    before = tl.zeros([BLOCK_P], tl.int32)
    for start in range(0, P, BLOCK_P):
        places = tl.load(places_ptr + start + p, mask=start + p < P, other=1 << 30)
        before += (places < place).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(begins_ptr + place, at)
    for start in range(0, P, BLOCK_P):
        is_own = tl.load(places_ptr + start + p, mask=start + p < P, other=1 << 30) == place
        count = is_own.to(tl.int32)
        tl.store(order_ptr + at + tl.cumsum(count, axis=0) - 1, start + p, mask=is_own)
        at += tl.sum(count, axis=0)


def route(
    logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None, routing: Routing, places_EC: Tensor | None = None
) -> None:
    """See kernels.experts.route. Rows of the logits may be strided."""
    T, S = routing.experts_TS.shape
    places_TS = routing.experts_TS if places_EC is None else torch.empty_like(routing.experts_TS)
    if T > 0:
        _route_kernel[(T,)](
            logits_ptr=logits_TE,
            bias_ptr=bias_E,
            experts_ptr=routing.experts_TS,
            weights_ptr=routing.weights_TS,
            copies_ptr=places_EC,
            places_ptr=None if places_EC is None else places_TS,
            **row_strides(logits=logits_TE),
            E=rule.num_experts,
            num_copies=1 if places_EC is None else places_EC.shape[1],
            scale=rule.scale,
            jitter=rule.jitter,
            S=S,
            SCORING=rule.scoring,
            GROUPS=rule.num_groups,
            ACTIVE_GROUPS=rule.num_active_groups,
            IS_TOP2=rule.group_score == "top2",
            NORMALIZES=rule.normalizes,
            BLOCK_E=next_power_of_2(rule.num_experts),
            BLOCK_S=next_power_of_2(S),
            num_warps=1,
        )
    _sort_kernel[(len(routing.begins),)](
        places_ptr=places_TS,
        order_ptr=routing.order_P,
        begins_ptr=routing.begins,
        P=T * S,
        BLOCK_P=_BLOCK_P,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["P"])
def _places_kernel(order_ptr, places_ptr, P, BLOCK_P: tl.constexpr):
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_p = p < P
    tl.store(places_ptr + tl.load(order_ptr + p, mask=is_p, other=0), p, mask=is_p)


@triton.jit
def _combine_kernel(
    y_ptr,
    places_ptr,
    weights_ptr,
    shared_ptr,
    gate_ptr,
    out_ptr,
    D,
    y_stride,
    shared_stride,
    gate_stride,
    out_stride,
    S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = d < D
    total = tl.zeros([BLOCK_D], tl.float32)
    for s in range(S):
        place = tl.load(places_ptr + row * S + s).to(tl.int64)
        weight = tl.load(weights_ptr + row * S + s)
        total += weight * tl.load(y_ptr + place * y_stride + d, mask=is_d, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * shared_stride + d, mask=is_d, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row * gate_stride)))
        total += shared
    tl.store(out_ptr + row * out_stride + d, total.to(out_ptr.dtype.element_ty), mask=is_d)


def combine(
    y_PD: Tensor, routing: Routing, shared_TD: Tensor | None, shared_gate_T1: Tensor | None, out_TD: Tensor
) -> None:
    """See kernels.experts.combine. Rows of all tensors except the routing may be strided."""
    (T, S), D = routing.weights_TS.shape, y_PD.shape[1]
    if T == 0:
        return
    places_P = torch.empty_like(routing.order_P)
    _places_kernel[(ceil_div(T * S, _BLOCK_P),)](
        order_ptr=routing.order_P, places_ptr=places_P, P=T * S, BLOCK_P=_BLOCK_P, num_warps=4
    )
    _combine_kernel[(T, ceil_div(D, _BLOCK_D))](
        y_ptr=y_PD,
        places_ptr=places_P,
        weights_ptr=routing.weights_TS,
        shared_ptr=shared_TD,
        gate_ptr=shared_gate_T1,
        out_ptr=out_TD,
        D=D,
        **row_strides(y=y_PD, shared=shared_TD, gate=shared_gate_T1, out=out_TD),
        S=S,
        BLOCK_D=_BLOCK_D,
        num_warps=4,
    )
