"""The tools of a request: the format of its calls, and the form of the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.formats.answer_formats import HARMONY_REASONING, HARMONY_TOOLS
from quire.sampling_params import StructuredOutputsParams
from quire.server.protocol.chat import ChatRequest
from quire.server.text import harmony
from quire.server.text.parser import CALL_LIST, AnswerParser
from quire.server.text.reasoning import REASONING_FORMATS
from quire.server.text.strict_calls import harmony_calls, moved, strict_tag
from quire.server.text.tagged_calls import ParameterTypes, parameter_types
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
        types: the types of the tools' parameters, which the parsers of all continuations share.
    """

    parser: str | None = None
    named: str | None = None
    constraint: StructuredOutputsParams | None = None
    most_calls: int | None = None
    types: ParameterTypes = field(default_factory=dict)

    @classmethod
    async def read(cls, body: ChatRequest, settings: ServerSettings, ignored: list[str]) -> ToolChoice:
        """Like `of`. Tools are read in a thread, because their schemas may take 0.3 s."""
        if not body.tools:
            return cls.of(body, settings, ignored)
        return await asyncio.to_thread(cls.of, body, settings, ignored)

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
            types = parameter_types(body.tools)
            return cls(settings.tool_call_parser, constraint=constraint, most_calls=most_calls, types=types)
        name = None if choice == "required" else _named(choice, schemas)
        if settings.tool_call_parser == HARMONY_TOOLS or settings.reasoning_parser == HARMONY_REASONING:
            asked = schemas if name is None else {name: schemas[name]}
            return cls(HARMONY_TOOLS, name, _tagged(harmony_calls(asked)), most_calls)
        if name is not None:
            return cls(named=name, constraint=StructuredOutputsParams(json=schemas[name]))
        constraint = StructuredOutputsParams(json=_call_list(schemas, most_calls))
        return cls(CALL_LIST, constraint=constraint, most_calls=most_calls)

    def behind_reasoning(
        self, constraint: StructuredOutputsParams, settings: ServerSettings, prompt: str
    ) -> StructuredOutputsParams:
        """The constraint of an answer, after its reasoning. In harmony the constraint of calls includes the
        reasoning.
        """
        if self.parser == HARMONY_TOOLS or settings.reasoning_parser == HARMONY_REASONING:
            return constraint if constraint is self.constraint else harmony.constrained(constraint, prompt)
        reasoning = REASONING_FORMATS.get(settings.reasoning_parser or "")
        return constraint if reasoning is None else reasoning.constrained(constraint, prompt)

    def new_parser(self, settings: ServerSettings, prompt: str) -> Callable[[], AnswerParser] | None:
        """Makes the parser of a continuation; None: its whole text is content."""
        reasoning = settings.reasoning_parser
        if reasoning is None and self.parser is None and self.named is None:
            return None
        return lambda: AnswerParser(
            reasoning,
            self.parser,
            named=self.named,
            prompt=prompt,
            types=self.types,
            most_calls=self.most_calls,
        )


def _check_automatic(settings: ServerSettings) -> None:
    if not settings.enable_auto_tool_choice:
        raise UnsupportedFieldError(
            "This server lets the model call tools only if tool_choice asks for it",
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
    """A text in which calls of strict tools follow their schemas; None: nothing is strict."""
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    if not strict or settings.tool_call_parser is None:
        return None
    asked = {name: schema if name in strict else None for name, schema in schemas.items()}
    return _tagged(strict_tag(settings.tool_call_parser, asked))


def _tagged(tag: Mapping[str, Any]) -> StructuredOutputsParams:
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
    definitions = {str(index): moved(schema, f"#/$defs/{index}") for index, schema in enumerate(schemas.values())}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}
