"""The loader's thread reads adapters in order; an error is of one call; other content than before is told apart."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

import quire.demo
from quire.errors import AdapterChangedError, AdapterError
from quire.lora.adapter import Adapter, read_adapter
from quire.lora.adapter_config import CONFIG_NAME
from quire.lora.loader import AdapterLoader
from quire.model_config import load_model_config
from tests.lora.adapters import write_random_adapter

BASE = load_model_config(quire.demo.path("draft"))


def read(folder: Path) -> Adapter:
    return read_adapter(folder, BASE, max_rank=16, dtype=torch.float32)


@pytest.fixture
def loader() -> AdapterLoader[str]:
    return AdapterLoader(read, lambda adapter: adapter.digest)


def test_adapters_come_packed_and_errors_stay_with_their_call(loader: AdapterLoader[str], tmp_path: Path) -> None:
    good = [write_random_adapter(tmp_path / str(seed), BASE, modules=["q_proj"], seed=seed) for seed in range(3)]
    bad = write_random_adapter(tmp_path / "bad", BASE, modules=["q_proj"], use_dora=True)
    answers = [loader.load(folder) for folder in (good[0], bad, good[1], tmp_path / "none", good[2])]
    with pytest.raises(AdapterError, match="use_dora"):
        answers[1].result()
    with pytest.raises(AdapterError, match="no adapter_config"):
        answers[3].result()
    assert [answers[i].result() for i in (0, 2, 4)] == [read(folder).digest for folder in good]


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
def test_only_the_loader_has_a_lower_priority(tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    loader = AdapterLoader(read, lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
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
        loader = AdapterLoader(read, lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        found.append(loader.load(folder).result(30))

    thread = threading.Thread(target=starts)
    thread.start()
    thread.join()
    assert found == [min(niceness + 1, 19)]


def test_a_call_that_nobody_waits_for_is_left_out(tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path, BASE, modules=["q_proj"])
    gate, packed = threading.Event(), []

    def pack(adapter: Adapter) -> None:
        assert gate.wait(60)
        packed.append(adapter.digest)

    loader = AdapterLoader(read, pack)
    first, second, third = loader.load(folder), loader.load(folder), loader.load(folder)
    assert second.cancel()
    gate.set()
    third.result()
    assert first.done()
    assert len(packed) == 2
