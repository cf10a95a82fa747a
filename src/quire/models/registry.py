"""What a model is to the rest of the engine, and the native one of a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import ModelConfigError
from quire.forward_batch import ForwardBatch, HostStep, LayerCache
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder

CPU = torch.device("cpu")


class CausalLM(Protocol):
    """A causal language model on our paged KV cache. T tokens, R rows, D hidden, V vocabulary."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    mapped_bytes: int  # of the weights, in a mapped file: in use, though the system counts them as free

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shape by checkpoint name of every tensor `load_weights` needs (what `--load-format dummy` fills)."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all tensors of the checkpoint by their Hugging Face names. WeightsError names what does not fit."""
        ...

    def finalize(self) -> None:
        """After load_weights, before the first forward."""
        ...

    def weight_bytes(self) -> int:
        """Bytes the loaded weights take."""
        ...

    def prepare(self, step: HostStep, caches: list[LayerCache]) -> None:
        """Host work of a step on a GPU. `forward` does it by itself where the batch has what the host knows."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD with the final norm applied; writes K and V of the step's tokens to batch.caches."""
        ...

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """logits_RV in float32."""
        ...


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str | None = None,
    device: torch.device = CPU,
    attention_backend: str = "auto",
    cache_dtype: torch.dtype | None = None,
) -> Decoder:
    """The native model of a config, without weights yet. `quantization`: a key of ON_LOAD, or None.

    Positions are bounded by `config.max_model_len`: replace it with the length that is served. Raises ModelConfigError
    for an architecture without native implementation.
    """
    if not config.is_native:
        raise ModelConfigError(
            f"{config.model} has an architecture without native implementation",
            value=config.architecture,
            fix="Use --model-impl transformers to run it through transformers' modelling code",
        )
    return Decoder(config, dtype, quantization, device, attention_backend, cache_dtype)
