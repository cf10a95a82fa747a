"""The first tokens of an engine: ready means that a real one has come out of the whole path."""

from __future__ import annotations

from quire.engine.core import EngineCore
from quire.errors import WeightsError
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams

MOST_TOKENS = 7  # with the prompt of one token they fit into the smallest block
MOST_SECONDS = 0.05  # after it no further token is started


def produce_tokens(core: EngineCore) -> list[float]:
    """Run one request, of which nothing stays. Returns the seconds of its steps, of one token each.

    Raises WeightsError if the model gives no token for it.
    """
    max_tokens = min(MOST_TOKENS, core.scheduler.limits.max_model_len - 1)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, skip_reading_prefix_cache=True, seed=0)
    core.add(AddRequest("warm-up", [0], params, max_tokens=max_tokens))
    seconds: list[float] = []
    while core.has_work():
        for delta in core.step():
            if delta.error is not None:
                raise WeightsError(
                    f"The model produced no token: {delta.error}",
                    fix="Check the checkpoint. Some models need more range than float16 has: try --dtype bfloat16 or "
                    "float32",
                )
        if core.last_record is not None:
            seconds.append(core.last_record.step_seconds)
            if sum(seconds) > MOST_SECONDS:
                core.abort(["warm-up"])
    core.scheduler.reset_prefix_cache()
    return seconds
