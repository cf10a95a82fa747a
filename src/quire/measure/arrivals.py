"""Arrival times of requests in seconds after the start: Poisson or gamma gaps at a rate or a ramp, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.measure.options import INFINITE, Traffic
from quire.measure.workload import BenchRequest


def arrival_times(options: Traffic, requests: Sequence[BenchRequest], seed: int) -> list[float]:
    """The times at which the requests are sent, in seconds after the start, ascending.

    With a fixed rate the times are stretched so that the last request comes after `num / rate` seconds. So every seed
    offers exactly the same rate, as in vLLM's client.
    """
    is_trace = all(request.timestamp is not None for request in requests)
    if is_trace and options.self_timed is not False:
        return [request.timestamp or 0.0 for request in requests]
    rates = [_rate(options, i, len(requests)) for i in range(len(requests))]
    rng = random.Random(seed)
    times, now = [], 0.0
    for rate in rates:
        now += _gap(rate, options.burstiness, rng)
        times.append(now)
    if options.ramp_up_strategy is None and now > 0:
        factor = len(requests) / options.request_rate / now
        times = [time * factor for time in times]
    return times


def _rate(options: Traffic, index: int, count: int) -> float:
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None or start is None or end is None:
        return options.request_rate
    progress = index / max(count - 1, 1)
    if options.ramp_up_strategy == "linear":
        # A rate of 0 would never send the first request, so it gets the rate of the second.
        return start + (end - start) * progress or (end - start) / max(count - 1, 1)
    return float(start * (end / start) ** progress)


def _gap(rate: float, burstiness: float, rng: random.Random) -> float:
    """A gap with the mean 1 / rate. Its variance is 1 / burstiness times that of a Poisson process."""
    if rate == INFINITE:
        return 0.0
    return 1 / rate if burstiness == INFINITE else rng.gammavariate(burstiness, 1 / (rate * burstiness))
