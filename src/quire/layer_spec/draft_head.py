"""A head that drafts from the hidden states of another model. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.layer_spec.shapes import LinearShape, NormShape


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A head drafts from the hidden states of another model, its target. Its ModelConfig has its own layers.

    At each position it reads the target's hidden state at this position and the embedding of the next token.

    Attributes:
        kind: `eagle3`: the first layer's attention reads both side by side, and the hidden state is the residual
            stream. `mtp`: `input` makes the residual stream of both.
        streams: the hidden state is made of the target's residual streams before these layers. The number of all layers
            means the stream after the last layer.
        stream_size: elements of one stream.
        input: `eagle3`: the streams to the hidden state. `mtp`: hidden state and embedding to the residual stream.
        norms: the norms of the embedding, and of the hidden state.
        token_first: mtp: `input` reads the embedding before the hidden state, and not behind it.
        reads_normed: mtp: the hidden state is the result of the target's final norm, and not the stream before it.
        norm_before_residual: eagle3: the residual stream begins with the norm of the hidden state.
        num_tokens: tokens that it can draft.
        maps_tokens: whether a table has the target's ids of these tokens. If not, they are the target's first tokens.
        owns_embeddings, owns_output: whether the head has embeddings and an output layer of its own. If not, it uses
            the target's.
    """

    kind: Literal["eagle3", "mtp"]
    streams: tuple[int, ...]
    stream_size: int
    input: LinearShape
    norms: tuple[NormShape, NormShape]
    token_first: bool = False
    reads_normed: bool = False
    norm_before_residual: bool = False
    num_tokens: int
    maps_tokens: bool = False
    owns_embeddings: bool = False
    owns_output: bool = False

    @property
    def hidden_width(self) -> int:
        """The number of elements of all streams of a token."""
        return len(self.streams) * self.stream_size
