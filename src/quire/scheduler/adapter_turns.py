"""Decides which adapters may run: only a limited number at once, and no request is overtaken for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence

from quire.request import Request, RequestStatus
from quire.scheduler.queue import Key, OrderKey

PATIENCE = 64  # a request that was overtaken in this number of steps gets the next free place


class AdapterTurns:
    """Keeps the requests that have an adapter. Each adapter of running requests takes one place.

    Free places go to the adapters in memory, in the order of their oldest waiting requests. A request whose adapter
    runs already may join, and so it overtakes others. The oldest request that was overtaken in PATIENCE steps gets the
    next free place. Until then, the adapter with the fewest running requests takes no further requests. Preempted
    requests come first. A request without an adapter may always run, and is not kept.

    Args:
        max_loras: the number of places.
        order: the order of the requests.
        is_in_memory: whether the adapter with this digest is in memory, so that it can run now.
    """

    def __init__(self, max_loras: int, order: OrderKey, is_in_memory: Callable[[str], bool]) -> None:
        self._max_loras, self._order, self._is_in_memory = max_loras, order, is_in_memory
        self._running: dict[str, int] = {}  # adapter -> the number of its running requests
        self._waiting: dict[str, list[Request]] = {}  # the requests of each adapter, in the order of their turns
        self._open: set[str] = set()  # adapters with a place
        self._blocked: dict[str, int] = {}  # adapter that waits for a place -> _num_overtakes when it began to wait
        self._num_overtakes = 0  # steps in which a request overtook one that waits for a place
        self._last_admitted: Key | None = None  # the key of the last request that was admitted since the last step
        self._reserved_for: Key = ()
        self._draining: str | None = None
        # Adapters that do not run and have waiting requests. At a step the most urgent is first; later ones are behind.
        self.wanted: Sequence[str] = ()

    @property
    def running(self) -> Collection[str]:
        """The adapters of running requests."""
        return self._running.keys()

    def has_preempted(self, digest: str) -> bool:
        """Whether a preempted request waits with this adapter."""
        waiting = self._waiting.get(digest)
        return waiting is not None and waiting[0].status is RequestStatus.PREEMPTED

    def __contains__(self, digest: str) -> bool:
        """Whether a request has this adapter."""
        return digest in self._running or digest in self._waiting

    def waiting_for(self, digest: str) -> list[Request]:
        """The waiting requests with this adapter, as a new list."""
        return list(self._waiting.get(digest, ()))

    def wait(self, request: Request) -> None:
        """Add a request that waits: it is new, or it was preempted."""
        if request.adapter is None:
            return
        insort(self._waiting.setdefault(request.adapter, []), request, key=self._key)
        if request.adapter not in self._running and request.adapter not in self.wanted:
            self.wanted = [*self.wanted, request.adapter]  # until the next step, so that reading begins before it

    def leave(self, request: Request) -> None:
        """Remove a waiting request. It still has the status of a waiting one."""
        if request.adapter is None:
            return
        waiting = self._waiting[request.adapter]
        del waiting[bisect_left(waiting, self._key(request), key=self._key)]
        if not waiting:
            del self._waiting[request.adapter]

    def start(self, request: Request) -> None:
        """Let a waiting request run from now on. It still has the status of a waiting one."""
        if request.adapter is None:
            return
        self.leave(request)
        self._running[request.adapter] = self._running.get(request.adapter, 0) + 1
        key = self._order(request)
        self._last_admitted = key if self._last_admitted is None else max(self._last_admitted, key)

    def stop(self, request: Request) -> None:
        """Remove a running request: it ends, or it is preempted."""
        if request.adapter is None:
            return
        self._running[request.adapter] -= 1
        if not self._running[request.adapter]:
            del self._running[request.adapter]

    def may_run(self, request: Request) -> bool:
        """Whether a waiting request may run in the step that is being made."""
        digest = request.adapter
        if digest is None:
            return True
        return digest in self._open and (digest != self._draining or self._key(request) < self._reserved_for)

    def begin_step(self) -> None:
        """Begin a step, which all lanes have together: note whether a request was overtaken in the last one."""
        if self._last_admitted is not None:
            firsts = (self._waiting[digest][0] for digest in self._blocked if digest in self._waiting)
            self._num_overtakes += any(self._order(request) < self._last_admitted for request in firsts)
            self._last_admitted = None

    def give_out(self) -> None:
        """Give out the free places, before a scheduler lets requests run in a step."""
        num_free = self._max_loras - len(self._running)
        self._open = set(self._running)
        blocked, reserved, is_draining = {}, False, False
        waiting = [(self._key(first[0]), digest) for digest, first in self._waiting.items() if digest not in self._open]
        waiting.sort()
        for key, digest in waiting:
            if num_free > 0 and self._is_in_memory(digest):
                self._open.add(digest)
                num_free -= 1
                continue
            since = blocked[digest] = self._blocked.get(digest, self._num_overtakes)
            if not reserved and self._num_overtakes - since >= PATIENCE:
                reserved, self._reserved_for = True, key
                is_draining = num_free == 0
                num_free = max(num_free - 1, 0)  # this place is kept for an adapter that is being read
        self._blocked, self.wanted = blocked, [digest for _, digest in waiting]
        if not is_draining:
            self._draining = None
        elif self._draining not in self._running:
            self._draining = min(self._running, key=self._running.__getitem__, default=None)

    def _key(self, request: Request) -> Key:
        return request.status is not RequestStatus.PREEMPTED, *self._order(request)
