"""Twins of the ops of experts in plain torch: see reference.py.

Dimensions: see experts.py; G groups of experts.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from quire.kernels.reference import check_indices
from quire.kernels.routing import Routing, RoutingRule

_SMALLEST_SUM = 1e-20  # added to sums of weights, so that weights stay zero if all scores are zero


def route(
    logits_TE: Tensor,
    rule: RoutingRule,
    bias_E: Tensor | None,
    places_EC: Tensor | None = None,
    num_places: int | None = None,
) -> Routing:
    """See experts.route."""
    experts_TS, weights_TS = (
        _sparsemixer(logits_TE, rule) if rule.scoring == "sparsemixer" else _chosen(logits_TE, rule, bias_E)
    )
    if rule.normalizes:
        weights_TS = weights_TS / (weights_TS.sum(1, keepdim=True) + _SMALLEST_SUM)
    is_broken_T1 = ~logits_TE.isfinite().all(1, keepdim=True)
    first_S = torch.arange(rule.num_active, device=logits_TE.device)
    experts_TS = torch.where(is_broken_T1, first_S, experts_TS)
    weights_TS = torch.where(is_broken_T1, math.nan, weights_TS * rule.scale)
    places_P = experts_TS.flatten()
    if places_EC is not None:
        turns_T = torch.arange(len(logits_TE), device=logits_TE.device) % places_EC.shape[1]
        places_P = places_EC[experts_TS, turns_T[:, None]].flatten()
    order_P = places_P.argsort(stable=True)
    ends = places_P.bincount(minlength=rule.num_experts if num_places is None else num_places).cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends])
    return Routing(experts_TS.to(torch.int32), weights_TS, order_P.to(torch.int32), begins.to(torch.int32))


def _chosen(logits_TE: Tensor, rule: RoutingRule, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """The experts and their weights, [T, S]."""
    match rule.scoring:
        case "softmax":
            scores_TE = logits_TE.softmax(1)
        case "sigmoid":
            scores_TE = logits_TE.sigmoid()
        case _:
            scores_TE = logits_TE
    if bias_E is not None:
        choice_TE = scores_TE + bias_E
    else:
        choice_TE = logits_TE if rule.chooses_by_logits else scores_TE
    if rule.num_active_groups < rule.num_groups:
        choice_TE = _in_best_groups(choice_TE, rule)
    # The sort is stable, so the lower one of equal experts comes first.
    experts_TS = choice_TE.sort(dim=1, descending=True, stable=True).indices[:, : rule.num_active]
    weights_TS = scores_TE.gather(1, experts_TS)
    return experts_TS, weights_TS.softmax(1) if rule.scoring == "softmax_of_chosen" else weights_TS


def _in_best_groups(choice_TE: Tensor, rule: RoutingRule) -> Tensor:
    """The scores, with -inf for experts that are not in the best groups."""
    choice_TGX = choice_TE.view(len(choice_TE), rule.num_groups, -1)
    best_TG = choice_TGX.amax(2) if rule.group_score == "max" else choice_TGX.topk(2, 2).values.sum(2)
    order_TG = best_TG.sort(dim=1, descending=True, stable=True).indices
    is_active_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter(1, order_TG[:, : rule.num_active_groups], True)
    return choice_TGX.masked_fill(~is_active_TG[:, :, None], -math.inf).flatten(1)


def _sparsemixer(logits_TE: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    left_TE, experts, weights = logits_TE, [], []
    for _ in range(rule.num_active):
        largest_T1, expert_T1 = left_TE.max(1, keepdim=True)
        expert_T1 = (left_TE == largest_T1).long().argmax(1, keepdim=True)  # the lowest of equal experts
        is_far_TE = (largest_T1 - left_TE) / torch.maximum(logits_TE.abs(), largest_T1) > 2 * rule.jitter
        near_TE = left_TE.masked_fill(is_far_TE, -math.inf)
        experts.append(expert_T1)
        weights.append(near_TE.softmax(1).gather(1, expert_T1))
        left_TE = left_TE.scatter(1, expert_T1, -math.inf)
    return torch.cat(experts, 1), torch.cat(weights, 1)


def check_pairs(routing: Routing) -> list[int]:
    """The numbers of `begins`. Raises IndexError or ValueError if they do not cut the pairs into ranges of places."""
    P = len(routing.order_P)
    check_indices("order", routing.order_P, P)
    check_indices("begins", routing.begins, P + 1)
    begins: list[int] = routing.begins.tolist()
    for e, (begin, end) in enumerate(pairwise(begins)):
        if begin > end:
            raise ValueError(f"begins[{e + 1}] is {end}, expected {begin} or more, like the number before it")
    if (begins[0], begins[-1]) != (0, P):
        raise ValueError(f"begins go from {begins[0]} to {begins[-1]}, expected 0 to {P}")
    return begins


def combine(y_PD: Tensor, routing: Routing, shared_TD: Tensor | None, shared_gate_T1: Tensor | None) -> Tensor:
    """See experts.combine."""
    T, S = routing.experts_TS.shape
    y_TSD = torch.empty_like(y_PD).index_copy_(0, routing.order_P.long(), y_PD).view(T, S, -1)
    out_TD = y_PD.new_zeros((T, y_PD.shape[1]), dtype=torch.float32)
    for s in range(S):
        out_TD += routing.weights_TS[:, s, None] * y_TSD[:, s].float()
    if shared_TD is not None:
        shared = shared_TD.float()
        out_TD += shared if shared_gate_T1 is None else shared_gate_T1.sigmoid() * shared
    return out_TD.to(y_PD.dtype)
