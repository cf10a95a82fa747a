"""Messages from the first rank of an engine to the processes of its other ranks, and their answers.

They are msgspec structs, and never pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire import errors
from quire.config import EngineConfig
from quire.distributed.group import StepVoid
from quire.errors import EngineDeadError, QuireError, is_out_of_memory
from quire.life_cycle import CacheSize, Measured, WorkerSettings
from quire.lora.facts import AdapterFacts
from quire.resolve import DeviceFacts
from quire.schedule import RowsFailedError, ScheduledBatch, StepResult

MOST_MESSAGE_BYTES = 1 << 30


class RankLaunch(msgspec.Struct, tag=True):
    """The first message to a new process. File descriptors are sent along with it.

    Attributes:
        connection: file descriptor of the connection from the first rank.
        memory: file descriptor of the shared memory: see distributed.shared_memory.
        adapters: file descriptor of a connection for LoadAdapter. It carries the answer when the adapter has been read.
            None: there are no adapters.
        dies_with_parent: whether the system kills the process when the thread that has started it ends.
        links: file descriptors of connections to ranks of other machines, by rank.
        cpus: the CPUs on which the process computes; empty: the CPUs of its parent.
        gpu: the only GPU that the process sees: see devices.see_gpu. None: it computes on a CPU.
    """

    config: EngineConfig
    model_folder: str
    drafter_folder: str | None
    rank: int
    connection: int
    memory: int
    adapters: int | None
    dies_with_parent: bool
    links: dict[int, int]
    cpus: set[int]
    gpu: str | None = None

    def descriptors(self) -> list[int]:
        """All file descriptors of this launch, with the sender's numbers."""
        adapters = [] if self.adapters is None else [self.adapters]
        return [self.connection, self.memory, *adapters, *self.links.values()]

    def with_descriptors(self, received: Sequence[int]) -> RankLaunch:
        """The launch with the receiver's numbers of the file descriptors, in the order of `descriptors`."""
        own = dict(zip(self.descriptors(), received, strict=True))
        return msgspec.structs.replace(
            self,
            connection=own[self.connection],
            memory=own[self.memory],
            adapters=None if self.adapters is None else own[self.adapters],
            links={rank: own[descriptor] for rank, descriptor in self.links.items()},
        )


class AskFacts(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.facts."""

    wants_gpu: bool


class Load(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.load."""

    settings: WorkerSettings


class Measure(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.measure."""


class Allocate(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.allocate."""

    size: CacheSize


class Capture(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.capture."""


class Execute(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.execute."""

    batch: ScheduledBatch


class UseIdleTime(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.use_idle_time."""

    num_blocks_ever_used: int


class LoadAdapter(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.load_adapter."""

    path: str
    digest: str | None
    is_awaited: bool


class AddAdapter(msgspec.Struct, tag=True):
    """Asks to add an adapter that was read. Adapters are added in the order in which they were read."""

    number: int  # the number of its LoadAdapter on this rank, from 0 on, because an adapter may be read twice


class DropAdapter(msgspec.Struct, tag=True):
    """Asks for life_cycle.Worker.drop_adapter."""

    digest: str


class Answer(msgspec.Struct, tag=True, omit_defaults=True):
    """The answer to a message: the result of a method, if the first rank uses it."""

    facts: DeviceFacts | None = None
    measured: Measured | None = None
    has_more: bool = False
    adapter: AdapterFacts | None = None
    result: StepResult | None = None  # the result of a rank that samples
    ranks: tuple[tuple[float, float], ...] = ()  # the field `ranks` of another rank's StepResult


class Report(msgspec.Struct, tag=True):
    """The progress of a rank's start, before the answer: see messages.Progress."""

    phase: str
    share: float
    detail: str


class Failed(msgspec.Struct, tag=True):
    """An error of a rank: the name and the fields of a QuireError, or the text of another error.

    Attributes:
        value: the value in the error; for a RowsFailedError, the ids of the requests.
    """

    kind: str
    what: str
    value: Any = None
    expected: str | None = None
    fix: str | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Failed:
        if isinstance(error, QuireError):
            value = error.value if isinstance(error.value, (int, float, str, type(None))) else repr(error.value)
            return cls(type(error).__name__, error.what, value, error.expected, error.fix, error.param)
        if isinstance(error, RowsFailedError):
            return cls("RowsFailedError", str(error), error.request_ids)
        if isinstance(error, StepVoid):
            return cls("StepVoid", str(error))
        return cls("MemoryError" if is_out_of_memory(error) else "", f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        if self.kind == "RowsFailedError":
            return RowsFailedError(self.value, self.what)
        if self.kind in _PLAIN:
            return _PLAIN[self.kind](self.what)
        kind: type[QuireError] = getattr(errors, self.kind)
        if issubclass(kind, EngineDeadError):
            return kind(self.what)
        return kind(self.what, value=self.value, expected=self.expected, fix=self.fix, param=self.param)


_PLAIN: dict[str, type[Exception]] = {"": RuntimeError, "MemoryError": MemoryError, "StepVoid": StepVoid}

ToRank = (
    RankLaunch
    | AskFacts
    | Load
    | Measure
    | Allocate
    | Capture
    | Execute
    | UseIdleTime
    | LoadAdapter
    | AddAdapter
    | DropAdapter
)
FromRank = Report | Answer | Failed

encode: Callable[[ToRank | FromRank], bytes] = msgspec.msgpack.Encoder().encode
decode_to_rank: Callable[[bytes], ToRank] = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank: Callable[[bytes], FromRank] = msgspec.msgpack.Decoder(FromRank).decode


class StepOrders:
    """Encodes the order for a step once for all ranks that get the same batch."""

    def __init__(self) -> None:
        self._last: tuple[ScheduledBatch | None, bytes] = (None, b"")

    def encode(self, batch: ScheduledBatch) -> bytes:
        """The order. The batch must not change any more. Any thread may call it."""
        last, order = self._last
        if last is not batch:
            order = encode(Execute(batch))
            self._last = batch, order
        return order
