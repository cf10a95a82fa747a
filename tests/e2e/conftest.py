"""One LLM per dtype for the whole folder: the bundled demo model in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM
from tests import one_ssl_context

KV_BYTES = 1 << 25
one_ssl_context.share()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """In float32, where equal tokens can be asked for. One thread: transformers runs beside it, and others may too."""
    return LLM(dtype="float32", kv_cache_memory_bytes=KV_BYTES, num_threads=1)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that uses the shared LLM its engine is empty."""
    yield
    if "llm" in request.fixturenames:
        engine: LLM = request.getfixturevalue("llm")
        check_is_empty(engine)


def check_is_empty(engine: LLM) -> None:
    scheduler = engine.llm_engine.core.scheduler
    assert not scheduler.has_requests(), "requests stayed in the engine"
    assert scheduler.kv.pool.num_used_blocks == 0, "blocks stayed in use"
    scheduler.kv.check()
