"""Stop strings: found where they are first complete, for any cut, and not a character of them let out before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.text.pipeline import TextPipeline
from quire.frontend.text.stop import StopMatcher, StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str], start: int = 0) -> tuple[int, str] | None:
    """By definition: the smallest end after `start`, and the longest string that ends there."""
    for end in range(start + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def cut(data: st.DataObject, text: str) -> list[str]:
    bounds = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *bounds], [*bounds, len(text)], strict=True)]


@given(data=st.data(), text=TEXT, stops=STOPS, include=st.booleans())
def test_any_cut_finds_the_first_complete_match(data, text, stops, include):
    matcher = StopMatcher(stops, include=include)
    expected = first_match(text, stops)
    out = ""
    for piece in cut(data, text):
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
        if not include:
            assert not any(stop in out for stop in stops)
    if expected is None:
        assert matcher.matched is None
        assert out + matcher.flush() == text
    else:
        end, stop = expected
        assert matcher.matched == stop
        assert out == text[: end if include else end - len(stop)]


@given(data=st.data(), text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(data, text, stops):
    matcher, out = StopMatcher(stops), ""
    seen = ""
    for piece in cut(data, text):
        seen += piece
        out += matcher.push(piece)
        if matcher.matched is not None:
            return
        starts = [size for size in range(1, len(seen) + 1) if any(stop.startswith(seen[-size:]) for stop in stops)]
        assert len(seen) - len(out) == max(starts, default=0)


@given(text=TEXT, stops=STOPS, unarmed=st.integers(0, 10))
def test_matches_that_end_before_min_tokens_do_not_count(text, stops, unarmed):
    """One character per token: nothing may end within the first `unarmed` of them."""

    class Characters:
        def push(self, token_ids):
            return "".join(map(chr, token_ids))

        def flush(self):
            return ""

    pipeline = TextPipeline(Characters(), stops, min_tokens=unarmed)
    delta = pipeline.push([ord(char) for char in text])
    expected = first_match(text, stops, start=unarmed)
    if expected is None:
        assert delta.stop is None
        assert delta.num_tokens == len(text)
        assert delta.text + pipeline.finish() == text
    else:
        end, stop = expected
        assert (delta.text, delta.num_tokens, delta.stop) == (text[: end - len(stop)], end, stop)


def test_work_per_character_is_constant():
    """Stop strings of the worst kind: one state per character of theirs, and no more steps than there is text."""
    stops = ["a" * 255 + "b", "a" * 254 + "c"]
    automaton = StopStrings(stops)
    assert len(automaton.depth) <= sum(map(len, stops)) + 1
    steps = 0

    class Counting(list):
        def __getitem__(self, index):
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    automaton.children = Counting(automaton.children)
    state = 0
    for char in "a" * 5000 + "x":
        state = automaton.step(state, char)
    assert steps < 4 * 5001


def test_stop_strings_with_any_characters():
    matcher = StopMatcher(["\n\n", "😀", "ß."])
    assert matcher.push("eins\n") == "eins"
    assert matcher.push("zwei 😀 drei") == "\nzwei "
    assert matcher.matched == "😀"
    with pytest.raises(AssertionError):
        matcher.push("more")
