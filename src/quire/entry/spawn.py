"""Starts the interpreter of an engine process, which loads its libraries until it is told what to serve.

Most of a start is the import of torch. An interpreter that is started before the settings are final does it beside the
imports and the tokenizer of its parent.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from quire import envs

ENGINE_PROGRAM = ("-m", "quire.engine.process")  # arguments of the interpreter

EngineInterpreter = subprocess.Popen[bytes]


def spawn_engine() -> EngineInterpreter:
    """An interpreter that waits for an EngineLaunch as one line of JSON on its standard input. Raises OSError."""
    # -P: a module of the current folder must not stand in for one of ours or of the standard library.
    command = [sys.executable, "-P", *ENGINE_PROGRAM]
    # In a group of its own, a Ctrl-C in the terminal does not reach it, not even before it can say so itself.
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, process_group=0, env=envs.for_children())


@contextmanager
def spawned_engine() -> Iterator[EngineInterpreter]:
    """The same, for as long as the block runs; whoever it was handed to may have ended it before."""
    with spawn_engine() as interpreter:
        try:
            yield interpreter
        finally:
            interpreter.kill()
