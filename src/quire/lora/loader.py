"""Reads adapters in a thread of its own, so that no step waits for a disk."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from quire.errors import AdapterChangedError, AdapterError
from quire.lora.adapter import Adapter

T = TypeVar("T")


class AdapterLoader(Generic[T]):
    """One daemon thread that reads, checks and packs adapters in the order of the calls.

    Args:
        read: the adapter in a folder; raises AdapterError.
        pack: brings an adapter into the form that steps use. It runs in the thread too.
    """

    def __init__(self, read: Callable[[Path], Adapter], pack: Callable[[Adapter], T]) -> None:
        self._read, self._pack = read, pack
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="adapters", daemon=True).start()

    def load(self, folder: Path, digest: str | None = None) -> Future[T]:
        """Read an adapter. `done()` of the answer does not wait, `result()` waits and raises the error.

        Args:
            digest: the content of an adapter that was read before. If it has another content now, or cannot be read,
                the error is AdapterChangedError.
        """
        loaded: Future[T] = Future()

        def task() -> None:
            if not loaded.set_running_or_notify_cancel():
                return
            try:
                loaded.set_result(self._pack(self._unchanged(folder, digest)))
            except BaseException as error:
                loaded.set_exception(error)

        self._tasks.put(task)
        return loaded

    def _unchanged(self, folder: Path, digest: str | None) -> Adapter:
        try:
            adapter = self._read(folder)
        except AdapterError as error:
            if digest is None:
                raise
            raise _changed(error.message) from error
        if digest not in (None, adapter.digest):
            raise _changed("Its content is another one.")
        return adapter

    def _run(self) -> None:
        _step_back()
        while True:
            self._tasks.get()()  # no name holds the task, and so its adapter, while the next one is waited for


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
