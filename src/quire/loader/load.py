"""Loads a model: chooses between native and transformers' code, and between real and dummy weights."""

from __future__ import annotations

import torch

from quire.distributed.group import Group, Link
from quire.errors import ConfigError
from quire.hf_config.gguf_types import GgufWeights
from quire.hf_config.layer_format import LayerFormat
from quire.kernels import extension
from quire.kernels.pages import trim
from quire.loader.dummy import dummy_weights
from quire.loader.extents import all_of
from quire.loader.gguf import GgufCheckpoint
from quire.loader.packed_cache import PackedCache
from quire.loader.safetensors import Checkpoint, open_checkpoint
from quire.logs import get_logger
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.registry import CPU, CausalLM, build_model
from quire.moe.dispatch import Dispatch
from quire.settings import DeviceSettings, ModelSettings

logger = get_logger(__name__)


def load_model(
    config: ModelConfig,
    settings: ModelSettings,
    device: DeviceSettings,
    progress: Progress | None = None,
    target: CausalLM | None = None,
    group: Group | None = None,
    before: Link | None = None,
    dispatch: Dispatch | None = None,
) -> CausalLM:
    """Build the model of a config, load its weights from `config.model` and finalize it.

    Args:
        settings: model_impl auto: native if `config.is_native`, else transformers' modelling code. load_format dummy:
            random weights; only config.json is read. packed_weights_cache: for a native model on the CPU kernels, map
            the packed weights of an earlier start, else keep them for the next one.
        device: the model's device and attention backend.
        progress: called with ("load", fraction, text with the bytes).
        target: the target of a head that drafts; a native model.
        group: the ranks that share the model; the config describes this rank's part.
        before: brings the input, if the config describes a stage after the first one.
        dispatch: brings rows to experts, if lanes share them.

    Raises:
        WeightsError: weights are missing, malformed, or do not fit the config.
        ModelConfigError: no implementation for the architecture.
        ConfigError: the settings do not fit the model.
    """
    dtype: torch.dtype = getattr(torch, settings.dtype)
    place, quantization, load_format = torch.device(device.device), settings.quantization, settings.load_format
    # Headers first: a broken checkpoint is reported before memory is taken.
    checkpoint = None if load_format == "dummy" else _open(config, load_format)
    model: CausalLM
    if settings.model_impl == "transformers" or (settings.model_impl == "auto" and not config.is_native):
        if quantization is not None or config.quantized is not None:
            raise ConfigError(
                f"{config.architecture} runs through transformers' modelling code, which is not quantized here",
                value=quantization if config.quantized is None else config.quantized.method,
                fix="Take the checkpoint in floating point, or a model with a native implementation",
                param="quantization",
            )
        from quire.models.transformers_backend import TransformersModel

        model = TransformersModel(config, dtype, place, device.attention_backend)
    else:
        if checkpoint is None and config.quantized is not None:
            raise ConfigError(
                "Dummy weights are not made for a quantized checkpoint",
                value=config.quantized.method,
                fix="Use --hf-overrides '{\"quantization_config\": null}' with --quantization int8, int4 or fp8",
                param="load_format",
            )
        if config.ignored_fields:
            fields = ", ".join(config.ignored_fields)
            logger.warning("config.json's %s: not applied, because %s does not read it", fields, config.architecture)
        cache_dtype: torch.dtype = getattr(torch, settings.cache_dtype)
        of = target if isinstance(target, Decoder) else None
        form = (dtype, quantization, place, device.attention_backend, cache_dtype)
        model = build_model(config, *form, of, group, before, dispatch, settings.decode_context_parallel_size)
        sources = (stored.source for stored in config.stored_linears())
        if any(isinstance(source, LayerFormat) and source.has_input_scale for source in sources):
            logger.info("the checkpoint's scales for activations are not used: activations stay in %s", dtype)
    if isinstance(model, Decoder) and checkpoint is not None:
        model.check_weights(checkpoint.headers())
    if settings.packed_weights_cache:
        if isinstance(model, Decoder) and checkpoint is not None and extension.is_used() and place == CPU:
            _load_cached(model, PackedCache(config, dtype, quantization, checkpoint.files), checkpoint, progress)
            trim()
            return model
        logger.warning("packed weights are not kept: this needs a native model on the compiled CPU kernels")
    if checkpoint is None:
        model.load_weights(dummy_weights(model.expected_weights(), dtype, place))
    else:
        model.load_weights(checkpoint.tensors(progress, model.extent if isinstance(model, Decoder) else all_of))
    model.finalize()
    trim()
    return model


def _load_cached(
    model: Decoder, cache: PackedCache, checkpoint: Checkpoint | GgufCheckpoint, progress: Progress | None
) -> None:
    if (held := cache.read(progress)) is not None:
        model.restore(held, cache.mapped_bytes)
    else:
        model.load_weights(checkpoint.tensors(progress, model.extent))
        cache.write(model.held(), progress)
    model.finalize()


def _open(config: ModelConfig, load_format: str) -> Checkpoint | GgufCheckpoint:
    is_gguf = isinstance(config.quantized, GgufWeights)
    if load_format in ("safetensors", "gguf") and is_gguf != (load_format == "gguf"):
        raise ConfigError(
            f"The weights are {'in a GGUF file' if is_gguf else 'safetensors'}",
            value=load_format,
            fix="Leave --load-format out",
            param="load_format",
        )
    return GgufCheckpoint(config) if is_gguf else open_checkpoint(config.model).only(config.holds)
