"""Targets for times: their spelling, refusals, and the limit below which no start is possible."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import demo
from quire.config import EngineConfig
from quire.cost.calibrate import Fit
from quire.cost.store import CalibrationFile
from quire.engine.start import start_engine
from quire.errors import ConfigError
from quire.option import check_reachable, parse_duration, shown_duration
from tests.cost.models import CONSTANTS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("1.5s", 1.5), ("2", 2.0), (" 0.25 ", 0.25), (3, 3.0), (0.5, 0.5), ("1e-3s", 1e-3)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


ILLEGAL = ["5 parsecs", 1e-310, 1e300, "-1s", "0", "0ms", "", "ms", "1m", "inf", "nan", "1.5.2s", "s5", 0, -2, True]


@pytest.mark.parametrize("text", ILLEGAL)
@pytest.mark.parametrize("name", ["slo_ttft", "slo_itl"])
def test_what_is_no_duration_is_refused_with_the_legal_forms(text: Any, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**{name: text})
    if not isinstance(text, bool):
        assert "500ms, 1.5s, or a number of seconds" in error.value.message


def test_the_command_line_refuses_it_too() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--slo-ttft", "5 parsecs"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "500ms" in ended.stderr


@pytest.mark.parametrize("seconds", [0.0123456, 0.5, 1.0, 1.23456, 12.0, 123.4, 9.996e-4])
def test_a_shown_duration_is_no_less(seconds: float) -> None:
    assert seconds <= parse_duration(shown_duration(seconds)) <= 1.01 * seconds


def test_the_alias(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(slo="ttft=500ms, itl=0.05", sources={"slo": "flag"})
    assert (config.slo_ttft, config.slo_itl, config.slo) == (0.5, 0.05, None)
    assert config.sources["slo_ttft"] == config.sources["slo_itl"] == "flag"
    assert EngineConfig(slo="itl=50ms", slo_itl=0.05).slo_itl == 0.05
    with caplog.at_level(logging.WARNING, "quire"):
        assert EngineConfig(slo="tpot=50ms").slo_itl == 0.05
    assert "taken as itl" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"slo": "ttft"}, "duration"),
        ({"slo": "e2e=5s"}, "ttft=500ms, itl=50ms"),
        ({"slo": ""}, "ttft=500ms, itl=50ms"),
        ({"slo": "itl=5ms", "slo_itl": 0.006}, "different things"),
        ({"slo_attainment": 1.0}, "a share from 0.5 to 0.9999"),
        ({"slo_attainment": 0.4}, "a share from 0.5 to 0.9999"),
        ({"slo_itl": 1.0, "enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
    ],
)
def test_illegal_targets(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        EngineConfig(**arguments)


def test_a_target_below_the_fastest_step_is_refused_with_one_that_is_not() -> None:
    check_reachable("slo_itl", None, 0.01, 0.02)
    check_reachable("slo_itl", 0.01, 0.01, 0.02)
    with pytest.raises(ConfigError, match=r"Got '5ms'. Expected at least 10ms; 20ms is reached"):
        check_reachable("slo_itl", 0.005, 0.01, 0.02)


@pytest.mark.parametrize("name", ["slo_ttft", "slo_itl"])
def test_a_start_with_it_is_refused(name: str) -> None:
    config = EngineConfig(load_format="dummy", num_gpu_blocks_override=256, max_num_seqs=4, **{name: "1e-6s"})
    with pytest.raises(ConfigError, match="below the fastest step") as error:
        start_engine(config, Path(demo.path()), is_server=True, progress=lambda *_: None)
    assert error.value.param == name


def test_an_engine_that_takes_over_keeps_the_target() -> None:
    """A target that the first start could reach is not refused because the present steps are slower."""
    config = EngineConfig(load_format="dummy", num_gpu_blocks_override=256, max_num_seqs=4, slo_itl="1e-6s")
    engine = start_engine(config, Path(demo.path()), is_server=True, progress=lambda *_: None, is_first=False)
    engine.core.shutdown()


def test_a_calibration_of_a_busy_machine_is_not_believed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CalibrationFile, "read", lambda file: Fit(replace(CONSTANTS, per_step=10.0), 0.05))
    config = EngineConfig(load_format="dummy", num_gpu_blocks_override=256, max_num_seqs=4, slo_itl="1s")
    engine = start_engine(config, Path(demo.path()), is_server=True, progress=lambda *_: None)
    assert engine.calibration is not None, "it is measured again"
    engine.core.shutdown()


def test_an_engine_says_how_fast_it_is_and_keeps_a_target_that_it_can_reach() -> None:
    config = EngineConfig(load_format="dummy", num_gpu_blocks_override=256, max_num_seqs=4, slo="ttft=90s,itl=90s")
    engine = start_engine(config, Path(demo.path()), is_server=True, progress=lambda *_: None)
    pace = engine.ready_message().pace
    assert pace is not None
    assert 0 < pace.fastest_step < pace.usual_step
    assert 0 < pace.prompt_seconds(100) < pace.prompt_seconds(1000) < 90
    assert engine.core.scheduler.limits.slo_itl == 90
    engine.core.shutdown()
