"""A process that computes with data from unknown clients, and the messages of its socket. It may be killed at any time.

The system bounds its processor time and its memory. The first message says what to prepare; each further one asks for
one text. The process answers each with one Answer, or it ends. It ends by SIGPROF after too much processor time, or
with exit code OUT_OF_MEMORY.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import msgspec

from quire import logs
from quire.errors import ConfigError, InvalidRequestError, QuireError, UnsupportedFieldError, VocabularyError

LENGTH = struct.Struct("!I")  # bytes of the JSON message after it
MAX_MEMORY_BYTES = 2**30  # the largest body, decoded and copied, takes a third of it
OUT_OF_MEMORY = 3  # exit code of a process that reached its memory limit
_ERRORS: dict[str, type[QuireError]] = {
    kind.code: kind for kind in (InvalidRequestError, UnsupportedFieldError, ConfigError, VocabularyError, QuireError)
}
logger = logs.get_logger(__name__)


class Preparation(Protocol):
    """A first message. `max_seconds`: processor time for the preparation and for each further message."""

    max_seconds: float


P = TypeVar("P", bound=Preparation)


class Failure(msgspec.Struct):
    """An error: the code of its class, its arguments, and where it was, if nobody expected it."""

    code: str
    what: str
    value: Any
    expected: str | None
    fix: str | None
    param: str | None
    trace: str = ""


class Answer(msgspec.Struct):
    """The text or an error."""

    text: str = ""
    failure: Failure | None = None


def text_of(answer: bytes) -> str:
    """The text of an encoded Answer. If it has an error, the error is raised; an unexpected one is logged first."""
    decoded = msgspec.json.decode(answer, type=Answer)
    if (failure := decoded.failure) is not None:
        if failure.trace:
            logger.error("a bounded process failed\n%s", failure.trace)
        raise _ERRORS[failure.code](
            failure.what, value=failure.value, expected=failure.expected, fix=failure.fix, param=failure.param
        )
    return decoded.text


def _failed(error: BaseException) -> Answer:
    """The answer for an error. An unexpected error is a defect of the server.

    This process cannot write to files. So the answer says where the error was, and the server logs it.
    """
    trace = ""
    if not isinstance(error, QuireError):
        trace = "".join(traceback.format_exception(error)).rstrip()
        error = QuireError(f"A process that works for requests failed ({type(error).__name__})", fix="See its log")
    code = error.code if error.code in _ERRORS else InvalidRequestError.code
    return Answer(failure=Failure(code, error.what, error.value, error.expected, error.fix, error.param, trace))


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send one message with its length before it."""
    connection.sendall(framed(message))


def framed(message: msgspec.Struct) -> bytes:
    """The bytes of a message with its length before it."""
    body = msgspec.json.encode(message)
    return LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> bytes | None:
    """The JSON of one message; None at the end of the connection."""
    head = _receive_bytes(connection, LENGTH.size)
    return None if head is None else _receive_bytes(connection, LENGTH.unpack(head)[0])


def _receive_bytes(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(min(count - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def run(first: type[P], prepare: Callable[[P], Callable[[bytes], str]]) -> None:
    """Serve the socket on standard input until it ends.

    Args:
        first: the type of the first message.
        prepare: makes a function from the first message; the function answers further messages. Both may raise
            QuireErrors.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the server, which ends this process when it is done
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _, limit = resource.getrlimit(resource.RLIMIT_AS)  # the server may have been started under `ulimit -v`
    num_bytes = MAX_MEMORY_BYTES if limit == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, limit)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    with socket.socket(fileno=0) as connection, suppress(ConnectionError):  # the server may be gone at any moment
        try:
            _serve(connection, first, prepare)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # at once, because the server kills the process when the connection ends


def _serve(connection: socket.socket, first: type[P], prepare: Callable[[P], Callable[[bytes], str]]) -> None:
    if (body := receive(connection)) is None:
        return
    given = msgspec.json.decode(body, type=first)
    with _limited(given.max_seconds):
        try:
            answer = prepare(given)
        except MemoryError:
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            send(connection, _failed(error))
            return
    send(connection, Answer())
    while (body := receive(connection)) is not None:
        with _limited(given.max_seconds):
            try:
                answered = Answer(answer(body))
            except MemoryError:
                raise
            except BaseException as error:
                answered = _failed(error)
            send(connection, answered)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """SIGPROF ends the process after `seconds` of processor time inside. Waiting for a core does not count."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
