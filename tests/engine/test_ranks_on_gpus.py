"""Ranks whose devices run behind their hosts: the tokens are those of one rank, and no step is lost.

Each rank is a thread with an accelerator of its own, which computes with CPU tensors, on a thread of its own. Gloo
stands in for NCCL.
"""

from __future__ import annotations

import os
import threading
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
from quire.distributed.group import GroupError
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError, EngineDeadError
from quire.kernels import cpu
from quire.life_cycle import Worker
from quire.loader import load
from quire.messages import AddRequest, Progress
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.planning.memory_plan import logits_bytes
from quire.resolve import DeviceFacts, GpuFacts
from quire.sampling_params import SamplingParams
from quire.worker.live_buffers import LiveBuffers
from quire.worker.worker import DeviceWorker
from tests.engine.harness import EOS, tokens_and_logprobs, two_layers
from tests.engine.queued_gpus import OnCpu
from tests.engine.ranks import LIMITS, fail_at, ignore
from tests.engine.test_sameness_ranks import Answer, answers, of_ranks
from tests.engine.test_sameness_ranks_drafters import drafted, of_one, speculation
from tests.worker.queued_accelerator import QueuedAccelerator, run_ahead

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

    monkeypatch.setattr(load, "ModelForm", OnCpu)
    run_ahead(monkeypatch.setattr)


def started(
    num_ranks: int, folder: Path | None = None, drafter_folder: Path | None = None, **arguments: Any
) -> StartedEngine:
    sizes = {"tensor_parallel_size": num_ranks, "device": "cuda", "cudagraph_capture_sizes": (1, 2, 4)}
    config = EngineConfig.from_kwargs(**LIMITS | sizes | arguments)

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        grid = grid_of(config)
        memory = make_memory(grid)
        limit = config.distributed_timeout_seconds
        found = [ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=limit) for rank in range(grid.size)]
        os.close(memory)
        return [
            GpuRank(part_of_rank(model_config, config, ranks.rank), progress, QueuedAccelerator, ranks)
            for ranks in found
        ]

    folder = folder or quire.demo.path("target")
    return start_engine(
        config, folder, is_server=True, progress=ignore, make_workers=make, drafter_folder=drafter_folder
    )


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


@pytest.mark.parametrize("more", [{}, {"draft_tensor_parallel_size": 1}])
def test_a_draft_model(more: dict[str, Any]) -> None:
    """Shared by the ranks, or each has all of it. The first rank draws, and the others get its tokens."""
    folder = quire.demo.path("draft")
    engine = started(2, drafter_folder=folder, **speculation("draft_model", folder, **more))
    try:
        tokens, num_drafts, num_held = drafted(engine)
    finally:
        engine.core.shutdown()
    assert tokens == of_one()
    assert num_drafts > num_held > 5


@pytest.mark.parametrize(("number", "is_async"), [(1, True), (3, True), (3, False)])
def test_a_step_that_one_rank_cannot_begin_is_left_by_all(
    monkeypatch: pytest.MonkeyPatch, number: int, is_async: bool
) -> None:
    """Nothing was launched, so the engine computes the step again."""
    engine = started(2, two_layers(), async_scheduling=is_async)
    try:
        second = engine.executor.workers[1]
        assert isinstance(second, DeviceWorker)
        calls = fail_at(monkeypatch, second.runner.forward_pass, "stage", number, ValueError("no room for inputs"))
        assert answers(engine.core) == expected("bfloat16")
        assert len(calls) > number
    finally:
        engine.core.shutdown()


def test_an_error_behind_a_launch_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other GPU waits for ever, so its rank lets it go. The error names the rank and its reason."""
    engine = started(2, two_layers(), enforce_eager=True)
    try:
        second = engine.executor.workers[1]
        assert isinstance(second, DeviceWorker)
        assert isinstance(second.model, Decoder)
        fail_at(monkeypatch, second.model, "own_logits", 1, ValueError("no room for logits"))
        params = SamplingParams(temperature=0.0, max_tokens=8)
        engine.core.add(AddRequest("a", [5, 7, 9], params, 8, stop_token_ids=[EOS]))
        with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 failed in a step: ValueError: no room for logits"):
            tokens_and_logprobs(engine.core)
    finally:
        engine.core.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_fails_ends_the_engine(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the other rank waits for it in an exchange, and is let go. Both hosts had launched their step."""
    engine = started(2, two_layers(), enforce_eager=True)
    try:
        worker = engine.executor.workers[rank]
        assert isinstance(worker, DeviceWorker)
        device = worker.runner.device
        assert isinstance(device, QueuedAccelerator)
        launches, launch = list[int](), worker.runner._launch

        def fail_at_third(batch: Any) -> Any:
            launches.append(len(launches))
            if len(launches) == 3:
                device.fail(ValueError("it is gone"))
            return launch(batch)

        monkeypatch.setattr(worker.runner, "_launch", fail_at_third)
        with pytest.raises(EngineDeadError, match="The GPU reports an error: it is gone"):
            answers(engine.core)
        assert len(launches) >= 3
    finally:
        engine.core.shutdown()


def test_a_host_launches_while_its_device_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both steps in flight are launched, and nothing of them is computed. The tokens are the same."""
    engine = started(2, two_layers())
    second = engine.executor.workers[1]
    assert isinstance(second, DeviceWorker)
    device, gate, held = second.runner.device, threading.Event(), list[bool]()
    assert isinstance(device, QueuedAccelerator)
    launch = second.runner._launch

    def note(batch: Any) -> Any:
        if len(held) == 4:
            device.put(gate.wait)
        pending = launch(batch)
        held.append(not pending.download.is_done())
        if len(held) == 6:
            assert held[4:] == [True, True]
            gate.set()
        return pending

    monkeypatch.setattr(second.runner, "_launch", note)
    try:
        assert answers(engine.core) == expected("bfloat16")
        assert len(held) > 6
    finally:
        gate.set()
        engine.core.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_where_results_are_taken_in_ends_the_engine(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices have computed the step, so a rank that does not know its tokens cannot go on with the others."""
    engine = started(2, two_layers())
    try:
        worker = engine.executor.workers[rank]
        assert isinstance(worker, DeviceWorker)
        fail_at(monkeypatch, worker.runner, "_take_in", 3, ValueError("no room for results"))
        with pytest.raises(EngineDeadError, match=rf"Rank {rank} of 2 failed in a step: ValueError: no room for resul"):
            answers(engine.core)
        for each in engine.executor.workers:
            assert isinstance(each, DeviceWorker)
            assert each._ranks is not None
            assert each._ranks.failing.failed_rank == rank
    finally:
        engine.core.shutdown()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"num_ranks": 4}, "There are 4 ranks, and each needs a GPU of its own. Got 3"),
        ({"max_parallel_loading_workers": 1}, "a GPU and --max-parallel-loading-workers"),
        ({"pipeline_parallel_size": 2}, "Pipeline parallelism does not go together with a GPU"),
        ({"num_ranks": 4, "decode_context_parallel_size": 2}, "do not divide the KV cache together with a GPU"),
    ],
)
def test_what_ranks_on_gpus_cannot_do(arguments: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "decode_context_parallel_size" not in arguments:
        monkeypatch.setattr(GpuRank, "num_gpus", 3)
    with pytest.raises(ConfigError, match=why):
        started(**{"num_ranks": 2, **arguments})


def test_hosts_run_ahead_of_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have launched a step before the results of the one before it are taken in."""
    engine, calls = started(2, two_layers()), list[str]()
    try:
        for rank, worker in enumerate(engine.executor.workers):
            assert isinstance(worker, DeviceWorker)
            for captured in worker.runner.forward_pass.captured._captured.values():
                replay = captured.graph.replay

                def agreed(ranks: Any = worker._ranks, replay: Any = replay) -> None:
                    assert ranks.is_committed, "a graph is replayed before the hosts have agreed"
                    replay()

                monkeypatch.setattr(captured.graph, "replay", agreed)
            for name in ("_launch", "_finish_oldest"):
                method = getattr(worker.runner, name)

                def note(*arguments: Any, name: str = f"{name} {rank}", method: Any = method) -> Any:
                    calls.append(name)
                    return method(*arguments)

                monkeypatch.setattr(worker.runner, name, note)
        assert answers(engine.core) == expected("bfloat16")
    finally:
        engine.core.shutdown()
    for rank in (0, 1):
        own = "".join(call[1] for call in calls if call.endswith(str(rank)))
        assert own.count("l") == own.count("f")
        assert "llflflf" in own, own


def test_a_rank_that_does_not_sample_waits_for_the_step_before_only() -> None:
    """This is how the process of a rank executes a step."""
    engine = started(2, two_layers())
    second = engine.executor.workers[1]
    assert isinstance(second, DeviceWorker)
    try:
        second._launch_as, launched = _noting(second._launch_as)  # type: ignore[method-assign]
        engine.executor._runs_ahead = False  # type: ignore[attr-defined]
        assert answers(engine.core) == expected("bfloat16")
        assert [step._pending.is_done for step in launched] == [True] * (len(launched) - 1) + [False]
    finally:
        engine.core.shutdown()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_memory_in_which_logits_are_joined_is_planned(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks with equal parts of the vocabulary, and of ranks with padding."""
    monkeypatch.setattr(Decoder, "_room_for_logits", lambda *arguments: None)  # as on a GPU
    num_rows, engine = 64, started(num_ranks, two_layers())

    def peak(worker: Worker) -> int:
        assert isinstance(worker, DeviceWorker)
        assert isinstance(worker.model, Decoder)
        hidden_RD = torch.zeros((num_rows, worker.model.config.hidden_size), dtype=torch.bfloat16)
        with torch.inference_mode(), LiveBuffers() as buffers:
            worker.model.compute_logits(hidden_RD)
        return buffers.peak_bytes

    try:
        peaks = engine.executor._tell(peak)  # type: ignore[attr-defined]
        for peak_bytes, worker in zip(peaks, engine.executor.workers, strict=True):
            config = worker.model.config  # type: ignore[attr-defined]
            row_bytes = 4 * num_rows * config.vocab_size
            assert 2 * row_bytes < peak_bytes <= logits_bytes(config, num_rows, "cuda") < 4 * row_bytes
    finally:
        engine.core.shutdown()


def test_a_rank_without_orders_hears_of_its_device() -> None:
    """Of a failure in its last step, for which nobody waits. It waits for nothing itself."""
    engine = started(2, two_layers())
    first, second = engine.executor.workers
    assert isinstance(first, DeviceWorker)
    assert isinstance(second, DeviceWorker)
    assert first._ranks is not None
    try:
        engine.executor._runs_ahead = False  # type: ignore[attr-defined]
        answers(engine.core)
        assert second.is_behind
        download = second._behind[0]._pending.download
        download.is_done, download.wait = lambda: False, _device_gone  # type: ignore[method-assign]
        second.catch_up()
        assert second.is_behind
        first._ranks.check()
        download.is_done = lambda: True  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="The GPU is gone"):
            second.catch_up()
        assert not second.is_behind
        with pytest.raises(GroupError, match="rank 1 has failed"):
            first._ranks.check()
    finally:
        engine.core.shutdown()


def _device_gone() -> Any:
    raise EngineDeadError("The GPU is gone")


def _noting(method: Any) -> tuple[Any, list[Any]]:
    results: list[Any] = []

    def note(*arguments: Any) -> Any:
        results.append(method(*arguments))
        return results[-1]

    return note, results


def test_the_first_rank_samples_all_rows() -> None:
    engine = started(2, two_layers(), enable_batch_sharded_sampling=True)
    try:
        assert engine.resolved.model.enable_batch_sharded_sampling is False
    finally:
        engine.core.shutdown()
