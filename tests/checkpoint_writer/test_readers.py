"""Checkpoints of `quire quantize` in the eyes of others: transformers reads them, and vLLM's tensors are those written.

A run of vLLM with them is in benchmarks/results/epyc-zen5-2core/checkpoints_2026-11-22.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import quire.demo
from quire.cli.main import main
from quire.kernels import cpu
from quire.model_config import load_model_config
from tests.checkpoint_writer.folders import tensors, write_plain
from tests.loading import load_model

GROUP = 128
NAMES = ("int4", "int8", "fp8", "gptq", "gptq-act-order", "awq")
GPTQ_TENSORS = {
    "qweight": (torch.int32, "K / 8, N"),
    "qzeros": (torch.int32, "G, N / 8"),
    "scales": (torch.float16, "G, N"),
    "g_idx": (torch.int32, "K"),
}
# Of a layer [N, K] with G groups: the tensors that `create_weights` of vLLM 0.32's linear methods asks for, and g_idx,
# which it ignores. It converts scales to the dtype the model runs in.
TENSORS: dict[str, dict[str, tuple[torch.dtype, str]]] = {
    "int4": {
        "weight_packed": (torch.int32, "N, K / 8"),
        "weight_scale": (torch.bfloat16, "N, G"),
        "weight_shape": (torch.int64, "2"),
    },
    "int8": {"weight": (torch.int8, "N, K"), "weight_scale": (torch.bfloat16, "N, 1")},
    "fp8": {"weight": (torch.float8_e4m3fn, "N, K"), "weight_scale": (torch.bfloat16, "N, 1")},
    "gptq": GPTQ_TENSORS,
    "gptq-act-order": GPTQ_TENSORS,
    "awq": {
        "qweight": (torch.int32, "K, N / 8"),
        "qzeros": (torch.int32, "G, N / 8"),
        "scales": (torch.float16, "G, N"),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_and_dtypes(folders: dict[str, Path], name: str) -> None:
    """No tensor more, none less: a reader that finds an unknown one stops."""
    config = load_model_config(quire.demo.path())
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for linear in config.linears():
        for module, (_, N) in zip(linear.names, linear.shards, strict=True):
            if "_proj" not in module:
                continue
            K = linear.in_features
            sizes = {"N": N, "K": K, "G": K // GROUP, "N / 8": N // 8, "K / 8": K // 8, "1": 1, "2": 2}
            for suffix, (dtype, shape) in TENSORS[name].items():
                expected[f"{module}.{suffix}"] = (dtype, tuple(sizes[size] for size in shape.split(", ")))
    found = {key: (x.dtype, tuple(x.shape)) for key, x in tensors(folders[name]).items() if "_proj" in key}
    assert found == expected


@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
@pytest.mark.parametrize("name", NAMES)
def test_quire_plan_has_the_loaded_bytes(
    folders: dict[str, Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a byte; a quantized checkpoint has its own format only."""
    assert main(["plan", str(folders[name]), "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"][0]["weights"]
    model = load_model(load_model_config(folders[name]), torch.bfloat16)
    assert row["num_bytes"] == model.weight_bytes()


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order"])
def test_gptq_needs_no_order_of_in_features(folders: dict[str, Path], name: str) -> None:
    """vLLM refuses `desc_act`; and an order that changes nothing is left out."""
    description = json.loads((folders[name] / "config.json").read_text())["quantization_config"]
    assert (description["desc_act"], description["static_groups"]) == (False, name == "gptq-act-order")
    for key, tensor in tensors(folders[name]).items():
        if key.endswith("g_idx"):
            assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32) // GROUP)


@pytest.mark.filterwarnings("ignore")  # warnings of gptqmodel and what it brings
@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq"])
def test_transformers_reads_gptq_and_awq(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """The weights in floating point give the same logits."""
    for package in ("optimum", "gptqmodel"):
        pytest.importorskip(package, reason="transformers reads AWQ and GPTQ through optimum and gptqmodel")
    token_ids = torch.randint(4096, (2, 64), generator=torch.Generator().manual_seed(0))
    plain = write_plain(folders[name], tmp_path / "plain")
    with torch.inference_mode():
        found, expected = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(token_ids).logits
            for folder in (folders[name], plain)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
