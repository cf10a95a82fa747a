"""Checkpoints that other quantizers made: Quire unpacks them to the weights that their makers do, to a bit.

made/README.md says how they were made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.kernels import cpu, reference
from quire.kernels.fp8 import PackedFp8, fp8_rows
from quire.layers.linear import make_linear
from quire.loader.load import load_model
from quire.model_config import load_model_config

MADE = Path(__file__).parent / "made"
EXPECTED: dict[str, Any] = json.loads((MADE / "weights.json").read_text())


def unpacked(folder: Path) -> dict[str, Tensor]:
    """Every quantized weight in float32, by the names of the checkpoint's modules."""
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = {}
    for stored in load_model_config(folder).stored_linears():
        if stored.source is None:
            continue
        layer: Any = make_linear((stored,), bias=False, dtype=torch.float32)
        for name, slot in layer.slots():
            if (tensor := tensors.get(f"{stored.shape.prefix}{name}")) is not None:
                slot.load(tensor)
        if isinstance(layer.weight, PackedFp8):
            weight = fp8_rows(layer.weight, torch.arange(layer.out_features), torch.float32)
        else:
            weight = reference.dequantize_grouped(layer.weight.weight)
        rows = weight.split([num_rows for _, num_rows in layer.shards])
        found |= dict(zip(stored.shape.names, rows, strict=True))
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_are_the_makers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to the dtype in which the maker multiplies codes by scales."""
    monkeypatch.setattr(cpu, "_available", False)
    dtype = getattr(torch, EXPECTED[name]["dtype"])
    digests = {}
    for module, weight in unpacked(MADE / name).items():
        numbers = weight.to(dtype).float().contiguous() + 0.0  # no zero has a sign
        digests[module] = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    assert digests == EXPECTED[name]["weights"]


@pytest.mark.parametrize("name", EXPECTED)
def test_they_load(name: str, path: str) -> None:
    """Whole, on the reference and on the compiled kernels: nothing in the file is unexpected."""
    load_model(load_model_config(MADE / name), torch.bfloat16)
