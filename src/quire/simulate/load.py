"""Sends requests to an engine core on a virtual clock, as measure/load.py sends them to a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.core import EngineCore
from quire.measure.load import Outcome, Run
from quire.messages import AddRequest, RequestDelta
from quire.sampling_params import SamplingParams
from quire.schedule import StepRecord
from quire.simulate.executor import VirtualClock

PARAMS = SamplingParams()  # how a token is sampled changes no schedule


@dataclass(frozen=True)
class Prompt:
    """A request to send: the ids of its prompt, and how many tokens its answer has."""

    token_ids: list[int]
    output_len: int


@dataclass
class Totals:
    """What the steps of an engine did together."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_preemptions += record.num_preemptions
        self.prefix_cache_queries += record.prefix_cache_queries
        self.prefix_cache_hits += record.prefix_cache_hits


@dataclass(slots=True)
class _Sent:
    """A request in flight, and when its last token came."""

    outcome: Outcome
    last_time: float


@dataclass
class Client:
    """Who sends to one engine, load after load.

    Attributes:
        clock: the one that `core` and its executor read.
    """

    core: EngineCore
    clock: VirtualClock
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
        """Send every request at its time (seconds after now, not falling) until all have ended.

        Args:
            max_concurrency: a request that comes while so many are in flight waits in the client.
            on_done: called after each request.
        """
        core, clock, start = self.core, self.clock, self.clock.now
        outcomes = [Outcome(len(prompt.token_ids)) for prompt in prompts]
        in_flight: dict[str, _Sent] = {}
        coming, waiting = deque(range(len(prompts))), deque[int]()

        def send(index: int, now: float) -> None:
            request_id, outcome = str(self.num_sent), outcomes[index]
            self.num_sent += 1
            outcome.start_time, outcome.queue_time = now, now - (start + times[index])
            in_flight[request_id] = _Sent(outcome, now)
            prompt = prompts[index]
            core.add(AddRequest(request_id, prompt.token_ids, PARAMS, prompt.output_len))

        def arrive() -> None:
            while coming and start + times[coming[0]] <= clock.now:
                index = coming.popleft()
                if max_concurrency is None or len(in_flight) < max_concurrency:
                    send(index, start + times[index])
                else:
                    waiting.append(index)

        while coming or in_flight:
            if not in_flight:
                clock.wait_until(start + times[coming[0]])
            arrive()
            deltas = core.step()
            if core.last_record is not None:
                self.totals.add(core.last_record)
            arrive()  # while the step ran: places that it frees are free from its end on
            for delta in deltas:
                sent = in_flight[delta.request_id]
                _note(sent, delta, clock.now)
                if delta.finish_reason is not None:
                    sent.outcome.success = not sent.outcome.error
                    del in_flight[delta.request_id]
                    on_done()
                    if waiting:
                        send(waiting.popleft(), clock.now)
        return Run(outcomes, clock.now - start, client_cpu_seconds=0.0)


def _note(sent: _Sent, delta: RequestDelta, now: float) -> None:
    """What a step gave to a request."""
    outcome = sent.outcome
    if delta.error is not None:
        outcome.error = f"{delta.error_code or 'error'}: {delta.error}"
        return
    if outcome.output_tokens:
        outcome.itl.append(now - sent.last_time)
    else:
        outcome.ttft = now - outcome.start_time
        outcome.cached_tokens = delta.num_cached_tokens
    outcome.output_tokens += len(delta.token_ids)
    sent.last_time = now
    outcome.latency = now - outcome.start_time
