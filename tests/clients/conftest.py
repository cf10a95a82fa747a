"""A server of the demo model for other people's clients."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.e2e.serving import SMALL, Serve


@pytest.fixture(scope="session")
def server() -> Iterator[Serve]:
    with Serve(*SMALL, "--enable-tokenizer-info-endpoint") as server:
        yield server


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client asks a third party for anything."""
    for name, value in {
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OPENAI_API_KEY": "none",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Sockets that a client has not closed are collected here, where warnings are ignored."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
