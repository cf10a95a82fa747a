"""The feed-forward part of a layer with experts.

Dimensions: T tokens, E experts, P pairs of a token and an expert, D hidden, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from math import lcm

import torch
from torch import Tensor

from quire.forward_batch import ForwardBatch
from quire.kernels import ops
from quire.kernels.experts import combine, route
from quire.kernels.fp8 import Rows
from quire.kernels.routing import RoutingRule
from quire.layer_spec.feed_forward import Experts
from quire.layers.linear import Linear
from quire.layers.weight_slot import WeightSlot
from quire.moe.dispatch import Dispatch
from quire.moe.stack import ExchangedStack, ExpertStack, JoinedStack, SplitStack

_EVEN_COPIES = 6  # copies of an expert that get equal numbers of tokens
_FIRST_UNITS = 1024  # rows: more than a recorded or captured step has


class ChoiceBias:
    """The bias that is added to the scores of experts for the choice."""

    held = ("bias_E",)

    def __init__(self, num_experts: int) -> None:
        self.bias_E = torch.empty(num_experts)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        yield "e_score_correction_bias", WeightSlot(tuple(self.bias_E.shape), self._load)

    def _load(self, bias_E: Tensor) -> None:
        self.bias_E = bias_E.to(torch.float32, copy=True)

    def weight_bytes(self) -> int:
        return self.bias_E.nbytes


def places_of(experts_P: Sequence[int], num_experts: int, num_ranks: int) -> Tensor:
    """The places of the copies of each expert, int32 [E, C]. C does not depend on the places.

    A rank has an expert once, so C is a multiple of the number of copies, up to _EVEN_COPIES of them.
    """
    places: list[list[int]] = [[] for _ in range(num_experts)]
    for place, expert in enumerate(experts_P):
        places[expert].append(place)
    most = min(num_ranks, 1 + len(experts_P) - num_experts, _EVEN_COPIES)
    turns = range(lcm(*range(1, most + 1)))
    return torch.tensor([[own[turn % len(own)] for turn in turns] for own in places], dtype=torch.int32)


class MoE:
    """Each token goes through the experts that the router chooses for it. Input [T, D], output [T, D].

    Args:
        router: hidden -> logits.
        shared: the expert for every token.
        shared_gate: hidden -> 1.
        join: joins the ranks' columns of the output; None: there is one rank.
        dispatch: brings the rows of all lanes here; None: there is one lane.
    """

    reader = None  # several layers read the input

    def __init__(
        self,
        spec: Experts,
        router: Linear,
        choice_bias: ChoiceBias | None,
        *,
        gate_up: ExpertStack | SplitStack,
        down: ExpertStack | SplitStack | JoinedStack | ExchangedStack,
        shared: Callable[[Tensor, ForwardBatch], Tensor] | None,
        shared_gate: Linear | None,
        device: torch.device,
        join: Callable[[Tensor], Tensor] | None = None,
        dispatch: Dispatch | None = None,
    ) -> None:
        rule, placement = spec.router, spec.placement
        self.placement, self.stacks = placement, (*gate_up.parts, *down.parts)
        self.num_places, self._own_places = spec.num_routed, None
        self._places_EC: Tensor | None = None
        if placement is not None:
            first, last = placement.firsts[placement.rank : placement.rank + 2]
            self.num_places, self._own_places = placement.num_places, (first, last - first + 1)
            experts_P, num_ranks = tuple(chain(*placement.experts)), len(placement.experts)
            self._places_EC = places_of(experts_P, spec.num_routed, num_ranks).to(device)
        self._rule = RoutingRule(
            num_experts=spec.num_routed,
            num_active=spec.num_active,
            scoring=rule.scoring,
            num_groups=rule.num_groups,
            num_active_groups=rule.num_active_groups,
            group_score=rule.group_score,
            normalizes=rule.normalizes,
            scale=rule.scale,
            jitter=rule.jitter,
        )
        self._router, self._choice_bias = router, choice_bias
        self._gate_up, self._down, self._activation = gate_up, down, spec.expert.activation
        self._weighs_input = rule.weighs_input
        self._units = [torch.ones(_FIRST_UNITS, spec.num_active, device=device)]
        self._shared, self._shared_gate, self._join, self._dispatch = shared, shared_gate, join, dispatch
        self.begins: Tensor | None = None  # takes Routing.begins of each step, for an observer

    def __call__(self, x_TD: Rows, batch: ForwardBatch) -> Tensor:
        assert isinstance(x_TD, Tensor), "no norm quantizes for several readers"
        if self._dispatch is None:
            return self._of_rows(x_TD, batch)
        assert batch.lanes is not None, "a step says what each lane has"
        out_XD = self._of_rows(self._dispatch.to_all(x_TD, batch.lanes), batch)
        return self._dispatch.own(out_XD, batch.lanes)

    def _of_rows(self, x_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """The output for these rows, on all ranks that share the experts."""
        bias_E = None if self._choice_bias is None else self._choice_bias.bias_E
        logits_TE, places_EC, begins = self._router(x_TD, torch.float32), self._places_EC, None
        if places_EC is None:
            routing = route(logits_TE, self._rule, bias_E)
        else:
            routing = route(logits_TE, self._rule, bias_E, places_EC, self.num_places)
            assert self._own_places is not None
            begins = routing.begins.narrow(0, *self._own_places)
        if self.begins is not None:
            self.begins.copy_(routing.begins)
        # No variable holds the wide results, so each of them is freed when it has been read.
        factors: dict[str, Tensor] = {}
        if self._weighs_input:  # the layer before the activation has no bias, so its result may be multiplied instead
            factors = {"factors_F": routing.weights_TS.view(-1), "order_T": routing.order_P}
            routing = replace(routing, weights_TS=self._ones(routing.weights_TS))
        y_PD = self._down(
            ops.gated_activation(
                self._activation, self._gate_up(x_TD, routing, of_tokens=True), begins=begins, **factors
            ),
            routing,
            of_tokens=False,
        )
        shared_TD = None if self._shared is None else self._shared(x_TD, batch)
        gate_T1 = None if self._shared_gate is None else self._shared_gate(x_TD, torch.float32)
        out_TD = combine(y_PD, routing, shared_TD, gate_T1)
        return out_TD if self._join is None else self._join(out_TD)

    def place(self, experts_P: Sequence[int]) -> None:
        """Set the experts at the places of all ranks. The caller has moved their weights."""
        assert self._places_EC is not None and self.placement is not None
        num_experts, num_ranks = self._rule.num_experts, len(self.placement.experts)
        self._places_EC.copy_(places_of(experts_P, num_experts, num_ranks))  # recorded steps read this tensor

    def _ones(self, like_TS: Tensor) -> Tensor:
        """Weights of 1. Memory that was handed out before stays valid, because recorded steps read it."""
        if self._units[-1].shape[0] < like_TS.shape[0]:
            self._units.append(like_TS.new_ones((2 * like_TS.shape[0], like_TS.shape[1])))
        return self._units[-1].narrow(0, 0, like_TS.shape[0])
