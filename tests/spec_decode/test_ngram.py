"""Prompt lookup proposes the same as its plain twin, token for token, however the text grew."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import extension
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.spec_decode.ngram import NgramProposer
from tests.examples import examples
from tests.spec_decode.requests import request

# Few different tokens, or phrases that come again.
PHRASES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=4)
TEXTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=120),
    PHRASES.flatmap(lambda phrases: st.lists(st.sampled_from(phrases), max_size=12)).map(lambda some: [*chain(*some)]),
)


def twin(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The definition: longer n-grams before shorter ones, the first place before later ones."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + most]
    return []


@settings(max_examples=examples(300), deadline=None)
@given(
    text=TEXTS,
    num_prompt=st.integers(0, 60),
    steps=st.lists(st.integers(0, 9), max_size=8),
    most=st.integers(1, 9),
    shortest=st.integers(1, 4),
    more=st.integers(0, 5),
)
def test_it_proposes_what_its_twin_does(
    text: list[int], num_prompt: int, steps: list[int], most: int, shortest: int, more: int
) -> None:
    proposer = NgramProposer(shortest, shortest + more)
    asked = request("a", text[:num_prompt])
    for step in steps:
        start = asked.num_tokens
        asked.output_token_ids += text[start : start + step]
        assert proposer.propose(asked, most) == twin(asked.token_ids(), shortest, shortest + more, most)


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([], 4, []),
        ([7], 4, []),
        ([7, 7], 4, [7]),
        ([1, 2, 3, 4, 2, 3], 4, [4, 2, 3]),  # nothing follows the end of the text
        ([1, 2, 5, 9, 1, 2, 6, 8, 1, 2], 2, [5, 9]),  # the first place, not the last one
        ([2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the longer n-gram, though its place is later
        ([3, 3, 3, 3, 3], 4, [3]),  # places overlap the end: of 2 tokens the first has most behind it
    ],
)
def test_examples(tokens: list[int], most: int, drafts: list[int]) -> None:
    assert twin(tokens, 1, 4, most) == drafts
    assert NgramProposer(1, 4).propose(request("a", tokens), most) == drafts


def test_a_long_prompt() -> None:
    """100,000 tokens, all different, and then some of them again."""
    prompt = [*range(100_000), *range(50_000, 50_010)]
    proposer, asked = NgramProposer(2, 5), request("a", prompt)
    assert proposer.propose(asked, 3) == [50_010, 50_011, 50_012]
    asked.output_token_ids += [50_010, 7]
    assert proposer.propose(asked, 3) == []
    asked.output_token_ids += [8]
    assert proposer.propose(asked, 3) == [9, 10, 11]


def test_requests_do_not_see_each_other_and_are_forgotten() -> None:
    proposer = NgramProposer(1, 3)
    assert proposer.propose(request("a", [1, 2, 3, 1]), 2) == [2, 3]
    assert proposer.propose(request("b", [1]), 2) == []
    proposer.forget("a")
    proposer.forget("a")
    proposer.forget("never seen")
    assert proposer.propose(request("a", [1]), 2) == []
    assert proposer.propose(request("b", [1]), 2) == []


def test_without_the_extension_the_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "C", None)
    with pytest.raises(ConfigError, match=r"Speculation by ngram needs the compiled extension.*C\+\+20 compiler"):
        NgramProposer(1, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cpu._C.NgramIndex(shortest=0, longest=3), "shortest is 0, less than 1"),
        (lambda: cpu._C.NgramIndex(shortest=3, longest=2), "longest is 2, less than 3"),
        (lambda: cpu._C.NgramIndex(shortest=1, longest=2).propose([1], -1), "most is -1, less than 0"),
        (lambda: cpu._C.SharedTexts(max_bytes=0, max_requests=-1), "max_requests is -1, less than 0"),
        (lambda: suffix_index(max_depth=0), "max_depth is 0, less than 1"),
        (lambda: suffix_index(num_prompt=-1), "num_prompt is -1, less than 0"),
        (lambda: suffix_index(tenant=b"me"), "16 bytes"),
    ],
)
def test_wrong_numbers_are_exceptions(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def suffix_index(**arguments: Any) -> object:
    usual = {"max_depth": 8, "max_spec_factor": 1.0, "min_token_prob": 0.1, "shared": None, "tenant": bytes(16)}
    return cpu._C.SuffixIndex(**{**usual, "num_prompt": 0, **arguments})
