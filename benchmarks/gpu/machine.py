"""Checks that the GPU benchmarks can run, and describes the machine for their results.

    python benchmarks/gpu/machine.py

prints everything that is missing on this machine, and ends with exit code 1 if nothing can be measured.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODULES = ("torch", "triton", "numpy", "msgspec", "jinja2", "tokenizers", "tqdm")
VERSION_FILE = Path("/proc/driver/nvidia/version")


def missing() -> list[str]:
    """The reasons why nothing can be measured on this machine; the list is empty if everything needed is there."""
    found = [
        f"the Python module {name} is not installed in {sys.executable}" for name in MODULES if not find_spec(name)
    ]
    if not found:
        from quire.kernels import gpu_facts

        if isinstance(why := gpu_facts.detect(), str):
            found.append(f"no NVIDIA GPU can be used: {why}")
    return found


def require() -> None:
    """End the program with all reasons if nothing can be measured."""
    if reasons := missing():
        sys.exit(
            "\n".join(["The GPU benchmarks cannot run here, so nothing was measured:", *map("- {}".format, reasons)])
        )


def driver_version() -> str:
    """The version of the NVIDIA driver, from its kernel module or nvidia-smi."""
    try:
        if found := re.search(r"\s(\d{3,}\.[\d.]+)\s", VERSION_FILE.read_text()):
            return found[1]
    except OSError:
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split()[0] if done.stdout.strip() else "unknown"


def environment(script: str) -> dict[str, Any]:
    """The facts that are needed to repeat a result: command, commit, versions, device and driver."""
    import torch
    import triton

    from quire.measure import report

    return {
        **report.environment("python", f"benchmarks/gpu/{script}"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "driver": driver_version() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def lines(environment: dict[str, Any]) -> list[str]:
    """The same as Markdown."""
    facts = [f"torch {environment['torch']}", f"Triton {environment['triton']}", environment["machine"]]
    if environment["driver"] is not None:
        facts = [f"driver {environment['driver']}", f"CUDA {environment['cuda']}", *facts]
    return [
        f"- Command: `{environment['command']}`. Commit {environment['commit']}.",
        f"- Device: {environment['device']}; {', '.join(facts)}.",
    ]


def limits_line(copy_bytes_per_s: float, product_flop_per_s: float) -> str:
    """The rates behind the percentages, as Markdown."""
    copy, product = copy_bytes_per_s / 1e12, product_flop_per_s / 1e12
    return f"- Limits measured in the same run: copy {copy:.2f} TB/s, product {product:.0f} TFLOP/s."


if __name__ == "__main__":
    require()
    if not find_spec("transformers"):
        print("transformers is not installed: its continuous batching will not be compared")
