"""The facts of the model or head that drafts for a model. No torch: the API process reads them too."""

from __future__ import annotations

from pathlib import Path

from quire.loader.safetensors_headers import read_headers
from quire.model_config import ModelConfig, load_head_config, load_model_config
from quire.speculative_config import SpeculativeConfig


def load_drafter_config(folder: Path, speculation: SpeculativeConfig, target: ModelConfig) -> ModelConfig:
    """Read config.json of a drafter, and for a head the names of its tensors if they are there.

    Args:
        folder: of the drafter, or its GGUF file.

    Raises ModelConfigError or WeightsError: as load_model_config and read_headers, or a head does not fit the model.
    """
    if speculation.method not in ("eagle3", "mtp"):
        return load_model_config(folder)
    has_weights = any(folder.glob("*.safetensors"))
    entries = (entry for file in read_headers(folder).values() for entry in file) if has_weights else ()
    return load_head_config(folder, speculation.method, target, {entry.name for entry in entries})
