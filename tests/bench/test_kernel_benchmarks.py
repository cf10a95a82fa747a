"""The microbenchmarks of `make bench`: every compiled kernel is in one, and each prints its share of the limit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"
SHORT = ("--threads", "1", "--seconds", "0.001")
SMALL: dict[str, tuple[str, ...]] = {
    "attention": (*SHORT, "--cases", "2x1@40,1x8@8"),
    "attention_kv": (*SHORT, "--cases", "2x1@40", "--rounds", "1"),
    "formats": ("--seconds", "0.001", "--layers", "1", "--m", "1", "--formats", "int8"),
    "gemm": (*SHORT, "--shapes", "64x128", "--m", "1"),
    "packing": (*SHORT, "--shape", "256x128", "--cold-mib", "1"),
    "sampling": ("--threads", "1", "--repeats", "1", "--rows", "2", "--vocab", "500"),
    "step_ops": (*SHORT, "--rows", "2", "--vocab", "500"),
}
# Of quire._C, but no kernels: what they run on, sizes, and the limits themselves.
NO_KERNELS = {
    *("isa", "isas", "set_isa", "num_threads", "set_num_threads", "default_num_threads", "advise_huge_pages"),
    *("gemm_packed_bytes", "gemm_grouped_packed_bytes", "gemm_fp8_packed_bytes"),
    *("read_bandwidth", "peak_flops", "peak_int8_ops"),
}
WITHOUT_LIMIT = {"formats", "sampling"}  # formats and distributions against each other; gemm and step_ops have theirs
RUN = """
import json, runpy, sys
from quire.kernels import cpu

called, own = set(), cpu._C

class Noted:
    def __getattr__(self, name):
        called.add(name)
        return getattr(own, name)

cpu._C = Noted()
sys.path.insert(0, sys.argv[1])
script, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_path(script, run_name="__main__")
print(json.dumps(sorted(called)))
"""


def run(name: str) -> tuple[list[str], set[str]]:
    """The lines a script prints, and the functions of quire._C that it calls."""
    command = [sys.executable, "-c", RUN, str(FOLDER), str(FOLDER / f"{name}.py"), *SMALL[name]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    *lines, called = done.stdout.splitlines()
    return lines, set(json.loads(called))


def test_every_script_is_covered() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SMALL.keys()


def test_every_kernel_has_its_share_of_the_limit() -> None:
    measured: set[str] = set()
    for name in SMALL:
        lines, called = run(name)
        if name not in WITHOUT_LIMIT:
            measured |= called
            rows = [line for line in lines if re.search(r"\d us|GFLOP/s", line) and "parallel_for" not in line]
            assert rows, name
            assert [line for line in rows if not re.search(r"\d%", line)] == [], name
    kernels = {name for name in dir(cpu._C) if not name.startswith("_")} - NO_KERNELS
    assert kernels - measured == set()
