"""Ranks whose devices run behind their hosts: the tokens are those of one rank, and no step is lost.

Each rank is a thread with an accelerator of its own, which computes with CPU tensors, on a thread of its own. Gloo
stands in for NCCL.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.demo
from quire import execution_choices
from quire.config import EngineConfig
from quire.distributed.device_group import DeviceGroup
from quire.distributed.group import GroupError
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError, EngineDeadError, MemoryPlanError
from quire.forward_batch import ForwardBatch, LaneRows
from quire.grammar.text import grammar_text
from quire.kernels import cpu
from quire.life_cycle import Measured, Worker
from quire.loader import load
from quire.messages import AddRequest, Progress, UseTokenizer
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import Decoder
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.planning.memory_plan import buffer_bytes, logits_bytes
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.worker.cuda_graphs import StepGraphs
from quire.worker.live_buffers import LiveBuffers
from quire.worker.worker import DeviceWorker
from tests.engine.harness import EOS, tokens_and_logprobs, two_layers
from tests.engine.queued_gpus import OnCpu
from tests.engine.ranks import LIMITS, fail_at, ignore
from tests.engine.ranks import started as on_cpus
from tests.engine.test_rank_processes import EXPERTS
from tests.engine.test_sameness_ranks import Answer, answers, of_ranks
from tests.engine.test_sameness_ranks import expected as expected_of_six_layers
from tests.engine.test_sameness_ranks_drafters import drafted, of_one, speculation
from tests.worker.queued_accelerator import QueuedAccelerator, run_ahead

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

GIB = 1 << 30


class GpuRank(DeviceWorker):
    """Finds GPUs that are not there.

    Attributes:
        known: what an engine with the same arguments has measured; None: it is measured.
    """

    num_gpus, num_bytes = 4, GIB
    known: Measured | None = None

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        gpu = GpuFacts("fake", 90, self.num_bytes, self.num_bytes, self.num_gpus)
        return replace(super().facts(False), gpu=gpu, no_gpu="")

    def measure(self) -> Measured:
        if self.known is None:
            return super().measure()
        self.measured = self.known
        return self.known


# Of the ranks of the engines that have started, by arguments: a fifth of a start on these devices is the measurement.
# Tests may share it: a rank measures in its start, and no test changes what it measures. A test that changes the memory
# of a GPU changes GpuRank.facts, which are asked in each start.
_measured: dict[str, list[Measured]] = {}


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are on the CPU, with its kernels, although their device is a GPU."""

    monkeypatch.setattr(load, "ModelForm", OnCpu)
    run_ahead(monkeypatch.setattr)


def config_of(num_ranks: int, num_stages: int = 1, **arguments: Any) -> EngineConfig:
    """`num_ranks`: of each stage."""
    sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    gpus = {"device": "cuda", "cudagraph_capture_sizes": (1, 2, 4)}
    return EngineConfig.from_kwargs(**LIMITS | sizes | gpus | arguments)


def started(
    num_ranks: int,
    folder: Path | None = None,
    drafter_folder: Path | None = None,
    *,
    num_stages: int = 1,
    **arguments: Any,
) -> StartedEngine:
    """An engine of the demo model, or of the one in `folder`."""
    config = config_of(num_ranks, num_stages, **arguments)
    key = repr((num_ranks, folder, drafter_folder, num_stages, arguments))

    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        grid = grid_of(config)
        memory = make_memory(grid)
        limit = config.distributed_timeout_seconds
        found = [ranks_on(memory, rank, grid, has_own_cores=False, timeout_seconds=limit) for rank in range(grid.size)]
        os.close(memory)
        workers = [
            GpuRank(part_of_rank(model_config, config, ranks.rank), progress, QueuedAccelerator, ranks)
            for ranks in found
        ]
        for worker, known in zip(workers, _measured.get(key, ()), strict=False):
            worker.known = known
        return workers

    folder = folder or quire.demo.path("target")
    engine = start_engine(
        config, folder, is_server=True, progress=ignore, make_workers=make, drafter_folder=drafter_folder
    )
    _measured[key] = [worker.measured for worker in workers_of(engine)]
    return engine


def workers_of(engine: StartedEngine) -> list[DeviceWorker]:
    found = list(engine.executor.workers)
    assert all(isinstance(worker, DeviceWorker) for worker in found)
    return found


def device_of(worker: DeviceWorker) -> QueuedAccelerator:
    assert isinstance(worker.runner.device, QueuedAccelerator)
    return worker.runner.device


def of_gpus(num_ranks: int, folder: Path | None = None, **arguments: Any) -> Answer:
    engine = started(num_ranks, folder, **arguments)
    try:
        for worker in workers_of(engine):
            assert worker._ranks is not None
            assert num_ranks == 1 or isinstance(worker._ranks.group, DeviceGroup)
        found = answers(engine.core)
        for worker in workers_of(engine):
            has_replayed = any(graph.num_replays for graph in device_of(worker).graphs)
            assert has_replayed != arguments.get("enforce_eager", False)
        return found
    finally:
        engine.core.shutdown()


@cache
def expected(form: str) -> Answer:
    return of_ranks(1, two_layers(), **FORMS[form])


FORMS: dict[str, dict[str, Any]] = {"bfloat16": {}, "int8": {"quantization": "int8"}}


@pytest.mark.parametrize(
    ("form", "num_ranks", "arguments"),
    [
        pytest.param("bfloat16", 2, {}, marks=pytest.mark.slow),
        ("bfloat16", 3, {"enforce_eager": True}),
        ("bfloat16", 2, {"async_scheduling": False}),
        ("int8", 2, {}),
    ],
)
def test_tokens_are_those_of_one_rank(form: str, num_ranks: int, arguments: dict[str, Any]) -> None:
    """Whole steps and pieces of prompts, greedy rows beside random ones, logprobs of prompts and of answers."""
    assert of_gpus(num_ranks, two_layers(), **FORMS[form], **arguments) == expected(form)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "arguments"),
    [
        pytest.param(1, 2, {}, marks=pytest.mark.slow),
        (1, 3, {"enforce_eager": True}),
        (2, 2, {"max_num_batched_tokens": 17}),
    ],
)
def test_stages_give_the_tokens_of_one_rank(num_ranks: int, num_stages: int, arguments: dict[str, Any]) -> None:
    """Pieces of a prompt follow each other through the stages; some steps are captured, and others are launched."""
    folder = two_layers() if num_stages == 2 else quire.demo.path("target")
    found = of_gpus(num_ranks, folder, num_stages=num_stages, **arguments)
    assert found == (expected("bfloat16") if num_stages == 2 else expected_of_six_layers("bfloat16", cpu.isa()))


@pytest.mark.parametrize(
    ("num_stages", "arguments"),
    [
        (1, {"expert_placement_strategy": "round_robin"}),
        pytest.param(2, {"enforce_eager": True}, marks=pytest.mark.slow),
    ],
)
def test_whole_experts(num_stages: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Ranks have four and three of seven experts. Nothing is dispatched: all ranks of a stage have all rows."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    form = {"load_format": "dummy", "max_model_len": 128, "max_num_batched_tokens": 17}
    one = of_ranks(1, tmp_path, **form)
    assert len({tuple(tokens) for tokens, _ in one}) > 2
    found = of_gpus(2, tmp_path, num_stages=num_stages, enable_expert_parallel=True, **form, **arguments)
    assert found == one


def test_modelling_code() -> None:
    """It is not captured in graphs."""
    code = {"model_impl": "transformers"}
    assert of_gpus(2, two_layers(), enforce_eager=True, **code) == of_ranks(1, two_layers(), **code)


def test_graphs_of_a_stage_begin_with_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold no transfer. What a step before has left in the rows of the padding is not read."""
    engine = started(1, two_layers(), num_stages=2, cudagraph_capture_sizes=(4,))
    try:
        last, first = workers_of(engine)
        graphs = last.runner.forward_pass.captured
        assert isinstance(graphs, StepGraphs)
        given_TD = graphs._given_TD
        assert given_TD is not None
        begun: list[bool] = []

        def checked(replay: Callable[[], None]) -> None:
            device_of(last).put(lambda: begun.append(bool(given_TD.isfinite().all())))
            replay()
            # A pass writes into its input. The rows of its padding come from memory without values.
            device_of(last).put(lambda: given_TD.fill_(torch.nan))

        for captured in graphs._captured.values():
            monkeypatch.setattr(captured.graph, "replay", partial(checked, captured.graph.replay))
        assert answers(engine.core) == expected("bfloat16")
        assert begun
        assert all(begun)
        assert isinstance(first.runner.forward_pass.captured, StepGraphs)
        assert first.runner.forward_pass.captured._given_TD is None
    finally:
        engine.core.shutdown()


def test_weights_of_all_stages_need_not_fit_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU needs memory for its own stage."""
    own = [
        part_of_rank(load_model_config(two_layers()), config_of(1, num_stages=2), rank).weight_bytes("bfloat16", None)
        for rank in range(2)
    ]
    monkeypatch.setattr(GpuRank, "num_bytes", max(own) + 1)
    started(1, two_layers(), num_stages=2).core.shutdown()
    monkeypatch.setattr(GpuRank, "num_bytes", max(own) - 1)
    with pytest.raises(MemoryPlanError, match="weights"):
        started(1, two_layers(), num_stages=2)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_stage_whose_work_nobody_has_got_may_leave_a_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The first stage has launched its layers, and not yet the transfer."""
    engine = started(1, two_layers(), num_stages=2, enforce_eager=True)
    try:
        _, first = workers_of(engine)
        calls = fail_at(monkeypatch, first.model, "run_blocks", number, ValueError("no room for layers"))
        assert answers(engine.core) == expected("bfloat16")
        assert len(calls) > number
    finally:
        engine.core.shutdown()


def test_drafts_of_text_and_grammars() -> None:
    """The rank that samples has grammars. It tells others the tokens that they force, and the drafts that hold."""
    grammar = grammar_text(StructuredOutputsParams(regex="(ab){6}c"))
    tokenizer = (quire.demo.path("target") / "tokenizer.json").read_text()
    found = []
    for start, num_ranks, num_stages in ((on_cpus, 1, 1), (started, 2, 1), (started, 1, 2)):
        core = start(num_ranks, two_layers(), num_stages=num_stages, **speculation("ngram", None)).core
        try:
            core.use_tokenizer(UseTokenizer(tokenizer, [EOS]))
            for index, own in enumerate((grammar, None)):
                params = SamplingParams(temperature=0.0, grammar=own, logprobs=1)
                core.add(AddRequest(f"r{index}", [5, 6, 7] * 4, params, 24, stop_token_ids=[EOS]))
            found.append(tokens_and_logprobs(core))
        finally:
            core.shutdown()
    assert found == found[:1] * 3


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "method", "more"),
    [
        (2, 1, "draft_model", {}),
        pytest.param(2, 1, "draft_model", {"draft_tensor_parallel_size": 1}, marks=pytest.mark.slow),
        (2, 2, "draft_model", {}),
        (1, 3, "eagle3", {}),
    ],
)
def test_drafters_that_are_models(num_ranks: int, num_stages: int, method: str, more: dict[str, Any]) -> None:
    """A draft model is shared by the ranks, or each has all of it. The first rank draws, and all get its tokens."""
    folder = quire.demo.path("draft" if method == "draft_model" else method)
    arguments = speculation(method, folder, **more)
    engine = started(num_ranks, drafter_folder=folder, num_stages=num_stages, **arguments)
    try:
        tokens, num_drafts, num_held = drafted(engine)
    finally:
        engine.core.shutdown()
    assert tokens == of_one()
    assert num_drafts > num_held > 5


@pytest.mark.parametrize(
    ("number", "sizes", "rank"),
    [
        pytest.param(1, {}, 1, marks=pytest.mark.slow),
        (3, {}, 1),
        pytest.param(3, {"async_scheduling": False}, 1, marks=pytest.mark.slow),
        (1, {"num_stages": 2}, 0),
        pytest.param(4, {"num_stages": 2}, 1, marks=pytest.mark.slow),
        (3, {"num_stages": 2}, 3),
    ],
)
def test_a_step_that_one_rank_cannot_begin_is_left_by_all(
    monkeypatch: pytest.MonkeyPatch, number: int, sizes: dict[str, Any], rank: int
) -> None:
    """Nothing was launched that others need, so the engine computes the step again: in all stages."""
    engine = started(1 if sizes.get("num_stages") and rank < 2 else 2, two_layers(), **sizes)
    try:
        worker = workers_of(engine)[rank]
        calls = fail_at(monkeypatch, worker.runner.forward_pass, "stage", number, ValueError("no room for inputs"))
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


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "rank"),
    [
        (2, 1, 0),
        pytest.param(2, 1, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, 0, marks=pytest.mark.slow),
        pytest.param(1, 2, 1, marks=pytest.mark.slow),
        (2, 2, 3),
    ],
)
def test_a_device_that_fails_ends_the_engine(
    num_ranks: int, num_stages: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices of other ranks wait for it in an exchange, or in a transfer between stages, and are let go. All hosts had
    launched their step.
    """
    engine = started(num_ranks, two_layers(), num_stages=num_stages, enforce_eager=True)
    try:
        worker = workers_of(engine)[rank]
        device = device_of(worker)
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


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "rank"), [(2, 1, 1), (1, 2, 0), pytest.param(1, 2, 1, marks=pytest.mark.slow)]
)
def test_a_host_launches_while_its_device_is_held_up(
    num_ranks: int, num_stages: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both steps in flight are launched, and nothing of them is computed: of several stages too. The tokens are the
    same.
    """
    engine = started(num_ranks, two_layers(), num_stages=num_stages)
    worker = workers_of(engine)[rank]
    device, gate, held = device_of(worker), threading.Event(), list[bool]()
    launch = worker.runner._launch

    def note(batch: Any) -> Any:
        if len(held) == 4:
            device.put(gate.wait)
        pending = launch(batch)
        held.append(not pending.download.is_done())
        if len(held) == 6:
            assert held[4:] == [True, True]
            gate.set()
        return pending

    monkeypatch.setattr(worker.runner, "_launch", note)
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
        ({"pipeline_parallel_size": 2}, "There are 4 ranks, and each needs a GPU of its own. Got 3"),
    ],
)
def test_what_ranks_on_gpus_cannot_do(arguments: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuRank, "num_gpus", 3)
    with pytest.raises(ConfigError, match=why):
        started(**{"num_ranks": 2, **arguments})


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"num_ranks": 1, "num_stages": 2, "nnodes": 2}, "Pipeline parallelism .* GPUs of several machines"),
        ({"num_ranks": 2, "enable_expert_parallel": True, "enable_eplb": True}, "a GPU and --enable-eplb"),
        ({"num_ranks": 1, "enable_expert_parallel": True, "data_parallel_size": 2}, "Sharing experts .* with a GPU"),
        ({"num_ranks": 2, "decode_context_parallel_size": 2, "deterministic": True}, "a GPU and --deterministic"),
    ],
)
def test_what_is_refused_by_the_settings_alone(sizes: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    facts = DeviceFacts("cpu", "fake", "avx2", 2, GIB, GIB, gpu=GpuFacts("fake", 90, GIB, GIB, 2), no_gpu="")
    with pytest.raises(ConfigError, match=why):
        resolve(config_of(**sizes, max_model_len=128), load_model_config(tmp_path), facts, is_server=True)


def test_flashinfer_does_not_divide_the_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before weights are read, although it takes the model."""
    monkeypatch.setattr(execution_choices, "why_not_flashinfer", lambda *arguments: None)
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    facts = DeviceFacts("cpu", "fake", "avx2", 2, GIB, GIB, gpu=GpuFacts("fake", 90, GIB, GIB, 2), no_gpu="")
    sizes = {"decode_context_parallel_size": 2, "attention_backend": "FLASHINFER", "max_model_len": 128}
    with pytest.raises(ConfigError, match="FlashInfer, which reads all of the KV cache") as caught:
        resolve(config_of(2, **sizes), load_model_config(tmp_path), facts, is_server=True)
    assert "--attention-backend out, or unset QUIRE_ATTENTION_BACKEND" in str(caught.value)


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


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
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


def test_memory_in_which_rows_of_experts_are_exchanged_is_planned(tmp_path: Path) -> None:
    wide = EXPERTS | {"moe_intermediate_size": 16, "num_experts_per_tok": 4}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    sizes = {"load_format": "dummy", "max_model_len": 128, "enable_expert_parallel": True, "enforce_eager": True}
    engine = started(2, tmp_path, **sizes)

    def peak(worker: Worker) -> int:
        assert isinstance(worker, DeviceWorker)
        assert isinstance(worker.model, Decoder)
        x_TD = torch.zeros((num_rows, worker.model.config.hidden_size), dtype=torch.bfloat16)
        with torch.inference_mode(), LiveBuffers() as buffers:
            worker.model._mixtures[0](x_TD, ForwardBatch.without_rows(one_lane))
        return buffers.peak_bytes

    num_rows = 1024
    one_lane = LaneRows.of([num_rows])
    assert one_lane is not None
    try:
        for worker, peak_bytes in zip(workers_of(engine), engine.executor._tell(peak), strict=True):  # type: ignore[attr-defined]
            planned = buffer_bytes(worker.model.config, num_rows, "bfloat16", "cuda")
            assert buffer_bytes(worker.model.config, num_rows, "bfloat16", "cpu") < peak_bytes <= planned
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
