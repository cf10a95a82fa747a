"""Tells systemd how far the service is (`Type=notify`): sd_notify(3) in a few lines."""

from __future__ import annotations

import socket

from quire import envs
from quire.logs import get_logger

logger = get_logger(__name__)


def notify(state: str) -> None:
    """Send `READY=1` or `STOPPING=1` to the service manager, where there is one. What fails is logged."""
    address = envs.NOTIFY_SOCKET.get()
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("systemd was not told %s: %s", state, error)
