"""The Grafana dashboard and Prometheus' rules, from the registry: `python -m quire.metrics.dashboards FOLDER`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from quire.metrics.queries import DECLARED, Queries
from quire.metrics.registry import CACHE_CONFIG_INFO, COMMON_LABELS, LORA_REQUESTS_INFO, POSITION
from quire.metrics.rules import rules_file

GRAFANA, RULES = "grafana/quire.json", "prometheus/rules.yml"
_COLUMNS = 24  # columns of Grafana's grid
_HEIGHTS = {"stat": 4, "timeseries": 8, "table": 6}
_QUANTILES = (0.5, 0.9, 0.99)
_Q = Queries("$__rate_interval", has_variables=True)


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        unit: Grafana's name of it.
        queries: legend and expression of each.
        names: the names of the metrics; their help is the description.
        width: in columns of 24.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    kind: str = "timeseries"
    width: int = 8

    @property
    def description(self) -> str:
        return "\n\n".join(DECLARED[name].help for name in self.names)


def _times(title: str, name: str, unit: str = "s") -> Panel:
    """Quantiles and mean of a histogram."""
    queries = [(f"p{share * 100:g}", _Q.quantile(share, name)) for share in _QUANTILES]
    return Panel(title, unit, (*queries, ("mean", _Q.mean(name))), (name,))


def _gauge(title: str, unit: str, name: str) -> Panel:
    """A gauge, for each engine of each server."""
    label = DECLARED[name].label
    legend = "{{instance}} {{engine}}" + (f" {{{{{label}}}}}" if label else "")
    return Panel(title, unit, ((legend, _Q.gauge(name)),), (name,))


def _rates(title: str, unit: str, *names: str) -> Panel:
    """Events per second, by the counters' own labels."""
    queries = []
    for name in names:
        label = DECLARED[name].label
        legend = f"{{{{{label}}}}}" if label else name.partition(":")[2] or name
        queries.append((legend, _Q.rate(name, by=(label,) if label else ())))
    return Panel(title, unit, tuple(queries), names)


def _share(title: str, part: str, whole: tuple[str, ...], *names: str) -> Panel:
    """A rate as a share of the sum of others."""
    return Panel(title, "percentunit", (("share", f"{part} / ({' + '.join(whole)})"),), names)


def _stat(title: str, unit: str, expression: str, *names: str) -> Panel:
    return Panel(title, unit, (("", expression),), names, kind="stat", width=4)


def _information(title: str, name: str) -> Panel:
    return Panel(title, "none", (("", _Q.gauge(name)),), (name,), kind="table", width=24)


def _process(title: str, unit: str, expression: str) -> Panel:
    """A metric of the API process that prometheus_client itself makes."""
    return Panel(title, unit, (("{{instance}}", expression),), ())


_PROMPT, _GENERATED = "vllm:prompt_tokens", "vllm:generation_tokens"
_TTFT, _ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_HITS, _QUERIES = "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"
_DRAFTS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")

# Sections in their order, some with the flags that they need.
SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Overview",
        (
            _stat("Requests per second", "reqps", _Q.rate("vllm:request_success"), "vllm:request_success"),
            _stat("Generated tokens per second", "none", _Q.rate(_GENERATED), _GENERATED),
            _stat("Time to first token, p99", "s", _Q.quantile(0.99, _TTFT), _TTFT),
            _stat("Time between tokens, p99", "s", _Q.quantile(0.99, _ITL), _ITL),
            _stat("Running requests", "none", _Q.sum("vllm:num_requests_running"), "vllm:num_requests_running"),
            _stat("Waiting requests", "none", _Q.sum("vllm:num_requests_waiting"), "vllm:num_requests_waiting"),
            _rates("Ended requests per second", "reqps", "vllm:request_success"),
            _rates("Tokens per second", "none", _PROMPT, _GENERATED),
            _rates("Refused requests per second", "reqps", "vllm:admission_rejections"),
            _share(
                "Share of requests that met the targets",
                _Q.rate("quire_slo_requests", met="true"),
                (_Q.rate("quire_slo_requests"),),
                "quire_slo_requests",
            ),
            _gauge("Targets", "s", "quire_slo_target_seconds"),
            _rates("HTTP answers per second", "reqps", "http_requests"),
        ),
    ),
    (
        "Latency",
        (
            _times("Time to first token", _TTFT),
            _times("Time between tokens", _ITL),
            _times("Whole request", "vllm:e2e_request_latency_seconds"),
            _times("Queue", "vllm:request_queue_time_seconds"),
            _times("Prompt", "vllm:request_prefill_time_seconds"),
            _times("Answer after its first token", "vllm:request_decode_time_seconds"),
            _times("In the engine", "vllm:request_inference_time_seconds"),
            _times("Mean time per token of a request", "vllm:request_time_per_output_token_seconds"),
            _times("HTTP request", "http_request_duration_seconds"),
        ),
    ),
    (
        "KV cache",
        (
            _gauge("Blocks in use", "percentunit", "vllm:kv_cache_usage_perc"),
            _rates("Preemptions per second", "none", "vllm:num_preemptions"),
            _share("Prefix cache hit rate", _Q.rate(_HITS), (_Q.rate(_QUERIES),), _HITS, _QUERIES),
            _rates("Prompt tokens per second by source", "none", "vllm:prompt_tokens_by_source"),
            _rates("Cached prompt tokens per second", "none", "vllm:prompt_tokens_cached"),
            _rates("Cached prompt tokens per second by place", "none", "vllm:prompt_tokens_cached_by_source"),
            _times("Lifetime of a block's content", "vllm:kv_block_lifetime_seconds"),
            _times("Idle before eviction", "vllm:kv_block_idle_before_evict_seconds"),
            _times("Between two uses of a block", "vllm:kv_block_reuse_gap_seconds"),
            _information("Settings of the KV cache", CACHE_CONFIG_INFO.name),
        ),
    ),
    (
        "Scheduler",
        (
            _gauge("Running requests", "none", "vllm:num_requests_running"),
            _gauge("Waiting requests", "none", "vllm:num_requests_waiting"),
            _gauge("Waiting requests by reason", "none", "vllm:num_requests_waiting_by_reason"),
            Panel(
                "Steps per second",
                "none",
                (("steps", _Q.count_rate("vllm:iteration_tokens_total")),),
                ("vllm:iteration_tokens_total",),
            ),
            _times("Tokens of a step", "vllm:iteration_tokens_total", "none"),
            _times("Preemptions of a request", "vllm:request_num_preemptions", "none"),
            _times("Prompt tokens of a request", "vllm:request_prompt_tokens", "none"),
            _times("Computed prompt tokens of a request", "vllm:request_prefill_kv_computed_tokens", "none"),
            _times("Generated tokens of a request", "vllm:request_generation_tokens", "none"),
            _times("Longest continuation of a request", "vllm:request_max_num_generation_tokens", "none"),
            _times("max_tokens of a request", "vllm:request_params_max_tokens", "none"),
            _times("n of a request", "vllm:request_params_n", "none"),
        ),
    ),
    (
        "Engine",
        (
            _times("Predicted time of a step", "quire_step_predicted_seconds"),
            _times("Measured over predicted time of a step", "quire_prediction_ratio", "none"),
            _share(
                "Share of steps in the interval of their prediction",
                _Q.rate("quire_predicted_steps", inside="true"),
                (_Q.rate("quire_predicted_steps"),),
                "quire_predicted_steps",
            ),
            _gauge("State", "none", "vllm:engine_sleep_state"),
            _gauge("Arithmetic in use (MFU)", "percentunit", "quire_model_flops_utilization"),
            _gauge("Memory bandwidth in use (MBU)", "percentunit", "quire_model_bandwidth_utilization"),
            _rates("Estimated operations per second", "flops", "vllm:estimated_flops_per_gpu"),
            _rates(
                "Estimated bytes per second",
                "Bps",
                "vllm:estimated_read_bytes_per_gpu",
                "vllm:estimated_write_bytes_per_gpu",
            ),
            _rates("Engine restarts per second", "none", "quire_engine_restarts"),
            _rates("Retried requests per second", "none", "quire_requests_retried"),
            _rates("Lost requests per second", "none", "quire_requests_lost"),
            _times("Delay of the event loop", "quire_event_loop_lag_seconds"),
            _process(
                "Processor time of the API process",
                "percentunit",
                f'rate(process_cpu_seconds_total{{job=~"$job"}}[{_Q.window}])',
            ),
            _process("Memory of the API process", "bytes", 'process_resident_memory_bytes{job=~"$job"}'),
        ),
    ),
    (
        "Speculation",
        (
            _share("Share of drafted tokens that held", _Q.rate(_DRAFTS[2]), (_Q.rate(_DRAFTS[1]),), *_DRAFTS[1:]),
            _share("Tokens that held, per draft", _Q.rate(_DRAFTS[2]), (_Q.rate(_DRAFTS[0]),), _DRAFTS[0], _DRAFTS[2]),
            Panel(
                "Tokens that held per second, by position in the draft",
                "none",
                (
                    (
                        f"{{{{{POSITION}}}}}",
                        _Q.rate("vllm:spec_decode_num_accepted_tokens_per_pos", by=(POSITION,)),
                    ),
                ),
                ("vllm:spec_decode_num_accepted_tokens_per_pos",),
            ),
            _rates("Requests that lost their drafts, per second", "none", "quire_spec_decode_draft_failures"),
        ),
    ),
    (
        "Adapters",
        (
            _gauge("Adapters", "none", "quire_lora_adapters"),
            _rates("Adapters read per second", "none", "quire_lora_loads"),
            _times("Time to read an adapter", "quire_lora_load_seconds"),
            _information("Adapters of unfinished requests", LORA_REQUESTS_INFO.name),
        ),
    ),
)


def dashboard() -> dict[str, object]:
    """The dashboard in Grafana's JSON model."""
    panels: list[dict[str, object]] = []
    x = y = height = 0

    def place(panel: dict[str, object], width: int, panel_height: int) -> None:
        nonlocal x, y, height
        if x + width > _COLUMNS:
            x, y, height = 0, y + height, 0
        panels.append(panel | {"id": len(panels) + 1, "gridPos": {"h": panel_height, "w": width, "x": x, "y": y}})
        x, height = x + width, max(height, panel_height)

    for title, section in SECTIONS:
        place({"type": "row", "title": title, "collapsed": False, "panels": []}, _COLUMNS, 1)
        for panel in section:
            place(_panel(panel), panel.width, _HEIGHTS[panel.kind])
        x = _COLUMNS  # the next section begins a line of its own
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": "Quire",
        "uid": "quire",
        "description": "Quire's metrics. Generated from the metric registry by `make dashboards`.",
        "tags": ["quire"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                *(
                    {
                        "name": name,
                        "label": label,
                        "type": "query",
                        "datasource": source,
                        "query": {"query": f"label_values(vllm:num_requests_running, {name})", "refId": name},
                        "refresh": 2,
                        "includeAll": True,
                        "multi": True,
                        "allValue": ".*",
                        "current": {"text": "All", "value": "$__all"},
                    }
                    for name, label in (("job", "Job"), (COMMON_LABELS[0], "Model"))
                ),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    is_table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": source,
            "expr": expression,
            "legendFormat": legend,
            **({"format": "table", "instant": True} if is_table else {"range": True}),
        }
        for index, (legend, expression) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def files() -> dict[str, str]:
    """The generated files: content by path within the folder."""
    return {GRAFANA: json.dumps(dashboard(), indent=1) + "\n", RULES: rules_file()}


def main(folder: Path) -> None:
    """Write the files."""
    for path, content in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
