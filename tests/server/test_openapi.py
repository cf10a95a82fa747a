"""/openapi.json is exact: its routes are the app's, its schemas fit the answers; /docs shows it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from starlette.routing import Route

from quire.frontend.echo_client import EchoClient
from quire.frontend.live_limits import live_limits
from quire.messages import EngineProgress
from quire.server.openapi import build
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.request_schemas import SchemaBounds
from quire.server.state import AppSettings
from tests.server.serving import LIMITS, RunningServer
from tests.server.test_errors import MESSAGES

DOCUMENT = build(SchemaBounds(LIMITS), AppSettings(("m",)))
TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None), "array": list, "object": dict}


def mismatch(value, schema, place="$"):
    """Why a value does not fit a schema, or None. A property that the schema does not name does not fit."""
    if "$ref" in schema:
        return mismatch(value, DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]], place)
    if "anyOf" in schema:
        reasons = [mismatch(value, kind, place) for kind in schema["anyOf"]]
        return None if None in reasons else f"{place}: none of {reasons}"
    if "enum" in schema:
        return None if value in schema["enum"] else f"{place}: {value!r} not in {schema['enum']}"
    kind = schema.get("type")
    if kind == "number":
        return None if type(value) in (int, float) else f"{place}: {value!r} is no number"
    if kind is not None and type(value) is not TYPES[kind]:
        return f"{place}: {value!r} is no {kind}"
    if kind == "array":
        inner = [mismatch(item, schema.get("items", {}), f"{place}[]") for item in value]
        return next(filter(None, inner), None)
    if kind == "object" and ("properties" in schema or "additionalProperties" in schema):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        if missing := set(schema.get("required", ())) - value.keys():
            return f"{place}: {missing} missing"
        for name, item in value.items():
            if name not in properties and not isinstance(others, dict):
                return f"{place}: {name} is not described"
            if reason := mismatch(item, properties.get(name, others), f"{place}.{name}"):
                return reason
    return None


def answer_schema(method, path, status=200, media_type="application/json"):
    return DOCUMENT["paths"][path][method]["responses"][str(status)]["content"][media_type]


def test_routes_are_those_of_the_app(server):
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    routes = {
        (method, route.path.replace(":path", ""))
        for route in server.app.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert described == routes


def test_the_document_is_served_and_refers_to_what_is_there(server):
    bounds, settings = SchemaBounds(LIMITS), AppSettings(("m",))
    assert server.http.get("/openapi.json").json() == build(bounds, settings, live_limits(server.engine.ready))
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert references == set(DOCUMENT["components"]["schemas"])


ANSWERS = [
    ("post", "/v1/chat/completions", {"messages": MESSAGES}),
    (
        "post",
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "return_token_ids": True,
            "return_metrics": True,
            "prompt_logprobs": 1,
            "stop": ["42"],
        },
    ),
    ("post", "/v1/completions", {"prompt": "Hi"}),
    (
        "post",
        "/v1/completions",
        {
            "prompt": ["Hi", "a"],
            "echo": True,
            "logprobs": 2,
            "return_token_ids": True,
            "return_metrics": True,
            "prompt_logprobs": 0,
        },
    ),
    ("post", "/v1/chat/completions/render", {"messages": MESSAGES}),
    ("post", "/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "max_tokens": 2}),
    ("post", "/v1/messages", {"messages": MESSAGES, "max_tokens": 2}),
    ("post", "/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("post", "/v1/responses", {"input": "Hi", "top_logprobs": 1, "instructions": "Be short", "metadata": {"a": "b"}}),
    ("post", "/v1/responses", {"input": "Hi", "background": True, "max_output_tokens": 2}),
    ("post", "/v1/responses/input_tokens", {"input": "Hi", "instructions": "Be short"}),
    ("post", "/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("post", "/tokenize", {"messages": MESSAGES}),
    ("post", "/detokenize", {"tokens": [5, 6]}),
    ("post", "/ping", {}),
    *(("get", path, None) for path in ("/v1/models", "/health", "/ping", "/livez", "/readyz", "/load", "/version")),
]


@pytest.mark.parametrize(("method", "path", "body"), ANSWERS)
def test_answers_fit(server, method, path, body):
    response = server.http.request(method.upper(), path, json=body)
    assert response.status_code == 200, response.text
    assert mismatch(response.json(), answer_schema(method, path)["schema"]) is None


@pytest.mark.parametrize(("method", "path", "body"), ANSWERS[:4])
def test_events_fit(server, method, path, body):
    schema = answer_schema(method, path, media_type="text/event-stream")["x-event-schema"]
    events = server.events(path, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert len(events) > 2
    for event in events:
        assert mismatch(event, schema) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}), ("/v1/responses", {"input": "Hi", "top_logprobs": 2})],
)
def test_named_events_fit(server, path, body):
    schema = answer_schema("post", path, media_type="text/event-stream")["x-event-schema"]
    for _, event in server.named_events(path, **body):
        assert mismatch(event, schema) is None


def test_other_answers_fit(server):
    name = server.http.get("/v1/models").json()["data"][0]["id"]
    assert (
        mismatch(server.http.get(f"/v1/models/{name}").json(), answer_schema("get", "/v1/models/{model}")["schema"])
        is None
    )
    answer = server.complete(max_tokens=2).json()
    path = "/v1/requests/{request_id}/timeline"
    found = server.http.get(path.format(request_id=answer["id"])).json()
    assert mismatch(found, answer_schema("get", path)["schema"]) is None
    schema = answer_schema("get", "/v1/steps", media_type="application/x-ndjson")["x-line-schema"]
    steps = server.http.get("/v1/steps").text.splitlines()
    assert steps
    for line in steps:
        assert mismatch(json.loads(line), schema) is None
    for path, response in (
        ("/v1/chat/completions", server.chat(temperature=9)),
        ("/v1/completions", server.complete(model="x")),
        ("/v1/messages", server.http.post("/v1/messages", json={})),
    ):
        schema = answer_schema("post", path, response.status_code)["schema"]
        assert mismatch(response.json(), schema) is None


def test_starting_fits():
    with RunningServer(EchoClient(None, is_ready=False), waits_for_engine=False) as server:
        schema = answer_schema("get", "/readyz", 503)["schema"]
        assert mismatch(server.http.get("/readyz").json(), schema) is None
        server.run(lambda: server.client.push(EngineProgress("load", 0.5)))
        server.wait_for(lambda: server.engine.progress is not None, "the progress")
        assert mismatch(server.http.get("/readyz").json(), schema) is None


def test_a_mismatch_is_found():
    schema = answer_schema("get", "/version")["schema"]
    assert mismatch({"version": "1"}, schema) is None
    for wrong in ({}, {"version": 1}, {"version": "1", "more": 2}, []):
        assert mismatch(wrong, schema) is not None


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_requests_are_described_field_by_field(request_type):
    schema = DOCUMENT["components"]["schemas"][request_type.__name__]
    assert set(schema["properties"]) >= set(request_type.__struct_fields__)
    assert schema["additionalProperties"] is False


class Page(HTMLParser):
    VOID = ("meta", "br", "link", "img")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.tags, self.text = [], [], [], set(), ""

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.add(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_docs_page(server):
    response = server.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page()
    page.feed(response.text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert not page.tags & {"script", "link", "img", "iframe"}, "the page works without a network"
    for link in page.links:
        assert link in (".", "openapi.json") or link.removeprefix("#") in page.ids, link
    for path, methods in DOCUMENT["paths"].items():
        assert path in page.text
        for operation in methods.values():
            assert operation["summary"] in page.text
    for name in ("truncate_prompt_tokens", "return_metrics", "chat_template_kwargs"):
        assert name in page.text
