"""Tells systemd the state of the service (`Type=notify`), and takes over a socket on which systemd listens.

Source: the manual pages sd_notify(3) and sd_listen_fds(3).
"""

from __future__ import annotations

import os
import socket

from quire import envs
from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)

_FIRST_FD = 3  # SD_LISTEN_FDS_START


def take_socket() -> socket.socket | None:
    """The socket on which a .socket unit of systemd listens for this process; None: there is none.

    The variables that describe it are removed, so that no child process takes it over. Raises ConfigError.
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
    """Send `READY=1` or `STOPPING=1` to the service manager, if there is one. A failure is logged."""
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
