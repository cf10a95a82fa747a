"""A simulation from settings to rounds: it resolves the settings like a start, and makes an engine from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from quire.config import EngineConfig
from quire.cost.model import CostModel
from quire.cost.step_time import MIN_SPREAD
from quire.engine.core import EngineCore
from quire.engine.ready import check_targets, ready_message
from quire.frontend.tokenizer import Tokenizer
from quire.measure.arrivals import arrival_times
from quire.measure.load import Run
from quire.measure.prepared_load import PreparedLoad
from quire.measure.statistics import measure, word
from quire.measure.workload import BenchRequest
from quire.model_config import ModelConfig
from quire.planning.cut_stages import check_cuts, cut_of, exchanges_of
from quire.planning.memory_plan import plan_kv_cache, predict_memory
from quire.planning.step_costs import KnownCost, known_cost
from quire.resolve import DeviceFacts, resolve
from quire.scheduler.from_settings import scheduler_of
from quire.settings import Planned
from quire.simulate.executor import PredictedExecutor, UntaughtCost, VirtualClock
from quire.simulate.load import Client, Prompt, Totals

RATES = ("request_throughput", "output_throughput", "total_token_throughput")
COUNTS = ("num_preemptions", "prefix_cache_hits")


def plan_engine(config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> Planned:
    """The settings of a server that would start now. Raises ConfigError and MemoryPlanError."""
    resolved = resolve(config, model, device, is_server=True)
    return plan_kv_cache(config, model, resolved, predict_memory(resolved, model, device))


def client_of(resolved: Planned, model: ModelConfig, cost: CostModel) -> Client:
    """A client of an engine with these settings; each step takes its predicted time."""
    clock = VirtualClock()
    scheduler = scheduler_of(resolved, model, cost, clock.read)
    depth = resolved.scheduler.depth
    core = EngineCore(
        scheduler,
        PredictedExecutor(cost, clock, resolved.scheduler.pipeline_parallel_size),
        depth,
        cost,
        clock=clock.read,
        sleep=clock.sleep,
    )
    client = Client(core, clock, overhead=cost.overhead)
    client.door.on_ready(ready_message(resolved, cost, scheduler.limits))
    return client


def simulate(
    name: str,
    config: EngineConfig,
    model: ModelConfig,
    device: DeviceFacts,
    load: PreparedLoad,
    bar: Any,
    percentiles: Sequence[float] = (),
    limits_ms: Mapping[str, float] = MappingProxyType({}),
) -> tuple[list[Run], dict[str, Any]]:
    """The rounds of a load, and facts about the engine for the result. Equal arguments give equal answers.

    The load is simulated three times: with predicted steps, and with all steps at one end of their interval. So the
    interval of a result counts the queues that slower steps make.

    Args:
        name: the name of the model.
        bar: called with the number of requests of all three; returns an object with update() and close().
        percentiles: of times, to give intervals for.
        limits_ms: see `measure`. With limits there is an interval for the goodput.

    Raises:
        ConfigError: the settings or the load contradict themselves, or the model does not fit into memory.
    """
    check_cuts(model, config)
    whole, model = model, cut_of(model, config).part()
    device = device.shared_by(config.num_local_ranks, config.pipeline_parallel_size)
    resolved = plan_engine(config, model, device)
    known = known_cost(resolved, model, device, exchanges=exchanges_of(whole, config, resolved.model.dtype))
    rounds = [load.requests(load.workload.seed + i) for i in range(load.traffic.num_rounds)]
    sent = [_prompts(requests, load.tokenizer) for requests in rounds]
    warm_up = _prompts(load.warm_up_requests(), load.tokenizer) if load.traffic.num_warmups else []
    ratio = 1 + max(known.cost.spread, MIN_SPREAD)
    progress = bar(3 * sum(map(len, rounds)))

    def serve(slowness: float) -> tuple[list[Run], Totals]:
        cost = UntaughtCost(known.cost.arithmetic, known.cost.fit.slower(slowness))
        client = client_of(resolved, model, cost)
        if slowness == 1:
            check_targets(resolved.scheduler, cost, client.core.scheduler.limits)
        client.run(warm_up, [0.0] * len(warm_up))
        client.totals = Totals()
        runs: list[Run] = []
        for i, (requests, prompts) in enumerate(zip(rounds, sent, strict=True)):
            times = arrival_times(load.traffic, requests, load.workload.seed + i)
            most = load.traffic.max_concurrency
            runs.append(client.run(prompts, times, max_concurrency=most, on_done=progress.update))
        return runs, client.totals

    runs, totals = serve(1.0)
    ends = [serve(slowness) for slowness in (1 / ratio, ratio)]
    progress.close()
    prompts = [prompt for each in sent for prompt in each]
    facts = {
        "date": None,
        "endpoint_type": "simulated",
        "backend": "simulated",
        "model_id": name,
        "tokenizer_id": config.tokenizer or name,
        "num_requests_sent": len(prompts),
        "num_unique_prompts": len({tuple(prompt.token_ids) for prompt in prompts}),
        "hardware_limit": None,
        "simulated": _said_of(resolved, known, totals)
        | {
            "step_time_interval": [1 / ratio, ratio],  # measured / predicted of nine of ten steps lies in it
            "intervals": _intervals([(runs, totals), *ends], percentiles, limits_ms),
        },
    }
    return runs, facts


def _intervals(
    cases: Sequence[tuple[Sequence[Run], Totals]], percentiles: Sequence[float], limits_ms: Mapping[str, float]
) -> dict[str, list[float]]:
    """The least and the greatest rates, times and counts of several cases, under their keys in the result.

    A case in which nothing was timed has no times: it refused all requests, or their answers are single tokens.
    """
    found: dict[str, list[float]] = {}
    for runs, totals in cases:
        metrics = measure(runs, percentiles, limits_ms)
        numbers = {name: metrics.rates[name] for name in (*RATES, *(["request_goodput"] if limits_ms else []))}
        for name, times in metrics.times.items():
            if times.num_values:
                numbers |= {f"mean_{name}_ms": 1000 * times.mean, f"median_{name}_ms": 1000 * times.median}
                numbers |= {f"p{word(p)}_{name}_ms": 1000 * seconds for p, seconds in times.percentiles.items()}
        numbers |= {name: getattr(totals, name) for name in COUNTS}
        for name, number in numbers.items():
            found.setdefault(name, []).append(number)
    return {name: [min(numbers), max(numbers)] for name, numbers in found.items()}


def _said_of(resolved: Planned, known: KnownCost, totals: Totals) -> dict[str, Any]:
    """The entries that only a simulated result has, but for intervals."""
    return {
        "is_calibrated": known.is_measured,
        "step_times": known.origin,
        "overhead": None if (overhead := known.cost.overhead) is None else asdict(overhead),
        **asdict(totals),
        "settings": {
            **asdict(resolved.model),
            **asdict(resolved.scheduler),
            "num_blocks": resolved.memory.num_blocks,
        },
    }


def _prompts(requests: Sequence[BenchRequest], tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of the requests as token ids."""
    return [
        Prompt(
            request.prompt if isinstance(request.prompt, list) else tokenizer.encode(request.prompt), request.output_len
        )
        for request in requests
    ]
