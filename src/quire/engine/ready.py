"""The report of a ready engine to the front end: its settings, and the predicted times of its steps."""

from __future__ import annotations

from quire.cost.model import CostModel
from quire.messages import EngineReady, Pace
from quire.option import check_reachable
from quire.planning.step_costs import SHORT_CONTEXT
from quire.scheduler.limits import SchedulerLimits
from quire.settings import Planned, SchedulerSettings, as_dict


def ready_message(resolved: Planned, cost: CostModel | None, limits: SchedulerLimits) -> EngineReady:
    """Of an engine with these settings."""
    return EngineReady(
        max_model_len=resolved.model.max_model_len,
        num_blocks=resolved.memory.num_blocks,
        block_size=resolved.model.block_size,
        max_num_seqs=resolved.scheduler.max_num_seqs,
        max_num_batched_tokens=resolved.scheduler.max_num_batched_tokens,
        resolved=as_dict(resolved.settings),
        pace=None if cost is None else pace_of(cost, limits),
        num_lanes=resolved.scheduler.num_lanes,
    )


def check_targets(schedule: SchedulerSettings, cost: CostModel, limits: SchedulerLimits) -> None:
    """Raise ConfigError for --slo-ttft or --slo-itl below the fastest step."""
    pace = pace_of(cost, limits)
    for name in ("slo_ttft", "slo_itl"):
        check_reachable(name, getattr(schedule, name), pace.fastest_step, pace.usual_step)


def pace_of(cost: CostModel, limits: SchedulerLimits) -> Pace:
    """Predictions of later steps, for the front end."""
    load = cost.arithmetic.load

    def prompt_seconds(start: int) -> float:
        return cost.predict(load([start], [count], 1)).seconds

    short, far, num_rows = min(SHORT_CONTEXT, limits.max_model_len - 1), limits.max_model_len // 2, limits.max_num_seqs

    def answer_seconds(context: int) -> float:
        return cost.predict(load([context] * num_rows, [1] * num_rows, num_rows)).seconds

    one, many = cost.predict(load([short], [1], 1)), answer_seconds(short)
    per_kv_token = max(answer_seconds(far) - many, 0.0) / (num_rows * max(far - short, 1))
    first_row = max(one.seconds - short * per_kv_token, 0.0)
    per_row = max(many - num_rows * short * per_kv_token - first_row, 0.0) / max(num_rows - 1, 1)
    count = max(min(limits.max_num_batched_tokens, limits.max_model_len // 2), 1)
    start = limits.max_model_len - count
    first = prompt_seconds(0)
    per_pair = max(prompt_seconds(start) - first, 0.0) / max(start * count, 1)
    per_token = max(first / count - count / 2 * per_pair, 0.0)
    return Pace(one.low, one.high, per_token, per_pair, first_row, per_row, per_kv_token)
