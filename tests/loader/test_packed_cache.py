"""Packed weights kept in a file: the same model comes out of it, and only the right file is believed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quire.demo
from quire import private_cache
from quire.config import EngineConfig
from quire.formats.weight_format import ON_LOAD
from quire.kernels import cpu
from quire.kernels.dense import linear, pack_linear
from quire.kernels.expert_stack import StackBuilder
from quire.kernels.grouped import PackedGrouped, grouped_linear, pack_grouped
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.head_linear import pack_heads
from quire.loader import packed_cache
from quire.loader.drafter import load_drafter_config
from quire.loader.packed_cache import PackedCache
from quire.model_config import load_model_config
from quire.models.registry import CausalLM
from quire.planning.cut_stages import part_of_rank
from quire.speculative_config import SpeculativeConfig
from tests.engine import heads
from tests.loading import load_model
from tests.models.paged_run import PagedRun
from tests.models.test_quantization_config import GPTQ

pytestmark = pytest.mark.skipif(not cpu.available(), reason="only packed weights are kept")

PROMPT = [5, 300, 7, 42]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed-weights"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(quire.demo.path("draft"), tmp_path / "draft"))


def load(folder: Path, max_model_len: int = 128, **arguments: str) -> CausalLM:
    config = replace(load_model_config(folder), max_model_len=max_model_len)
    model = load_model(config, torch.bfloat16, packed_weights_cache=True, **arguments)
    join()
    return model


def join() -> None:
    """Wait until what is written has its name."""
    for thread in threading.enumerate():
        if thread.name == packed_cache.THREAD_NAME:
            thread.join()


def logits(model: CausalLM) -> torch.Tensor:
    return PagedRun(model, torch.bfloat16).step({0: PROMPT})[0]


def kept(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


@pytest.mark.parametrize("quantization", [None, *ON_LOAD])
def test_the_second_load_maps_the_same_weights(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    packed = load(model_folder, quantization=quantization)
    monkeypatch.setattr("quire.loader.safetensors.Checkpoint.tensors", None)
    mapped = load(model_folder, quantization=quantization)
    assert packed.mapped_bytes == 0
    assert mapped.mapped_bytes >= mapped.weight_bytes() == packed.weight_bytes()
    assert torch.equal(logits(mapped), logits(packed))


def test_every_form_comes_back(model_folder: Path) -> None:
    N, K, bits, group_size = 96, 128, 4, 32
    weight = GroupedWeight(
        codes_NK=torch.randint(16, (N, K), dtype=torch.uint8),
        bits=bits,
        group_size=group_size,
        scales_NG=torch.rand(N, K // group_size).half(),
        zeros_NG=torch.randint(16, (N, K // group_size), dtype=torch.uint8),
        order_K=torch.randperm(K),
    )
    held = {
        "a": {"weight": pack_grouped(weight), "bias": torch.rand(N)},
        "b": {"weight": pack_linear(torch.rand(N, K))},
    }
    cache = PackedCache(load_model_config(model_folder), torch.float32, None, [])
    cache.write(held)
    join()
    found = cache.read()
    assert found is not None
    x_TK = torch.rand(3, K)
    assert torch.equal(grouped_linear(x_TK, found["a"]["weight"]), grouped_linear(x_TK, held["a"]["weight"]))
    assert torch.equal(linear(x_TK, found["b"]["weight"]), linear(x_TK, held["b"]["weight"]))
    assert torch.equal(found["a"]["bias"], held["a"]["bias"])


@pytest.mark.parametrize("entry", [-1, 32, 2**31 - 1, 0])
def test_a_damaged_order_of_in_features_is_not_used(model_folder: Path, cache: Path, entry: int) -> None:
    """Kernels would read where it points."""
    K = 32
    weight = GroupedWeight(
        codes_NK=torch.randint(16, (64, K), dtype=torch.uint8),
        bits=4,
        group_size=K,
        scales_NG=torch.rand(64, 1),
        order_K=torch.arange(K),
    )
    kept_weights = PackedCache(load_model_config(model_folder), torch.float32, None, [])
    kept_weights.write({"a": {"weight": pack_grouped(weight)}})
    join()
    assert kept_weights.read() is not None
    data, order = kept(cache).read_bytes(), torch.arange(K, dtype=torch.int32).numpy().tobytes()
    assert data.count(order) == 1
    changed = torch.arange(K, dtype=torch.int32)
    changed[5] = entry
    kept(cache).write_bytes(data.replace(order, changed.numpy().tobytes()))
    assert kept_weights.read() is None


def test_sizes_of_experts_have_to_fit_their_data(model_folder: Path) -> None:
    """Kernels would read behind the end."""
    E, N, K = 3, 64, 32
    weight = GroupedWeight(
        codes_NK=torch.randint(16, (N, K), dtype=torch.uint8),
        bits=4,
        group_size=K,
        scales_NG=torch.rand(N, 1),
        order_K=torch.randperm(K),
    )
    builder = StackBuilder(E, N)
    for e in range(E):
        builder.put(e, pack_grouped(weight))
    stack = builder.finished()
    held = stack.weight
    assert isinstance(held, PackedGrouped)
    assert held.order_K is not None
    dense, heads = pack_linear(torch.rand(N, K)), pack_heads(torch.rand(2, N, K))
    kept_weights = PackedCache(load_model_config(model_folder), torch.float32, None, [])
    for is_legal, form in (
        (True, stack),
        (False, replace(stack, E=4, weight=replace(held, N=4 * N, order_K=held.order_K.repeat(2, 1)[:4]))),
        (False, replace(stack, weight=replace(held, order_K=held.order_K[:2]))),
        (False, replace(stack, weight=replace(held, order_K=held.order_K[0]))),
        (False, replace(stack, E=1)),
        (True, (dense, heads)),
        (False, (replace(dense, N=2 * N), heads)),
        (False, (dense, replace(heads, H=3))),
    ):
        kept_weights.write({"a": {"weight": form}})
        join()
        assert (kept_weights.read() is not None) == is_legal


def test_a_form_that_is_not_known_is_not_kept(model_folder: Path, cache: Path) -> None:
    PackedCache(load_model_config(model_folder), torch.float32, None, []).write({"a": {"weight": object()}})
    assert not cache.exists()


def test_a_mapped_model_does_not_write_to_the_file(model_folder: Path, cache: Path) -> None:
    load(model_folder)
    before = kept(cache).read_bytes()
    mapped = load(model_folder)
    next(iter(mapped.held().values()))["weight"].data.zero_()
    assert kept(cache).read_bytes() == before


def test_formats_have_files_of_their_own(model_folder: Path, cache: Path) -> None:
    for quantization in (None, "int8", "int4", None, "int8"):
        load(model_folder, quantization=quantization)
    assert len(list(cache.iterdir())) == 3


SCRIPT = """
import sys
from dataclasses import replace
import torch
from quire.loader.drafter import load_drafter_config
from quire.loader.packed_cache import PackedCache
from quire.model_config import load_model_config
from tests.loading import load_model

config = replace(load_model_config(sys.argv[1]), max_model_len=64)
print(load_model(config, torch.bfloat16, packed_weights_cache=True).mapped_bytes)
print(PackedCache(load_model_config(sys.argv[2]), torch.bfloat16, None, [])._key)
"""


def test_a_stage_with_a_head_has_files_of_its_own(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage holds the embeddings for the head. Without the head it does not."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,3")
    target = load_model_config(heads.write_mimo(tmp_path / "mimo"))
    drafter = load_drafter_config(tmp_path / "mimo", SpeculativeConfig(method="mtp"), target)
    engine, found = EngineConfig(pipeline_parallel_size=2), []
    for whole in (target, replace(target, drafter=drafter)) * 2:
        model = load_model(part_of_rank(whole, engine, 0), torch.bfloat16, packed_weights_cache=True)
        join()
        found.append((len(model.expected_weights()), model.weight_bytes(), model.mapped_bytes > 0))
    assert [is_mapped for _, _, is_mapped in found] == [False, False, True, True]
    assert found[0][:2] == found[2][:2] < found[1][:2] == found[3][:2]
    assert len([*cache.iterdir()]) == 2


def test_another_process_finds_the_same_files(model_folder: Path, cache: Path) -> None:
    """Also for other lengths. The keys of quantized checkpoints are the same at every start.

    Python orders sets of texts differently in each process.
    """
    load(model_folder)
    quantized = Path(shutil.copytree(model_folder, model_folder.with_name("quantized")))
    path = quantized / "config.json"
    form = {"quant_method": "fp8", "ignored_layers": ["lm_head", *(f"model.layers.{i}" for i in range(20))]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": form}))
    environment = os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model_folder, quantized],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    mapped_bytes, key = done.stdout.splitlines()
    assert 0 < int(mapped_bytes) < kept(cache).stat().st_size
    assert key == str(PackedCache(load_model_config(quantized), torch.bfloat16, None, [])._key)


def test_patterns_that_differ_far_behind_have_keys_of_their_own(model_folder: Path) -> None:
    path, long = model_folder / "config.json", "x" * 200
    config, keys = json.loads(path.read_text()), []
    for end in "ab":
        path.write_text(json.dumps(config | {"quantization_config": GPTQ | {"dynamic": {f"-:{long}{end}": {}}}}))
        keys.append(PackedCache(load_model_config(model_folder), torch.float32, None, [])._key)
    assert keys[0] != keys[1]


def test_only_this_user_can_read_it(model_folder: Path, cache: Path) -> None:
    load(model_folder)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert kept(cache).stat().st_mode & 0o777 == 0o600


def flip(position: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with file.open("r+b") as opened:
            opened.seek(position)
            byte = opened.read(1)[0]
            opened.seek(position)
            opened.write(bytes([byte ^ 1]))

    return damage


def link(file: Path) -> None:
    shutil.copy(file, file.parent.parent / "elsewhere")
    file.unlink()
    file.symlink_to(file.parent.parent / "elsewhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "magic": flip(0),
    "length": flip(8),
    "digest": flip(16),
    "header": flip(200),
    "empty": lambda file: os.truncate(file, 0),
    "no header": lambda file: os.truncate(file, 100),
    "cut": lambda file: os.truncate(file, file.stat().st_size - packed_cache.ALIGNMENT),
    "longer": lambda file: os.truncate(file, file.stat().st_size + packed_cache.ALIGNMENT),
    "writable for others": lambda file: file.chmod(0o622),
    "a link": link,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_believed_is_written_anew(model_folder: Path, cache: Path, damage: str) -> None:
    expected = logits(load(model_folder))
    DAMAGES[damage](kept(cache))
    model = load(model_folder)
    assert model.mapped_bytes == 0
    assert torch.equal(logits(model), expected)
    assert load(model_folder).mapped_bytes > 0, "not written anew"


def test_another_checkpoint_in_the_same_folder_is_noticed(model_folder: Path, cache: Path) -> None:
    load(model_folder)
    file = model_folder / "model.safetensors"
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(status.st_size - 4096)
        opened.write(bytes(4096))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed = load(model_folder)
    assert changed.mapped_bytes == 0
    assert torch.equal(logits(load(model_folder)), logits(changed))
    kept(cache)  # the old one is gone


def test_another_version_of_the_code_is_noticed(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model_folder)
    monkeypatch.setattr(packed_cache, "code_identity", lambda *extensions: "another")
    assert load(model_folder).mapped_bytes == 0


@pytest.mark.parametrize("name", ["formats/weight_format.py", "hf_config/layer_format.py", "kernels/triton/grouped.py"])
def test_all_code_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_cache, "__file__", str(tmp_path / "package" / "private_cache.py"))
    file = tmp_path / "package" / name
    file.parent.mkdir(parents=True)
    file.write_text("before")
    before = private_cache.code_identity()
    file.write_text("after")
    assert private_cache.code_identity() != before


def test_a_folder_others_can_write_to_is_not_used(model_folder: Path, cache: Path) -> None:
    load(model_folder)
    before = kept(cache).stat()
    cache.chmod(0o777)
    assert load(model_folder).mapped_bytes == 0
    assert kept(cache).stat().st_mtime_ns == before.st_mtime_ns


def test_a_full_disk_is_no_error(model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    assert load(model_folder).mapped_bytes == 0
    assert list(cache.iterdir()) == []


def test_a_disk_that_fills_leaves_nothing(model_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed_cache, "_write_tensors", fail)
    assert load(model_folder).mapped_bytes == 0
    assert list(cache.iterdir()) == []


def test_what_another_process_writes_is_left_alone(model_folder: Path, cache: Path) -> None:
    load(model_folder)
    scratch = kept(cache).with_suffix(".writing")
    kept(cache).unlink()
    scratch.write_bytes(b"half of it")
    with scratch.open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        load(model_folder)
    assert kept(cache).read_bytes() == b"half of it"
    load(model_folder)
    assert kept(cache).suffix == ".packed", "what a killed process has left is written over"


def test_without_the_setting_nothing_is_written(model_folder: Path, cache: Path) -> None:
    load_model(load_model_config(model_folder), torch.bfloat16)
    assert not cache.exists()


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_cache.folder() == tmp_path / "cache" / "packed-weights"
    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packed_cache.folder() == tmp_path / "quire" / "packed-weights"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert packed_cache.folder() == tmp_path / "home" / ".cache" / "quire" / "packed-weights"


def test_what_is_not_kept_is_said(model_folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(model_folder, load_format="dummy")
    assert "this needs a native model" in caplog.text
    assert not cache.exists()
