"""The door: while the engine's queue is full, requests are refused before they are tokenized, and told when to retry.

Predicted wait of a newcomer, by Little's law: W waiting requests and the newcomer leave the queue at the rate at which
running ones end, R running over S seconds of mean service (scheduled to last token) of the last SERVICES_REMEMBERED
requests: (W + 1) * S / R.
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


class Admission:
    """What the engine last said of its queue, and how long requests have taken lately."""

    def __init__(self) -> None:
        self.max_num_queued_reqs: int | None = None
        self._num_waiting = self._num_running = 0
        self._services: deque[float] = deque(maxlen=SERVICES_REMEMBERED)

    def on_ready(self, ready: EngineReady) -> None:
        """The limit that the engine resolved."""
        setting = ready.resolved.get("max_num_queued_reqs")
        value = setting.get("value") if isinstance(setting, dict) else None
        self.max_num_queued_reqs = value if isinstance(value, int) else None

    def on_step(self, record: StepRecord) -> None:
        """The engine did a step."""
        self._num_waiting, self._num_running = record.num_waiting, record.num_running

    def on_finished(self, service_seconds: float) -> None:
        """A request ended `service_seconds` after it was first scheduled."""
        self._services.append(max(service_seconds, 0.0))

    def on_idle(self) -> None:
        """No request is left; no step will say so."""
        self._num_waiting = self._num_running = 0

    @property
    def predicted_wait_seconds(self) -> float:
        """Until a request that came now would be scheduled; the module says how."""
        mean = sum(self._services) / len(self._services) if self._services else FIRST_SERVICE_SECONDS
        return (self._num_waiting + 1) * mean / max(self._num_running, 1)

    @property
    def retry_after_seconds(self) -> int:
        """The predicted wait as whole seconds for a Retry-After header: at least 1."""
        return min(max(math.ceil(self.predicted_wait_seconds), 1), MAX_RETRY_SECONDS)

    def check(self) -> None:
        """Raise QueueFullError if the last step left the queue full. The engine checks again, with what came since."""
        limit = self.max_num_queued_reqs
        if limit and self._num_waiting >= limit:
            error = QueueFullError(
                "The waiting queue is full",
                value=self._num_waiting,
                expected=f"fewer than {limit} waiting requests (max_num_queued_reqs)",
                fix=f"Retry in {self.retry_after_seconds} s, or raise --max-num-queued-reqs",
            )
            error.retry_after_seconds = self.retry_after_seconds
            raise error
