"""Recorded decode steps: the bits of the blocks run anew, memory of their own, and what is not recorded."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import quire.demo
from quire.forward_batch import ForwardBatch
from quire.kernels import cpu
from quire.kernels.recording import Arena, record
from quire.loader.load import load_model
from quire.model_config import load_model_config
from quire.models import decode_replay
from quire.models.decoder import Decoder
from tests.gguf.writing import write_gguf
from tests.models.paged_run import PagedRun

pytestmark = pytest.mark.skipif(not cpu.available(), reason="only compiled kernels are recorded")

STEPS: list[dict[int, list[int]]] = [
    {0: [5, 6, 7], 1: [9]},  # prompts
    {0: [8], 1: [10]},  # recorded
    {1: [11], 0: [9]},  # repeated, rows in another order
    {0: [12]},
    {0: [13], 1: [14], 2: [15]},
    {2: [16], 0: [17], 1: [18]},
    {0: [19]},
]


@pytest.fixture(params=[None, "int4", "fp8"])
def model(request: pytest.FixtureRequest) -> Decoder:
    model = load_model(load_model_config(quire.demo.path()), torch.bfloat16, quantization=request.param)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def num_recorded(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Appended to at each recording: its number of calls."""
    numbers: list[int | None] = []

    def counted(run, arena):
        result, calls = record(run, arena)
        numbers.append(None if calls is None else len(calls))
        return result, calls

    monkeypatch.setattr(decode_replay, "record", counted)
    return numbers


def steps(model: Decoder, num_blocks: int = 64) -> list[Tensor]:
    run = PagedRun(model, torch.bfloat16, num_blocks=num_blocks)
    return [logits for step in STEPS for logits in run.step(step).values()]


def test_the_same_bits(model: Decoder, num_recorded: list[int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = steps(model)
    num_layers = model.config.num_layers
    assert num_recorded == [1 + 9 * num_layers] * 3, "once for 2, 1 and 3 rows, nine kernels a layer"
    monkeypatch.setattr(decode_replay, "MAX_ROWS", 0)
    anew = steps(model)
    assert all(torch.equal(a, b) for a, b in zip(replayed, anew, strict=True))


def test_shards_in_several_formats(
    tmp_path: Path, num_recorded: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in files of mixed types: q and k, and v, are two products into one result."""
    write_gguf(tmp_path / "m.gguf", quire.demo.path(), "Q4_0", overrides={"attn_v": "Q8_0"})
    model = load_model(load_model_config(tmp_path / "m.gguf"), torch.bfloat16)
    assert isinstance(model, Decoder)
    replayed = steps(model)
    assert num_recorded == [1 + 10 * model.config.num_layers] * 3
    monkeypatch.setattr(decode_replay, "MAX_ROWS", 0)
    assert all(torch.equal(a, b) for a, b in zip(replayed, steps(model), strict=True))


class TorchCalls(TorchDispatchMode):
    """Notes what goes through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_what_a_repeated_step_asks_of_torch(quantization: str | None) -> None:
    """Memory for embeddings, copies of the step's inputs and of its result: nothing that grows with the layers."""
    asked: dict[int, list[str]] = {}
    for num_layers in (2, 6):
        config = replace(load_model_config(quire.demo.path()), num_layers=num_layers)
        model = load_model(config, torch.bfloat16, "dummy", quantization=quantization)
        assert isinstance(model, Decoder)
        run, forward, calls = PagedRun(model, torch.bfloat16), model.forward, TorchCalls()

        def noted(batch: ForwardBatch, forward: Any = forward, calls: TorchCalls = calls) -> Tensor:
            with calls:
                return forward(batch)  # type: ignore[no-any-return]

        run.step({0: [1, 2, 3], 1: [4]})
        run.step({0: [5], 1: [6]})
        model.forward = noted  # type: ignore[method-assign]
        run.step({0: [7], 1: [8]})
        asked[num_layers] = calls.names
    assert asked[2] == asked[6]
    embeddings, inputs, result = ["empty"], ["copy_"] * 5 + ["slice", "copy_"], ["clone"]
    assert asked[6] == embeddings + inputs + result


def test_results_stay_when_the_next_step_comes(model: Decoder) -> None:
    """The memory that calls write to is the recording's own."""
    run = PagedRun(model, torch.bfloat16)
    run.step({0: [1, 2]})
    results = []
    forward = model.forward
    model.forward = lambda batch: results.append(forward(batch)) or results[-1]  # type: ignore[method-assign]
    for token in range(4):
        run.step({0: [token]})
    assert len({tuple(result.flatten().tolist()) for result in results}) == 4


def test_longer_tables_and_other_caches_are_recorded_anew(
    model: Decoder, num_recorded: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_replay, "_MIN_TABLE_WIDTH", 1)
    first = PagedRun(model, torch.bfloat16)
    logits = [first.step({0: [token]})[0] for token in range(20)]  # blocks of 8: tables of 1, 2 and 3
    assert len(num_recorded) == 3
    again = PagedRun(model, torch.bfloat16)
    assert all(torch.equal(again.step({0: [token]})[0], logits[token]) for token in range(20))
    assert len(num_recorded) == 6


def test_more_than_kernels_is_not_recorded(
    model: Decoder, num_recorded: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = steps(model)
    num_recorded.clear()
    block = model._blocks[0]
    model._blocks[0] = lambda *args: block(*args) * 2 / 2  # type: ignore[call-overload]
    assert all(torch.equal(a, b) for a, b in zip(steps(model), expected, strict=True))
    assert num_recorded == [None], "it is tried once"


def test_what_reads_or_makes_numbers_is_seen() -> None:
    x, index, arena = torch.ones(4), torch.tensor([0]), Arena()
    for harmless in (lambda: x.view(2, 2), lambda: torch.empty((2,), dtype=x.dtype, device=x.device)):
        assert record(harmless, arena)[1] == []
    foreign_work = (lambda: x + 1, lambda: x.view(x.sum().int().item()), lambda: x[index], x.zero_)
    for foreign in (*foreign_work, lambda: torch.empty(2)):
        assert record(foreign, arena)[1] is None


def test_a_recording_that_fails_leaves_nothing(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, block = cpu._C, model._blocks[-1]

    def fails(*_: Any) -> Tensor:
        raise MemoryError

    run = PagedRun(model, torch.bfloat16)
    run.step({0: [1, 2]})
    model._blocks[-1] = fails  # type: ignore[call-overload]
    with pytest.raises(MemoryError):
        run.step({0: [3]})
    assert cpu._C is kernels
    assert not model._replay._recordings
    model._blocks[-1] = block
    run.lengths[0] -= 1
    assert torch.equal(run.step({0: [3]})[0], PagedRun(model, torch.bfloat16).step({0: [1, 2, 3]})[0][-1:])


def test_calls_of_other_threads_are_made_and_not_recorded() -> None:
    logits, tokens = torch.tensor([[0.0, 2.0, 1.0]]), torch.empty(1, dtype=torch.int64)
    with cpu.recorded_calls() as calls:
        other = threading.Thread(target=cpu.greedy, args=(logits, tokens))
        other.start()
        other.join()
        assert (tokens.item(), calls) == (1, [])
        cpu.greedy(logits, tokens)
    assert len(calls) == 1


def test_up_to_so_many_rows(model: Decoder, num_recorded: list[int | None]) -> None:
    run = PagedRun(model, torch.bfloat16)
    for num_rows in (decode_replay.MAX_ROWS + 1, decode_replay.MAX_ROWS):
        run.step({row: [row] for row in range(num_rows)})
    assert len(num_recorded) == 1


def test_memory_is_taken_again_when_it_is_free() -> None:
    arena = Arena()
    first = arena.empty((8, 4), torch.float32)
    view = first[2:].view(-1)
    address = first.data_ptr()
    del first
    assert address % 64 == 0
    assert arena.empty((8, 4), torch.float32).data_ptr() != address, "a view is in it"
    del view
    assert arena.empty((16, 4), torch.bfloat16).data_ptr() == address
    assert arena.empty((2,), torch.float32).data_ptr() != address, "far too large"
