"""What the first screen expects: the arithmetic, and the steps it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire import demo
from quire.engine.expectation import put_expectation
from quire.engine.warm_up import MOST_SECONDS, MOST_TOKENS, produce_tokens
from quire.model_config import load_model_config
from quire.resolve import Resolved
from tests.scheduler.driver import Driver

MODEL = replace(load_model_config(demo.path()), vocab_size=1000, tie_word_embeddings=True)


def test_from_the_fastest_step_and_the_pace_of_a_prompt() -> None:
    resolved = Resolved()
    resolved.put("max_num_seqs", 5, "flag")
    put_expectation(resolved, MODEL, [0.5, 0.02, 0.04], (100, 1.0))
    one = resolved.settings["expected_tokens_per_second"]
    assert (one.value, one.source) == (50.0, "measured")
    assert one.detail == "1 / 20.00 ms, the fastest of 3 steps with one token each"
    # A prompt's token does not go through the output layer, a request's does.
    more = 0.01 * (1 + 1000 * MODEL.hidden_size / MODEL.num_block_parameters())
    total = resolved.settings["expected_total_tokens_per_second"]
    assert total.value == pytest.approx(5 / (0.02 + 4 * more), rel=0.005)
    assert total.source == "formula"
    assert total.detail.startswith(f"max_num_seqs 5 / (20.00 ms for one token + 4 x {1e3 * more:.3f} ms: ")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_model_len", [2, 200])
def test_every_step_computes_one_token(depth: int, max_model_len: int) -> None:
    driver = Driver(depth=depth, max_model_len=max_model_len, num_blocks=2)
    seconds = produce_tokens(driver.core)
    assert len(seconds) == min(MOST_TOKENS, max_model_len - 1)
    assert {batch.num_tokens for batch in driver.batches} == {1}
    assert not driver.core.has_work()
    assert (driver.pool.num_used_blocks, driver.pool.num_cached_blocks) == (0, 0), "something stays"


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_steps_are_not_repeated(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of a large model does not take longer for it."""
    driver = Driver(depth=depth)
    times = iter(range(1000))
    driver.core._clock = lambda: MOST_SECONDS * next(times)
    assert len(produce_tokens(driver.core)) <= depth
    assert not driver.core.has_work()
    assert driver.pool.num_used_blocks == 0
