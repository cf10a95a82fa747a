"""A model with its weights, ready to run: the choice between native and transformers' code, real and dummy weights."""

from __future__ import annotations

import torch

from quire.errors import ConfigError
from quire.loader.dummy import dummy_weights
from quire.loader.safetensors import open_checkpoint
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.registry import CausalLM, build_model

LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "native", "vllm", "transformers")  # vllm: what vLLM's users call native


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    load_format: str = "auto",
    progress: Progress | None = None,
    model_impl: str = "auto",
    quantization: str | None = None,
) -> CausalLM:
    """Build the model of a config, load its weights from `config.model` and finalize it.

    Args:
        dtype: of weights, activations and KV cache.
        load_format: auto or safetensors: from the folder; dummy: random weights, no file but config.json is read.
        progress: called with ("load", fraction, bytes read of all).
        model_impl: native; transformers: its modelling code; auto: native if the architecture is, else transformers.

        quantization: a key of weight_format.ON_LOAD, or None: weights as they are.

    Raises:
        WeightsError: weights are missing, malformed, or do not fit the config.
        ModelConfigError: no implementation for the architecture.
        ConfigError: an argument is illegal.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            "Unknown load format", value=load_format, expected="one of " + ", ".join(LOAD_FORMATS), param="load_format"
        )
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(
            "Unknown model implementation",
            value=model_impl,
            expected="one of " + ", ".join(MODEL_IMPLS),
            param="model_impl",
        )
    # Headers first: a broken checkpoint is reported before memory is taken.
    checkpoint = None if load_format == "dummy" else open_checkpoint(config.model)
    model: CausalLM
    if model_impl == "transformers" or (model_impl == "auto" and not config.is_native):
        if quantization is not None:
            raise ConfigError(
                f"{config.architecture} runs through transformers' modelling code, which is not quantized on load",
                value=quantization,
                fix="Leave --quantization out, or take a model with a native implementation",
                param="quantization",
            )
        from quire.models.transformers_backend import TransformersModel

        model = TransformersModel(config, dtype)
    else:
        model = build_model(config, dtype, quantization)
    if checkpoint is None:
        model.load_weights(dummy_weights(model.expected_weights(), dtype))
    else:
        model.load_weights(checkpoint.tensors(progress))
    model.finalize()
    return model
