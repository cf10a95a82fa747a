"""Tiny random models of transformers: their sizes and their logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Sizes that nobody would choose: the vocabulary and the hidden sizes fill no tile of a kernel.
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
# Relative error of the logits when activations have 8 bits with one scale per row: up to 0.08 on random weights.
QUANTIZED_ACTIVATIONS_TOLERANCE = 0.1


@torch.inference_mode()
def hf_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), V] of every position in float32, from a model of transformers."""
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits
