"""`quire plan` with hardware or a workload: the ranked candidates for people and as JSON. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.model_config import ModelConfig
from quire.planning.candidates import Candidate, Candidates, memory_terms, points
from quire.planning.estimate import short, table
from quire.planning.hardware import Hardware
from quire.resolve import NEVER_RUN, shown_bytes

MOST_ROWS = 16
LEAST_LENGTH = 256  # tokens of a request: fewer are no advice


@dataclass(frozen=True)
class RankedPlan:
    """One model on some hardware.

    Args:
        hardware: in the order it was given.
        given: flags of `quire serve` that were given, with their values; a row's own flags come first.
    """

    model_name: str
    model: ModelConfig
    hardware: list[Hardware]
    candidates: Candidates
    given: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The exit code. 0: something fits; 2: nothing fits."""
        return 0 if self.candidates.best is not None else 2

    @property
    def check_code(self) -> int:
        """The exit code of --check. 0: the best row meets the demand; 1: it does not.

        2: nothing fits.
        """
        best = self.candidates.best
        return 2 if best is None else 0 if best.meets else 1

    def as_dict(self) -> dict[str, Any]:
        """The object for JSON. Sizes are in bytes and tokens, and times in seconds.

        Rates in `points` are those of one copy. Other rates are those of all copies.
        """
        found, demand = self.candidates, self.candidates.demand
        return {
            "name": self.model_name,
            "architecture": self.model.architecture,
            "num_parameters": self.model.num_parameters(),
            "is_exact": self.model.is_native,
            "workload": demand.lengths.as_dict(),
            "asked": demand.goals.as_dict() | {"sequences": demand.num_sequences},
            "hardware": [each.as_dict() for each in self.hardware],
            "candidates": [row.as_dict() for row in found.rows],
            "refused": found.refused,
            "best": None if found.best is None else found.best.as_dict(),
            "copies": [] if found.best is None else [row.as_dict() for row in found.cuts_of(found.best)],
            "changes": list(self._changes()),
            "check": self.check_code,
        }

    def text(self) -> str:
        """For people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        about = "" if self.model.is_native else "about "
        parameters = f"{about}{self.model.num_parameters() / 1e6:,.1f} M parameters"
        checkpoint = self.model.describe_checkpoint()
        yield f"model     {self.model_name}: {self.model.architecture}, {parameters}, checkpoint in {checkpoint}"
        yield f"workload  {self.candidates.demand.lengths.text()}"
        if asked := self._asked():
            yield f"asked     {asked}"
        yield from labelled("hardware", [each.text() for each in self.hardware])
        if any(each.facts.gpu is not None for each in self.hardware):
            yield f"          {NEVER_RUN}: speeds on GPUs are predicted"
        yield ""
        yield from self._ranking()
        yield from (f"{name}: {reason}" for name, reason in self.candidates.refused.items())
        yield ""
        best = self.candidates.best
        yield from self._missing() if best is None else self._best(best)
        yield from labelled("fixes" if best is None else "change", list(self._changes()))

    def _asked(self) -> str:
        demand = self.candidates.demand
        goals, parts = demand.goals, []
        if goals.request_rate is not None:
            parts.append(f"{goals.request_rate:g} requests/s")
        parts += [f"TTFT {1e3 * goals.ttft:g} ms"] if goals.ttft is not None else []
        parts += [f"ITL {1e3 * goals.itl:g} ms"] if goals.itl is not None else []
        parts += [f"{demand.num_sequences} full contexts"] if demand.num_sequences is not None else []
        return ", ".join(parts) + " (means)" * goals.has_slo

    def _ranking(self) -> Iterator[str]:
        """The best row of each format of the weights on each number of devices per copy."""
        shown: dict[tuple[str, int, str], Candidate] = {}
        for row in self.candidates.rows:
            shown.setdefault((row.hardware.name, row.degree, row.fit.form.weights.name), row)
        rows = list(shown.values())[:MOST_ROWS]
        num_hidden = len(self.candidates.rows) - len(rows)
        has_price = any(row.price_per_million() is not None for row in rows)
        head = ["hardware", "weights", "KV", "TP", "copies", "at once", "requests/s", "tokens/s"]
        yield from table(
            head + ["per M"] * has_price + ["bound by", "meets it"],
            [_ranked(row, has_price) for row in rows],
            num_names=3,
        )
        if num_hidden:
            yield f"{num_hidden} more rows, other formats of the KV cache among them: --json."
        yield "tokens/s" + " and per M" * has_price + " lie within the same factor as requests/s."
        if has_price:
            yield "per M: the price of a million tokens of answers, if there are always enough requests."

    def _best(self, best: Candidate) -> Iterator[str]:
        given = [word for flag, values in self.given.items() if flag not in best.flags for word in (flag, *values)]
        yield f"best      quire serve {shlex.join([self.model_name, *best.flags, *given])}"
        if not best.meets:
            yield "          it comes closest, and does not meet what is asked"
        if best.fit.form.expected_loss:
            flags = " ".join((shlex.quote(self.model_name), *best.fit.form.flags))
            yield f"          not the original: measure it with `quire quality {flags} --text FILE`"
        terms = [
            f"{term.name:<9} {shown_bytes(term.num_bytes):>11}  {term.origin:<8}  {term.detail}"
            for term in memory_terms(best)
        ]
        yield from labelled("memory", terms)
        yield from labelled("copies", list(self._comparison(best)))
        longest = best.max_model_len
        yield (
            f"fits      {best.copies * best.num_requests:,} requests of your workload at <= 1 % preemption, "
            f"{best.num_sequences:,} of {longest:,} tokens"
        )
        if share := self.candidates.demand.lengths.share_longer_than(longest):
            yield f"          {share:.0%} of the requests are longer than that, and would be refused"
        yield ""
        yield "Of one copy:" if best.copies > 1 else "Predicted:"
        named = points(best)
        yield from table(
            ["requests", "TTFT ms", "ITL ms", "requests/s", "tokens/s", "bound by"],
            [
                [
                    f"{point.num_requests:,} {'' if name == 'one' else name}".rstrip(),
                    (point.ttft * 1e3).text(),
                    (point.itl * 1e3).text(),
                    point.requests_per_second.text(),
                    point.tokens_per_second.text(),
                    point.bound,
                ]
                for name, point in named
            ],
        )
        bounds = " or ".join(dict.fromkeys(point.ttft_bound for _, point in named))
        yield f"First tokens are bound by {bounds}."
        yield "At least nine of ten measurements should lie in their intervals."
        yield f"Speeds are {best.origin}."
        yield ""

    def _comparison(self, best: Candidate) -> Iterator[str]:
        """Replicas beside copies on several devices; no line if there is no choice."""
        cuts = self.candidates.cuts_of(best)
        if len(cuts) < 2:
            return
        rows = []
        for row in cuts:
            alone, point = points(row)[0][1], row.best_point
            rate = "0" if point is None or not row.within else row.rate.text(point.bound)
            times = (alone.ttft * 1e3).text(alone.ttft_bound), (alone.itl * 1e3).text(alone.bound)
            rows.append([_copies(row), rate, *times])
        yield from table(["", "requests/s", "one alone: TTFT ms", "ITL ms"], rows)
        most, fewest = cuts[0], cuts[-1]
        if most.requests_per_second and fewest.requests_per_second:
            more = most.requests_per_second / fewest.requests_per_second
            faster = points(most)[0][1].itl.value / points(fewest)[0][1].itl.value
            which = "one copy" if fewest.copies == 1 else f"{fewest.copies} replicas"
            yield (
                f"{most.copies} replicas: {more:.2g} x the requests/s of {which}, which answers one request "
                f"{faster:.2g} x as fast"
            )

    def _missing(self) -> Iterator[str]:
        closest, demand = self.candidates.closest, self.candidates.demand
        what = f"a request of {demand.lengths.longest:,} tokens"
        if demand.num_sequences is not None:
            what = f"{demand.num_sequences:,} full contexts"
        words = " ".join(closest.flags) or "the checkpoint as it is"
        each = "each" if closest.hardware.count > 1 else "the"
        missing = shown_bytes(closest.missing_bytes)
        yield f"best      none: {words} on {closest.hardware.name} comes closest;"
        yield f"          {missing} are missing on {each} device for {what}"
        shown = {term.name: f"{shown_bytes(term.num_bytes)} ({term.origin})" for term in memory_terms(closest)}
        total = shown_bytes(closest.hardware.memory_bytes)
        yield f"memory    weights {shown['weights']}, work {shown['work']}, of {total}"

    def _changes(self) -> Iterator[str]:
        """Changes that would improve the answer. If nothing fits, they are changes with which something fits.

        The easiest change comes first.
        """
        best, found = self.candidates.best, self.candidates
        if best is None:
            closest = found.closest
            length = closest.max_model_len
            if length >= LEAST_LENGTH and found.demand.num_sequences is None:
                yield f"requests of at most {length:,} tokens: --max-model-len {length}"
            others = [found.with_more_devices(closest), found.with_larger_devices(closest)]
            if not any(others):
                others = [found.with_more_larger_devices(closest)]
            yield from (_other(other, other.hardware.name) for other in others if other is not None)
            if not any(others):
                yield "a smaller model: no machine of the table with up to 8 GPUs holds this one"
            return
        rate, reached, point = found.demand.goals.request_rate or 0.0, best.requests_per_second, best.best_point
        if point is not None and 0 < reached < rate:
            copies = math.ceil(rate * best.copies / reached)
            served = (best.rate * (copies / best.copies)).text(point.bound)
            yield f"{copies * best.degree} such devices: {copies} copies, {served} of {rate:g} requests/s"
        if (other := found.next_format(best)) is not None:
            yield _other(other, f"{' '.join(other.fit.form.flags)}", best)
        half = found.with_half_prompts(best)
        yield _other(half, "prompts half as long", best)
        if best.hardware.facts.gpu is not None and (larger := found.with_larger_devices(best)) is not None:
            yield _other(larger, larger.hardware.name, best)


def _copies(row: Candidate) -> str:
    number = f"{row.copies} replicas" if row.copies > 1 else "one copy"
    devices = f"{row.degree} devices" if row.degree > 1 else "1 device"
    return f"{number} on {devices}{' each' * (row.copies > 1)}"


def _ranked(row: Candidate, has_price: bool) -> list[str]:
    cells = [
        row.hardware.name,
        row.fit.form.weights.name,
        row.fit.form.kv_cache_dtype,
        str(row.degree),
        str(row.copies),
        f"{row.copies * row.num_requests:,}",
    ]
    point = row.best_point
    if point is None:
        return [*cells, f"lacks {shown_bytes(row.missing_bytes)}", "-", *(["-"] * has_price), "-", "no"]
    rates = [(point.requests_per_second * row.copies).text(), short(point.tokens_per_second.value * row.copies)]
    price = row.price_per_million()
    prices = ["-" if price is None else f"{price.value:.2f}"] if has_price else []
    return [*cells, *rates, *prices, point.bound, row.verdict]


def _other(row: Candidate, what: str, than: Candidate | None = None) -> str:
    """The numbers of another row. If there is a best row, its numbers stand beside them."""
    if than is None:
        shared = f"TP {row.degree}, " * (row.degree > 1)
        what = f"{what}: {shared}{' '.join(row.fit.form.flags) or 'the checkpoint as it is'}"
        what += f" --max-model-len {row.max_model_len}" * row.is_cut
    parts = [f"{row.copies * row.num_requests:,} requests at once"]
    if than is not None and than.requests_per_second:
        parts.insert(0, f"{row.requests_per_second / than.requests_per_second:.2g} x the requests/s")
    return f"{what}: {', '.join(parts)}"


def labelled(label: str, lines: list[str]) -> Iterator[str]:
    """The label before the first line, and room for it before the others."""
    for line in lines:
        yield f"{label:<9} {line}"
        label = ""
