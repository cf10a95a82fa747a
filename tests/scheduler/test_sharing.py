"""Steps that several requests share: short prompts pass long ones, long ones progress, and one alone has everything."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.messages import SetLimits
from quire.scheduler.scheduler import SHARING_SECONDS
from tests.examples import examples
from tests.scheduler.driver import Driver, request

SHARED = 16


def driver(**arguments: Any) -> Driver:
    plain: dict[str, Any] = {
        "num_blocks": 2000,
        "max_num_batched_tokens": 256,
        "max_model_len": 2100,
        "max_shared_prefill_tokens": SHARED,
        "enable_prefix_caching": False,
    }
    return Driver(**(plain | arguments))


def rows(run: Driver) -> dict[str, int]:
    """Tokens of each request in the last step."""
    batch = run.batches[-1]
    return dict(zip(batch.request_ids, batch.num_scheduled_tokens, strict=True))


def test_a_prompt_alone_has_the_whole_budget() -> None:
    now = 0.0
    run = driver(clock=lambda: now)
    run.add(request("long", range(700)))
    run.step()
    assert rows(run) == {"long": 256}
    run.add(request("other", [1], max_tokens=1))
    run.step()
    assert rows(run) == {"long": SHARED - 1, "other": 1}
    now = SHARING_SECONDS - 1
    run.step()
    assert rows(run) == {"long": SHARED}, "whoever was there may come again"
    now = SHARING_SECONDS
    run.step()
    assert rows(run) == {"long": 256}


def test_prompts_leave_room_beside_decodes_too() -> None:
    run = driver()
    run.add(request("decodes", range(4), max_tokens=9))
    run.step()
    run.add(request("long", range(600)))
    run.step()
    assert rows(run) == {"decodes": 1, "long": SHARED}


def test_a_step_holds_tokens_of_several_prompts() -> None:
    run = driver()
    run.add(request("long", range(600)))
    run.add(request("middle", range(100)))
    run.step()
    assert rows(run) == {"long": SHARED // 2, "middle": SHARED // 2}
    run.add(request("short", range(5)))
    run.step()
    assert rows(run) == {"short": 5, "middle": 3, "long": 8}, "who lacks the fewest tokens has the first turn"


@pytest.mark.parametrize("num_long", [1, 4, 40])
def test_a_short_prompt_waits_for_no_long_ones_rest(num_long: int) -> None:
    run = driver(max_num_seqs=64, num_blocks=30_000)
    for i in range(num_long):
        run.add(request(f"long{i}", range(2000)))
    run.step()
    run.add(request("short", range(20), max_tokens=2))
    run.step()
    run.step()
    assert not run.tokens("short")
    run.step()
    assert run.tokens("short"), "20 tokens at 8 a step take three steps"


def test_short_ones_in_a_row_do_not_stop_the_long_one() -> None:
    run = driver()
    run.add(request("long", range(400), max_tokens=1))
    run.step()
    for i in range(30):
        run.add(request(f"short{i}", range(30), max_tokens=1))
        if not run.tokens("long"):
            run.step()
            assert rows(run)["long"] >= SHARED // 2
    assert run.tokens("long")


def test_of_equal_prompts_the_oldest_has_everything() -> None:
    """They end in the order in which they came, none later than it would have ended in order."""
    run = driver()
    for i in range(4):
        run.add(request(f"r{i}", range(40), max_tokens=1))
    ends: dict[str, int] = {}
    for step in range(20):
        if run.core.has_work():
            ends |= {delta.request_id: step + 1 for delta in run.step() if delta.finish_reason}
    assert list(ends) == ["r0", "r1", "r2", "r3"]
    # 40 tokens are two and a half steps; the last one is alone once the third has ended.
    assert [ends[f"r{i}"] for i in range(3)] == [3, 5, 8]


def test_nobody_overtakes_a_prompt_that_waits_for_blocks_once_it_is_the_oldest() -> None:
    run = driver(num_blocks=16, block_size=4, max_model_len=64)
    run.add(request("decodes", range(24), max_tokens=20))
    run.step()
    run.add(request("large", range(44), max_tokens=2))
    run.add(request("short", range(4), max_tokens=2))
    while run.tokens("decodes") == [] or run.core.has_work():
        run.step()
        if not run.tokens("large"):
            assert "short" not in rows(run) or "large" in rows(run), "short overtook large"
    run.check_outputs()


def test_an_overtaken_prompt_comes_before_a_short_one_that_runs() -> None:
    """Once nothing older is left, it is the oldest, though it waits and younger ones run."""
    run = driver()
    run.add(request("old", range(300), max_tokens=1))
    run.step()
    run.add(request("large", range(400), max_tokens=1))
    run.add(request("younger", range(200), max_tokens=1))
    run.step()
    assert rows(run) == {"old": SHARED}, "old lacks the fewest"
    run.run(lambda index: None)
    firsts = {}
    for index, batch in enumerate(run.batches):
        for name in batch.request_ids:
            firsts.setdefault(name, index)
    ends = {name: max(i for i, b in enumerate(run.batches) if name in b.request_ids) for name in firsts}
    assert firsts["large"] <= ends["old"] + 1
    run.check_outputs()


def test_nobody_overtakes_a_preempted_request_beside_an_older_prompt() -> None:
    run = driver()
    run.add(request("long", range(600)))
    run.add(request("preempted", range(8), max_tokens=9))
    run.step()
    run.scheduler.preempt_last()
    run.add(request("short", range(2)))
    run.step()
    assert rows(run) == {"long": SHARED}
    run.run()
    run.check_outputs()


def test_nobody_overtakes_a_preempted_request_whose_results_are_on_their_way() -> None:
    run = driver(depth=2)
    run.add(request("long", range(600)))
    run.add(request("preempted", range(8), max_tokens=9))
    run.step()
    run.scheduler.preempt_last()
    run.add(request("short", range(2)))
    batch = run.scheduler.schedule()
    assert batch is not None
    assert batch.request_ids == ["long"]


def test_a_long_prompt_whose_beginning_is_cached_is_short() -> None:
    """A chat that goes on lacks its last question only."""
    run = driver(enable_prefix_caching=True)
    history = [7 * i % 50 for i in range(400)]
    run.run_all(request("before", history, max_tokens=1))
    run.add(request("long", range(600)))
    run.add(request("next", range(1000)))
    run.step()
    run.add(request("goes on", [*history, 1, 2, 3], max_tokens=1))
    run.step()
    assert rows(run)["goes on"] == 3
    run.run()
    run.check_outputs()


def test_urgent_prompts_do_not_wait_for_short_ones() -> None:
    run = driver(policy="priority")
    run.add(request("running", range(300), priority=5))
    run.step()
    run.add(request("short", range(4), priority=5))
    run.add(request("urgent", range(100), priority=0))
    run.step()
    assert rows(run) == {"urgent": SHARED}


def test_forks_do_not_make_their_parent_share() -> None:
    """They wait for its prompt: the sooner it is computed, the better for them."""
    now = 0.0
    run = driver(clock=lambda: now)
    run.add(request("parent", range(600)))
    run.add(request("fork", range(600), seed=5, fork_of="parent"))
    run.step()
    run.step()  # the fork was at the head of the queue, and waits elsewhere from now on
    now = 1.5 * SHARING_SECONDS
    run.step()
    assert rows(run) == {"parent": 256}
    run.run()
    run.check_outputs()


def test_the_threshold_bounds_each_prompt_of_a_shared_step() -> None:
    run = driver(long_prefill_token_threshold=6)
    for name in "abc":
        run.add(request(name, range(40)))
    run.step()
    assert rows(run) == {"a": 6, "b": 6, "c": 4}


def test_without_chunks_prompts_go_in_order() -> None:
    run = driver(enable_chunked_prefill=False)
    run.add(request("long", range(200)))
    run.add(request("short", range(60)))
    run.step()
    assert rows(run) == {"long": 200}


def test_sharing_moves_while_serving() -> None:
    run = driver()
    run.add(request("long", range(900)))
    run.add(request("other", range(900)))
    run.core.set_limits(SetLimits(max_shared_prefill_tokens=4))
    run.step()
    assert sum(rows(run).values()) == 4
    run.core.set_limits(SetLimits(max_shared_prefill_tokens=0))
    run.step()
    assert rows(run) == {"long": 256}, "in order, as in vLLM"


LENGTHS = st.one_of(st.integers(1, 12), st.integers(100, 200))
ARRIVALS = st.lists(st.tuples(LENGTHS, st.integers(1, 4), st.integers(0, 6)), min_size=2, max_size=14)


@settings(max_examples=examples(100))
@given(arrivals=ARRIVALS, depth=st.integers(1, 2), seats=st.integers(1, 6), num_blocks=st.sampled_from([52, 70, 400]))
def test_the_oldest_prompt_always_progresses(
    arrivals: list[tuple[int, int, int]], depth: int, seats: int, num_blocks: int
) -> None:
    """Whatever arrives, the oldest running prompt gets half of each shared step, or all that it lacks."""
    run = driver(max_num_seqs=seats, num_blocks=num_blocks, depth=depth, max_model_len=208)

    def step() -> None:
        num_before = len(run.batches)
        lacking = {r.sequence: r.num_tokens - r.num_computed_tokens for r in run.scheduler._running}
        run.step()
        if len(run.batches) == num_before:
            return
        batch = run.batches[-1]
        lacking |= {int(new.request_id[1:]): len(new.token_ids) for new in batch.new_rows}
        preempted = set(batch.removed_request_ids)
        prompts = {index: count for index, count in lacking.items() if count > 1 and f"r{index}" not in preempted}
        if prompts:
            oldest = min(prompts)
            assert rows(run).get(f"r{oldest}", 0) >= min(prompts[oldest], SHARED // 2)

    for index, (length, max_tokens, pause) in enumerate(arrivals):
        run.add(request(f"r{index}", [index] * length, max_tokens))
        for _ in range(pause):
            step()
    while run.core.has_work():
        step()
    run.check_outputs()


def test_who_crosses_the_border_of_longrope_holds_up_nobody() -> None:
    """It is computed again from the beginning, beside an older long prompt, and others are admitted meanwhile."""
    run = driver(rope_switches_after=40)
    run.add(request("long", range(2000)))
    run.add(request("crosses", range(38), max_tokens=12))
    while len(run.tokens("crosses")) < 3:
        run.step()
    run.add(request("short", range(5), max_tokens=2))
    for _ in range(40):
        run.step()
    assert len(run.tokens("short")) == 2
    assert len(run.tokens("crosses")) == 12
    assert not run.tokens("long")
