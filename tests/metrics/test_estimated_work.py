"""vllm:estimated_*: the demands of all steps, added up."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

import quire.demo
from quire.cost.arithmetic import StepArithmetic
from quire.messages import EngineReady
from quire.metrics.prometheus import PrometheusMetrics
from quire.model_config import load_model_config
from tests.metrics.test_registry import record


def test_steps_are_added_up() -> None:
    model = load_model_config(quire.demo.path())
    arithmetic = StepArithmetic(model, "bfloat16", "int4", "fp8_e5m2")
    load = arithmetic.load([9, 30], [1, 4], 2)
    metrics = PrometheusMetrics("m", 2048, model=model)
    step = record(
        num_prefill_tokens=4,
        num_decode_tokens=1,
        num_logits=2,
        num_rows=2,
        kv_tokens=load.kv_tokens,
        pairs=load.pairs,
    )
    metrics.engines[0].on_step(step)  # of a batch that was on its way before anything was known
    resolved = {
        "dtype": {"value": "bfloat16"},
        "quantization": {"value": "int4"},
        "kv_cache_dtype": {"value": "fp8_e5m2"},
    }
    metrics.engines[0].on_ready(EngineReady(2048, 8, 16, 8, 2048, resolved))
    metrics.engines[0].on_step(step)
    metrics.engines[0].on_step(step)
    metrics.engines[0].on_step(record(num_decode_tokens=1, num_rows=1))  # of an engine without a cost model
    families = text_string_to_metric_families(metrics.render().decode())
    found = {f.name.removeprefix("vllm:estimated_"): f.samples[0].value for f in families if "estimated" in f.name}
    demand = arithmetic.demand(load)
    assert found == {
        "flops_per_gpu": 2 * demand.flops,
        "read_bytes_per_gpu": 2 * (demand.weight_bytes + demand.kv_bytes),
        "write_bytes_per_gpu": 2 * demand.written_bytes,
    }
