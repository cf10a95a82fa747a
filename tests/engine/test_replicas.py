"""An engine that is one of several replicas: its refusals before it reads weights, and the memory that it plans
with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.bring_up import bring_up
from quire.errors import ConfigError, MemoryPlanError
from quire.life_cycle import CacheSize, Measured, WorkerSettings
from quire.planning.cut_model import ModelCut
from quire.resolve import DeviceFacts
from quire.settings import Planned
from tests.e2e.light_engine import LightWorker
from tests.test_resolve import DEVICE, GIB, MIB, MODEL


class OnFourCores(LightWorker):
    """A worker of a machine with 4 cores and 8 GiB, 6 of them free."""

    num_loads = 0

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        return DEVICE

    def load(self, settings: WorkerSettings) -> None:
        self.num_loads += 1
        super().load(settings)

    def measure(self) -> Measured:
        """No other replica has loaded yet."""
        measured, weights = super().measure(), self._weights
        memory = replace(measured.memory, total_bytes=8 * GIB, free_bytes=6 * GIB - weights, taken_bytes=weights)
        return replace(measured, memory=memory)

    def allocate(self, size: CacheSize) -> None:
        """There is nothing to allocate."""


def start(*workers: OnFourCores, free_memory_bytes: int | None = 6 * GIB, **arguments: Any) -> Planned:
    config = EngineConfig(**arguments)
    return bring_up(
        config, MODEL, workers, is_server=True, progress=silent, free_memory_bytes=free_memory_bytes
    ).resolved


def silent(phase: str, fraction: float, detail: str) -> None:
    """Nobody is told."""


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data_parallel_size": 5}, ConfigError, "more replicas than cores"),
        (
            {"data_parallel_size": 4, "free_memory_bytes": 40 * MIB},
            MemoryPlanError,
            r"10\.0 MiB for each of 4 replicas. Lower --data-parallel-size",
        ),
    ],
)
def test_refused_before_weights_are_read(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    worker = OnFourCores(MODEL, silent)
    with pytest.raises(error, match=message):
        start(worker, **arguments)
    assert worker.num_loads == 0


def test_it_plans_with_its_share() -> None:
    shares = [start(OnFourCores(MODEL, silent), data_parallel_size=count, max_num_seqs=256) for count in (2, 4)]
    assert [planned.device.num_threads for planned in shares] == [2, 1]
    for planned, count in zip(shares, (2, 4), strict=True):
        memory = planned.memory
        taken = memory.weight_bytes + memory.kv_cache_bytes + memory.work_bytes
        assert taken <= 6 * GIB // count
        assert planned.settings["unplanned_bytes"].value == 6 * GIB // count - taken


def test_ranks_of_replicas_have_their_share() -> None:
    """Two replicas of two ranks: a core for each of the four."""
    part = ModelCut(MODEL, 2).part()
    workers = [OnFourCores(part, silent) for _ in range(2)]
    planned = start(*workers, data_parallel_size=2, tensor_parallel_size=2)
    assert planned.device.num_threads == 1
    memory = planned.memory
    assert memory.weight_bytes + memory.kv_cache_bytes + memory.work_bytes <= 6 * GIB // 4
