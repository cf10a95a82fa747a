"""The sameness matrix with adapters: base and three adapters side by side, and no schedule may change a token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import quire.demo
from quire.engine.core import EngineCore
from quire.formats.weight_format import ON_LOAD
from quire.lora.slots import AdapterSlots
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import Decoder
from quire.schedule import NewRow, RowsFailedError, ScheduledBatch
from quire.worker.input_batch import InputBatch
from tests.covering import covering
from tests.engine.harness import Prompt, Schedule, core_over, dtype_of, run
from tests.engine.test_sameness import BLOCK_SIZE, PRECISIONS, brief
from tests.guesser import Guesser
from tests.loading import load_model
from tests.lora.random_adapters import packed, random_deltas
from tests.worker.fake_accelerator import FakeAccelerator

RANKS = {"a": 8, "b": 3, "c": 16}


@cache
def adapted(precision: str) -> tuple[ModelConfig, Decoder, AdapterSlots]:
    """The demo model with three adapters; one changes the vocabulary's weights too."""
    config = load_model_config(quire.demo.path("target"))
    quantization = precision if precision in ON_LOAD else None
    model = load_model(config, dtype_of(precision), quantization=quantization)
    assert isinstance(model, Decoder)
    slots = AdapterSlots(model, 4, 16, dtype_of(precision))
    for seed, (digest, rank) in enumerate(RANKS.items()):
        everything = random_deltas(model, dtype_of(precision), seed=seed, rank=rank, wants=lambda name: True)
        linears = {name: delta for name, delta in everything.items() if name.startswith("model.layers.")}
        slots.add(packed(slots, digest, everything if digest == "c" else linears))
    return config, model, slots


def core(precision: str, schedule: Schedule) -> EngineCore:
    config, model, slots = adapted(precision)
    return core_over(config, model, replace(schedule, adapters=slots.slots), precision)


def prompts() -> list[Prompt]:
    """Every question to the base and to an adapter; one question to all of them."""
    wanted = [replace(prompt, adapter=name) for prompt, name in zip(brief(), [None, *RANKS, None], strict=True)]
    return wanted + [replace(brief()[0], adapter=name) for name in RANKS]


@cache
def expected(precision: str) -> list[list[int]]:
    """Each request alone, its prompt in one step."""
    return [run(core(precision, Schedule()), [prompt])[0] for prompt in prompts()]


def test_adapters_change_the_tokens() -> None:
    of_one_question = [expected("bfloat16")[index] for index in (0, 5, 6, 7)]
    assert len({tuple(tokens) for tokens in of_one_question}) == 4


@pytest.mark.parametrize(
    ("chunk", "depth", "preempt_every", "prefix_caching", "precision"),
    covering([1, 7, BLOCK_SIZE + 1, 2048], [1, 2], [3, 1000], [False, True], PRECISIONS, apart=[(0, 4)]),
)
def test_mixed_batches(chunk: int, depth: int, preempt_every: int, prefix_caching: bool, precision: str) -> None:
    """All at once: prompts and decodes, base and adapters in one batch, some of it computed again."""

    def preempt(core: EngineCore, step: int) -> None:
        if step < 60 and step % preempt_every == preempt_every - 1 and core.scheduler.num_running:
            core.scheduler.preempt_last()

    mixed = core(precision, Schedule(chunk=chunk, depth=depth, prefix_caching=prefix_caching))
    assert run(mixed, prompts(), before_step=preempt) == expected(precision)
    mixed.shutdown()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_formats_of_the_kv_cache(kv_cache_dtype: str) -> None:
    """They change tokens, and each request still gets those that it gets alone."""
    plain = Schedule(kv_cache_dtype=kv_cache_dtype)
    alone = [run(core("bfloat16", plain), [prompt])[0] for prompt in prompts()]
    assert run(core("bfloat16", replace(plain, chunk=7, prefix_caching=True)), prompts()) == alone


@pytest.mark.parametrize("precision", ["bfloat16", "int4"])
def test_drafts_are_verified_with_the_adapter(precision: str) -> None:
    proposer = Guesser(0.6, vocab_size=4096)
    proposer.continuation_of = lambda request_id: expected(precision)[int(request_id.removeprefix("r"))]
    assert run(core(precision, Schedule(proposer=proposer, waits=True)), prompts()) == expected(precision)


def test_alone_after_others_with_recorded_steps() -> None:
    """A recording with adapters serves any adapter, and one without serves the base."""
    shared = core("bfloat16", Schedule())
    for _ in range(2):
        for index, prompt in enumerate(prompts()):
            assert run(shared, [prompt], prefix=f"r{index}.")[0] == expected("bfloat16")[index]


@pytest.mark.parametrize("depth", [1, 2])
def test_as_on_a_gpu(depth: int) -> None:
    """With graphs of steps with adapters and without, on a fake accelerator with the CPU's kernels."""
    schedule = Schedule(
        depth=depth, accelerator=FakeAccelerator(), graph_sizes=(1, 2, 4, 8), mixed_sizes=(32, 64), chunk=64
    )
    assert run(core("bfloat16", schedule), prompts()) == expected("bfloat16")


def test_an_adapter_that_is_not_in_memory_fails_its_row() -> None:
    inputs = InputBatch(2, 64, 16, 100, 1, {"a": 0})
    params = brief()[0].params
    batch = ScheduledBatch(0, new_rows=[NewRow("r", [1, 2], 2, params, [0], adapter="b")])
    with pytest.raises(RowsFailedError, match="'b' is not in memory"):
        inputs.apply(batch)
