"""The kinds of feed-forward parts that a layer may have: one MLP, or experts. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quire.layer_spec.cuts import Placement
from quire.layer_spec.shapes import LinearShape

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A gated MLP: down(activation(gate) * up).

    Attributes:
        activation: silu, gelu, gelu_tanh or clamped_swiglu.
    """

    gate_up: LinearShape
    down: LinearShape
    activation: str

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self.gate_up, self.down

    @property
    def width(self) -> int:
        """The number of elements between the linear layers, for one token."""
        return self.gate_up.out_features


@dataclass(frozen=True, kw_only=True)
class Router:
    """Chooses the experts of a token from its logits [num_experts], and gives each a weight.

    Attributes:
        linear: hidden -> logits.
        scoring: `softmax`, `sigmoid`: of the logits of all experts. `softmax_of_chosen`: of the logits of the chosen
            experts. `sparsemixer`: see kernels/routing.py.
        has_bias_for_choice: a tensor adds to the scores of all experts, for the choice alone.
        num_groups: the number of equal groups of neighbouring experts. Only experts of the best `num_active_groups`
            are chosen.
        group_score: the score of a group: its largest score, or the sum of its two largest.
        normalizes: weights are divided by their sum.
        scale: factor on the weights.
        jitter: for sparsemixer.
        weighs_input: weights multiply the expert's input instead of its result (Llama 4).
    """

    linear: LinearShape
    scoring: Scoring
    has_bias_for_choice: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    normalizes: bool = False
    scale: float = 1.0
    jitter: float = 0.0
    weighs_input: bool = False

    @property
    def num_biases(self) -> int:
        """The number of elements of the tensor for the choice."""
        return self.linear.out_features if self.has_bias_for_choice else 0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Several MLPs of one shape. A router chooses some of them for every token.

    Attributes:
        expert: the shape of each; its linear layers are stacks of all experts.
        num_active: experts per token.
        shared: an expert for every token; None: there is none.
        shared_gate: hidden -> 1. Its sigmoid multiplies the shared expert's result. None: there is no gate.
    """

    router: Router
    expert: Dense
    num_active: int
    shared: Dense | None = None
    shared_gate: LinearShape | None = None

    @property
    def num_experts(self) -> int:
        """The experts that are held. On a rank, these may be some of the experts that the router chooses from."""
        return self.expert.gate_up.num_experts

    @property
    def num_routed(self) -> int:
        """The number of experts from which the router chooses."""
        return self.router.linear.out_features

    @property
    def num_active_here(self) -> int:
        """The mean number of held experts that a token uses, if tokens go to all experts equally."""
        return -(-self.num_active * self.num_experts // self.num_routed)

    @property
    def placement(self) -> Placement | None:
        """See LinearShape."""
        return self.expert.gate_up.placement

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return self._linears(self.num_experts)

    @property
    def active_linears(self) -> tuple[LinearShape, ...]:
        """The linear layers that one token reads: stacks of the chosen experts."""
        return self._linears(self.num_active_here)

    @property
    def width(self) -> int:
        """The number of elements between the linear layers, for one token."""
        return self.num_active * self.expert.width + (self.shared.width if self.shared else 0)

    def _linears(self, num_experts: int) -> tuple[LinearShape, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        shared = () if self.shared is None else self.shared.linears
        stacks = (replace(linear, num_experts=num_experts) for linear in self.expert.linears)
        return self.router.linear, *stacks, *gate, *shared


FeedForward = Dense | Experts


def distinct_experts(num_experts: int, num_active: int, num_tokens: int) -> float:
    """The expected number of experts that `num_tokens` tokens hit, if all are equally likely."""
    return num_experts * (1.0 - (1.0 - num_active / num_experts) ** num_tokens)
