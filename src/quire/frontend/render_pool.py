"""Renders chats in a few processes that are killed when they take too long: the event loop never runs a template."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping

from quire.errors import ConfigError, InvalidRequestError
from quire.frontend.render_process import LENGTH, Render, Templates, framed, receive, send, text_of
from quire.logs import get_logger

logger = get_logger(__name__)

MAX_RENDER_SECONDS = 5.0
START_SECONDS = 30.0
# One process renders some thousand chats a second. Another is started only for those that wait behind a slow one.
MAX_PROCESSES = 4
PATIENCE_SECONDS = 0.1
_BUFFER_BYTES = 2**20


class _RenderProcess:
    """One process and the connection to it; it does one rendering at a time."""

    def __init__(self, templates: Templates) -> None:
        """Start it and wait until it has compiled the templates. Raises ConfigError if they are not usable."""
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: a module of the current folder must not stand in for one of ours or of the standard library.
            command = [sys.executable, "-P", "-m", "quire.frontend.render_process"]
            # In a group of its own, a Ctrl-C in the terminal does not reach it, not even before it can ignore it.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0)
        self._socket = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            ours.settimeout(START_SECONDS)
            send(ours, templates)
            answer = receive(ours)
            if answer is None:
                raise ConnectionResetError
            text_of(answer)
            ours.setblocking(False)
        except OSError:
            self.kill()
            self.wait()
            raise ConfigError(
                "The chat template cannot be compiled within the time and memory allowed",
                fix="Give another one with --chat-template",
                param="chat_template",
            ) from None
        except ConfigError:
            self.kill()
            self.wait()
            raise

    async def exchange(self, frame: bytes) -> bytes:
        """One message there, one back. Raises EOFError or OSError if the process ends meanwhile."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket, limit=_BUFFER_BYTES)
        reader, writer = self._streams
        writer.write(frame)
        await writer.drain()
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._socket.close()
        self._process.kill()

    def wait(self) -> None:
        """Until the system has taken back what it held."""
        self._process.wait()


class RenderPool:
    """ChatRenderer behind processes: same arguments, same texts, same errors.

    Args:
        max_seconds: of one rendering; then its process is killed and its request refused.
    Raises:
        ConfigError: a template is not valid.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        override: str | None = None,
        name: str = "The model",
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        self._templates = Templates(dict(templates), dict(special_tokens), override, name, max_seconds)
        self._idle: asyncio.LifoQueue[_RenderProcess] = asyncio.LifoQueue()
        self._processes: set[_RenderProcess] = set()
        self._is_closed = False
        self._idle.put_nowait(self._start())
        self._num_processes = 1
        self._running: set[asyncio.Task[str]] = set()

    async def render(self, asked: Render) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: as ChatRenderer.render; or it took too long or too much memory.
            ConfigError: there is no template.
        """
        # A caller that leaves does not stop the rendering: the process would answer the next one with its text.
        task = asyncio.create_task(self._render(framed(asked)))
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left

    async def _render(self, frame: bytes) -> str:
        process = await self._free_process()
        try:
            async with asyncio.timeout(self._templates.max_seconds):
                answer = await process.exchange(frame)
        except TimeoutError:
            await self._discard(process)
            raise self._refusal(f"did not end within {self._templates.max_seconds:g} seconds") from None
        except (EOFError, OSError):
            await self._discard(process)
            raise self._refusal("needed more memory or time than it may have") from None
        except BaseException:
            await self._discard(process)
            raise
        self._idle.put_nowait(process)
        return text_of(answer)

    @staticmethod
    def _refusal(what: str) -> InvalidRequestError:
        logger.warning("a chat template %s and was stopped", what)
        return InvalidRequestError(
            f"The chat template {what} on these messages",
            fix="Send fewer or shorter messages; the operator may give another template with --chat-template",
            param="messages",
        )

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
                await self._discard(process)  # ended by somebody else while it was idle
        self._num_processes += 1
        try:
            return await asyncio.to_thread(self._start)
        except BaseException:
            self._num_processes -= 1
            raise

    def _start(self) -> _RenderProcess:
        process = _RenderProcess(self._templates)
        self._processes.add(process)
        if self._is_closed:
            process.kill()
        return process

    async def _discard(self, process: _RenderProcess) -> None:
        process.kill()
        await asyncio.to_thread(process.wait)
        self._processes.discard(process)
        self._num_processes -= 1

    def close(self) -> None:
        """End all processes; those who wait for them are refused."""
        self._is_closed = True
        for process in list(self._processes):
            process.kill()
            process.wait()
