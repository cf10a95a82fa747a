"""An adapter's folder is read whole or refused with a reason, and before that no memory is taken."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quire.demo
from quire.errors import AdapterError, AdapterNotFoundError
from quire.hf_config.quantization import OUTPUT
from quire.lora import adapter as adapter_module
from quire.lora.adapter_config import CONFIG_NAME
from quire.lora.paths import TENSORS_NAME, allowed_folder
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import EMBEDDINGS
from tests.lora.adapters import PREFIX, random_tensors, saved_tensors, write_adapter, write_random_adapter
from tests.lora.whole_adapters import Adapter, read_adapter

Q0 = "model.layers.0.self_attn.q_proj"


@cache
def base() -> ModelConfig:
    return load_model_config(quire.demo.path("draft"))


def read(folder: Path, max_rank: int = 16, dtype: torch.dtype = torch.float32, **limits: Any) -> Adapter:
    return read_adapter(folder, base(), max_rank=max_rank, dtype=dtype, **limits)


def test_tensors_come_back_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, base(), modules=["q_proj", "down_proj", "embed_tokens", "lm_head"], lora_alpha=6)
    saved = saved_tensors(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        adapter = read(tmp_path, dtype=dtype)
        assert next(iter(adapter.deltas)) == EMBEDDINGS
        assert list(adapter.deltas)[-1] == OUTPUT
        for name, delta in adapter.deltas.items():
            middle = "embedding_" if name == EMBEDDINGS else ""
            suffix = "" if name == EMBEDDINGS else ".weight"
            assert torch.equal(delta.a_RK, saved[f"{PREFIX}{name}.lora_{middle}A{suffix}"].to(dtype))
            assert torch.equal(delta.b_NR, saved[f"{PREFIX}{name}.lora_{middle}B{suffix}"].to(dtype))
            assert delta.scale == 1.5
        facts = adapter.facts
        assert (facts.rank, facts.num_modules) == (4, len(adapter.deltas))
        assert facts.num_bytes == sum(tensor.numel() for tensor in saved.values()) * dtype.itemsize


def test_the_digest_is_of_what_the_adapter_does(tmp_path: Path) -> None:
    tensors = random_tensors(base(), 4, modules=["q_proj"])
    name, tensor = next(iter(tensors.items()))
    digests = {
        "first": read(write_adapter(tmp_path / "1", tensors, rank=4)).facts.digest,
        "other factor": read(write_adapter(tmp_path / "2", tensors, rank=4, lora_alpha=9)).facts.digest,
        "other number": read(write_adapter(tmp_path / "3", tensors | {name: tensor + 1e-3}, rank=4)).facts.digest,
        "other dtype": read(write_adapter(tmp_path / "4", tensors, rank=4, dtype=torch.float16)).facts.digest,
        "other modules": read(write_random_adapter(tmp_path / "5", base(), modules=["k_proj"])).facts.digest,
    }
    assert len(set(digests.values())) == len(digests)
    turned = dict(reversed(tensors.items()))
    same = write_adapter(tmp_path / "6", turned, rank=4, base_model_name_or_path="x", target_modules="all-linear")
    assert read(same, dtype=torch.bfloat16).facts.digest == digests["first"]


# Changes of a good adapter's config, and words of the error.
CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "other method": ({"peft_type": "IA3"}, "no LoRA adapter. Got 'IA3'"),
    "no method": ({"peft_type": None}, "no LoRA adapter"),
    "DoRA": ({"use_dora": True}, "use_dora.*merge_and_unload"),
    "bias": ({"bias": "lora_only"}, "trained biases.*merge_and_unload"),
    "bias of B": ({"lora_bias": True}, "lora_bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save.*merge_and_unload"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "initialization has changed.*pissa_niter_4"),
    "future": ({"use_new_thing": {"a": 1}}, "use_new_thing"),
    "rank 0": ({"r": 0}, "illegal r. Got 0"),
    "rank as text": ({"r": "4"}, "illegal r"),
    "true rank": ({"r": True}, "illegal r"),
    "huge rank": ({"r": 2**62}, "illegal r"),
    "NaN": ({"lora_alpha": float("nan")}, "illegal lora_alpha"),
    "infinity": ({"lora_alpha": 1e400}, "illegal lora_alpha"),
    "pattern is a list": ({"rank_pattern": ["q_proj"]}, "illegal rank_pattern"),
    "pattern of text": ({"alpha_pattern": {"q_proj": "x"}}, "illegal q_proj"),
    "rank of pattern": (
        {"rank_pattern": {"q_proj": 5}},
        r"lora_A of .*q_proj does not fit.*Got \[4, 128\].*\[5, 128\]",
    ),
    "other rank": ({"r": 8}, "does not fit the model and the adapter's config"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_that_is_refused(fault: str, tmp_path: Path) -> None:
    fields, words = CONFIG_FAULTS[fault]
    write_random_adapter(tmp_path, base(), modules=["q_proj"], **fields)
    with pytest.raises(AdapterError, match=words) as error:
        read(tmp_path)
    assert error.value.status == 400
    assert error.value.fix


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_tensor(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.ones(shape)}


def poisoned(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[f"{PREFIX}{Q0}.lora_B.weight"][-1, -1] = value
        return tensors

    return change


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "foreign module": (renamed("q_proj", "query"), "module that the model does not have.*self_attn.query.*q_proj"),
    "foreign layer": (renamed("layers.0.", "layers.7."), "layers.7"),
    "no prefix": (renamed(PREFIX, ""), "module that the model does not have"),
    "embedding's name": (renamed("lora_A.weight", "lora_embedding_A"), "module that the model does not have"),
    "DoRA": (with_tensor(f"{PREFIX}{Q0}.lora_magnitude_vector", 64), "DoRA tensor.*merge_and_unload"),
    "bias": (with_tensor(f"{PREFIX}{Q0}.lora_B.bias", 64), "a bias.*merge_and_unload"),
    "whole weight": (with_tensor(f"{PREFIX}lm_head.weight", 4096, 128), "modules_to_save.*merge_and_unload"),
    "added tokens": (
        with_tensor(f"{PREFIX}{EMBEDDINGS}.base_layer.weight", 4099, 128),
        r"tokens were added.*\[4099\].*\[4096\]",
    ),
    "embedding's tokens": (
        lambda tensors: {
            f"{PREFIX}{EMBEDDINGS}.lora_embedding_A": torch.ones(4, 4099),
            f"{PREFIX}{EMBEDDINGS}.lora_embedding_B": torch.ones(128, 4),
        },
        r"tokens were added.*\[4099\].*\[4096\]",
    ),
    "no B": (lambda tensors: {f"{PREFIX}{Q0}.lora_A.weight": torch.ones(4, 128)}, f"no lora_B for {Q0}"),
    "nothing": (lambda tensors: {}, "no tensors"),
    "three dimensions": (with_tensor(f"{PREFIX}{Q0}.lora_A.weight", 4, 128, 1), r"does not fit.*\[4, 128, 1\]"),
    "no rank": (with_tensor(f"{PREFIX}{Q0}.lora_A.weight", 0, 128), r"does not fit.*\[0, 128\]"),
    "turned": (with_tensor(f"{PREFIX}{Q0}.lora_A.weight", 128, 4), r"does not fit.*\[128, 4\]"),
    "NaN": (poisoned(float("nan")), f"{Q0} holds NaN or infinity"),
    "infinity": (poisoned(-float("inf")), f"{Q0} holds NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_are_refused(fault: str, tmp_path: Path) -> None:
    change, words = TENSOR_FAULTS[fault]
    write_adapter(tmp_path, change(random_tensors(base(), 4, modules=["q_proj"])), rank=4)
    with pytest.raises(AdapterError, match=words) as error:
        read(tmp_path)
    assert error.value.status == 400
    assert error.value.fix


def test_limits_of_the_server(tmp_path: Path) -> None:
    write_random_adapter(tmp_path, base(), 9, modules=["q_proj", "down_proj"])
    with pytest.raises(AdapterError, match=f"rank of {Q0}.*Got 9.*at most 8.*--max-lora-rank of at least 9"):
        read(tmp_path, max_rank=8)
    with pytest.raises(AdapterError, match=r"down_proj.*--lora-target-modules"):
        read(tmp_path, target_modules=["q_proj"])
    assert read(tmp_path, max_rank=9, target_modules=["q_proj", "down_proj"]).facts.rank == 9


def test_a_number_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    tensors = random_tensors(base(), 4, modules=["q_proj"])
    tensors[f"{PREFIX}{Q0}.lora_A.weight"][0, 0] = 1e6
    write_adapter(tmp_path, tensors, rank=4)
    with pytest.raises(AdapterError, match=r"infinity in torch.float16.*--lora-dtype"):
        read(tmp_path, dtype=torch.float16)
    assert read(tmp_path).deltas[Q0].a_RK[0, 0] == 1e6


def test_integers_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, random_tensors(base(), 4, modules=["q_proj"]), rank=4, dtype=torch.int8)
    with pytest.raises(AdapterError, match=r"floating-point type.*int8"):
        read(tmp_path)


def test_the_base_own_embeddings_beside_an_adapter_are_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(base(), 4, modules=["embed_tokens"])
    digest = read(write_adapter(tmp_path / "without", tensors, rank=4)).facts.digest
    tensors[f"{PREFIX}{EMBEDDINGS}.base_layer.weight"] = torch.full((4096, 128), float("nan"))
    assert read(write_adapter(tmp_path / "with", tensors, rank=4)).facts.digest == digest


def no_allocation(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("memory is taken before all sizes are checked")


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AdapterError:
    with monkeypatch.context() as patch:
        patch.setattr(adapter_module.torch, "empty", no_allocation)
        with pytest.raises(AdapterError) as error:
            read(folder)
    assert error.value.status == 400
    return error.value


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_adapter(tmp_path, base(), 1, modules=["q_proj"])
    path = tmp_path / TENSORS_NAME
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in {*range(9), *range(9, header, 5), *range(header - 2, len(whole), 97), len(whole) - 1}:
        path.write_bytes(whole[:length])
        refused(tmp_path, monkeypatch)
    path.write_bytes(whole + b"\0")
    refused(tmp_path, monkeypatch)
    path.write_bytes(whole)
    config = (tmp_path / CONFIG_NAME).read_bytes()
    for length in range(0, len(config), 3):
        (tmp_path / CONFIG_NAME).write_bytes(config[:length])
        refused(tmp_path, monkeypatch)


def lying(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


LIES: dict[str, Callable[[], bytes]] = {
    "header of 2^63 bytes": lambda: struct.pack("<Q", 1 << 63) + b"{}",
    "header of 1 TB": lambda: struct.pack("<Q", 1 << 40) + b"{}" * 50,
    "tensor of 2^60 bytes": lambda: lying(
        {f"{PREFIX}{Q0}.lora_A.weight": {"dtype": "F32", "shape": [1 << 29, 1 << 29], "data_offsets": [0, 1 << 60]}}
    ),
    "more than the file": lambda: lying(
        {f"{PREFIX}{Q0}.lora_A.weight": {"dtype": "F32", "shape": [4, 128], "data_offsets": [0, 2048]}}, bytes(100)
    ),
    "overlap": lambda: lying(
        {
            f"{PREFIX}{Q0}.lora_{letter}.weight": {"dtype": "F32", "shape": [4, 128], "data_offsets": [0, 2048]}
            for letter in "AB"
        },
        bytes(2048),
    ),
    "100,000 entries": lambda: lying(
        {f"{PREFIX}{Q0}.lora_A.{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}
    ),
    "deep": lambda: lying(b"[" * 100_000),
    "pointer of git lfs": lambda: b"version https://git-lfs.github.com/spec/v1\n",
    "long name": lambda: lying({"x" * 100_000: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_about_sizes(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_adapter(tmp_path, base(), 4, modules=["q_proj"])
    (tmp_path / TENSORS_NAME).write_bytes(LIES[lie]())
    assert len(refused(tmp_path, monkeypatch).message) < 2000


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickles_are_not_read(name: str, tmp_path: Path) -> None:
    write_random_adapter(tmp_path, base(), modules=["q_proj"])
    (tmp_path / TENSORS_NAME).rename(tmp_path / name)
    with pytest.raises(AdapterError, match=r"pickle.*safe_serialization"):
        read(tmp_path)


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    write_random_adapter(tmp_path, base(), modules=["q_proj"])
    path = tmp_path / name
    path.unlink()
    with pytest.raises(AdapterError, match=f"no {name}"):
        read(tmp_path)
    os.mkfifo(path)
    with pytest.raises(AdapterError, match=f"no {name}"):
        read(tmp_path)
    path.unlink()
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(AdapterError):
        read(tmp_path)


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_a_file_that_changes_while_it_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_adapter(tmp_path / "a", base(), modules=["q_proj"])
    write_random_adapter(tmp_path / "b", base(), modules=["q_proj"], seed=1, lora_alpha=3)
    read_header = adapter_module.read_open_header

    def replace_meanwhile(*args: Any) -> Any:
        (tmp_path / "b" / name).replace(tmp_path / "a" / name)
        return read_header(*args)

    monkeypatch.setattr(adapter_module, "read_open_header", replace_meanwhile)
    with pytest.raises(AdapterError, match=f"{name} changed while it was read"):
        read(tmp_path / "a")


def test_paths_outside_the_roots_look_like_missing_ones(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-2"
    good = write_random_adapter(root / "good", base(), modules=["q_proj"])
    write_random_adapter(outside / "other", base(), modules=["q_proj"])
    (root / "link").symlink_to(outside / "other")
    (root / "inner").symlink_to(good)
    (root / "loop").symlink_to(root / "loop")
    half = write_random_adapter(root / "half", base(), modules=["q_proj"])
    (half / TENSORS_NAME).unlink()
    (half / TENSORS_NAME).symlink_to(outside / "other" / TENSORS_NAME)
    for path in ("good", str(good), "./good", "inner"):
        assert allowed_folder(path, [tmp_path / "missing", root]) == good
    messages = set()
    hostile = [
        *("missing", "../root-2/other", "good/../good", str(outside / "other"), "link", "loop", "half", "/etc/passwd"),
        *("a\0b", "x" * 5000, "\udcff", "good/adapter_config.json"),
    ]
    for path in hostile:
        with pytest.raises(AdapterNotFoundError) as error:
            allowed_folder(path, [root])
        messages.add((error.value.status, error.value.what, error.value.expected, error.value.fix))
    assert len(messages) == 1
    with pytest.raises(AdapterNotFoundError):
        allowed_folder(str(good), [])
