"""MFU and MBU: shares of the ceilings over the last steps, without steps that are long past."""

from __future__ import annotations

import pytest

import quire.demo
from quire.cost.arithmetic import Demand, StepArithmetic
from quire.messages import EngineReady
from quire.metrics.prometheus import PrometheusMetrics
from quire.metrics.reader import Gauge, read
from quire.metrics.utilization import WINDOW_SECONDS, Utilization
from quire.model_config import load_model_config
from tests.metrics.test_registry import record

DEMAND = Demand(60.0, 40.0, 5.0, 1e3, 2e3, 3e3, 1)  # 100 bytes read, 6000 operations


def test_a_share_is_that_of_all_steps_together() -> None:
    utilization = Utilization(flops=60e3, read_bandwidth=1e3)
    assert utilization.add(DEMAND, 0.2) == pytest.approx((0.5, 0.5))
    assert utilization.add(DEMAND, 0.0002) == pytest.approx((1.0, 1.0), rel=1e-3)
    utilization.clear()
    assert utilization.add(DEMAND, 0.1) == pytest.approx((1.0, 1.0))


def test_old_steps_fade() -> None:
    utilization = Utilization(flops=60e3, read_bandwidth=1e3)
    for _ in range(100):
        utilization.add(DEMAND, 0.1)
    for _ in range(60):
        slow = utilization.add(DEMAND, WINDOW_SECONDS / 10)
    assert slow == pytest.approx((0.1, 0.1), rel=0.02)


def test_without_ceilings_there_is_no_share() -> None:
    assert Utilization(0.0, 0.0).add(DEMAND, 0.1) == (0.0, 0.0)


def shares(metrics: PrometheusMetrics) -> tuple[float, ...]:
    gauges = {metric.name: metric.value for metric in read(metrics.registry) if isinstance(metric, Gauge)}
    return gauges["quire_model_flops_utilization"], gauges["quire_model_bandwidth_utilization"]


def test_the_gauges_follow_the_steps_and_fall_to_nothing_when_idle() -> None:
    model = load_model_config(quire.demo.path())
    arithmetic = StepArithmetic(model, "bfloat16", "int8", "auto")
    load = arithmetic.load([9, 30], [1, 1], 2)
    demand = arithmetic.demand(load)
    metrics = PrometheusMetrics("m", 2048, model=model)
    engine = metrics.engines[0]
    resolved: dict[str, object] = {
        "dtype": {"value": "bfloat16"},
        "quantization": {"value": "int8"},
        "kv_cache_dtype": {"value": "auto"},
        "peak_flops": {"value": 8 * demand.flops},
        "peak_read_bandwidth": {"value": 4 * (demand.weight_bytes + demand.kv_bytes)},
    }
    engine.on_ready(EngineReady(2048, 8, 16, 8, 2048, resolved))
    engine._num_unfinished = 1
    step = record(num_decode_tokens=2, num_rows=2, num_logits=2, kv_tokens=load.kv_tokens, pairs=load.pairs)
    step.step_seconds = 0.5
    engine.on_step(step)
    assert shares(metrics) == pytest.approx((1 / 4, 1 / 2))
    engine._num_unfinished = 0
    engine.on_step(step)
    assert shares(metrics) == (0, 0)
