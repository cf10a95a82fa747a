"""The parameters of a layer's rotation and attention. They are made once and do not change from step to step.

Dimensions: E head_dim, P positions of the rotary table, R rotary dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.guards import check_contiguous, check_dtype, check_filled


@dataclass(frozen=True)
class AttentionRule:
    """How attention turns products of q and k into weights.

    Attributes:
        scale: the factor of the products, above 0.
        sliding_window: a token at position p sees the positions p - sliding_window + 1 to p; 0: it sees 0 to p.
        soft_cap: a score becomes soft_cap * tanh(score / soft_cap); 0: it does not change.
        chunk: a token sees only positions of its own chunk of this size, up to its own position; 0: there are no
            chunks. A rule with chunks has no window.

    Raises:
        ValueError: a number is out of its range.
    """

    scale: float
    sliding_window: int = 0
    soft_cap: float = 0.0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.chunk < 0 or (self.chunk > 0 and self.sliding_window > 0):
            numbers = f"chunk {self.chunk}, sliding_window {self.sliding_window}"
            raise ValueError(f"{numbers}: expected neither of them below 0, and one of them 0")
        if not (self.scale > 0 and self.sliding_window >= 0 and self.soft_cap >= 0):
            numbers = f"scale {self.scale}, sliding_window {self.sliding_window}, soft_cap {self.soft_cap}"
            raise ValueError(f"{numbers}: expected a scale above 0, and neither of the others below 0")

    @cached_property
    def compiled(self) -> cpu._C.AttentionRule:
        """The form of the CPU kernels."""
        return cpu.attention_rule(self.scale, self.sliding_window, self.soft_cap, self.chunk)

    def first_visible(self, positions: Tensor) -> Tensor:
        """The first position that a token at each of these positions sees."""
        if self.chunk > 0:
            return positions // self.chunk * self.chunk
        return (positions - self.sliding_window + 1).clamp(min=0) if self.sliding_window > 0 else positions * 0


@dataclass(frozen=True, eq=False)
class LatentRotation:
    """The rotation of latent attention.

    Attributes:
        cos_sin_PR: float32 rows [R / 2 cosines, R / 2 sines], contiguous.
        is_interleaved: which dimensions of q and of rows form a pair. True: 2 i and 2 i + 1. False: i and i + R / 2.

    Raises:
        ValueError: the table has another form.
    """

    cos_sin_PR: Tensor
    is_interleaved: bool

    def __post_init__(self) -> None:
        check_dtype("cos_sin", self.cos_sin_PR, torch.float32)
        check_filled("cos_sin", self.cos_sin_PR, "PR")
        check_contiguous(cos_sin=self.cos_sin_PR)
        if self.cos_sin_PR.shape[0] == 0 or self.cos_sin_PR.shape[1] % 2:
            raise ValueError(f"cos_sin is {list(self.cos_sin_PR.shape)}, expected [P, R] with R even, P above 0")


@dataclass(frozen=True, eq=False)
class HeadRotation:
    """The RMS norm of each head of q and k, and then its rotation.

    Attributes:
        cos_sin_PR: float32 rows [R / 2 cosines, R / 2 sines], contiguous; None: no rotation.
        q_norm_weight_E, k_norm_weight_E: dtype of q, or float32; None: no norm.
        norm_eps: the epsilon of both norms.
        norm_weight_offset: added to the weights.
        temperature: q at position p is multiplied by 1 + temperature * log(1 + floor((p + 1) / temperature_floor)), for
            long contexts (Llama 4; arXiv 2501.19399). 0: it is not multiplied.
        temperature_floor: tokens, above 0.
    """

    cos_sin_PR: Tensor | None = None
    q_norm_weight_E: Tensor | None = None
    k_norm_weight_E: Tensor | None = None
    norm_eps: float = 0.0
    norm_weight_offset: float = 0.0
    temperature: float = 0.0
    temperature_floor: float = 1.0

    @cached_property
    def compiled(self) -> cpu._C.HeadRotation:
        """The form of the CPU kernels."""
        return cpu.head_rotation(self)
