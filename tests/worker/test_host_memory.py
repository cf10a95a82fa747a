"""The work memory planned from config.json equals the buffers of a loaded model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import demo, extension
from quire.config import EngineConfig
from quire.cost.devices import Ceilings
from quire.kernels import cpu
from quire.kernels.weight_memory import WeightMemory
from quire.life_cycle import WorkerSettings
from quire.model_config import load_model_config
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts, predict_memory
from quire.resolve import resolve
from quire.speculative_config import SpeculativeConfig
from quire.worker import host_memory
from quire.worker.live_buffers import LiveBuffers
from quire.worker.worker import DeviceWorker
from tests.engine.ranks import started
from tests.models.test_families import CASES
from tests.models.tiny_models import SIZES

WIDTHS_OF_06B = {
    "vocab_size": 640,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

needs_kernels = pytest.mark.skipif(not cpu.available(), reason="plain torch has buffers of its own")


def loaded(folder: Path, **arguments: Any) -> tuple[DeviceWorker, MemoryFacts]:
    """A worker that has loaded a model, and the memory that was planned for it."""
    config = EngineConfig.from_kwargs(**{"num_threads": 1} | arguments)
    model = load_model_config(folder)
    if config.speculative_config is not None:
        model = replace(model, drafter=load_model_config(demo.path("draft")))
    device = devices.detect(extension.chosen_isa())
    resolved = resolve(config, model, device, is_server=True)
    worker = DeviceWorker(model, lambda phase, share, detail: None)
    worker.load(WorkerSettings.of(resolved))
    return worker, predict_memory(resolved, model, device)


def planned_and_counted(folder: Path, **arguments: Any) -> tuple[int, int]:
    """Bytes of work before loading and after it."""
    worker, planned = loaded(folder, **arguments)
    counted = worker.measure().memory
    assert planned.logits_bytes == counted.logits_bytes
    return planned.work_bytes - planned.logits_bytes, counted.work_bytes - counted.logits_bytes


def tiny(name: str, folder: Path) -> Path:
    """A config.json of a family in this folder."""
    case = CASES[name]
    config = getattr(transformers, case.config_class)(**SIZES | case.settings).to_dict()
    architecture = case.config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


@needs_kernels
@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "bfloat16", "max_num_batched_tokens": 2048},
        {"dtype": "float32"},
        {"quantization": "int4", "max_num_batched_tokens": 128},
        {"speculative_config": SpeculativeConfig(method="draft_model", model="demo", num_speculative_tokens=4)},
    ],
    ids=["bfloat16", "float32", "int4", "drafter"],
)
def test_demo(arguments: dict[str, Any]) -> None:
    planned, counted = planned_and_counted(demo.path("target"), **arguments)
    assert planned == pytest.approx(counted, rel=0.05)


@needs_kernels
@pytest.mark.parametrize(("quantization", "operations"), [(None, 5e9), ("fp8", 5e9), ("int4", 7e9)])
def test_ceilings_are_those_of_the_products_that_run(
    quantization: str | None, operations: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights are read where they are. New memory has the size of the weights, and at most a quarter of what
    is free, so a start needs no more.
    """
    read: list[int] = []
    monkeypatch.setattr(cpu, "read_bandwidth", lambda num_bytes, repeats: read.append(num_bytes) or 3e9)
    monkeypatch.setattr(cpu, "bandwidth_over", lambda x, repeats: 2e9)
    monkeypatch.setattr(cpu, "peak_flops", lambda dtype: {torch.bfloat16: 5e9}[dtype])
    monkeypatch.setattr(cpu, "peak_int8_ops", lambda bits: 7e9)
    worker, _ = loaded(demo.path("target"), quantization=quantization)
    assert worker.measure().ceilings == Ceilings(2e9, operations)
    assert read == []
    monkeypatch.setattr(host_memory, "OF_PROCESS", WeightMemory())
    measured = worker.measure()
    assert measured.ceilings == Ceilings(3e9, operations)
    assert read == [measured.memory.weight_bytes]
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: 8 << 20)
    worker.measure()
    assert read[1:] == [2 << 20]
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: 1000)
    assert worker.measure().ceilings is None


@needs_kernels
@pytest.mark.parametrize(
    ("family", "model_impl", "num_threads"),
    [("llama", "auto", 1), ("llama", "transformers", 2), ("gemma2", "auto", 2), ("olmo2", "auto", 2)],
)
def test_threads_of_torch(family: str, model_impl: str, num_threads: int, tmp_path: Path) -> None:
    """Beside our kernels torch computes with one thread: others of its threads would spin on our cores.

    It keeps them where much of a pass is torch's: other code, a soft cap of logits, sums without a norm.
    """
    before = torch.get_num_threads()
    try:
        if family == "llama":
            loaded(demo.path("target"), num_threads=2, model_impl=model_impl)
        else:
            loaded(tiny(family, tmp_path), num_threads=2, load_format="dummy", max_model_len=64)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_families(tmp_path: Path, name: str) -> None:
    """Norms before or behind, of heads or of all of them, and factors."""
    planned, counted = planned_and_counted(tiny(name, tmp_path), load_format="dummy", max_model_len=64, dtype="float32")
    assert planned == pytest.approx(counted, rel=0.05)


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int4", "int8", "fp8"])
def test_widths_of_06b(tmp_path: Path, quantization: str | None) -> None:
    config = transformers.Qwen3Config(**WIDTHS_OF_06B).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    planned, counted = planned_and_counted(
        tmp_path, load_format="dummy", max_model_len=512, dtype="bfloat16", quantization=quantization
    )
    assert planned == pytest.approx(counted, rel=0.05)


def test_buffers_count_while_they_live() -> None:
    before = torch.zeros(1000)
    buffers = LiveBuffers()
    with buffers:
        first = torch.zeros(100)
        second = first.view(10, 10) + 1  # beside the first
        assert buffers.num_bytes == buffers.peak_bytes == 800
        del first
        before[:50] += 1  # views and results in place have no memory of their own
        assert buffers.num_bytes == 400
        del second
        torch.zeros(150)
    assert (buffers.num_bytes, buffers.peak_bytes) == (0, 800)
    with torch.inference_mode(), buffers:
        last = torch.zeros(8, 100).t().reshape(800)  # not every reshape is a view
        assert buffers.num_bytes == 3200
        assert last.view(2, 400).reshape(400, 2).shape == (400, 2)
    assert buffers.peak_bytes == 6400
    assert not hasattr(LiveBuffers.__torch_dispatch__, "__wrapped__"), "torch's wrapper imports torch._dynamo"


@needs_kernels
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logits_of_all_steps_have_one_memory(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory of many rows would cost a step more than the work on them. The first rank has all rows."""
    engine = started(num_ranks, max_num_seqs=5)
    model = engine.executor.workers[0].model  # type: ignore[attr-defined]
    compute_logits, seen = model.compute_logits, list[torch.Tensor]()

    def noted(*arguments: Any) -> torch.Tensor:
        seen.append(compute_logits(*arguments))
        return seen[-1]

    monkeypatch.setattr(model, "compute_logits", noted)
    for num_rows in (5, 2, 5):
        engine.core.probe([(3, 1)] * num_rows)
    engine.executor.shutdown()
    assert [len(logits_RV) for logits_RV in seen] == [5, 2, 5]
    assert len({logits_RV.data_ptr() for logits_RV in seen}) == 1
