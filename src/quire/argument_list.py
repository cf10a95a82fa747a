"""This process' arguments as other users of the machine see them, in /proc/PID/cmdline: secrets do not stay there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

# Where /proc/PID/stat has the addresses of the arguments (proc(5)), counted behind the name, which may hold spaces.
_ARG_START, _ARG_END = 48 - 3, 49 - 3


def hide_secrets(secrets: Collection[str]) -> None:
    """Overwrite secrets that were given as arguments with stars. Without Linux' /proc nothing happens."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, IndexError, ValueError):
        return
    if begin <= 0 or end <= begin:
        return
    arguments = ctypes.string_at(begin, end - begin)
    hidden = b"\0".join(_without(secrets, argument) for argument in arguments.split(b"\0"))
    ctypes.memmove(begin, hidden, len(arguments))


def _without(secrets: Collection[str], argument: bytes) -> bytes:
    """The argument, as long as before. Inside of one, only flags of secrets and JSON lists are looked through."""
    for secret in map(os.fsencode, secrets):
        if argument == secret or (secret and argument.startswith((b"--api", b"--hf", b"--header", b"["))):
            argument = argument.replace(secret, b"*" * len(secret))
    return argument
