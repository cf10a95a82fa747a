"""Suffix decoding proposes the same as its plain twin, token for token, whatever was shared and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import extension
from quire.errors import ConfigError
from quire.spec_decode.suffix import SuffixProposer
from tests.examples import IS_FULL, examples
from tests.spec_decode.requests import request
from tests.spec_decode.suffix_twin import PAGE_BYTES, PAGE_TOKENS, SuffixTwin

SHARED_PAGES = 8


def suffix(
    depth: int = 24, max_requests: int = 10_000, factor: float = 1.0, probability: float = 0.1, num_pages: int = 64
) -> SuffixProposer:
    return SuffixProposer(depth, max_requests, factor, probability, num_pages * PAGE_BYTES)


def answers(random: Random, alphabet: int) -> Iterator[int]:
    """Few phrases, again and again, and now and then something else."""
    phrases = [[random.randrange(alphabet) for _ in range(random.randint(1, 20))] for _ in range(random.randint(1, 6))]
    while True:
        yield from random.choice(phrases)
        if random.random() < 0.2:
            yield random.randrange(alphabet)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    alphabet=st.sampled_from([2, 5, 40, 500]),
    most=st.integers(1, 12),
    depth=st.sampled_from([2, 9, 24, 24, 40]),
    max_requests=st.sampled_from([0, 1, 2, 100]),
    factor=st.sampled_from([0.3, 1.0, 2.5]),
    min_probability=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_it_proposes_what_its_twin_does(
    seed: int, alphabet: int, most: int, depth: int, max_requests: int, factor: float, min_probability: float
) -> None:
    """Requests of two tenants, which are told the same; they start, go on and end at random."""
    numbers = (depth, max_requests, factor, min_probability)
    proposer, twin = suffix(*numbers, num_pages=SHARED_PAGES), SuffixTwin(*numbers, num_pages=SHARED_PAGES)
    random = Random(seed)
    tokens, running = answers(random, alphabet), {}
    for _ in range(100):
        name = random.choice("abcd")
        if name not in running:
            salt = "x" if random.random() < 0.3 else None
            running[name] = request(name, list(islice(tokens, random.randint(0, 3))), cache_salt=salt)
        asked = running[name]
        asked.output_token_ids += islice(tokens, random.choice([0, 1, 1, 2, 3, 9, 40]))
        if random.random() < 0.1:
            proposer.forget(name)
            twin.forget(running.pop(name))
        else:
            assert proposer.propose(asked, most) == twin.propose(asked, most)


@settings(max_examples=examples(6), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    factor=st.sampled_from([0.3, 1.0, 100.0]),
    min_probability=st.sampled_from([0.0, 0.1]),
)
def test_the_longest_drafts_are_those_of_its_twin(seed: int, factor: float, min_probability: float) -> None:
    """Of matches of any length up to a thousand tokens, with their continuations."""
    random = Random(seed)
    phrase = [random.randrange(1000) for _ in range(600)]
    numbers = (1024, 10, factor, min_probability)
    proposer, twin = suffix(*numbers, num_pages=SHARED_PAGES), SuffixTwin(*numbers, num_pages=SHARED_PAGES)
    asked = request("a", [])
    for _ in range(8 if IS_FULL else 4):
        begin = random.randrange(500)
        asked.output_token_ids += [
            *phrase[begin : begin + random.randint(1, 400)],
            *[random.randrange(1000)][: begin % 3],
        ]
        assert proposer.propose(asked, 255) == twin.propose(asked, 255)


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([], 4, []),
        ([7], 4, []),
        ([7, 7], 4, [7]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 9, [4, 5, 6]),  # as many as the match has
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 8, 5, 1, 2, 9, 6, 1, 2, 8, 7, 1, 2], 1, [8]),  # the more frequent one
        ([1, 2, 8, 1, 2, 9, 1, 2, 8, 1, 2], 1, [9]),  # the surer one of a longer match
        ([1, 2, 8, 1, 2, 9, 1, 2], 1, [9]),  # the newer one
        ([*range(20), *(30 + i for i in range(11)), 40, 0, *range(1, 13)], 9, [13, 14, 15, 16, 17, 18, 19, 30, 31]),
    ],
)
def test_examples(tokens: list[int], most: int, drafts: list[int]) -> None:
    assert SuffixTwin(24, 100, 1.0, 0.1).propose(request("a", tokens), most) == drafts
    assert suffix().propose(request("a", tokens), most) == drafts


ANSWER = list(range(100, 100 + 2 * PAGE_TOKENS))


def _after_an_answer(ended: bool = True, **fields: str) -> SuffixProposer:
    proposer = suffix()
    asked = request("first", [1, 2, 3], **fields)
    asked.output_token_ids += ANSWER
    proposer.propose(asked, 4)
    asked.output_token_ids += [7, 8, 9]
    if ended:
        proposer.forget("first")
    return proposer


def test_answers_of_others_are_read_and_prompts_are_not() -> None:
    proposer = _after_an_answer()
    assert proposer.propose(request("a", [0, *ANSWER[5:9]]), 3) == ANSWER[9:12]
    assert proposer.propose(request("b", [0, *ANSWER[-2:]]), 3) == [7, 8], "what came after the last draft"
    assert proposer.propose(request("c", [0, 1, 2]), 3) == []


def test_answers_of_those_who_still_run_are_read() -> None:
    """A sibling (n > 1) is one of them."""
    proposer = _after_an_answer(ended=False)
    assert proposer.propose(request("a", [0, *ANSWER[5:9]]), 3) == ANSWER[9:12]


@pytest.mark.parametrize("mine", [{}, {"cache_salt": "x"}, {"adapter": "x"}, {"cache_salt": "x", "adapter": "x"}])
@pytest.mark.parametrize("theirs", [{}, {"cache_salt": "x"}, {"adapter": "x"}, {"cache_salt": "y"}])
def test_nobody_reads_what_another_tenant_got(mine: dict[str, str], theirs: dict[str, str]) -> None:
    drafts = _after_an_answer(**theirs).propose(request("a", [0, *ANSWER[5:9]], **mine), 3)
    assert drafts == (ANSWER[9:12] if mine == theirs else [])


def test_requests_that_ended_leave_nothing_but_their_answers() -> None:
    proposer = suffix(max_requests=0)
    assert proposer.shared_bytes == 0
    assert proposer.propose(request("a", [1, 2, 3, 1]), 2) == [2]
    proposer.forget("a")
    proposer.forget("a")
    proposer.forget("never seen")
    assert proposer.propose(request("a", [1]), 2) == []


@pytest.mark.parametrize("num_bytes", [0, PAGE_BYTES, 3 * PAGE_BYTES, 1 << 20, 80 << 20])
def test_shared_answers_keep_to_their_memory(num_bytes: int) -> None:
    assert SuffixProposer(24, 10, 1.0, 0.1, num_bytes).shared_bytes <= max(num_bytes, PAGE_BYTES)


def test_a_long_prompt() -> None:
    """100,000 tokens, all different, and then some of them again."""
    prompt = [*range(100_000), *range(50_000, 50_010)]
    proposer, asked = suffix(), request("a", prompt)
    assert proposer.propose(asked, 3) == [50_010, 50_011, 50_012]
    asked.output_token_ids += [50_010, 7]
    assert proposer.propose(asked, 3) == [8]
    asked.output_token_ids += [8]
    assert proposer.propose(asked, 3) == [9, 10]


def test_without_the_extension_the_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "C", None)
    with pytest.raises(ConfigError, match=r"Speculation by suffix needs the compiled extension"):
        suffix()
