"""Predicts the service of a server with some requests at once: times, rates, and the most requests. No torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.cost.arithmetic import Load
from quire.cost.model import CostModel
from quire.cost.step_time import Bound, StepTime, knee_rows
from quire.planning.estimate import Estimate
from quire.planning.request_lengths import RequestLengths


@dataclass(frozen=True)
class Goals:
    """The goals of all copies together. Times are means, in seconds."""

    request_rate: float | None = None
    ttft: float | None = None
    itl: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON."""
        return {"request_rate": self.request_rate, "slo_ttft": self.ttft, "slo_itl": self.itl}

    @property
    def has_slo(self) -> bool:
        return self.ttft is not None or self.itl is not None

    def are_kept(self, point: Point) -> bool:
        """Whether these times keep the goals."""
        return (self.ttft is None or point.ttft.value <= self.ttft) and (
            self.itl is None or point.itl.value <= self.itl
        )

    def are_surely_kept(self, point: Point) -> bool:
        """Whether the slow ends of the intervals are within the goals too."""
        return (self.ttft is None or point.ttft.high <= self.ttft) and (self.itl is None or point.itl.high <= self.itl)


@dataclass(frozen=True)
class Point:
    """One copy with a number of requests in it, each followed by another one. Times in seconds.

    Args:
        ttft_bound: the resource that takes most of the longest step of a prompt.
        bound: the resource that takes most of a step. It bounds the time between tokens and the rates.
    """

    num_requests: int
    ttft: Estimate
    itl: Estimate
    requests_per_second: Estimate
    tokens_per_second: Estimate
    ttft_bound: Bound
    bound: Bound

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "num_requests": self.num_requests,
            "ttft_seconds": self.ttft.as_dict(),
            "itl_seconds": self.itl.as_dict(),
            "requests_per_second": self.requests_per_second.as_dict(),
            "output_tokens_per_second": self.tokens_per_second.as_dict(),
            "ttft_bound": self.ttft_bound,
            "bound": self.bound,
        }


class Service:
    """One copy of a model that serves a workload.

    Args:
        step_tokens: most tokens of a step.
        room: requests that memory and settings let run.
    """

    def __init__(self, cost: CostModel, lengths: RequestLengths, step_tokens: int, room: int) -> None:
        self._cost, self._step_tokens = cost, step_tokens
        self._prompt, self._output = max(round(lengths.mean_prompt), 1), lengths.mean_output
        context = round(lengths.resident_tokens())
        self._row = cost.arithmetic.load([max(context - 1, 0)], [1], 1)
        self._whole_prompt = cost.arithmetic.load([0], [self._prompt], 1)
        # Prompts and answers share the tokens of steps. With more requests than this number, all tokens would be of
        # prompts.
        busy = int(step_tokens * self._output / (self._prompt + self._output))
        self.most = max(min(room, busy), 1)
        self._known: dict[int, Point] = {}

    @property
    def knee(self) -> int:
        """The number of requests from which on a decode's products take longer than reading the weights."""
        rows = knee_rows(self._cost.arithmetic.demand(self._row), self._cost.fit.constants)
        return min(max(math.ceil(rows), 1), self.most)

    def within(self, goals: Goals) -> int:
        """The most requests with which the times keep the goals; 0: not even one request keeps them."""
        return self._first(lambda point: not goals.are_kept(point)) - 1

    def for_rate(self, requests_per_second: float) -> int:
        """The fewest requests with this rate; one more than `most`: there are none."""
        return self._first(lambda point: point.requests_per_second.value >= requests_per_second)

    def _first(self, holds: Callable[[Point], bool]) -> int:
        """The first number of requests for which a condition holds. It must then hold for all larger numbers."""
        return 1 + bisect_left(range(1, self.most + 1), True, key=lambda count: holds(self.at(count)))

    def at(self, count: int) -> Point:
        """The point with this number of requests, but at most with `most`."""
        if count not in self._known:
            self._known[count] = self._at(count)
        return self._known[count]

    def _at(self, count: int) -> Point:
        decode, (chunk, share) = self._step(count, 0), self._prompts_beside(count)
        mixed = self._step(count, chunk)
        itl = _estimate(decode) * (1 - share) + _estimate(mixed) * share
        ttft, ttft_bound = self._ttft(count, share, decode)
        cycle = ttft + itl * self._output
        return Point(
            count,
            ttft,
            itl,
            cycle.over(count),
            cycle.over(count * self._output),
            ttft_bound,
            mixed.bound if share * mixed.seconds > (1 - share) * decode.seconds else decode.bound,
        )

    def _ttft(self, count: int, share: float, decode: StepTime) -> tuple[Estimate, Bound]:
        """The time to first token: the prompt's own steps, beside the tokens of other requests, and two halves.

        They are half of a step that runs already, and half of an earlier prompt.
        """
        others, chunk = count - 1, self._chunk(count)
        whole, rest = divmod(self._prompt, chunk)
        step = self._step(others, chunk)
        own = _estimate(step) * whole
        if rest:
            own += _estimate(self._step(others, rest))
        if others:
            own += _estimate(decode) * 0.5 + own * (share / 2)
        return own, step.bound

    def _chunk(self, count: int) -> int:
        """The tokens of one prompt in a step."""
        return max(min(self._prompt, self._step_tokens - count), 1)

    def _prompts_beside(self, count: int) -> tuple[int, float]:
        """Tokens of the others' prompts in a step that has some, and the share of such steps.

        As many prompts are computed as answers end.
        """
        needed = (count - 1) * self._prompt / self._output
        chunk = max(self._chunk(count), round(needed))
        return chunk, needed / chunk

    def _step(self, count: int, prompt_tokens: int) -> StepTime:
        """The load of a step: a token of each of `count` requests, whole prompts, and a middle piece of one prompt."""
        whole, rest = divmod(prompt_tokens, self._prompt)
        load = _sum(count, self._row, whole, self._whole_prompt)
        if rest:
            load = self._cost.arithmetic.with_row(load, (self._prompt - rest) // 2, rest, 1)
        return self._cost.predict(load)


def _sum(count: int, one: Load, more: int, other: Load) -> Load:
    """`count` times one load, and `more` times the other one."""

    def add(first: int, second: int) -> int:
        return count * first + more * second

    return Load(
        add(one.num_tokens, other.num_tokens),
        add(one.num_rows, other.num_rows),
        add(one.num_logits, other.num_logits),
        tuple(map(add, one.kv_tokens, other.kv_tokens)),
        tuple(map(add, one.pairs, other.pairs)),
    )


def _estimate(step: StepTime) -> Estimate:
    return Estimate(step.seconds, step.low, step.high)
