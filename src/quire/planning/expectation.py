"""What requests of a server can expect, and how long its longest steps take, for the first screen and `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quire.cost.collectives import NO_EXCHANGES
from quire.cost.model import CostModel
from quire.cost.step_time import StepTime
from quire.metrics.stopwatch import busy_machine
from quire.planning.estimate import Estimate
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.planning.service import Service
from quire.planning.step_costs import decode_step
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
    alone = Service(cost, NO_EXCHANGES, lengths, limits.max_num_batched_tokens, 1).at(1)
    interval = Interval(_rounded(alone.ttft.low), _rounded(alone.ttft.high), alone.ttft_bound)
    record.put(
        "expected_ttft",
        _rounded(alone.ttft.value),
        "formula",
        f"seconds, for a prompt of {prompt:,} tokens alone, in steps of at most {limits.max_num_batched_tokens:,}; "
        f"{_shown(interval)}; {origin}",
        interval,
    )
    record.put("expectation_waited_share", round(waited, 2), "measured", busy_machine(waited) or "an idle machine")
    return record


class LongestStep(NamedTuple):
    """The longest step that a setting allows: the setting, the rows for people, and the predicted time."""

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


def longest_steps(resolved: Resolved, cost: CostModel) -> Iterator[LongestStep]:
    """The predicted time behind each setting that limits the rows of steps."""
    limits, longest = resolved.scheduler, resolved.model.max_model_len

    def prompts(count: int) -> list[int]:
        """The new tokens of rows that have `count` tokens together, each with as many as a request may have."""
        whole, rest = divmod(count, longest)
        return [longest] * whole + [rest] * (rest > 0)

    def step(answers: Sequence[int], counts: list[int]) -> StepTime:
        rows = [1] * len(answers) + counts
        return cost.predict(cost.arithmetic.load([*answers, *([0] * len(counts))], rows, len(rows)))

    answers = limits.max_num_seqs
    yield LongestStep(
        "max_num_seqs", f"one token of each of {answers:,} requests, in short contexts", decode_step(cost, answers)
    )
    budget = limits.max_num_batched_tokens
    yield LongestStep("max_num_batched_tokens", f"{budget:,} tokens of prompts", step([], prompts(budget)))
    if shared := limits.max_shared_prefill_tokens:
        context = min(SHARED_CONTEXT, longest)
        yield LongestStep(
            "max_shared_prefill_tokens",
            f"{shared:,} tokens of prompts beside {SHARED_ANSWERS} answers of {context:,} tokens",
            step([context - 1] * SHARED_ANSWERS, prompts(shared)),
        )


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _shown(interval: Interval) -> str:
    return f"between {interval.low:,g} and {interval.high:,g}, bound by {interval.bound}"
