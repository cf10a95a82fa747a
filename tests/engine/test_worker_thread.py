from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from quire.engine.worker_thread import WorkerThread

AT_THE_END = """
import threading, time
from quire.engine.worker_thread import WorkerThread

def slowly():
    time.sleep(0.3)
    print("done", flush=True)

thread = WorkerThread("a worker")
thread.submit({function})
{then}
"""


def program(function: str, then: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AT_THE_END.format(function=function, then=then)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_calls_come_in_order_and_on_one_thread() -> None:
    thread, seen = WorkerThread("a worker"), list[tuple[int, str]]()
    futures = [thread.submit(lambda i=i: seen.append((i, threading.current_thread().name))) for i in range(20)]  # type: ignore[misc]
    assert thread.submit(int, "12", base=3).result() == 5
    assert all(future.done() for future in futures)
    assert seen == [(i, "a worker") for i in range(20)]
    thread.shutdown()


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    thread = WorkerThread("a worker")
    with pytest.raises(ZeroDivisionError):
        thread.submit(divmod, 1, 0).result()
    assert thread.submit(divmod, 7, 2).result() == (3, 1)
    thread.shutdown()
    with pytest.raises(RuntimeError, match="told to end"):
        thread.submit(divmod, 7, 2)


def test_shutdown_comes_behind_what_was_submitted() -> None:
    thread = WorkerThread("a worker")
    gate = threading.Event()
    waiting, last, cancelled = thread.submit(gate.wait), thread.submit(divmod, 7, 2), thread.submit(divmod, 1, 0)
    assert cancelled.cancel()
    gate.set()
    thread.shutdown()
    assert waiting.result()
    assert last.done()


class Held:
    pass


def test_nothing_of_a_call_is_kept() -> None:
    """Neither by the thread, nor by the cycle of an error and the frame that it came from. A lost thread ends."""
    thread, held = WorkerThread("a worker"), Held()
    seen = weakref.ref(held)
    gc.disable()
    try:
        failed = thread.submit(lambda held: divmod(1, 0), held)
        assert isinstance(failed.exception(), ZeroDivisionError)
        thread.submit(int).result()
        del failed, held
        assert seen() is None
    finally:
        gc.enable()
    (own,) = [each for each in threading.enumerate() if each.name == "a worker"]
    del thread
    own.join(10)
    assert not own.is_alive()


def test_a_program_waits_for_what_its_worker_does() -> None:
    ended = program("slowly", "")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_worker_that_hangs_and_was_given_up_keeps_no_program() -> None:
    ended = program("threading.Event().wait", "thread.shutdown(wait=False)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
