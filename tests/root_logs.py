"""Import it, and pytest catches log records at the root logger alone.

Six times in each test, pytest would look at the loggers of all libraries for those that do not pass their records on:
0.4 ms. These are torch's, about 40. Ours pass theirs on at the start of each test (conftest.py).
"""

from __future__ import annotations

import logging
from typing import Any

from _pytest.logging import catching_logs


def _enter(catching: Any) -> logging.Handler:
    root, handler = logging.getLogger(), catching.handler
    root.addHandler(handler)
    if catching.level is not None:
        handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    assert isinstance(handler, logging.Handler)
    return handler


def _leave(catching: Any, *error: object) -> None:
    root = logging.getLogger()
    if catching.level is not None:
        root.setLevel(catching.orig_level)
    root.removeHandler(catching.handler)


catching_logs.__enter__ = _enter  # type: ignore[method-assign]
catching_logs.__exit__ = _leave  # type: ignore[method-assign]
