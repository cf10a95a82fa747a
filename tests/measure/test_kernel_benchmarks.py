"""The microbenchmarks of `make bench`: one of them times each compiled kernel and prints its share of the limit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.kernels import cpu
from tests.e2e.serving import Program

pytestmark = pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"
SHORT = ("--threads", "1", "--seconds", "0.001")
SMALL: dict[str, tuple[str, ...]] = {
    "attention": (*SHORT, "--cases", "2x1@40,1x8@8"),
    "attention_kv": (*SHORT, "--cases", "2x1@40", "--rounds", "1"),
    "experts": (*SHORT, "--models", "tiny", "--rows", "2", "--read-mib", "1"),
    "formats": ("--seconds", "0.001", "--layers", "1", "--m", "1", "--formats", "int8"),
    "gemm": (*SHORT, "--shapes", "64x128", "--m", "1"),
    "lora": (*SHORT, "--shapes", "o", "--cases", "2x1@4"),
    "packing": (*SHORT, "--shape", "256x128", "--cold-mib", "1"),
    "sampling": ("--threads", "1", "--repeats", "1", "--rows", "2", "--vocab", "500"),
    "step_ops": (*SHORT, "--rows", "2", "--vocab", "500"),
}
TIMED = {  # per script the function that takes the times: a kernel that only builds its inputs is not measured
    "attention": "median_seconds",
    "attention_kv": "median_seconds",
    "experts": "measure",
    "formats": "time_rows",
    "gemm": "measure",
    "lora": "median_seconds",
    "packing": "median_seconds",
    "sampling": "bench",
    "step_ops": "median_us",
}
# Of quire._C, but no kernels: threads, argument structs, sizes, and the limits themselves.
NO_KERNELS = {
    *("isa", "isas", "set_isa", "num_threads", "set_num_threads", "default_num_threads", "num_threads_described_in"),
    *("advise_huge_pages",),
    *("KernelCall", "KvCache", "AttentionRule", "HeadRotation", "GroupedForm", "PackedWeight", "LoraTable"),
    *("NgramIndex", "SuffixIndex", "SharedTexts"),  # of text: they draft
    # between processes: benchmarks of several ranks time them
    *("SharedGroup", "Whereabouts", "GroupError", "RankLate", "StepVoid", "Gather", "Exchange", "SharedAttention"),
    *("RoutingRule", "ExpertStack"),
    *("gemm_packed_bytes", "gemm_grouped_packed_bytes", "gemm_fp8_packed_bytes"),
    *("read_bandwidth", "bandwidth_over", "peak_flops", "peak_int8_ops"),
    "CorrectedSteps",  # of the cost model: prediction_cost.py times it
    "pack_factors",  # of an adapter that is loaded, outside steps: lora_serving.py times loads
}
# Latent attention has no script yet. AddLora is left for embeddings, which are looked up: products add by themselves.
UNTIMED = {"HeadGemm", "LatentRopeAndCache", "AddLora"}
WITHOUT_LIMIT = {"formats", "sampling"}  # formats and distributions against each other; gemm and step_ops have theirs
RUN = """
import contextlib, importlib, io, json, sys
from quire.kernels import cpu

called, own, is_timed = set(), cpu._C, False

def read_little(num_bytes, repeats):
    return own.read_bandwidth(1 << 20, 1)  # a limit, if not the right one: the right one takes a third of a second

class Noted:
    def __getattr__(self, name):
        if is_timed:
            called.add(name)
        return read_little if name == "read_bandwidth" else getattr(own, name)

def noting(take_times):
    def noted(*args, **kwargs):
        global is_timed
        is_timed = True
        try:
            return take_times(*args, **kwargs)
        finally:
            is_timed = False
    return noted

def run(name, timed, words):
    called.clear()
    sys.argv = [name, *words]
    script = importlib.import_module(name)
    take_times = getattr(script, timed)
    setattr(script, timed, noting(take_times))
    script.BURST_S = 0.001
    code, out, errors = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            script.main()
        except SystemExit as end:
            code = end.code
    setattr(script, timed, take_times)
    return {"code": code, "out": out.getvalue(), "errors": errors.getvalue(), "called": sorted(called)}

cpu._C = Noted()
folder, runs, *sys.path = sys.argv[1:]
sys.path.insert(0, folder)
print(json.dumps([run(*each) for each in json.loads(runs)]))
"""


def run(*runs: tuple[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Scripts with words on their command lines, in one process.

    Of each: its exit code, what it printed, and what of quire._C it takes the times of.
    """
    words = json.dumps([(name, TIMED[name], words) for name, words in runs])
    done = Program(("-c", RUN)).run(str(FOLDER), words, *sys.path, timeout=120)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


UNKNOWN = [
    ("gemm", "--dtype", "bfloat16, float32, float16"),
    ("gemm", "--quantization", "none, int8, int4"),
    ("formats", "--formats", "bf16, int8, int4"),
]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of every script, then of UNKNOWN."""
    mistakes = ((name, (flag, known.split(", ")[0] + ",int5")) for name, flag, known in UNKNOWN)
    return run(*SMALL.items(), *mistakes)


def test_every_script_is_covered() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == SMALL.keys() == TIMED.keys()


def test_every_kernel_has_its_share_of_the_limit(results: list[dict[str, Any]]) -> None:
    measured: set[str] = set()
    for name, done in zip(SMALL, results[: len(SMALL)], strict=True):
        assert done["code"] == 0, done["errors"]
        if name not in WITHOUT_LIMIT:
            measured |= set(done["called"])
            lines = done["out"].splitlines()
            rows = [line for line in lines if re.search(r"\d us|GFLOP/s", line) and "parallel_for" not in line]
            assert rows, name
            assert [line for line in rows if not re.search(r"\d%", line)] == [], name
    functions = {name for name in dir(cpu._C) if not name.startswith("_")} - UNTIMED
    assert functions >= NO_KERNELS
    assert functions - NO_KERNELS - measured == set()


def test_an_unknown_name_is_an_error_before_anything_is_measured(results: list[dict[str, Any]]) -> None:
    for (_, flag, known), done in zip(UNKNOWN, results[len(SMALL) :], strict=True):
        assert (done["code"], done["out"]) == (2, "")
        assert f"argument {flag}: unknown name 'int5'; known are {known}" in done["errors"]
