"""The statistics line: vLLM's words, right numbers, quiet when idle."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from quire.metrics import log_line
from quire.metrics.log_line import StatsLine
from quire.schedule import StepRecord


def record(**fields: Any) -> StepRecord:
    zeros = {name: 0 for name in StepRecord.__struct_fields__ if not name.endswith("_seconds")}
    return StepRecord(**{**zeros, **fields})


def test_numbers():
    line = StatsLine(now=100.0)
    line.add(record(num_prefill_tokens=400, num_sampled_tokens=1, num_running=1, num_blocks_total=200,
                    prefix_cache_queries=400, prefix_cache_hits=100))  # fmt: skip
    line.add(record(num_sampled_tokens=24, num_running=3, num_waiting=2, num_blocks_in_use=25, num_blocks_total=200))
    assert line.take(110.0) == (
        logging.INFO,
        "Engine 000: Avg prompt throughput: 40.0 tokens/s, Avg generation throughput: 2.5 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, CPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%",
    )


def test_preemptions_show_when_there_are_some():
    line = StatsLine("001", "GPU", now=0.0)
    line.add(record(num_sampled_tokens=1, num_preemptions=4))
    taken = line.take(10.0)
    assert taken is not None
    assert "Engine 001: " in taken[1]
    assert "Waiting: 0 reqs, Preemptions: 4, GPU KV cache usage: 0.0%" in taken[1]


def test_drafts_show_when_there_are_some():
    line = StatsLine(now=0.0)
    line.add(record(num_sampled_tokens=5, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3,
                    accepted_per_position=(2, 1)))  # fmt: skip
    line.add(record(num_sampled_tokens=3, num_drafts=2, num_draft_tokens=4, num_accepted_tokens=1,
                    accepted_per_position=(1,)))  # fmt: skip
    taken = line.take(10.0)
    assert taken is not None
    assert taken[1].endswith(
        "hit rate: 0.0%, SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 0.40 tokens/s, "
        "Drafted throughput: 1.00 tokens/s, Accepted: 4 tokens, Drafted: 10 tokens, "
        "Per-position acceptance rate: 0.750, 0.250, Avg Draft acceptance rate: 40.0%"
    )
    line.add(record(num_sampled_tokens=1))
    taken = line.take(20.0)
    assert taken is not None
    assert "SpecDecoding" not in taken[1], "none since the last line"


def test_deferred_requests_show_when_there_are_some_and_are_not_among_those_waiting_for_room():
    line = StatsLine(now=0.0)
    line.add(record(num_sampled_tokens=1, num_running=1, num_waiting=3, num_deferred=2, num_preemptions=1))
    taken = line.take(10.0)
    assert taken is not None
    assert "Running: 1 reqs, Waiting: 1 reqs, Deferred: 2 reqs, Preemptions: 1, CPU KV cache usage" in taken[1]
    line.set_idle()
    taken = line.take(20.0)
    assert taken is not None
    assert "Running: 0 reqs, Waiting: 0 reqs, CPU KV cache usage" in taken[1]


def test_idle_is_debug_after_one_last_line():
    line = StatsLine(now=0.0)
    assert line.take(10.0) is None
    line.add(record(num_sampled_tokens=5))
    levels = [taken[0] for now in (20.0, 30.0, 40.0) if (taken := line.take(now)) is not None]
    assert levels == [logging.INFO, logging.INFO, logging.DEBUG]
    line.add(record(num_sampled_tokens=5))
    taken = line.take(50.0)
    assert taken is not None
    assert taken[0] == logging.INFO
    assert "generation throughput: 0.5 tokens/s" in taken[1]


def test_an_abort_of_the_last_request_leaves_nothing_running():
    line = StatsLine(now=0.0)
    line.add(record(num_sampled_tokens=5, num_running=1, num_blocks_in_use=3, num_blocks_total=6))
    line.set_idle()
    taken = line.take(1.0)
    assert taken is not None
    assert "Running: 0 reqs, Waiting: 0 reqs, CPU KV cache usage: 0.0%" in taken[1]


def test_hit_rate_speaks_of_recent_steps(monkeypatch):
    monkeypatch.setattr(log_line, "HIT_RATE_STEPS", 2)
    line = StatsLine(now=0.0)
    for hits in (0, 10, 10):
        line.add(record(prefix_cache_queries=10, prefix_cache_hits=hits))
    taken = line.take(1.0)
    assert taken is not None
    assert taken[1].endswith("Prefix cache hit rate: 100.0%")


async def test_log_forever(monkeypatch):
    logged = []
    monkeypatch.setattr(log_line.logger, "log", lambda level, text: logged.append((level, text)))
    line = StatsLine()
    line.add(record(num_sampled_tokens=1))
    task = asyncio.create_task(log_line.log_forever([line], 0.001))
    while not logged:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert logged[0][0] == logging.INFO
    assert logged[0][1].startswith("Engine 000: Avg prompt throughput: ")
