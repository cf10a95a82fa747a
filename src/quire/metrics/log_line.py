"""The statistics line of the log, in vLLM's words, from the step records."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from quire.logs import get_logger
from quire.schedule import StepRecord

logger = get_logger(__name__)

# The hit rate covers the prompts of the last steps with a lookup.
HIT_RATE_STEPS = 1000


class DraftCounts:
    """Counts of the drafts of some steps."""

    def __init__(self) -> None:
        self._num_drafts = self._num_tokens = self._num_accepted = 0
        self._per_position: list[int] = []

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self._num_drafts += record.num_drafts
        self._num_tokens += record.num_draft_tokens
        self._num_accepted += record.num_accepted_tokens
        lacking = len(record.accepted_per_position) - len(self._per_position)
        self._per_position += [0] * lacking
        for position, count in enumerate(record.accepted_per_position):
            self._per_position[position] += count

    def parts(self, seconds: float) -> list[str]:
        """Parts of the statistics line in vLLM's words, because scripts grep the first; none without drafts."""
        if not self._num_drafts:
            return []
        shares = (f"{count / self._num_drafts:.3f}" for count in self._per_position)
        return [
            f"SpecDecoding metrics: Mean acceptance length: {1 + self._num_accepted / self._num_drafts:.2f}",
            f"Accepted throughput: {self._num_accepted / seconds:.2f} tokens/s",
            f"Drafted throughput: {self._num_tokens / seconds:.2f} tokens/s",
            f"Accepted: {self._num_accepted} tokens",
            f"Drafted: {self._num_tokens} tokens",
            f"Per-position acceptance rate: {', '.join(shares)}",
            f"Avg Draft acceptance rate: {100 * self._num_accepted / max(self._num_tokens, 1):.1f}%",
        ]


class StatsLine:
    """Sums up the steps since the last line."""

    def __init__(self, engine: str = "000", device: str = "CPU", now: float | None = None) -> None:
        self._prefix, self.device = f"Engine {engine}", device
        self._last_time = time.monotonic() if now is None else now
        self._num_prompt = self._num_generated = self._num_preemptions = 0
        self._drafts = DraftCounts()
        self._lookups: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_STEPS)
        self._record: StepRecord | None = None
        self._was_idle = True

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self._record = record
        self._num_prompt += record.num_prefill_tokens
        self._num_generated += record.num_sampled_tokens
        self._num_preemptions += record.num_preemptions
        if record.num_drafts:
            self._drafts.add(record)
        if record.prefix_cache_queries:
            self._lookups.append((record.prefix_cache_queries, record.prefix_cache_hits))

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The hit rate of recent prompts, 0 to 1."""
        queries = sum(queried for queried, _ in self._lookups)
        return sum(hit for _, hit in self._lookups) / max(queries, 1)

    def set_idle(self) -> None:
        """Reset the gauges: no request is left, and no further step will do it."""
        if self._record is not None:
            self._record = msgspec.structs.replace(
                self._record, num_running=0, num_waiting=0, num_deferred=0, num_blocks_in_use=0
            )

    def take(self, now: float) -> tuple[int, str] | None:
        """Log level and text for the time since the last call; None before the first step.

        The level is INFO during work and once after it, and DEBUG when idle. `now`: monotonic seconds.
        """
        seconds, self._last_time = max(now - self._last_time, 1e-9), now
        record = self._record
        if record is None:
            return None
        is_idle = not (self._num_prompt or self._num_generated)
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        self._was_idle = is_idle
        parts = [
            f"Avg prompt throughput: {self._num_prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._num_generated / seconds:.1f} tokens/s",
            f"Running: {record.num_running} reqs",
            f"Waiting: {record.num_waiting - record.num_deferred} reqs",
            *([f"Deferred: {record.num_deferred} reqs"] if record.num_deferred else []),
            *([f"Preemptions: {self._num_preemptions}"] if self._num_preemptions else []),
            f"{self.device} KV cache usage: {100 * record.num_blocks_in_use / max(record.num_blocks_total, 1):.1f}%",
            f"Prefix cache hit rate: {100 * self.prefix_cache_hit_rate:.1f}%",
            *self._drafts.parts(seconds),
        ]
        self._drafts = DraftCounts()
        self._num_prompt = self._num_generated = self._num_preemptions = 0
        return level, f"{self._prefix}: " + ", ".join(parts)


async def log_forever(lines: Sequence[StatsLine], interval: float) -> None:
    """Log the lines, one for each engine, every `interval` seconds until cancelled."""
    while True:
        await asyncio.sleep(interval)
        for line in lines:
            if (taken := line.take(time.monotonic())) is not None:
                logger.log(*taken)
