"""Reads adapters in a thread of its own, so that no step waits for a disk."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from quire.errors import AdapterChangedError, AdapterError
from quire.lora.adapter import AdapterFile, FileStamp

T = TypeVar("T")

_MOST_PROOFS = 4096  # folders. Without its proof an adapter is read more slowly
# Seconds of rest beside steps for each second of processor time, and the longest rest: see "What a load does beside
# streams" in benchmarks/NOTES.md.
_RESTS = 7
_LONGEST_REST = 0.1


@dataclass(frozen=True)
class _Proof:
    """The content of an adapter, and the settled stamps of its files when it was read."""

    digest: str
    stamps: tuple[FileStamp, FileStamp]


class AdapterLoader(Generic[T]):
    """One daemon thread that reads, checks and packs adapters in the order of the calls.

    Content that was read before is proved by the stamps of its files, if they are the same and were settled then.
    Otherwise its digest proves it.

    An adapter for which no request waits takes a small part of a core while steps are computed, as long as no request
    waits for another one.

    Args:
        open_file: the adapter in a folder; raises AdapterError.
        pack: reads an adapter into the form that steps use. It runs in the thread too.
        rest: waits for some seconds; None: until requests wait for an adapter.
    """

    def __init__(
        self,
        open_file: Callable[[Path], AbstractContextManager[AdapterFile]],
        pack: Callable[[AdapterFile], T],
        rest: Callable[[float], object] | None = None,
    ) -> None:
        self._open, self._pack = open_file, pack
        self._is_beside_step = False
        self._num_awaited = 0  # adapters that requests wait for
        self._lock, self._has_awaited = threading.Lock(), threading.Event()
        self._rest = rest or self._has_awaited.wait
        self._proofs: OrderedDict[Path, _Proof] = OrderedDict()  # by folder, the one used last at the end
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    @contextmanager
    def beside_step(self) -> Iterator[None]:
        """The block computes a step, on the cores that the thread uses."""
        self._is_beside_step = True
        try:
            yield
        finally:
            self._is_beside_step = False

    def load(self, folder: Path, digest: str | None = None, is_awaited: bool = False) -> Future[T]:
        """Read an adapter. `done()` of the answer does not wait, `result()` waits and raises the error.

        Args:
            digest: the content of an adapter that was read before. If it has another content now, or cannot be read,
                the error is AdapterChangedError.
            is_awaited: requests wait for it.
        """
        loaded: Future[T] = Future()

        def task() -> None:
            try:
                if loaded.set_running_or_notify_cancel():
                    loaded.set_result(self._load(folder, digest))
            except BaseException as error:
                loaded.set_exception(error)
            finally:
                self._await(-num_awaited)

        num_awaited = int(is_awaited)
        self._await(num_awaited)
        self._tasks.put(task)
        return loaded

    def _await(self, change: int) -> None:
        """The number of adapters that requests wait for changes."""
        with self._lock:
            self._num_awaited += change
            if self._num_awaited:
                self._has_awaited.set()
            else:
                self._has_awaited.clear()

    def _load(self, folder: Path, digest: str | None) -> T:
        proof = self._proofs.pop(folder, None)
        rest = self._rests()
        try:
            with self._open(folder) as file:
                file.between_pieces = rest
                if proof is not None and (proof.digest, proof.stamps) == (digest, file.stamps):
                    file.digest = proof.digest
                packed = self._pack(file)
        except AdapterError as error:
            if digest is None:
                raise
            raise _changed(error.message) from error
        if digest not in (None, file.digest):
            raise _changed("Its content is another one.")
        if file.is_settled:
            self._proofs[folder] = _Proof(file.digest, file.stamps)
            if len(self._proofs) > _MOST_PROOFS:
                self._proofs.popitem(last=False)
        return packed

    def _rests(self) -> Callable[[], None]:
        """A function that rests for the work of this thread since its last call."""
        begin = time.thread_time()

        def rest() -> None:
            nonlocal begin
            if self._is_beside_step and not self._num_awaited:
                self._rest(min(_RESTS * (time.thread_time() - begin), _LONGEST_REST))
            begin = time.thread_time()

        return rest

    def _run(self) -> None:
        _step_back()
        while True:
            self._tasks.get()()  # no name holds the task and its adapter during the wait for the next one


def _step_back() -> None:
    """Give steps that want the same core 55 % of it.

    With the lowest priority a load took seconds on a machine whose cores all compute steps (benchmarks/NOTES.md).
    """
    if sys.platform != "linux":  # elsewhere a priority belongs to the process
        return
    thread = threading.get_native_id()
    with suppress(OSError):  # the lowest priority already
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 1)


def _changed(why: str) -> AdapterChangedError:
    return AdapterChangedError(
        f"The adapter's files changed after it was loaded. {why}",
        fix="Load the adapter again, and keep its files while it is served",
    )
