"""OLMo 2: norms behind attention and MLP instead of before them, and q and k normalised over all heads at once.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.layers.norm import RMSNorm
from quire.models.block import LayerBuilder
from quire.models.family import Family


class PostNormBlock:
    """x + norm(attention(x)), then x + norm(mlp(x)). Attention reads the residual stream itself."""

    input_norm: RMSNorm | None = None

    def __init__(self, build: LayerBuilder) -> None:
        self.next_norm: RMSNorm | None = None  # only the last block gets one: the final norm
        self.attention = build.attention()
        self.after_attention = build.norm(build.spec.attention_norms.after)
        self.mlp = build.mlp()
        self.after_mlp = build.norm(build.spec.feed_forward_norms.after)

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows:
        y_TD = self.attention(x_TD, batch)
        residual_TD += self.after_attention(y_TD, out=y_TD)
        y_TD = self.mlp(residual_TD)
        residual_TD += self.after_mlp(y_TD, out=y_TD)
        return residual_TD if self.next_norm is None else self.next_norm(residual_TD)


FAMILY = Family(architectures=("Olmo2ForCausalLM",), block=PostNormBlock)
