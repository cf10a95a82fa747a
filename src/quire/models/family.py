"""What one model family declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.models.block import Block, LayerBuilder, PreNormBlock


@dataclass(frozen=True)
class Family:
    """A family is the shared decoder with these choices; everything else is in its ModelConfig.

    Checkpoint names are mapped by the first of `renamed_prefixes` that fits, to names as Llama's checkpoints have them:
    `model.embed_tokens`, `model.layers.<i>.self_attn.q_proj`, ..., `model.norm`, `lm_head`.
    """

    architectures: tuple[str, ...]
    block: Callable[[LayerBuilder], Block] = PreNormBlock
    norm_offset: float = 0.0  # added to every norm weight
    renamed_prefixes: tuple[tuple[str, str], ...] = ()  # (in the checkpoint, ours)
    ignored_prefixes: tuple[str, ...] = ()  # parts of the checkpoint that we do not run
