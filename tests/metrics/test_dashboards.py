"""The dashboard and the rules: made from the registry, complete, and right about when an alert fires."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.metrics import rules
from quire.metrics.dashboards import SECTIONS, dashboard, files
from quire.metrics.queries import DECLARED, Queries

ROOT = Path(__file__).parents[2]
STALE = "run: make dashboards"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing")


def test_the_files_are_current():
    for path, content in files().items():
        assert (ROOT / "deploy" / path).read_text(encoding="utf-8") == content, STALE
    assert (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8") == rules.markdown(), STALE


def test_every_metric_has_a_panel():
    shown = {name for _, section in SECTIONS for panel in section for name in panel.names}
    assert shown == set(DECLARED)


def test_a_name_that_nothing_emits_is_an_error():
    queries = Queries("5m")
    with pytest.raises(KeyError):
        queries.gauge("vllm:gpu_cache_usage_perc")
    with pytest.raises(AssertionError, match="is a gauge"):
        queries.rate("vllm:num_requests_running")
    with pytest.raises(AssertionError, match="has no"):
        queries.rate("vllm:request_success", finished_reason="swapped")


def test_panels_do_not_overlap():
    cells = set()
    for panel in dashboard()["panels"]:
        position = panel["gridPos"]
        taken = {(position["x"] + x, position["y"] + y) for x in range(position["w"]) for y in range(position["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in taken) < 24
        cells |= taken
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])


def test_pages_name_alerts_that_exist():
    names = {alert.name for alert in rules.ALERTS}
    named = {name for path in (ROOT / "docs").glob("*.md") for name in re.findall(r"\bQuire[A-Z]\w+", path.read_text())}
    assert names <= named
    texts = " ".join(f"{alert.means} {alert.remedy}" for alert in rules.ALERTS)
    assert set(re.findall(r"\bQuire[A-Z]\w+", texts)) <= names


@needs_promtool
def test_promtool_takes_the_files(tmp_path):
    for command in (["check", "rules", "rules.yml"], ["check", "config", "prometheus.yml"]):
        result = subprocess.run(
            ["promtool", *command], cwd=ROOT / "deploy" / "prometheus", capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


ENGINE = 'instance="a:1", job="quire", model_name="m", engine="0"'
MINUTES = 30


def counter(name: str, per_minute: float, labels: str = "") -> dict[str, str]:
    return {"series": f"{name}{{{ENGINE}{labels}}}", "values": f"0+{per_minute:g}x{MINUTES}"}


def constant(name: str, value: float, labels: str = "") -> dict[str, str]:
    return {"series": f"{name}{{{ENGINE}{labels}}}", "values": f"{value:g}+0x{MINUTES}"}


def queue(seconds: str) -> list[dict[str, str]]:
    """Sixty requests a minute that wait between the bound before and this one."""
    bounds = ("0.1", "0.2", "0.3", "0.5", "+Inf")
    name = "vllm:request_queue_time_seconds_bucket"
    return [counter(name, 60 * (bounds.index(bound) >= bounds.index(seconds)), f', le="{bound}"') for bound in bounds]


FULL, PREEMPTS = constant("vllm:kv_cache_usage_perc", 0.99), counter("vllm:num_preemptions_total", 3)
BUSY = [constant("vllm:num_requests_running", 2), constant("vllm:num_requests_waiting", 1)]
IDLE = [constant("vllm:num_requests_running", 0), constant("vllm:num_requests_waiting", 0)]
STEPS, NO_STEPS = (counter("vllm:iteration_tokens_total_count", rate) for rate in (600, 0))
TARGET, NO_TARGET = (constant("quire_slo_target_seconds", value, ', target="ttft"') for value in (0.5, 0))
DOWN = {"series": 'up{instance="a:1", job="quire"}', "values": f"1x5 0x{MINUTES}"}
UP = {"series": 'up{instance="a:1", job="quire"}', "values": f"1x{MINUTES}"}
SLOW = [
    counter("vllm:time_to_first_token_seconds_bucket", rate, f', le="{le}"')
    for le, rate in (("1", 0), ("2.5", 60), ("+Inf", 60))
]


# What a server's metrics are, an alert, and whether it fires.
FIRES = [
    ([FULL, PREEMPTS], "QuireKvCacheFull", True),
    ([FULL, counter("vllm:num_preemptions_total", 0)], "QuireKvCacheFull", False),
    ([constant("vllm:kv_cache_usage_perc", 0.5), PREEMPTS], "QuireKvCacheFull", False),
    ([*BUSY, NO_STEPS], "QuireNoStep", True),
    ([*BUSY, STEPS], "QuireNoStep", False),
    ([*IDLE, NO_STEPS], "QuireNoStep", False),
    ([*queue("0.5"), TARGET], "QuireQueueLong", True),
    ([*queue("0.2"), TARGET], "QuireQueueLong", False),
    ([*queue("0.5"), NO_TARGET], "QuireQueueLong", False),
    ([*SLOW, NO_TARGET], "QuireFirstTokenSlow", True),
    ([*SLOW, TARGET], "QuireFirstTokenSlow", False),
    ([*SLOW, TARGET], "QuireFirstTokenLate", True),
    ([*SLOW, NO_TARGET], "QuireFirstTokenLate", False),
    ([*IDLE, DOWN], "QuireDown", True),
    ([*IDLE, UP], "QuireDown", False),
    ([DOWN], "QuireDown", False),
]


@needs_promtool
def test_when_an_alert_fires(tmp_path):
    """One run of promtool, which says of each wrong case what it expected, with the number of the case."""
    tests = {
        "rule_files": [str(ROOT / "deploy" / "prometheus" / "rules.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0) # {number}',
                        "eval_time": f"{MINUTES}m",
                        "exp_samples": [{"labels": "{}", "value": int(fires)}],
                    }
                ],
            }
            for number, (series, alert, fires) in enumerate(FIRES)
        ],
    }
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(tests))
    result = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
