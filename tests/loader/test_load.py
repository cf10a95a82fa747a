"""load_model on a native model: its tensors, its reports, its refusals."""

from __future__ import annotations

import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire.demo
from quire.errors import ModelConfigError, WeightsError
from quire.loader.safetensors_headers import INDEX_NAME
from quire.model_config import load_model_config
from tests.loading import load_model
from tests.models.paged_run import PagedRun

PROMPT = [5, 300, 7, 42]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(quire.demo.path("draft"), tmp_path / "draft"))


def logits(folder: Path, **arguments: str) -> torch.Tensor:
    model = load_model(load_model_config(folder), torch.float32, **arguments)
    return PagedRun(model, torch.float32).step({0: PROMPT})[0]


def test_progress_ends_at_one(folder: Path) -> None:
    reports: list[tuple[str, float, str]] = []
    load_model(load_model_config(folder), torch.bfloat16, progress=lambda *report: reports.append(report))
    phase, fraction, detail = reports[-1]
    assert (phase, fraction) == ("load", 1.0)
    assert re.fullmatch(r"(\d+\.\d MiB) of \1", detail), detail


def test_shards_give_the_same_model(folder: Path) -> None:
    expected = logits(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, tensors in shards.items():
        save_file({name: weights[name] for name in tensors}, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_the_model_keeps_nothing_of_the_file(folder: Path, model_impl: str) -> None:
    model = load_model(load_model_config(folder), torch.bfloat16, model_impl=model_impl)
    before = PagedRun(model, torch.bfloat16).step({0: PROMPT})[0]
    with (folder / "model.safetensors").open("r+b") as file:  # in place: a mapped page would change
        file.seek(10_000)
        file.write(bytes(1_000_000))
    assert torch.equal(PagedRun(model, torch.bfloat16).step({0: PROMPT})[0], before)


def live_bytes() -> int:
    """Of all tensors of this process, shared storages once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def test_weights_are_held_once() -> None:
    before = live_bytes()
    model = load_model(load_model_config(quire.demo.path("target")), torch.bfloat16)
    rotary_tables = 2 * model.config.max_model_len * model.config.rope.rotary_dim * 4
    assert live_bytes() - before < 1.1 * model.weight_bytes() + rotary_tables


def test_dummy_weights_need_no_checkpoint_and_repeat(folder: Path) -> None:
    real = logits(folder)
    (folder / "model.safetensors").unlink()
    first, second = logits(folder, load_format="dummy"), logits(folder, load_format="dummy")
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not torch.equal(first, real)


def test_transformers_code_gives_the_same_logits_as_the_native_model(folder: Path) -> None:
    torch.testing.assert_close(logits(folder, model_impl="transformers"), logits(folder), rtol=0, atol=1e-4)


def edited(folder: Path, edit: str) -> None:
    path = folder / "model.safetensors"
    if edit == "truncated":
        path.write_bytes(path.read_bytes()[:-1000])
        return
    weights = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if edit == "missing":
        del weights[name]
    elif edit == "unexpected":
        weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    elif edit == "misshapen":
        weights[name] = weights[name].T.contiguous()
    elif edit == "integers":
        weights[name] = weights[name].to(torch.int8)
    save_file(weights, path)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ("missing", "model.layers.1.mlp.up_proj.weight"),
        ("unexpected", "model.layers.7.mlp.up_proj.weight"),
        ("misshapen", "model.layers.1.mlp.up_proj.weight has shape [128, 384] instead of [384, 128]"),
        ("integers", "model.layers.1.mlp.up_proj.weight has dtype int8"),
        ("truncated", "model.safetensors is truncated inside tensor"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder: Path, edit: str, named: str) -> None:
    edited(folder, edit)
    with pytest.raises(WeightsError) as caught:
        load_model(load_model_config(folder), torch.float32)
    assert named in str(caught.value)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="pickle"):
        load_model(load_model_config(folder), torch.float32)


def test_native_only(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text()) | {"architectures": ["GPTNeoXForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_model_config(folder, any_architecture=True)
    with pytest.raises(ModelConfigError, match="without native implementation"):
        load_model(config, torch.float32, model_impl="native")
