"""Tokens that a grammar forces: they are computed together, and no token and no end changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from quire.messages import AddRequest
from quire.scheduler.adaptive_depth import AdaptiveDepth
from tests.guesser import Guesser
from tests.scheduler.driver import Driver, continuation, request
from tests.scheduler.test_sameness import mixed, prompt


def forces(token_id: int) -> bool:
    """In half of the vocabulary, so that spans are short and long."""
    return token_id % 2 == 0


def asked() -> list[AddRequest]:
    """Also ends within a span: by length and by a stop token."""
    lengths = [request(f"length{count}", prompt(count, 3), max_tokens=count) for count in range(1, 20)]
    stops = [
        request(f"stop{stop}", prompt(6, 4), max_tokens=40, seed=stop, stop_token_ids=[stop], min_tokens=stop % 4)
        for stop in range(0, 50, 4)
    ]
    return [*mixed(), *lengths, *stops]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 2},
        {"num_blocks": 12},
        {"max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 1},
        {"long_prefill_token_threshold": 3},
        {"enable_prefix_caching": False},
        {"block_size": 1, "num_blocks": 256},
        {"max_shared_prefill_tokens": 5},
        {"rope_switches_after": 20},
    ],
    ids=str,
)
def test_forced_tokens_do_not_change_tokens(limits: dict[str, Any], depth: int) -> None:
    Driver(depth=depth, forces=forces, **limits).run_all(*asked())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_forced_tokens_and_drafts(right: float, waits: bool, depth: int) -> None:
    guesser = Guesser(right)
    driver = Driver(depth=depth, forces=forces, proposer=guesser, waits=waits, num_blocks=256)
    driver.run_all(*asked())
    assert guesser.num_right + guesser.num_wrong > 100
    assert sum(len(each) for batch in driver.batches for _, _, each in batch.forced_tokens) > 100


def test_more_forced_tokens_than_a_step_has_leave_none_to_prompts() -> None:
    """Drafts are then limited by no prompt. The drafter asks only for prompts that the step has."""
    asked_for: list[int] = []

    def beside_prompts(count: int) -> tuple[float, float]:
        asked_for.append(count)
        return 1e-3 * count, 1e-3

    adaptive = AdaptiveDepth(
        lambda starts, most: [20e-3 + 1e-4 * count for count in range(most + 1)], beside_prompts=beside_prompts
    )
    driver = Driver(
        forces=lambda token_id: token_id % 16 != 0,
        proposer=Guesser(1.0),
        adaptive=adaptive,
        max_num_batched_tokens=9,
        num_blocks=256,
    )
    driver.run_all(*asked())
    assert asked_for
    assert min(asked_for) > 0


def num_steps(message: AddRequest, **arguments: Any) -> int:
    driver = Driver(num_blocks=256, **arguments)
    driver.run_all(message)
    return len(driver.batches)


def test_a_span_takes_one_step() -> None:
    """It is computed with the token before it. With another step in flight, that step has computed this token."""
    message = request("a", prompt(9), max_tokens=80)
    tokens = continuation(message)
    is_forced = [False, *map(forces, tokens[:-1])]
    num_sampled = is_forced.count(False)
    num_spans = sum(not before and each for before, each in pairwise(is_forced))
    assert num_spans > 10
    assert num_sampled + num_spans < len(tokens) - 10
    assert num_steps(message) == num_steps(message, depth=2) == len(tokens)
    assert num_steps(message, forces=forces) == num_sampled
    assert num_steps(message, forces=forces, depth=2) == num_sampled + num_spans
    assert num_steps(message, forces=forces, num_stages=2, depth=2) == num_sampled


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_waits_for_a_span_of_others(depth: int) -> None:
    """Each step has the next token of a request without a grammar, whatever is forced beside it."""
    plain = request("plain", prompt(9), max_tokens=60, logprobs=1)
    driver = Driver(depth=depth, forces=forces)
    driver.run_all(plain, request("forced", prompt(9), max_tokens=80))
    assert all("plain" in batch.request_ids for batch in driver.batches[:60])


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_at_any_one_step(depth: int) -> None:
    """With a span that is known, scheduled or in flight."""
    messages = [request("a", prompt(10), max_tokens=20), request("b", prompt(10), max_tokens=20, seed=3)]
    for at_step in range(40):
        driver = Driver(depth=depth, forces=forces)
        for message in messages:
            driver.add(message)

        def preempt(index: int, driver: Driver = driver, at_step: int = at_step) -> None:
            if index == at_step and driver.scheduler.num_running:
                driver.scheduler.preempt_last()

        driver.run(preempt)
        driver.check_outputs()
