"""Staging: one copy per step, the same shapes at the same addresses, and no buffer written while it is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.worker.staging import ALIGNMENT, Staging
from tests.worker.fake_accelerator import FakeAccelerator


def put(staging: Staging, values: NDArray[Any]) -> Tensor:
    """An array with these values."""
    array, tensor = staging.array(len(values), values.dtype)
    array[:] = values
    return tensor


def test_arrays_come_where_their_tensors_are() -> None:
    staging = Staging(FakeAccelerator(), 1024, 2)
    staging.begin()
    ids, on_device = staging.array(5, np.int64)
    ids[:] = range(5)
    halves = put(staging, np.array([0.5, 1.5], dtype=np.float32))
    uniform = put(staging, np.array([0.25]))
    staging.send()
    assert on_device.tolist() == list(range(5))
    assert (halves.tolist(), halves.dtype) == ([0.5, 1.5], torch.float32)
    assert (uniform.tolist(), uniform.dtype) == ([0.25], torch.float64)
    assert all((x.data_ptr() - on_device.data_ptr()) % ALIGNMENT == 0 for x in (halves, uniform))


def test_equal_shapes_have_equal_addresses() -> None:
    staging = Staging(FakeAccelerator(), 1024, 3)
    addresses = set()
    for step in range(7):
        staging.begin()
        first = put(staging, np.full(4, step))
        second = put(staging, np.full(3, step, dtype=np.int32))
        staging.send()
        assert first.tolist() == [step] * 4
        addresses.add((first.data_ptr(), second.data_ptr()))
    assert len(addresses) == 1


def test_a_buffer_waits_for_its_own_copy_alone() -> None:
    """With one buffer more than steps in flight, no step waits for a copy that was just begun."""
    accelerator = FakeAccelerator()
    staging = Staging(accelerator, 1024, 3)
    for step in range(4):
        staging.begin()
        put(staging, np.full(4, step))
        staging.send()
    events = list(accelerator._uploads.values())
    assert len(events) == 3
    assert sum(event.is_over for event in events) == 0, "the fourth upload took the buffer of the first"
    staging.begin()
    assert sum(event.is_over for event in events) == 1


def test_more_than_was_planned_for() -> None:
    staging = Staging(FakeAccelerator(), 64, 2)
    staging.begin()
    with pytest.raises(AssertionError, match="a step of more than 64 bytes"):
        staging.array(9, np.int64)
