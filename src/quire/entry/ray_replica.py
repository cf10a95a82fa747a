"""One replica that Ray has placed: its engine process on some machine, and its connection to this process."""

from __future__ import annotations

from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.distributed import wire
from quire.engine.nodes import checkpoint
from quire.engine.ray_cluster import in_background, last_line
from quire.engine.ray_replicas import RayReplicas
from quire.entry.spawn import how_it_ended
from quire.errors import ConfigError
from quire.frontend.client import ProcessClient
from quire.frontend.engine_link import TcpLink
from quire.messages import EngineLaunch, ServerAddress, UseTokenizer

END_SECONDS = 2.0  # the time in which an engine notices that its connection is closed


class RayReplica:
    """One engine process at a time, like EngineProcessHandle, on the machine that Ray chooses."""

    def __init__(
        self,
        config: EngineConfig,
        model_folder: Path,
        replicas: RayReplicas,
        engine_index: int,
        tokenizer: UseTokenizer | None,
    ) -> None:
        self._config, self._replicas, self._index, self._tokenizer = config, replicas, engine_index, tokenizer
        self._checkpoint = checkpoint(model_folder, is_dummy=config.load_format == "dummy")
        # The actor of the last process, and its future exit code.
        self._starting: Future[tuple[Any, Future[int]]] | None = None
        self._is_killed = False  # the process was killed, or has ended together with its actor
        self._was_killed = False  # the process was killed while it ran

    def launch(self) -> ProcessClient:
        """Start a process. An earlier one must have ended. Raises OSError, and at the first start also ConfigError.

        It waits for Ray only at the first start: later the server answers other requests meanwhile.
        """
        is_first = self._starting is None
        try:
            listener = wire.listen(self._replicas.address, 0)
        except ConfigError as error:
            if is_first:
                raise
            raise OSError(0, error.message) from error
        client = ProcessClient(TcpLink(listener, self._replicas.key), self.is_alive, self._index, first=self._tokenizer)
        server = ServerAddress(*listener.getsockname()[:2])
        launch = EngineLaunch(
            self._config,
            "",
            server,
            self._index,
            is_first,
            gets_tokenizer=self._tokenizer is not None,
            checkpoint=self._checkpoint,
        )
        starting = in_background(partial(self._replicas.start, self._index, launch))
        if is_first and (failure := starting.exception()) is not None:  # Ray may raise errors of any class
            client.close()
            raise OSError(0, f"Ray cannot start it: {last_line(failure)}") from failure
        self._starting, self._is_killed, self._was_killed = starting, False, False
        return client

    def is_alive(self) -> bool:
        """Whether the process's actor runs, or is being started."""
        return self._starting is not None and self._end() is None

    def _end(self) -> Future[Any] | None:
        """The end of the last process: its failed start, or its exit code. None: it may run."""
        if self._starting is None or not self._starting.done():
            return None
        if self._starting.exception() is not None:
            return self._starting
        _, ended = self._starting.result()
        return ended if ended.done() else None

    def describe_end(self) -> str | None:
        """A text for people about the end of the process; None: it runs, or it left by itself or on request."""
        if (end := self._end()) is None or self._was_killed:
            return None
        if (error := end.exception()) is not None:
            return f"Ray has not started replica {self._index}, or has lost it: {last_line(error)}"
        return how_it_ended(end.result())

    def kill(self) -> None:
        """End the process, even a stopped one, and wait until its actor is gone. Its connection is closed.

        If Ray has not answered the start yet, the process is ended as soon as Ray answers.
        """
        if self._starting is None or self._is_killed:
            return
        self._is_killed = True
        wait((self._starting,), END_SECONDS)
        if not self._starting.done():
            self._was_killed = True
            self._starting.add_done_callback(self._end_actor)
        elif self._starting.exception() is None:
            _, ended = self._starting.result()
            wait((ended,), END_SECONDS)
            self._was_killed = not ended.done()
            self._end_actor(self._starting)
            wait((ended,), END_SECONDS)

    def _end_actor(self, starting: Future[tuple[Any, Future[int]]]) -> None:
        if starting.exception() is None:
            actor, _ = starting.result()
            self._replicas.end(actor)

    def tell_to_stop(self) -> None:
        """Do nothing: the process takes the end of its connection as the end of this process."""

    def stop(self) -> None:
        """Kill the process. May be called again."""
        self.kill()
