"""Prometheus' recording and alert rules, from the registry; docs/alerts.md says the same to people:
`python -m quire.metrics.rules > docs/alerts.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import yaml

from quire.metrics.queries import Queries

_ENGINE = ("job", "instance", "model_name", "engine")
_SERVER = ("job", "instance", "model_name")
_E = Queries("5m", by=_ENGINE)
_LONG = Queries("15m", by=_ENGINE)
_S = Queries("5m", by=_SERVER)
_M = Queries("5m", by=("job", "model_name"))
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
_TTFT, _ITL, _QUEUE = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_queue_time_seconds",
)
_TARGET = {
    target: f"max by ({', '.join(_ENGINE)}) ({_E.gauge('quire_slo_target_seconds', target=target)})"
    for target in ("ttft", "itl")
}
_WORK = f"({_E.gauge('vllm:num_requests_running')} + {_E.gauge('vllm:num_requests_waiting')})"

# name -> expression. Of all servers of a job that serve a model.
RECORDS: dict[str, str] = {
    **{
        f"quire:{name.removeprefix('vllm:')}:p{share * 100:g}_5m": _M.quantile(share, name)
        for name in (_TTFT, _ITL, _QUEUE, "vllm:e2e_request_latency_seconds")
        for share in (0.5, 0.9, 0.99)
    },
    "quire:requests:rate_5m": _M.rate("vllm:request_success"),
    "quire:prompt_tokens:rate_5m": _M.rate("vllm:prompt_tokens"),
    "quire:generation_tokens:rate_5m": _M.rate("vllm:generation_tokens"),
    "quire:preemptions:rate_5m": _M.rate("vllm:num_preemptions"),
    "quire:prefix_cache_hits:share_5m": f"{_M.rate('vllm:prefix_cache_hits')} / {_M.rate('vllm:prefix_cache_queries')}",
    "quire:errors:share_5m": (
        f"{_M.rate('vllm:request_success', finished_reason='error')} / {_M.rate('vllm:request_success')}"
    ),
    "quire:targets_met:share_5m": f"{_M.rate('quire_slo_requests', met='true')} / {_M.rate('quire_slo_requests')}",
    "quire:num_requests_waiting:sum": _M.sum("vllm:num_requests_waiting"),
}


@dataclass(frozen=True)
class Alert:
    """One alert.

    Args:
        conditions: expressions with a comparison. All must hold, for the same values of the labels `same`.
        minutes: the minutes for which they must hold.
        means: a sentence that says what has happened.
        remedy: a sentence that says what to do.
    """

    name: str
    severity: Literal["critical", "warning", "info"]
    conditions: tuple[tuple[str, str], ...]
    minutes: int
    means: str
    remedy: str
    same: tuple[str, ...] = _ENGINE

    @property
    def expression(self) -> str:
        return f" and on ({', '.join(self.same)}) ".join(f"{left} {right}" for left, right in self.conditions)


def _late(share: float, name: str, target: str, most: float) -> tuple[tuple[str, str], ...]:
    """A quantile as a multiple of a target that is set."""
    return ((f"{_E.quantile(share, name)} / {_TARGET[target]}", f"> {most:g}"), (_TARGET[target], "> 0"))


def _slow(name: str, target: str, seconds: float) -> tuple[tuple[str, str], ...]:
    """A p99 in seconds, where there is no target."""
    return ((_E.quantile(0.99, name), f"> {seconds:g}"), (_TARGET[target], "== 0"))


def _often(part: str, whole: str, most: float) -> tuple[tuple[str, str], ...]:
    return ((f"{part} / {whole}", f"> {most:g}"),)


ALERTS: tuple[Alert, ...] = (
    Alert(
        "QuireDown",
        "critical",
        (("up", "== 0"), (f"last_over_time({_E.gauge('vllm:num_requests_running')}[1h])", ">= 0")),
        1,
        "A server that was scraped within the last hour does not answer.",
        "Read the end of its log. Exit code 1: the engine failed; 2: a setting has to be changed.",
        same=("job", "instance"),
    ),
    Alert(
        "QuireNoStep",
        "critical",
        ((_WORK, "> 0"), (Queries("2m", by=_ENGINE).count_rate("vllm:iteration_tokens_total"), "== 0")),
        1,
        "Requests are there, but no step has finished for three minutes.",
        "GET /health says whether the engine is stuck; the server then replaces it. If it does not, restart it.",
    ),
    Alert(
        "QuireEngineRestarted",
        "critical",
        ((_LONG.increase("quire_engine_restarts"), "> 0"),),
        0,
        "An engine failed and was replaced within the last 15 minutes.",
        "The log has the reason. Requests go on at another engine; quire_requests_lost_total counts those that cannot.",
    ),
    Alert(
        "QuireRequestsLost",
        "critical",
        ((_LONG.increase("quire_requests_lost"), "> 0"),),
        0,
        "Requests ended with an error because their engine failed.",
        "The log has the reason. Clients should send them again.",
    ),
    Alert(
        "QuireErrors",
        "warning",
        _often(
            _E.rate("vllm:request_success", finished_reason="error"), f"({_E.rate('vllm:request_success')} > 0)", 0.01
        ),
        5,
        "More than 1 % of the requests end with an error of the server.",
        "The log names each of them with its request id.",
    ),
    Alert(
        "QuireKvCacheFull",
        "warning",
        ((_E.gauge("vllm:kv_cache_usage_perc"), "> 0.95"), (_E.rate("vllm:num_preemptions"), "> 0")),
        5,
        "The KV cache is full, and requests are preempted and computed again. A full cache alone is no fault.",
        "Give it more memory (--gpu-memory-utilization, --kv-cache-dtype int8, --quantization int8); else lower "
        "--max-num-seqs, which moves while serving.",
    ),
    Alert(
        "QuireQueueLong",
        "warning",
        _late(0.9, _QUEUE, "ttft", 0.5),
        5,
        "One request in ten waits longer than half of the target for the first token (--slo-ttft).",
        "Add servers. If fewer requests run than --max-num-seqs allows, look at QuireKvCacheFull first.",
    ),
    Alert(
        "QuireFirstTokenLate",
        "warning",
        _late(0.99, _TTFT, "ttft", 1),
        10,
        "The p99 of the time to first token is above its target (--slo-ttft).",
        "Compare the panels Queue and Prompt. Queue: add servers. Prompt: shorter prompts, or a faster format.",
    ),
    Alert(
        "QuireTokensLate",
        "warning",
        _late(0.99, _ITL, "itl", 1),
        10,
        "The p99 of the time between tokens is above its target (--slo-itl).",
        "Fewer requests at once (--max-num-seqs) or a faster format (--quantization).",
    ),
    Alert(
        "QuireTargetsMissed",
        "warning",
        _often(_E.rate("quire_slo_requests", met="false"), f"({_E.rate('quire_slo_requests')} > 0)", 0.05),
        10,
        "More than 5 % of the requests miss the targets (--slo-ttft, --slo-itl).",
        "QuireFirstTokenLate and QuireTokensLate say which one.",
    ),
    Alert(
        "QuireFirstTokenSlow",
        "info",
        _slow(_TTFT, "ttft", 1),
        15,
        "The p99 of the time to first token is above one second, and no target is set.",
        "Set the target that your users need (--slo-ttft): the server then keeps it and refuses what would miss it.",
    ),
    Alert(
        "QuireTokensSlow",
        "info",
        _slow(_ITL, "itl", 0.1),
        15,
        "The p99 of the time between tokens is above 100 ms, and no target is set.",
        "Set the target that your users need (--slo-itl).",
    ),
    Alert(
        "QuireRefuses",
        "warning",
        ((f"{_S.rate('vllm:admission_rejections')} / ({_S.rate('vllm:request_success')} > 0)", "> 0.05"),),
        10,
        "For 20 ended requests more than one is refused with 429.",
        "Add servers: the reason queue_full means that too many wait, ttft_target that the target would be missed.",
        same=_SERVER,
    ),
    Alert(
        "QuireClientsLeave",
        "info",
        _often(
            _E.rate("vllm:request_success", finished_reason="abort"), f"({_E.rate('vllm:request_success')} > 0)", 0.2
        ),
        10,
        "More than a fifth of the clients leave before their answer ends.",
        "Compare their time-outs with the panel Whole request.",
    ),
    Alert(
        "QuireStepsSlow",
        "info",
        ((_E.quantile(0.5, "quire_prediction_ratio"), "> 1.5"),),
        15,
        "Steps take one and a half times as long as predicted from this machine's measurements.",
        "Something else uses its cores or its memory bandwidth, or it is throttled.",
    ),
    Alert(
        "QuireEventLoopSlow",
        "warning",
        ((_S.quantile(0.99, "quire_event_loop_lag_seconds"), "> 0.1"),),
        5,
        "The API process is late by more than 100 ms, which delays every stream.",
        "It lacks a core. Leave one beside --num-threads, or raise the processor limit of the container.",
        same=_SERVER,
    ),
    Alert(
        "QuireDraftsRejected",
        "info",
        (
            (f"{_E.rate(_ACCEPTED)} / {_E.rate(_DRAFTED)}", "< 0.2"),
            (_E.rate(_DRAFTED), "> 0"),
        ),
        15,
        "Fewer than a fifth of the drafted tokens hold.",
        "Another drafter may fit these texts better; docs/speculation.md compares them.",
    ),
    Alert(
        "QuireAdapterUnreadable",
        "warning",
        ((_LONG.increase("quire_lora_loads", result="error"), "> 0"),),
        0,
        "An adapter could not be read within the last 15 minutes.",
        "The log names it with the reason.",
    ),
)


def rules_file() -> str:
    """Both groups as the YAML that Prometheus reads."""
    records = [{"record": name, "expr": expression} for name, expression in RECORDS.items()]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            **({"for": f"{alert.minutes}m"} if alert.minutes else {}),
            "labels": {"severity": alert.severity},
            "annotations": {"summary": f"{alert.means} ({{{{ $labels.instance }}}})", "description": alert.remedy},
        }
        for alert in ALERTS
    ]
    groups = [{"name": "quire-records", "rules": records}, {"name": "quire-alerts", "rules": alerts}]
    head = "# Generated from the metric registry by `make dashboards`.\n"
    text: str = yaml.safe_dump({"groups": groups}, sort_keys=False, width=120)
    return head + text


_PAGE = """\
# Alerts

The rules of `deploy/prometheus/rules.yml`, for people. This page is generated by `make dashboards` from
`src/quire/metrics/rules.py`. [monitoring.md](monitoring.md) says how to load the rules.

An alert fires when its condition has held for the minutes in the table, for one engine of one server. Alerts about
speculation and adapters need servers that have them.

"""


def markdown() -> str:
    """docs/alerts.md."""
    rows = [
        f"| `{alert.name}` | {alert.severity} | {alert.minutes} | {alert.means} | {alert.remedy} |" for alert in ALERTS
    ]
    records = [f"- `{name}`" for name in RECORDS]
    return (
        _PAGE
        + "\n".join(["| alert | severity | minutes | means | what to do |", "| --- | --- | --- | --- | --- |", *rows])
        + "\n\n## Recorded series\n\nOf all servers of a `job` that serve a `model_name`, over 5 minutes:\n\n"
        + "\n".join(records)
        + "\n"
    )


if __name__ == "__main__":
    print(markdown(), end="")
