"""A real Prometheus scrapes a server under load: every query of our dashboard and rules, and of vLLM's dashboard,
returns series."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from quire.metrics.dashboards import SECTIONS
from quire.metrics.rules import ALERTS, RECORDS
from tests.e2e.serving import LIGHT, SHORT, SMALL, Serve
from tests.e2e.test_adapters import write

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian package) is missing"),
]

# The metrics in vLLM's published dashboard, by their use.
VLLM_DASHBOARD = {
    "histogram_quantile(0.99, sum by(le) (rate({}_bucket{}[1m])))": (
        "vllm:e2e_request_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:time_to_first_token_seconds",
    ),
    "rate({}_sum{}[1m])": (
        "vllm:e2e_request_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_max_num_generation_tokens",
    ),
    "rate({}{}[1m])": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
    "{}{}": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc"),
    "sum by(le) (increase({}_bucket{}[1m]))": ("vllm:request_prompt_tokens", "vllm:request_generation_tokens"),
    "sum by(finished_reason) (increase({}{}[1m]))": ("vllm:request_success_total",),
}
# Names with `vllm_`, which some dashboards ask for: docs/monitoring.md.
RENAMING = {
    "source_labels": ["__name__"],
    "regex": "vllm:(.+)",
    "target_label": "__name__",
    "replacement": "vllm_${1}",
}


class Prometheus:
    """A Prometheus of its own port and folder."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        scrape = {"static_configs": [{"targets": [target]}]}
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(ROOT / "deploy" / "prometheus" / "rules.yml")],
            "scrape_configs": [
                {"job_name": "quire", **scrape},
                {"job_name": "renamed", **scrape, "metric_relabel_configs": [RENAMING]},
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stderr=self._log,
        )  # fmt: skip

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str, **params: str) -> Any:
        """Its answer. Raises httpx.HTTPError: it is not ready."""
        return httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=10).raise_for_status().json()["data"]

    def series(self, query: str) -> list[Any]:
        found: list[Any] = self.get("query", query=query)["result"]
        return found

    def wait_for_series(self, query: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.series(query):
                    return
            except (httpx.HTTPError, KeyError):
                assert self._process.poll() is None, Path(self._log.name).read_text()
            assert time.monotonic() < deadline, query
            time.sleep(0.1)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    adapter = tmp_path_factory.mktemp("adapters") / "sql"
    write(adapter, "weights")
    flags = (
        "--legacy-metric-names", "--kv-cache-metrics", "--kv-cache-metrics-sample", "1", "--slo", "ttft=10s,itl=10s",
        "--spec-method", "ngram", "--spec-tokens", "2", "--enable-lora", "--lora-modules", f"sql={adapter}",
    )  # fmt: skip
    with Serve(*SMALL, *SHORT, *flags, program=LIGHT) as server:
        running = Prometheus(tmp_path_factory.mktemp("prometheus"), server.url.removeprefix("http://"))
        try:
            running.wait_for_series('up{job="quire"} == 1')
            for _ in range(2):  # a rate needs two scrapes
                body = {"prompt": "Hello", "max_tokens": 8, "model": "sql", "n": 2}
                assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200
                seen = 'count_over_time(vllm:e2e_request_latency_seconds_count{job="quire"}[1m])'
                before = float(running.series(seen)[0]["value"][1])
                running.wait_for_series(f"{seen} > {before + 1}")
            running.wait_for_series("rate(vllm:generation_tokens_total[1m]) > 0")
            running.wait_for_series(next(iter(RECORDS)))
            yield running
        finally:
            running.close()


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    variables = {"$__rate_interval": "1m", "$job": "quire", "$model_name": ".+"}
    silent = []
    for _, section in SECTIONS:
        for panel in section:
            for _, expression in panel.queries:
                query = expression
                for name, value in variables.items():
                    query = query.replace(name, value)
                assert "$" not in query
                if not prometheus.series(query):
                    silent.append((panel.title, query))
    assert not silent


def test_every_rule_is_about_something(prometheus: Prometheus) -> None:
    assert [name for name in RECORDS if not prometheus.series(name)] == []
    conditions = [(alert.name, left) for alert in ALERTS for left, _ in alert.conditions]
    assert [(name, left) for name, left in conditions if not prometheus.series(left)] == []
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RECORDS) + len(ALERTS)
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"], "nothing is wrong"


def test_vllms_dashboard_works(prometheus: Prometheus) -> None:
    selector = '{job="quire", model_name=~".+"}'
    queries = [form.format(name, selector) for form, names in VLLM_DASHBOARD.items() for name in names]
    assert [query for query in queries if not prometheus.series(query)] == []
    assert prometheus.series("rate(vllm_e2e_request_latency_seconds_sum[1m])")
