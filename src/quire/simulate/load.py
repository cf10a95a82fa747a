"""Sends requests to an engine core on a virtual clock, in the way of measure/load.py with a server."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cost.overhead import Overhead
from quire.engine.core import EngineCore
from quire.errors import QueueFullError
from quire.frontend.admission import Admission
from quire.measure.load import Outcome, Run
from quire.messages import AddRequest, RequestDelta
from quire.sampling_params import SamplingParams
from quire.schedule import StepRecord
from quire.simulate.executor import VirtualClock

PARAMS = SamplingParams()  # sampling parameters change no schedule


@dataclass(frozen=True)
class Prompt:
    """A request to send: the token ids of its prompt, and the length of its answer."""

    token_ids: list[int]
    output_len: int


@dataclass
class Totals:
    """Sums over the steps of an engine."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    seconds_by_bound: dict[str, float] = field(default_factory=dict)  # of the steps that a resource takes most of

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_preemptions += record.num_preemptions
        self.prefix_cache_queries += record.prefix_cache_queries
        self.prefix_cache_hits += record.prefix_cache_hits
        by_bound = self.seconds_by_bound
        by_bound[record.bound] = by_bound.get(record.bound, 0.0) + record.predicted_seconds


@dataclass(slots=True)
class _Sent:
    """A request in flight, and the time of its last token."""

    outcome: Outcome
    last_time: float


@dataclass
class Client:
    """Sends to one engine, load after load.

    Attributes:
        clock: the clock of `core` and its executor.
        door: refuses requests like the front end of a server.
        overhead: what the front end takes for a request. All of it counts before the request reaches the engine; None:
            nothing.
    """

    core: EngineCore
    clock: VirtualClock
    door: Admission = field(default_factory=Admission)
    overhead: Overhead | None = None
    totals: Totals = field(default_factory=Totals)
    num_sent: int = 0

    def run(
        self,
        prompts: Sequence[Prompt],
        times: Sequence[float],
        *,
        max_concurrency: int | None = None,
        on_done: Callable[[], object] = lambda: None,
    ) -> Run:
        """Send every request at its time (seconds after now, in ascending order) until all have ended.

        Args:
            max_concurrency: most requests in flight; others wait in the client.
            on_done: called after each request.
        """
        core, clock, door, start = self.core, self.clock, self.door, self.clock.now
        outcomes = [Outcome(len(prompt.token_ids)) for prompt in prompts]
        in_flight: dict[str, _Sent] = {}
        coming, waiting = deque(range(len(prompts))), deque[int]()
        entering: list[tuple[float, int]] = []  # a heap of (time, index) of requests on their way to the engine

        def has_place() -> bool:
            return max_concurrency is None or len(in_flight) + len(entering) < max_concurrency

        def send(index: int, now: float) -> None:
            outcome = outcomes[index]
            outcome.start_time, outcome.queue_time = now, now - (start + times[index])
            overhead = 0.0 if self.overhead is None else self.overhead.seconds(outcome.prompt_len)
            heapq.heappush(entering, (now + overhead, index))

        def enter(index: int) -> None:
            request_id, outcome, prompt = str(self.num_sent), outcomes[index], prompts[index]
            self.num_sent += 1
            if not in_flight:
                door.on_idle()
            try:
                door.check(len(prompt.token_ids))
            except QueueFullError as error:
                outcome.error = f"{error.code}: {error.message}"
                on_done()
                return
            in_flight[request_id] = _Sent(outcome, outcome.start_time)
            core.add(AddRequest(request_id, prompt.token_ids, PARAMS, prompt.output_len))
            door.on_sent(request_id, len(prompt.token_ids), 1)

        def arrive() -> None:
            while coming and start + times[coming[0]] <= clock.now:
                index = coming.popleft()
                if has_place():
                    send(index, start + times[index])
                else:
                    waiting.append(index)
            while entering and entering[0][0] <= clock.now:
                enter(heapq.heappop(entering)[1])

        while coming or waiting or entering or in_flight:
            while waiting and has_place():
                send(waiting.popleft(), clock.now)
            if not in_flight:
                arrivals = [start + times[coming[0]]] if coming else []
                clock.wait_until(min(arrivals + [time for time, _ in entering[:1]]))
            arrive()
            if not in_flight:
                continue
            deltas = core.step()
            arrive()  # requests that came during the step: its results are not known yet, and it has freed no place
            if core.last_record is not None:
                self.totals.add(core.last_record)
                door.on_step(core.last_record)
            self._take_in(deltas, in_flight, on_done)
        return Run(outcomes, clock.now - start, client_cpu_seconds=0.0)

    def _take_in(
        self, deltas: Sequence[RequestDelta], in_flight: dict[str, _Sent], on_done: Callable[[], object]
    ) -> None:
        """Give the results of a step to their requests. Requests that have ended leave `in_flight`."""
        num_ended = 0
        for delta in deltas:
            sent = in_flight[delta.request_id]
            if _note(sent, delta, self.clock.now):
                self.door.on_first_token(delta.request_id, sent.outcome.ttft)
            if delta.finish_reason is not None:
                sent.outcome.success = not sent.outcome.error
                num_ended += sent.outcome.success
                del in_flight[delta.request_id]
                self.door.on_left(delta.request_id)
                on_done()
        self.door.on_answers(num_ended)


def _note(sent: _Sent, delta: RequestDelta, now: float) -> bool:
    """Record a step's tokens for a request -> whether its first token was among them."""
    outcome = sent.outcome
    if delta.error is not None:
        outcome.error = f"{delta.error_code or 'error'}: {delta.error}"
        return False
    is_first = not outcome.output_tokens
    if is_first:
        outcome.ttft = now - outcome.start_time
        outcome.cached_tokens = delta.num_cached_tokens
    else:
        outcome.itl.append(now - sent.last_time)
    outcome.output_tokens += len(delta.token_ids)
    sent.last_time = now
    outcome.latency = now - outcome.start_time
    return is_first
