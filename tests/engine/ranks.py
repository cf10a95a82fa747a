"""An engine whose ranks are threads of this process, each with its part of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.engine.start import StartedEngine, start_engine
from quire.life_cycle import Worker
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.worker import recorded_steps
from quire.worker.worker import DeviceWorker
from tests.distributed.machines import ranks_of

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "device": "cpu",
    "max_model_len": 512,
    "num_gpu_blocks_override": 100,
}


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int, error: Exception) -> list[int]:
    """Let a method raise `error` at its call of this number. The answer grows by one with each call."""
    method, calls = getattr(owner, name), list[int]()

    def fail_once(*arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == number:
            raise error
        return method(*arguments)

    monkeypatch.setattr(owner, name, fail_once)
    return calls


def ignore(phase: str, share: float, detail: str) -> None: ...


def started(
    num_ranks: int,
    folder: Path | None = None,
    drafter_folder: Path | None = None,
    *,
    num_stages: int = 1,
    **arguments: Any,
) -> StartedEngine:
    """An engine of the demo model, or of the one in `folder`.

    Args:
        num_ranks: of each stage.
    """
    sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    config = EngineConfig.from_kwargs(**LIMITS | sizes | arguments)

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        grid = grid_of(config)
        if grid.size == 1:
            return [DeviceWorker(model_config, progress)]
        found = ranks_of(grid, config.distributed_timeout_seconds)
        return [DeviceWorker(part_of_rank(model_config, config, ranks.rank), progress, ranks=ranks) for ranks in found]

    folder = folder or quire.demo.path("target")
    return start_engine(
        config, folder, is_server=True, progress=ignore, make_workers=make, drafter_folder=drafter_folder
    )


def watch_recordings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that is recorded from now on, whether it could be."""
    recorded, record = list[bool](), recorded_steps.record

    def watched(*arguments: Any) -> Any:
        result, calls = record(*arguments)
        recorded.append(calls is not None)
        return result, calls

    monkeypatch.setattr(recorded_steps, "record", watched)
    return recorded
