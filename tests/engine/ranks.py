"""An engine whose ranks are threads of this process, each with its part of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quire.demo
from quire.config import EngineConfig
from quire.distributed.shared_memory import SharedMemoryGroup, make_memory
from quire.engine.start import StartedEngine, start_engine
from quire.life_cycle import Worker
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.planning.cut_model import ModelCut
from quire.worker.worker import DeviceWorker

LIMITS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "device": "cpu",
    "max_model_len": 512,
    "num_gpu_blocks_override": 100,
}


def ignore(phase: str, share: float, detail: str) -> None: ...


def started(
    num_ranks: int, folder: Path | None = None, drafter_folder: Path | None = None, **arguments: Any
) -> StartedEngine:
    """An engine of the demo model, or of the one in `folder`."""

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        if num_ranks == 1:
            return [DeviceWorker(model_config, progress)]
        memory, cut = make_memory(num_ranks), ModelCut(model_config, num_ranks)
        groups = [SharedMemoryGroup(memory, rank, num_ranks, has_own_cores=False) for rank in range(num_ranks)]
        os.close(memory)
        return [DeviceWorker(cut.part(group.rank), progress, group=group) for group in groups]

    config = EngineConfig.from_kwargs(**LIMITS | {"tensor_parallel_size": num_ranks} | arguments)
    folder = folder or quire.demo.path("target")
    return start_engine(
        config, folder, is_server=True, progress=ignore, make_workers=make, drafter_folder=drafter_folder
    )
