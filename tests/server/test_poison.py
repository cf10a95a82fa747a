"""Any value in any field of any route: an answer or a 4xx, never a 5xx; four streams beside it do not change by a byte.

Fields come from the definitions the server decodes with: a new field is tried, a new route without a row here fails.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from starlette.routing import Route

from quire.frontend.echo_client import EchoClient
from quire.messages import SetLimits
from quire.server.openapi import ALIASES
from quire.server.protocol.chat import BatchChatRequest, ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.responses import InputTokensRequest, ResponsesRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.covering import all_pairs
from tests.examples import IS_FULL
from tests.server.serving import RunningServer
from tests.server.test_config_api import demo_ready
from tests.server.test_errors import MESSAGES, error_of

# Every kind of wrong value, as JSON text: some of them cannot be made by a JSON library.
POISON = [
    *("null", "true", "-1", "0", "1", "1.5", "1e400", "-1e400", "1e-400", "NaN", "Infinity"),
    *(str(-(2**63)), str(2**31), str(2**63 - 1), str(2**63), str(2**64), str(10**400)),
    *('""', '"1"', '"\\u0000"', '"\\ud800"', '"' + "x" * 5000 + '"'),
    *("[]", "[[]]", "[null]", "[-1]", "[1e300]", '["", 1]', "[" + "1," * 3000 + "1]"),
    *("{}", '{"1": 1}', '{"-1": 1}', '{"a": "b"}', '{"1": 1e300}', '{"type": "x"}'),
    *('[{"role": 1}]', '[{"role": "user", "content": [5]}]', "[" * 70 + "]" * 70, "[" * 5000 + "]" * 5000),
]

# Path -> definition of its body, and good bodies in which one field after the other is replaced.
BODIES: dict[str, tuple[type, list[dict[str, Any]]]] = {
    "/v1/chat/completions": (ChatRequest, [{"messages": MESSAGES, "max_tokens": 1}]),
    "/v1/chat/completions/render": (ChatRequest, [{"messages": MESSAGES}]),
    "/v1/completions": (CompletionRequest, [{"prompt": "Hi", "max_tokens": 1}]),
    "/v1/chat/completions/batch": (BatchChatRequest, [{"messages": [MESSAGES, MESSAGES], "max_tokens": 1}]),
    "/invocations": (CompletionRequest, [{"prompt": "Hi", "max_tokens": 1}]),
    "/v1/messages": (MessagesRequest, [{"messages": MESSAGES, "max_tokens": 1}]),
    "/v1/messages/count_tokens": (CountTokensRequest, [{"messages": MESSAGES}]),
    "/v1/responses": (ResponsesRequest, [{"input": "Hi", "max_output_tokens": 1}]),
    "/v1/responses/input_tokens": (InputTokensRequest, [{"input": "Hi"}]),
    "/tokenize": (TokenizeRequest, [{"prompt": "Hi"}, {"messages": MESSAGES}]),
    "/detokenize": (DetokenizeRequest, [{"tokens": [1]}]),
    "/v1/config": (SetLimits, [{}]),
}
# In `make test` a field meets every n-th value: which ones depends on its name. Chat and completions share most fields,
# so every value meets a shared field in one of the two. The other routes have the fields of these two.
EVERY = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions"), 2),
    **dict.fromkeys(("/v1/responses", "/v1/messages", "/tokenize"), 3),
    **dict.fromkeys(("/v1/chat/completions/batch", "/v1/chat/completions/render", "/invocations"), 6),
    **dict.fromkeys(("/v1/responses/input_tokens", "/v1/messages/count_tokens"), 6),
}
PATH_PARAMETERS = {
    "/v1/models/{model:path}": "model:path",
    "/v1/requests/{request_id}/timeline": "request_id",
    "/v1/responses/{response_id}": "response_id",
    "/v1/responses/{response_id}/cancel": "response_id",
}
STATIC = "/playground/app.js"  # one of the page's files, which all have one answer
# Without fields of their own: the fault of a request is in its method, query, headers or body.
BARE = frozenset(
    (
        *("/", "/v1/models", "/ping", "/load", "/health", "/livez", "/readyz", "/metrics", "/version"),
        *("/docs", "/openapi.json", "/v1/steps", "/server_info", "/reset_prefix_cache", STATIC),
    )
)
NAMES = (
    *(
        "x",
        "..",
        "../../etc/passwd",
        "a/../b",
        "%2e%2e%2f",
        "\x00",
        "a\nb",
        "\r\nx: y",
        "😀" * 50,
        "x" * 5000,
        "{}",
        "*",
    ),
    *("-1", "0x7f", "null", "'; --", "<script>", "%s%n", "${jndi:x}", "{0.__class__}", "\\\\host\\share", "C:"),
)


@pytest.fixture
def poisoned() -> Iterator[RunningServer]:
    client = EchoClient(None, is_ready=False, step_seconds=0.02, max_model_len=2048)
    client.push(demo_ready())
    with RunningServer(client, is_development=True) as server:
        yield server


def stream(server: RunningServer, path: str) -> list[Any]:
    """The content of a streamed answer, without ids and times, which always differ."""
    base: dict[str, Any] = {"messages": MESSAGES} if path == "/v1/chat/completions" else {"prompt": "Hi"}
    return [event["choices"] for event in server.events(path, **base, max_tokens=12, ignore_eos=True)]


@contextmanager
def four_streams(server: RunningServer, path: str = "/v1/completions") -> Iterator[None]:
    """Around poison: streams go on all the time, and each is the same as without poison."""
    alone = joined(stream(server, path))
    seen: list[str] = []
    is_over = threading.Event()

    def keep_streaming() -> None:
        while not is_over.is_set():
            seen.append(joined(stream(server, path)))

    threads = [threading.Thread(target=keep_streaming) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(seen) >= 4
    assert set(seen) == {alone}
    assert server.http.get("/health").status_code == 200
    server.wait_for_idle()


def joined(events: list[Any]) -> str:
    """The bytes of the text: a step may be cut into events in another way when the machine is busy."""
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for choices in events for c in choices)


@pytest.mark.parametrize("path", BODIES)
def test_poison_in_bodies(poisoned, path):
    definition, bases = BODIES[path]
    beside = path if path == "/v1/chat/completions" else "/v1/completions"
    with four_streams(poisoned, beside):
        cases = itertools.product(bases, definition.__struct_fields__, range(len(POISON)))
        for base, field, place in cases:
            poison = POISON[place]
            if path == "/v1/config" and poison == "1":
                continue  # a legal limit, whose purpose is to limit others
            if not IS_FULL and (len(field) + place + (path == "/v1/completions")) % EVERY.get(path, 1):
                continue
            others = {name: value for name, value in base.items() if name != field}
            text = json.dumps(others)[:-1] + (", " if others else "") + f'"{field}": {poison}}}'
            check(poisoned.ask("POST", path, text.encode()), (path, field, poison[:40]))
        for poison in POISON:
            check(poisoned.ask("POST", path, poison.encode()), (path, "body", poison[:40]))


def check(response: Any, what: object) -> None:
    """No 5xx, and an error in the shape of all errors."""
    assert response.status_code == 200 or 400 <= response.status_code < 500, (what, response.status_code, response.text)
    if response.status_code != 200:
        error_of(response, response.status_code)


@pytest.mark.parametrize("path", PATH_PARAMETERS)
def test_poison_in_paths(poisoned, path):
    with four_streams(poisoned):
        for name in NAMES:
            poisonous = path.replace("{" + PATH_PARAMETERS[path] + "}", quote(name, safe="/%"))
            for query in ("", "?" + quote(name), "?x=" + "y" * 5000):
                check(
                    poisoned.http.request("POST" if path.endswith("cancel") else "GET", poisonous + query), (path, name)
                )


def test_poison_at_routes_without_fields(poisoned):
    with four_streams(poisoned):
        axes = (sorted(BARE), NAMES, ("GET", "POST", "PUT", "HEAD", "OPTIONS", "TRACE"))
        cover = None if IS_FULL else all_pairs([len(axis) for axis in axes])
        for case in cover or itertools.product(*(range(len(axis)) for axis in axes)):
            path, name, method = (axis[at] for axis, at in zip(axes, case, strict=True))
            query, header = quote(name, safe=""), {"x-request-id": quote(name), "accept": quote(name)}
            response = poisoned.ask(method, f"{path}?{query}", b"[" * 100, **header)
            assert response.status_code < 500, (method, path, name, response.text)


def test_every_route_is_poisoned(poisoned):
    routes = [route for route in poisoned.app.routes if isinstance(route, Route)]
    paths = {route.path for route in routes if route.include_in_schema or route.path == STATIC}
    assert paths == set(BODIES) | set(PATH_PARAMETERS) | BARE | set(ALIASES)
    with_body = {route.path for route in routes if "POST" in (route.methods or ())}
    assert with_body - BARE - set(ALIASES) - set(PATH_PARAMETERS) == set(
        BODIES
    )  # an alias has the endpoint of its route
