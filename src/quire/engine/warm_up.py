"""Produces the first tokens of an engine. An engine is ready when a real token has come out of the whole path."""

from __future__ import annotations

from quire.engine.core import EngineCore
from quire.errors import WeightsError
from quire.messages import AddRequest
from quire.metrics.stopwatch import Lap, Stopwatch, busy_machine
from quire.sampling_params import SamplingParams

MOST_TOKENS = 7  # together with the prompt of one token, they fit into the smallest block
MOST_SECONDS = 0.05  # no further token is started after this time
MOST_DISTURBED_SECONDS = 0.5  # the same limit, as long as other programs have disturbed every step


def produce_tokens(core: EngineCore, watch: Stopwatch | None = None, *, has_time_limit: bool = True) -> list[Lap]:
    """Run one request, and keep nothing of it.

    Args:
        watch: measures the steps; None: a new one.
        has_time_limit: whether the time limits above hold.

    Returns:
        The times of its steps; each step computes one token. The time that a step has waited for a core is known only
        if this thread computes the step: with one batch in flight and one rank.

    Raises:
        WeightsError: the model gives no token.
    """
    max_tokens = min(MOST_TOKENS, core.scheduler.limits.max_model_len - 1)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_reading_prefix_cache=True, seed=0)
    core.add(AddRequest("warm-up", [0], params, max_tokens=max_tokens))
    laps: list[Lap] = []
    watch = watch or Stopwatch()
    while core.has_work():
        for delta in core.step():
            if delta.error is not None:
                raise WeightsError(
                    f"The model produced no token: {delta.error}",
                    fix="Check the checkpoint. Some models need more range than float16 has: try --dtype bfloat16 or "
                    "float32",
                )
        if core.last_record is not None:
            waited = watch.lap().waited if core.depth == 1 and not core.last_record.ranks else 0.0
            laps.append(Lap(core.last_record.step_seconds, waited))
            is_disturbed = all(busy_machine(lap.waited) is not None for lap in laps)
            if has_time_limit and sum(lap.seconds for lap in laps) > (
                MOST_DISTURBED_SECONDS if is_disturbed else MOST_SECONDS
            ):
                core.abort(["warm-up"])
    core.scheduler.reset_prefix_cache()
    return laps
