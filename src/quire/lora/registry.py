"""The adapters that an engine knows, the adapters in memory, and the next adapters to read. No torch.

An adapter is its digest. It is known from the end of its LoadAdapter until it is unloaded and its last request has
ended. Reading is the work of the workers' loader thread: nothing here waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.errors import AdapterError, OutOfMemoryError, QuireError, is_out_of_memory
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.messages import AdapterState, LoadAdapter, UnloadAdapter
from quire.schedule import Polled

logger = get_logger(__name__)

# Reads that are begun before the first one has ended, so that the loader's thread never waits for the end of a step.
_MOST_READS = 4


class AdapterMemory(Protocol):
    """The workers, as far as adapters are concerned: see life_cycle.Worker."""

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> Polled[AdapterFacts]: ...

    def drop_adapter(self, digest: str) -> None: ...


class AdapterRequests(Protocol):
    """The requests that have adapters. The class is scheduler.adapter_turns.AdapterTurns."""

    @property
    def running(self) -> Collection[str]: ...

    @property
    def wanted(self) -> Sequence[str]: ...

    def __contains__(self, digest: str, /) -> bool: ...

    def has_preempted(self, digest: str, /) -> bool: ...


@dataclass(slots=True)
class _Adapter:
    """A known adapter.

    Attributes:
        path: the folder from which it is read again.
        registrations: paths of the LoadAdapters without their UnloadAdapter.
    """

    path: str
    registrations: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Read:
    """The work of the loader thread: a LoadAdapter, or a digest that requests wait for."""

    loading: Polled[AdapterFacts]
    path: str
    start_time: float
    operation: int | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Requests wait for an adapter that cannot be read again."""

    digest: str
    error: QuireError


class AdapterRegistry:
    """At most `most` adapters are in memory or being read, and one more while its memory is exchanged for another's.

    Adapters of running requests stay there, and so do unregistered ones that preempted requests need. The other places
    go to the most urgent adapters of waiting requests, and the rest to the most recently used ones. Reading for
    requests and for LoadAdapters takes turns.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, memory: AdapterMemory, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._most, self._clock = memory, most, clock
        self._adapters: dict[str, _Adapter] = {}  # by digest
        self._in_memory: dict[str, None] = {}  # digests, the one used last at the end
        self._unregistered: set[str] = set()  # digests that only requests keep
        self._operations: deque[LoadAdapter] = deque()
        self._reads: deque[_Read] = deque()  # in the order in which they end
        self._is_turn_of_operations = True
        self._states: list[AdapterState] = []

    def __contains__(self, digest: str) -> bool:
        """Whether requests may name it."""
        return digest in self._adapters

    @property
    def is_busy(self) -> bool:
        """Whether something is being read or will be, or only waits for the end of its last request."""
        return bool(self._reads) or bool(self._operations) or bool(self._unregistered)

    @property
    def num_known(self) -> int:
        return len(self._adapters)

    @property
    def num_in_memory(self) -> int:
        return len(self._in_memory)

    def is_in_memory(self, digest: str) -> bool:
        return digest in self._in_memory

    def load(self, message: LoadAdapter) -> None:
        """Read an adapter for the first time; or, with a digest, note that requests may name it."""
        if message.digest is None:
            self._operations.append(message)
        else:
            self._register(message.digest, message.path)

    def unload(self, message: UnloadAdapter) -> None:
        """Take a registration back. The adapter stays until its last request has ended."""
        adapter = self._adapters.get(message.digest)
        if adapter is not None and message.path in adapter.registrations:
            adapter.registrations.remove(message.path)
            if not adapter.registrations:
                self._unregistered.add(message.digest)

    def step(self, requests: AdapterRequests) -> Unreadable | None:
        """Between two steps: take in loaded adapters, forget unneeded ones, and begin to read the next.

        Args:
            requests: gives the adapters of requests.
        """
        for digest in [digest for digest in self._unregistered if digest not in requests]:
            self._forget(digest)
        for digest in requests.running:  # these adapters were used last
            self._in_memory[digest] = self._in_memory.pop(digest)
        while self._reads and self._reads[0].loading.done():
            if (lost := self._take(self._reads.popleft(), requests)) is not None:
                return lost
        while len(self._reads) < _MOST_READS and self._begin(requests):
            pass
        return None

    def take_states(self) -> list[AdapterState]:
        """The results of reading since the last call."""
        states, self._states = self._states, []
        return states

    def _register(self, digest: str, path: str) -> None:
        adapter = self._adapters.setdefault(digest, _Adapter(path))
        adapter.path = path
        adapter.registrations.append(path)
        self._unregistered.discard(digest)

    def _forget(self, digest: str) -> None:
        """Forget an adapter. If it is being read, it is forgotten when it has been read."""
        if any(read.digest == digest for read in self._reads):
            return
        self._unregistered.remove(digest)
        del self._adapters[digest]
        if digest in self._in_memory:
            self._drop(digest)

    def _begin(self, requests: AdapterRequests) -> bool:
        """Read for waiting requests or for a LoadAdapter, in turns. False: there is nothing to read, or no room for
        it.
        """
        digest = self._missing(requests)
        if digest is None and not self._operations:
            return False
        is_operation = bool(self._operations) and (digest is None or self._is_turn_of_operations)
        if len(self._in_memory) + len(self._reads) > self._most:
            # The path of a LoadAdapter may have no adapter: only an adapter that has been read takes another's place
            # (_take).
            if is_operation or (unneeded := self._unneeded(requests)) is None:
                return False
            self._drop(unneeded)
        if is_operation:
            operation = self._operations.popleft()
            self._start(operation.path, operation)
        elif digest is not None:
            self._start(self._adapters[digest].path, digest=digest)
        return True

    def _start(self, path: str, operation: LoadAdapter | None = None, digest: str | None = None) -> None:
        self._is_turn_of_operations = operation is None
        is_awaited = operation is None or operation.is_awaited
        loading = self._memory.load_adapter(path, digest, is_awaited)
        number = None if operation is None else operation.operation
        self._reads.append(_Read(loading, path, self._clock(), number, digest))

    def _missing(self, requests: AdapterRequests) -> str | None:
        """The most urgent adapter that has a right to be in memory, is not there, and is not being read."""
        if all(digest in self._in_memory for digest in requests.wanted[: self._most]):
            return None
        here = {read.digest for read in self._reads} | self._in_memory.keys()
        return next((digest for digest in self._entitled(requests) if digest not in here), None)

    def _unneeded(self, requests: AdapterRequests) -> str | None:
        """The least recently used adapter that is in memory without a right to be."""
        entitled = self._entitled(requests)
        return next((digest for digest in self._in_memory if digest not in entitled), None)

    def _entitled(self, requests: AdapterRequests) -> list[str]:
        """The adapters that have a right to be in memory now: at most as many as fit."""
        kept = [digest for digest in self._in_memory if self._is_kept(digest, requests)]
        wanted = [digest for digest in requests.wanted if digest in self._adapters and digest not in kept]
        return kept + wanted[: max(self._most - len(kept), 0)]

    def _is_kept(self, digest: str, requests: AdapterRequests) -> bool:
        """Running requests have it, or preempted ones that could not read it again."""
        return digest in requests.running or (digest in self._unregistered and requests.has_preempted(digest))

    def _take(self, read: _Read, requests: AdapterRequests) -> Unreadable | None:
        """The adapter that was read is here, or an error."""
        state = AdapterState(path=read.path, operation=read.operation, seconds=self._clock() - read.start_time)
        self._states.append(state)
        try:
            facts = read.loading.result()
        except Exception as failure:
            error = _for_users(failure)
            state.error, state.error_code = error.message, error.code
            logger.warning("the adapter in %s could not be read: %s", read.path, error.message)
            return None if read.digest is None else Unreadable(read.digest, error)
        state.facts = facts
        if read.operation is not None:
            self._register(facts.digest, read.path)
        self._in_memory.pop(facts.digest, None)
        self._in_memory[facts.digest] = None
        if len(self._in_memory) > self._most:
            # All others may have begun to run while it was read: then it has to be read again.
            self._drop(self._unneeded(requests) or facts.digest)
        return None

    def _drop(self, digest: str) -> None:
        del self._in_memory[digest]
        self._memory.drop_adapter(digest)


def _for_users(failure: Exception) -> QuireError:
    """The error of a load. Anything but a QuireError is a lack of memory, or a defect of ours."""
    if isinstance(failure, QuireError):
        return failure
    logger.error("an adapter could not be loaded", exc_info=failure)
    if is_out_of_memory(failure):
        return OutOfMemoryError("There is no memory for the adapter", fix="Lower --max-cpu-loras, or load it later")
    return AdapterError(f"The adapter could not be loaded ({type(failure).__name__})", fix="The server's log says why")
