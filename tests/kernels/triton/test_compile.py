"""Every GPU kernel compiles for sm_80 and sm_90, in the registers and shared memory there are, wgmma where promised."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import quire.kernels.triton
from tests.kernels.triton import compile_kernels

FORMS = ("AWQ", "Q4_K", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "8 bits", "MXFP4", "FP8", "FP8 in blocks", "dense")
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10}  # that one block may have: CUDA C++ programming guide, table 30

# Bytes of stack that a thread may use. The deterministic form of wide heads over int8 codes takes 243 registers with
# Triton 3.6, and the 255 there are and 10 words of stack with 3.7. Shorter tiles have no wgmma. Loading values behind
# the scores, or one stage instead of two, spills nothing, but then less of the loads overlaps with products. Only
# measurements on a GPU can show what is faster.
SPILLED = dict.fromkeys(
    (
        "deterministic prefill of wide heads of int8, sm_90",
        "deterministic decode of wide heads of int8, sm_90",
        "Gemma-3-1B, prompts, deterministic, sm_90",
        "Gemma-3-1B, decodes, deterministic, sm_90",
    ),
    40,
)


def test_there_is_a_case_for_every_kernel() -> None:
    """Whatever is launched, which by its name ends in _kernel."""
    launched = {
        (module.name, name)
        for module in pkgutil.iter_modules(quire.kernels.triton.__path__)
        for name in vars(importlib.import_module(f"quire.kernels.triton.{module.name}"))
        if name.endswith("_kernel")
    }
    compiled = {
        (case["kernel"].fn.__module__.rpartition(".")[2], case["kernel"].fn.__name__)
        for case in compile_kernels.all_cases(90).values()
    }
    assert compiled == launched


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) >= 344
    assert found.keys() >= SPILLED.keys()
    for name, usage in found.items():
        assert usage["stack"] <= SPILLED.get(name, 0), f"{name} spills {usage['stack']} bytes"
        assert usage["shared"] <= SHARED_BYTES[name.rpartition(", ")[2]], f"{name} needs {usage['shared']} bytes"
    products = [f"{form}, {M} rows" for form in FORMS for M in (1, 64, 2048)]
    kinds = ("", " of e4m3", " of e5m2", " of int8")
    prefills = [f"{name}{codes}" for name in ("prefill", "prefill of wide heads") for codes in kinds]
    # without ranges of their own instruction for decodes, their bits could differ from the bits of prompts
    deterministic = [
        name.removesuffix(", sm_90") for name in found if name.startswith("deterministic") and "90" in name
    ]
    assert len(deterministic) == 24
    prefills += [name.removesuffix(", sm_90") for name in found if ", prompts of " in name and "90" in name]
    assert len(prefills) == 8 + 27
    for name in (*prefills, "prefill with window and cap", "AWQ, float16", "dense, float16", *products, *deterministic):
        assert found[f"{name}, sm_90"]["has_wgmma"], f"{name} multiplies without wgmma"
