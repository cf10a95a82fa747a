"""Loads a model: chooses between native and transformers' code, and between real and dummy weights."""

from __future__ import annotations

import torch

from quire import extension
from quire.errors import ConfigError
from quire.hf_config.gguf_types import GgufWeights
from quire.hf_config.layer_format import LayerFormat
from quire.kernels.pages import trim
from quire.loader.dummy import dummy_weights
from quire.loader.gguf import GgufCheckpoint
from quire.loader.packed_cache import PackedCache
from quire.loader.safetensors import Checkpoint, open_checkpoint
from quire.logs import get_logger
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.form import ALONE, CPU, ModelForm, Sharing
from quire.models.registry import CausalLM, build_model
from quire.settings import DeviceSettings, ModelSettings

logger = get_logger(__name__)


def load_model(
    config: ModelConfig,
    settings: ModelSettings,
    device: DeviceSettings,
    progress: Progress | None = None,
    *,
    target: CausalLM | None = None,
    sharing: Sharing = ALONE,
) -> CausalLM:
    """Build the model of a config, load its weights from `config.model` and finalize it.

    Args:
        settings: model_impl auto: native if `config.is_native`, else transformers' modelling code. load_format dummy:
            random weights; only config.json is read. packed_weights_cache: for a native model on the CPU kernels, map
            the packed weights of an earlier start, else keep them for the next one.
        device: the model's device and attention backend.
        progress: called with ("load", fraction, text with the bytes).
        target: the target of a head that drafts; a native model.
        sharing: the ranks with which the model is shared.

    Raises:
        WeightsError: weights are missing, malformed, or do not fit the config.
        ModelConfigError: no implementation for the architecture.
        ConfigError: the settings do not fit the model.
    """
    # Headers first: a broken checkpoint is reported before memory is taken.
    checkpoint = None if settings.load_format == "dummy" else _open(config, settings.load_format)
    form = ModelForm(
        dtype=getattr(torch, settings.dtype),
        quantization=settings.quantization,
        device=torch.device(device.device),
        attention_backend=device.attention_backend,
        cache_dtype=getattr(torch, settings.cache_dtype),
    )
    model: CausalLM
    if settings.model_impl == "transformers" or (settings.model_impl == "auto" and not config.is_native):
        model = _transformers_model(config, form, sharing)
    else:
        native = target if isinstance(target, Decoder) else None
        model = _native_model(config, form, native, sharing, is_dummy=checkpoint is None)
        if checkpoint is not None:
            model.check_weights(checkpoint.headers())
    _load_weights(model, checkpoint, form, progress, keeps_packed=settings.packed_weights_cache)
    model.finalize()
    trim()
    return model


def _transformers_model(config: ModelConfig, form: ModelForm, sharing: Sharing) -> CausalLM:
    if form.quantization is not None or config.quantized is not None:
        raise ConfigError(
            f"{config.architecture} runs through transformers' modelling code, which is not quantized here",
            value=form.quantization if config.quantized is None else config.quantized.method,
            fix="Take the checkpoint in floating point, or a model with a native implementation",
            param="quantization",
        )
    from quire.models.transformers_backend import TransformersModel

    return TransformersModel(config, form.dtype, form.device, form.attention_backend, sharing)


def _native_model(
    config: ModelConfig, form: ModelForm, target: Decoder | None, sharing: Sharing, *, is_dummy: bool
) -> Decoder:
    if is_dummy and config.quantized is not None:
        raise ConfigError(
            "Dummy weights are not made for a quantized checkpoint",
            value=config.quantized.method,
            fix="Use --hf-overrides '{\"quantization_config\": null}' with --quantization int8, int4 or fp8",
            param="load_format",
        )
    if config.ignored_fields:
        fields = ", ".join(config.ignored_fields)
        logger.warning("config.json's %s: not applied, because %s does not read it", fields, config.architecture)
    model = build_model(config, form, target=target, sharing=sharing)
    sources = (stored.source for stored in config.stored_linears())
    if any(isinstance(source, LayerFormat) and source.has_input_scale for source in sources):
        logger.info("the checkpoint's scales for activations are not used: activations stay in %s", form.dtype)
    return model


def _load_weights(
    model: CausalLM,
    checkpoint: Checkpoint | GgufCheckpoint | None,
    form: ModelForm,
    progress: Progress | None,
    *,
    keeps_packed: bool,
) -> None:
    """Load the weights. `keeps_packed`: map the packed weights of an earlier start, or keep them for the next one."""
    if keeps_packed:
        if isinstance(model, Decoder) and checkpoint is not None and extension.is_used() and form.device == CPU:
            cache = PackedCache(model.config, form.dtype, form.quantization, checkpoint.files)
            if (held := cache.read(progress)) is not None:
                model.restore(held, cache.mapped_bytes)
            else:
                model.load_weights(checkpoint.tensors(progress, model.extent))
                cache.write(model.held(), progress)
            return
        logger.warning("packed weights are not kept: this needs a native model on the compiled CPU kernels")
    if checkpoint is None:
        model.load_weights(dummy_weights(model.expected_weights(), form.dtype, form.device))
    else:
        model.load_weights(checkpoint.tensors(progress, model.extent))


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
