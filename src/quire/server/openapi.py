"""GET /openapi.json and GET /docs: every route described once, with schemas from the structs of the bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType, UnionType
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.frontend.live_limits import LiveLimit, live_limits
from quire.frontend.replica import MAX_RECORDS
from quire.server.auth import PUBLIC_PATHS
from quire.server.chat import bounds_reasoning
from quire.server.docs_page import render
from quire.server.errors import is_anthropic
from quire.server.health import Starting
from quire.server.protocol.adapters import LoadRequest, UnloadRequest
from quire.server.protocol.chat import BatchChatRequest, ChatChunk, ChatRequest, ChatResponse, RenderedChat
from quire.server.protocol.common import ErrorBody, ModelCard, ModelList
from quire.server.protocol.completions import CompletionChunk, CompletionRequest, CompletionResponse
from quire.server.protocol.messages import (
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from quire.server.protocol.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
)
from quire.server.protocol.steps import StepLine
from quire.server.protocol.timeline import TimelineResponse
from quire.server.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from quire.server.request_schemas import SchemaBounds, config_body, refine
from quire.server.response_store import MAX_SEQUENCE_NUMBER
from quire.server.state import AppSettings, ServerState
from quire.server.steps import DEFAULT_LIMIT, JSON_LINES

# The pages are text alone: nothing is loaded, and no script runs.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
REF = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Operation:
    """One method of one route.

    Args:
        request: struct of the body, whose schema `request_schemas` completes; several: one of them.
        response: struct of the answer, or several, or a media type, or a plain JSON schema.
        events: the struct of an event of a streamed answer, or several structs, or a union of the events that have
            names.
        errors: statuses besides 401, 403 and 500, which every guarded route has.
        lines: struct of a line of an answer in JSON lines.
        query: schemas of the parameters behind the path, by name; none must be given.
    """

    summary: str
    request: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None = None
    response: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | str | dict[str, Any] | None = None
    events: Any = None
    errors: tuple[int, ...] = ()
    lines: type[msgspec.Struct] | None = None
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def _object(**properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(properties),
        "properties": {name: {"type": kind} for name, kind in properties.items()},
    }


_STATUS = _object(status="string")
_BODY = (400, 408, 413, 415)
_SERVER_INFO = {
    "type": "object",
    "required": ["vllm_config"],
    "properties": {"vllm_config": {"anyOf": [{"type": "string"}, {"type": "object"}]}},
}
_CONFIG = {"type": "object", "description": "version, model, settings by name, and live: the limits that can move"}
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "A chat, streamed or not", ChatRequest, ChatResponse, ChatChunk, (*_BODY, 404, 429, 501, 503)
    ),
    ("POST", "/v1/chat/completions/render"): Operation(
        "The prompt of a chat, as text and as tokens", ChatRequest, RenderedChat, errors=(*_BODY, 404, 501, 503)
    ),
    ("POST", "/v1/completions"): Operation(
        "Continuations of one or several prompts, streamed or not",
        CompletionRequest,
        CompletionResponse,
        CompletionChunk,
        (*_BODY, 404, 429, 501, 503),
    ),
    ("POST", "/v1/chat/completions/batch"): Operation(
        "Several chats in one body", BatchChatRequest, ChatResponse, errors=(*_BODY, 404, 429, 501, 503)
    ),
    ("POST", "/invocations"): Operation(
        "A chat or continuations, streamed or not",
        (ChatRequest, CompletionRequest),
        (ChatResponse, CompletionResponse),
        (ChatChunk, CompletionChunk),
        (*_BODY, 404, 429, 501, 503),
    ),
    ("POST", "/v1/messages"): Operation(
        "A chat as of Anthropic, streamed or not", MessagesRequest, Message, MessageEvent, (*_BODY, 404, 429, 501, 503)
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "How many tokens a prompt has", CountTokensRequest, TokenCount, errors=(*_BODY, 404, 503)
    ),
    ("POST", "/v1/responses"): Operation(
        "An answer that may be stored and made in the background, streamed or not",
        ResponsesRequest,
        ResponseObject,
        ResponseEvent,
        (*_BODY, 404, 429, 501, 503),
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        "How many tokens a prompt has", InputTokensRequest, InputTokens, errors=(*_BODY, 404, 503)
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        "A stored response, or the events of one in the background",
        None,
        ResponseObject,
        ResponseEvent,
        (400, 404),
        query={
            "stream": {"type": "boolean", "default": False},
            "starting_after": {"type": "integer", "minimum": 0, "maximum": MAX_SEQUENCE_NUMBER},
        },
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        "Forget a stored response; one in the background ends", None, DeletedResponse, errors=(404,)
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        "End a response in the background", None, ResponseObject, errors=(400, 404)
    ),
    ("GET", "/v1/models"): Operation("The served names", None, ModelList),
    ("GET", "/v1/models/{model}"): Operation("One served name", None, ModelCard, errors=(404,)),
    ("GET", "/v1/requests/{request_id}/timeline"): Operation(
        "When what happened to a recent request", None, TimelineResponse, errors=(404,)
    ),
    ("GET", "/v1/config"): Operation("Every setting with its source", None, _CONFIG, errors=(503,)),
    ("POST", "/v1/config"): Operation("Move limits while serving", None, _CONFIG, errors=(*_BODY, 503)),
    ("GET", "/v1/steps"): Operation(
        "The last steps of each engine, predicted beside measured, the newest one last",
        lines=StepLine,
        query={"limit": {"type": "integer", "minimum": 1, "maximum": MAX_RECORDS, "default": DEFAULT_LIMIT}},
        errors=(400,),
    ),
    ("POST", "/tokenize"): Operation(
        "Token ids of a prompt or a chat", TokenizeRequest, TokenizeResponse, errors=(*_BODY, 404)
    ),
    ("POST", "/detokenize"): Operation(
        "Text of token ids", DetokenizeRequest, DetokenizeResponse, errors=(*_BODY, 404)
    ),
    ("GET", "/tokenizer_info"): Operation(
        "The tokenizer's configuration and the chat template",
        None,
        {"type": "object", "required": ["tokenizer_class"], "properties": {"tokenizer_class": {"type": "string"}}},
    ),
    ("POST", "/v1/load_lora_adapter"): Operation(
        "Read an adapter and serve it under a name", LoadRequest, "text/plain", errors=(*_BODY, 404, 503)
    ),
    ("POST", "/v1/unload_lora_adapter"): Operation(
        "Serve an adapter no longer", UnloadRequest, "text/plain", errors=(*_BODY, 404, 503)
    ),
    ("GET", "/server_info"): Operation(
        "Every setting by its name",
        None,
        _SERVER_INFO,
        query={"config_format": {"enum": ["text", "json"], "default": "text"}},
        errors=(400, 503),
    ),
    ("POST", "/reset_prefix_cache"): Operation("Forget cached prompts", None, _STATUS, errors=(503,)),
    ("GET", "/health"): Operation("200 while steps end in time", None, _STATUS, errors=(503,)),
    ("GET", "/ping"): Operation("As /health", None, _STATUS, errors=(503,)),
    ("POST", "/ping"): Operation("As /health", None, _STATUS, errors=(503,)),
    ("GET", "/livez"): Operation("200 as long as the process answers", None, _STATUS),
    ("GET", "/readyz"): Operation("200 once a real token has been produced; 503 with the phase before", None, _STATUS),
    ("GET", "/load"): Operation("Requests waiting or running", None, _object(server_load="integer")),
    ("GET", "/metrics"): Operation("Prometheus' text format", None, "text/plain", errors=(404,)),
    ("GET", "/version"): Operation("The version of Quire", None, _object(version="string")),
    ("GET", "/"): Operation("A page to chat with the model", None, "text/html"),
    ("GET", "/docs"): Operation("This description as a page", None, "text/html"),
    ("GET", "/openapi.json"): Operation("This description", None, {"type": "object"}),
}
DEVELOPMENT_PATHS = ("/server_info", "/reset_prefix_cache")
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # if the operator allows them
ALIASES = {"/chat/completions": "/v1/chat/completions", "/completions": "/v1/completions"}
OPERATIONS |= {("POST", alias): OPERATIONS["POST", path] for alias, path in ALIASES.items()}


def build(
    bounds: SchemaBounds, settings: AppSettings, limits: Mapping[str, LiveLimit] = MappingProxyType({})
) -> dict[str, Any]:
    """The OpenAPI 3.1 document. Every route of the app is in OPERATIONS; a test compares them.

    Args:
        limits: the limits that may move while the server runs; none before the engine is ready.
    """
    absent = (
        *(() if settings.server.enable_tokenizer_info_endpoint else ("/tokenizer_info",)),
        *(() if settings.changes_adapters else ADAPTER_PATHS),
        *(() if settings.is_development else DEVELOPMENT_PATHS),
    )
    keyless = PUBLIC_PATHS | ({"/metrics"} if settings.server.prometheus_public else set())
    operations = {key: operation for key, operation in OPERATIONS.items() if key[1] not in absent}
    structs: list[Any] = [ErrorBody, MessagesError, Starting]
    for operation in operations.values():
        for kinds in (operation.request, operation.response, operation.events, operation.lines):
            for kind in kinds if isinstance(kinds, tuple) else (kinds,):
                if kind is not None and not isinstance(kind, (str, dict)) and kind not in structs:
                    structs.append(kind)
    schemas, components = msgspec.json.schema_components(structs, ref_template=REF)
    by_struct = dict(zip(structs, schemas, strict=True))
    refine(components, bounds)

    def schema_of(kind: Any) -> dict[str, Any]:
        return {"anyOf": [by_struct[each] for each in kind]} if isinstance(kind, tuple) else by_struct[kind]

    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        described = _operation(path, operation, schema_of, is_public=path in keyless)
        if (method, path) == ("POST", "/v1/config"):
            described["requestBody"] = _body(config_body(limits))
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": __version__,
            "description": "OpenAI's HTTP API with vLLM's extra fields, and Anthropic's. Errors: docs/errors.md.",
        },
        **({"servers": [{"url": settings.server.root_path}]} if settings.server.root_path else {}),
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _operation(
    path: str, operation: Operation, schema_of: Callable[[Any], dict[str, Any]], *, is_public: bool
) -> dict[str, Any]:
    errors = set(operation.errors) | {500} | (set() if is_public else {401, 403})
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": {}}}
    content = responses["200"]["content"]
    if isinstance(operation.response, str):
        content[operation.response] = {"schema": {"type": "string"}}
    elif isinstance(operation.response, dict):
        content["application/json"] = {"schema": operation.response}
    elif operation.response is not None:
        content["application/json"] = {"schema": schema_of(operation.response)}
    if operation.events is not None:
        has_names = isinstance(operation.events, UnionType)
        lines = (
            "Pairs of lines `event: ...`, `data: ...`" if has_names else "Lines `data: ...`, the last `data: [DONE]`"
        )
        content["text/event-stream"] = {
            "schema": {"description": lines},
            "x-event-schema": schema_of(operation.events),
        }
    if operation.lines is not None:
        content[JSON_LINES] = {
            "schema": {"type": "string", "description": "A JSON object a line"},
            "x-line-schema": schema_of(operation.lines),
        }
    for status in sorted(errors):
        responses[str(status)] = {
            "description": "An error",
            "content": {"application/json": {"schema": schema_of(MessagesError if is_anthropic(path) else ErrorBody)}},
        }
    if path == "/readyz":
        either = [schema_of(Starting), schema_of(ErrorBody)]
        responses["503"] = {
            "description": "Why not yet, or not any more",
            "content": {"application/json": {"schema": {"anyOf": either}}},
        }
    result: dict[str, Any] = {
        "summary": operation.summary,
        "security": [] if is_public else [{}, {"key": []}, {"header": []}],
        "responses": responses,
    }
    if operation.request is not None:
        result["requestBody"] = _body(schema_of(operation.request))
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        result["parameters"] = parameters
    return result


def routes(state: ServerState) -> list[Route]:
    """The two routes. Both answers are made once, and again when an engine has other limits or a limit has moved."""
    settings = state.settings
    has_start_token = state.tokenizer is not None and bool(state.tokenizer.encode("", add_special_tokens=True))
    limits = state.engine.input_processor.limits
    calls_tools = settings.server.enable_auto_tool_choice and settings.server.tool_call_parser is not None
    bounds = SchemaBounds(
        limits,
        settings.limits,
        has_start_token=has_start_token,
        has_infill=state.infill_format is not None,
        calls_tools=calls_tools,
        bounds_reasoning=bounds_reasoning(state),
    )

    @lru_cache(maxsize=1)
    def pages(live: tuple[tuple[str, LiveLimit], ...]) -> tuple[bytes, bytes]:
        document = build(bounds, settings, dict(live))
        return msgspec.json.encode(document), render(document).encode()

    def present_pages() -> tuple[bytes, bytes]:
        ready = state.engine.ready
        return pages(() if ready is None else tuple(live_limits(ready).items()))

    async def openapi(request: Request) -> Response:
        description, _ = present_pages()
        return Response(description, media_type="application/json")

    async def docs(request: Request) -> Response:
        _, page = present_pages()
        return Response(page, headers=PAGE_HEADERS, media_type="text/html; charset=utf-8")

    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]
