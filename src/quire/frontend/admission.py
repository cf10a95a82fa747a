"""The door: while the engine's queue is full, requests are refused before they are tokenized, and told when to retry.

Predicted wait of a newcomer, by Little's law: W waiting requests and the newcomer leave the queue at the rate at which
running ones end, R running over S seconds of mean service (scheduled to last token) of the last SERVICES_REMEMBERED
requests: (W + 1) * S / R.

Refusing costs the engine its cores where clients ask again at once. So it has a pace: up to FREE_REFUSALS at once,
then REFUSALS_PER_SECOND, each of them told when its turn comes. Turns come together, every REFUSAL_TURN_SECONDS: this
process takes a core from the engine once for all of them. Nobody waits longer than MAX_REFUSAL_DELAY_SECONDS: where
more clients ask than are told in that time, the pace is exceeded.
"""

from __future__ import annotations

import math
from collections import deque

from quire.errors import QueueFullError
from quire.messages import EngineReady
from quire.schedule import StepRecord

SERVICES_REMEMBERED = 64
FIRST_SERVICE_SECONDS = 1.0  # assumed until the first request has ended
MAX_RETRY_SECONDS = 600
# benchmarks/results/epyc-zen3-2core/overload_users_2026-11-22.md
REFUSALS_PER_SECOND = 100
FREE_REFUSALS = 100
REFUSAL_TURN_SECONDS = 0.1
MAX_REFUSAL_DELAY_SECONDS = 10.0


class Admission:
    """What an engine last said of its queue, what was sent to it since, and how long requests have taken lately."""

    def __init__(self) -> None:
        self.max_num_queued_reqs: int | None = None
        self._num_waiting = self._num_running = 0
        self._num_sent = 0  # since the last step
        self._services: deque[float] = deque(maxlen=SERVICES_REMEMBERED)

    def on_ready(self, ready: EngineReady) -> None:
        """The limit that the engine resolved."""
        setting = ready.resolved.get("max_num_queued_reqs")
        value = setting.get("value") if isinstance(setting, dict) else None
        self.max_num_queued_reqs = value if isinstance(value, int) else None

    def on_step(self, record: StepRecord) -> None:
        """The engine did a step."""
        self._num_waiting, self._num_running, self._num_sent = record.num_waiting, record.num_running, 0

    def on_sent(self, count: int) -> None:
        """So many requests are on their way to the engine: they wait there until its next step."""
        self._num_sent += count

    def on_finished(self, service_seconds: float) -> None:
        """A request ended `service_seconds` after it was first scheduled."""
        self._services.append(max(service_seconds, 0.0))

    def on_idle(self) -> None:
        """No request is left; no step will say so."""
        self._num_waiting = self._num_running = self._num_sent = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting + self._num_sent

    @property
    def predicted_wait_seconds(self) -> float:
        """Until a request that came now would be scheduled; the module says how."""
        mean = sum(self._services) / len(self._services) if self._services else FIRST_SERVICE_SECONDS
        return (self.num_waiting + 1) * mean / max(self._num_running, 1)

    @property
    def retry_after_seconds(self) -> int:
        """The predicted wait as whole seconds for a Retry-After header: at least 1."""
        return min(max(math.ceil(self.predicted_wait_seconds), 1), MAX_RETRY_SECONDS)

    def check(self) -> None:
        """Raise QueueFullError if the queue is full as far as is known here. The engine checks again."""
        limit = self.max_num_queued_reqs
        if limit and self.num_waiting >= limit:
            error = QueueFullError(
                "The waiting queue is full",
                value=self.num_waiting,
                expected=f"fewer than {limit} waiting requests (max_num_queued_reqs)",
                fix=f"Retry in {self.retry_after_seconds} s, or raise --max-num-queued-reqs",
            )
            error.retry_after_seconds = self.retry_after_seconds
            raise error


class Refusals:
    """The pace of refusals, of all engines together: it is this process that refuses."""

    def __init__(self) -> None:
        self._next = 0.0  # the time of the first refusal that is not free, as if none had been

    def delay(self, now: float) -> float:
        """Seconds until the turn of a refusal at `now`, in monotonic seconds; counts it."""
        earliest = now - FREE_REFUSALS / REFUSALS_PER_SECOND
        self._next = max(self._next, earliest) + 1 / REFUSALS_PER_SECOND
        latest = now + MAX_REFUSAL_DELAY_SECONDS - REFUSAL_TURN_SECONDS  # its turn may come that much later
        self._next = min(self._next, latest)
        if self._next <= now:
            return 0.0
        return math.ceil(self._next / REFUSAL_TURN_SECONDS) * REFUSAL_TURN_SECONDS - now
