"""Tells systemd how far the service is (`Type=notify`), and takes the socket that it listens on for the service:
sd_notify(3) and sd_listen_fds(3) in a few lines."""

from __future__ import annotations

import os
import socket

from quire import envs
from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)

_FIRST_FD = 3  # SD_LISTEN_FDS_START


def take_socket() -> socket.socket | None:
    """The socket that systemd (a .socket unit) listens on for this process; None: there is none. Raises ConfigError.

    The variables that tell of it are forgotten, so no other process takes it for its own.
    """
    if envs.LISTEN_PID.get() != os.getpid():
        return None
    number = envs.LISTEN_FDS.get()
    for variable in (envs.LISTEN_PID, envs.LISTEN_FDS):
        os.environ.pop(variable.name, None)
    if number != 1:
        raise ConfigError(
            "systemd passes more sockets than one",
            value=number,
            expected="1",
            fix="Keep one line ListenStream in the .socket unit",
        )
    taken = socket.socket(fileno=_FIRST_FD)
    taken.set_inheritable(False)
    if taken.type != socket.SOCK_STREAM:
        raise ConfigError("systemd passes a socket that is no stream", fix="Use ListenStream in the .socket unit")
    return taken


def notify(state: str) -> None:
    """Send `READY=1` or `STOPPING=1` to the service manager, where there is one. A failure is logged."""
    address = envs.NOTIFY_SOCKET.get()
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("systemd could not be told %s: %s", state, error)
