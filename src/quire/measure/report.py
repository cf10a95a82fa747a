"""The report of a run: vLLM's printed block and JSON keys, then our own lines and keys."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import quire
from quire import __version__
from quire.config import EngineConfig
from quire.measure.load import Run
from quire.measure.options import INFINITE, Report, Target, Traffic, Workload, key_values
from quire.measure.statistics import LEVEL, Metrics, mean_interval, measure, word
from quire.option import options
from quire.planning import devices

WIDTH = 50
HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
SATURATED = 0.85  # above this share of a core, the run may measure the client instead of the server


def environment(*command: str) -> dict[str, Any]:
    """Facts for repeating a result: command (default: this call of `quire`), version, commit, machine."""
    return {
        "command": shlex.join([*(command or ("quire",)), *without_secrets(sys.argv[1:])]),
        "quire_version": __version__,
        "commit": _commit(),
        "machine": f"{devices.cpu_name()}, {devices.num_cores()} cores",
        "python": sys.version.split()[0],
    }


def others_seconds() -> float:
    """Processor seconds of all processes but this one and its children that have ended, so far. Linux."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    own = os.times()
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(own[:4])


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark that can save its result. `doc` is the docstring of the script."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_save(parser)
    return parser


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add --save, which is None or the name of the machine for `save_published`."""
    parser.add_argument("--save", metavar="HARDWARE", help="write result files with this name of the machine")


def publish(script: str, hardware: str | None, what: str, result: dict[str, Any], markdown: str) -> None:
    """Print a result for people, and save it if --save was given."""
    print(markdown)
    if hardware is not None:
        save_published(script, what, hardware, result, markdown)


def save_published(script: str, what: str, hardware: str, result: dict[str, Any], markdown: str) -> None:
    """Write results/HARDWARE/WHAT_DATE.json for programs, and the .md beside it for people.

    Args:
        script: a file in the folder `benchmarks`, which has the folder of results, or in a folder below it.
    """
    folder = next(parent for parent in Path(script).resolve().parents if parent.name == "benchmarks")
    path = folder / "results" / hardware / f"{what}_{date.today().isoformat()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    path.with_name(path.name + ".md").write_text(wrapped(markdown), encoding="utf-8")


def heading(title: str, result: dict[str, Any]) -> list[str]:
    """The first lines of a result file for people. `result` has the keys of `environment`."""
    return [
        f"# {title}",
        "",
        f"- Command: `{result['command']}`. Commit {result['commit']}. {result['machine']}.",
    ]


def table_head(columns: str) -> list[str]:
    """The first two lines of a Markdown table. `columns`: for example `a | b`."""
    return [f"| {columns} |", "|" + "---|" * (columns.count(" | ") + 1)]


def wrapped(markdown: str) -> str:
    """Markdown with lines of at most 120 columns. Tables, titles and code blocks do not change."""
    lines, in_code = [], False
    for line in markdown.split("\n"):
        in_code ^= line.startswith("```")
        if len(line) <= 120 or in_code or line.startswith(("|", "#")):
            lines.append(line)
        else:
            # At the begin of a line such a mark would start a list, a title or a table.
            glued = re.sub(r" (?=(?:[-+*>#|]+|\d+[.)]) )", "\0", line)
            indent = "  " if line.startswith("- ") else ""
            filled = textwrap.fill(glued, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            lines.append(filled.replace("\0", " "))
    return "\n".join(lines)


def without_secrets(words: Sequence[str]) -> list[str]:
    """The command line with `***` for the values of secret flags, because result files are published."""
    fields = (*options(Target), *options(EngineConfig))
    secret = {"--" + f.name.replace("_", "-") for f in fields if f.metadata["secret"]}
    shown, is_secret = [], False
    for argument in words:
        if argument.startswith("--"):
            name, equals, _ = argument.partition("=")
            is_secret = name.replace("_", "-") in secret
            shown.append(f"{name}=***" if is_secret and equals else argument)
        else:
            shown.append("***" if is_secret else argument)
    return shown


def _commit() -> str | None:
    """The commit of the checkout with this package; None if it is installed elsewhere."""
    folder = Path(quire.__file__).parent
    if not (folder.parents[1] / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None


def serving_result(
    workload: Workload, traffic: Traffic, target: Target, report: Report, runs: Sequence[Run], more: dict[str, Any]
) -> dict[str, Any]:
    """The JSON object of `quire bench serve` and `quire simulate`: vLLM's keys and ours.

    Only the metrics of --percentile-metrics have percentiles.
    """
    metrics = measure(runs, report.percentiles(), report.limits_ms())
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    shown = report.percentile_metrics.split(",")
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": report.label,
        "model_id": more.get("model_id"),
        "tokenizer_id": more.get("tokenizer_id"),
        "num_prompts": workload.num_prompts,
        **key_values(report.metadata, "--metadata"),
        "request_rate": traffic.request_rate if traffic.request_rate < INFINITE else "inf",
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        **({name: getattr(traffic, name) for name in _RAMP} if traffic.ramp_up_strategy is not None else {}),
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        **metrics.rates,
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itl for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "start_times": [outcome.start_time for outcome in outcomes],
        "queue_times": [outcome.queue_time for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
        **_times(metrics, shown),
    }
    if not report.goodput:
        result["request_goodput"] = None
    cpu = sum(run.client_cpu_seconds for run in runs) / max(metrics.duration, 1e-9)
    result |= {
        "rounds": [round_metrics(run, report) for run in runs] if len(runs) > 1 else [],
        "confidence_intervals": _intervals(metrics, runs, shown),
        "cached_prompt_tokens": metrics.total_cached,
        "client_cpu_percent": 100 * cpu,
        **environment(),
        **more,
    }
    return result


_RAMP = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")  # as in vLLM


def round_metrics(run: Run, report: Report) -> dict[str, float]:
    """The numbers of one round, under the keys of the whole result."""
    metrics = measure([run], report.percentiles(), report.limits_ms())
    rates = {key: rate for key, rate in metrics.rates.items() if report.goodput or key != "request_goodput"}
    return {**rates, **_times(metrics, list(HEADERS)), "failed": metrics.failed}


def _times(metrics: Metrics, names: Sequence[str]) -> dict[str, float]:
    found = {}
    for name in names:
        summary = metrics.times[name]
        found[f"mean_{name}_ms"] = 1000 * summary.mean
        found[f"median_{name}_ms"] = 1000 * summary.median
        found[f"std_{name}_ms"] = 1000 * summary.std
        found |= {f"p{word(p)}_{name}_ms": 1000 * value for p, value in summary.percentiles.items()}
    return found


def _intervals(metrics: Metrics, runs: Sequence[Run], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Intervals of times, from the requests of the run, and of rates, from its rounds if there are 3 or more."""
    found = {
        f"{which}_{name}_ms": (1000 * low, 1000 * high)
        for name in names
        for which, (low, high) in metrics.times[name].intervals.items()
    }
    if len(runs) >= 3:
        rates = [measure([run], [], {}).rates for run in runs]
        for key in ("request_throughput", "output_throughput", "total_token_throughput"):
            found[key] = mean_interval([rate[key] for rate in rates])
    return found


def serving_text(result: dict[str, Any], report: Report) -> str:
    """vLLM's block, which people and scripts read, and our own lines below it."""
    title = "Serving Benchmark Result" if result.get("simulated") is None else "Simulated Serving Result"
    lines = [f"{f' {title} ':=^{WIDTH}}"]

    def row(label: str, value: Any) -> None:
        lines.append(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")

    row("Successful requests:", result["completed"])
    row("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        row("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        row("Request rate configured (RPS):", float(result["request_rate"]))
    row("Benchmark duration (s):", float(result["duration"]))
    row("Total input tokens:", result["total_input_tokens"])
    row("Total generated tokens:", result["total_output_tokens"])
    row("Request throughput (req/s):", float(result["request_throughput"]))
    if result["request_goodput"] is not None:
        row("Request goodput (req/s):", float(result["request_goodput"]))
    row("Output token throughput (tok/s):", float(result["output_throughput"]))
    row("Peak output token throughput (tok/s):", float(result["max_output_tokens_per_s"]))
    row("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    row("Total token throughput (tok/s):", float(result["total_token_throughput"]))
    for name in report.percentile_metrics.split(","):
        short, header = HEADERS[name]
        lines.append(f"{header:-^{WIDTH}}")
        row(f"Mean {short} (ms):", float(result[f"mean_{name}_ms"]))
        row(f"Median {short} (ms):", float(result[f"median_{name}_ms"]))
        for p in report.percentiles():
            row(f"P{word(p)} {short} (ms):", float(result[f"p{word(p)}_{name}_ms"]))
    if "spec_decode_num_drafts" in result:
        lines.append(f"{'Speculative Decoding':-^{WIDTH}}")
        row("Acceptance rate (%):", float(result["spec_decode_acceptance_rate"]))
        row("Acceptance length:", float(result["spec_decode_acceptance_length"]))
        row("Drafts:", result["spec_decode_num_drafts"])
        row("Draft tokens:", result["spec_decode_draft_tokens"])
        row("Accepted tokens:", result["spec_decode_accepted_tokens"])
        lines.append("Per-position acceptance (%):")
        for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            row(f"  Position {position}:", 100 * rate)
    lines.append("=" * WIDTH)
    return "\n".join([*lines, *_own_lines(result)])


def _own_lines(result: dict[str, Any]) -> list[str]:
    lines = [f"{key:<40} {low:.2f} to {high:.2f}" for key, (low, high) in result["confidence_intervals"].items()]
    if lines:
        lines.insert(0, f"{LEVEL:.0%} confidence intervals")
    if (limit := result.get("hardware_limit")) is not None:
        lines.append(limit_line(limit))
    total = result["total_input_tokens"]
    if total:
        share = 100 * result["cached_prompt_tokens"] / total
        lines.append(f"{'Prompt tokens from the prefix cache (%):':<40} {share:.1f}")
    if (simulated := result.get("simulated")) is None:
        lines.append(f"{'Client CPU (% of one core):':<40} {result['client_cpu_percent']:.0f}")
    else:
        low, high = simulated["step_time_interval"]
        lines.append(f"{'Preemptions:':<40} {simulated['num_preemptions']}")
        lines.append(f"{'Steps:':<40} {simulated['num_steps']}")
        lines.append(f"{'Real step times, nine of ten (%):':<40} {100 * low:.0f} to {100 * high:.0f} of the predicted")
        seconds = simulated["seconds_by_bound"]
        shares = {bound: 100 * each / sum(seconds.values()) for bound, each in seconds.items()}
        bounds = ", ".join(f"{bound} {shares[bound]:.0f}" for bound in sorted(shares, key=shares.__getitem__)[::-1])
        lines.append(f"{'Time of steps, by what binds them (%):':<40} {bounds or 'no step'}")
        lines.append("At the ends of these intervals all steps are at the same end of theirs:")
        lines += [f"{key:<40} {low:.2f} to {high:.2f}" for key, (low, high) in simulated["intervals"].items()]
        lines.append(f"simulated, no model was loaded; step times: {simulated['step_times']}")
    return lines + [f"warning: {text}" for text in warnings(result)]


def limit_line(limit: dict[str, Any]) -> str:
    """The percentage of the hardware limit, and the limit."""
    rates = [
        f"{limit['read_bandwidth'] / 1e9:.1f} GB/s",
        *([f"{limit['peak_flops'] / 1e9:,.0f} GFLOP/s"] if limit["num_flops"] else []),
        *([f"{limit['peak_int8_ops'] / 1e9:,.0f} GOP/s of int8"] if limit["num_int8_ops"] else []),
    ]
    return (
        f"{'Hardware limit reached (%):':<40} {limit['percent']:.1f}   bound by {limit['bound']}: at least "
        f"{limit['seconds']:.2f} s at {', '.join(rates)}"
    )


def warnings(result: dict[str, Any]) -> list[str]:
    """The reasons to trust a result less, one text for each."""
    found = []
    if result["client_cpu_percent"] > 100 * SATURATED:
        found.append("the client used its core nearly fully: latencies and rates may be its own. Use a second machine")
    if (twice := result["num_requests_sent"] - result["num_unique_prompts"]) > 0:
        found.append(f"{twice} prompts are not unique: the prefix cache may answer them")
    if result["failed"]:
        errors = [error for error in result["errors"] if error]
        found.append(f"{result['failed']} requests failed; the first: {errors[0]}")
    return found


def save(result: dict[str, Any], report: Report, traffic: Traffic) -> Path | None:
    """Write the result file if the options ask for it. Returns its path; None: the options do not."""
    if not (report.save_result or report.append_result):
        return None
    path = Path(report.result_dir or ".") / (report.result_filename or _file_name(result, traffic))
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = result if report.save_detailed else {key: value for key, value in result.items() if key not in DETAILS}
    has_lines = report.append_result and path.exists() and path.stat().st_size > 0
    with path.open("a" if report.append_result else "w", encoding="utf-8") as file:
        file.write(("\n" if has_lines else "") + json.dumps(kept))
    return path


def _file_name(result: dict[str, Any], traffic: Traffic) -> str:
    """vLLM's name of the file: label, rate, concurrency, model, date."""
    rate = f"{traffic.request_rate}qps"
    if traffic.ramp_up_strategy is not None:
        ends = f"{traffic.ramp_up_start_rps}qps-{traffic.ramp_up_end_rps}qps"
        rate = f"ramp-up-{traffic.ramp_up_strategy}-{ends}"
    many = f"-concurrency{traffic.max_concurrency}" if traffic.max_concurrency is not None else ""
    model = str(result["model_id"]).rsplit("/", 1)[-1]
    return f"{result['label'] or result['backend']}-{rate}{many}-{model}-{result['date']}.json"
