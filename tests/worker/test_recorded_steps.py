"""Recorded steps have the bits of the blocks run anew, and all inputs are copied; some steps are not recorded."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import quire.demo
from quire.families import FAMILIES
from quire.forward_batch import ForwardBatch
from quire.kernels import cpu
from quire.kernels.recording import Arena, record
from quire.model_config import load_model_config
from quire.models.decoder import Decoder
from quire.schedule import MAX_RECORDED_BUDGET, MAX_RECORDED_TOKENS
from quire.worker import recorded_steps
from quire.worker.input_batch import InputBatch, StepRows
from quire.worker.recorded_steps import RecordedSteps
from tests.gguf.writing import write_gguf
from tests.loading import load_model
from tests.models.paged_run import PagedRun
from tests.models.test_families import CASES, EXTENDED, random_hf_model

pytestmark = pytest.mark.skipif(not cpu.available(), reason="only compiled kernels are recorded")

STEPS: list[dict[int, list[int]]] = [
    {0: [5, 6, 7], 1: [9]},  # recorded: prompts, four tokens
    {0: [8], 1: [10]},  # recorded: two tokens
    {1: [11], 0: [9]},  # repeated, rows in another order
    {0: [12]},
    {0: [13], 1: [14], 2: [15]},
    {2: [16], 0: [17], 1: [18]},
    {0: [19]},
    {1: [20, 21, 22, 23]},  # repeated, one row in place of two
    {2: [24, 25], 0: [26]},  # repeated, two rows in place of three
]
NUM_RECORDINGS = 4  # for 4, 2, 1 and 3 tokens


class RecordedRun(PagedRun):
    """Steps through RecordedSteps, padded as the runner does."""

    def __init__(self, model: Decoder, num_blocks: int = 64, full_step: int = 0) -> None:
        super().__init__(model, torch.bfloat16, num_blocks=num_blocks)
        inputs = InputBatch(1, 8 * num_blocks, 8, model.config.vocab_size)
        self.recorded = RecordedSteps(model, inputs, self.caches, full_step)

    def forward(self, batch: ForwardBatch) -> Tensor:
        num_tokens, num_rows = batch.num_tokens, len(batch.seq_lens_S)
        lens = np.diff(batch.cu_seqlens_q_S1.numpy())
        rows = np.arange(num_rows)
        size = self.recorded.size_for(StepRows(rows, batch.seq_lens_S.numpy() - lens, lens, rows))
        if size is None:
            return self.model.forward(batch)
        assert (size.tokens, size.rows) == (num_tokens, min(num_tokens, MAX_RECORDED_TOKENS))
        more = size.rows - num_rows
        padded = replace(
            batch,
            cu_seqlens_q_S1=functional.pad(batch.cu_seqlens_q_S1, (0, more), value=num_tokens),
            seq_lens_S=functional.pad(batch.seq_lens_S, (0, more)),
            tables=tuple(
                replace(table, block_tables_SM=functional.pad(table.block_tables_SM, (0, 0, 0, more)))
                for table in batch.tables
            ),
        )
        return self.recorded.forward(padded).clone()  # the next step writes to it


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

    monkeypatch.setattr(recorded_steps, "record", counted)
    return numbers


def steps(run: PagedRun) -> list[Tensor]:
    return [logits for step in STEPS for logits in run.step(step).values()]


def test_the_same_bits(model: Decoder, num_recorded: list[int | None]) -> None:
    replayed = steps(RecordedRun(model))
    assert num_recorded == [1 + 9 * model.config.num_layers] * NUM_RECORDINGS, "nine kernels a layer"
    anew = steps(PagedRun(model, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(replayed, anew, strict=True))


def test_shards_in_several_formats(tmp_path: Path, num_recorded: list[int | None]) -> None:
    """As in files of mixed types: q and k, and v, are two products into one result."""
    write_gguf(tmp_path / "m.gguf", quire.demo.path(), "Q4_0", overrides={"attn_v": "Q8_0"})
    model = load_model(load_model_config(tmp_path / "m.gguf"), torch.bfloat16)
    assert isinstance(model, Decoder)
    replayed = steps(RecordedRun(model))
    assert num_recorded == [1 + 10 * model.config.num_layers] * NUM_RECORDINGS
    anew = steps(PagedRun(model, torch.bfloat16))
    assert all(torch.equal(a, b) for a, b in zip(replayed, anew, strict=True))


RECORDED = [pytest.param(name, marks=pytest.mark.slow if "-" in name else ()) for name in CASES]


@pytest.mark.parametrize("name", RECORDED)
def test_every_family(name: str, tmp_path: Path, num_recorded: list[int | None]) -> None:
    """Layers of native families use only kernels and other recorded operations, also in a full step."""
    random_hf_model(CASES[name]).save_pretrained(tmp_path)
    model = load_model(load_model_config(tmp_path), torch.bfloat16)
    assert isinstance(model, Decoder)
    full = {3: [index % 20 + 3 for index in range(MAX_RECORDED_TOKENS + 6)]}
    runs = RecordedRun(model, full_step=len(full[3])), PagedRun(model, torch.bfloat16)
    replayed, anew = ([*steps(run), *run.step(full).values()] for run in runs)
    assert len(num_recorded) == NUM_RECORDINGS + 1
    assert None not in num_recorded, "more than kernels"
    assert all(torch.equal(a, b) for a, b in zip(replayed, anew, strict=True))


def test_no_family_is_left_out() -> None:
    tried = {getattr(transformers, case.config_class).model_type for name, case in CASES.items() if "-" not in name}
    assert tried | set(EXTENDED) == set(FAMILIES)


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
    """Copies of the step's inputs, and memory for embeddings: nothing that grows with the layers."""
    asked: dict[int, list[str]] = {}
    for num_layers in (2, 6):
        config = load_model_config(quire.demo.path(), {"num_hidden_layers": num_layers})
        model = load_model(config, torch.bfloat16, load_format="dummy", quantization=quantization)
        assert isinstance(model, Decoder)
        run, calls = RecordedRun(model), TorchCalls()
        forward = run.recorded.forward

        def noted(batch: ForwardBatch, forward: Any = forward, calls: TorchCalls = calls) -> Tensor:
            with calls:
                return forward(batch)  # type: ignore[no-any-return]

        run.step({0: [1, 2, 3], 1: [4]})
        run.step({0: [5], 1: [6]})
        run.recorded.forward = noted  # type: ignore[method-assign]
        run.step({0: [7], 1: [8]})
        asked[num_layers] = calls.names
    assert asked[2] == asked[6]
    inputs, embeddings = ["copy_"] * 5 + ["slice", "copy_"], ["empty", "copy_"]
    assert asked[6] == inputs + embeddings


def test_every_field_is_copied_or_the_step_is_not_recorded(model: Decoder, num_recorded: list[int | None]) -> None:
    """A new field of ForwardBatch counts as an input of layers."""

    @dataclass(slots=True)
    class WithMask(ForwardBatch):
        mask_T: Tensor | None = None
        adapters: list[str] | None = None

    def run(**values: Any) -> tuple[RecordedRun, list[ForwardBatch]]:
        """A run whose batches have the fields; the inputs of the blocks when they were recorded."""
        run, given, run_blocks = RecordedRun(model), [], model.run_blocks
        forward = run.recorded.forward

        def extended(batch: ForwardBatch) -> Tensor:
            fields = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
            return forward(WithMask(**fields, **{name: value() for name, value in values.items()}))

        def noted(residual_TD: Tensor, batch: ForwardBatch) -> Tensor:
            given.append(batch)
            return run_blocks(residual_TD, batch)

        run.recorded.forward = extended  # type: ignore[method-assign]
        model.run_blocks = noted  # type: ignore[method-assign]
        return run, given

    numbers = iter(range(1, 9))
    masked, given = run(mask_T=lambda: torch.tensor([next(numbers)]), adapters=lambda: torch.tensor([0]))
    for token in range(3):
        masked.step({0: [token]})
    assert len(num_recorded) == 1
    assert given[0].mask_T.tolist() == [3], "the recorded calls read the third step's"  # type: ignore[attr-defined]
    num_recorded.clear()
    for values in ({"adapters": lambda: ["a"]}, {"mask_T": lambda: None}):
        refused, given = run(mask_T=lambda: torch.tensor([0]), **values) if "adapters" in values else run(**values)
        for token in range(3):
            refused.step({0: [token]})
        assert not num_recorded
        assert len(given) == 3, "each step runs anew"


def test_other_caches_are_not_those_that_were_recorded(model: Decoder, num_recorded: list[int | None]) -> None:
    run, other = RecordedRun(model), RecordedRun(model)
    expected = [run.step({0: [token]})[0] for token in (1, 2)]
    other.recorded = run.recorded
    assert all(torch.equal(other.step({0: [token]})[0], x) for token, x in zip((1, 2), expected, strict=True))
    assert len(num_recorded) == 2


def test_longer_contexts_need_no_other_recording(model: Decoder, num_recorded: list[int | None]) -> None:
    first, again = RecordedRun(model), PagedRun(model, torch.bfloat16)
    logits = [first.step({0: [token]})[0] for token in range(20)]  # blocks of 8: tables of 1, 2 and 3
    assert len(num_recorded) == 1
    assert all(torch.equal(again.step({0: [token]})[0], logits[token]) for token in range(20))


def test_more_than_kernels_is_not_recorded(model: Decoder, num_recorded: list[int | None]) -> None:
    expected = steps(PagedRun(model, torch.bfloat16))
    sublayer, mixer = model._sublayers[0], model._sublayers[0]._mixer
    sublayer._mixer = lambda *args: mixer(*args) * 2 / 2  # type: ignore[assignment]
    assert all(torch.equal(a, b) for a, b in zip(steps(RecordedRun(model)), expected, strict=True))
    assert num_recorded == [None], "it is tried once"


def test_what_reads_or_makes_numbers_is_seen() -> None:
    x, index, arena = torch.ones(4), torch.tensor([0]), Arena()
    for harmless in (lambda: x.view(2, 2), lambda: torch.empty((2,), dtype=x.dtype, device=x.device)):
        assert record(harmless, arena)[1] == []
    foreign_work = (lambda: x + 1, lambda: x.view(x.sum().int().item()), lambda: x[index], x.zero_)
    for foreign in (*foreign_work, lambda: torch.empty(2)):
        assert record(foreign, arena)[1] is None


def test_a_copy_is_repeated() -> None:
    x, place = torch.ones(4), torch.zeros(4)
    _, calls = record(lambda: place.narrow(0, 0, 2).copy_(x.narrow(0, 2, 2)), Arena())
    assert calls is not None
    x[2] = 7
    for call in calls:
        call()
    assert place.tolist() == [7, 1, 0, 0]


def test_a_recording_that_fails_leaves_nothing(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, last = cpu._C, model._parts_of_pass[-1]

    def fails(*_: Any) -> Tensor:
        raise MemoryError

    run = RecordedRun(model)
    run.step({0: [1, 2]})
    model._parts_of_pass[-1] = fails
    with pytest.raises(MemoryError):
        run.step({0: [3]})
    assert cpu._C is kernels
    assert list(run.recorded._recordings) == [(2, False, ())]
    model._parts_of_pass[-1] = last
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


def test_up_to_so_many_tokens(model: Decoder, num_recorded: list[int | None]) -> None:
    run = RecordedRun(model, num_blocks=MAX_RECORDED_TOKENS + 1)
    for num_rows in (MAX_RECORDED_TOKENS + 1, MAX_RECORDED_TOKENS):
        run.step({row: [row] for row in range(num_rows)})
    assert len(num_recorded) == 1


@pytest.mark.parametrize("full_step", [MAX_RECORDED_TOKENS + 36, MAX_RECORDED_BUDGET + 1])
def test_a_step_with_the_whole_budget(full_step: int, model: Decoder, num_recorded: list[int | None]) -> None:
    """One recording serves any rows of such steps: a prompt, the rest of it beside another one, and answers."""
    token_ids = [index % 90 + 3 for index in range(2 * full_step)]
    prompt = [{0: token_ids[:full_step]}, {0: token_ids[full_step:-9], 1: token_ids[:9]}]
    mixed: list[dict[int, list[int]]] = [{0: [5], 1: [6], 2: token_ids[: full_step - 2]}]
    shorter = [{2: token_ids[: full_step - 1]}]
    runs = RecordedRun(model, 512, full_step), PagedRun(model, torch.bfloat16, num_blocks=512)
    found = [[logits for step in prompt + mixed + shorter for logits in run.step(step).values()] for run in runs]
    assert len(num_recorded) == (full_step <= MAX_RECORDED_BUDGET)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_full_step_of_many_rows_is_not_recorded(model: Decoder, num_recorded: list[int | None]) -> None:
    run = RecordedRun(model, MAX_RECORDED_TOKENS + 2, full_step=MAX_RECORDED_TOKENS + 1)
    run.step({row: [row] for row in range(MAX_RECORDED_TOKENS + 1)})
    assert not num_recorded


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
