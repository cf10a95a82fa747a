"""CUDA graphs of steps: captured sizes and their order, the size that a step runs on, and memory that padding may
touch.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quire.demo
from quire.config import EngineConfig, ServerConfig
from quire.engine.bring_up import warn_about_dropped_sizes
from quire.errors import ConfigError
from quire.formats.kv_groups import kv_groups
from quire.forward_batch import ForwardBatch
from quire.life_cycle import WorkerSettings
from quire.model_config import load_model_config
from quire.planning.graph_sizes import LARGEST_BATCH, capture_sizes, mixed_sizes
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.screen.explain import explain
from quire.settings import Resolved
from quire.worker import kv_cache
from quire.worker.cuda_graphs import StepGraphs, in_order, paddings
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.input_batch import Padding, StagedStep, StepRows
from tests.engine.harness import demo_model
from tests.examples import IS_FULL
from tests.nursery import TorchPopen
from tests.worker.fake_accelerator import FakeAccelerator

ROOT = Path(__file__).parents[2]
BLOCK_SIZE, MAX_MODEL_LEN = 8, 64
SIZES = [Padding(size, size) for size in (8, 4, 2, 1)]
WITH_MIXED = in_order([*SIZES, Padding(16, 8), Padding(6, 5)])


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (24, [1, 2, 4, 8, 16, 24]),
    ],
)
def test_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert capture_sizes(max_num_seqs) == sizes


def test_sizes_of_large_batches_are_bounded() -> None:
    assert capture_sizes(1024) == [1, 2, 4, *range(8, LARGEST_BATCH + 1, 8)]


def test_sizes_that_are_wished() -> None:
    assert capture_sizes(24, (16, 3, 8, 300)) == [3, 8, 16]
    assert mixed_sizes(2048) == [32, 64, 128, 256]
    assert mixed_sizes(100) == [32, 64]
    assert mixed_sizes(2048, (1, 16, 300, 48)) == [16, 48]


def settings(**arguments: Any) -> Resolved:
    gpu = GpuFacts("fake", 90, 1 << 30, 1 << 30)
    device = DeviceFacts("cpu", "test", "avx2", 4, 1 << 34, 1 << 34, gpu)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 100}
    model = load_model_config(quire.demo.path())
    return resolve(EngineConfig.from_kwargs(**limits | arguments), model, device, is_server=True)


@pytest.mark.parametrize(
    ("arguments", "mode", "sizes"),
    [
        ({}, "FULL", [(64, 4), (32, 4), (4, 4), (2, 2), (1, 1)]),
        ({"cudagraph_mode": "full_and_piecewise"}, "FULL", [(64, 4), (32, 4), (4, 4), (2, 2), (1, 1)]),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", [(4, 4), (2, 2), (1, 1)]),
        ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, "FULL_DECODE_ONLY", [(4, 4), (2, 2), (1, 1)]),
        ({"cudagraph_mode": "NONE"}, "NONE", []),
        ({"enforce_eager": True}, "NONE", []),
        ({"model_impl": "transformers"}, "NONE", []),
        ({"cudagraph_capture_sizes": [3, 40]}, "FULL", [(40, 4), (3, 3), (3, 2)]),
        ({"compilation_config": '{"cudagraph_capture_sizes": [4]}'}, "FULL", [(4, 4), (4, 3)]),
        ({"max_cudagraph_capture_size": 40}, "FULL", [(32, 4), (4, 4), (2, 2), (1, 1)]),
        ({"max_cudagraph_capture_size": 3}, "FULL", [(2, 2), (1, 1)]),
        ({"max_cudagraph_capture_size": 3, "cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", [(2, 2), (1, 1)]),
        ({"compilation_config": {"max_cudagraph_capture_size": 1}}, "FULL", [(1, 1)]),
        ({"max_cudagraph_capture_size": 40, "cudagraph_capture_sizes": [40, 3]}, "FULL", [(40, 4), (3, 3), (3, 2)]),
        ({"max_cudagraph_capture_size": 0, "enforce_eager": True}, "NONE", []),
    ],
)
def test_what_is_captured(arguments: dict[str, Any], mode: str, sizes: list[tuple[int, int]]) -> None:
    """By vLLM's names; the largest first."""
    resolved = settings(**arguments)
    assert resolved.device.cudagraph_mode == mode
    assert paddings(WorkerSettings.of(resolved)) == [Padding(*size) for size in sizes]


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        ({}, "captured: decodes of 1, 2, 4 rows, mixed steps of 32, 64 tokens"),
        (
            {"max_num_seqs": 64, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "captured: decodes of 1 to 64 (11 sizes) rows",
        ),
        (
            {"cudagraph_capture_sizes": [3, 40, 512]},
            "captured: decodes of 3 rows, mixed steps of 3, 40 tokens; too large: 512",
        ),
        (
            {"cudagraph_capture_sizes": [40, 512], "cudagraph_mode": "FULL_DECODE_ONLY"},
            "captured: nothing; too large: 40, 512",
        ),
        ({"cudagraph_capture_sizes": [512], "enforce_eager": True}, "captured: nothing"),
    ],
)
def test_what_is_not_captured_is_said(arguments: dict[str, Any], detail: str, caplog: pytest.LogCaptureFixture) -> None:
    resolved = settings(**arguments)
    assert resolved.settings["cudagraph_capture_sizes"].detail == detail
    with caplog.at_level("WARNING"):
        warn_about_dropped_sizes(resolved)
    warned = [f"not every size of --cudagraph-capture-sizes is captured: {detail}"] if "too large" in detail else []
    assert [record.getMessage() for record in caplog.records] == warned


@pytest.mark.parametrize(
    ("arguments", "largest", "detail"),
    [
        ({}, 64, ""),
        ({"max_num_seqs": 20, "cudagraph_mode": "FULL_DECODE_ONLY"}, 20, ""),
        ({"max_num_seqs": 20, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": 16}, 16, ""),
        (
            {"max_num_seqs": 20, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": 19},
            16,
            "19 was asked for; captured: decodes of 1, 2, 4, 8, 16 rows",
        ),
        (
            {"max_num_seqs": 300, "max_num_batched_tokens": 1024, "max_cudagraph_capture_size": 512},
            256,
            "512 was asked for; captured: decodes of 1 to 256 (35 sizes) rows, mixed steps of 32, 64, 128, 256 tokens",
        ),
        (
            {"cudagraph_capture_sizes": [64, 512], "max_cudagraph_capture_size": 512, "max_num_batched_tokens": 512},
            64,
            "512 was asked for; captured: mixed steps of 64 tokens; too large: 512",
        ),
        ({"enforce_eager": True, "max_cudagraph_capture_size": 64}, 0, "64 was asked for; captured: nothing"),
    ],
)
def test_the_bound_is_the_largest_size_that_is_captured(
    arguments: dict[str, Any], largest: int, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in vLLM: the bound is settled, and a notice names it if it differs from the wish."""
    resolved = settings(**arguments)
    bound = resolved.settings["max_cudagraph_capture_size"]
    assert (bound.value, bound.detail) == (largest, detail)
    assert max((size.tokens for size in paddings(WorkerSettings.of(resolved))), default=0) == largest
    with caplog.at_level("WARNING"):
        warn_about_dropped_sizes(resolved)
    told = f"--max-cudagraph-capture-size is taken as {largest}: {detail}"
    is_told = told in [record.getMessage() for record in caplog.records]
    assert is_told == (bool(detail) and resolved.device.cudagraph_mode != "NONE")


@pytest.mark.parametrize("explained", [{}, {"max_cudagraph_capture_size": 40}])
def test_explain_shows_the_bound(explained: dict[str, Any]) -> None:
    gpu = GpuFacts("fake", 90, 1 << 36, 1 << 36)
    device = DeviceFacts("cpu", "test", "avx2", 4, 1 << 34, 1 << 34, gpu)
    config = EngineConfig.from_kwargs(max_num_seqs=4, **explained)
    text = explain("demo", config, ServerConfig(), load_model_config(quire.demo.path()), device).text()
    value, source = (32, "argument") if explained else (256, "default")
    assert re.search(rf"max_cudagraph_capture_size +{value} +\[{source}\]", text)
    if explained:
        assert "40 was asked for; captured: decodes of 1, 2, 4 rows, mixed steps of 32 tokens" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_cudagraph_capture_size": 0}, r"No CUDA graph is that small.*--enforce-eager"),
        ({"max_cudagraph_capture_size": 8, "cudagraph_capture_sizes": [1, 4]}, r"not the largest of .*Expected 4,"),
        (
            {"max_cudagraph_capture_size": 512, "cudagraph_capture_sizes": [64, 512]},
            r"Expected 64, the largest of 64, 512 that --max-num-batched-tokens 100 holds.*Leave one of the two out",
        ),
    ],
)
def test_bounds_that_contradict(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(**arguments)


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match="Illegal value of cudagraph_capture_sizes"):
        settings(cudagraph_capture_sizes=[0, 4])


class Setup:
    """The demo model with rows that hold one prompt each, and every block of the cache poisoned."""

    def __init__(self, num_rows: int = 8, sizes: list[Padding] = SIZES) -> None:
        config, self.model = demo_model("float32", None, IS_FULL)
        self.accelerator = FakeAccelerator()
        cache = kv_cache.allocate(kv_groups(config), 64, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        self.caches = cache.layers
        for tensor in (tensor for cache in self.caches for tensor in cache.tensors()):
            tensor.fill_(float("nan"))
        self.inputs = DeviceInputBatch(
            num_rows,
            MAX_MODEL_LEN,
            BLOCK_SIZE,
            config.vocab_size,
            max_tokens=64,
            accelerator=self.accelerator,
            steps_in_flight=1,
        )
        self.forwards: list[ForwardBatch] = []
        self.graphs = StepGraphs(self.model, self.caches, self.inputs, self.accelerator, sizes)

    def step(self, lens: list[int], starts: list[int]) -> StepRows:
        params = SamplingParams(temperature=0.0)
        names = [f"r{i}" for i in range(len(lens))]
        new = [
            NewRow(name, list(range(10, 40)), 30, params, [4 * i + j for j in range(4)]) for i, name in enumerate(names)
        ]
        known = [row for row in new if row.request_id not in self.inputs.row_of]
        batch = ScheduledBatch(0, names, starts, lens, new_block_ids=[[] for _ in names], new_rows=known)
        self.inputs.apply(batch)
        return self.inputs.step_rows(batch)


def test_the_largest_is_captured_first_into_one_pool() -> None:
    setup, seen = Setup(), []
    setup.graphs.capture(lambda done, total: seen.append((done, total)))
    assert list(setup.graphs._captured) == SIZES
    assert len({id(graph.pool) for graph in setup.accelerator.graphs}) == 1
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("is_frozen_by_others", [False, True])
def test_what_is_captured_is_freed_with_its_owner(is_frozen_by_others: bool) -> None:
    """Also from a reference cycle; objects that others have frozen stay frozen.

    In a process of its own: to look at all objects of the tests takes seconds.
    """
    program = f"from tests.worker.test_cuda_graphs import check_freed; check_freed({is_frozen_by_others})"
    with TorchPopen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
        _, shown = child.communicate(timeout=60)
    assert child.returncode == 0, shown


def check_freed(is_frozen_by_others: bool) -> None:
    (gc.freeze if is_frozen_by_others else gc.unfreeze)()
    setup = Setup(sizes=SIZES[-2:])
    demo_model.cache_clear()
    cycle = [setup, setup.graphs]
    cycle.append(cycle)
    alive = [weakref.ref(each) for each in (setup, setup.model, setup.graphs, setup.inputs, setup.caches[0].k_BGPE)]
    counts: list[int] = []
    if is_frozen_by_others:
        gc.freeze = lambda: pytest.fail("what others have frozen is mixed with the engine")
        gc.unfreeze = lambda: pytest.fail("what others have frozen is thawed")
        setup.graphs.capture()
    else:
        setup.graphs.capture(lambda done, total: counts.append(gc.get_freeze_count()))
        assert min(counts) > 0, "every capture looks at everything"
        assert gc.get_freeze_count() == 0
    del setup, cycle
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


def test_every_size_has_run_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded in the middle of a capture would end it."""
    setup, events = Setup(), []
    forward, capture = setup.model.forward, setup.accelerator.capture
    monkeypatch.setattr(setup.model, "forward", lambda batch: (events.append(batch.num_tokens), forward(batch))[1])
    monkeypatch.setattr(
        setup.accelerator, "capture", lambda run, pool: (events.append("capture"), capture(run, pool))[1]
    )
    setup.graphs.capture()
    assert events == [8, "capture", 4, "capture", 2, "capture", 1, "capture"]


@pytest.mark.parametrize(
    ("lens", "size", "mixed"),
    [
        *[([1], 1, None), ([1] * 2, 2, None), ([1] * 3, 4, None), ([1] * 5, 8, None), ([1] * 8, 8, None)],
        *[([1] * 9, None, None), ([2], None, (6, 5)), ([1, 7], None, (16, 8)), ([1, 1, 1, 1, 2], None, (6, 5))],
        *[
            ([2, 1, 1, 1, 1, 1, 1, 1], None, (16, 8)),
            ([16], None, (16, 8)),
            ([17], None, None),
            ([1] * 8 + [2], None, None),
        ],
    ],
)
def test_dispatch(lens: list[int], size: int | None, mixed: tuple[int, int] | None) -> None:
    """Decodes by rows; others by tokens, if the rows are not too many."""
    rows = np.arange(len(lens))
    step = StepRows(rows, np.zeros_like(rows), np.array(lens), rows)
    want = None if size is None else Padding(size, size)
    decodes, all_sizes = graphs_of_both_kinds()
    assert decodes.size_for(step) == want
    assert all_sizes.size_for(step) == (want if mixed is None else Padding(*mixed))


@cache
def graphs_of_both_kinds() -> tuple[StepGraphs, StepGraphs]:
    """For steps of decodes alone, and for mixed ones too."""
    return Setup().graphs, Setup(sizes=WITH_MIXED).graphs


@pytest.mark.parametrize(
    "num_rows", [pytest.param(rows, marks=pytest.mark.slow if rows in (6, 7) else ()) for rows in range(1, 9)]
)
def test_a_padded_replay_gives_what_the_rows_alone_give(num_rows: int) -> None:
    """To a bit, and padding writes to no block. Sizes with their own number of rows, and with fewer."""
    setup, plain = Setup(), Setup()
    setup.graphs.capture()
    assert all(bool(cache.k_BGPE.isnan().all()) for cache in setup.caches), "a capture wrote to the cache"
    lens, starts = [29] * num_rows, [0] * num_rows
    hidden: list[Any] = []
    with torch.inference_mode():
        for each in (setup, plain):
            for row in range(num_rows):  # 29 tokens fit the staging one row at a time
                whole = each.step(lens, starts)
                alone = replace(
                    whole, **{name: getattr(whole, name)[row : row + 1] for name in ("rows_S", "starts_S", "lens_S")}
                )
                each.model.forward(each.inputs.forward_batch(each.inputs.stage(alone), each.caches))
            step = each.step([1] * num_rows, [29] * num_rows)
            if each is setup:
                size = each.graphs.size_for(step)
                assert size is not None
                hidden.append(each.graphs.run(size, each.inputs.stage(step, pad_to=size))[:num_rows].clone())
            else:
                hidden.append(each.model.forward(each.inputs.forward_batch(each.inputs.stage(step), each.caches)))
    assert torch.equal(*hidden)
    assert setup.accelerator.graphs[SIZES.index(size)].num_replays == 1
    for with_graph, without in zip(setup.caches, plain.caches, strict=True):
        for a, b in zip(with_graph.tensors(), without.tensors(), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), "padding wrote to the cache"


@pytest.mark.parametrize(
    "lens", [[2], [1, 5], [3, 1, 1], [16], [9, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 9], [2, 2, 2]], ids=str
)
def test_a_padded_mixed_replay_gives_what_the_step_alone_gives(lens: list[int]) -> None:
    """Pieces of prompts beside single tokens, behind 12 tokens each: to a bit, and padding writes to no block."""
    setup, plain = Setup(sizes=WITH_MIXED), Setup()
    setup.graphs.capture()
    hidden: list[Any] = []
    with torch.inference_mode():
        for each in (setup, plain):
            before = each.step([4] * len(lens), [0] * len(lens))
            for start in (0, 4, 8):
                piece = replace(before, starts_S=before.starts_S + start)
                each.model.forward(each.inputs.forward_batch(each.inputs.stage(piece), each.caches))
            step = each.step(lens, [12] * len(lens))
            if each is setup:
                size = each.graphs.size_for(step)
                assert size is not None
                assert size.tokens > size.rows
                hidden.append(each.graphs.run(size, each.inputs.stage(step, pad_to=size))[: sum(lens)].clone())
            else:
                hidden.append(each.model.forward(each.inputs.forward_batch(each.inputs.stage(step), each.caches)))
    assert torch.equal(*hidden)
    assert setup.accelerator.graphs[WITH_MIXED.index(size)].num_replays == 1
    for with_graph, without in zip(setup.caches, plain.caches, strict=True):
        for a, b in zip(with_graph.tensors(), without.tensors(), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), "padding wrote to the cache"


def test_a_step_that_lies_elsewhere_is_not_replayed() -> None:
    """A graph would read old numbers. This holds for every field that a forward pass reads, also for a new one."""

    @dataclass(slots=True)
    class WithMask(StagedStep):
        mask_T: Tensor | None = None

    setup = Setup()
    setup.graphs.capture()
    staged = setup.inputs.stage(setup.step([1], [0]), pad_to=Padding(1, 1))
    with torch.inference_mode():
        setup.graphs.run(Padding(1, 1), staged)
    for name in ("token_ids_T", "positions_T", "slot_mappings_T", "rows_S", "cu_seqlens_q_S1", "seq_lens_S"):
        value = getattr(staged, name)
        copied = [each.clone() for each in value] if isinstance(value, list) else value.clone()
        with pytest.raises(AssertionError, match=rf"\['{name}'\] of the step lie elsewhere"):
            setup.graphs.run(Padding(1, 1), replace(staged, **{name: copied}))
    masked = WithMask(**{name: getattr(staged, name) for name in StagedStep.__slots__}, mask_T=torch.zeros(1))
    with pytest.raises(AssertionError, match=r"\['mask_T'\] of the step lie elsewhere"):
        setup.graphs.run(Padding(1, 1), masked)
    with torch.inference_mode():
        setup.graphs.run(Padding(1, 1), replace(masked, mask_T=None))
