"""The comparison at one position of a text: two models' distributions of the next token, and the token that follows.

Dimensions: X positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# This number of positions is compared at a time. The scratch is a few float64 tensors [X, V], each of 10 MB with a
# vocabulary of 152k.
_ROWS = 8


@dataclass(frozen=True)
class Positions:
    """Some positions of a text. Every tensor is float64 [X]; logarithms are in nats."""

    base_nll: Tensor  # -log p(next token) of the base
    nll: Tensor  # -log p(next token) of the model
    kl: Tensor  # sum over tokens v of p_base(v) (log p_base(v) - log p_model(v))
    agrees: Tensor  # 1.0 if both models find the same token most likely, else 0.0

    @staticmethod
    def joined(parts: list[Positions]) -> Positions:
        """The positions of all parts, in order."""
        return Positions(*(torch.cat([getattr(part, name) for part in parts]) for name in Positions.__annotations__))

    def __len__(self) -> int:
        return len(self.nll)


def compare(base_XV: Tensor, model_XV: Tensor, next_X: Tensor) -> Positions:
    """Compare two models' logits at the same positions over the whole vocabulary.

    It computes in float64, because a divergence is a difference of sums near 1, and good formats have divergences of
    1e-5.

    Args:
        base_XV: logits of the base, floating point.
        model_XV: logits of the model, floating point.
        next_X: the ids of the tokens that follow the positions, int64.
    """
    assert base_XV.shape == model_XV.shape, f"{tuple(base_XV.shape)} against {tuple(model_XV.shape)}"
    parts = []
    chunks = (torch.split(x, _ROWS) for x in (base_XV, model_XV, next_X))
    for base, model, next_tokens in zip(*chunks, strict=True):
        log_p, log_q = (logits.double().log_softmax(-1) for logits in (base, model))
        column = next_tokens[:, None]
        parts.append(
            Positions(
                base_nll=-log_p.gather(1, column)[:, 0],
                nll=-log_q.gather(1, column)[:, 0],
                kl=(log_p.exp() * (log_p - log_q)).sum(-1),
                agrees=(base.argmax(-1) == model.argmax(-1)).double(),
            )
        )
    return Positions.joined(parts)
