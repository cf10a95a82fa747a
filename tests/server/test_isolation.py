"""A client's text reaches neither another client nor the world, and the log only spelled out; and no check is an
assert.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire import logs
from quire.logs import TextFormatter
from tests.server.serving import LEAK, RunningServer

ROOT = Path(__file__).parents[2]
NUM_TENANTS = 16
FORGED = "x\r\nERROR 11-21 12:00:00 [quire] all is lost\x1b[2J\x1b]0;title\x07\u202e\u2028\x85\x00"


def _requests(canary: str) -> list[tuple[str, dict[str, object]]]:
    """Requests with the canary: in prompts, names and fields, in answered requests and in refused ones."""
    messages = [{"role": "user", "content": canary}]
    return [
        ("/v1/completions", {"prompt": canary, "max_tokens": 40, "logprobs": 2, "user": canary, "cache_salt": canary}),
        ("/v1/completions", {"prompt": [canary, canary], "max_tokens": 9, "prompt_logprobs": 1, "stop": [canary]}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 40}),
        ("/v1/chat/completions", {"messages": messages, "temperature": canary}),
        ("/v1/chat/completions", {"messages": messages, "model": canary}),
        ("/v1/chat/completions", {"messages": [{"role": canary}], canary: canary}),
        ("/tokenize", {"prompt": canary}),
        ("/v1/completions", {"prompt": canary * 5000}),
    ]


def test_canaries(log: pytest.LogCaptureFixture) -> None:
    """A tenant's text is in no answer to another, and in no log, metric, list or record."""
    log.set_level(logging.DEBUG, "quire")
    canaries = [f"canary{index:02}bird" for index in range(NUM_TENANTS)]
    heard: dict[str, list[str]] = {canary: [] for canary in canaries}
    with RunningServer(answer=None) as server:

        def live(canary: str) -> None:
            for _ in range(3):
                for path, body in _requests(canary):
                    response = server.http.post(path, json=body)
                    heard[canary].append(response.text + str(response.headers))
                events = server.events("/v1/completions", prompt=canary, max_tokens=40)
                heard[canary].append("".join(event["choices"][0]["text"] for event in events))

        threads = [threading.Thread(target=live, args=(canary,)) for canary in canaries]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        public = "".join(
            server.http.get(path).text
            for path in ("/metrics", "/v1/models", "/v1/config", "/health", "/load", "/openapi.json", "/docs", "/")
        )
        shown = json.dumps([server.http.get(f"/v1/requests/{name}/timeline").text for name in _ids(heard)])
    for canary, answers in heard.items():
        assert canary in answers[0], "the echo does not echo: this test would see nothing"
        assert len(answers) == 27
        assert not [other for other in canaries if other != canary and other in "".join(answers)]
        assert canary not in log.text + public + shown


def _ids(heard: dict[str, list[str]]) -> list[str]:
    return [json.loads(answers[0].rpartition("Headers(")[0])["id"] for answers in heard.values()]


@pytest.mark.parametrize("exception", [False, True])
def test_log_lines_cannot_be_forged(exception: bool) -> None:
    """Control characters are spelled out, and a forged line of the log does not begin like one."""
    error = (RuntimeError, RuntimeError(FORGED), None) if exception else None
    record = logging.LogRecord("quire.x", logging.ERROR, "", 0, "request %s failed", (FORGED,), error)
    text = TextFormatter().format(record)
    first, *rest = text.split("\n")
    assert first.startswith("ERROR ")
    assert rest
    assert all(line.startswith("    ") for line in rest), text
    assert text.replace("\n", "").isprintable(), repr(text)
    (line,) = logs.JsonFormatter().format(record).splitlines()
    assert line.isascii()
    assert FORGED in json.loads(line)["message"]


def test_ordinary_lines_stay_as_they_are() -> None:
    record = logging.LogRecord("quire.x", logging.INFO, "", 0, "%s ready: naïve 😀", ("r-1",), None)
    assert TextFormatter().format(record).endswith("[quire.x] r-1 ready: naïve 😀")


def test_names_of_requests_are_harmless(server: RunningServer, log: pytest.LogCaptureFixture) -> None:
    """The one text of a client that the log is meant to name."""
    for name in ("a b", "x" * 129, "a\x1b[2J", "é", "a%0d%0ax: y", "<script>"):
        response = server.http.get("/v1/models", headers={"x-request-id": name.encode()})
        assert response.headers["x-request-id"] != name
        assert response.headers["x-request-id"].isalnum()
        assert name not in log.text


@pytest.mark.parametrize(
    "text",
    [
        "<object at 0x7f00aabbccdd>",
        "Traceback (most recent call last)",
        'File "x.py"',
        "/home/x/a.json",
        "/usr/lib/python3.11/json.py",
        "/tmp/x",
        "/root/.cache",
    ],
)
def test_the_search_for_internals_finds_them(text: str) -> None:
    """`check_no_leak` looks at every answer of every test with it."""
    assert LEAK.search(f"{{'message': '{text}'}}")


def test_no_check_is_an_assert() -> None:
    """Keys, hosts and limits hold without asserts, which `python -O` leaves out."""
    files = ("test_auth.py", "test_errors.py", "test_fields.py", "test_root_path.py")
    # Alone: a process beside others loads the kernels, and with them torch, to set their threads.
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    words = "wrong_keys or every_route or allowed_hosts or every_spelling or body or deep or content_type or malformed"
    result = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "tests.without_asserts",
                "-k",
                words,
            ),
            *(f"tests/server/{name}" for name in files),
        ],
        cwd=ROOT,
        env=alone,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    left_out = re.search(r"^(\d+) modules of quire without asserts", result.stdout, re.MULTILINE)
    assert left_out is not None
    assert int(left_out[1]) > 100
    assert "skipped" not in result.stdout
