"""Models loaded as by a start without flags, except for the test's own settings."""

from __future__ import annotations

from typing import Any

import torch

from quire.loader import load
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.form import ALONE, Sharing
from quire.models.registry import CausalLM
from quire.settings import DeviceSettings, ModelSettings

MODEL: dict[str, Any] = {
    "quantization": None,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "max_model_len": 0,
    "load_format": "auto",
    "model_impl": "auto",
    "packed_weights_cache": False,
    "logprobs_mode": "raw_logprobs",
}


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    device: str = "cpu",
    target: CausalLM | None = None,
    sharing: Sharing = ALONE,
    **fields: Any,
) -> CausalLM:
    """`fields` of ModelSettings."""
    model = ModelSettings(dtype=str(dtype).removeprefix("torch."), **MODEL | fields)
    place = DeviceSettings(device, "", 1, False, "auto", "NONE", (), None, None)
    return load.load_model(config, model, place, progress, target=target, sharing=sharing)
