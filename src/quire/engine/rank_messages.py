"""Messages from the first rank of an engine to the other processes of its ranks, and their answers. Never pickled."""

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
    """The first message to a new process. File descriptors go along with it.

    Attributes:
        connection: file descriptor of the connection from the first rank.
        memory: file descriptor of distributed.shared_memory.
        adapters: file descriptor of a connection for LoadAdapter. The answer comes there when the adapter is read.
            None: there are no adapters, as with stages.
        dies_with_parent: the system kills it when the thread ends that has started it.
        links: file descriptors of connections to ranks of other machines, by rank.
        cpus: the CPUs on which it computes; empty: the CPUs of its parent.
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

    def descriptors(self) -> list[int]:
        """The file descriptors of the sender."""
        adapters = [] if self.adapters is None else [self.adapters]
        return [self.connection, self.memory, *adapters, *self.links.values()]

    def with_descriptors(self, received: Sequence[int]) -> RankLaunch:
        """The launch with the numbers of `descriptors` in the process that has received them."""
        own = dict(zip(self.descriptors(), received, strict=True))
        return msgspec.structs.replace(
            self,
            connection=own[self.connection],
            memory=own[self.memory],
            adapters=None if self.adapters is None else own[self.adapters],
            links={rank: own[descriptor] for rank, descriptor in self.links.items()},
        )


class AskFacts(msgspec.Struct, tag=True):
    """See life_cycle.Worker.facts; likewise for the next ones."""

    wants_gpu: bool


class Load(msgspec.Struct, tag=True):
    settings: WorkerSettings


class Measure(msgspec.Struct, tag=True):
    pass


class Allocate(msgspec.Struct, tag=True):
    size: CacheSize


class Capture(msgspec.Struct, tag=True):
    pass


class Execute(msgspec.Struct, tag=True):
    batch: ScheduledBatch


class UseIdleTime(msgspec.Struct, tag=True):
    num_blocks_ever_used: int


class LoadAdapter(msgspec.Struct, tag=True):
    path: str
    digest: str | None


class AddAdapter(msgspec.Struct, tag=True):
    """One that was read. Adapters are added in the order in which they were read."""

    number: int  # the number of its LoadAdapter on the rank, from 0 on: an adapter may be read twice


class DropAdapter(msgspec.Struct, tag=True):
    digest: str


class Answer(msgspec.Struct, tag=True, omit_defaults=True):
    """The result of a method, if the first rank wants it."""

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
    """An error of a rank: the name and the fields of a QuireError, or the text of another one.

    Attributes:
        value: for a RowsFailedError, the requests.
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
