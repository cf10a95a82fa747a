"""This process' arguments in /proc/PID/cmdline, which other users of the machine can read: secrets do not stay
there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

# Fields of /proc/PID/stat with the addresses of the arguments (proc(5)). They are counted from the end of the process's
# name, which may contain spaces.
_ARG_START, _ARG_END = 48 - 3, 49 - 3
_SECRET_FLAGS = (b"--api", b"--hf", b"--header", b"--vllm")


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
    """The argument, as long as before. A part of it is hidden in the value of a secret's flag and in a JSON list."""
    begin = 0
    if argument.startswith(_SECRET_FLAGS):
        begin = argument.find(b"=") + 1 or len(argument)  # without "=", the next argument is the value
    elif not argument.startswith(b"["):
        return b"*" * len(argument) if os.fsdecode(argument) in secrets else argument
    value = argument[begin:]
    for secret in sorted(filter(None, map(os.fsencode, secrets)), key=len, reverse=True):  # one may begin another
        value = value.replace(secret, b"*" * len(secret))
    return argument[:begin] + value
