"""Starts the interpreters of further ranks early. They load their libraries while they wait for a RankLaunch.

The import of torch takes most of the time of a start. An interpreter that starts early imports torch at the same time
as the first rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quire import envs
from quire.distributed.layout import MOST_LINKS
from quire.engine.rank_messages import RankLaunch, decode_to_rank, encode

PROGRAM = ("-m", "quire.engine.rank_process")  # arguments of the interpreter
MOST_DESCRIPTORS = MOST_LINKS + 3  # of one start: a connection, memory, a connection for adapters, and links
_PIECE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankInterpreter:
    """A process that waits for a RankLaunch on its standard input. It ends if none comes.

    Raises OSError if the process cannot be started.
    """

    def __init__(self) -> None:
        # -P: a module of the current folder must not stand in for one of ours or of the standard library.
        command = [sys.executable, "-P", *PROGRAM]
        self._orders, theirs = socket.socketpair()
        try:
            with theirs:
                # In its own group, the process never gets a Ctrl-C of the terminal, not even at its start.
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    command, stdin=theirs.fileno(), process_group=0, env=envs.for_children()
                )
        except BaseException:
            self._orders.close()
            raise

    def launch(self, launch: RankLaunch) -> subprocess.Popen[bytes]:
        """Let the process become a rank. The caller may close the launch's descriptors afterwards."""
        frame = encode(launch)
        with suppress(ConnectionError), self._orders:  # a later message will raise an error that says how it ended
            sent = socket.send_fds(self._orders, [frame], launch.descriptors())
            self._orders.sendall(frame[sent:])
        return self.process

    def end(self) -> None:
        """End the process at once, and wait until it is gone."""
        self._orders.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def spawned_ranks(count: int) -> Iterator[list[RankInterpreter]]:
    """Start this number of interpreters, or fewer if the system allows no more.

    At the end of the block, the interpreters that are still in the list are ended.
    """
    interpreters: list[RankInterpreter] = []
    try:
        with suppress(OSError):  # start_ranks starts missing interpreters itself, and reports the error
            interpreters.extend(RankInterpreter() for _ in range(count))
        yield interpreters
    finally:
        for interpreter in interpreters:
            interpreter.end()


def die_with_parent() -> None:
    """Let the system kill this process when its parent ends, even while this process is stopped. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def receive_launch() -> RankLaunch | None:
    """Wait for the launch, in the process of a rank. None: the first rank has ended, or does not need the process."""
    with socket.socket(fileno=os.dup(0)) as orders:
        frame, descriptors, _, _ = socket.recv_fds(orders, _PIECE_BYTES, MOST_DESCRIPTORS)
        while piece := orders.recv(_PIECE_BYTES):
            frame += piece
    if not frame:
        return None
    launch = decode_to_rank(frame)
    assert isinstance(launch, RankLaunch)
    return launch.with_descriptors(descriptors)
