"""Finds rules of a Lark grammar that never end: each of their texts would contain another one, and so on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

MAX_PASSES = 64  # over all rules; a grammar that needs more of them is taken

# A rule is a list of alternatives. Each has names of rules and lists of alternatives. Texts are left out.
Alternatives = list[list["str | Alternatives"]]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*)
    | (?P<times>[?*+]|\{[\d,\s]*\}|~[ \t]*\d+)
    | (?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/\w*|<[^>\n]*>|->[ \t]*\w+|@\w+|~)
    | (?P<object>%(?:json|regex|lark)\b\s*(?={))
    | (?P<directive>%[^\n]*)
    | (?P<rule>[!?]?[a-zA-Z_]\w*(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(?!:))
    | (?P<name>[a-zA-Z_]\w*)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_MAY_BE_NONE = re.compile(r"[?*]|[{~]\s*(,|0+\b)")


def endless_rule(grammar: str) -> str | None:
    """The name of a rule that never ends and that `start` leads to; None: none is known.

    Args:
        grammar: one that llguidance has taken.
    """
    rules = _rules(grammar)
    ended: set[str] = set()
    order = list(rules)
    for _ in range(MAX_PASSES):
        num_ended = len(ended)
        for name in reversed(order):  # rules mostly use rules that come after them
            if name not in ended and _can_end(rules[name], rules, ended):
                ended.add(name)
        if len(ended) == num_ended:
            break
    else:
        return None
    waiting, reached = ["start"], {"start"}
    while waiting:
        name = waiting.pop()
        if name in rules and name not in ended:
            return _repeated(name, rules, ended)
        found = set(_names(rules.get(name, []))) - reached
        reached |= found
        waiting += found
    return None


def _repeated(name: str, rules: dict[str, Alternatives], ended: set[str]) -> str:
    """The rule that a rule which never ends leads to again and again."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        name = next(each for each in _names(rules[name]) if each in rules and each not in ended)
    return name


def _can_end(rule: Alternatives, rules: dict[str, Alternatives], ended: set[str]) -> bool:
    """Whether one of the alternatives has only parts that can end. A part without a rule is a text."""
    return any(
        all(
            part in ended or part not in rules if isinstance(part, str) else _can_end(part, rules, ended)
            for part in alternative
        )
        for alternative in rule
    )


def _names(rule: Alternatives) -> Iterator[str]:
    for alternative in rule:
        for part in alternative:
            yield from [part] if isinstance(part, str) else _names(part)


def _rules(grammar: str) -> dict[str, Alternatives]:
    rules: dict[str, Alternatives] = {}
    open_groups: list[Alternatives] = [[[]]]
    for kind, text in _tokens(grammar):
        current = open_groups[-1][-1]
        if kind == "rule":
            name = re.split(r"[ \t.\[:]", text.lstrip("!?"), maxsplit=1)[0]
            open_groups = [rules.setdefault(name, [[]])]
        elif kind == "name":
            current.append(text)
        elif kind == "times":
            if current and _MAY_BE_NONE.match(text):
                current.append([[current.pop()], []])
        elif text in ("(", "["):
            group: Alternatives = [[]]
            current.append(group)
            open_groups.append(group)
        elif text in (")", "]") and len(open_groups) > 1:
            closed = open_groups.pop()
            if text == "]":
                closed.append([])
        elif text == "|":
            open_groups[-1].append([])
        elif kind == "text":
            current.append([[]])
    return rules


def _tokens(grammar: str) -> Iterator[tuple[str, str]]:
    at = 0
    while (found := _TOKEN.match(grammar, at)) is not None:
        at, kind = found.end(), str(found.lastgroup)
        if kind == "object":
            at = _behind_object(grammar, at)
            yield "text", ""
        elif kind not in ("space", "directive"):
            yield kind, found.group()


def _behind_object(grammar: str, at: int) -> int:
    """The end of an object in braces: JSON, or a grammar."""
    try:
        return json.JSONDecoder().raw_decode(grammar, at)[1]
    except ValueError:
        depth = 0
        for found in re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|[{}]').finditer(grammar, at):
            depth += {"{": 1, "}": -1}.get(found.group(), 0)
            if depth == 0:
                return found.end()
        return len(grammar)
