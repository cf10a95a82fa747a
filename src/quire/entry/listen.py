"""The place where the server listens: a port or a Unix socket, with TLS or without it, and its address for clients."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shlex
import socket
import ssl
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from quire.config import ServerConfig
from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)

BACKLOG = 2048  # connections the system holds until they are accepted; uvicorn's default
_SO_ATTACH_FILTER = 26  # the number of this option on Linux
# A filter of TCP packets in the system's own language: load byte 13, the flags; with SYN keep 0 bytes, else keep all.
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
SOCKET_UMASK = 0o177  # a Unix socket is its owner's alone: mode 0600


@dataclass(frozen=True)
class Address:
    """The address of the server.

    Attributes:
        name: the name for people.
        url: the URL that clients ask.
        curl: further options that curl needs.
    """

    name: str
    url: str
    curl: str = ""
    has_browser: bool = True


class Listener:
    """A bound socket. Until `listen`, connections are refused; connections to a passed socket wait.

    Attributes:
        is_passed: systemd has bound it, and listens on it after this server's end too.
    """

    def __init__(self, config: ServerConfig, passed: socket.socket | None = None) -> None:
        """Take the port or the path before the model costs time, unless a socket is passed. Raises ConfigError."""
        self._config, self.is_passed = config, passed is not None
        self.tls = _tls_context(config)  # the TLS settings of new connections
        self._tls_identity = _tls_identity(config)
        self._file: tuple[int, int] | None = None
        if passed is not None:
            self.socket = passed
        elif config.uds is None:
            self.socket = _bind_port(config.host, config.port)
        else:
            self.socket = _bind_path(config.uds)
            self._file = _identity(config.uds)

    def server_tls(self) -> ssl.SSLContext | None:
        """The context for the code that accepts connections. Each connection uses the `tls` of its time."""
        return None if self.tls is None else _CurrentTls(self)

    def refresh_tls(self) -> None:
        """Read the files of certificates, key and authorities again, for connections from now on.

        Unusable files are logged once, and the old ones stay: a renewal may be half done.
        """
        if self.tls is None or (identity := _tls_identity(self._config)) == self._tls_identity:
            return
        self._tls_identity = identity
        try:
            self.tls = _tls_context(self._config)
        except ConfigError as error:
            logger.warning("the certificates have changed, but the old ones stay in use: %s", error.message)
            return
        logger.info("the certificates were read again")

    def listen(self) -> None:
        try:
            self.socket.listen(BACKLOG)
        except OSError as error:  # another process was faster between bind and here
            raise _cannot_listen(error, self.socket.getsockname()) from None

    def turn_away(self) -> None:
        """Refuse new connections. Earlier connections can still be accepted: closing would reset them."""
        if self._config.uds is None:
            _drop_new_connections(self.socket)
        else:
            self._remove_file()

    def close(self) -> None:
        """Close the socket, and remove the file of a Unix socket, unless the file is another server's by now."""
        self.socket.close()
        self._remove_file()

    def _remove_file(self) -> None:
        path = self._config.uds
        if path is not None and not self.is_passed:
            with suppress(FileNotFoundError):
                if _identity(path) == self._file:
                    os.unlink(path)

    @property
    def address(self) -> Address:
        config, curl = self._config, []
        if self.tls is not None and config.ssl_certfile is not None:
            curl += ["--cacert", shlex.quote(config.ssl_certfile)]
            if self.tls.verify_mode is ssl.CERT_REQUIRED:
                curl += ["--cert", "YOUR_CERTIFICATE"]
        scheme = "http" if self.tls is None else "https"
        if config.uds is not None:
            curl += ["--unix-socket", shlex.quote(config.uds)]
            return Address(f"unix:{config.uds}", f"{scheme}://localhost", " ".join(curl), has_browser=False)
        host = f"[{config.host}]" if ":" in config.host else config.host
        url = f"{scheme}://{host}:{self.socket.getsockname()[1]}"
        return Address(url, url, " ".join(curl))


class _CurrentTls(ssl.SSLContext):
    """Makes connections with the listener's present context.

    A context itself cannot be renewed: it takes new authorities, but never gives up an old one or its sessions.
    """

    def __new__(cls, listener: Listener) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        assert self._listener.tls is not None, "TLS has gone"
        return self._listener.tls.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


def check_guarded(config: ServerConfig, api_keys: Sequence[str]) -> None:
    """Raise ConfigError if people who are not users of this machine could connect, and no key stops them."""
    if config.uds is None and not is_loopback(config.host) and not api_keys and not config.no_auth:
        raise ConfigError(
            "The server would be open to everybody who reaches this machine",
            value=config.host,
            expected="an address that only this machine reaches, such as 127.0.0.1, or a key",
            fix="Set --api-key, --api-key-file or VLLM_API_KEY, or give --no-auth if you want that",
            param="host",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allowed_hosts(config: ServerConfig) -> tuple[str, ...]:
    """The names in the `Host` header that a loopback server accepts; empty: it accepts all names.

    A request with another name comes from a web page that has rebound its name to this address. No browser opens a Unix
    socket, and a proxy in front of one passes its own name on, so there every name is accepted.
    """
    if config.uds is not None or not is_loopback(config.host):
        return ()
    return ("127.0.0.1", "localhost", "::1", config.host)


def at_socket(config: ServerConfig, passed: socket.socket) -> ServerConfig:
    """The config with the address of a passed socket."""
    if passed.family == socket.AF_UNIX:
        return replace(config, uds=passed.getsockname())
    host, port = passed.getsockname()[:2]
    return replace(config, host=host, port=port, uds=None)


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"The host is not known: {error}", value=host, fix="Check --host", param="host") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, address) from None
    return listener


def _drop_new_connections(listener: socket.socket) -> None:
    """Let the system drop the first packet of every new connection. Its client sends it again a second later: then the
    port is closed, or another server has it. Only Linux has such a filter; without it nothing breaks.
    """
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _DROP_SYN)
    buffer = ctypes.create_string_buffer(program)
    with suppress(OSError):
        option = struct.pack("HP", len(_DROP_SYN), ctypes.addressof(buffer))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(SOCKET_UMASK)  # so that no other user can open the file, not even for a moment
    try:
        _remove_stale(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on the Unix socket: {error.strerror or error}",
            value=path,
            fix="Name another path with --uds, in a folder you may write to",
            param="uds",
        ) from None
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(umask)
    return listener


def _identity(path: str) -> tuple[int, int]:
    """The inode number of a file and its time of creation: the system reuses inode numbers at once."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that was killed. Any other file is left alone."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("The path is no socket", value=path, fix="Name another with --uds", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError(
        "Another server listens on the Unix socket",
        value=path,
        fix="Stop it, or name another path with --uds",
        param="uds",
    )


def _cannot_listen(error: OSError, address: Sequence[Any] | str) -> ConfigError:
    if isinstance(address, str):
        return ConfigError(f"Cannot listen on {address}: {error.strerror}", fix="Name another --uds", param="uds")
    return ConfigError(
        f"Cannot listen on {address[0]} port {address[1]}: {error.strerror}",
        fix="Stop the program that uses the port, or name another port with --port (0: any free port)",
        param="port",
    )


def _tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context for TLS 1.2 or newer; None: the server speaks plain HTTP. Raises ConfigError."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                "OpenSSL knows none of these ciphers",
                value=config.ssl_ciphers,
                expected="a list such as ECDHE+AESGCM:ECDHE+CHACHA20",
                fix="Check --ssl-ciphers with `openssl ciphers`, or leave it out",
                param="ssl_ciphers",
            ) from None
    _load_certificates(context, config)
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _load_certificates(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.ssl_certfile is not None, "TLS without a certificate"
    try:
        # A key with a password is an error: a server has nobody to type it.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The certificate or its key cannot be read: {_why(error)}",
            value=config.ssl_certfile,
            expected="PEM files: the chain, and its key without a password",
            fix="Check --ssl-certfile and --ssl-keyfile",
            param="ssl_certfile",
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"The certificates of the authorities cannot be read: {_why(error)}",
                value=config.ssl_ca_certs,
                fix="Check --ssl-ca-certs",
                param="ssl_ca_certs",
            ) from None


def _tls_identity(config: ServerConfig) -> list[tuple[int, int] | None]:
    """A value that changes when the file is written or replaced; None: there is no file."""
    identities: list[tuple[int, int] | None] = []
    for path in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs):
        try:
            identities.append(None if path is None else _identity(path))
        except OSError:
            identities.append(None)
    return identities


def _why(error: Exception) -> str:
    """The reason of an error. An SSLError has it, if at all, in its attribute `reason`."""
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
