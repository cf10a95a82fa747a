"""Servers of the HTTP tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.server.serving import RunningServer


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Answers everything with `serving.TEXT`."""
    with RunningServer() as running:
        yield running
        running.wait_for_idle()


@pytest.fixture(scope="module")
def echo() -> Iterator[RunningServer]:
    """Answers with the prompt, over and over, up to max_tokens."""
    with RunningServer(answer=None) as running:
        yield running
        running.wait_for_idle()


@pytest.fixture
def log(caplog):
    """Records of Quire's loggers, whatever an earlier test configured."""
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
