"""The time of a step: its demand times a few constants of one machine, one build and one model in one form.

    t = host + logits * row + ((weights * w)^p + (operations * c)^p)^(1/p) + rescanned * r
        + uncached(kv_bytes) * k + attention * a + exchanges * x + exchanged bytes * b

Weights are read while products are computed. `overlap` p says how far the shorter part hides behind the longer one
(p = 1: not at all). This is the roofline (Williams et al. 2009) with a round knee. Keys and values that the processor's
caches keep from step to step are read faster. Weights cost once more if more rows take turns over them than the kernels
compute together. While ranks exchange columns, none of them computes. Exchanges within a machine and between machines
cost different times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from quire.cost.arithmetic import Demand
from quire.cost.collectives import NO_LINKS, Links

Bound = Literal["memory", "arithmetic", "attention", "host", "links"]

# A byte of keys and values costs only this share if all of them are much smaller than a cache of this size. Source:
# tests/cost/recorded, with two cores: 15 GB/s for 4 MB, 8 GB/s for 33 MB, 6 GB/s for 134 MB.
CACHED_SHARE, CACHED_BYTES = 0.4, 16e6
MIN_SPREAD = 0.03  # no machine repeats a step more exactly


@dataclass(frozen=True, slots=True)
class Constants:
    """The machine's seconds for a unit of each amount, in the order of `amounts`, and the overlap.

    Attributes:
        links: the seconds of exchanges. They are measured by themselves, and never fitted.
    """

    per_step: float
    per_logit_row: float  # sampling, and the host's work for a row
    per_weight_byte: float
    per_operation: float  # seconds per operation of products with weights
    per_kv_byte: float
    per_attention_flop: float
    per_rescanned_byte: float
    overlap: float  # at least 1; not in seconds
    links: Links = field(default=NO_LINKS, kw_only=True)

    @property
    def fitted(self) -> tuple[float, ...]:
        """The numbers that steps teach, in their order: all but the links."""
        return tuple(getattr(self, name) for name in FITTED)


FITTED = tuple(each.name for each in fields(Constants) if each.name != "links")


def prior(read_bandwidth: float, flops: float) -> Constants:
    """The expected constants before any step was measured.

    Args:
        read_bandwidth: bytes per second.
        flops: floating point operations per second.
    """
    return Constants(
        per_step=1e-4,
        per_logit_row=3e-5,
        per_weight_byte=1 / read_bandwidth,
        per_operation=1 / flops,
        per_kv_byte=1 / read_bandwidth,
        per_attention_flop=4 / flops,
        per_rescanned_byte=1 / read_bandwidth,
        overlap=2.0,
    )


class StepTime(NamedTuple):
    """A prediction, in seconds. Nine of ten steps lie between `low` and `high`; most of the time goes to `bound`."""

    seconds: float
    low: float
    high: float
    bound: Bound


def step_seconds(demand: Demand, constants: Constants) -> float:
    """The time of a step."""
    host, linear_bytes, linear_ops, again, kv, attention, exchanges = _parts(demand, constants)
    return host + _overlapped(linear_bytes, linear_ops, constants.overlap) + again + kv + attention + exchanges


def exchange_seconds(demand: Demand, links: Links) -> float:
    """The time in which the ranks of a step exchange something."""
    near = links.near.seconds(demand.near_exchanges, demand.near_bytes)
    return near + links.far.seconds(demand.far_exchanges, demand.far_bytes)


def step_time(
    demand: Demand, constants: Constants, spread: float, factor: float = 1.0, further: float = 0.0
) -> StepTime:
    """The time of a step with its interval.

    Args:
        spread: the interval is from seconds / (1 + spread) to seconds * (1 + spread).
        factor: a known correction of the constants' answer.
        further: seconds that are added.
    """
    host, linear_bytes, linear_ops, again, kv, attention, exchanges = _parts(demand, constants)
    linear = _overlapped(linear_bytes, linear_ops, constants.overlap)
    seconds = factor * (host + linear + again + kv + attention + exchanges) + further
    memory, ratio = linear_bytes + again + kv, 1 + max(spread, MIN_SPREAD)
    bound: Bound = "memory" if memory >= linear_ops else "arithmetic"
    if exchanges > max(memory, linear_ops, host, attention):
        bound = "links"
    elif host > max(memory, linear_ops, attention):
        bound = "host"
    elif attention > max(memory, linear_ops):
        bound = "attention"
    return StepTime(seconds, seconds / ratio, seconds * ratio, bound)


def reading_share(demand: Demand, constants: Constants) -> float:
    """The relative change of a step's time for a small relative change of the time of reading: from 0 to 1."""
    host, linear_bytes, linear_ops, again, kv, attention, exchanges = _parts(demand, constants)
    linear = _overlapped(linear_bytes, linear_ops, constants.overlap)
    shorter, longer = sorted((linear_bytes, linear_ops))
    of_shorter = 0.0 if longer == 0 else 1 - 1 / (1 + (shorter / longer) ** constants.overlap)
    of_bytes = 1 - of_shorter if linear_bytes == longer else of_shorter
    return (of_bytes * linear + again + kv) / (host + linear + again + kv + attention + exchanges)


def knee_rows(row: Demand, constants: Constants) -> float:
    """The number of such rows from which on a step's products take longer than reading the weights."""
    products = (row.linear_flops + row.linear_int8_ops) * constants.per_operation
    return row.weight_bytes * constants.per_weight_byte / products


def amounts(demand: Demand) -> tuple[float, float, float, float, float, float, float]:
    """The factors of the fitted constants, in their order: each but the overlap."""
    return (
        1.0,
        demand.num_logits,
        demand.weight_bytes,
        demand.linear_flops + demand.linear_int8_ops + demand.filling_ops,
        _uncached(demand.kv_bytes),
        demand.attention_flops,
        demand.rescanned_bytes,
    )


def _parts(demand: Demand, constants: Constants) -> tuple[float, float, float, float, float, float, float]:
    steps, logits, weight_bytes, operations, kv_bytes, attention_flops, rescanned_bytes = amounts(demand)
    return (
        steps * constants.per_step + logits * constants.per_logit_row,
        weight_bytes * constants.per_weight_byte,
        operations * constants.per_operation,
        rescanned_bytes * constants.per_rescanned_byte,
        kv_bytes * constants.per_kv_byte,
        attention_flops * constants.per_attention_flop,
        exchange_seconds(demand, constants.links),
    )


def _uncached(kv_bytes: float) -> float:
    """The number of uncached bytes that would cost the same."""
    return kv_bytes * (kv_bytes + CACHED_SHARE * CACHED_BYTES) / (kv_bytes + CACHED_BYTES)


def _overlapped(first: float, second: float, overlap: float) -> float:
    longer, shorter = (first, second) if first >= second else (second, first)
    return longer * math.exp(math.log1p((shorter / longer) ** overlap) / overlap) if longer > 0 else 0.0
