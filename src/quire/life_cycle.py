"""The life of a worker: facts, load, measure, allocate, capture, then steps. The engine decides, workers obey.

What they say to each other is plain data, so a worker may live in another process or on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from quire.metrics.stopwatch import Lap
from quire.planning.graph_sizes import GraphSizes, graph_sizes
from quire.planning.memory_plan import MemoryFacts
from quire.resolve import DeviceFacts
from quire.schedule import Executor, Pending, ScheduledBatch, StepResult
from quire.settings import DeviceSettings, DrafterSettings, ModelSettings, Resolved


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker is told of the settings."""

    model: ModelSettings
    device: DeviceSettings
    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int
    drafter: DrafterSettings | None = None

    @classmethod
    def of(cls, resolved: Resolved) -> WorkerSettings:
        """The part of all settings that workers obey."""
        steps = resolved.scheduler
        limits = (steps.max_num_seqs, steps.max_num_batched_tokens, steps.depth)
        return cls(resolved.model, resolved.device, *limits, resolved.drafter)

    def of_drafter(self) -> WorkerSettings:
        """As if the drafter were the model. Of its steps those that are captured compute one token of each row."""
        assert self.drafter is not None
        mode = "NONE" if self.device.cudagraph_mode == "NONE" else "FULL_DECODE_ONLY"
        return replace(self, model=self.drafter.form, device=replace(self.device, cudagraph_mode=mode), drafter=None)

    def graph_sizes(self) -> GraphSizes:
        """The steps that are captured on a GPU."""
        device = self.device
        wished, bound = device.cudagraph_capture_sizes, device.max_cudagraph_capture_size
        return graph_sizes(device.cudagraph_mode, self.max_num_seqs, self.max_num_batched_tokens, wished, bound)


@dataclass(frozen=True)
class Measured:
    """What a worker found once it had loaded its weights."""

    memory: MemoryFacts
    num_tokens: int  # of the step that measured working memory
    step: Lap


@dataclass(frozen=True)
class CacheSize:
    """What the engine has planned for the KV cache of every worker."""

    num_blocks: int
    num_bytes: int
    max_model_len: int  # as it is from now on: memory may have cut it


class Worker(Protocol):
    """One rank. Its life goes in this order; errors are QuireErrors where the user can do something about them."""

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        """What its machine has. `wants_gpu`: look for one."""
        ...

    def load(self, settings: WorkerSettings) -> None:
        """Read the weights. Raises ConfigError or WeightsError."""
        ...

    def measure(self) -> Measured:
        """Run steps for their memory and time, on a KV cache that is thrown away."""
        ...

    def allocate(self, size: CacheSize) -> None:
        """Take the memory of the KV cache. Raises MemoryPlanError."""
        ...

    def capture(self) -> None:
        """Get ready for steps, and record those that will be repeated."""
        ...

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        """Launch a step. Whether it is computed when this returns is up to the device."""
        ...

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute a step."""
        ...

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        """Do a little of what must be done some day; False: there is nothing to do now."""
        ...


class WorkerExecutor(Executor, Protocol):
    """Takes all ranks through the life of a worker. Each step is told to every rank, and has ended on every rank when
    it returns; an error of one rank is raised when the others are done."""

    def facts(self, wants_gpu: bool) -> Sequence[DeviceFacts]: ...

    def load(self, settings: WorkerSettings) -> None: ...

    def measure(self) -> Sequence[Measured]: ...

    def allocate(self, size: CacheSize) -> None: ...

    def capture(self) -> None: ...

    def use_idle_time(self, num_blocks_ever_used: int) -> bool: ...
