"""Starts the interpreters of engine processes, which load their libraries until they get a launch.

Most of a start is the import of torch. An interpreter that is started before the settings are final imports torch
beside the imports and the tokenizer of its parent.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quire import envs
from quire.config import EngineConfig

ENGINE_PROGRAM = ("-m", "quire.engine.process")  # arguments of the interpreter

EngineInterpreter = subprocess.Popen[bytes]


def spawn_engine(config: EngineConfig) -> EngineInterpreter:
    """An interpreter that waits for an EngineLaunch as one line of JSON on its standard input. Raises OSError."""
    num_ranks = 0
    if config.num_local_ranks > 1:
        from quire.planning.replicas import num_early_ranks

        num_ranks = num_early_ranks(config)
    # -P: a module of the current folder must not stand in for one of ours or of the standard library.
    command = [sys.executable, "-P", *ENGINE_PROGRAM, str(num_ranks)]
    # In its own group, the process never gets a Ctrl-C of the terminal, not even at its start.
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, process_group=0, env=envs.for_children())


def spawn_engines(config: EngineConfig) -> list[EngineInterpreter]:
    """The interpreters of the replicas on this machine; none if Ray places the replicas.

    Raises OSError, and ConfigError if the machine has no room for the replicas.
    """
    if config.has_ray_replicas:
        return []
    if config.data_parallel_size * config.tensor_parallel_size > 1:
        from quire.planning.replicas import check_machine

        check_machine(config)
    interpreters: list[EngineInterpreter] = []
    try:
        interpreters.extend(spawn_engine(config) for _ in range(config.num_replicas))
    except BaseException:
        end(interpreters)
        raise
    return interpreters


def how_it_ended(code: int) -> str | None:
    """A text for people about the end of an engine process; None: it left by itself.

    Args:
        code: the exit code of the process.
    """
    if code >= 0:
        return None
    hint = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
    return f"The engine process was ended by {signal.Signals(-code).name}{hint}."


def end(interpreters: Iterable[EngineInterpreter]) -> None:
    """End interpreters at once, and wait until they are gone."""
    for interpreter in interpreters:
        with interpreter:  # closes the pipe and waits
            interpreter.kill()


@contextmanager
def spawned_engines(config: EngineConfig) -> Iterator[list[EngineInterpreter]]:
    """The interpreters of `spawn_engines`. They are ended after the block, if nothing has ended them before."""
    interpreters = spawn_engines(config)
    try:
        yield interpreters
    finally:
        end(interpreters)
