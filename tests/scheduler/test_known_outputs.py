"""A request that comes with output tokens, because another engine had begun it. No model."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from quire.messages import AddRequest, joined
from tests.scheduler.driver import Driver, expected, request


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("num_known", range(12))
def test_it_gets_the_rest(num_known: int, chunk: int, depth: int) -> None:
    """Beside others, whatever its number of known tokens is: up to max_tokens, and with min_tokens behind them."""
    driver = Driver(depth=depth, max_num_batched_tokens=chunk)
    plain = request("a", range(9), 12)
    stopping = request("b", range(5), 40, min_tokens=13, stop_token_ids=expected(request("b", range(5), 40))[0][5:20])
    for message in (plain, stopping):
        driver.add(replace(message, output_token_ids=expected(message)[0][:num_known], is_retry=True))
    driver.add(request("other", [1, 2], 9))
    driver.run()
    for message in (plain, stopping):
        tokens, reason = expected(message)
        assert driver.tokens(message.request_id) == tokens[num_known:]
        assert driver.last(message.request_id).finish_reason == reason
    assert driver.tokens("other") == expected(driver.messages["other"])[0]
    has_queued = [delta.queued_seconds is not None for delta in driver.deltas["a"]]
    assert sum(has_queued) == (num_known == 0), "the first engine has said it"


def test_known_tokens_are_computed_once_and_cached() -> None:
    driver = Driver(max_num_batched_tokens=64)
    message = request("a", range(10), 30)
    known = expected(message)[0][:22]
    driver.add(replace(message, output_token_ids=known))
    driver.step()
    assert driver.batches[0].num_scheduled_tokens == [32]
    driver.run()
    assert len(driver.batches) == 8
    driver.add(request("b", [*range(10), *known], 2))
    driver.run()
    assert driver.last("b").num_cached_tokens == 28


def test_prompt_logprobs_that_were_given_are_not_computed_again() -> None:
    """A request with output finds its prompt in the prefix cache: another engine's, or this one's that preempted it."""
    driver = Driver(max_num_batched_tokens=64)
    driver.run_all(request("warm", range(10), 1))
    message = request("a", range(10), 20, prompt_logprobs=1)
    driver.add(replace(message, output_token_ids=expected(message)[0][:3]))
    driver.step()
    assert driver.batches[-1].num_scheduled_tokens == [13 - 8]
    for _ in range(4):
        driver.step()
    driver.scheduler.preempt_last()
    driver.step()
    assert driver.batches[-1].num_scheduled_tokens == [2], "the tokens that fill no block"
    driver.run()
    assert driver.tokens("a") == expected(message)[0][3:]
    assert all(delta.prompt_logprobs is None for delta in driver.deltas["a"])


def test_forks_with_outputs_share_the_prompt() -> None:
    """As one message, each with its own tokens. The first continuation may have ended."""
    first = request("a", range(20), 12, seed=1)
    forks = [replace(request(name, range(20), 12, seed=seed), fork_of="a") for name, seed in (("b", 2), ("c", 3))]
    known = {"a": 4, "b": 0, "c": 9}
    for messages in ([first, *forks], forks):
        again = [replace(each, output_token_ids=expected(each)[0][: known[each.request_id]]) for each in messages]
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(joined(again)), type=AddRequest)
        assert [each.output_token_ids for each in sent.continuations()] == [each.output_token_ids for each in again]
        driver = Driver(max_num_batched_tokens=64)
        driver.core.add(sent)
        tokens: dict[str, list[int]] = {name: [] for name in known}
        while driver.core.has_work():
            for delta in driver.core.step():
                tokens[delta.request_id] += delta.token_ids
        for each in messages:
            assert tokens[each.request_id] == expected(each)[0][known[each.request_id] :]
        assert driver.batches[0].num_tokens < sum(20 + len(each.output_token_ids) for each in again), "computed twice"


def test_a_request_that_has_all_its_tokens_is_refused() -> None:
    driver = Driver()
    driver.add(request("a", [1, 2], 3, output_token_ids=[4, 5, 6]))
    (delta,) = driver.step()
    assert delta.error_code == "invalid_value"
    assert delta.error is not None
    assert "all its tokens" in delta.error
