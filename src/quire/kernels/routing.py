"""The routing of tokens to experts: the rule of a model, and its result for the tokens of a step.

Dimensions: T tokens, E experts, S slots (active experts of a token), P = T * S pairs of a token and a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from quire.kernels import cpu


@dataclass(frozen=True)
class RoutingRule:
    """How router logits give experts and weights.

    Attributes:
        num_experts: E.
        num_active: S.
        scoring: how logits become scores.
            `softmax`: a softmax over all experts.
            `sigmoid`: the sigmoid of each logit.
            `softmax_of_chosen`: the choice is by logits, and the weights are a softmax over the chosen experts.
            `sparsemixer`: each slot in turn takes the largest logit among the remaining experts. Its weight is from a
            softmax over the remaining experts that are near it (Phi-3.5-MoE, arXiv 2310.00811).
        num_groups: the number of groups. They have equal sizes and lie side by side.
        num_active_groups: a token's experts come from this number of best groups.
        group_score: the score of a group. `max`: the score of its best expert; `top2`: the sum of its best two.
        normalizes: whether the weights of a token are divided by their sum.
        scale: multiplies the weights at the end.
        jitter: for sparsemixer. A logit x is near the largest one if (largest - x) / max(|x|, largest) <= 2 * jitter.

    Raises:
        ValueError: a number or a name is out of its range.
    """

    num_experts: int
    num_active: int
    scoring: str = "softmax"
    num_groups: int = 1
    num_active_groups: int = 1
    group_score: str = "max"
    normalizes: bool = False
    scale: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        E, groups, active_groups = self.num_experts, self.num_groups, self.num_active_groups
        for name, value, legal in (
            ("scoring", self.scoring, cpu.SCORING_CODES),
            ("group_score", self.group_score, cpu.GROUP_SCORE_CODES),
        ):
            if value not in legal:
                raise ValueError(f"the {name} is {value!r}, expected one of {', '.join(legal)}")
        if not (E >= 1 and groups >= 1 and E % groups == 0):
            raise ValueError(f"{E} experts in {groups} groups, expected groups of equal size")
        if not 1 <= active_groups <= groups:
            raise ValueError(f"{active_groups} of {groups} groups are active, expected 1 to {groups}")
        if not 1 <= self.num_active <= E // groups * active_groups:
            most = E // groups * active_groups
            raise ValueError(f"{self.num_active} experts are active, expected 1 to the {most} of the active groups")
        if self.group_score == "top2" and groups > 1 and E // groups < 2:
            raise ValueError(f"groups of {E // groups} expert, expected 2 or more for the score top2")
        if self.scoring == "sparsemixer" and groups > 1:
            raise ValueError(f"{groups} groups with the scoring sparsemixer, expected 1")
        if not self.jitter >= 0:
            raise ValueError(f"the jitter is {self.jitter}, expected 0 or more")

    @cached_property
    def compiled(self) -> cpu._C.RoutingRule:
        """The struct of the CPU kernels."""
        return cpu.routing_rule(self)

    @property
    def chooses_by_logits(self) -> bool:
        """Whether experts are chosen by logits and not by scores.

        Without a bias, scores have the same order as logits, but rounding can make scores equal.
        """
        return self.num_groups == 1 or self.group_score == "max"


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts of the tokens of a step. Pairs of a token and a slot are sorted by the places of their experts.

    The place of an expert is its number, unless ranks share the experts. Then each rank has some neighbouring places.

    Attributes:
        experts_TS: int32, in descending order of their scores.
        weights_TS: float32. They are NaN in a row with a logit that was not finite.
        order_P: int32, the pairs t * S + s, sorted by the place of their expert and then by their number.
        begins: int32 [number of places + 1]. Place e has the pairs order_P[begins[e]] to order_P[begins[e + 1] - 1].
    """

    experts_TS: Tensor
    weights_TS: Tensor
    order_P: Tensor
    begins: Tensor

    @property
    def num_tokens(self) -> int:
        return self.experts_TS.shape[0]

    @property
    def num_slots(self) -> int:
        return self.experts_TS.shape[1]
