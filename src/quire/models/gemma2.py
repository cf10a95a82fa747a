"""Gemma 2: norms on both sides of each part, with weights around zero; scaled embeddings, every other layer a window.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.layers.norm import RMSNorm
from quire.models.block import LayerBuilder
from quire.models.family import Family


class SandwichBlock:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, build: LayerBuilder) -> None:
        input_norm = build.norm(build.spec.attention_norms.before)
        self.input_norm: RMSNorm | None = input_norm
        self.next_norm: RMSNorm | None = None
        self.attention = build.attention()
        self.after_attention = build.norm(build.spec.attention_norms.after)
        self.mlp_norm = build.norm(build.spec.feed_forward_norms.before)
        self.mlp = build.mlp()
        self.after_mlp = build.norm(build.spec.feed_forward_norms.after)
        input_norm.feeds, self.mlp_norm.feeds = self.attention.qkv, self.mlp.gate_up

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows:
        assert self.next_norm is not None
        y_TD = self.attention(x_TD, batch)
        y_TD = self.mlp(self.mlp_norm.add(self.after_attention(y_TD, out=y_TD), residual_TD))
        return self.next_norm.add(self.after_mlp(y_TD, out=y_TD), residual_TD)


FAMILY = Family(architectures=("Gemma2ForCausalLM",), block=SandwichBlock, norm_offset=1.0)
