"""The facts of the model or head that drafts for a model. No torch: the API process reads them too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig
from quire.loader.safetensors_headers import read_headers
from quire.model_config import ModelConfig, load_head_config, load_model_config
from quire.speculative_config import SpeculativeConfig


def load_drafter_config(folder: Path, speculation: SpeculativeConfig, target: ModelConfig) -> ModelConfig:
    """Read config.json of a drafter, and for a head the names of its tensors if they are there.

    Args:
        folder: the folder of the drafter, or its GGUF file.

    Raises ModelConfigError or WeightsError like load_model_config and read_headers, and if a head does not fit the
    model.
    """
    if speculation.method not in ("eagle3", "mtp"):
        return replace(load_model_config(folder), is_shared=speculation.draft_tensor_parallel_size != 1)
    has_weights = any(folder.glob("*.safetensors"))
    entries = (entry for file in read_headers(folder).values() for entry in file) if has_weights else ()
    names = {entry.name for entry in entries}
    return replace(load_head_config(folder, speculation.method, target, names), is_shared=False)


def load_with_drafter(model_folder: Path, drafter_folder: Path | None, config: EngineConfig) -> ModelConfig:
    """A model with the model or head that drafts for it, as a config asks for them. Raises as both readers do."""
    is_any = config.model_impl in ("auto", "transformers")
    model = load_model_config(model_folder, config.hf_overrides, any_architecture=is_any)
    if drafter_folder is None or config.speculative_config is None:
        return model
    return replace(model, drafter=load_drafter_config(drafter_folder, config.speculative_config, model))
