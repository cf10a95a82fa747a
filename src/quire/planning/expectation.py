"""What requests of a server can expect, and how long full steps take, for the first screen and `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.cost.model import CostModel
from quire.cost.step_time import StepTime, exchange_seconds
from quire.metrics.stopwatch import busy_machine
from quire.planning.estimate import Estimate
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.planning.service import Service
from quire.planning.step_costs import decode_step, exchanges_text, links_text, short_decodes
from quire.planning.step_sizes import SHARED_ANSWERS, SHARED_CONTEXT
from quire.settings import Interval, Record, Resolved, Setting

EXPECTED_PROMPT = 1000  # tokens of the prompt that a time to the first token is expected for, if the model holds it


def expectation(resolved: Resolved, cost: CostModel, origin: str, waited: float) -> Mapping[str, Setting]:
    """What requests are expected to get, by name, with their numbers.

    These are the tokens per second of one request, and of `max_num_seqs` together, and the seconds to the first token
    of a prompt alone.

    Args:
        origin: the origin of the constants, for people.
        waited: share of the measured time that others had the cores.
    """
    record, limits = Record(), resolved.scheduler
    for name, count in (("expected_tokens_per_second", 1), ("expected_total_tokens_per_second", limits.max_num_seqs)):
        step = decode_step(cost, count)
        interval = Interval(_rounded(count / step.high), _rounded(count / step.low), step.bound)
        record.put(
            name,
            _rounded(count / step.seconds),
            "formula",
            f"{count} / {1e3 * step.seconds:.2f} ms for a step with one token of each, in short contexts; "
            f"{_shown(interval)}; {origin}",
            interval,
        )
    prompt = max(min(EXPECTED_PROMPT, resolved.model.max_model_len - 1), 1)
    lengths = RequestLengths("one", [RequestLength(prompt, 1)])
    alone = Service(cost, lengths, limits.max_num_batched_tokens, 1).at(1)
    interval = Interval(_rounded(alone.ttft.low), _rounded(alone.ttft.high), alone.ttft_bound)
    record.put(
        "expected_ttft",
        _rounded(alone.ttft.value),
        "formula",
        f"seconds, for a prompt of {prompt:,} tokens alone, in steps of at most {limits.max_num_batched_tokens:,}; "
        f"{_shown(interval)}; {origin}",
        interval,
    )
    if exchanges := cost.arithmetic.exchanges:
        record.put(
            "expected_exchange_seconds",
            _rounded(exchange_seconds(cost.arithmetic.demand(short_decodes(cost, 1)), cost.fit.constants.links)),
            "formula",
            f"within the time of a step with one token of one request: {exchanges_text(exchanges)}; "
            f"{links_text(exchanges, cost.fit.constants.links)}; {origin}",
        )
    record.put("expectation_waited_share", round(waited, 2), "measured", busy_machine(waited) or "an idle machine")
    return record


class FullStep(NamedTuple):
    """A step that uses as much of a setting as the others allow, with its rows for people and its predicted time."""

    setting: str
    rows: str
    time: StepTime

    def text(self) -> str:
        """For people."""
        milliseconds = Estimate(*self.time[:3]) * 1e3
        return f"{milliseconds.text(f'bound by {self.time.bound}', 'ms')} for {self.rows}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Times in seconds."""
        return {"rows": self.rows, **Estimate(*self.time[:3]).as_dict(), "bound": self.time.bound}


def full_steps(resolved: Resolved, cost: CostModel) -> Iterator[FullStep]:
    """The predicted time of a full step, for each setting that limits the rows of steps.

    Its rows are those that all settings together let a step have: new prompts, or answers in short contexts. Beside
    prompts there are at most SHARED_ANSWERS answers. More answers, and attention late in a long context, take longer. A
    target for the time between tokens (`slo_itl`) may make steps shorter.
    """
    limits, context = resolved.scheduler, max(resolved.model.max_model_len - 1, 1)  # no step computes the last token
    places, budget, shared = limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_shared_prefill_tokens
    longest = context  # tokens of a prompt in a step
    if not limits.enable_chunked_prefill:
        shared = 0
    elif threshold := limits.long_prefill_token_threshold:
        longest = min(longest, threshold)

    def prompts(count: int, most: int) -> list[int]:
        """The tokens of at most `most` new prompts with `count` tokens together, each with as many as it may have."""
        whole, rest = divmod(min(count, most * longest), longest)
        return [longest] * whole + [rest] * (rest > 0)

    def step(starts: Sequence[int], counts: Sequence[int]) -> StepTime:
        """Of answers that have so many tokens before, and of prompts."""
        rows = [*([1] * len(starts)), *counts]
        return cost.predict(cost.arithmetic.load([*starts, *([0] * len(counts))], rows, len(rows)))

    yield FullStep(
        "max_num_seqs", f"one token of each of {places:,} requests, in short contexts", decode_step(cost, places)
    )
    # A prompt alone has the whole budget. If the shared number is a least one, so have several without answers.
    together = budget if limits.most_answer_times else min(shared or budget, budget)
    counts = max(prompts(together, places), prompts(budget, 1), key=sum)
    yield FullStep("max_num_batched_tokens", _prompts(counts), step([], counts))
    if shared:
        answers, context = min(SHARED_ANSWERS, places - 1), min(SHARED_CONTEXT, context)
        counts = prompts(min(shared, budget - answers), places - answers)
        beside = f" beside {answers} answer{'s' * (answers > 1)} of {context:,} tokens" if answers else ""
        yield FullStep("max_shared_prefill_tokens", _prompts(counts) + beside, step([context - 1] * answers, counts))


def _prompts(counts: Sequence[int]) -> str:
    whose = f"{len(counts)} new prompts" if len(counts) > 1 else "a new prompt"
    return f"{sum(counts):,} tokens of {whose}"


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _shown(interval: Interval) -> str:
    return f"between {interval.low:,g} and {interval.high:,g}, bound by {interval.bound}"
