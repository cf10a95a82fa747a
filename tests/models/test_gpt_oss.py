"""gpt-oss in the form of its checkpoints: experts in MXFP4, against the same numbers in floating point."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelConfigError, WeightsError
from quire.kernels import cpu
from quire.model_config import load_model_config
from quire.models.registry import CausalLM
from tests.loading import load_model
from tests.models.paged_run import PagedRun
from tests.models.test_families import CASES, random_hf_model
from tests.models.tiny_models import QUANTIZED_ACTIVATIONS_TOLERANCE

EXPERTS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS}
PROMPT = [5, 17, 23, 99, 101, 42, 7, 3, 88, 54, 11, 12, 13]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in floating point and in MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes long, and every process collects

    plain, blocks = (tmp_path_factory.mktemp(name) for name in ("plain", "blocks"))
    case = CASES["gpt_oss"]
    random_hf_model(replace(case, settings=case.settings | SIZES)).save_pretrained(plain)
    tensors, packed = load_file(plain / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, K, N = tensors.pop(name).shape
        codes = torch.randint(0, 256, (EXPERTS, N, K // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (EXPERTS, N, K // 32), dtype=torch.uint8, generator=generator)
        packed |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).contiguous()
    save_file(tensors, plain / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in packed}
    save_file(kept | packed, blocks / "model.safetensors")
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (blocks / "config.json").write_text(json.dumps(raw))
    return plain, blocks


def load(folder: Path, overrides: dict[str, Any] | None = None) -> CausalLM:
    return load_model(load_model_config(folder, overrides), torch.float32)


def logits(model: CausalLM) -> Tensor:
    return PagedRun(model, model.dtype).step({0: PROMPT})[0]


def test_mxfp4_is_the_model_of_its_numbers(folders: tuple[Path, Path]) -> None:
    """The rest is the rounding of activations to 8 bits."""
    plain, blocks = (load(folder) for folder in folders)
    want, found = logits(plain), logits(blocks)
    assert (found - want).norm() / want.norm() < QUANTIZED_ACTIVATIONS_TOLERANCE
    if cpu.available():
        assert blocks.weight_bytes() == blocks.config.weight_bytes("float32")
        assert blocks.weight_bytes() < plain.weight_bytes()


def test_faults_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders[1] / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for wrong, message in (
        (tensors[name][:, :, :2], r"down_proj_scales has shape \[3, 64, 2\] instead of \[3, 64, 3\]"),
        (tensors[name] | 255, "a scale is not a finite number"),
        (tensors[name].float(), "has dtype float32 instead of uint8"),
    ):
        save_file(tensors | {name: wrong.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            load(tmp_path)
    with pytest.raises(ModelConfigError, match=r"illegal swiglu_limit.*Got 5.0. Expected 7.0"):
        load(tmp_path, {"swiglu_limit": 5.0})
