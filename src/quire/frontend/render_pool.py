"""Renders chats in a few processes that are killed if they take too long. The event loop never runs a template."""

from __future__ import annotations

import asyncio
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from quire import envs
from quire.errors import ConfigError, InvalidRequestError, RendererLostError
from quire.frontend.render_process import LENGTH, OUT_OF_MEMORY, Render, Templates, framed, receive, send, text_of
from quire.logs import RateLimited, get_logger

logger = get_logger(__name__)
_lost_log, _fault_log = RateLimited(logger), RateLimited(logger)

MAX_RENDER_SECONDS = 5.0  # of processor time: a busy machine delays a chat but refuses none
# A process is stopped or hangs if it gets no processor time during this number of looks.
LOOK_SECONDS = 1.0
MAX_STILL_LOOKS = 5
SEND_SECONDS = 30.0  # the time in which templates must reach a new process
# One process renders some thousand chats a second. Another one starts only for chats that wait behind a slow one.
MAX_PROCESSES = 4
PATIENCE_SECONDS = 0.1
_BUFFER_BYTES = 2**20
# A template ended its process, by exit code. All other ends have causes outside.
_FAULTS = {
    -signal.SIGPROF: "took more processor time than it may have",
    OUT_OF_MEMORY: "needed more memory than it may have",
    -signal.SIGSEGV: "made its process crash",
    -signal.SIGABRT: "made its process crash",
}


class _RenderProcess:
    """One process and the connection to it; it does one rendering at a time."""

    def __init__(self, templates: Templates) -> None:
        """Start the process and wait until it has compiled the templates.

        Raises ConfigError if they are not usable, and RendererLostError if the process ended without an answer.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: a module of the current folder must not replace one of ours or of the standard library.
            command = [sys.executable, "-P", "-m", "quire.frontend.render_process"]
            try:
                # In its own group, a Ctrl-C in the terminal does not reach it before it ignores the signal.
                self._process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0, env=envs.for_children()
                )
            except OSError as error:
                ours.close()
                raise RendererLostError(f"No process could be started to render chats: {error.strerror}") from None
        self._socket = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._still_looks, self._cpu_seconds = 0, 0.0
        try:
            text_of(self._compile(templates))
        except OSError:
            self.kill()
            if (fault := self.wait()) is None:
                raise RendererLostError("The process that compiles chat templates ended or stood still") from None
            raise ConfigError(
                f"The chat template {fault} while it was compiled",
                fix="Give another one with --chat-template",
                param="chat_template",
            ) from None
        except ConfigError:
            self.kill()
            self.wait()
            raise
        ours.setblocking(False)

    def _compile(self, templates: Templates) -> bytes:
        """Send the templates and wait for the answer. Raises OSError if the process ends or stands still."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        self._socket.settimeout(SEND_SECONDS)
        send(self._socket, templates)
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
        """Look once at the process -> whether it has used no processor time for too long."""
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
        """Wait for the end of the process -> the template's fault in it; None: the template has none."""
        return _FAULTS.get(self._process.wait())


def _cpu_seconds(pid: int) -> float:
    """Processor time of another process, by clock_getcpuclockid(3)'s clock, or else the monotonic time."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return time.monotonic()


class RenderPool:
    """ChatRenderer behind processes, with the same arguments, texts and errors.

    Args:
        max_seconds: processor time of one rendering. After it the process is killed and the request refused.
    Raises:
        ConfigError: a template is not valid. RendererLostError: the process ended without an answer.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        override: str | None = None,
        name: str = "The model",
        content_as_parts: bool | None = None,
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        self._templates = Templates(
            dict(templates), dict(special_tokens), override, name, max_seconds, content_as_parts
        )
        self._idle: asyncio.LifoQueue[_RenderProcess] = asyncio.LifoQueue()
        self._processes: set[_RenderProcess] = set()
        self._is_closed = False
        self._idle.put_nowait(self._start())
        self._num_processes = 1
        self._running: set[asyncio.Task[str]] = set()

    async def render(self, asked: Render) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: see ChatRenderer.render; or the template took too much processor time or memory.
            ConfigError: there is no template.
            RendererLostError: two processes ended or stood still, and the template is not the reason.
        """
        try:
            frame = framed(asked)
        except (OverflowError, ValueError) as error:
            raise InvalidRequestError(
                f"The messages cannot be written as JSON: {error}",
                expected="text, and numbers of 64 bits",
                param="messages",
            ) from None
        # A caller that leaves does not stop the rendering. Otherwise the next caller would get this chat's text.
        task = asyncio.create_task(self._render(frame))
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as seen: its caller may have left

    async def _render(self, frame: bytes) -> str:
        try:
            return await self._render_in(await self._free_process(), frame)
        except RendererLostError as error:
            _lost_log.warning("%s A new process renders this chat again", error.message)
        return await self._render_in(await self._new_process(), frame)  # an idle process may be stopped too

    async def _render_in(self, process: _RenderProcess, frame: bytes) -> str:
        try:
            answer = await process.exchange(frame)
        except (EOFError, OSError):
            if (fault := await self._discard(process)) is None:
                raise RendererLostError(
                    "The process that renders chats ended or stood still",
                    fix="Send the request again; the operator finds in the system's log what ended it",
                ) from None
            _fault_log.warning("a chat template %s and was stopped", fault)
            raise InvalidRequestError(
                f"The chat template {fault} on these messages",
                fix="Send fewer or shorter messages; the operator may give another template with --chat-template",
                param="messages",
            ) from None
        except BaseException:
            await self._discard(process)
            raise
        self._idle.put_nowait(process)
        return text_of(answer)

    async def _free_process(self) -> _RenderProcess:
        while self._num_processes > 0:
            try:
                process = await asyncio.wait_for(self._idle.get(), PATIENCE_SECONDS)
            except TimeoutError:
                if self._num_processes < MAX_PROCESSES:
                    break
            else:
                if process.is_alive:
                    return process
                await self._discard(process)  # somebody ended it while it was idle
        return await self._new_process()

    async def _new_process(self) -> _RenderProcess:
        self._num_processes += 1
        try:
            return await asyncio.to_thread(self._start)
        except BaseException:
            self._num_processes -= 1
            raise

    def _start(self) -> _RenderProcess:
        if self._is_closed:
            raise RendererLostError("The processes that render chats have been ended")
        process = _RenderProcess(self._templates)
        self._processes.add(process)
        if self._is_closed:  # `close` ran during the start
            process.kill()
        return process

    async def _discard(self, process: _RenderProcess) -> str | None:
        """End a process -> the template's fault in its end, if any."""
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
