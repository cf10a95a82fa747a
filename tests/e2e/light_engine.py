"""The engine process as Quire starts it, but for the worker: it has no model and no torch, so it starts at once.

What a server says, how it listens, streams, drains and ends is the same over this engine. Its tokens are those of
DeterministicExecutor: a hash of the tokens before.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

from quire.config import EngineConfig
from quire.cost import devices
from quire.cost.stopwatch import Lap
from quire.engine import process
from quire.engine.deterministic import DeterministicExecutor
from quire.kernels import extension
from quire.memory_plan import plan_kv_cache, predict_memory
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.resolve import resolve, shown_bytes
from quire.schedule import Pending, ScheduledBatch, StepResult
from quire.settings import Planned

STEP_SECONDS = 0.003  # so that answers are seen on their way


class Runner(DeterministicExecutor):
    """Takes batches itself, as the runner of a device that runs ahead does."""

    device = SimpleNamespace(runs_ahead=True)

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        time.sleep(STEP_SECONDS)
        for row in batch.new_rows:
            if row.sampling_params.temperature == 0:  # greedy: its seed, which the front end has drawn, means nothing
                row.sampling_params.seed = 0
        return super().submit(batch)


class NoPages:
    """Stands for the KV cache's memory, of which there is none."""

    def step(self, num_ever_used: int) -> bool:
        return False


@dataclass(frozen=True)
class Worker:
    """See quire.worker.worker."""

    runner: Runner
    resolved: Planned
    measured_step: tuple[int, Lap]
    prefault: NoPages


def start_worker(config: EngineConfig, model_config: ModelConfig, *, is_server: bool, progress: Progress) -> Worker:
    """With the phases, and the plan, of a start that reads weights."""
    device = devices.detect(extension.chosen_isa())
    resolved = resolve(config, model_config, device, is_server=is_server)
    progress("load", 0.0, "")
    memory = predict_memory(resolved, model_config, device)
    progress("load", 1.0, f"{shown_bytes(memory.weight_bytes)} of nothing")
    progress("warm up", 0.0, "measuring nothing")
    planned = plan_kv_cache(config, model_config, resolved, memory)
    sizes = (planned.memory.num_blocks, planned.model.block_size)
    runner = Runner(*sizes, vocab_size=min(1000, model_config.vocab_size))
    return Worker(runner, planned, (256, Lap(0.01, 0.0)), NoPages())


def without_torch() -> None:
    """From now on, quire.engine.start finds this worker."""
    worker, prefault = ModuleType("quire.worker.worker"), ModuleType("quire.worker.prefault")
    worker.__dict__.update(Worker=Worker, start_worker=start_worker)
    prefault.__dict__.update(Prefault=NoPages)
    sys.modules |= {module.__name__: module for module in (worker, prefault)}


if __name__ == "__main__":
    without_torch()
    sys.exit(process.main())
