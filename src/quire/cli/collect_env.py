"""`quire collect-env`: versions, machine, kernels and settings, to paste into a bug report. Imports no torch."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quire import __version__, envs, extension
from quire.errors import ConfigError
from quire.planning import devices
from quire.resolve import shown_bytes

PACKAGES = (
    "torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "msgspec", "pyzmq", "starlette", "uvicorn",
    "uvloop", "httptools", "jinja2", "prometheus-client", "pyyaml",
)  # fmt: skip
# Variables of other programs. Our libraries read them.
FURTHER_VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONOPTIMIZE",
)  # fmt: skip
# The value of a variable is never shown if its name has one of these parts.
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("collect-env", help="print a report of this machine to paste", allow_abbrev=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(report())
    return 0


def report() -> str:
    """Sections of `name: value` lines, without secrets, and without paths except in the values of variables."""
    sections = {
        "Software": _software(),
        "Machine": _machine(),
        "Kernels": _kernels(),
        "Disk": _disk(),
        "Environment variables": _variables(),
    }
    return "\n\n".join(
        "\n".join((title, *(f"  {name:<28} {value}" for name, value in lines))) for title, lines in sections.items()
    )


def _software() -> Iterator[tuple[str, str]]:
    yield "quire", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"
    yield "system", f"{platform.platform()}, libc {' '.join(platform.libc_ver()) or 'unknown'}"
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    yield "processor", f"{devices.cpu_name()} ({platform.machine()})"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "logical processors", f"{allowed} allowed of {os.cpu_count()}"
    yield "cores used", f"{devices.num_cores()}, by affinity and cgroup quota ({devices.cpu_quota() or 'none'})"
    total, free = devices.total_memory_bytes(), devices.free_memory_bytes()
    yield "memory", f"{shown_bytes(total)}, {shown_bytes(free)} free (of the cgroup's limit, where there is one)"
    gpu = devices.ask_gpu()
    yield "GPU", f"not used: {gpu}" if isinstance(gpu, str) else f"{gpu.name}, {shown_bytes(gpu.total_memory_bytes)}"


def _kernels() -> Iterator[tuple[str, str]]:
    if extension.C is None:
        yield "compiled kernels", f"not built: {extension.WHY_NOT}; everything runs on plain torch"
        return
    yield "compiled kernels", "used" if extension.is_used() else f"not used: {envs.FORCE_REFERENCE.name} is set"
    yield "instruction sets", ", ".join(extension.C.isas())
    try:
        yield "chosen", extension.chosen_isa()
    except ConfigError as error:
        yield "chosen", error.message


def _disk() -> Iterator[tuple[str, str]]:
    cache = _hub_cache()
    name = str(cache).replace(str(Path.home()), "~", 1)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    yield "model cache", f"{name}, {'' if cache.exists() else 'not there yet, '}{shown_bytes(usage.free)} free"
    if cache.exists():
        yield "models in it", str(sum(1 for folder in cache.glob("models--*")))


def _hub_cache() -> Path:
    """The folder in which the hub library keeps downloads, by the variables and the order of its documentation."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def _variables() -> Iterator[tuple[str, str]]:
    names = {variable.name for variable in envs.VARIABLES} | set(FURTHER_VARIABLES)
    names |= {name for name in os.environ if name.startswith(("VLLM_", "QUIRE_"))}
    is_one_set = False
    for name in sorted(names):
        if value := os.environ.get(name):
            is_one_set = True
            yield name, "set" if any(word in name for word in SECRET_WORDS) else value
    if not is_one_set:
        yield "none", "is set"
