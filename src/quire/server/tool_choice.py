"""What a request asks of its tools: how calls are parsed, and what form the answer must have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.formats.answer_formats import HARMONY_REASONING
from quire.sampling_params import StructuredOutputsParams
from quire.server.protocol.chat import ChatRequest
from quire.server.text.parser import CALL_LIST, AnswerParser
from quire.server.text.strict_calls import STRICT_FORMATS
from quire.settings import ServerSettings

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """The tools of one request.

    Args:
        parser: the format of the calls; None: nothing is a call.
        named: the tool that the answer is the arguments of.
        constraint: the form that the answer must have.
        most_calls: None: any number.
    """

    parser: str | None = None
    named: str | None = None
    constraint: StructuredOutputsParams | None = None
    most_calls: int | None = None

    @classmethod
    def of(cls, body: ChatRequest, settings: ServerSettings, ignored: list[str]) -> ToolChoice:
        """Read `tools` and `tool_choice`. Adds a field without effect to `ignored`. Raises InvalidRequestErrors."""
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise UnsupportedFieldError(
                    "tool_choice names a tool, but there are no tools", fix="Remove tool_choice", param="tool_choice"
                )
            ignored += ["tool_choice"] if choice is not None else []
            return cls()
        if choice == "none":
            return cls()
        schemas = _schemas(body.tools)
        most_calls = 1 if body.parallel_tool_calls is False else None
        if choice in (None, "auto"):
            _check_automatic(settings)
            constraint = None if body.constraint() is not None else _strict(body.tools, schemas, settings)
            return cls(settings.tool_call_parser, constraint=constraint, most_calls=most_calls)
        if choice == "required":
            constraint = StructuredOutputsParams(json=_call_list(schemas, most_calls))
            return cls(CALL_LIST, constraint=constraint, most_calls=most_calls)
        name = _named(choice, schemas)
        return cls(named=name, constraint=StructuredOutputsParams(json=schemas[name]))

    def new_parser(self, body: ChatRequest, settings: ServerSettings, prompt: str) -> Callable[[], AnswerParser] | None:
        """What makes the parser of a continuation; None: its text is content, as it is.

        In harmony, reasoning is a message. A text that follows a grammar has no messages.
        """
        reasoning = settings.reasoning_parser
        if reasoning == HARMONY_REASONING and body.structured_outputs is not None:
            reasoning = None
        if reasoning is None and self.parser is None and self.named is None:
            return None
        return lambda: AnswerParser(
            reasoning,
            self.parser,
            named=self.named,
            prompt=prompt,
            schemas=body.tools or (),
            most_calls=self.most_calls,
        )


def _check_automatic(settings: ServerSettings) -> None:
    if not settings.enable_auto_tool_choice:
        raise UnsupportedFieldError(
            "This server lets the model call tools only where tool_choice asks for it",
            fix='Set tool_choice to "required" or to a tool, or start the server with --enable-auto-tool-choice',
            param="tools",
        )
    if settings.tool_call_parser is None:
        raise UnsupportedFieldError(
            "This server does not know how its model writes tool calls",
            fix='Set tool_choice to "none", "required" or a tool, or start the server with --tool-call-parser',
            param="tools",
        )


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name -> schema of the arguments, which are an object. Raises InvalidRequestError."""
    schemas = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if (
            tool.get("type", "function") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not (parameters is None or isinstance(parameters, dict))
        ):
            raise InvalidRequestError(
                f"tools[{index}] is not a function",
                expected='{"type": "function", "function": {"name": ..., "parameters": {...}}}',
                param="tools",
            )
        schemas[function["name"]] = {"type": "object", **parameters} if parameters else _NO_PARAMETERS
    return schemas


def _strict(
    tools: Sequence[Mapping[str, Any]], schemas: Mapping[str, Any], settings: ServerSettings
) -> StructuredOutputsParams | None:
    """A text in which calls of strict tools follow their schemas, and others are JSON; None: nothing is strict.

    Only in the formats that say where a call begins and how it goes on.
    """
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    form = STRICT_FORMATS.get(settings.tool_call_parser or "")
    if not strict or form is None:
        return None
    tag = form.tag({name: schema if name in strict else {"type": "object"} for name, schema in schemas.items()})
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


def _named(choice: str | Mapping[str, Any] | None, schemas: Mapping[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            "tool_choice is not understood",
            expected='none, auto, required, or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if name not in schemas:
        raise InvalidRequestError(
            "tool_choice names a tool that is not among the tools",
            value=name,
            expected="one of " + ", ".join(schemas),
            param="tool_choice",
        )
    return name


def _call_list(schemas: Mapping[str, dict[str, Any]], most_calls: int | None) -> dict[str, Any]:
    """The schema of a list of calls: vLLM's form, {"name": ..., "parameters": {...}}."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    most = {} if most_calls is None else {"maxItems": most_calls}
    moved = {str(index): _moved(schema, f"#/$defs/{index}") for index, schema in enumerate(schemas.values())}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": moved}


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself, when it is found under `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, root)
        for key, value in schema.items()
    }
