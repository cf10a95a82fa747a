"""Tests of the command line have no user's settings."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests."""
    for name in ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "QUIRE_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
