"""Gemma 2: norms on both sides of each part, with weights around zero; scaled embeddings, every other layer a window.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from quire.forward_batch import ForwardBatch
from quire.layers.norm import RMSNorm
from quire.models.block import LayerBuilder
from quire.models.family import Family


class SandwichBlock:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, build: LayerBuilder) -> None:
        self.input_norm: RMSNorm | None = build.norm("input_layernorm")
        self.next_norm: RMSNorm | None = None
        self.attention = build.attention()
        self.after_attention = build.norm("post_attention_layernorm")
        self.mlp_norm = build.norm("pre_feedforward_layernorm")
        self.mlp = build.mlp()
        self.after_mlp = build.norm("post_feedforward_layernorm")

    def __call__(self, x_TD: Tensor, residual_TD: Tensor, batch: ForwardBatch) -> Tensor:
        assert self.next_norm is not None
        x_TD = self.attention(x_TD, batch)
        x_TD = self.mlp_norm.add(self.after_attention(x_TD, out=x_TD), residual_TD)
        x_TD = self.mlp(x_TD)
        return self.next_norm.add(self.after_mlp(x_TD, out=x_TD), residual_TD)


FAMILY = Family(architectures=("Gemma2ForCausalLM",), block=SandwichBlock, norm_offset=1.0)
