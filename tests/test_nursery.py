"""Who orders a child gets it, whatever becomes of it."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.nursery import BoundedPopen

COMMAND = [sys.executable, "-m", "quire.frontend.render_process"]


def test_a_child_that_ends_before_it_runs_is_a_child_that_has_ended():
    """As after a signal to processes found by name. A process that orders another nursery gets the new one."""
    with BoundedPopen(COMMAND, cwd="/nowhere", stdin=subprocess.DEVNULL) as process:
        assert process.wait(30) == 1
    ours, theirs = socket.socketpair()  # it serves a socket, and ends by itself on anything else
    with ours, theirs, BoundedPopen(COMMAND, stdin=theirs) as process:
        assert process.poll() is None
        process.kill()
    assert process.returncode == -9
