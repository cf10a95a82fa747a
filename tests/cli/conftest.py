"""Notices are log lines: let every test of the command line see them."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def visible_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have configured logging, which takes our tree away from pytest's handler."""
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests."""
    for name in ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "QUIRE_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
