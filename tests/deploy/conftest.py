"""Command lines of deployments ask for JSON logs, which no later test shall write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import logs


@pytest.fixture(autouse=True)
def text_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "text")
    yield
    logs.configure(log_format="text")
