"""The decoder every native family shares: embed, blocks, final norm, logits.

Dimensions: T tokens, R rows whose logits are wanted, D hidden, V vocabulary, L positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from quire.attention.select import SharedBackends
from quire.forward_batch import ForwardBatch
from quire.hf_config.rope import RopeConfig
from quire.layers.embedding import Embedding, OutputProjection, TiedEmbedding
from quire.layers.norm import RMSNorm
from quire.layers.rope import cos_sin_table
from quire.layers.weight_slot import WeightSlot
from quire.model_config import ModelConfig
from quire.models.block import LayerBuilder, Weighted
from quire.models.family import Family
from quire.models.weights import WeightTable
from quire.quantization.select import Schemes


class Decoder:
    """A causal language model. Holds no weights until `load_weights`.

    Args:
        config: `max_model_len` bounds the positions (rows of the rotary tables).
        family: what config does not say.
        dtype: of weights, activations and KV cache.
        schemes: formats of the weights.
    """

    def __init__(self, config: ModelConfig, family: Family, dtype: torch.dtype, schemes: Schemes) -> None:
        self.config = config
        self.dtype = dtype
        self._parts: list[tuple[str, Weighted]] = []
        self._backends = SharedBackends(torch.device("cpu"))
        self._embed = self._make_embeddings(schemes)
        self._blocks = [family.block(build) for build in self._layer_builders(family, schemes)]
        final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, family.norm_offset, dtype)
        self._parts.append(("model.norm.", final_norm))
        for block, successor in pairwise(self._blocks):
            block.next_norm = successor.input_norm
        self._blocks[-1].next_norm = final_norm
        self._first_norm = self._blocks[0].input_norm
        # transformers rounds Gemma's factor to the dtype; Granite's are exact in every dtype
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        ignored = family.ignored_prefixes + (("lm_head.",) if config.tie_word_embeddings else ())
        self._weights = WeightTable(self._slots(), family.renamed_prefixes, ignored)

    def _make_embeddings(self, schemes: Schemes) -> Embedding | TiedEmbedding:
        config, dtype = self.config, self.dtype
        if config.tie_word_embeddings:
            self._output = OutputProjection(
                config.hidden_size, config.vocab_size, "embed_tokens", dtype, schemes.output
            )
            self._parts.append(("model.", self._output))
            return TiedEmbedding(self._output)
        self._output = OutputProjection(config.hidden_size, config.vocab_size, "lm_head", dtype, schemes.output)
        table = Embedding(config.vocab_size, config.hidden_size, dtype)
        self._parts += [("", self._output), ("model.embed_tokens.", table)]
        return table

    def _layer_builders(self, family: Family, schemes: Schemes) -> Iterable[LayerBuilder]:
        config = self.config
        tables: dict[RopeConfig, Tensor] = {}
        for layer in range(config.num_layers):
            rope = config.layer_rope(layer)
            if rope is not None and rope not in tables:
                tables[rope] = cos_sin_table(rope, config.max_model_len)
            build = LayerBuilder(
                config=config,
                layer=layer,
                dtype=self.dtype,
                scheme=schemes.linear,
                norm_offset=family.norm_offset,
                has_fused_checkpoint=family.has_fused_checkpoint,
                rope_table=None if rope is None else tables[rope],
                backend=self._backends.get,
            )
            yield build
            self._parts += [(f"model.layers.{layer}.{prefix}", part) for prefix, part in build.parts]

    def _slots(self) -> dict[str, WeightSlot]:
        return {prefix + name: slot for prefix, part in self._parts for name, slot in part.slots()}

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shape by checkpoint name of every tensor `load_weights` needs."""
        return self._weights.expected()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the tensors of a checkpoint by their Hugging Face names, in any order.

        Each layer packs itself when complete. Tensors may be views of mapped files: nothing keeps them. Raises
        WeightsError naming what is missing, unexpected, misshapen or of a foreign dtype.
        """
        self._weights.load(weights)

    def finalize(self) -> None:
        """Every layer has packed itself already; asserts that nothing is missing."""
        assert not self._weights.missing(), f"finalize before load_weights: {self._weights.missing()[:3]}"

    def weight_bytes(self) -> int:
        """Bytes the loaded weights take, padding of packed forms included; rotary tables aside."""
        return sum(part.weight_bytes() for _, part in self._parts)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of the step's tokens, final norm applied. Writes their K and V to `batch.caches`."""
        self._backends.prepare(batch)
        residual_TD = self._embed(batch.token_ids_T)
        if self._embedding_multiplier != 1.0:
            residual_TD *= self._embedding_multiplier
        x_TD = residual_TD if self._first_norm is None else self._first_norm(residual_TD)
        for block in self._blocks:
            x_TD = block(x_TD, residual_TD, batch)
        return x_TD

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """logits_RV in float32, scaled and soft-capped as the family does."""
        logits_RV = self._output.logits(hidden_RD)
        config = self.config
        if config.logits_scaling != 1.0:
            logits_RV /= config.logits_scaling
        if config.logits_soft_cap:
            cap = config.logits_soft_cap
            logits_RV = logits_RV.div_(cap).tanh_().mul_(cap)
        return logits_RV
