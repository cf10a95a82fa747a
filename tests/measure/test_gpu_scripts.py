"""The scripts of `make bench-gpu`, with stand-ins for the GPU: their counts, comparisons and files, and their message
without a GPU. The rates themselves only a GPU can show.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels import gpu_facts
from quire.measure import report
from quire.measure.floor import Machine
from quire.model_config import load_model_config
from tests.nursery import TorchPopen

ROOT = Path(__file__).parents[2]
SCRIPTS = ("machine", "kernels", "engine", "against_transformers")
DEVICE, DRIVER = "NVIDIA H100 80GB HBM3", "580.95.05"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The modules; they save into a folder of the test."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = SimpleNamespace(**{name: importlib.import_module(name) for name in SCRIPTS})
    save = report.save_published
    monkeypatch.setattr(
        report, "save_published", lambda script, *rest: save(str(tmp_path / "benchmarks" / "gpu.py"), *rest)
    )
    yield found
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def on_a_gpu(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that answers as one with an H100 would; what is computed runs on the CPU."""
    version = tmp_path / "version"
    version.write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 13.3.0\n"
    )
    monkeypatch.setattr(scripts.machine, "VERSION_FILE", version)
    environment = scripts.machine.environment

    def environment_there(script: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_name", lambda: DEVICE)
            patch.setattr(torch.version, "cuda", "13.0")
            return environment(script)

    monkeypatch.setattr(scripts.machine, "environment", environment_there)
    monkeypatch.setattr(scripts.machine, "require", lambda: None)
    for module in (scripts.kernels, scripts.engine, scripts.against_transformers):
        monkeypatch.setattr(module, "limits", lambda: Machine(3e12, 8e14, 8e14))


def run_main(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str, **arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *words])
    module.main(**arguments)


def saved(folder: Path, what: str) -> tuple[dict[str, Any], str]:
    """The result for programs and the one for people."""
    found = folder / "benchmarks" / "results" / "test-machine"
    (data,), (text,) = found.glob(f"{what}_*.json"), found.glob(f"{what}_*.md")
    return json.loads(data.read_text()), text.read_text()


def assert_says_what_ran(result: dict[str, Any], text: str, script: str) -> None:
    assert result["device"] == DEVICE
    assert result["driver"] == DRIVER
    assert result["command"].startswith(f"python benchmarks/gpu/{script}.py ")
    assert result["command"].endswith(" --save test-machine")
    assert (result["torch"], result["cuda"]) == (torch.__version__, "13.0")
    for fact in (DEVICE, f"driver {DRIVER}", "CUDA 13.0", f"`python benchmarks/gpu/{script}.py", result["triton"]):
        assert fact in text


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.skipif(not isinstance(gpu_facts.detect(), str), reason="there is a GPU")
def test_make_without_a_gpu_says_what_is_missing() -> None:
    command = ["make", "bench-gpu", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "The GPU benchmarks cannot run here, so nothing was measured:" in done.stderr
    assert f"- no NVIDIA GPU can be used: {gpu_facts.detect()}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_listed(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.machine, "find_spec", lambda name: None if name in ("triton", "msgspec") else name)
    with pytest.raises(SystemExit, match=r"- the Python module triton is not installed.*\n- the Python module msgspec"):
        scripts.machine.require()
    monkeypatch.setattr(scripts.machine, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu_facts, "detect", lambda: "no driver of a GPU is loaded")
    for module in (scripts.kernels, scripts.engine, scripts.against_transformers):
        with pytest.raises(SystemExit, match="nothing was measured:\n- no NVIDIA GPU can be used: no driver"):
            run_main(module, monkeypatch)


@pytest.mark.parametrize(
    ("file", "answer", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
            None,
            "550.54.15",
        ),
        (None, "570.12\n570.12\n", "570.12"),
        (None, None, "unknown"),
        ("nothing of use", "", "unknown"),
    ],
)
def test_the_driver(
    scripts: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: str | None,
    answer: str | None,
    version: str,
) -> None:
    def ask(command: list[str], **settings: Any) -> Any:
        assert command[0] == "nvidia-smi"
        if answer is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(scripts.machine.subprocess, "run", ask)
    monkeypatch.setattr(scripts.machine, "VERSION_FILE", tmp_path / "version")
    if file is not None:
        (tmp_path / "version").write_text(file)
    assert scripts.machine.driver_version() == version


@pytest.mark.usefixtures("on_a_gpu")
def test_results_of_kernels(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A case that moves 3 GB and one that computes 8 TFLOP, in 2 ms and 20 ms."""
    cases = [
        scripts.kernels.Case("copy", [lambda: None], 3e9),
        scripts.kernels.Case("product", [lambda: None], 0, 8e12),
    ]
    monkeypatch.setattr(scripts.kernels, "cases", lambda names: iter(cases))
    seconds = iter((0.002, 0.02))
    monkeypatch.setattr(scripts.kernels, "seconds_per_call", lambda calls: next(seconds))
    run_main(scripts.kernels, monkeypatch, "--save", "test-machine")
    result, text = saved(tmp_path, "gpu_kernels")
    assert_says_what_ran(result, text, "kernels")
    copy, product = result["cases"]
    assert copy == {
        "case": "copy",
        "microseconds": 2000.0,
        "percent_of_copy_rate": 50.0,
        "percent_of_product_rate": 0.0,
    }
    assert product["percent_of_product_rate"] == pytest.approx(50)
    assert "| copy | 2000.0 | 50 | 0 |" in text
    assert (result["copy_bytes_per_s"], result["flop_per_s"]) == (3e12, 8e14)


@pytest.fixture
def small(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the engine, with little to do, on the CPU whatever the device."""
    engine: ModuleType = scripts.engine
    for name, value in (
        ("BATCHES", (1, 3)),
        ("BATCHES_OF_COMPARISONS", (1, 3)),
        ("DECODE_STEPS", 3),
        ("DECODE_PROMPT", 8),
        ("PREFILL_TOKENS", 32),
        ("PREFILL_REPEATS", 2),
        ("WORKLOAD", (4, 16, 5)),
        ("MIXED_TOKENS", (8, 16)),
        ("GOAL_MODEL", "tiny"),
    ):
        monkeypatch.setattr(engine, name, value)
    plain = engine.Engine
    monkeypatch.setattr(engine, "Engine", lambda path, device, **settings: plain(path, "cpu", **settings))
    return engine


@pytest.mark.usefixtures("on_a_gpu")
def test_results_of_the_engine(small: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every measurement, gain, cost and goal, in both files."""
    free = iter((79 << 30, 78 << 30))  # before the first engine, and after its work
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 80 << 30))
    run_main(small, monkeypatch, "--models", "tiny", "--save", "test-machine")
    result, text = saved(tmp_path, "gpu_engine")
    assert_says_what_ran(result, text, "engine")
    plain, deterministic = result["models"]
    for row in (*plain["decode"], *plain["fp8"], *plain["int4"], *deterministic["decode"]):
        assert row["percent_of_copy_rate"] == pytest.approx(100 * row["bytes_per_s"] / 3e12)
        assert row["bytes_per_s"] > 0
        assert 0 <= row["idle_share"] <= 1
    assert plain["prefill"]["percent_of_product_rate"] == pytest.approx(100 * plain["prefill"]["flop_per_s"] / 8e14)
    assert 0 < plain["workload"]["percent_of_limit"] < 100
    assert plain["no_flashinfer"].startswith("it is not installed")
    assert [row["batch"] for row in plain["decode"]] == [1, 3]
    for title in (
        *("Without CUDA graphs", "Without scheduling ahead", "FP8 weights", "FP8 KV cache", "int4 weights"),
        *("Gains:", "| CUDA graphs |", "| Prefix caching, 90% shared |", "FlashInfer is not compared: it is not"),
        *("Goals (tiny, bfloat16, one H100):", "| decoding at batch 1 to 3 | >= 2.2 TB/s |"),
        *("| at batch 1 | >= 80 % of the copy rate |", "| GPU idle between steps | < 3% |"),
        *("| prompt of 32 tokens | >= 480 TFLOP/s |", "| start, graphs included | < 20 s |"),
        *("| plan of memory | within 3% |", "## tiny, deterministic", "Times of tiny with --deterministic"),
    ):
        assert title in text


def test_which_goals_are_reached(scripts: SimpleNamespace) -> None:
    """Each at its bound, and just behind it."""

    def result(factor: float) -> dict[str, Any]:
        rows = [
            {"batch": 1, "bytes_per_s": 2.5e12, "percent_of_copy_rate": 80 * factor, "idle_share": 0.0},
            {"batch": 32, "bytes_per_s": 2.2e12 * factor, "percent_of_copy_rate": 70, "idle_share": 0.0301 / factor**2},
        ]
        taken, own = 60 << 30, 1 << 30
        return {
            "model": "Llama-3.1-8B",
            "decode": rows,
            "prefill": {"tokens": 2048, "flop_per_s": 480e12 * factor},
            "start_seconds": {"load": 15.1 / factor, "warm up": 5.0 / factor},
            "memory": {"planned_bytes": (taken - own) * 1.031 / factor, "taken_bytes": taken, "cuda_bytes": own},
        }

    for factor, answer in ((1.01, "yes"), (0.99, "no")):
        rows = [line for line in scripts.engine.goals(result(factor)) if line.startswith("| ")][1:]
        assert [row.rsplit("| ", 1)[1] for row in rows] == [f"{answer} |"] * 6
    assert "2.18 at batch 32, the least" in rows[0]


def test_percentages_of_a_workload(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """By hand: two requests of one prompt token and one output token read the weights once."""
    model = load_model_config(scripts.engine.write_config(tmp_path, "tiny"))
    limit = Machine(model.read_bytes_per_step("bfloat16") / 2.0, 1e30, 1e30)
    assert scripts.engine.percent_of_limit(model, 2, 1, 1, 4.0, limit) == pytest.approx(50)


def test_rounds_take_turns_and_the_median_counts(scripts: SimpleNamespace) -> None:
    module, order = scripts.against_transformers, []
    seconds = {"quire": iter((1.0, 2.0, 1.0)), "transformers": iter((6.0, 6.0, 4.0))}

    def run(task: Any) -> dict[str, Any]:
        order.append(task.side)
        return {"seconds": next(seconds[task.side]), "settings": {"graphs": task.side == "quire"}}

    tasks = {side: module.Task(side, "tiny", "cuda", 256, 1024, 128, {}) for side in module.SIDES}
    result = module.compare(tasks, 3, run)
    assert order == ["quire", "transformers", "transformers", "quire", "quire", "transformers"]
    assert result["ratio"] == 4.0
    assert result["seconds"] == {"quire": 1.0, "transformers": 6.0}
    assert result["output_tokens_per_s"] == {"quire": 256 * 128 / 1.0, "transformers": 256 * 128 / 6.0}
    said = "Quire over transformers' continuous batching:"
    assert f"{said} 4.00x." in list(module.lines_of(result))
    result["percent_of_limit"] = {"quire": 50.0, "transformers": 8.3}
    assert f"{said} 4.00x (goal 5x: missed)." in list(module.lines_of(result))
    assert f"{said} 5.00x (goal 5x: reached)." in list(module.lines_of(result | {"ratio": 5.0}))


def test_both_sides_get_the_same_prompts(scripts: SimpleNamespace) -> None:
    module = scripts.against_transformers
    mine, theirs = (module.Task(side, "tiny", "cpu", 5, 7, 3, {}).prompts(512) for side in module.SIDES)
    assert mine == theirs
    assert [len(prompt) for prompt in mine] == [7] * 5
    assert len({tuple(prompt) for prompt in mine}) == 5, "no prefix cache may help"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_against_transformers(
    small: ModuleType, scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both sides themselves, transformers' continuous batching on the CPU too; each would have its own process."""
    pytest.importorskip("transformers")
    module, devices = scripts.against_transformers, []
    monkeypatch.setattr(module, "Engine", small.Engine)

    def run(task: Any) -> dict[str, Any]:
        devices.append(task.device)
        found = module.RUN[task.side](replace(task, device="cpu"))
        return dict(json.loads(json.dumps(found)))

    words = ("--models", "tiny", "--requests", "9", "--prompt-tokens", "12", "--output-tokens", "6", "--rounds", "1")
    peer = '{"num_blocks": 32, "max_batch_tokens": 64}'
    run_main(module, monkeypatch, *words, "--transformers", peer, "--save", "test-machine", run=run)
    assert devices == ["cuda"] * 3, "the limits, and a round of two sides"
    result, text = saved(tmp_path, "gpu_against_transformers")
    assert_says_what_ran(result, text, "against_transformers")
    (found,) = result["models"]
    assert len(found["rounds_seconds"]) == 1
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (9, 12, 6)
    assert all(0 < percent < 100 for percent in found["percent_of_limit"].values())
    assert found["settings"]["transformers"]["max_batch_tokens"] == 64
    assert "Quire over transformers' continuous batching:" in text
    assert result["read_bandwidth"] == 3e12


def test_a_side_that_fails_ends_the_comparison_with_its_reason(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", TorchPopen)
    module = scripts.against_transformers
    task = module.Task("quire", "model_of_old", "cpu", 2, 4, 2, {})
    with pytest.raises(RuntimeError, match=r"(?s)quire failed on model_of_old:.*KeyError: 'model_of_old'"):
        module.in_a_process(task)
