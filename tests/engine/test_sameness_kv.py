"""The sameness matrix over quantized KV caches: the content of the cache depends on the tokens, not on the schedule.

A prompt's own keys and values are read back from the cache, so a chunk sees them as every later token does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from msgspec import structs

from quire.engine.core import EngineCore
from quire.kernels import cpu
from quire.sampling_params import SamplingParams
from tests.covering import covering, in_turn
from tests.engine.harness import Prompt, Schedule, build_core, run
from tests.engine.test_sameness import BEST, BLOCK_SIZE, NUM_BRIEF
from tests.engine.test_sameness import prompts as usual_prompts

KV_CACHE_DTYPES = ("fp8_e4m3", "fp8_e5m2", "int8")


@cache
def prompts() -> tuple[Prompt, ...]:
    """Answers so random that the small differences between caches show in them."""
    return tuple(
        Prompt(prompt.token_ids, SamplingParams(temperature=2.0, seed=1000 + index, max_tokens=24))
        for index, prompt in enumerate(usual_prompts())
    )


def brief() -> tuple[Prompt, ...]:
    """The same prompts with fewer tokens after them."""
    return tuple(replace(prompt, params=structs.replace(prompt.params, max_tokens=NUM_BRIEF)) for prompt in prompts())


@cache
def _expected_on(kv: str, precision: str, isa: str) -> list[list[int]]:
    wanted = prompts() if isa == BEST else brief()[:-1]  # another instruction set rounds differently, and takes longer
    return [run(build_core(Schedule(kv_cache_dtype=kv), precision), [prompt])[0] for prompt in wanted]


def expected(kv: str, precision: str = "bfloat16") -> list[list[int]]:
    """Each request alone, its prompt in one step."""
    return _expected_on(kv, precision, cpu.isa())


def test_the_caches_differ() -> None:
    """Else the checks below compare the unquantized cache with itself."""
    outputs = [expected(kv) for kv in ("auto", *KV_CACHE_DTYPES)]
    assert len({str(output) for output in outputs}) == len(outputs)


SCHEDULES = (
    Schedule(chunk=1),
    Schedule(chunk=7, depth=2),
    Schedule(chunk=BLOCK_SIZE + 1, block_size=8),
    Schedule(block_size=32, depth=2, prefix_caching=True),
    Schedule(num_blocks=8),  # not enough for all: requests are preempted
)


@pytest.mark.parametrize(
    ("schedule", "precision", "kv"), covering(SCHEDULES, ["bfloat16", "float32"], KV_CACHE_DTYPES), ids=str
)
def test_schedules(schedule: Schedule, precision: str, kv: str) -> None:
    core = build_core(replace(schedule, kv_cache_dtype=kv), precision)
    assert run(core, prompts()) == expected(kv, precision)
    core.shutdown()


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES)
def test_prefix_hits(kv: str) -> None:
    """From blocks that another request filled, at and around a boundary; and the second time everything."""
    longest = max(range(len(prompts())), key=lambda index: len(prompts()[index].token_ids))
    prompt, tokens = brief()[longest], expected(kv)[longest][:NUM_BRIEF]
    for warm in (BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, len(prompt.token_ids)):
        core = build_core(Schedule(prefix_caching=True, kv_cache_dtype=kv), "bfloat16")
        run(core, [Prompt(prompt.token_ids[:warm], SamplingParams(temperature=0.0, max_tokens=1))], prefix="warm")
        assert run(core, [prompt]) == [tokens], f"prefix of {warm} tokens"
        assert run(core, [prompt], prefix="again") == [tokens]


@pytest.mark.parametrize(("at_step", "kv"), in_turn([[(0,), (1,), (5,), (20,)]], KV_CACHE_DTYPES))
def test_preemption(at_step: int, kv: str) -> None:
    """Every running request loses its blocks before one step and is computed again."""
    core = build_core(Schedule(chunk=BLOCK_SIZE + 1, kv_cache_dtype=kv), "bfloat16")

    def preempt(core: EngineCore, step: int) -> None:
        while step == at_step and core.scheduler.num_running:
            core.scheduler.preempt_last()

    assert run(core, prompts(), before_step=preempt) == expected(kv)
    core.shutdown()


@pytest.mark.parametrize("kv", KV_CACHE_DTYPES)
def test_forks_copy_the_scales_too(kv: str) -> None:
    """n > 1: the partly filled last block of the prompt is copied for each child."""
    token_ids = prompts()[-1].token_ids
    assert len(token_ids) % BLOCK_SIZE != 1, "the prompt ends with a block: nothing is copied"
    children = [
        Prompt(token_ids, SamplingParams(temperature=2.0, seed=seed, max_tokens=24), fork_of="r0" if seed else None)
        for seed in range(4)
    ]
    schedule = Schedule(kv_cache_dtype=kv)
    alone = [run(build_core(schedule, "bfloat16"), [Prompt(child.token_ids, child.params)])[0] for child in children]
    assert run(build_core(schedule, "bfloat16"), children) == alone


@pytest.mark.parametrize(
    ("isa", "kv", "schedule"),
    covering(cpu.isas()[:-1], KV_CACHE_DTYPES, [Schedule(chunk=7), Schedule(num_blocks=5, depth=2)], apart=[(0, 1)]),
    ids=str,
)
def test_every_instruction_set(isa: str, kv: str, schedule: Schedule) -> None:
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        core = build_core(replace(schedule, kv_cache_dtype=kv), "bfloat16")
        assert run(core, brief()[:-1]) == [tokens[:NUM_BRIEF] for tokens in expected(kv)]
        core.shutdown()
    finally:
        cpu.set_isa(best)
