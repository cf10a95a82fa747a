"""Prints the cost of a scheduling step: schedule() and update() of decode rows and of admission, in microseconds.

    python benchmarks/scheduler.py [--rows 256] [--steps 400]

The target at 256 running requests is well under 1 ms of one core for schedule() and update() together.
"""

from __future__ import annotations

import argparse
import statistics
import time

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.schedule import ScheduledBatch, StepResult
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 512


def make_scheduler(num_rows: int, num_steps: int) -> Scheduler:
    num_tokens = PROMPT_TOKENS + num_steps + 2
    pool = BlockPool(2 * num_rows * (num_tokens // BLOCK_SIZE + 1), BLOCK_SIZE)
    limits = SchedulerLimits(num_rows, num_rows * PROMPT_TOKENS, num_tokens)
    return Scheduler(limits, KVCacheManager(pool))


def add_requests(scheduler: Scheduler, num_rows: int, max_tokens: int, name: str) -> None:
    """Add requests whose prompts share nothing, so that the time includes the hash of every block."""
    params = SamplingParams(max_tokens=max_tokens)
    for i in range(num_rows):
        prompt = [(i * 7919 + j) % 32000 for j in range(PROMPT_TOKENS)]
        scheduler.add(Request(f"{name}-{i}", prompt, params, max_tokens, frozenset({32001})))


def answer(batch: ScheduledBatch) -> StepResult:
    return StepResult(batch.step_id, [[7] for _ in batch.request_ids])


def measure(scheduler: Scheduler, num_steps: int) -> tuple[list[float], list[float]]:
    """The seconds of each schedule() and of each update() of the next steps."""
    schedule_times, update_times = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        assert batch is not None
        result = answer(batch)
        answered = time.perf_counter()
        scheduler.update(batch, result)
        schedule_times.append(scheduled - start)
        update_times.append(time.perf_counter() - answered)
    return schedule_times, update_times


def report(name: str, schedule_times: list[float], update_times: list[float]) -> None:
    both = sorted(a + b for a, b in zip(schedule_times, update_times, strict=True))
    print(
        f"{name:<28} schedule {1e6 * statistics.median(schedule_times):7.0f} us   update "
        f"{1e6 * statistics.median(update_times):7.0f} us   both: median {1e6 * statistics.median(both):7.0f} us, "
        f"p99 {1e6 * both[int(0.99 * (len(both) - 1))]:7.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    scheduler = make_scheduler(args.rows, args.steps)
    start = time.perf_counter()
    add_requests(scheduler, args.rows, args.steps + 1, "a")
    seconds = time.perf_counter() - start
    print(f"{args.rows} rows, prompts of {PROMPT_TOKENS} tokens, blocks of {BLOCK_SIZE}")
    print(f"{'add, with the prompt hash':<28} {1e6 * seconds / args.rows:7.1f} us per request")
    report("prefill, all rows in a step", *measure(scheduler, 1))
    report("decode", *measure(scheduler, args.steps - 1))
    report("decode, all rows finish", *measure(scheduler, 1))
    add_requests(scheduler, args.rows, 2, "b")
    report("prefill, cached prompts", *measure(scheduler, 1))


if __name__ == "__main__":
    main()
