"""This engine's logits with quantized weights, against transformers with the weights that their codes stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.model_config import load_model_config
from tests.loading import load_model
from tests.models.paged_run import PagedRun
from tests.models.tiny_models import hf_logits

PATHS = ("reference", "cpu")  # the path: plain torch, or the compiled kernels


def error_of_logits(
    folder: Path, hf_model: Any, dtype: torch.dtype = torch.float32, quantization: str | None = None
) -> float:
    """The norm of the difference divided by the norm of transformers' logits, over 40 tokens that are computed in two
    chunks.
    """
    vocab_size = hf_model.config.vocab_size
    tokens = torch.randint(3, vocab_size, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    want = hf_logits(hf_model, tokens)
    assert want.std() > 0.3, "the logits are too small to mean anything"
    run = PagedRun(load_model(load_model_config(folder), dtype, quantization=quantization), dtype)
    got = torch.cat([run.step({0: tokens[:33]})[0], run.step({0: tokens[33:]})[0]])
    return float((got - want).norm() / want.norm())
