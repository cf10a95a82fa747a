"""The stand-in for a GPU that computes behind its host does so."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.errors import EngineDeadError
from tests.worker.queued_accelerator import QueuedAccelerator


def test_work_is_done_later_and_in_order() -> None:
    device, gate = QueuedAccelerator(), threading.Event()
    x = torch.zeros(4)
    device.put(gate.wait)
    with device.launching():
        y = x + 1
        view = y.view(2, 2)
        x += 5
        z = torch.stack([y, x])
        download = device.download([z, view])
    assert not download.is_done()
    assert x.tolist() == [0.0] * 4, "the host has computed"
    gate.set()
    both, first = download.wait()
    assert both.tolist() == [[1.0] * 4, [5.0] * 4]
    assert first.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_value_that_the_host_needs_is_waited_for() -> None:
    device = QueuedAccelerator()
    with device.launching():
        x = torch.arange(4) * 2
        assert int(x.sum()) == 12
        assert (x > 3).nonzero().shape == (2, 1)


def test_a_graph_repeats_its_work() -> None:
    device, x = QueuedAccelerator(), torch.ones(3)
    with torch.inference_mode():
        graph = device.capture(lambda: x.mul_(2.0), None)
    assert x.tolist() == [1.0] * 3, "a capture computes nothing"
    graph.replay()
    graph.replay()
    device.synchronize()
    assert x.tolist() == [4.0] * 3


def test_an_error_comes_where_the_device_is_waited_for() -> None:
    device = QueuedAccelerator()
    device.fail(ValueError("it is gone"))
    with device.launching():
        x = torch.zeros(2) + 1
    download = device.download([x])
    with pytest.raises(EngineDeadError, match="The GPU reports an error: it is gone"):
        download.wait()
    with pytest.raises(EngineDeadError, match="it is gone"):
        device.synchronize()
