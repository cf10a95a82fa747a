"""Structural tags: a text that is put together of free text, fixed texts and constraints, as one Lark grammar.

The forms and their names come from xgrammar (https://xgrammar.mlc.ai/docs/structural_tag), which vLLM takes too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Form = Mapping[str, Any]

_ANY = "(?s:.*)"
_SPACE = r"[ \t\r\n]*"


def tag_grammar(asked: Any, special_ids: Mapping[str, int], json_rule: Callable[[Any], str]) -> str:
    """The grammar of a structural tag.

    Raises ValueError with the reason, and Python's errors for a value of the wrong type.

    Args:
        asked: {"format": ...}, or the older {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.
        special_ids: the ids of special tokens, which are no text for a grammar.
        json_rule: a rule for JSON that a schema allows.
    """
    if "format" in asked:
        form = asked["format"]
    else:
        tags = [
            {
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in asked["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": asked["triggers"], "tags": tags}
    return _Grammar(special_ids, json_rule).text(form)


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """A text for Lark, which knows special tokens by their ids."""
    parts = ((part, index % 2) for index, part in enumerate(cut(text, special_ids)) if part)
    tokens = [f"<[{special_ids[part]}]>" if is_special else json.dumps(part) for part, is_special in parts]
    return " ".join(tokens) or '""'


def cut(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """A text, cut at its special tokens: every second part is one."""
    tokens = sorted((token for token in special_ids if token in text), key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]


class _Grammar:
    """Rules as they are needed."""

    def __init__(self, special_ids: Mapping[str, int], json_rule: Callable[[Any], str]) -> None:
        self._special_ids, self._json_rule = special_ids, json_rule
        self._names: dict[str, str] = {}  # the names of rules and terminals, by their definitions

    def text(self, form: Form) -> str:
        start = self._of(form)
        return "\n".join(["%llguidance {}", f"start: {start}", *(name + rule for rule, name in self._names.items())])

    def _rule(self, rule: str, kind: str = "rule") -> str:
        """The name of a rule or of a terminal."""
        return self._names.setdefault(rule, f"{kind}_{len(self._names)}")

    def _terminal(self, pattern: str, *forbidden: str) -> str:
        """The name of a text that a regular expression matches, and that others do not match."""
        patterns = [f"/{_slashed(pattern)}/", *(f"~/{_slashed(each)}/" for each in forbidden)]
        return self._rule(f": {' & '.join(patterns)}", "TEXT")

    def _literal(self, text: str) -> str:
        return literal(text, self._special_ids)

    def _of(self, form: Form) -> str:
        """What stands for a form in a rule."""
        match form["type"]:
            case "const_string":
                return self._literal(form["value"])
            case "json_schema":
                return self._rule(f": {self._json_rule(form['json_schema'])}")
            case "regex":
                return self._terminal(form["pattern"])
            case "any_text":
                return self._any_text(form)
            case "sequence":
                return f"({' '.join(map(self._of, form['elements']))})"
            case "or":
                return f"({' | '.join(map(self._of, form['elements']))})"
            case "optional":
                return f"({self._of(form['content'])})?"
            case "star":
                return f"({self._of(form['content'])})*"
            case "plus":
                return f"({self._of(form['content'])})+"
            case "tag":
                return f"({self._tag(form)})"
            case "tags_with_separator":
                return self._separated(form)
            case "in_order":
                return self._in_order(form)
            case "triggered_tags":
                return self._rule(f": {self._triggered(form)}")
            case other:
                raise ValueError(f"the type {other!r} of a format is not supported")

    def _any_text(self, form: Form, *forbidden: str) -> str:
        """The name of a text of ordinary tokens, without the texts that are excluded."""
        excluded = [f"{_ANY}{re.escape(each)}{_ANY}" for each in form.get("excludes") or ()]
        return self._terminal(form.get("pattern", _ANY), *excluded, *forbidden)

    def _lazy(self, text: str, end: str) -> str:
        """The name of a text up to the first such end, with the end."""
        return self._rule(f"[lazy]: {text} {json.dumps(end)}")

    def _tag(self, form: Form, begun: str = "") -> str:
        """A tag. `begun`: the part of it that has come already."""
        begin, content = self._literal(form["begin"].removeprefix(begun)), form["content"]
        ends = [form["end"]] if isinstance(form["end"], str) else form["end"]
        if content["type"] == "any_text" and ends != [""]:
            text = self._any_text(content)
            return f"{begin} ({' | '.join(self._up_to(text, end) for end in ends)})"
        return f"{begin} {self._of(content)} ({' | '.join(map(self._literal, ends))})"

    def _up_to(self, text: str, end: str) -> str:
        first = cut(end, self._special_ids)[0]
        if not first:  # texts have no special tokens
            return f"{text} {self._literal(end)}"
        return f"{self._lazy(text, first)} {self._literal(end.removeprefix(first))}"

    def _separated(self, form: Form) -> str:
        tag = self._rule(f": {' | '.join(self._tag(each) for each in form['tags'])}")
        more = "" if form.get("stop_after_first") else f"({self._literal(form['separator'])} {tag})*"
        return f"({tag} {more})" if form.get("at_least_one") else f"({tag} {more})?"

    def _in_order(self, form: Form) -> str:
        """Elements in this order, with a separator between two. Elements that are not required may be left out.

        The grammar grows with their number, because the text that may come behind an element is one rule.
        """
        separator = self._literal(form["separator"])
        first, behind = '""', '""'  # a list that begins at an element or later, and what may come behind those before
        for element in reversed(form["elements"]):
            content = self._rule(f": {self._of(element['content'])}")
            begun, more = f"{content} {behind}", f"{separator} {content}"
            is_required = element["required"]
            first = self._rule(f": {begun}" if is_required else f": {begun} | {first}")
            behind = self._rule(f": {more} {behind}" if is_required else f": ({more})? {behind}")
        return first

    def _triggered(self, form: Form) -> str:
        """Free text up to a trigger, a tag from there on, and so on.

        `at_start`: {"char": ..., "content": a form that begins with it}. A text begins with this character, after
        space, only if it begins with this form.
        """
        tails = self._tails(form)
        text = self._any_text(form)
        others = sorted(token_id for token, token_id in self._special_ids.items() if token not in tails)
        special = self._rule(f": <[{','.join(map(str, others))}]>") if others else ""
        # No two texts side by side, which could be one.
        before = self._rule(f": ({text} {special})*") if special else ""
        opened = self._opened(tails, text, before)
        more = f"({opened})*" if opened and not form.get("stop_after_first") else ""
        rest = f"{more} {before} {text}"
        tags = " | ".join(f"{self._literal(head)} {tail}" for head, tail in tails.items())
        if form.get("stop_after_first"):
            return f"({tags})" if form.get("at_least_one") else f"{opened} | {before} {text}"
        if form.get("at_least_one"):
            return f"({tags}) {rest}"
        if (start := form.get("at_start")) is None:
            return rest
        first = self._any_text(form, f"{_SPACE}{re.escape(start['char'])}{_ANY}")
        begun = [f"{self._terminal(_SPACE)} {self._of(start['content'])}", self._opened(tails, first, "")]
        ends = [first]
        if special:
            begun.append(self._opened(tails, text, f"{first} {special} {before}"))
            ends.append(f"{first} {special} {before} {text}")
        return f"({' | '.join(begun)}) {rest} | {' | '.join(ends)}"

    def _tails(self, form: Form) -> dict[str, str]:
        """The forms after triggers, by the trigger. A special token at the start of one is the trigger."""
        tails: dict[str, list[str]] = {}
        for tag in form["tags"]:
            trigger = next((each for each in form["triggers"] if each and tag["begin"].startswith(each)), None)
            if trigger is None:
                raise ValueError("a begin starts with none of the triggers")
            parts = cut(tag["begin"], self._special_ids)
            head = parts[0][: len(trigger)] or parts[1]
            tails.setdefault(head, []).append(self._tag(tag, begun=head))
        return {head: self._rule(f": {' | '.join(each)}") for head, each in tails.items()}

    def _opened(self, tails: Mapping[str, str], text: str, before: str) -> str:
        """A text and a tag. `before`: the expression before the text."""
        return " | ".join(
            f"{before} {text} {self._literal(head)} {tail}"
            if head in self._special_ids
            else f"{before} {self._lazy(text, head)} {tail}"
            for head, tail in tails.items()
        )


def _slashed(pattern: str) -> str:
    """A regular expression between slashes."""

    def written(found: re.Match[str]) -> str:
        return r"\n" if found[0][-1] == "\n" else r"\/" if found[0] == "/" else found[0]

    return re.sub(r"\\.|/|\n", written, pattern, flags=re.DOTALL)
