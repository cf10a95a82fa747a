"""The first token of an engine: ready means that a real one has come out of the whole path."""

from __future__ import annotations

from quire.engine.core import EngineCore
from quire.errors import WeightsError
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams


def produce_a_token(core: EngineCore) -> None:
    """Run one request, of which nothing stays. Raises WeightsError if the model gives no token for it."""
    params = SamplingParams(temperature=0.0, max_tokens=1, skip_reading_prefix_cache=True, seed=0)
    core.add(AddRequest("warm-up", [0], params, max_tokens=1))
    deltas = []
    while core.has_work():
        deltas += core.step()
    (delta,) = deltas
    if delta.error is not None:
        raise WeightsError(
            f"The model produced no token: {delta.error}",
            fix="Check the checkpoint. Some models need more range than float16 has: try --dtype bfloat16 or float32",
        )
    core.scheduler.reset_prefix_cache()
