"""Checkpoints that other quantizers made: their makers' weights, to a bit, and transformers' logits with these.

made/README.md says how they were made.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from quire.kernels import cpu, reference
from quire.kernels.fp8 import PackedFp8, fp8_rows
from quire.layers.linear import make_linear
from quire.model_config import load_model_config
from tests.loading import load_model
from tests.quantization.logits import error_of_logits

MADE = Path(__file__).parent / "made"
# Relative errors of logits. Rounding activations to 8 bits makes 0.014 to 0.019 here, and one layer off by an eighth of
# its largest weight 0.2; weights in FP8 leave activations as they are, so that only the order of sums is left.
TOLERANCE, FP8_TOLERANCE = 0.03, 1e-5
EXPECTED: dict[str, Any] = json.loads((MADE / "weights.json").read_text())


def unpacked(folder: Path) -> dict[str, Tensor]:
    """Every quantized weight in float32, by the names of the checkpoint's modules."""
    tensors = load_file(folder / "model.safetensors")
    found: dict[str, Tensor] = {}
    for stored in load_model_config(folder).stored_linears():
        if stored.source is None:
            continue
        layer: Any = make_linear((stored,), torch.float32)
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


def makers_weights(name: str) -> dict[str, Tensor]:
    """Every quantized weight in float32 as the maker unpacks it: rounded to the dtype in which it multiplies."""
    dtype = getattr(torch, EXPECTED[name]["dtype"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_available", False)
        weights = {module: weight.to(dtype).float() for module, weight in unpacked(MADE / name).items()}
    digests = {}
    for module, weight in weights.items():
        numbers = weight.contiguous() + 0.0  # no zero has a sign
        digests[module] = hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
    assert digests == EXPECTED[name]["weights"], "other weights than the maker's"
    return weights


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_are_the_makers(name: str) -> None:
    assert makers_weights(name)


@pytest.mark.parametrize("name", EXPECTED)
def test_logits(name: str, path: str) -> None:
    """Close to transformers' with the makers' weights in float32, from embedding to output projection."""
    stored = load_file(MADE / name / "model.safetensors")
    weights = {f"{module}.weight": weight for module, weight in makers_weights(name).items()}
    description = json.loads((MADE / name / "config.json").read_text())
    del description["quantization_config"]
    config = transformers.LlamaConfig(**description, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).float().eval()
    for parameter, numbers in model.named_parameters():
        with torch.no_grad():
            numbers.copy_(weights.get(parameter, stored.get(parameter)))  # type: ignore[arg-type]
    assert error_of_logits(MADE / name, model) < (FP8_TOLERANCE if name.startswith("fp8") else TOLERANCE)


@pytest.mark.parametrize("name", EXPECTED)
def test_they_load(name: str, path: str) -> None:
    """Whole, on the reference and on the compiled kernels: nothing in the file is unexpected."""
    load_model(load_model_config(MADE / name), torch.bfloat16)
