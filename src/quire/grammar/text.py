"""The text of a grammar from the constraint of a request, and whether it can be used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from quire.errors import InvalidRequestError
from quire.grammar.kept import Kept
from quire.grammar.lark_rules import endless_rule
from quire.grammar.objections import objections, objections_to_schema
from quire.grammar.schema_tree import escaped, listed, subschemas
from quire.grammar.schemas import UnusableError, has_free_keys, usable
from quire.grammar.structural_tag import cut, literal, tag_grammar
from quire.sampling_params import MAX_GRAMMAR_BYTES, StructuredOutputsParams

MAX_DEPTH = 50  # levels of a schema
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")  # characters that JSON can only write with a number
_FOR_PEOPLE = {"$comment", "description", "title"}
_BAD_PATTERN = re.compile(r"regex parse error:\n {4}(.*)\n")
_UNKNOWN_TYPE = re.compile(r"Invalid type: (.*)")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_WHITESPACE = r"\r?\n?[ \t]{0,40}"  # bounded: a model in doubt would write spaces until max_tokens
_TAG_FORM = '{"format": ...} or {"structures": [{"begin", "schema", "end"}], "triggers": [...]}'
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
# Keywords for elements that no other keyword has evaluated; keywords that evaluate all others; and keywords that may
# evaluate some, which cannot be seen here.
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_APPLICATORS = {
    "$dynamicRef", "$ref", "additionalItems", "allOf", "anyOf", "contains", "dependentSchemas", "else", "if", "not",
    "oneOf", "then",
}  # fmt: skip
# Grammars by what was asked for. To make and check the grammar of a schema of 200 keys takes 9 ms.
_grammars: Kept[str] = Kept(16 << 20, lambda asked, grammar: 4 * (len(asked) + len(grammar)))


def grammar_text(asked: StructuredOutputsParams, special_ids: Mapping[str, int] = MappingProxyType({})) -> str:
    """The grammar of llguidance for a constraint, checked as far as that is possible without a vocabulary.

    Raises InvalidRequestError with the keyword that is at fault.

    Args:
        special_ids: the ids of special tokens, which are no text for a grammar.
    """
    key = _key(asked, special_ids)
    if (text := _grammars.get(key)) is None:
        text = _make(asked, special_ids)
        if key:
            _grammars.put(key, text)
    return text


def _key(asked: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    tags = dict(special_ids) if asked.structural_tag is not None or asked.reasoning_end else None
    try:
        return json.dumps([msgspec.structs.astuple(asked), tags])
    except (TypeError, ValueError, RecursionError):  # refused when it is made
        return ""


def _make(asked: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    from llguidance import LLMatcher

    schemas: list[Any] = []
    if asked.json is not None or asked.json_object:
        schema = {"type": "object"} if asked.json is None else _read_schema(asked.json)
        if asked.disable_additional_properties:
            schema = _closed(schema)
        schema = _checked(_evaluated(schema))
        schemas.append(schema)
        try:
            text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_json_options(schema, asked))
        except ValueError as error:  # JSON for Python alone: NaN, half of a surrogate pair, a number of 400 digits
            raise _refusal(asked.kind, str(error)) from None
    elif asked.regex is not None:
        text = LLMatcher.grammar_from_regex(asked.regex)
    elif asked.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in asked.choice)
        text = LLMatcher.grammar_from_lark(_bounded("choice", f"start: CHOICE\nCHOICE: {choices}"))
    elif asked.grammar is not None:
        text = LLMatcher.grammar_from_lark(_lark(asked.grammar))
    else:
        assert asked.structural_tag is not None
        text = _structural_tag(asked.structural_tag, {}, schemas)  # checked without its special tokens
    if why := next(iter(objections(text)), ""):
        if asked.structural_tag is not None:
            why = next(filter(None, map(_reason_of, schemas)), why)
        raise _refusal(asked.kind, why if asked.json is None else _reason(why, schema))
    if asked.grammar is not None and (rule := endless_rule(text)) is not None:
        raise _refusal(asked.kind, f"the rule {rule} has no end, because it has to contain itself")
    if asked.structural_tag is not None:
        text = _structural_tag(asked.structural_tag, special_ids, schemas)
    if asked.reasoning_end:
        return _behind_reasoning(text, asked, special_ids)
    return text


def _behind_reasoning(text: str, asked: StructuredOutputsParams, special_ids: Mapping[str, int]) -> str:
    """The grammar behind a text up to an end.

    With a start, this text may be left out. With a start of the answer, it may also come several times.
    """
    grammars = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    end = asked.reasoning_end or []
    is_special = not cut(end[0], special_ids)[0]
    often = "*" if asked.answer_start else "?"
    rules = [
        f"start: {f'(space begin reasoning space){often}' if asked.reasoning_start else 'reasoning space'} answer",
        "space: /[ \\n]{0,4}/",
        "reasoning: /(?s:.*)/ end" if is_special else "reasoning[suffix=END]: /(?s:.*)/",
        f"{'end' if is_special else 'END'}: {_either(end, special_ids)}",
        f"answer: ({_either(asked.answer_start, special_ids)}) @answer" if asked.answer_start else "answer: @answer",
    ]
    if asked.reasoning_start:
        rules.append(f"begin: {_either(asked.reasoning_start, special_ids)}")
    first = {"lark_grammar": "\n".join(rules)}
    return json.dumps({"grammars": [first, {**grammars[0], "name": "answer"}, *grammars[1:]]})


def _either(texts: Sequence[str], special_ids: Mapping[str, int]) -> str:
    return " | ".join(literal(text, special_ids) for text in texts)


def _reason_of(schema: Any) -> str:
    """llguidance's objection to a schema alone; empty: none."""
    return next((_reason(why, schema) for why in objections_to_schema(schema)), "")


def _reason(message: str, schema: Any) -> str:
    """llguidance's message about a schema, with the places that it means."""
    if found := _UNKNOWN_KEYS.fullmatch(message):
        names = json.loads(found[1])
        paths = [path for name in names for path in _paths(schema, name)] or names  # a $ref leads out of the schema
        return f"these keywords are not supported: {', '.join(paths)}"
    if found := _UNKNOWN_FORMAT.fullmatch(message):
        return f"this format is not supported: {', '.join(_paths(schema, 'format', found[1]))} = {found[1]}"
    if found := _UNKNOWN_TYPE.fullmatch(message):
        in_lists = (f"{at}/type" for at, each in subschemas(schema) if found[1] in listed(each.get("type")))
        return f"this type is not known: {', '.join([*_paths(schema, 'type', found[1]), *in_lists])} = {found[1]}"
    if found := _BAD_PATTERN.match(message):
        places = [path for pattern in _as_given(found[1]) for path in _places(schema, pattern)]
        return f"this pattern is not supported: {', '.join(places) or found[1]}: {message}"
    if message.startswith("min/maxProperties only supported"):
        where = ", ".join([*_paths(schema, "minProperties"), *_paths(schema, "maxProperties")])
        return f"this needs every key in properties to be required: {where}"
    if message.startswith(("circular references with sibling keys", "Schema intersection stack level")):
        where = ", ".join(path for name in ("allOf", "anyOf", "oneOf", "$ref") for path in _paths(schema, name))
        return f"schemas that refer to themselves cannot be combined with other schemas for one value: {where}"
    if message.startswith("patternProperty regexes"):
        where = ", ".join(_paths(schema, "patternProperties"))
        return f"two patterns of patternProperties may match the same key: {where}: {message}"
    if message.startswith("oneOf constraints are not supported"):
        where = ", ".join(_paths(schema, "oneOf"))
        return f"oneOf is not supported if its alternatives overlap: {where}. anyOf allows what any of them allows"
    return message


def _paths(schema: Any, name: str, content: Any = None) -> Iterator[str]:
    """JSON pointers of the keywords with this name, and this content unless that is None."""
    for at, each in subschemas(schema):
        if name in each and content in (None, each[name]):
            yield f"{at}/{name}"


def _as_given(pattern: str) -> list[str]:
    """What a pattern may be in a schema: llguidance writes slashes with an escape."""
    return list(dict.fromkeys([pattern, pattern.replace(r"\/", "/")]))


def _places(schema: Any, pattern: str) -> Iterator[str]:
    """JSON pointers of a pattern, which may be a key of patternProperties."""
    yield from _paths(schema, "pattern", pattern)
    for at, each in subschemas(schema):
        if pattern in (keys if isinstance(keys := each.get("patternProperties"), dict) else ()):
            yield f"{at}/patternProperties/{escaped(pattern)}"


def _refusal(kind: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs.{kind} cannot be used: {' '.join(why.split())[:500]}",
        expected="a constraint that some text satisfies, in the supported keywords (docs/structured_output.md)",
        param="structured_outputs",
    )


def _bounded(kind: str, text: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
        raise _refusal(kind, f"it has more than {MAX_GRAMMAR_BYTES:,} bytes")
    return text


def _read_schema(schema: str | dict[str, Any] | bool) -> Any:
    """A schema as JSON values."""
    if isinstance(schema, str):
        try:
            schema = json.loads(_bounded("json", schema))
        except (ValueError, RecursionError) as error:
            raise _refusal("json", f"it is not JSON ({error})") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refusal("json", "schema is false: nothing satisfies it" if schema is False else "a schema is an object")
    if _depth(schema) > MAX_DEPTH:
        raise _refusal("json", f"it has more than {MAX_DEPTH} levels")
    _bounded("json", json.dumps(schema))
    return schema


def _checked(schema: Any) -> Any:
    """The schema in a form that the grammar engine enforces."""
    try:
        return usable(schema)
    except UnusableError as error:
        raise _refusal("json", str(error)) from None


def _depth(value: Any) -> int:
    """Levels of a JSON value; it stops a level behind the limit."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _evaluated(schema: Any) -> Any:
    """The schema with `unevaluated...` as `additionalProperties` and `items`, where nothing else could evaluate any."""
    if not any(name in each for _, each in subschemas(schema) for name in _UNEVALUATED):
        return schema
    plain = json.loads(json.dumps(schema))
    for _, each in subschemas(plain):
        if _APPLICATORS.isdisjoint(each) and not isinstance(each.get("items"), list):
            for name, keyword in _UNEVALUATED.items():
                if name in each:
                    each.setdefault(keyword, each.pop(name))
    return plain


def _closed(schema: Any) -> Any:
    """The schema, with additionalProperties false for every object that leaves it open."""
    closed = json.loads(json.dumps(schema))  # a value that is used in two places becomes two values
    for _, each in subschemas(closed):
        if "properties" in each or each.get("type") == "object":
            each.setdefault("additionalProperties", False)
    return closed


def _needs_control(value: Any) -> bool:
    """Whether a text of the schema that is not only for people has a character that JSON writes with a number."""
    if isinstance(value, dict):
        return any(
            _needs_control(key) or ((key not in _FOR_PEOPLE or not isinstance(each, str)) and _needs_control(each))
            for key, each in value.items()
        )
    if isinstance(value, list):
        return any(map(_needs_control, value))
    return isinstance(value, str) and _CONTROL.search(value) is not None


def _json_options(schema: dict[str, Any], asked: StructuredOutputsParams | None = None) -> Any:
    """How JSON is written.

    Whitespace: indented lines, only one space after `:` and `,`, or the request's pattern. Escapes with numbers, which
    stand for characters that JSON has no other way to write, are left out where they could repeat a key.
    """
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    if asked is not None and asked.whitespace_pattern is not None:
        options = {"whitespace_pattern": asked.whitespace_pattern}
    elif asked is not None and asked.disable_any_whitespace:
        options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if has_free_keys(schema) and not _needs_control(schema):
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return options


def _lark(grammar: str) -> str:
    """A Lark grammar as it is, and EBNF (GBNF: `::=`, root rule `root`) translated."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        raise _refusal("grammar", str(error)) from None


def _structural_tag(text: str, special_ids: Mapping[str, int], schemas: list[Any]) -> str:
    """The grammar of a structural tag. Adds the schemas in it to `schemas`."""

    def json_rule(schema: Any) -> str:
        schemas.append(schema := _checked(_evaluated(_read_schema(schema))))
        return f"%json {json.dumps({**schema, 'x-guidance': _json_options(schema)})}"

    try:
        return _bounded("structural_tag", tag_grammar(json.loads(text), special_ids, json_rule))
    except InvalidRequestError:  # the schema is refused
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else f"it is not as {_TAG_FORM} ({error!r})"
        raise _refusal("structural_tag", why) from None
