"""Ranks hardware, formats, devices per copy and copies for a workload, and finds changes that would help. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quire.config import EngineConfig
from quire.cost.arithmetic import StepArithmetic
from quire.cost.collectives import exchanges
from quire.distributed.layout import Grid
from quire.errors import ConfigError, ModelConfigError
from quire.formats.weight_format import packs_floats
from quire.model_config import ModelConfig, WeightBytes
from quire.planning.cut_model import check_degree
from quire.planning.cut_stages import cut_of, expert_cut
from quire.planning.estimate import Estimate
from quire.planning.fits import Fit, Form, fit_of, possible_forms, weight_bytes
from quire.planning.hardware import Hardware, listed, next_larger
from quire.planning.memory_plan import KvPages
from quire.planning.request_lengths import RequestLengths
from quire.planning.service import Goals, Point, Service
from quire.planning.step_costs import KnownCost, described_cost, known_cost, links_between, step_arithmetic

SECONDS_PER_HOUR = 3600
Part = tuple[ModelConfig, WeightBytes]  # the part of a model on a device, and the bytes of its weights


@dataclass(frozen=True)
class Demand:
    """The demand: the goals that a server should reach.

    Args:
        goals: the goals of all copies together.
        num_sequences: requests of max_model_len that all copies should hold; None: the longest request is enough.
    """

    lengths: RequestLengths
    goals: Goals
    num_sequences: int | None = None


@dataclass(frozen=True)
class Candidate:
    """Copies of a model in one pair of formats on some devices.

    Args:
        degree: the number of devices of a copy.
        fit: the room on one device, with its part of the model.
        max_model_len: the setting of a start. It is less than the model's if a full context does not fit.
        num_requests: requests of the workload that a copy runs at a time, within memory and --max-num-seqs.
        service: the service of one copy; None: it does not start.
        origin: the origin of the speeds, as text for people.
        is_exact: whether the bytes of the weights are exact. If not, they are an estimate.
    """

    hardware: Hardware
    degree: int
    fit: Fit
    max_model_len: int
    num_requests: int
    demand: Demand
    service: Service | None
    origin: str
    is_exact: bool

    @property
    def copies(self) -> int:
        return self.hardware.count // self.degree

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `quire serve` for all copies."""
        length = ("--max-model-len", str(self.max_model_len)) if self.is_cut else ()
        degree = ("--tensor-parallel-size", str(self.degree)) if self.degree > 1 else ()
        copies = ("--data-parallel-size", str(self.copies)) if self.copies > 1 else ()
        return self.fit.form.flags + length + degree + copies

    @property
    def is_cut(self) -> bool:
        """Whether the context is cut, because a full one does not fit."""
        return 0 < self.max_model_len < self.fit.form.resolved.model.max_model_len

    @property
    def num_sequences(self) -> int:
        """The number of requests of max_model_len tokens that all copies hold; 0: not a token fits."""
        if not self.max_model_len:
            return 0
        return self.copies * self.fit.pages.num_requests(self.fit.num_blocks, self.max_model_len)

    @property
    def fits(self) -> bool:
        return self.service is not None

    @property
    def missing_bytes(self) -> int:
        """The missing bytes on each device.

        They are for the longest request of the workload, or for the number of full contexts that was asked for.
        """
        pages, longest = self.fit.pages, self.fit.form.resolved.model.max_model_len
        needed = pages.for_request(min(self.demand.lengths.longest, longest))
        if self.demand.num_sequences is not None:
            of_a_copy = -(-self.demand.num_sequences // self.copies)
            needed = max(pages.for_request(longest), of_a_copy * pages.while_decoding(longest))
        return max(needed * pages.page_bytes - self.fit.num_bytes, 0)

    @cached_property
    def within(self) -> int:
        """The most requests of a copy that keep the wanted times; 0: not even one request does, or nothing fits."""
        return 0 if self.service is None else self.service.within(self.demand.goals)

    @cached_property
    def best_point(self) -> Point | None:
        """The point with as many requests as the goals allow, or with one if they allow none; None: nothing fits."""
        return None if self.service is None else self.service.at(max(self.within, 1))

    @property
    def rate(self) -> Estimate:
        """The requests per second of all copies within the goals; 0: no number of requests keeps the goals."""
        point = self.best_point if self.within else None
        return Estimate(0.0, 0.0, 0.0) if point is None else point.requests_per_second * self.copies

    @property
    def requests_per_second(self) -> float:
        """The prediction of `rate`."""
        return self.rate.value

    @property
    def meets(self) -> bool:
        """Whether the workload, its rate and its times are met, by the predictions themselves."""
        if self.demand.lengths.longest > self.fit.form.resolved.model.max_model_len:
            return False  # some requests would be refused
        return self.within > 0 and self.requests_per_second >= (self.demand.goals.request_rate or 0.0)

    @cached_property
    def verdict(self) -> str:
        """`yes`: the slow ends of the intervals meet it too; `likely`; `no`; `does not fit`."""
        if self.service is None:
            return "does not fit"
        if not self.meets:
            return "no"
        rate = self.demand.goals.request_rate
        point = self.service.at(self.service.for_rate(rate / self.copies)) if rate else self.service.at(1)
        is_sure = self.demand.goals.are_surely_kept(point) and not (rate and self.rate.low < rate)
        return "yes" if is_sure else "likely"

    def price_per_million(self) -> Estimate | None:
        """The price of a million output tokens, with as many requests as the goals allow; None: there is no price."""
        price, point = self.hardware.price_per_hour, self.best_point
        if price is None or point is None:
            return None
        per_hour = self.degree * price
        return point.tokens_per_second.over(per_hour * 1e6 / SECONDS_PER_HOUR)

    def rank(self) -> tuple[float, ...]:
        """The rank; the candidate with the smallest rank is the best.

        These come first, in this order: meeting the demand, a small loss of quality, holding a full context, and a low
        price.
        """
        price = self.price_per_million()
        cost = price.value if price else -self.requests_per_second / self.hardware.count
        if not self.meets:
            missing = self.missing_bytes * self.degree
            return (1, not self.fits, missing, -self.requests_per_second)
        return (0, self.fit.form.expected_loss, self.is_cut, cost, self.degree)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        price = self.price_per_million()
        return {
            "hardware": self.hardware.name,
            "tensor_parallel_size": self.degree,
            "copies": self.copies,
            **self.fit.as_dict(),
            "max_model_len": self.max_model_len,
            "num_sequences": self.num_sequences,
            "flags": list(self.flags),
            "memory": [term.as_dict() for term in memory_terms(self)],
            "requests_that_fit": self.copies * self.num_requests,
            "verdict": self.verdict,
            "missing_bytes": self.missing_bytes,
            "points": [point.as_dict() | {"name": name} for name, point in points(self)],
            "speed_origin": self.origin,
            "requests_per_second": self.rate.as_dict(),
            "bound": None if self.best_point is None else self.best_point.bound,
            "price_per_million_tokens": None if price is None else price.as_dict(),
        }


@dataclass(frozen=True)
class MemoryTerm:
    """A part of a device's memory.

    Args:
        origin: exact, measured or assumed.
    """

    name: str
    num_bytes: int
    origin: str
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "bytes": self.num_bytes, "origin": self.origin, "detail": self.detail}


def memory_terms(candidate: Candidate) -> list[MemoryTerm]:
    """The parts of the memory of one device. They add up to all of it."""
    fit, form = candidate.fit, candidate.fit.form
    memory, weights = fit.memory, sum(fit.weight_bytes)
    kv_bytes = fit.num_blocks * fit.pages.page_bytes
    return [
        MemoryTerm(
            "weights", weights, "exact" if candidate.is_exact else "assumed", f"{form.weights.name}, from config.json"
        ),
        MemoryTerm("KV cache", kv_bytes, "assumed", _tokens(fit)),
        MemoryTerm("work", memory.work_bytes, "assumed", "at least: activations and logits of a full step"),
        MemoryTerm("left", memory.total_bytes - weights - kv_bytes - memory.work_bytes, "assumed", _left(candidate)),
    ]


def _left(candidate: Candidate) -> str:
    share = candidate.fit.form.resolved.device.gpu_memory_utilization
    return "reserve" if share is None else f"reserve; --gpu-memory-utilization {share}"


def _tokens(fit: Fit) -> str:
    return f"the rest: {fit.num_tokens:,} tokens of {fit.kv_bytes_per_token:,} bytes"


def points(candidate: Candidate) -> list[tuple[str, Point]]:
    """The speed of a copy with one request, at the knee, at the wanted rate, within the wanted times, and with the most
    requests.
    """
    service, goals = candidate.service, candidate.demand.goals
    if service is None:
        return []
    counts = {1: "one", service.knee: "knee"}
    if goals.request_rate is not None:
        at_rate = service.for_rate(goals.request_rate / candidate.copies)
        if at_rate <= service.most:
            counts[at_rate] = "your rate"
    counts[service.most] = "most"
    if goals.has_slo and candidate.within:
        counts[candidate.within] = "within the SLO"
    return [(counts[count], service.at(count)) for count in sorted(counts)]


class Candidates:
    """All candidates of one model on some hardware, best first.

    Args:
        degree: the only number of devices per copy to look at; None: all that are legal.
        copies: the only number of copies to look at; None: all that are legal.

    Raises ConfigError for settings that contradict each other or the model, and for numbers that are not legal.
    """

    def __init__(
        self,
        engine: EngineConfig,
        model: ModelConfig,
        hardware: Sequence[Hardware],
        demand: Demand,
        degree: int | None = None,
        copies: int | None = None,
    ) -> None:
        self._engine, self._model, self.demand, self._degree = engine, model, demand, degree
        self._copies = copies
        self._cuts: dict[int, ModelConfig | None] = {}
        self._parts: dict[Hashable, Part | None] = {}
        self._pages: dict[Hashable, KvPages] = {}
        self._arithmetic: dict[Hashable, StepArithmetic] = {}
        self.refused: dict[str, str] = {}
        self.rows = sorted((row for each in hardware for row in self._on(each)), key=Candidate.rank)

        if not self.rows:
            counts = ", ".join(f"{each.name} has {each.count}" for each in hardware)
            raise ConfigError(
                "No hardware can be shared equally by this number of copies",
                value=copies,
                expected=f"a part of the number of devices: {counts}",
                fix="Leave --data-parallel-size out to compare all numbers of copies",
                param="data_parallel_size",
            )

    @property
    def best(self) -> Candidate | None:
        """The first row; None: nothing fits."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def closest(self) -> Candidate:
        """The candidate with the fewest missing bytes on all devices of a copy."""
        return min(self.rows, key=lambda row: row.missing_bytes * row.degree)

    def cuts_of(self, row: Candidate) -> list[Candidate]:
        """Candidates with the same formats and hardware: from many copies to one copy on all devices, if they fit."""
        others = (other for other in self.rows if other.hardware == row.hardware and other.fit.form == row.fit.form)
        return sorted((other for other in others if other.fits), key=lambda other: other.degree)

    def with_larger_devices(self, row: Candidate) -> Candidate | None:
        """The first row on the next larger GPUs that fits; None: none of the table does."""
        hardware = next_larger(row.hardware)
        while hardware is not None:
            rows = [other for other in self._on(hardware) if other.fits]
            same = [other for other in rows if _is_alike(other, row)]
            if same or rows:
                return min(same or rows, key=Candidate.rank)
            hardware = next_larger(hardware)
        return None

    def with_more_devices(self, row: Candidate) -> Candidate | None:
        """The first row with twice, four times or eight times the devices that fits; None: none does.

        None too for this machine, which has no more.
        """
        if not row.hardware.is_known:
            return None
        for factor in (2, 4, 8):
            count, gpu = factor * row.hardware.count, row.hardware.gpu
            name = f"{count} such devices" if gpu is None else f"{gpu.name}x{count}"
            found = [other for other in self._on(replace(row.hardware, count=count, name=name)) if other.fits]
            if found:
                return min(found, key=Candidate.rank)
        return None

    def with_more_larger_devices(self, row: Candidate) -> Candidate | None:
        """The first row on 2, 4 or 8 larger GPUs that fits; None: no machine of the table holds the model."""
        larger = next_larger(row.hardware)
        while larger is not None and larger.gpu is not None:
            for count in (2, 4, 8):
                if count > larger.count and count % (self._degree or 1) == 0:
                    found = [other for other in self._on(listed(larger.gpu, count, larger.facts)) if other.fits]
                    if found:
                        return min(found, key=Candidate.rank)
            larger = next_larger(larger)
        return None

    def with_half_prompts(self, row: Candidate) -> Candidate:
        """The same row for prompts of half the length."""
        demand = replace(self.demand, lengths=self.demand.lengths.with_half_prompts())
        found = self._candidate(row.hardware, row.fit.form, row.degree, demand)
        assert found is not None, "it was cut like this before"
        return found

    def next_format(self, row: Candidate) -> Candidate | None:
        """On the same devices, the next formats in the order of loss; None: no other formats lose more."""
        loss = row.fit.form.expected_loss
        others = [
            other
            for other in self.rows
            if other.hardware == row.hardware
            and other.degree == row.degree
            and other.fits
            and other.fit.form.expected_loss > loss
            and other.fit.form.weights != row.fit.form.weights
        ]
        return min(others, key=lambda other: other.fit.form.expected_loss, default=None)

    def _on(self, hardware: Hardware) -> Iterator[Candidate]:
        forms, refused = possible_forms(self._engine, self._model, hardware.facts)
        self.refused |= refused
        if self._degree is not None:
            experts = expert_cut(self._model, self._engine)
            is_native = self._model.runs_natively(self._engine.model_impl)
            check_degree(self._model, self._degree, hardware.count, experts, is_native=is_native)
        for form in forms:
            for degree in self._degrees(hardware.count):
                if (row := self._candidate(hardware, form, degree, self.demand)) is not None:
                    yield row

    def _degrees(self, count: int) -> Iterator[int]:
        wanted = range(1, count + 1) if self._degree is None else (self._degree,)
        return (
            degree
            for degree in wanted
            if count % degree == 0 and (self._copies is None or count // degree == self._copies)
        )

    def _candidate(self, hardware: Hardware, form: Form, degree: int, demand: Demand) -> Candidate | None:
        """A candidate; None: the model in these formats cannot be cut into this number of parts."""
        part = self._part(form, degree)
        if part is None:
            return None
        fit = fit_of(form, part[0], hardware.facts, part[1], self._pages_of(form, part[0], degree))
        longest = min(fit.pages.longest(fit.num_blocks), form.resolved.model.max_model_len)
        row = Candidate(hardware, degree, fit, longest, 0, demand, None, "", self._model.is_native)
        if row.missing_bytes:
            return row
        known = self._cost(hardware, form, degree)
        steps = form.resolved.scheduler
        room = min(demand.lengths.that_fit(fit.pages, fit.num_blocks), steps.max_num_seqs)
        service = Service(known.cost, demand.lengths, steps.max_num_batched_tokens, room)
        return replace(row, num_requests=room, service=service, origin=known.origin)

    def _part(self, form: Form, degree: int) -> Part | None:
        is_packed = packs_floats(form.resolved.device.isa)
        key = (form.weights.dtype, form.weights.quantization, is_packed, degree)
        if key not in self._parts:
            self._parts[key] = None
            if (cut := self._cut(degree)) is not None:
                with suppress(ModelConfigError):
                    self._parts[key] = (cut, weight_bytes(form, cut))
        return self._parts[key]

    def _cut(self, degree: int) -> ModelConfig | None:
        """The part of a rank, which is the same in all formats; None: the model cannot be cut in this way."""
        if degree not in self._cuts:
            self._cuts[degree] = None
            with suppress(ModelConfigError):
                engine = replace(self._engine, tensor_parallel_size=degree)
                self._cuts[degree] = cut_of(self._model, engine).part()
        return self._cuts[degree]

    def _pages_of(self, form: Form, part: ModelConfig, degree: int) -> KvPages:
        """The pages of requests. They are the same for all formats of the weights."""
        settings = form.resolved.model
        key = (settings.dtype, settings.kv_cache_dtype, settings.block_size, form.resolved.scheduler, degree)
        if key not in self._pages:
            self._pages[key] = KvPages.of(form.resolved, part)
        return self._pages[key]

    def _cost(self, hardware: Hardware, form: Form, degree: int) -> KnownCost:
        if not hardware.is_known:
            return known_cost(form.resolved, self._model, hardware.facts, hardware.read_bandwidth)
        part = self._part(form, degree)
        assert part is not None, "it fits"
        key = (form.weights.dtype, form.weights.quantization, form.kv_cache_dtype, degree)
        if key not in self._arithmetic:
            whole = self._engine.enable_expert_parallel
            is_native = self._model.runs_natively(self._engine.model_impl)
            between = exchanges(
                self._model, Grid(degree), form.weights.dtype, has_whole_experts=whole, is_native=is_native
            )
            self._arithmetic[key] = step_arithmetic(form.resolved, part[0], between)
        arithmetic, gpu = self._arithmetic[key], hardware.facts.gpu
        return described_cost(
            arithmetic, hardware.ceilings(arithmetic.is_fp8), is_gpu=gpu is not None, links=links_between(gpu)
        )


def _is_alike(one: Candidate, other: Candidate) -> bool:
    return (one.fit.form.weights, one.fit.form.kv_cache_dtype, one.degree) == (
        other.fit.form.weights,
        other.fit.form.kv_cache_dtype,
        other.degree,
    )
