"""Admission: a request that would wait too long is refused, if possible before tokenization, with a time to retry.

There are two reasons: the queue is full, or the predicted time to first token misses its target (--slo-ttft). The
prediction in seconds is the sum of three times: the step that runs, the wait, and the request's own prompt. The wait is
the longer one of two:

- The prompts before it: their tokens that are sent but not computed, times the time of a token (Pace, from the cost
  model), over the share of the steps' time that prompts get beside answers. If prompts and answers are slowed down
  alike (scheduler/pace.py), N equal prompts with the share f take N / f times as long as one alone, and answers
  1 / (1 - f) times. Both are equal if the answers are N + 1 times as slow as alone.
- A place in the batch, if max_num_seqs requests run. With R running requests, one ends every O / R steps. O is the
  number of steps that recent answers took: their tokens, without the drafts that held.

Tokens in the prefix cache take no time; their share is the recent one. If requests waited longer than predicted,
predictions are multiplied by a factor. The share --slo-attainment of requests stays within this factor. It moves with
every request whose prediction was not far below the target. The interval of a prediction has all steps at the same end
of theirs, as wide as that of the newest step.

Clients that ask again at once would take the engine's cores by refusals alone. So refusals have a pace: up to
FREE_REFUSALS at once, then REFUSALS_PER_SECOND. Each is sent in its turn. Turns come together every
REFUSAL_TURN_SECONDS, so that this process takes a core from the engine once for all of them. No client waits longer
than MAX_REFUSAL_DELAY_SECONDS: if too many clients ask, refusals are faster than their pace.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.errors import QueueFullError, TargetMissedError
from quire.frontend.router import Backlog
from quire.frontend.stats import Targets
from quire.messages import EngineReady, Pace, SetLimits
from quire.option import shown_duration
from quire.schedule import StepRecord

ANSWERS_REMEMBERED = 64
FIRST_ANSWER_TOKENS = 128  # the start counts as one ended answer of this length
RECENT_WEIGHT = 1 / 16  # the weight of the newest step
MAX_RETRY_SECONDS = 600
# The factor of predictions: its first value, its change by one request (of its logarithm), and its limits.
FIRST_FACTOR = 1.3
FACTOR_STEP = 0.1
FACTOR_BOUNDS = 0.5, 4.0
NEAR_TARGET = 0.25  # predictions below this share of the target do not move it
MIN_SHARE = 0.02  # the least share of a step for prompts, even if answers take long
# benchmarks/results/epyc-zen3-2core/overload_users_2026-11-22.md
REFUSALS_PER_SECOND = 100
FREE_REFUSALS = 100
REFUSAL_TURN_SECONDS = 0.1
MAX_REFUSAL_DELAY_SECONDS = 10.0


class _Sent(NamedTuple):
    """A prompt that has no first token yet: the number of its tokens that are probably not cached, and their time."""

    num_tokens: float
    seconds: float
    predicted_ttft: float  # the prediction before it is multiplied by the factor


class Admission:
    """The engine's last report of its queue and steps, the requests sent since then, and recent lengths of answers.

    Attributes:
        limits: the limits of the engine, by the names of SetLimits.
        targets: the targets of times among the limits.
        pace: the pace of the engine.
    """

    def __init__(self) -> None:
        self.limits: dict[str, float | None] = {}
        self.targets = Targets()
        self.pace = Pace(0.0, 0.0, 0.0, 0.0)
        self._num_waiting = self._num_running = 0
        self._num_sent = 0  # since the last step
        self._num_places = self._num_lanes = 1
        self._num_kv_tokens = 0  # the context that the last step read
        self._step_seconds = self._usual_step_seconds = self._answer_seconds = 0.0
        self._spread, self._bound = 1.0, ""  # of the newest step: see StepTime; 1: it has no interval
        self._cache_queries = self._cache_hits = 0.0
        self._answer_steps, self._num_ended = float(FIRST_ANSWER_TOKENS), 1.0  # of the recent past
        self._prompts: dict[str, _Sent] = {}
        self._prompt_tokens = self._prompt_seconds = self._computed_tokens = 0.0  # sums over the prompts
        self._factor = FIRST_FACTOR
        self._most_answer_times = 0.0

    def on_ready(self, ready: EngineReady) -> None:
        """Take the settings of an engine that is ready."""
        settings = {name: ready.resolved.get(name) for name in SetLimits.__struct_fields__}
        self.limits = {name: found.get("value") for name, found in settings.items() if isinstance(found, dict)}
        self.limits |= {
            "max_num_seqs": ready.max_num_seqs,
            "max_num_batched_tokens": ready.max_num_batched_tokens,
        }
        paced = ready.resolved.get("most_answer_times")
        self._most_answer_times = float(paced["value"]) if isinstance(paced, dict) else 0.0
        self.pace = ready.pace or self.pace
        self._num_lanes = ready.num_lanes
        self._num_places = ready.max_num_seqs * ready.num_lanes
        self._set_targets()

    def on_limits(self, limits: SetLimits) -> None:
        """Take limits that were changed."""
        given = {name: getattr(limits, name) for name in limits.__struct_fields__}
        self.limits |= {name: value for name, value in given.items() if value is not None}
        if limits.max_shared_prefill_tokens is not None:
            self._most_answer_times = 0.0  # as in the scheduler
        self._set_targets()

    def _set_targets(self) -> None:
        ttft, itl, attainment = (self.limits.get(name) for name in ("slo_ttft", "slo_itl", "slo_attainment"))
        self.targets = Targets(ttft or 0.0, itl or 0.0, attainment or Targets().attainment)

    def on_step(self, record: StepRecord) -> None:
        """Take the report of a step of the engine."""
        self._num_waiting, self._num_running, self._num_sent = record.num_waiting, record.num_running, 0
        self._num_kv_tokens = max(record.kv_tokens, default=0)
        self._answer_steps += record.num_sampled_tokens - record.num_accepted_tokens
        self._computed_tokens = min(self._computed_tokens + record.num_prefill_tokens, self._prompt_tokens)
        # If the step computed no prompt, waiting requests wait for blocks or for the end of an answer.
        is_full = record.num_waiting > record.num_deferred and not record.num_prefill_tokens
        most = int(self.limits.get("max_num_seqs") or 1) * self._num_lanes
        self._num_places = record.num_running if is_full else most
        pace = self.pace
        seconds = record.predicted_seconds + record.draft_seconds if record.predicted_seconds else record.step_seconds
        prompts = record.num_prefill_tokens * pace.per_prompt_token
        prompts += max(record.pairs, default=0) * pace.per_prompt_pair if record.num_prefill_tokens else 0.0
        if num_tokens := sum(lane.num_tokens for lane in record.lanes):  # the seconds are those of the busiest lane
            prompts *= max(lane.num_tokens for lane in record.lanes) / num_tokens
        self._answer_seconds = max(seconds - prompts, 0.0) if record.num_decode_tokens else 0.0
        if record.predicted_seconds:
            self._spread = max(record.predicted_high_seconds / record.predicted_seconds, 1.0)
            self._bound = record.bound
        self._step_seconds = seconds
        usual = self._usual_step_seconds or seconds
        self._usual_step_seconds = usual + RECENT_WEIGHT * (seconds - usual)
        if record.prefix_cache_queries:
            self._cache_queries += record.prefix_cache_queries - RECENT_WEIGHT * self._cache_queries
            self._cache_hits += record.prefix_cache_hits - RECENT_WEIGHT * self._cache_hits

    def on_sent(self, request_id: str, num_prompt_tokens: int, count: int) -> None:
        """Note that `count` continuations of one prompt were sent to the engine. They wait until its next step."""
        self._num_sent += count
        num_tokens = self._num_new(num_prompt_tokens)
        sent = _Sent(num_tokens, self.pace.prompt_seconds(num_tokens), self._predicted_ttft(num_prompt_tokens))
        self._prompts[request_id] = sent
        self._prompt_tokens += sent.num_tokens
        self._prompt_seconds += sent.seconds

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """Note that a request got its first token `seconds` after its arrival."""
        sent, target = self._prompts.get(request_id), self.targets.ttft
        if sent is not None and target and self._factor * sent.predicted_ttft > NEAR_TARGET * target:
            is_late = seconds > self._factor * sent.predicted_ttft
            step = FACTOR_STEP * (self.targets.attainment if is_late else self.targets.attainment - 1)
            low, high = FACTOR_BOUNDS
            self._factor = min(max(self._factor * math.exp(step), low), high)
        if sent is not None:
            self._computed_tokens = max(self._computed_tokens - sent.num_tokens, 0.0)
        self.on_left(request_id)

    def on_left(self, request_id: str) -> None:
        """Note that a request has ended or has its first token. Unknown ids are ignored."""
        if (sent := self._prompts.pop(request_id, None)) is None:
            return
        self._prompt_tokens -= sent.num_tokens
        self._prompt_seconds -= sent.seconds
        if not self._prompts:  # empty sums, without rounding errors
            self._prompt_tokens = self._prompt_seconds = 0.0
        self._computed_tokens = min(self._computed_tokens, self._prompt_tokens)

    def on_answers(self, num_ended: int) -> None:
        """Note that `num_ended` continuations ended in a step."""
        rest = (1 - 1 / ANSWERS_REMEMBERED) ** num_ended
        self._answer_steps, self._num_ended = rest * self._answer_steps, rest * self._num_ended + num_ended

    def on_idle(self) -> None:
        """Reset the predictions: no request is left, and no further step will do it."""
        self._num_waiting = self._num_running = self._num_sent = self._num_kv_tokens = 0
        self._step_seconds = self._answer_seconds = 0.0
        self._prompts.clear()
        self._prompt_tokens = self._prompt_seconds = self._computed_tokens = 0.0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting + self._num_sent

    def predicted_ttft(self, num_prompt_tokens: int) -> float:
        """The predicted seconds from now to the first token of a new request: see the module's docstring."""
        return self._factor * self._predicted_ttft(num_prompt_tokens)

    @property
    def retry_after_seconds(self) -> int:
        """The longest predicted wait of a new request in whole seconds, at least 1, for a Retry-After header.

        It is the high end of the interval, so that a client that waits so long finds room.
        """
        return _whole(self._spread * self.predicted_ttft(1))

    @property
    def recent_answers(self) -> tuple[float, float]:
        """The number of steps that recent answers took, and the number of these answers."""
        return self._answer_steps, self._num_ended

    def backlog(self, num_rows: int) -> Backlog:
        """The work that is left for the engine. `num_rows`: the number of continuations without an end."""
        num_kv_tokens = self._num_kv_tokens + self._prompt_tokens - self._computed_tokens
        return Backlog(self._prompts_left(), num_rows, max(self._num_places, 1), num_kv_tokens)

    def refusal(self, num_prompt_tokens: int = 1, waited: float = 0.0) -> QueueFullError | None:
        """The reason to refuse a request, as far as the front end knows. The engine checks its queue again.

        If there is no other request, it is accepted, because no later moment is better.

        Args:
            num_prompt_tokens: the number of prompt tokens; 1: it is not known yet.
            waited: the seconds since the arrival.

        Returns:
            QueueFullError: the queue is full. TargetMissedError: the first token would come too late. None: it is
            accepted.
        """
        limit, target = self.limits.get("max_num_queued_reqs"), self.targets.ttft
        if limit and self.num_waiting >= limit:
            error = QueueFullError(
                "The waiting queue is full",
                value=self.num_waiting,
                expected=f"fewer than {limit} waiting requests (max_num_queued_reqs)",
                fix=f"Retry in {self.retry_after_seconds} s{self._ends(self.predicted_ttft(1))}, or raise "
                "--max-num-queued-reqs",
            )
            error.retry_after_seconds = self.retry_after_seconds
            return error
        is_idle = not self.num_waiting + self._num_running
        if target and not is_idle and waited + (predicted := self.predicted_ttft(num_prompt_tokens)) > target:
            return self._late(waited, predicted, target)
        return None

    def check(self, num_prompt_tokens: int = 1, waited: float = 0.0) -> None:
        """Raise what `refusal` answers."""
        if (error := self.refusal(num_prompt_tokens, waited)) is not None:
            raise error

    def _late(self, waited: float, predicted: float, target: float) -> TargetMissedError:
        seconds = _whole(waited + self._spread * predicted - target)
        bound = f"; the newest step is bound by {self._bound}"
        error = TargetMissedError(
            f"The first token would come after {shown_duration(waited + predicted)}"
            f"{self._ends(predicted, waited, bound)}",
            expected=f"at most {shown_duration(target)} (slo_ttft)",
            fix=f"Retry in {seconds} s{self._ends(predicted, waited - target)}, shorten the prompt, or raise "
            "--slo-ttft",
        )
        error.retry_after_seconds = seconds
        return error

    def _ends(self, predicted: float, further: float = 0.0, bound: str = "") -> str:
        """The interval of a prediction with certain seconds more, for people; empty: it has none."""
        if self._spread == 1:
            return ""
        low, high = (further + end for end in (predicted / self._spread, predicted * self._spread))
        return f" ({shown_duration(max(low, 0.0))} to {shown_duration(high)}{bound})"

    def _num_new(self, num_prompt_tokens: int) -> float:
        """Tokens of a prompt that must be computed, if the share of cached tokens is the recent one."""
        hit_rate = self._cache_hits / self._cache_queries if self._cache_queries else 0.0
        return num_prompt_tokens * (1 - hit_rate)

    def _predicted_ttft(self, num_prompt_tokens: int) -> float:
        own, share = self.pace.prompt_seconds(self._num_new(num_prompt_tokens)), self._prompt_share()
        return self._step_seconds + max(self._prompts_left() / share, self._place_seconds()) + own / share

    def _prompts_left(self) -> float:
        """Seconds of the prompts that were sent and are not computed."""
        num_left = self._prompt_tokens - self._computed_tokens
        return self._prompt_seconds * num_left / self._prompt_tokens if self._prompt_tokens else 0.0

    def _prompt_share(self) -> float:
        """The share of a step's time that prompts get beside answers."""
        # Prompts that wait now are answers by then.
        answers = max(self._answer_seconds, self.pace.usual_step if self._prompts else 0.0)
        if not answers:
            return 1.0
        num_tokens = (self.limits.get("max_num_batched_tokens") or 1) - self._num_running
        if self.targets.itl:
            prompts = self.targets.itl - answers
        else:
            least = min(num_tokens, self.limits.get("max_shared_prefill_tokens") or num_tokens)
            times = min(len(self._prompts) + 2, self._most_answer_times)  # this prompt counts too
            alone = self.pace.answer_step(1, self._num_kv_tokens / max(self._num_running, 1))
            prompts = min(times * alone - answers, num_tokens * self.pace.per_prompt_token)
            prompts = max(prompts, least * self.pace.per_prompt_token)
        return max(prompts / (prompts + answers), MIN_SHARE) if prompts > 0 else MIN_SHARE

    def _place_seconds(self) -> float:
        """Seconds until there is a place in the batch."""
        position = self.num_waiting + 1 - max(self._num_places - self._num_running, 0)
        mean = self._answer_steps / self._num_ended
        return max(position, 0) * mean * self._usual_step_seconds / max(self._num_running, 1)


def _whole(seconds: float) -> int:
    """Seconds for a Retry-After header."""
    return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)


class Refusals:
    """The pace of refusals. All engines share it, because this process refuses requests for all of them."""

    def __init__(self) -> None:
        self._next = 0.0  # the turn of the next refusal, or an earlier time if it is free

    def delay(self, now: float) -> float:
        """Count a refusal at `now` (monotonic seconds). Returns the seconds until its turn."""
        earliest = now - FREE_REFUSALS / REFUSALS_PER_SECOND
        self._next = max(self._next, earliest) + 1 / REFUSALS_PER_SECOND
        latest = now + MAX_REFUSAL_DELAY_SECONDS - REFUSAL_TURN_SECONDS  # its turn may come that much later
        self._next = min(self._next, latest)
        if self._next <= now:
            return 0.0
        return math.ceil(self._next / REFUSAL_TURN_SECONDS) * REFUSAL_TURN_SECONDS - now
