"""`quire explain` shows the settings of a real start: the same record, except for values that only loading can
measure.
"""

from __future__ import annotations

import pytest

from quire import demo, extension
from quire.config import EngineConfig, ServerConfig
from quire.engine.start import start_engine
from quire.model_config import load_model_config
from quire.planning import devices
from quire.screen.explain import explain
from quire.screen.first_screen import EXPECTED

# Predicted from config.json before loading, measured after it.
MEASURED = {"weight_bytes", "work_bytes", "peak_flops", "peak_read_bandwidth"}
# What is free differs from moment to moment.
MOVING = {"unplanned_bytes"}


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(kv_cache_memory_bytes=1 << 23, num_threads=1),
        EngineConfig(dtype="float32", num_gpu_blocks_override=200, max_num_seqs=4, performance_mode="interactivity"),
        EngineConfig(max_model_len=-1, kv_cache_memory_bytes=1 << 20, block_size=8, enable_chunked_prefill=False),
    ],
    ids=["bytes", "blocks", "longest"],
)
def test_the_engine_starts_with_what_was_explained(config: EngineConfig) -> None:
    device = devices.detect(extension.chosen_isa(), devices.ask_gpu())
    explanation = explain("demo", config, ServerConfig(), load_model_config(demo.path()), device)
    engine = start_engine(config, demo.path(), is_server=True, progress=lambda phase, fraction, detail: None)
    started = engine.resolved.settings
    of_speed = {*EXPECTED, "expected_ttft"}
    assert started.keys() - of_speed <= explanation.settings.keys()
    assert of_speed <= started.keys()
    for name, setting in started.items():
        if name in of_speed:
            continue
        if name not in MEASURED | MOVING:
            assert explanation.settings[name] == setting, name
    for name in MEASURED:
        assert explanation.settings[name].source == "formula"
        assert started[name].source == "measured"
    predicted = explanation.settings["weight_bytes"].value
    assert predicted <= started["weight_bytes"].value <= 1.05 * predicted, "packing pads a little, no more"
