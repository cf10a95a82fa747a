"""Logging of Quire: a logger tree under `quire`, one format for every line of a process, a rate limit for warnings.

Our own processes (`configure`) write all lines in one format, also the lines of libraries: text, or JSON with
QUIRE_LOG_FORMAT. As a library, `LLM(...)` logs to `quire`, and the host program decides the rest.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from copy import copy
from datetime import UTC, datetime
from types import TracebackType

from quire import envs
from quire.errors import ConfigError, printable
from quire.screen.terminal import CLEAR_LINE, Style, is_terminal

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DATE = "%m-%d %H:%M:%S"
_STYLES = {logging.WARNING: ("yellow",), logging.ERROR: ("red",), logging.CRITICAL: ("red", "bold")}
# Of sd-daemon(3), for levels up to these.
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}
_JSON_NAMES = ("time", "level", "logger", "message", "request_id", "exception")

# The x-request-id of the HTTP request that is served: every line that is written for it has it.
current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)


class _StderrHandler(logging.Handler):
    """Writes each line at once to the present standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(_with_priority(self.format(record), record.levelno), file=sys.stderr, flush=True)
        except Exception:  # as in every handler of the standard library, a failing line stops nothing
            self.handleError(record)


def _with_priority(text: str, level: int) -> str:
    """The text for standard error: each line begins with its level if systemd's journal reads it."""
    try:
        found = os.fstat(sys.stderr.fileno()) if envs.JOURNAL_STREAM.get() else None
    except (OSError, ValueError):  # standard error is no file
        found = None
    if found is None or envs.JOURNAL_STREAM.get() != f"{found.st_dev}:{found.st_ino}":
        return text
    priority = next((number for most, number in _PRIORITIES.items() if level <= most), 2)
    return "\n".join(f"<{priority}>{line}" for line in text.split("\n"))


_handler: _StderrHandler | None = None  # the handler of this process, after it is configured
_is_json = False


def get_logger(name: str) -> logging.Logger:
    """Logger for a module; pass `__name__`."""
    return logging.getLogger(name)


def is_json() -> bool:
    """Whether standard error takes only JSON records."""
    return _is_json


def _printable(text: str) -> str:
    """A safe text. Its further lines are indented, so none of them looks like a line of the log."""
    return printable(text).replace("\n", "\n    ")


class TextFormatter(logging.Formatter):
    """A line for people. On a terminal it replaces a progress bar, also the bar of another process.

    Only the first line of a record begins at the margin, even if a client's name or message has several lines.
    """

    def __init__(self) -> None:
        super().__init__(_FORMAT, _DATE)
        self._paint = Style(sys.stderr)
        self._start = CLEAR_LINE if is_terminal(sys.stderr) else ""

    def format(self, record: logging.LogRecord) -> str:
        request_id = current_request_id.get()
        message = record.getMessage()
        if request_id is not None and request_id not in message:
            first, *more = message.splitlines() or [""]
            record = copy(record)
            record.msg, record.args = "\n".join([f"{first} (request {request_id})", *more]), ()
        text = _printable(super().format(record))
        if (names := _STYLES.get(record.levelno)) is not None:
            text = self._paint(record.levelname, *names) + text.removeprefix(record.levelname)
        return self._start + text


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, logger, message, request_id, `extra=fields(...)`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := current_request_id.get()) is not None:
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def fields(**values: object) -> dict[str, dict[str, object]]:
    """`logger.info("...", extra=fields(seconds=1.2))`: further fields of a JSON record."""
    assert not values.keys() & set(_JSON_NAMES), "a field would hide one that every record has"
    return {"fields": values}


def configure(level: str | None = None, log_format: str | None = None) -> None:
    """Send every line of this process to standard error in one format. May be called again.

    Args:
        level: the log level of Quire's own lines; None: VLLM_LOGGING_LEVEL.
        log_format: text or json; None: QUIRE_LOG_FORMAT.

    Given values are written to the environment variables, for processes that start later. Raises ConfigError.
    """
    global _handler, _is_json
    if level is not None:
        os.environ[envs.LOGGING_LEVEL.name] = level
    if log_format is not None:
        os.environ[envs.LOG_FORMAT.name] = log_format
    name = envs.LOGGING_LEVEL.get()
    number = logging.getLevelNamesMapping().get(name)
    if number is None:
        raise ConfigError(
            "Unknown log level", value=name, expected="DEBUG, INFO, WARNING or ERROR", param="VLLM_LOGGING_LEVEL"
        )
    _is_json = envs.LOG_FORMAT.get() == "json"
    logging.getLogger("quire").setLevel(number)
    if _handler is None:
        _handler = _StderrHandler()
        logging.getLogger().addHandler(_handler)
        logging.captureWarnings(True)
    _handler.setFormatter(JsonFormatter() if _is_json else TextFormatter())
    sys.excepthook = _log_uncaught if _is_json else sys.__excepthook__


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("quire").critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def adopt(library: str) -> None:
    """Write a library's lines in our format instead of through its own handler. It works only in our own processes."""
    if _handler is not None:
        logging.getLogger(library).handlers.clear()
        logging.getLogger(library).propagate = True


def say(message: str, level: int = logging.INFO, **values: object) -> None:
    """Tell the user of the command: `quire: message` on standard error, or a JSON record with `values`."""
    if is_json():
        get_logger("quire").log(level, message, extra=fields(**values))
    else:
        print(_with_priority(f"quire: {_printable(message)}", level), file=sys.stderr, flush=True)


class RateLimited:
    """Logs at most one line per `interval` seconds, with the number of lines that were left out."""

    def __init__(self, logger: logging.Logger, interval: float = 60.0) -> None:
        self._logger, self._interval = logger, interval
        self._next_time = 0.0
        self._suppressed = 0

    def warning(self, message: str, *args: object, error: Exception | None = None) -> None:
        """Log a warning. The traceback of `error` follows it."""
        self._line(logging.WARNING, message, *args, error=error)

    def info(self, message: str, *args: object) -> None:
        self._line(logging.INFO, message, *args)

    def _line(self, level: int, message: str, *args: object, error: Exception | None = None) -> None:
        now = time.monotonic()
        if now < self._next_time:
            self._suppressed += 1
            return
        suffix = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._logger.log(level, message + suffix, *args, exc_info=error)
        self._next_time, self._suppressed = now + self._interval, 0
