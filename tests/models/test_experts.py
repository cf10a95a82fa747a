"""Models with experts: every form of their checkpoints gives the same model, and tensors that do not fit are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import AdapterError, ModelConfigError, WeightsError
from quire.formats.stored_linear import StoredLinear
from quire.formats.weight_format import ON_LOAD
from quire.kernels import cpu
from quire.layer_spec.cuts import Cut
from quire.layer_spec.shapes import LinearShape
from quire.layers.weight_slot import StackedSlots
from quire.loader.safetensors import Checkpoint
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import CausalLM, build_model
from quire.models.weights import WeightTable
from quire.moe.stack import ExpertStack, make_stack
from tests.loader.test_packed_cache import join
from tests.loading import load_model
from tests.lora.adapters import write_adapter
from tests.lora.whole_adapters import read_adapter
from tests.models.paged_run import PagedRun
from tests.models.test_families import CASES, make_expected, random_hf_model

PROMPT = [5, 17, 23, 99, 101, 42, 7]
EXPERT = "model.layers.0.mlp.experts.4.up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: layers 0 and 2 have 5 experts of width 40; hidden 48."""
    return make_expected(CASES["qwen3_moe"], tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(folder, tmp_path / "other"))


def rewrite(folder: Path, changes: dict[str, Tensor | None], **config: Any) -> None:
    """Other tensors (None: without one), and other fields of config.json."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))


def logits(model: CausalLM) -> Tensor:
    return PagedRun(model, model.dtype).step({0: PROMPT})[0]


def load(folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> CausalLM:
    return load_model(load_model_config(folder), dtype, **fields)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Changes that put all experts of a layer into one tensor, and the scales of FP8 into another."""
    changes: dict[str, Tensor | None] = {name: None for name in tensors if ".experts." in name}
    suffixes = {name.rpartition(".weight")[2] for name in changes}
    for prefix, suffix in product((f"model.layers.{layer}.mlp.experts." for layer in (0, 2)), suffixes):
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight{suffix}"] for expert in range(5)])
            for part in ("gate", "up", "down")
        )
        changes |= {f"{prefix}gate_up_proj{suffix}": torch.cat([gate, up], 1), f"{prefix}down_proj{suffix}": down}
    return changes


@pytest.mark.parametrize("quantization", [None, *ON_LOAD])
def test_one_tensor_for_all_experts(quantization: str | None, folder: Path, other: Path) -> None:
    rewrite(other, stacked(load_file(folder / "model.safetensors")))
    whole, single = (load(path, torch.bfloat16, quantization=quantization) for path in (other, folder))
    assert torch.equal(logits(whole), logits(single))
    if cpu.available():
        assert whole.weight_bytes() == whole.config.weight_bytes("bfloat16", quantization)


def test_one_tensor_for_all_experts_in_fp8(folder: Path, other: Path) -> None:
    """With a tensor of the scales of blocks, in the names of transformers."""
    random = torch.Generator().manual_seed(3)
    changes: dict[str, Tensor | None] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            changes[name] = weight.to(torch.float8_e4m3fn)
            changes[f"{name}_scale_inv"] = torch.rand(-(-len(weight) // 8), 1, generator=random) + 0.5
    rewrite(other, changes, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 128]})
    single = logits(load(other))
    rewrite(other, stacked(load_file(other / "model.safetensors")))
    assert torch.equal(logits(load(other)), single)


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_names_as_transformers_holds_them(family: str, tmp_path: Path) -> None:
    """save_pretrained writes the names of the published checkpoints, unless it is told not to."""
    model, found = random_hf_model(CASES[family]), []
    for is_original in (True, False):
        model.save_pretrained(tmp_path, save_original_format=is_original)
        names = load_file(tmp_path / "model.safetensors").keys()
        assert ("model.layers.0.mlp.experts.gate_up_proj" in names) != is_original
        found.append(logits(load(tmp_path)))
    assert torch.equal(*found)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_order_of_tensors_does_not_matter(quantization: str | None, folder: Path) -> None:
    tensors = [*load_file(folder / "model.safetensors").items()]
    found = []
    for order in (torch.arange(len(tensors)), torch.randperm(len(tensors))):
        model = build_model(load_model_config(folder), ModelForm(torch.float32, quantization))
        model.load_weights(tensors[index] for index in order.tolist())
        found.append(logits(model))
    assert torch.equal(*found)


def test_shards_that_are_stored_apart_have_no_tensor_of_all() -> None:
    """Both would read its first rows."""
    shape = LinearShape(
        prefix="experts.{}.",
        shards=(("gate", 4), ("up", 4)),
        in_features=8,
        num_experts=2,
        stacked="experts.gate_up",
        cut=Cut("experts"),
    )
    fused, apart = (
        WeightTable(dict(slot for part in make_stack(stored, torch.float32).parts for slot in _named(part)))
        for stored in (
            [StoredLinear(shape=shape, source=None, held=None, reason="")],
            [StoredLinear(shape=shape.only([index]), source=None, held=None, reason="") for index in range(2)],
        )
    )
    headers = [("experts.gate_up", torch.empty(2, 8, 8, device="meta"))]
    fused.check(headers)
    with pytest.raises(WeightsError, match=r"4 missing .*1 unexpected \(experts.gate_up\)"):
        apart.check(headers)


def _named(part: ExpertStack) -> Iterator[tuple[str, StackedSlots]]:
    return ((f"experts.{{}}.{name}", slots) for name, slots in part.slots())


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


FAULTS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({f"{EXPERT}.weight": None}, rf"1 missing \({EXPERT}.weight\)"),
    "extra": (
        {"model.layers.0.mlp.experts.5.up_proj.weight": zeros(40, 48)},
        r"1 unexpected \(model.layers.0.mlp.experts.5.up_proj.weight\)",
    ),
    "misshapen": (
        {f"{EXPERT}.weight": zeros(41, 48)},
        rf"{EXPERT}.weight has shape \[41, 48\] instead of \[40, 48\]",
    ),
    "of another type": (
        {f"{EXPERT}.weight": zeros(40, 48).char()},
        rf"{EXPERT}.weight has dtype int8 instead of float32",
    ),
    "router wider than the experts": (
        {"model.layers.0.mlp.gate.weight": zeros(6, 48)},
        r"model.layers.0.mlp.gate.weight has shape \[6, 48\] instead of \[5, 48\]",
    ),
    "twice": (
        {"model.layers.0.mlp.experts.down_proj": zeros(5, 48, 40)},
        r"model.layers.0.mlp.experts.0.down_proj.weight comes twice",
    ),
    "a misshapen stack": (
        {"model.layers.0.mlp.experts.gate_up_proj": zeros(5, 48, 80)},
        r"experts.gate_up_proj has shape \[5, 48, 80\] instead of \[5, 80, 48\]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit_are_named_before_any_is_read(
    fault: str, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = FAULTS[fault]
    rewrite(other, changes)
    monkeypatch.setattr(Checkpoint, "tensors", None)
    with pytest.raises(WeightsError, match=message):
        load(other)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_experts_per_tok", 6, "from 1 to 5"),
        ("num_experts_per_tok", 0, "from 1 to 5"),
        ("num_local_experts", -1, "from 0"),
        ("moe_intermediate_size", 0, "from 1"),
        ("scoring_func", "relu", "one of softmax"),
        ("decoder_sparse_step", 0, "from 1"),
        ("mlp_only_layers", ["1"], "of type int"),
    ],
)
def test_illegal_fields(field: str, value: Any, expected: str, other: Path) -> None:
    rewrite(other, {}, **{field: value})
    with pytest.raises(ModelConfigError, match=field) as caught:
        load_model_config(other)
    assert expected in str(caught.value.expected)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n_group", 4, "a divisor of the 6 experts"),
        ("topk_group", 4, "from 1 to 3"),
        ("topk_group", 1, "at most the 2"),
    ],
)
def test_illegal_groups(field: str, value: int, expected: str, tmp_path: Path) -> None:
    raw = {"model_type": "glm4_moe", **CASES["glm4_moe"].settings, "vocab_size": 8, "hidden_size": 48}
    raw |= {"intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
    with pytest.raises(ModelConfigError) as caught:
        load_model_config(tmp_path)
    assert expected in str(caught.value.expected)


# Descriptions whose experts 0 and 3 have different formats.
MIXED: dict[str, dict[str, Any]] = {
    "awq": {
        **{"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "modules_to_not_convert": ["experts.3"],
    },
    "gptq": {
        **{"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        "dynamic": {r".*experts\.3\..*": {"bits": 8}},
    },
    "fp8": {"quant_method": "fp8", "modules_to_not_convert": ["experts.3"]},
    "compressed-tensors": {
        **{"quant_method": "compressed-tensors", "format": "float-quantized"},
        "ignore": [r"re:.*experts\.3\."],
        "config_groups": {"0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
    },
}


@pytest.mark.parametrize("method", MIXED)
def test_formats_that_differ_inside_a_layer_are_refused(method: str, other: Path) -> None:
    rewrite(other, {}, quantization_config=MIXED[method])
    with pytest.raises(
        ModelConfigError, match=r"mlp.experts.3.gate_proj has another format than .*experts.0.gate_proj"
    ):
        load_model_config(other).weight_bytes("bfloat16")


@pytest.mark.skipif(not cpu.available(), reason="only packed weights are kept")
@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
def test_packed_weights_come_back(
    quantization: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    first = load(folder, torch.bfloat16, quantization=quantization, packed_weights_cache=True)
    join()
    monkeypatch.setattr(Checkpoint, "tensors", None)
    second = load(folder, torch.bfloat16, quantization=quantization, packed_weights_cache=True)
    assert second.mapped_bytes > 0
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize("module", ["mlp.experts.1.up_proj", "mlp.gate"])
def test_adapters_of_experts_are_refused(module: str, folder: Path, tmp_path: Path) -> None:
    name = f"base_model.model.model.layers.0.{module}.lora_"
    tensors = {f"{name}A.weight": torch.zeros(2, 48), f"{name}B.weight": torch.zeros(40, 2)}
    write_adapter(tmp_path, tensors, rank=2)
    with pytest.raises(AdapterError, match="a module of experts or of their router") as caught:
        read_adapter(tmp_path, load_model_config(folder), max_rank=8, dtype=torch.float32)
    assert "erge" in str(caught.value.fix)
