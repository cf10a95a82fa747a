"""Servers of the HTTP tests, and a browser."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator

import pytest

from quire.frontend.echo_client import EchoClient
from quire.server import http_server
from tests import one_ssl_context
from tests.nursery import BoundedPopen
from tests.server.browser import WHY_NOT, Browser
from tests.server.serving import ANSWER, MAX_MODEL_LEN, RunningServer

one_ssl_context.share()


@pytest.fixture(scope="module", autouse=True)
def quick_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every server has processes that render chats and make grammars: they are forks.

    At its end no client is just connecting, except in the tests of that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", BoundedPopen)
        if not request.module.__name__.endswith("test_drain"):
            patch.setattr(http_server, "HANDSHAKE_SECONDS", 0.0)
            patch.setattr(http_server, "POLL_SECONDS", 0.005)
        yield


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


@pytest.fixture(scope="module")
def steady() -> Iterator[RunningServer]:
    """Answers everything with TEXT, a token every 10 ms."""
    with RunningServer(EchoClient(ANSWER, step_seconds=0.01, max_model_len=MAX_MODEL_LEN)) as server:
        yield server


@pytest.fixture(scope="module")
def endless() -> Iterator[RunningServer]:
    """Answers with TEXT a hundred times, a token every 5 ms."""
    with RunningServer(EchoClient(ANSWER * 100, step_seconds=0.005, max_model_len=MAX_MODEL_LEN)) as server:
        yield server
        server.wait_for_idle()


@pytest.fixture
def log(caplog):
    """Records of Quire's loggers, whatever an earlier test configured."""
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    with Browser() as running:
        yield running


@pytest.fixture
def browser(chromium) -> Iterator[Browser]:
    """A desktop window; whatever a test does, the console stays free of errors, and no other host is asked."""
    chromium.cdp("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    chromium.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    yield chromium
    host = chromium.js("location.host")
    asked = chromium.requested_urls()
    assert {url.split("/")[2] for url in asked if not url.startswith("data:")} == {host}, asked
    # The browser itself reports answers other than 2xx; everything else is the page's fault.
    problems = [entry for entry in chromium.log("browser") if entry["source"] != "network"]
    assert not problems
    chromium.js("sessionStorage.clear(), localStorage.clear()")
    chromium.js("new Promise(done => { indexedDB.deleteDatabase('quire').onsuccess = done })")
    chromium.open("about:blank")
