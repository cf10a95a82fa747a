"""Logging of Quire: one logger tree under `quire`, one line format, a rate limit for warnings."""

from __future__ import annotations

import logging
import sys
import time

from quire import envs
from quire.errors import ConfigError

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
_DATE = "%m-%d %H:%M:%S"


def get_logger(name: str) -> logging.Logger:
    """Logger for a module; pass `__name__`."""
    return logging.getLogger(name)


def configure(level: str | None = None) -> None:
    """Send the `quire` tree to standard error, once per process. Level: the argument, or VLLM_LOGGING_LEVEL."""
    name = (level or envs.LOGGING_LEVEL.get()).upper()
    number = logging.getLevelNamesMapping().get(name)
    if number is None:
        raise ConfigError(
            "Unknown log level", value=name, expected="DEBUG, INFO, WARNING or ERROR", param="VLLM_LOGGING_LEVEL"
        )
    root = logging.getLogger("quire")
    root.setLevel(number)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, _DATE))
        root.addHandler(handler)
        root.propagate = False


class RateLimited:
    """Logs at most one warning per `interval` seconds and says how many were left out."""

    def __init__(self, logger: logging.Logger, interval: float = 60.0) -> None:
        self._logger, self._interval = logger, interval
        self._next_time = 0.0
        self._suppressed = 0

    def warning(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now < self._next_time:
            self._suppressed += 1
            return
        suffix = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._logger.warning(message + suffix, *args)
        self._next_time, self._suppressed = now + self._interval, 0
