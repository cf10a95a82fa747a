"""Grammars with a rule that never ends are found."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from quire.errors import InvalidRequestError
from quire.grammar.lark_rules import endless_rule
from quire.grammar.text import grammar_text
from quire.sampling_params import StructuredOutputsParams as Structured
from tests.examples import examples


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ("start: start", "start"),
        ('start: "a" start', "start"),
        ('  start: "a" b\n  b: "x" c\n  c: "y" b\n', "b"),
        ('start: "a" b | "c"\nb: "x" b', "b"),
        ('start: ("a" | b)*\nb: "x" (b | "c" b)', "b"),
        ('start: b?\nb: X b\nX: /[":|]/', "b"),
        ('start: "a" start ~ 1..2', "start"),
        ('start: "a" start{01,2}', "start"),
        ('start: b{2}\nb: %json {"const": ") | "} b', "b"),
        ('start: b\nb: %lark {\n start: "}" | "x" \n} b', "b"),
        ('start: "a" b  // | "b"\nb: [b] b', "b"),
        ('root ::= "a" x | "b"\nx ::= "c" x [0-9]*', "x"),
    ],
)
def test_refused(grammar: str, rule: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"the rule {rule} has no end"):
        grammar_text(Structured(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        'start: "a" start?',
        'start: "a" (start | "b")',
        'start: ("a" start)*',
        'start: "a" [start]',
        'start: "a" start{0,2}',
        'start: "a" start{,1}',
        'start: "a" start{ , 1}',
        'start: "a" start ~ 0..2',
        'start: "a" start~0',
        'start: "a"\nb: "x" b',  # nothing leads to it
        'start: "start:" "a" | A\nA: /start: A/',
        'start[capture]: %json {"type": "object"} b\nb: "x" | b',
        'start: %lark {\n start: "}" | start "x" \n}',
        'root ::= "(" root ")" | [0-9]+',
        'start: a::0x0\na::_: "x" a::incr(_) %if lt(_, 5)\n    | "y"',
    ],
)
def test_taken(grammar: str) -> None:
    if "::" not in grammar:
        assert grammar_text(Structured(grammar=grammar))
    text = grammar if "::=" not in grammar else grammar_text(Structured(grammar=grammar))
    assert endless_rule(text) is None


def test_random_grammars() -> None:
    """Against a twin that looks for the least depth of a text of each rule."""
    numbers, found = random.Random(1), {True: 0, False: 0}
    names = ["start", "b", "c", "d"]

    def group(depth: int) -> Any:
        """(texts, needs): the text of alternatives, and the rules that each needs to end."""
        alternatives = [sequence(depth) for _ in range(numbers.randint(1, 2))]
        return " | ".join(text for text, _ in alternatives), [needs for _, needs in alternatives]

    def sequence(depth: int) -> Any:
        parts = [part(depth) for _ in range(numbers.randint(1, 3))]
        return " ".join(text for text, _ in parts), [needs for _, needs in parts]

    def part(depth: int) -> Any:
        kind = numbers.randrange(4 if depth else 3)
        text, needs = (
            ('"x"', []) if kind == 0 else (name := numbers.choice(names), name) if kind < 3 else group(depth - 1)
        )
        text = f"({text})" if kind == 3 else text
        mark = numbers.choice(["", "", "", "?", "*", "+"])
        return text + mark, [] if mark in ("?", "*") or kind == 0 else needs

    def ends(needs: Any, ended: set[str]) -> bool:
        """A name; a list of lists: alternatives; []: nothing is needed."""
        if isinstance(needs, str):
            return needs in ended
        return not needs or any(all(ends(each, ended) for each in alternative) for alternative in needs)

    for _ in range(examples(2000)):
        rules = {name: group(1) for name in names}
        grammar = "\n".join(f"{name}: {text}" for name, (text, _) in rules.items())
        ended: set[str] = set()
        for _ in names:
            ended |= {name for name, (_, needs) in rules.items() if ends(needs, ended)}
        reached = {"start"}
        for _ in names:
            reached |= {name for each in reached for name in re.findall(r"\w+", re.sub('"x"', "", rules[each][0]))}
        rule = endless_rule(grammar)
        assert (rule is None) == (reached <= ended), grammar
        assert rule is None or rule in reached - ended
        found[rule is None] += 1
        assert not LLMatcher.validate_grammar(grammar)
    assert min(found.values()) > 0.1 * sum(found.values()), found
