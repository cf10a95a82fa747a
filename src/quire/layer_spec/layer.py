"""One layer of a model: its parts, and the norms around them. No torch.

The costs of a model are sums over its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire.layer_spec.attention import Attention, Full
from quire.layer_spec.feed_forward import Experts, FeedForward
from quire.layer_spec.kv_spec import KvSpec
from quire.layer_spec.shapes import LinearShape, NormShape


class Norms(NamedTuple):
    """Norms around one part of a layer: the norm of its input, and the norm of its addition to the residual stream."""

    before: NormShape | None = None
    after: NormShape | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: attention, then a feed-forward part. Each adds to the residual stream, and each may be missing.

    Attributes:
        residual_multiplier: a factor of both additions.
    """

    attention: Attention | None
    feed_forward: FeedForward | None
    attention_norms: Norms = Norms()
    feed_forward_norms: Norms = Norms()
    residual_multiplier: float = 1.0

    @property
    def kv_spec(self) -> KvSpec | None:
        """The content of the cache for this layer; None: there is none."""
        return None if self.attention is None else self.attention.kv_spec

    @property
    def parts(self) -> tuple[tuple[Attention | FeedForward, Norms], ...]:
        """The parts of the layer in order, with the norms around them."""
        parts = ((self.attention, self.attention_norms), (self.feed_forward, self.feed_forward_norms))
        return tuple((part, norms) for part, norms in parts if part is not None)

    def linears(self) -> Iterator[LinearShape]:
        """All linear layers; layers with the same input are fused."""
        for part, _ in self.parts:
            yield from part.linears

    def active_linears(self) -> Iterator[LinearShape]:
        """The linear layers that one token uses."""
        for part, _ in self.parts:
            yield from part.active_linears if isinstance(part, Experts) else part.linears

    def num_router_biases(self) -> int:
        """The number of float32 elements that add to the scores of experts."""
        return self.feed_forward.router.num_biases if isinstance(self.feed_forward, Experts) else 0

    def num_norm_elements(self) -> int:
        """The number of elements of all norms, and of sinks."""
        around = [norm for _, norms in self.parts for norm in norms if norm is not None]
        num_sinks = self.attention.num_q_heads if isinstance(self.attention, Full) and self.attention.sinks else 0
        norms = (*around, *(() if self.attention is None else self.attention.norms))
        return sum(norm.num_elements for norm in norms) + num_sinks
