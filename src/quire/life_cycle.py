"""The life of a worker: facts, load, measure, allocate, capture, and then steps. The engine decides; workers obey.

They exchange plain data, so a worker may live in another process or on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from quire.cost.collectives import NO_LINKS, Links
from quire.cost.devices import Ceilings
from quire.lora.facts import AdapterFacts
from quire.metrics.stopwatch import Lap
from quire.model_config import ModelConfig
from quire.planning.graph_sizes import GraphSizes, graph_sizes
from quire.planning.memory_plan import MemoryFacts
from quire.resolve import DeviceFacts
from quire.schedule import Executor, Pending, Polled, ScheduledBatch, StepResult
from quire.settings import DeviceSettings, DrafterSettings, LoraSettings, ModelSettings, Resolved


@dataclass(frozen=True)
class WorkerSettings:
    """The settings that a worker gets."""

    model: ModelSettings
    device: DeviceSettings
    max_num_seqs: int
    num_logits_rows: int
    max_num_batched_tokens: int
    steps_in_flight: int
    synthetic_acceptance_rates: tuple[float, ...] = ()  # see SpeculativeConfig
    drafter: DrafterSettings | None = None
    lora: LoraSettings | None = None

    @classmethod
    def of(cls, resolved: Resolved) -> WorkerSettings:
        """The worker's part of all settings."""
        steps = resolved.scheduler
        limits = (steps.max_num_seqs, steps.num_logits_rows, steps.max_num_batched_tokens, steps.depth)
        rates = steps.speculation.synthetic_acceptance_rates if steps.speculation is not None else ()
        return cls(resolved.model, resolved.device, *limits, rates, resolved.drafter, resolved.lora)

    def of_drafter(self) -> WorkerSettings:
        """The settings for a drafter in place of the model. Its captured steps compute one token of each row."""
        assert self.drafter is not None
        mode = "NONE" if self.device.cudagraph_mode == "NONE" else "FULL_DECODE_ONLY"
        device = replace(self.device, cudagraph_mode=mode)
        return replace(self, model=self.drafter.form, device=device, drafter=None, lora=None)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step, with padding."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)

    def hidden_bytes(self, target: ModelConfig) -> int:
        """The bytes of the hidden states that are kept for a head that drafts."""
        return 0 if self.drafter is None else self.drafter.hidden_bytes(target, self.max_num_seqs, self.most_tokens)

    def graph_sizes(self) -> GraphSizes:
        """The steps that are captured on a GPU."""
        device = self.device
        wished, bound = device.cudagraph_capture_sizes, device.max_cudagraph_capture_size
        return graph_sizes(device.cudagraph_mode, self.max_num_seqs, self.max_num_batched_tokens, wished, bound)


@dataclass(frozen=True)
class Measured:
    """A worker's measurements after it has loaded its weights."""

    memory: MemoryFacts
    num_tokens: int  # the tokens of the step that measured the working memory
    step: Lap
    ceilings: Ceilings | None = None  # of its threads; None: not measured, as on a GPU
    links: Links = NO_LINKS  # to the other ranks; on a GPU they are not measured


@dataclass(frozen=True)
class CacheSize:
    """The engine's plan for the KV cache of every worker."""

    num_blocks: int
    num_bytes: int
    max_model_len: int  # the final value: little memory may have made it smaller


class AdapterLoad(Polled[AdapterFacts], Protocol):
    """An adapter that is being read. `result` raises AdapterError if it cannot be read."""

    def add(self) -> None:
        """Keep the adapter for later steps. Call it after `result`. An adapter that is in memory is not kept twice."""
        ...


class Worker(Protocol):
    """One rank. Its methods are called in this order. Errors that the user can mend are QuireErrors."""

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        """The facts of the rank's machine. `wants_gpu`: whether to look for a GPU."""
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
        """Prepare for steps, and capture the steps that will be repeated."""
        ...

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute a step and wait for it. The first rank's result has the tokens."""
        ...

    def begin(self, batch: ScheduledBatch) -> Pending[StepResult] | None:
        """Let a rank beside this process compute a step, without waiting for it. None: call `execute`.

        The result is there, and is not waited for, when the first rank has ended the next step.
        """
        ...

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        """Like `execute`, but launch the step only. The device decides whether it is computed when this returns."""
        ...

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        """Do a little of the work that must be done at some time; False: there is none now."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDeadError if the rank has failed: its process has ended, or its device."""
        ...

    def describe(self) -> str:
        """The rank's number, place and progress of its start: for an error that names it."""
        ...

    def give_up(self) -> None:
        """Give this rank up. The other ranks stop waiting for it."""
        ...

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> AdapterLoad:
        """Begin to read an adapter, while steps go on.

        Args:
            digest: the digest that its content must have. Other content raises AdapterChangedError. None: any content.
            is_awaited: requests wait for it, so that it is read faster than is good for steps.
        """
        ...

    def drop_adapter(self, digest: str) -> None:
        """Give the memory of an adapter back. No later step uses it."""
        ...

    def close(self) -> None:
        """Stop the worker's threads and processes: no step follows."""
        ...


class FirstWorker(Worker, Protocol):
    """The rank in the engine's process. It samples, so only it has grammars."""

    def whereabouts(self) -> tuple[object, ...]:
        """A value that changes as long as any rank of this machine makes progress. Any thread may call it."""
        ...

    def late(self, pending: Sequence[int]) -> dict[int, str]:
        """The ranks for which others wait, and what they do, as text for people. Any thread may call it.

        Args:
            pending: ranks that have not ended their step.
        """
        ...

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """Take the tokenizer whose vocabulary grammars use: see messages.UseTokenizer."""
        ...

    def prepare_grammar(self, text: str) -> Polled[object]:
        """Compile a grammar at the same time as steps run. `result` raises InvalidRequestError if it cannot be used.

        The compiled grammar is kept for rows as long as the returned object lives.
        """
        ...


Workers = tuple[FirstWorker, *tuple[Worker, ...]]  # the workers of an engine, by rank


class WorkerExecutor(Executor, Protocol):
    """Takes all ranks through the life of a worker.

    Each method calls every rank, and returns when all ranks are done. Then it raises the error of a rank, if there is
    one. Only reading and dropping adapters are not waited for. Steps may use an adapter after its `result` was called.
    Only the first rank makes grammars.
    """

    def facts(self, wants_gpu: bool) -> Sequence[DeviceFacts]: ...

    def load(self, settings: WorkerSettings) -> None: ...

    def measure(self) -> Sequence[Measured]: ...

    def allocate(self, size: CacheSize) -> None: ...

    def capture(self) -> None: ...

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None: ...

    def prepare_grammar(self, text: str) -> Polled[object]: ...

    def use_idle_time(self, num_blocks_ever_used: int) -> bool: ...

    def check_alive(self) -> None: ...

    def describe(self) -> str:
        """The rank in this process, and its place, as text for people. Any thread may call it."""
        ...

    def late_ranks(self) -> str:
        """The ranks for which others wait, their places and what they do, as text for people. Empty: no step waits.

        Any thread may call it.
        """
        ...

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> Polled[AdapterFacts]: ...

    def drop_adapter(self, digest: str) -> None: ...
