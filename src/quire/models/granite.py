"""Granite 3: Llama with factors on embeddings, attention, residual additions and logits.

Dimensions: T tokens, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.models.block import LayerBuilder, PreNormBlock
from quire.models.family import Family


class GraniteBlock(PreNormBlock):
    """x + c * attention(norm(x)), then x + c * mlp(norm(x))."""

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__(build)
        self._multiplier = build.spec.residual_multiplier

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows:
        assert self.next_norm is not None
        x_TD = self.mlp_norm.add(self.attention(x_TD, batch).mul_(self._multiplier), residual_TD)
        return self.next_norm.add(self.mlp(x_TD).mul_(self._multiplier), residual_TD)


FAMILY = Family(architectures=("GraniteForCausalLM",), block=GraniteBlock)
