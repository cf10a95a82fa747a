"""Decode graphs: which sizes are captured and in which order, which size a batch runs on, what padding may touch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.forward_batch import ForwardBatch
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.worker import kv_cache
from quire.worker.cuda_graphs import LARGEST_BATCH, DecodeGraphs, capture_sizes
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.input_batch import StepRows
from tests.engine.harness import demo_model
from tests.worker.fake_accelerator import FakeAccelerator

BLOCK_SIZE, MAX_MODEL_LEN = 8, 64
SIZES = (1, 2, 4, 8)


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


class Setup:
    """The demo model with rows that hold one prompt each, and every block of the cache poisoned."""

    def __init__(self, num_rows: int = 8) -> None:
        config, self.model = demo_model("float32", None)
        self.accelerator = FakeAccelerator()
        shape = (config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.caches = kv_cache.allocate(config.num_layers, 64, *shape, torch.float32, torch.device("cpu"))
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
        self.graphs = DecodeGraphs(self.model, self.caches, self.inputs, self.accelerator, SIZES)

    def step(self, lens: list[int], starts: list[int]) -> StepRows:
        params = SamplingParams(temperature=0.0)
        names = [f"r{i}" for i in range(len(lens))]
        new = [
            NewRow(name, list(range(10, 40)), 30, params, [4 * i + j for j in range(4)]) for i, name in enumerate(names)
        ]
        known = [row for row in new if row.request_id not in self.inputs.row_of]
        batch = ScheduledBatch(0, names, starts, lens, [[] for _ in names], known)
        self.inputs.apply(batch)
        return self.inputs.step_rows(batch)


def test_the_largest_is_captured_first_into_one_pool() -> None:
    setup, seen = Setup(), []
    setup.graphs.capture(lambda done, total: seen.append((done, total)))
    assert list(setup.graphs._captured) == [8, 4, 2, 1]
    assert len({id(graph.pool) for graph in setup.accelerator.graphs}) == 1
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


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
    ("lens", "size"),
    [([1], 1), ([1] * 2, 2), ([1] * 3, 4), ([1] * 5, 8), ([1] * 8, 8), ([1] * 9, None), ([2], None), ([1, 7], None)],
)
def test_dispatch(lens: list[int], size: int | None) -> None:
    graphs = Setup().graphs
    rows = np.arange(len(lens))
    step = StepRows(rows, np.ones(len(lens), dtype=bool), np.zeros_like(rows), np.array(lens))
    assert graphs.size_for(step) == size


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_a_padded_replay_gives_what_the_rows_alone_give(num_rows: int) -> None:
    """To a bit, and padding writes to no block."""
    setup, plain = Setup(), Setup()
    setup.graphs.capture()
    assert all(bool(cache.k_BGPE.isnan().all()) for cache in setup.caches), "a capture wrote to the cache"
    lens, starts = [29] * num_rows, [0] * num_rows
    hidden: list[Any] = []
    with torch.inference_mode():
        for each in (setup, plain):
            for row in range(num_rows):  # 29 tokens fit the staging one row at a time
                whole = each.step(lens, starts)
                alone = replace(whole, **{name: getattr(whole, name)[row : row + 1] for name in StepRows.__slots__})
                each.model.forward(each.inputs.forward_batch(alone, each.caches))
            step = each.step([1] * num_rows, [29] * num_rows)
            if each is setup:
                size = each.graphs.size_for(step)
                assert size is not None
                hidden.append(each.graphs.run(size, each.inputs.stage(step, pad_to=size))[:num_rows].clone())
            else:
                hidden.append(each.model.forward(each.inputs.forward_batch(step, each.caches)))
    assert torch.equal(*hidden)
    assert setup.accelerator.graphs[3 - SIZES.index(size)].num_replays == 1
    for with_graph, without in zip(setup.caches, plain.caches, strict=True):
        for a, b in zip(with_graph.tensors(), without.tensors(), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), "padding wrote to the cache"


def test_a_step_that_lies_elsewhere_is_not_replayed() -> None:
    setup = Setup()
    setup.graphs.capture()
    step = setup.step([1], [0])
    staged = setup.inputs.stage(step, pad_to=1)
    moved = replace(staged, token_ids_T=staged.token_ids_T.clone())
    with pytest.raises(AssertionError, match="the step lies elsewhere"):
        setup.graphs.run(1, moved)
