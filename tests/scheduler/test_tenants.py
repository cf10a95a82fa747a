"""With salts of their own, a tenant learns nothing about another's prompts through the prefix cache.

Time to first token is a function of the work that is scheduled, plus noise that knows no prompt. So instead of a
statistical test of times, which would pass or fail by the machine's mood, the work itself is compared, exactly: every
batch of every step, and all answers to a tenant. If these are equal for any prompts of the other one, no statistic over
times can tell them apart.

The amount that others compute and cache stays visible, because memory is shared; its content does not.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.scheduler.driver import Driver, request

# (whose: 0 the victim, 1 the other one; prompt; output tokens; steps until the next)
Traffic = list[tuple[int, list[int], int, int]]

# Few tokens and short blocks: prompts of the two tenants often begin alike.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
TRAFFIC = st.lists(st.tuples(st.integers(0, 1), PROMPTS, st.integers(1, 6), st.integers(0, 3)), min_size=2, max_size=12)


def renamed(prompt: list[int]) -> list[int]:
    """Another text with the same repetitions: the victim still shares blocks with itself, but none with others."""
    return [token + 1000 for token in prompt]


def world(traffic: Traffic, salts: tuple[str | None, str | None], num_blocks: int) -> list[Any]:
    """Everything that takes time, and everything that is answered to the second tenant, in order."""
    driver = Driver(num_blocks=num_blocks, block_size=2, max_num_batched_tokens=16, max_num_seqs=4)
    seen: list[Any] = []

    def step() -> None:
        seen.extend(
            (delta.num_cached_tokens, delta.num_preemptions, len(delta.token_ids), delta.finish_reason)
            for delta in driver.step()
            if delta.request_id.startswith("1-")
        )

    for index, (tenant, prompt, max_tokens, num_steps) in enumerate(traffic):
        driver.add(request(f"{tenant}-{index}", prompt, max_tokens, cache_salt=salts[tenant]))
        for _ in range(num_steps):
            step()
    while driver.core.has_work():
        step()
    work = [(batch.num_scheduled_tokens, batch.num_computed_tokens, batch.block_copies) for batch in driver.batches]
    return [seen, work]


def changed(traffic: Traffic) -> Traffic:
    """The same traffic with other prompts of the victim."""
    return [(t, prompt if t else renamed(prompt), *rest) for t, prompt, *rest in traffic]  # type: ignore[misc]


@settings(max_examples=examples(150))
@given(traffic=TRAFFIC, num_blocks=st.sampled_from([16, 20, 64]))
def test_with_salts_the_work_does_not_depend_on_what_the_other_tenant_says(traffic: Traffic, num_blocks: int) -> None:
    salts = ("victim", "other")
    assert world(traffic, salts, num_blocks) == world(changed(traffic), salts, num_blocks)


@pytest.mark.parametrize(("salts", "is_seen"), [((None, None), True), (("a", "a"), True), (("a", "b"), False)])
def test_a_guess_of_a_prompt_shows_without_salts_only(salts: tuple[str | None, str | None], is_seen: bool) -> None:
    """The attack: send a prompt that the victim may have sent, and look at the cached tokens and the work."""
    secret = [0, 1, 1, 0, 1, 0, 0, 1, 1]
    traffic: Traffic = [(0, secret, 2, 3), (1, secret, 2, 3)]
    assert (world(traffic, salts, 64) != world(changed(traffic), salts, 64)) is is_seen
