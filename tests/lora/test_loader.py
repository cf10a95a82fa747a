"""The loader's thread reads adapters in order; an error is of one call; other content than before is told apart."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.demo
from quire.errors import AdapterChangedError, AdapterError
from quire.lora import adapter as adapter_module
from quire.lora import loader as loader_module
from quire.lora.adapter import AdapterFile, FileStamp, open_adapter
from quire.lora.adapter_config import CONFIG_NAME
from quire.lora.loader import AdapterLoader
from quire.lora.paths import TENSORS_NAME
from quire.model_config import load_model_config
from tests.lora.adapters import write_random_adapter
from tests.lora.whole_adapters import read_adapter

BASE = load_model_config(quire.demo.path("draft"))


open_file = partial(open_adapter, config=BASE, max_rank=16)


def digest_of(folder: Path) -> str:
    return read_adapter(folder, BASE, max_rank=16, dtype=torch.float32).facts.digest


def read(file: AdapterFile) -> str:
    for _ in file.pieces(torch.float32):
        pass
    return file.digest


@pytest.fixture
def loader() -> AdapterLoader[str]:
    return AdapterLoader(open_file, read)


def test_adapters_come_packed_and_errors_stay_with_their_call(loader: AdapterLoader[str], tmp_path: Path) -> None:
    good = [write_random_adapter(tmp_path / str(seed), BASE, modules=["q_proj"], seed=seed) for seed in range(3)]
    bad = write_random_adapter(tmp_path / "bad", BASE, modules=["q_proj"], use_dora=True)
    answers = [loader.load(folder) for folder in (good[0], bad, good[1], tmp_path / "none", good[2])]
    with pytest.raises(AdapterError, match="use_dora"):
        answers[1].result()
    with pytest.raises(AdapterError, match="no adapter_config"):
        answers[3].result()
    assert [answers[i].result() for i in (0, 2, 4)] == [digest_of(folder) for folder in good]


def test_an_adapter_that_is_read_again(loader: AdapterLoader[str], tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    digest = loader.load(folder).result()
    assert loader.load(folder, digest).result() == digest
    write_random_adapter(tmp_path, BASE, modules=["q_proj"], seed=1)
    with pytest.raises(AdapterChangedError, match="another one") as error:
        loader.load(folder, digest).result()
    assert error.value.status == 503
    (folder / CONFIG_NAME).unlink()
    with pytest.raises(AdapterChangedError, match="no adapter_config"):
        loader.load(folder, digest).result()


class Hashing:
    """hashlib, which counts."""

    def __init__(self) -> None:
        self.num_hashes = 0

    def sha256(self, data: bytes = b"") -> Any:
        self.num_hashes += 1
        return hashlib.sha256(data)


@pytest.fixture(autouse=True)
def short_time_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the system marked files with finer times, so that stamps settle four times as soon."""
    monkeypatch.setattr(adapter_module, "_SETTLED_NS", adapter_module._SETTLED_NS // 4)


def settle(folder: Path) -> None:
    """Wait until the stamps of the files prove that they are unchanged, and no longer than that."""
    while any(not FileStamp.of(file.stat()).is_settled(time.time_ns()) for file in folder.iterdir()):
        time.sleep(0.01)


def write_in_place(path: Path, find: bytes, put: bytes) -> None:
    """Change bytes of a file that keeps its size and the time of its last write."""
    before = path.stat()
    content = path.read_bytes()
    assert find in content
    assert len(find) == len(put)
    with path.open("r+b") as file:
        file.write(content.replace(find, put))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def test_unchanged_files_are_not_hashed_again(
    loader: AdapterLoader[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If their stamps were settled when they were read, and still name the same content."""
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    hashing = Hashing()
    monkeypatch.setattr(adapter_module, "hashlib", hashing)

    def num_hashes(digest: str | None) -> int:
        before = hashing.num_hashes
        loader.load(folder, digest).result()
        return hashing.num_hashes - before

    digest = loader.load(folder).result()
    all_hashes = hashing.num_hashes
    assert num_hashes(digest) == all_hashes, "the file was written just now, and could be again within a time step"
    settle(folder)
    assert num_hashes(digest) == all_hashes
    assert num_hashes(digest) == num_hashes(digest) == 0
    assert num_hashes(None) == all_hashes, "who registers it learns what it is"
    (folder / CONFIG_NAME).chmod(0o640)
    assert num_hashes(digest) == all_hashes
    assert num_hashes(digest) == all_hashes, "changed just now"
    settle(folder)
    assert [num_hashes(digest) for _ in range(2)] == [all_hashes, 0]


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_a_change_in_place_is_seen(name: str, loader: AdapterLoader[str], tmp_path: Path) -> None:
    """Though the file keeps its size and the time of its last write."""
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    settle(folder)
    digest = loader.load(folder).result()
    find = b'"lora_alpha": 8' if name == CONFIG_NAME else (folder / name).read_bytes()[-4:]
    write_in_place(folder / name, find, find[:-1] + (b"9" if name == CONFIG_NAME else bytes([find[-1] ^ 1])))
    with pytest.raises(AdapterChangedError, match="another one"):
        loader.load(folder, digest).result()


def test_a_file_in_the_place_of_another_is_seen(loader: AdapterLoader[str], tmp_path: Path) -> None:
    """Though it has the same size and the same time of its last write."""
    folders = [write_random_adapter(tmp_path / str(i), BASE, modules=["q_proj"], seed=i) for i in range(2)]
    paths = [folder / TENSORS_NAME for folder in folders]
    os.utime(paths[1], ns=(0, paths[0].stat().st_mtime_ns))
    settle(folders[0])
    digest = loader.load(folders[0]).result()
    paths[1].replace(paths[0])
    with pytest.raises(AdapterChangedError, match="another one"):
        loader.load(folders[0], digest).result()


def test_a_change_within_one_time_step_is_seen(
    loader: AdapterLoader[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that counts whole seconds gives both contents one stamp."""
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    now_ns = time.time_ns()
    monkeypatch.setattr(FileStamp, "of", lambda found: FileStamp(1, 1, found.st_size, now_ns, now_ns))
    digest = loader.load(folder).result()
    write_random_adapter(tmp_path, BASE, modules=["q_proj"], seed=1)
    with pytest.raises(AdapterChangedError, match="another one"):
        loader.load(folder, digest).result()


def test_only_so_many_proofs_are_kept(
    loader: AdapterLoader[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "_MOST_PROOFS", 2)
    folders = [write_random_adapter(tmp_path / str(i), BASE, modules=["q_proj"], seed=i) for i in range(3)]
    for folder in folders:
        settle(folder)
        loader.load(folder).result()
    assert list(loader._proofs) == folders[1:]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_only_the_loader_has_a_lower_priority(tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    loader = AdapterLoader(open_file, lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert loader.load(folder).result() == min(own + 1, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
@pytest.mark.parametrize("niceness", [5, 19])
def test_a_process_of_low_priority_loads(tmp_path: Path, niceness: int) -> None:
    """Only root may raise a priority, as `nice quire serve` and systemd's Nice= would need for a fixed one."""
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    found: list[int] = []

    def starts() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        loader = AdapterLoader(open_file, lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        found.append(loader.load(folder).result(30))

    thread = threading.Thread(target=starts)
    thread.start()
    thread.join()
    assert found == [min(niceness + 1, 19)]


def test_new_adapters_rest_beside_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pieces of its file. If a request waits for it, it does not rest."""
    monkeypatch.setattr(adapter_module, "ADAPTER_READ_BYTES", 1)
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    rests: list[float] = []
    loader = AdapterLoader(open_file, read, rests.append)

    def num_rests(digest: str | None, is_awaited: bool = False) -> int:
        before = len(rests)
        loader.load(folder, digest, is_awaited).result()
        return len(rests) - before

    digest = digest_of(folder)
    assert num_rests(None) == 0, "no step is computed"
    with loader.beside_step():
        assert num_rests(None) == 2 * len(BASE.layers), "one for each tensor"
        assert num_rests(digest, is_awaited=True) == num_rests(None, is_awaited=True) == 0
    assert num_rests(None) == 0
    assert min(rests) > 0


@pytest.mark.parametrize("is_known", [True, False])
def test_nobody_rests_before_an_adapter_that_requests_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """It is called while a new adapter rests, which could last for minutes here, and then rests no more."""
    monkeypatch.setattr(adapter_module, "ADAPTER_READ_BYTES", 1)
    monkeypatch.setattr(loader_module, "_RESTS", 1e9)
    monkeypatch.setattr(loader_module, "_LONGEST_REST", 600.0)
    folders = [write_random_adapter(tmp_path / name, BASE, modules=["q_proj"]) for name in ("new", "known")]
    loader = AdapterLoader(open_file, read)
    with loader.beside_step():
        new = loader.load(folders[0])
        with pytest.raises(TimeoutError):
            new.result(0.2)
        digest = digest_of(folders[1]) if is_known else None
        again = loader.load(folders[1], digest, is_awaited=True)
        again.result(60)
        assert new.done()


def test_a_call_that_nobody_waits_for_is_left_out(tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    gate, packed = threading.Event(), []

    def pack(file: AdapterFile) -> None:
        assert gate.wait(60)
        packed.append(read(file))

    loader = AdapterLoader(open_file, pack)
    first, second, third = loader.load(folder), loader.load(folder), loader.load(folder)
    assert second.cancel()
    gate.set()
    third.result()
    assert first.done()
    assert len(packed) == 2
