"""One replica that Ray has placed: its engine process on some machine, and the connection that it makes to this one."""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.distributed import wire
from quire.engine.nodes import checkpoint
from quire.engine.ray_cluster import last_line
from quire.engine.ray_replicas import RayReplicas
from quire.entry.spawn import how_it_ended
from quire.errors import ConfigError
from quire.frontend.client import ProcessClient
from quire.frontend.engine_link import TcpLink
from quire.messages import EngineLaunch, ServerAddress, UseTokenizer

END_SECONDS = 2.0  # for an engine to notice that its connection is closed


class RayReplica:
    """One engine process at a time, as EngineProcessHandle, on the machine that Ray has for it."""

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
        self._actor: Any = None
        self._ended: Future[int] | None = None  # the exit code of the last process
        self._was_killed = False  # by this object

    def launch(self) -> ProcessClient:
        """Start a process; the one before must have ended. Raises OSError; for the first one also ConfigError."""
        is_first = self._ended is None
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
        try:
            self._actor, self._ended = self._replicas.start(self._index, launch)
        except Exception as error:  # in any form that Ray gives it
            client.close()
            raise OSError(0, f"Ray cannot start it: {last_line(error)}") from error
        self._was_killed = False
        return client

    def is_alive(self) -> bool:
        """Whether its actor runs, or will."""
        return self._ended is not None and not self._ended.done()

    def describe_end(self) -> str | None:
        """How the process ended, for people; None while it runs and if it left by itself or was told to."""
        if self._ended is None or not self._ended.done() or self._was_killed:
            return None
        if (error := self._ended.exception()) is not None:
            return f"Ray has not started replica {self._index}, or has lost it: {last_line(error)}"
        return how_it_ended(self._ended.result())

    def kill(self) -> None:
        """End the process, even one that is stopped, and wait until its actor is gone. Its connection is closed."""
        if self._actor is None or self._ended is None:
            return
        wait((self._ended,), END_SECONDS)
        self._was_killed = not self._ended.done()
        actor, self._actor = self._actor, None
        self._replicas.end(actor)
        wait((self._ended,), END_SECONDS)

    def tell_to_stop(self) -> None:
        """It takes the end of its connection as the end of this process."""

    def stop(self) -> None:
        """May be called again."""
        self.kill()
