"""`quire bench startup`: seconds from the start of a process to its first token, cold and warm, by phase."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.entry.launch import find_model
from quire.errors import EngineDeadError
from quire.measure.offline import PERCENTAGES
from quire.measure.statistics import mean_interval


def start_once(config: EngineConfig) -> dict[str, Any]:
    """The seconds and phases of one start. Raises EngineDeadError with the output of the process if it fails."""
    command = [sys.executable, "-P", "-m", "quire.measure.first_token"]
    started = time.monotonic()
    text = f"{started!r}\n{msgspec.json.encode(config).decode()}\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineDeadError(f"The engine did not start: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def forget_files(folder: Path) -> None:
    """Drop the files of a model from the system's file cache. The next start reads them from the disk."""
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def startup(
    config: EngineConfig,
    *,
    num_iters_cold: int,
    num_iters_warmup: int,
    num_iters_warm: int,
    bar: Callable[[int, str], Any],
) -> dict[str, Any]:
    """Time starts: cold ones without the model's files in the file cache, and warm ones with them.

    The result has vLLM's JSON keys.
    """
    folder, _, _ = find_model(config, None, weights=config.load_format != "dummy")

    def measure(count: int, title: str, is_cold: bool) -> list[dict[str, Any]]:
        progress = bar(count, title)
        runs = []
        for _ in range(count):
            if is_cold:
                forget_files(folder)
            runs.append(start_once(config))
            progress.update()
        progress.close()
        return runs

    result: dict[str, Any] = {"model_id": config.model, "confidence_intervals": {}}
    cold = measure(num_iters_cold, "Cold startup iterations", True)
    measure(num_iters_warmup, "Warmup iterations", False)
    warm = measure(num_iters_warm, "Warm startup iterations", False)
    for kind, runs in (("cold", cold), ("warm", warm)):
        if not runs:
            continue
        seconds = [run["seconds"] for run in runs]
        result[f"avg_{kind}_startup_time"] = float(np.mean(seconds))
        result[f"{kind}_startup_times"] = seconds
        result[f"{kind}_startup_percentiles"] = {str(p): float(np.percentile(seconds, p)) for p in PERCENTAGES}
        result[f"{kind}_phases"] = {
            name: float(np.mean([run["phases"].get(name, 0.0) for run in runs])) for name in runs[0]["phases"]
        }
        if len(seconds) >= 3:
            result["confidence_intervals"][f"avg_{kind}_startup_time"] = mean_interval(seconds)
    return result


def startup_text(result: dict[str, Any]) -> str:
    """vLLM's block and the phases."""
    lines = ["=" * 60, "STARTUP TIME BENCHMARK RESULTS", "=" * 60]
    for kind in ("cold", "warm"):
        if f"avg_{kind}_startup_time" not in result:
            continue
        lines += [
            "",
            f"{kind.upper()} STARTUP:",
            f"Avg startup time: {result[f'avg_{kind}_startup_time']:.2f} seconds",
        ]
        lines.append("Startup time percentiles:")
        lines += [f"  {p}%: {value:.2f} seconds" for p, value in result[f"{kind}_startup_percentiles"].items()]
        lines.append("Phases to the first token:")
        lines += [f"  {name}: {value:.2f} seconds" for name, value in result[f"{kind}_phases"].items()]
    return "\n".join([*lines, "=" * 60])
