"""The contract of a model for the rest of the engine, and the native model of a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import ModelConfigError
from quire.forward_batch import ForwardBatch, HostStep, LayerCache
from quire.layers.weight_slot import Extent
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.form import ALONE, ModelForm, Sharing
from quire.models.head import Head


class CausalLM(Protocol):
    """A causal language model on our paged KV cache.

    Dimensions: T tokens, R rows with logits, D hidden, V vocabulary.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    mapped_bytes: int  # bytes of weights in a mapped file: they are in use, but the system counts them as free

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that `load_weights` needs, by checkpoint name. `--load-format dummy` fills them."""
        ...

    def extent(self, checkpoint_name: str) -> Extent | None:
        """The part of a tensor that `load_weights` and `finalize` read; None: they read all of the tensor."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all tensors of the checkpoint by their Hugging Face names.

        Raises:
            WeightsError: some tensors do not fit. The message names them.
        """
        ...

    def finalize(self) -> None:
        """Finish loading. The caller calls it after load_weights and before the first forward."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the loaded weights."""
        ...

    def prepare(self, step: HostStep, caches: list[LayerCache]) -> None:
        """Do the host's work for a step on a GPU. `forward` calls it if the batch has a `host`."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute hidden_TD after the final norm, in `dtype`. Keys and values of the tokens go to batch.caches."""
        ...

    def compute_logits(
        self, hidden_RD: Tensor, adapter_slots_R: Tensor | None = None, owners_R: Tensor | None = None
    ) -> Tensor:
        """Compute logits_RV in float32.

        Args:
            adapter_slots_R: the adapter of each row, as in ForwardBatch.
            owners_R: the rank that gets each row, int32; None: the first rank gets all rows.
        """
        ...


def build_model(
    config: ModelConfig, form: ModelForm, *, target: Decoder | None = None, sharing: Sharing = ALONE
) -> Decoder:
    """The native model of a config, without weights.

    Args:
        config: its `max_model_len` limits the positions. The caller sets it to the length that is served.
        target: the target, if the config describes a head that drafts.

    Raises:
        ModelConfigError: the architecture has no native implementation.
        ConfigError: the attention backend cannot serve a layer.
    """
    if not config.is_native:
        raise ModelConfigError(
            f"{config.model} has an architecture without native implementation",
            value=config.architecture,
            fix="Use --model-impl transformers to run it through transformers' modelling code",
        )
    if config.head is not None and target is not None:
        return Head(config, target, form)
    return Decoder(config, form, sharing)
