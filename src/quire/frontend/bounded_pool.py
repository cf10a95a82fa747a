"""A few processes for work that comes from unknown clients. They are killed if they take too long: see bounded_process.

The event loop never does such work itself.
"""

from __future__ import annotations

import asyncio
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from quire import envs
from quire.errors import InvalidRequestError, ProcessLostError, QuireError
from quire.frontend.bounded_process import LENGTH, OUT_OF_MEMORY, receive, send, text_of
from quire.logs import RateLimited, get_logger

logger = get_logger(__name__)
_lost_log, _fault_log = RateLimited(logger), RateLimited(logger)

MAX_SECONDS = 5.0  # processor time, so that a busy machine delays requests but refuses none
# A process is stopped or hangs if it gets no processor time during this number of looks.
LOOK_SECONDS = 1.0
MAX_STILL_LOOKS = 5
SEND_SECONDS = 30.0  # the time in which the first message must reach a new process
# One process does some thousand pieces of work a second. Another process starts only for requests that wait behind a
# slow one.
MAX_PROCESSES = 4
PATIENCE_SECONDS = 0.1
_BUFFER_BYTES = 2**20
# The work ended its process, by exit code. All other ends have causes outside.
_FAULTS = {
    -signal.SIGPROF: "took more processor time than it may have",
    OUT_OF_MEMORY: "needed more memory than it may have",
    -signal.SIGSEGV: "made its process crash",
    -signal.SIGABRT: "made its process crash",
}


@dataclass(slots=True)
class _Work:
    """A framed message; empty if its caller has left, so that the memory is free and no process works for nobody."""

    frame: bytes


class BoundedPool(ABC):
    """Gets texts from a few processes.

    Args:
        preparation: makes the first message to each process, in a thread.
    """

    module: ClassVar[str]  # the module that the processes run
    task: ClassVar[str]  # the work of the processes, for messages: "renders chats"
    culprit: ClassVar[str]  # the part to blame if a process ends: "chat template"
    lost: ClassVar[type[ProcessLostError]]

    def __init__(self, preparation: Callable[[], msgspec.Struct]) -> None:
        self._preparation = preparation
        self._idle: asyncio.LifoQueue[_BoundedProcess] = asyncio.LifoQueue()
        self._processes: set[_BoundedProcess] = set()
        self._num_processes = 0
        self._starts = asyncio.Lock()
        self._is_closed = False
        self._running: set[asyncio.Task[str]] = set()

    @abstractmethod
    def unprepared(self, fault: str) -> QuireError:
        """The error of a preparation that ended its process."""

    @abstractmethod
    def refusal(self, fault: str) -> InvalidRequestError:
        """The error of a request that ended its process."""

    async def text(self, frame: bytes) -> str:
        """The answer to a framed message.

        Raises:
            QuireError: the process answered with it, or the request ended the process (`refusal`).
            ProcessLostError: two processes ended or stood still, and the request is not the reason.
        """
        # A caller that leaves does not stop work that has begun. Otherwise the next caller would get this one's text.
        work = _Work(frame)
        task = asyncio.create_task(self._text(work))
        self._running.add(task)
        task.add_done_callback(self._on_done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            work.frame = b""
            raise

    def _on_done(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as seen: its caller may have left

    async def _text(self, work: _Work) -> str:
        try:
            process = await self._free_process(work)
            return "" if process is None else await self._text_from(process, work.frame)
        except ProcessLostError as error:
            if not work.frame:
                return ""
            _lost_log.warning("%s A new process does the work again", error.message)
        return await self._text_from(await self._new_process(), work.frame)  # an idle process may be stopped too

    async def _text_from(self, process: _BoundedProcess, frame: bytes) -> str:
        if not frame:  # the caller has left while it waited for a process
            self._idle.put_nowait(process)
            return ""
        try:
            answer = await process.exchange(frame)
        except (EOFError, OSError):
            if (fault := await self._discard(process)) is None:
                raise self.lost(
                    f"The process that {self.task} ended or stood still",
                    fix="Send the request again; the operator finds in the system's log what ended it",
                ) from None
            _fault_log.warning("a %s %s and was stopped", self.culprit, fault)
            raise self.refusal(fault) from None
        except BaseException:
            await self._discard(process)
            raise
        self._idle.put_nowait(process)
        return text_of(answer)

    async def _free_process(self, work: _Work) -> _BoundedProcess | None:
        """A process for this work; None: its caller has left."""
        while work.frame:
            if self._num_processes == 0:
                async with self._starts:  # so that several requests wait for the start of one process
                    if work.frame and self._num_processes == 0:
                        return await self._new_process()
            try:
                process = await asyncio.wait_for(self._idle.get(), PATIENCE_SECONDS)
            except TimeoutError:
                if work.frame and self._num_processes < MAX_PROCESSES and not self._starts.locked():
                    async with self._starts:
                        return await self._new_process()
            else:
                if process.is_alive:
                    return process
                await self._discard(process)  # somebody ended it while it was idle
        return None

    async def _new_process(self) -> _BoundedProcess:
        self._num_processes += 1
        try:
            return await asyncio.to_thread(self._start)
        except BaseException:
            self._num_processes -= 1
            raise

    def _start(self) -> _BoundedProcess:
        if self._is_closed:
            raise self.lost(f"The pool that {self.task} was closed")
        process = _BoundedProcess(self, self._preparation())
        self._processes.add(process)
        if self._is_closed:  # `close` ran during the start
            process.kill()
        return process

    async def _discard(self, process: _BoundedProcess) -> str | None:
        """End a process. Returns in which way its work was at fault; None: the work was not at fault."""
        process.kill()
        fault = await asyncio.to_thread(process.wait)
        self._processes.discard(process)
        self._num_processes -= 1
        return fault

    def close(self) -> None:
        """End all processes. Callers that wait get an error."""
        self._is_closed = True
        for process in list(self._processes):
            process.kill()
            process.wait()


class _BoundedProcess:
    """One process and the connection to it; it does one piece of work at a time."""

    def __init__(self, pool: BoundedPool, preparation: msgspec.Struct) -> None:
        """Start the process and wait until it is prepared.

        Raises the process's own error, `unprepared`, or ProcessLostError if the process ended without an answer.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: a module of the current folder must not replace one of ours or of the standard library.
            command = [sys.executable, "-P", "-m", pool.module]
            try:
                # In its own group, a Ctrl-C in the terminal does not reach it before it ignores the signal.
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0, env=envs.for_children()
                )
            except OSError as error:
                ours.close()
                raise pool.lost(f"No process that {pool.task} could be started: {error.strerror}") from None
        self._socket = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._still_looks, self._cpu_seconds = 0, 0.0
        try:
            text_of(self._prepare(preparation))
        except OSError:
            self.kill()
            if (fault := self.wait()) is None:
                raise pool.lost(f"The process that {pool.task} ended or stood still at its start") from None
            raise pool.unprepared(fault) from None
        except QuireError:
            self.kill()
            self.wait()
            raise
        ours.setblocking(False)

    def _prepare(self, preparation: msgspec.Struct) -> bytes:
        """Send the first message and wait for the answer. Raises OSError if the process ends or stands still."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        self._socket.settimeout(SEND_SECONDS)
        send(self._socket, preparation)
        while not poll.poll(LOOK_SECONDS * 1000):
            if self._stands_still():
                raise TimeoutError
        if (answer := receive(self._socket)) is None:
            raise ConnectionResetError
        return answer

    async def exchange(self, frame: bytes) -> bytes:
        """Send one message and receive one. Raises EOFError or OSError if the process ends or stands still."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket, limit=_BUFFER_BYTES)
        reader, writer = self._streams
        self._still_looks = 0
        self._look_later()
        try:
            writer.write(frame)
            await writer.drain()
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            return await reader.readexactly(length)
        finally:
            self._next_look.cancel()

    def _look_later(self) -> None:
        self._next_look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._kill_if_still)

    def _kill_if_still(self) -> None:
        if self._stands_still():
            self.kill()
        else:
            self._look_later()

    def _stands_still(self) -> bool:
        """Look once at the process. Returns whether it has used no processor time for too long."""
        seconds = _cpu_seconds(self._process.pid)
        self._still_looks = self._still_looks + 1 if seconds == self._cpu_seconds else 0
        self._cpu_seconds = seconds
        return self._still_looks == MAX_STILL_LOOKS

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process at once, unless it has ended already."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._socket.close()
        self._process.kill()

    def wait(self) -> str | None:
        """Wait for the end of the process. Returns in which way its work was at fault; None: it was not at fault."""
        return _FAULTS.get(self._process.wait())


def _cpu_seconds(pid: int) -> float:
    """Processor time of another process, by clock_getcpuclockid(3)'s clock, or else the monotonic time."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return time.monotonic()
