"""Ranks whose devices run behind their hosts: the tokens are those of one rank, and no step is lost.

Each rank is a thread with an accelerator of its own, which computes with CPU tensors. Gloo stands in for NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.demo
from quire.config import EngineConfig
from quire.distributed.device_group import DeviceGroup
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError, EngineDeadError
from quire.kernels import cpu
from quire.life_cycle import Worker
from quire.loader import load
from quire.messages import AddRequest, Progress
from quire.model_config import ModelConfig
from quire.models.form import ModelForm
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.resolve import DeviceFacts, GpuFacts
from quire.sampling_params import SamplingParams
from quire.schedule import ScheduledBatch
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import DeviceWorker
from tests.engine.harness import EOS, tokens_and_logprobs, two_layers
from tests.engine.ranks import LIMITS, fail_at, ignore
from tests.engine.test_sameness_ranks import Answer, answers, of_ranks
from tests.worker.fake_accelerator import FakeAccelerator

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

GIB = 1 << 30


class GpuRank(DeviceWorker):
    """Finds GPUs that are not there."""

    num_gpus = 4

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        return replace(super().facts(False), gpu=GpuFacts("fake", 90, GIB, GIB, self.num_gpus), no_gpu="")


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are on the CPU, with its kernels, although their device is a GPU."""

    class OnCpu(ModelForm):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named | {"device": torch.device("cpu"), "attention_backend": "auto"})

    monkeypatch.setattr(load, "ModelForm", OnCpu)


def started(num_ranks: int, folder: Path | None = None, **arguments: Any) -> StartedEngine:
    sizes = {"tensor_parallel_size": num_ranks, "device": "cuda", "cudagraph_capture_sizes": (1, 2, 4)}
    config = EngineConfig.from_kwargs(**LIMITS | sizes | arguments)

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        grid = grid_of(config)
        memory = make_memory(grid)
        limit = config.distributed_timeout_seconds
        found = [ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=limit) for rank in range(grid.size)]
        os.close(memory)
        return [
            GpuRank(part_of_rank(model_config, config, ranks.rank), progress, FakeAccelerator, ranks) for ranks in found
        ]

    folder = folder or quire.demo.path("target")
    return start_engine(config, folder, is_server=True, progress=ignore, make_workers=make)


def of_gpus(num_ranks: int, folder: Path | None = None, **arguments: Any) -> Answer:
    engine = started(num_ranks, folder, **arguments)
    try:
        worker = engine.executor.workers[0]
        assert isinstance(worker, DeviceWorker)
        assert isinstance(worker._ranks.group, DeviceGroup)
        assert bool(worker.runner.forward_pass.num_captured) != arguments.get("enforce_eager", False)
        return answers(engine.core)
    finally:
        engine.core.shutdown()


@cache
def expected(form: str) -> Answer:
    return of_ranks(1, two_layers(), **FORMS[form])


FORMS: dict[str, dict[str, Any]] = {"bfloat16": {}, "int8": {"quantization": "int8"}}


@pytest.mark.parametrize(
    ("form", "num_ranks", "arguments"),
    [
        ("bfloat16", 2, {}),
        ("bfloat16", 3, {"enforce_eager": True}),
        ("bfloat16", 2, {"async_scheduling": False}),
        ("int8", 2, {}),
    ],
)
def test_tokens_are_those_of_one_rank(form: str, num_ranks: int, arguments: dict[str, Any]) -> None:
    """Whole steps and pieces of prompts, greedy rows beside random ones, logprobs of prompts and of answers."""
    assert of_gpus(num_ranks, two_layers(), **FORMS[form], **arguments) == expected(form)
