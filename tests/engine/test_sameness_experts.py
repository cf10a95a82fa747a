"""The sameness matrix of models with experts. No schedule may change a token; a last bit could choose other experts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from quire.engine.core import EngineCore
from quire.formats.kv_groups import kv_groups, num_tables, pages_alone
from quire.formats.weight_format import ON_LOAD
from quire.kernels import cpu
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import Decoder
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from quire.schedule import MAX_RECORDED_TOKENS, NewRow, ScheduledBatch
from quire.worker import kv_cache
from quire.worker.accelerator import Host
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner
from quire.worker.recorded_steps import RecordedSteps
from tests.covering import covering
from tests.engine.harness import Prompt, Schedule, core_over, dtype_of, run
from tests.loading import load_model
from tests.models.test_families import CASES, random_hf_model
from tests.models.tiny_models import SIZES
from tests.worker.fake_accelerator import FakeAccelerator

FAMILIES = ("qwen3_moe", "phimoe", "qwen2_moe", "glm4_moe", "gpt_oss", "llama4_text")
PRECISIONS = ("bfloat16", "float32", *ON_LOAD)
POISON = 99  # a token whose embedding has no numbers, in one test
SCHEDULES = {
    "together": Schedule(),
    "chunks of 1": Schedule(chunk=1),
    "chunks of 7, two in flight": Schedule(chunk=7, depth=2),
    "hits": Schedule(prefix_caching=True, block_size=8),
    "short of blocks": Schedule(num_blocks=7, block_size=8, chunk=16, prefix_caching=True),
    "on a GPU": Schedule(depth=2, accelerator=FakeAccelerator(is_late=True), graph_sizes=(8, 4, 2, 1)),
}


@cache
def written(family: str, is_poisoned: bool) -> TemporaryDirectory[str]:
    """Its checkpoint, until the process ends."""
    folder, model = TemporaryDirectory(), random_hf_model(CASES[family])
    if is_poisoned:
        model.get_input_embeddings().weight.data[POISON] = torch.nan
    model.save_pretrained(folder.name)
    return folder


@cache
def loaded(family: str, precision: str, is_poisoned: bool = False) -> tuple[ModelConfig, CausalLM]:
    config = load_model_config(Path(written(family, is_poisoned).name))
    quantization = precision if precision in ON_LOAD else None
    return config, load_model(config, dtype_of(precision), quantization=quantization)


def core(family: str, precision: str, schedule: Schedule) -> EngineCore:
    config, model = loaded(family, precision)
    if schedule.num_blocks < 16:  # of each table
        schedule = replace(schedule, num_blocks=schedule.num_blocks * num_tables(kv_groups(config)))
    return core_over(config, model, schedule, precision)


@cache
def prompts() -> list[Prompt]:
    """Two begin alike. Greedy and random requests side by side."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, SIZES["vocab_size"], (64,), generator=generator).tolist()
    tokens = [token if token != POISON else 3 for token in tokens]
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    wanted = [(tokens[:11], greedy), (tokens[:26], sampled), (tokens[30:37], greedy), (tokens[40:60], sampled)]
    return [Prompt(tuple(token_ids), params) for token_ids, params in wanted]


@cache
def expected(family: str, precision: str, isa: str) -> list[list[int]]:
    """Each request alone, its prompt in one step."""
    return [run(core(family, precision, Schedule()), [prompt])[0] for prompt in prompts()]


@pytest.mark.parametrize(("family", "name", "precision"), covering(list(FAMILIES), list(SCHEDULES), list(PRECISIONS)))
def test_no_schedule_changes_a_token(family: str, name: str, precision: str) -> None:
    schedule = SCHEDULES[name]
    if name == "short of blocks" and family == "llama4_text":  # which has four block tables
        schedule = replace(schedule, num_blocks=22)
    engine = core(family, precision, schedule)
    want = expected(family, precision, cpu.isa())
    assert run(engine, prompts()) == want
    assert run(engine, prompts()[::-1], prefix="again") == want[::-1], "after others have left their cache"
    engine.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_requests_differ(family: str) -> None:
    """Else the tests show nothing."""
    tokens = expected(family, "float32", cpu.isa())
    assert len({tuple(each) for each in tokens}) == len(prompts())
    assert min(len(set(each)) for each in tokens) > 2, "the tokens depend on little"


@pytest.mark.parametrize("at_step", range(0, 12, 3))
def test_forced_preemption(at_step: int) -> None:
    engine = core("qwen3_moe", "bfloat16", Schedule(chunk=17, prefix_caching=at_step % 2 == 0))

    def preempt(engine: EngineCore, step: int) -> None:
        while step == at_step and engine.scheduler.num_running:
            engine.scheduler.preempt_last()

    assert run(engine, prompts(), before_step=preempt) == expected("qwen3_moe", "bfloat16", cpu.isa())


@pytest.mark.parametrize(
    ("isa", "precision", "schedule"),
    covering(
        cpu.isas(),
        list(PRECISIONS),
        [Schedule(chunk=7, num_blocks=7, block_size=8), Schedule(chunk=16)],
        apart=[(0, 1)],
    ),
    ids=str,
)
def test_every_instruction_set(isa: str, precision: str, schedule: Schedule) -> None:
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        engine = core("qwen3_moe", precision, schedule)
        assert run(engine, prompts()) == expected("qwen3_moe", precision, isa)
    finally:
        cpu.set_isa(best)


@pytest.mark.skipif(not cpu.available(), reason="plain torch is not recorded")
@pytest.mark.parametrize("family", [*FAMILIES, "granitemoe", "olmoe"])
def test_decode_steps_are_recorded(family: str) -> None:
    """With shared experts and their gate, biases for the choice, layers of other kinds, residual factors, clips."""
    config, model = loaded(family, "bfloat16")
    assert isinstance(model, Decoder)
    groups, num_tokens = kv_groups(config), MAX_RECORDED_TOKENS + 2
    pages = pages_alone(groups, num_tokens, 16, num_tokens)
    cache = kv_cache.allocate(groups, len(pages), 16, torch.bfloat16, torch.device("cpu"))
    inputs = InputBatch(4, config.max_model_len, 16, config.vocab_size, num_tables(groups))
    recorded = RecordedSteps(model, inputs, cache.layers, full_step=0)
    runner = ModelRunner(model, cache, inputs, "raw_logprobs", Host(), recorded)
    row = NewRow("r", [*range(3, 3 + num_tokens)], num_tokens, prompts()[0].params, pages)
    runner.execute(ScheduledBatch(0, ["r"], [0], [num_tokens - 1], num_logits=[0], new_block_ids=[[]], new_rows=[row]))
    runner.execute(ScheduledBatch(1, ["r"], [num_tokens - 1], [1], num_logits=[1], new_block_ids=[[]]))
    assert len(recorded._recordings) == 1


@pytest.mark.parametrize("family", ["qwen2_moe", "llama4_text"])
def test_recorded_steps_read_their_own_memory(family: str) -> None:
    """A longer prompt comes after the recording, and others take the memory that is free then."""
    engine, short = core(family, "float32", Schedule()), prompts()[0]
    want = expected(family, "float32", cpu.isa())[0]
    assert run(engine, [short], prefix="first") == [want]
    longer = Prompt(short.token_ids * 5, SamplingParams(temperature=0.0, max_tokens=1))
    run(engine, [longer], prefix="longer")
    taken = [torch.full((size,), torch.nan) for size in range(1, 64) for _ in range(8)]
    assert run(engine, [short], prefix="again") == [want]
    assert taken


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_without_numbers_ends_alone(depth: int) -> None:
    """NaN reaches the router of that row; the others get their tokens."""
    good = prompts()
    poisoned = [good[0], replace(good[1], token_ids=(*good[1].token_ids[:5], POISON)), *good[2:]]
    engine = core_over(*loaded("qwen3_moe", "float32", True), Schedule(depth=depth), "float32")
    tokens = run(engine, poisoned, failing="r1")
    want = expected("qwen3_moe", "float32", cpu.isa())
    assert tokens == [want[0], [], *want[2:]]
    engine.shutdown()
