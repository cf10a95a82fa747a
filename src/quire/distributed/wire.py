"""Connections between machines. A peer must know the cluster key. No torch.

Both sides check the key when they connect, by HMAC-SHA256 of fresh random numbers. Later messages are neither encrypted
nor signed. So these machines need a network of their own.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import secrets
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

from quire import envs
from quire.errors import ConfigError
from quire.logs import get_logger

LEAST_KEY_LENGTH = 16  # characters
HANDSHAKE_SECONDS = 5.0  # the time in which a peer must show that it knows the key
RETRY_SECONDS = 0.2
MOST_FRAME_BYTES = 1 << 20  # the largest frame before ranks are connected
MOST_MESSAGE_BYTES = 1 << 30  # the largest message between a server and an engine on another machine
NONCE_BYTES = 32
KEEPALIVE_PROBES = 5  # probes of an idle connection without an answer, one each second, after which the system ends it
CONNECT_SECONDS = 3.0  # the time of one attempt: in a network that was cut the system would wait longer and longer
_COUNT = struct.Struct("i")
_LENGTH = struct.Struct(">Q")
HEADER_BYTES = _LENGTH.size  # each frame begins with its length

# Waits until the connection is ready for an event of select.poll. It may raise an error in place of waiting longer.
Wait = Callable[[int], None]

logger = get_logger(__name__)


class WireError(Exception):
    """The peer is gone, or it has sent an illegal message."""


class LengthError(WireError):
    """The peer has sent a frame of an illegal length."""


def cluster_key() -> bytes:
    """The key that all machines share. Raises ConfigError if it is missing or too short."""
    key = envs.CLUSTER_KEY.get()
    if len(key) < LEAST_KEY_LENGTH:
        raise ConfigError(
            "Machines need a cluster key",
            value=f"{len(key)} characters" if key else None,
            expected=f"{envs.CLUSTER_KEY.name} with {LEAST_KEY_LENGTH} characters or more, the same on all of them",
            fix=f"Make one with `openssl rand -hex 32`, and set {envs.CLUSTER_KEY.name} on each machine",
            param=envs.CLUSTER_KEY.name,
        )
    return key.encode()


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at one address. Port 0: the system chooses a port. Raises ConfigError."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        found = ip_address(str(place[0]))
        if found.is_unspecified:
            raise ConfigError(
                "This address would accept connections from all networks",
                value=address,
                expected="one address of this machine, in the network of the others",
                param="master_addr",
            )
        if found.is_loopback and address not in (str(found), "localhost"):
            raise ConfigError(
                "This name stands for an address that no other machine can reach",
                value=f"{address}, which is {found} on this machine",
                expected="an address of this machine in the network of the others, or a name for it",
                fix="Give --master-addr (torchrun: MASTER_ADDR) the address itself, or correct the name in /etc/hosts",
                param="master_addr",
            )
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen()
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        is_port = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"This machine cannot listen for the other machines at {address}, port {port}: {error.strerror or error}",
            value=port if is_port else address,
            fix="Give another port with --master-port" if is_port else "Give an address of this machine",
            param="master_port" if is_port else "master_addr",
        ) from error


def accept(listener: socket.socket, key: bytes, until: float) -> socket.socket:
    """Wait for the next peer that knows the key. Other peers are logged and dropped. Raises TimeoutError at `until`.

    Args:
        until: the time of the monotonic clock at which the wait ends.
    """
    while True:
        listener.settimeout(max(until - time.monotonic(), 0.001))
        try:
            peer, place = listener.accept()
        except TimeoutError:
            raise
        except OSError as error:  # a peer has gone, or the network has failed: accept(2) says to try again
            if time.monotonic() > until:
                raise TimeoutError(f"no connection can be accepted: {error}") from error
            logger.warning("a connection could not be accepted: %s", error)
            time.sleep(RETRY_SECONDS)
            continue
        try:
            end = time.monotonic() + HANDSHAKE_SECONDS
            peer.settimeout(HANDSHAKE_SECONDS)
            challenge = secrets.token_bytes(NONCE_BYTES)
            send(peer, challenge)
            reply = receive(peer, NONCE_BYTES + 32, end)
            own, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(key, b"peer", challenge + own)):
                raise WireError("it does not know the cluster key")
            send(peer, _proof(key, b"host", own + challenge))
        except (WireError, OSError) as error:
            logger.warning("the connection of %s is closed, because it is none of our machines: %s", place[0], error)
            peer.close()
            continue
        return _ready(peer)


def connect(address: str, port: int, key: bytes, until: float) -> socket.socket:
    """Connect to a listener that knows the key, as soon as there is one.

    Raises:
        TimeoutError: no program listens until `until`, a time of the monotonic clock.
        WireError: the listener does not know the key, or does not accept this machine.
    """
    while True:
        try:
            seconds = min(max(until - time.monotonic(), 0.001), CONNECT_SECONDS)
            host = socket.create_connection((address, port), timeout=seconds)
            break
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > until:
                raise TimeoutError(f"no program listens at {address}, port {port}: {error}") from error
            time.sleep(RETRY_SECONDS)
    try:
        end = max(until, time.monotonic() + HANDSHAKE_SECONDS)  # the listener may be busy with another peer
        challenge, own = receive(host, NONCE_BYTES, end), secrets.token_bytes(NONCE_BYTES)
        send(host, own + _proof(key, b"peer", challenge + own))
        if not hmac.compare_digest(receive(host, 32, end), _proof(key, b"host", own + challenge)):
            raise WireError("it does not know the cluster key")
    except (WireError, OSError) as error:
        host.close()
        raise WireError(f"{address}, port {port}, does not accept this machine: {error}") from error
    return _ready(host)


def send(peer: socket.socket, frame: bytes | memoryview, wait: Wait | None = None) -> None:
    """Send one frame. Raises OSError.

    Args:
        wait: see Wait; None: wait without looking at anything else.
    """
    for part in (memoryview(header(frame)), memoryview(frame)):
        if wait is None:
            peer.sendall(part)
            continue
        while len(part):
            try:
                part = part[peer.send(part, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                wait(select.POLLOUT)


def num_unacknowledged(peer: socket.socket) -> int:
    """The number of sent bytes that the peer's system has not acknowledged. Only Linux knows it; 0 on others."""
    if sys.platform != "linux":
        return 0
    count: int = _COUNT.unpack(fcntl.ioctl(peer, termios.TIOCOUTQ, bytes(_COUNT.size)))[0]  # SIOCOUTQ of tcp(7)
    return count


def header(frame: bytes | memoryview) -> bytes:
    """The header of a frame: its length."""
    return _LENGTH.pack(len(frame))


def length_of(header: bytes | bytearray, most: int) -> int:
    """The length in bytes of the frame after this header. Raises LengthError if it is more than `most`."""
    length: int = _LENGTH.unpack(header)[0]
    if length > most:
        raise LengthError(f"a frame has {length} bytes, and {most} are allowed")
    return length


def receive(peer: socket.socket, most: int = MOST_FRAME_BYTES, until: float | None = None) -> bytes:
    """Receive a frame of at most `most` bytes. Raises WireError and OSError.

    Args:
        until: the time at which the whole frame must be here; None: the socket's timeout holds for each piece.
    """
    length = length_of(_exactly(peer, HEADER_BYTES, until), most)
    return bytes(_exactly(peer, length, until))


def receive_into(peer: socket.socket, memory: memoryview, wait: Wait) -> None:
    """Receive a frame that fills the memory exactly. Raises WireError and OSError."""
    first = bytearray(HEADER_BYTES)
    _fill(peer, memoryview(first), wait=wait)
    (length,) = _LENGTH.unpack(first)
    if length != len(memory):
        raise LengthError(f"a frame has {length} bytes, and {len(memory)} are expected")
    _fill(peer, memory, wait=wait)


def end(peer: socket.socket) -> None:
    """Shut the connection down, so that both sides stop waiting."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _ready(peer: socket.socket) -> socket.socket:
    """Prepare a connection. A lost machine is found by a Pulse; without one, after some seconds without data.

    TCP_USER_TIMEOUT is not set: it would also end the connection of a busy peer that has no room for more data.
    """
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": KEEPALIVE_PROBES}
    for name, value in options.items():
        if hasattr(socket, name):  # a system has only some of these options
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peer


def _proof(key: bytes, role: bytes, numbers: bytes) -> bytes:
    return hmac.digest(key, b"quire ranks 2 " + role + numbers, "sha256")


def _exactly(peer: socket.socket, count: int, until: float | None = None) -> bytearray:
    frame = bytearray(count)
    _fill(peer, memoryview(frame), until)
    return frame


def _fill(peer: socket.socket, memory: memoryview, until: float | None = None, wait: Wait | None = None) -> None:
    while len(memory):
        if until is not None:
            peer.settimeout(max(until - time.monotonic(), 0.001))
        try:
            count = peer.recv_into(memory, 0, 0 if wait is None else socket.MSG_DONTWAIT)
        except BlockingIOError:
            assert wait is not None, "the socket waits"
            wait(select.POLLIN)
            continue
        if not count:
            raise WireError("the connection was closed")
        memory = memory[count:]
