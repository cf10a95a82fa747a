"""FP8 experts in one tensor for all, with every form of their scales, against transformers with dequantized weights.

Dimensions: E experts, N out-features, K in-features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.errors import WeightsError
from quire.loader.safetensors import Checkpoint
from quire.model_config import load_model_config
from tests.covering import in_turn
from tests.loading import load_model
from tests.models.test_families import CASES, random_hf_model
from tests.quantization.checkpoints import save_tensors
from tests.quantization.logits import PATHS, error_of_logits

TOLERANCE = 1e-5  # weights are exact, and activations are not rounded
E = 5
FLOAT = [
    "self_attn",
    "shared_expert",
    "layers.0",
    "layers.1.mlp",
    "layers.2.feed_forward",
]  # parts of names that are not quantized
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "modules_to_not_convert": FLOAT},
    "static": {"quant_method": "fp8", "modules_to_not_convert": FLOAT, "activation_scheme": "static"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": FLOAT, "activation_scale_ub": 1200.0},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "0": {
                "targets": [r"re:.*experts\.\d+\..*"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            }
        },
        "ignore": [r"re:.*layers\.0\."],
    },
}
# How much has a scale of its own, [E, parts of the rows, 1], and the scales of gate and up, and of down, in a file.
Shapes = Callable[[Tensor], Tensor]
Parts = Literal["model", "expert", "shard", "row"]
FORMS: dict[str, tuple[str, Parts, str, Shapes, Shapes]] = {
    "a number": ("fp8", "model", "_weight_scale", lambda x: x.view(()), lambda x: x.view(())),
    "a number, static": ("static", "model", "_weight_scale", lambda x: x.view(1), lambda x: x.view(1)),
    "[E]": ("compressed", "expert", ".weight_scale", lambda x: x.view(E), lambda x: x.view(E)),
    "[E, 1]": ("fp8", "expert", "_scale", lambda x: x.view(E, 1), lambda x: x.view(E, 1)),
    "[E, 1, 1]": ("fp8", "expert", ".weight_scale", lambda x: x.view(E, 1, 1), lambda x: x.view(E, 1, 1)),
    "[E, shards]": ("compressed", "shard", ".weight_scale", lambda x: x.view(E, 2), lambda x: x.view(E, 1)),
    "[E, shards, 1]": ("static", "shard", "_scale_inv", lambda x: x, lambda x: x),
    "[E, N]": ("compressed", "row", ".weight_scale", lambda x: x.squeeze(2), lambda x: x.squeeze(2)),
    "[E, N, 1]": ("compressed", "row", ".weight_scale", lambda x: x, lambda x: x),
    "[E, 1, N]": ("fbgemm", "row", "_scale", lambda x: x.transpose(1, 2), lambda x: x),
}
INPUT_SCALES: dict[str, tuple[str, Tensor]] = {
    "a number, static": ("_input_scale", torch.tensor(0.02)),
    "[E, shards, 1]": ("_activation_scale", torch.full((E,), 0.02)),
}
FAMILIES = ("qwen3_moe", "llama4_text")  # experts [E, N, K], and [E, K, N]


def stacks_of(model: Any) -> Iterator[tuple[str, Any, bool]]:
    """The experts of the layers that are quantized: name, module, and whether weights are [E, K, N]."""
    for name, module in model.named_modules():
        if name.endswith(".experts") and not name.startswith("model.layers.0."):
            yield name, module, "feed_forward" in name


def quantized(weight_ENK: Tensor, num_shards: int, parts: Parts) -> tuple[Tensor, Tensor]:
    """Codes, and scales [E, parts, 1]; the largest magnitude of each part becomes the largest code, 448."""
    N = weight_ENK.shape[1]
    most_EN1 = weight_ENK.abs().amax(2, keepdim=True)
    if parts == "model":
        scales = most_EN1.max().view(1, 1, 1)
    else:
        count = {"expert": 1, "shard": num_shards, "row": N}[parts]
        scales = most_EN1.view(len(weight_ENK), count, -1).amax(2, keepdim=True)
    scales = scales / 448
    whole = scales.repeat_interleave(N // scales.shape[1], 1)
    return (weight_ENK / whole).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def written(family: str, form: str, folder: Path) -> Any:
    """A checkpoint, and transformers' model with the numbers that its codes stand for."""
    description, parts, suffix, *shapes = FORMS[form]
    model, changes = random_hf_model(CASES[family]), {}
    random = torch.Generator().manual_seed(7)
    for name, module, is_transposed in stacks_of(model):
        for part, num_shards, shape in (("gate_up_proj", 2, shapes[0]), ("down_proj", 1, shapes[1])):
            weight = getattr(module, part).data
            weight_ENK = weight.transpose(1, 2) if is_transposed else weight
            sizes_E1 = torch.rand(E, num_shards, generator=random) + 0.5
            N = weight_ENK.shape[1]
            weight_ENK = weight_ENK * sizes_E1.repeat_interleave(N // num_shards, 1)[:, :, None]
            codes, scales = quantized(weight_ENK, num_shards, parts)
            whole = scales.repeat_interleave(N // scales.shape[1], 1)
            held = codes.float() * whole
            weight.copy_(held.transpose(1, 2) if is_transposed else held)
            changes[f"{name}.{part}"] = codes.transpose(1, 2) if is_transposed else codes
            changes[f"{name}.{part}{suffix}"] = shape(scales)
            if form in INPUT_SCALES:
                own_suffix, numbers = INPUT_SCALES[form]
                changes[f"{name}.{part}{own_suffix}"] = numbers.clone()
    model.save_pretrained(folder)
    prefixes = tuple(f"{name}." for name, *_ in stacks_of(model))
    tensors = load_file(folder / "model.safetensors")
    save_tensors(folder, {name: t for name, t in tensors.items() if not name.startswith(prefixes)} | changes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": DESCRIPTIONS[description]}))
    return model


@pytest.mark.parametrize(
    ("family", "form", "path"),
    in_turn([[(family, form) for form in FORMS] for family in FAMILIES], PATHS),
    indirect=["path"],
)
def test_logits(family: str, form: str, path: str, tmp_path: Path) -> None:
    model = written(family, form, tmp_path)
    assert error_of_logits(tmp_path, model) < TOLERANCE
    held = [stored.held for stored in load_model_config(tmp_path).stored_linears() if stored.source is not None]
    assert len(held) == 2 * len(list(stacks_of(model)))


HOSTILE: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "missing": (lambda x: None, r"1. missing \(.*experts\.0\.gate_proj\.weight_scale"),
    "of another number of experts": (
        lambda x: x[:-1],
        r"gate_up_proj.weight_scale has shape \[4\] instead of \[5, 80, 1\]",
    ),
    "of three shards": (lambda x: x.view(E, 1).expand(E, 3), r"has shape \[5, 3\] instead of \[5, 80, 1\]"),
    "of rows in turn with experts": (lambda x: x.expand(80, E), r"has shape \[80, 5\] instead of \[5, 80, 1\]"),
    "of whole numbers": (lambda x: x.int(), "has dtype int32 instead of float32"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_scales_that_do_not_fit_are_named_before_any_is_read(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("qwen3_moe", "[E]", tmp_path)
    change, message = HOSTILE[fault]
    tensors: dict[str, Tensor | None] = dict(load_file(tmp_path / "model.safetensors"))
    name = "model.layers.2.mlp.experts.gate_up_proj.weight_scale"
    tensors[name] = change(tensors[name])  # type: ignore[arg-type]
    save_tensors(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    monkeypatch.setattr(Checkpoint, "tensors", None)
    with pytest.raises(WeightsError, match=message):
        load_model(load_model_config(tmp_path), torch.float32)


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    written("qwen3_moe", "[E]", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.experts.down_proj.weight_scale"][3] = float("nan")
    save_tensors(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"experts\.3\.down_proj.*: a scale is not a finite number"):
        load_model(load_model_config(tmp_path), torch.float32)
