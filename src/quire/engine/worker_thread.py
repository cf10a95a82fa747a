"""The thread of a worker. A thread that hangs does not keep the program from ending."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, ParamSpec, TypeVar

END_SECONDS = 5.0  # the time that the end of the program waits for a thread, because its work may hang

T = TypeVar("T")
P = ParamSpec("P")
_Task = tuple[Future[Any], Callable[[], Any]]
_at_work: weakref.WeakSet[WorkerThread] = weakref.WeakSet()


class WorkerThread:
    """Calls functions in order, like an executor of concurrent.futures with one thread.

    The end of the program waits for the thread, at most END_SECONDS, unless the thread was given up.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = Lock()  # so that no task is submitted after the end
        self._last: Future[Any] | None = None  # the result of the last task
        self._thread = Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None).atexit = False
        _at_work.add(self)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Let the thread call a function. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()
        with self._lock:
            if self not in _at_work:
                raise RuntimeError("the thread was told to end")
            self._tasks.put((future, partial(function, *args, **kwargs)))
            self._last = future
        return future

    @property
    def is_idle(self) -> bool:
        """Whether it has done all that was submitted."""
        return self._last is None or self._last.done()

    def shutdown(self, wait: bool = True) -> None:
        """End after the submitted work. With wait=False the thread is given up, and the program ends without it."""
        with self._lock:
            _at_work.discard(self)
            self._tasks.put(None)
        if wait:
            self._thread.join()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most `seconds`."""
        self._thread.join(seconds)


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        del task, future, function  # an error keeps this frame alive, and with it these objects


@atexit.register
def _wait_for_all() -> None:
    threads, until = list(_at_work), time.monotonic() + END_SECONDS
    for thread in threads:
        thread.shutdown(wait=False)
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))
