"""Runs a model one layer at a time over calibration text. Memory holds a single layer and the residual stream.

Dimensions: T tokens of a window, D hidden, K in-features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.checkpoint_writer.awq import Inputs
from quire.formats.kv_groups import KvGroup, kv_groups
from quire.forward_batch import ForwardBatch
from quire.layer_spec.shapes import LinearShape
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.form import ModelForm
from quire.models.registry import build_model
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.worker import kv_cache
from quire.worker.input_batch import InputBatch

BLOCK_SIZE = 32
EMBEDDING = "model.embed_tokens.weight"

Advance = Callable[[int], None]  # the argument: windows that were done since the last call


@dataclass(frozen=True)
class LayerLinear:
    """A linear layer inside a decoder layer or one of its experts. Several tensors may be fused into it.

    Attributes:
        names: the names of the tensors, for example `self_attn.q_proj`.
        sizes: the number of rows of each tensor.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int


class Layerwise:
    """A native model without weights, and the calibration windows.

    Args:
        num_tokens: the length of every window.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> None:
        self.config = replace(config, max_model_len=num_tokens)
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.names = self._model()  # this decoder only knows names; it never has weights

    def _model(self) -> Decoder:
        model = build_model(self.config, ModelForm(self.dtype))
        assert isinstance(model, Decoder)
        return model

    def linears(self, layer: int) -> list[LayerLinear]:
        """The linear layers of a layer that can be quantized."""
        return [
            LayerLinear(_inside(each, layer), tuple(size for _, size in each.shards), each.in_features)
            for linear in self.config.layers[layer].linears()
            if not _stays(linear)
            for each in ([linear.of_expert(expert) for expert in range(linear.num_experts)] or [linear])
        ]

    def kept(self, layer: int) -> list[str]:
        """The names of linear layers that stay as they are: routers, gates, and weights that loading takes apart."""
        return [
            name for linear in self.config.layers[layer].linears() if _stays(linear) for name in _inside(linear, layer)
        ]

    def norms(self, layer: int) -> dict[str, float]:
        """For each norm of a layer, for example `input_layernorm`: the number that is added to its weights."""
        parts = self.names.layer_parts(layer)
        return {prefix.removesuffix("."): part.offset for prefix, part in parts if isinstance(part, RMSNorm)}

    @torch.inference_mode()
    def embed(self, embedding: Tensor, windows: Iterable[list[int]]) -> list[Tensor]:
        """The residual stream [T, D] of every window before the first layer."""
        model = self._model()
        model.load_some([(EMBEDDING, embedding)])
        return [model.embed(torch.tensor(window)).clone() for window in windows]

    @torch.inference_mode()
    def observe(
        self, layer: int, weights: Mapping[str, Tensor], residuals: list[Tensor], advance: Advance
    ) -> dict[str, Inputs]:
        """Sums over the inputs of the linear layers, by their first names. The residual streams do not change."""
        model = self._model()
        model.load_some((f"model.layers.{layer}.{name}", tensor) for name, tensor in weights.items())
        statistics = {}
        for prefix, part in model.layer_parts(layer):
            if isinstance(part, Linear):
                statistics[prefix + part.shards[0][0]] = watcher = _Watcher(part.in_features)
                part.observe(watcher)
        self._run(model, layer, (residual.clone() for residual in residuals), advance)
        return {name: watcher.inputs() for name, watcher in statistics.items()}

    @torch.inference_mode()
    def run(self, layer: int, weights: Mapping[str, Tensor], residuals: list[Tensor], advance: Advance) -> None:
        """Send the residual streams through a layer. They change in place."""
        model = self._model()
        model.load_some((f"model.layers.{layer}.{name}", tensor) for name, tensor in weights.items())
        self._run(model, layer, residuals, advance)

    def _run(self, model: Decoder, layer: int, residuals: Iterable[Tensor], advance: Advance) -> None:
        batch = self._batch()
        for residual_TD in residuals:
            model.run_layer(layer, residual_TD, batch)
            advance(1)

    def _batch(self) -> ForwardBatch:
        """The batch of one whole window. Every layer has the same cache, because only one layer runs."""
        config, num_tokens = self.config, self.num_tokens
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        one_layer = KvGroup(kv_groups(config)[0].spec, (0,), 1)
        (cache,) = kv_cache.allocate([one_layer], num_blocks, BLOCK_SIZE, self.dtype, torch.device("cpu")).layers
        inputs = InputBatch(1, num_tokens, BLOCK_SIZE, config.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=1)
        offset = config.rope.row_offset(num_tokens, config.max_model_len)
        row = NewRow("window", [0] * num_tokens, num_tokens, params, list(range(num_blocks)), rope_offset=offset)
        batch = ScheduledBatch(0, [row.request_id], [0], [num_tokens], new_block_ids=[[]], new_rows=[row])
        inputs.apply(batch)
        return inputs.forward_batch(inputs.stage(inputs.step_rows(batch)), [cache] * len(config.kv_specs()))


def _stays(linear: LinearShape) -> bool:
    return linear.is_gate or bool(linear.matrices)


def _inside(linear: LinearShape, layer: int) -> tuple[str, ...]:
    return tuple(name.removeprefix(f"model.layers.{layer}.") for name in linear.names)


class _Watcher:
    """Adds up the statistics of inputs for AWQ and GPTQ."""

    def __init__(self, in_features: int) -> None:
        self._gram_KK = torch.zeros(in_features, in_features)
        self._sum_K = torch.zeros(in_features)
        self._count = 0

    def __call__(self, x_TK: Tensor) -> None:
        x_TK = x_TK.float()
        self._gram_KK.addmm_(x_TK.T, x_TK)
        self._sum_K += x_TK.abs().sum(0)
        self._count += len(x_TK)

    def inputs(self) -> Inputs:
        return Inputs(self._gram_KK, self._sum_K / self._count)
