"""Random adapters of any kind in PEFT's form, for a model's config: what training leaves behind, without training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.hf_config.quantization import OUTPUT
from quire.lora.adapter_config import CONFIG_NAME
from quire.lora.paths import TENSORS_NAME
from quire.model_config import ModelConfig
from quire.models.decoder import EMBEDDINGS

PREFIX = "base_model.model."


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of every linear layer of the blocks, by name."""
    shapes = {}
    for layer in config.layers:
        for linear in layer.linears():
            shapes |= {linear.prefix + shard: (size, linear.in_features) for shard, size in linear.shards}
    return shapes


def random_tensors(
    config: ModelConfig, rank: int, *, modules: Iterable[str] = (), seed: int = 0, size: float = 0.1
) -> dict[str, Tensor]:
    """lora_A and lora_B by PEFT's names.

    Args:
        modules: endings of names, with `embed_tokens` and `lm_head` if they are wanted; empty: all of the blocks.
        size: the deviation of both.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = tuple(modules)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * size

    tensors = {}
    for name, (num_outputs, num_inputs) in module_shapes(config).items():
        if not wanted or name.endswith(wanted):
            tensors[f"{PREFIX}{name}.lora_A.weight"] = random(rank, num_inputs)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = random(num_outputs, rank)
    if "embed_tokens" in wanted:
        tensors[f"{PREFIX}{EMBEDDINGS}.lora_embedding_A"] = random(rank, config.vocab_size)
        tensors[f"{PREFIX}{EMBEDDINGS}.lora_embedding_B"] = random(config.hidden_size, rank)
    if "lm_head" in wanted:
        tensors[f"{PREFIX}{OUTPUT}.lora_A.weight"] = random(rank, config.hidden_size)
        tensors[f"{PREFIX}{OUTPUT}.lora_B.weight"] = random(config.vocab_size, rank)
    return tensors


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], *, rank: int, dtype: torch.dtype = torch.float32, **fields: Any
) -> Path:
    """Write an adapter's folder. `fields` go into its config, in PEFT's names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / CONFIG_NAME).write_text(json.dumps(config | fields))
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / TENSORS_NAME)
    return folder


def write_random_adapter(
    folder: Path, config: ModelConfig, rank: int = 4, *, modules: Iterable[str] = (), seed: int = 0, **fields: Any
) -> Path:
    """Write an adapter with random numbers: see `random_tensors` and `write_adapter`."""
    return write_adapter(folder, random_tensors(config, rank, modules=modules, seed=seed), rank=rank, **fields)


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / TENSORS_NAME)
