"""`quire bench compare URL URL`: the same requests to both servers, round after round, in alternating order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import uvloop

from quire.measure.options import Report, Target, Traffic, Workload
from quire.measure.report import round_metrics
from quire.measure.serving import find_server, one_round, warm_up

NUM_ROUNDS = 6


def rounds(
    a: str, b: str, workload: Workload, traffic: Traffic, target: Target, report: Report, bar: Any
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The metrics of each round of A and of B. Round i of both has the same requests at the same times.

    If both sides are one server, they get different requests, because the prefix cache would answer the second side.
    """
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        servers = [runner.run(find_server(replace(target, base_url=url))) for url in (a, b)]
        loads = [server.prepare(workload, traffic) for server in servers]
        for server, load in zip(servers, loads, strict=True):
            runner.run(warm_up(server, load))
        progress = bar(2 * traffic.num_rounds * workload.num_prompts)
        for i in range(traffic.num_rounds):
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                seed = workload.seed + i + (traffic.num_rounds * side if a == b else 0)
                requests = loads[side].requests(seed)
                run = runner.run(one_round(servers[side], loads[side], requests, seed, progress.update))
                found[side].append(round_metrics(run, report))
        progress.close()
    return found
