"""The KV cache of requests with these lengths: resident tokens, and the number of requests that fit. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from quire.planning.memory_plan import KvPages

SHORTAGE_QUANTILE = 2.33  # standard deviations above the mean: a shortage of pages in one step of a hundred
# Two times within an answer. They have the mean and spread of all of its steps (Gauss and Legendre).
_MOMENTS = (0.5 - math.sqrt(1 / 12), 0.5 + math.sqrt(1 / 12))


class RequestLength(NamedTuple):
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class RequestLengths:
    """A workload, as far as memory and steps see it.

    Args:
        name: a name for people.
        requests: at least one request, each with at least one prompt token and one answer token.
    """

    name: str
    requests: Sequence[RequestLength]

    @property
    def mean_prompt(self) -> float:
        return sum(request.prompt for request in self.requests) / len(self.requests)

    @property
    def mean_output(self) -> float:
        return sum(request.output for request in self.requests) / len(self.requests)

    @cached_property
    def longest(self) -> int:
        """The tokens of the longest request."""
        return max(request.total for request in self.requests)

    def resident_tokens(self) -> float:
        """Resident tokens of a running request on average: long answers run longer, so they count more often."""
        held = sum(request.prompt * request.output + request.output**2 / 2 for request in self.requests)
        return held / sum(request.output for request in self.requests)

    def share_longer_than(self, num_tokens: int) -> float:
        """Share of the requests that have more tokens."""
        return sum(request.total > num_tokens for request in self.requests) / len(self.requests)

    def that_fit(self, pages: KvPages, num_pages: int) -> int:
        """The number of requests that fit together. They lack pages in at most one of a hundred steps. At least 1."""
        mean, spread = self._pages(pages)
        half = SHORTAGE_QUANTILE * spread / 2
        root = (math.sqrt(half * half + mean * num_pages) - half) / mean  # n mean + z spread sqrt(n) = num_pages
        return max(int(root * root), 1)

    def _pages(self, pages: KvPages) -> tuple[float, float]:
        """The mean and the standard deviation of the pages of a running request, at a random time."""
        held: dict[int, float] = {}
        for request in self.requests:
            for moment in _MOMENTS:
                length = math.ceil(request.prompt + moment * request.output)
                held[length] = held.get(length, 0.0) + request.output
        total = sum(held.values())
        counts = {length: pages.while_decoding(length) for length in held}
        mean = sum(weight * counts[length] for length, weight in held.items()) / total
        square = sum(weight * counts[length] ** 2 for length, weight in held.items()) / total
        return mean, math.sqrt(max(square - mean * mean, 0.0))

    def with_half_prompts(self) -> RequestLengths:
        """The same answers to prompts of half the length."""
        return replace(self, requests=[RequestLength(-(-prompt // 2), output) for prompt, output in self.requests])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "mean_prompt_tokens": round(self.mean_prompt, 1),
            "mean_output_tokens": round(self.mean_output, 1),
            "longest_request_tokens": self.longest,
            "mean_resident_tokens": round(self.resident_tokens(), 1),
        }

    def text(self) -> str:
        """For people."""
        return (
            f"{self.name}: prompts of {self.mean_prompt:,.0f} tokens, answers of {self.mean_output:,.0f}; "
            f"a running request holds {self.resident_tokens():,.0f}"
        )
