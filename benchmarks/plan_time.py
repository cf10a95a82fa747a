"""The time of `quire plan` for a well-known model: a whole process, from the command to its end.

    python -m benchmarks.plan_time [--rounds 3] [--save HARDWARE]

Every round plans each of the 20 models of tests/real_models.py, from its config.json, for three kinds of GPU in every
format. Rounds take turns over models. --save writes benchmarks/results/HARDWARE/plan_time_DATE.md and .json.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire.measure import report
from tests.real_models import MODELS, write_config

HARDWARE = "l4,l40sx2,h100x8"
MOST_SECONDS = 1.0  # that a model may take


def plan_seconds(folder: Path, bytecode: Path) -> float:
    """The wall time of one process, which keeps Python's bytecode in a folder, as an installed package has it."""
    command = [sys.executable, "-m", "quire", "plan", str(folder), "--hardware", HARDWARE]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, list[float]]:
    """By model, the seconds of each round."""
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in MODELS}
        for name, folder in folders.items():
            folder.mkdir()
            write_config(folder, name)
        bytecode = Path(place) / "bytecode"
        plan_seconds(next(iter(folders.values())), bytecode)
        found: dict[str, list[float]] = {name: [] for name in MODELS}
        for _ in range(rounds):
            for name, folder in folders.items():
                found[name].append(plan_seconds(folder, bytecode))
    return found


def markdown(result: dict[str, object], found: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    within = sum(seconds <= MOST_SECONDS for seconds in medians.values())
    lines = [
        *report.heading("Time of a plan", result),
        f"- `quire plan MODEL --hardware {HARDWARE}`, from config.json: the whole process, with the start of Python.",
        "",
        *report.table_head("model | median s | longest s"),
        *(f"| {name} | {medians[name]:.2f} | {max(seconds):.2f} |" for name, seconds in found.items()),
        "",
        f"{within} of {len(medians)} models take at most {MOST_SECONDS:.0f} s; the slowest median is "
        f"{max(medians.values()):.2f} s.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = report.script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found = measure(given.rounds)
    result = {**report.environment("python", "-m", "benchmarks.plan_time"), "seconds": found}
    text = markdown(result, found)
    report.publish(__file__, given.save, "plan_time", result, text)


if __name__ == "__main__":
    main()
