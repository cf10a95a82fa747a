"""The sameness matrix: no schedule may change a token. Demo model, greedy and seeded requests, exact equality."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count, product

import pytest
import torch
from msgspec import structs
from tokenizers import Tokenizer

import quire.demo
from quire.engine.core import EngineCore
from quire.engine.executor import ThreadExecutor
from quire.kernels import cpu
from quire.messages import AddRequest, SetLimits
from quire.sampling_params import SamplingParams
from quire.worker.model_runner import ModelRunner
from quire.worker.recorded_steps import RecordedSteps
from tests.covering import covering
from tests.engine.harness import CHECKPOINT, Prompt, Schedule, build_core, demo_model, run
from tests.examples import IS_FULL

BLOCK_SIZE = 16
QUESTIONS = (
    "What does os.path.join do?",
    "how to sort a list",
    "Describe random.shuffle as JSON.",
    "Which module provides heapq.heappush?",
    "What does itertools.chain do?<|im_end|>\n<|im_start|>assistant\n`itertools.chain(*iterables)`: Return a "
    "chain object whose next method returns elements from the first iterable until it is exhausted.<|im_end|>\n"
    "<|im_start|>user\nExplain functools.lru_cache in Python.",
)
PRECISIONS = ("bfloat16", "float32", "int8", "int4", "fp8")
NUM_BRIEF = 8
BEST = cpu.isa()


def _params(index: int) -> SamplingParams:
    """Greedy and random requests side by side."""
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=24)
    return SamplingParams(temperature=1.5, top_p=0.95, top_k=50, seed=1000 + index, max_tokens=24)


@cache
def prompts() -> tuple[Prompt, ...]:
    tokenizer = Tokenizer.from_file(str(quire.demo.path("target") / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return tuple(Prompt(tuple(tokenizer.encode(text).ids), _params(index)) for index, text in enumerate(texts))


def brief() -> tuple[Prompt, ...]:
    """The same prompts with fewer tokens after them: enough if the prompt or the kernels make the difference."""
    return tuple(replace(prompt, params=structs.replace(prompt.params, max_tokens=NUM_BRIEF)) for prompt in prompts())


def asked_on(isa: str) -> tuple[Prompt, ...]:
    """Brief ones. On other instruction sets than the best one, which take longer, without the longest prompt."""
    return brief() if isa == BEST else brief()[:-1]


@cache
def expected(precision: str, isa: str) -> list[list[int]]:
    """Each request alone, its prompt in one step. Another instruction set rounds differently."""
    wanted = prompts() if isa == BEST else asked_on(isa)
    return [run(build_core(Schedule(), precision), [prompt])[0] for prompt in wanted]


def _expected(precision: str) -> list[list[int]]:
    return expected(precision, cpu.isa())


def _brief(precision: str) -> list[list[int]]:
    return [tokens[:NUM_BRIEF] for tokens in _expected(precision)]


def test_the_questions_exercise_the_matrix() -> None:
    lengths = [len(prompt.token_ids) for prompt in prompts()]
    assert max(lengths) > 2 * BLOCK_SIZE - 1, "no prompt spans several blocks"
    outputs = _expected("bfloat16")
    assert max(map(len, outputs)) == 24
    assert len({tuple(output) for output in outputs}) == len(outputs)


@pytest.mark.parametrize(
    ("chunk", "depth", "precision"),
    # Chunks meet formats in the next test too, and in the tests of kernels.
    covering([1, 7, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2048], [1, 2], PRECISIONS, apart=[(0, 2)]),
)
def test_chunk_size_and_depth(chunk: int, depth: int, precision: str) -> None:
    """Alone, under every chunk size, with one or two batches in flight."""
    asked = list(zip(brief(), _brief(precision), strict=True))
    for prompt, tokens in asked if IS_FULL else asked[1::3]:  # a random one, and the longest
        core = build_core(Schedule(chunk=chunk, depth=depth), precision)
        assert run(core, [prompt]) == [tokens]
        core.shutdown()


@pytest.mark.parametrize(
    ("block_size", "chunk", "depth", "precision"),
    covering([8, 16, 32], [8, BLOCK_SIZE + 1, 2048], [1, 2], PRECISIONS),
)
def test_batch_mates(block_size: int, chunk: int, depth: int, precision: str) -> None:
    """All at once, with prompts and decodes in one batch."""
    core = build_core(Schedule(block_size=block_size, chunk=chunk, depth=depth), precision)
    assert run(core, prompts()) == _expected(precision)
    core.shutdown()


@pytest.mark.skipif(not cpu.available(), reason="plain torch is not recorded")
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_with_the_whole_budget_are_recorded(depth: int) -> None:
    """Long prompts beside each other and beside answers."""
    asked = [Prompt((prompt.token_ids * 9)[:230], prompt.params) for prompt in brief()]
    alone = [run(build_core(Schedule(), "bfloat16"), [prompt])[0] for prompt in asked]
    core = build_core(Schedule(chunk=100, depth=depth, max_num_seqs=8), "bfloat16")
    assert run(core, asked) == alone
    runner = core.executor.workers[0] if isinstance(core.executor, ThreadExecutor) else core.executor
    assert isinstance(runner, ModelRunner)
    assert isinstance(recorded := runner.forward_pass.captured, RecordedSteps)
    assert 100 in {num_tokens for num_tokens, *_ in recorded._recordings}
    core.shutdown()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_prefix_hit_at_every_block_boundary(precision: str) -> None:
    """The cache holds the prompt's first k blocks, and one token more or less."""
    longest = max(range(len(QUESTIONS)), key=lambda index: len(prompts()[index].token_ids))
    prompt, tokens = brief()[longest], _brief(precision)[longest]
    length = len(prompt.token_ids)
    for boundary in range(BLOCK_SIZE, length + BLOCK_SIZE, BLOCK_SIZE):
        for warm in {boundary - 1, boundary, min(boundary + 1, length)} & set(range(1, length + 1)):
            core = build_core(Schedule(prefix_caching=True), precision)
            run(core, [Prompt(prompt.token_ids[:warm], SamplingParams(temperature=0.0, max_tokens=1))], prefix="warm")
            assert run(core, [prompt]) == [tokens], f"prefix of {warm} tokens"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_full_prefix_hit_is_a_hit(precision: str) -> None:
    """Asking twice gives the same tokens, and the second time is served from the cache."""
    core = build_core(Schedule(prefix_caching=True), precision)
    assert run(core, prompts(), prefix="first") == _expected(precision)
    hits = []

    def collect(core: EngineCore, step: int) -> None:
        if core.last_record is not None:
            hits.append(core.last_record.prefix_cache_hits)

    assert run(core, prompts(), prefix="second", before_step=collect) == _expected(precision)
    assert sum(hits) == sum((len(prompt.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts())


# Every step of the prompts with two batches in flight, some later ones, and some with one, in one of two dtypes; the
# formats on load are slow tests.
PREEMPTIONS = [
    pytest.param(
        *(step, depth, precision),
        marks=()
        if at == (step + depth) // 2 % 2 and (step % 4 == 0 or (depth == 2 and step < 12))
        else pytest.mark.slow,
    )
    for step, depth, (at, precision) in product(range(26), [1, 2], enumerate(PRECISIONS))
]


@pytest.mark.parametrize(("at_step", "depth", "precision"), PREEMPTIONS)
def test_forced_preemption_at_every_step(at_step: int, depth: int, precision: str) -> None:
    """Every running request loses its blocks before one step and is computed again."""
    core = build_core(Schedule(chunk=BLOCK_SIZE + 1, depth=depth, prefix_caching=at_step % 2 == 0), precision)
    asked, wanted = (brief(), _brief(precision)) if at_step < 16 else (prompts(), _expected(precision))
    preempted = []

    def preempt(core: EngineCore, step: int) -> None:
        if step == at_step:
            preempted.append(core.scheduler.num_running)
            while core.scheduler.num_running:
                core.scheduler.preempt_last()

    assert run(core, asked, before_step=preempt) == wanted
    assert preempted, "the run ended before the preemption"
    core.shutdown()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_preemption_by_lack_of_blocks(precision: str) -> None:
    """A cache in which the requests do not fit together."""
    needed = max(len(prompt.token_ids) for prompt in prompts()) + 24
    core = build_core(Schedule(num_blocks=needed // BLOCK_SIZE + 3), precision)
    preemptions = []

    def collect(core: EngineCore, step: int) -> None:
        if core.last_record is not None:
            preemptions.append(core.last_record.num_preemptions)

    assert run(core, prompts(), before_step=collect) == _expected(precision)
    assert sum(preemptions) > 0, "nothing was preempted: the check proves nothing"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_forks_share_the_prompt(prefix_caching: bool, depth: int) -> None:
    """n > 1: children over the first one's blocks answer as if they were alone."""
    precision = "bfloat16"
    token_ids = prompts()[-1].token_ids
    children = [
        Prompt(token_ids, SamplingParams(temperature=1.5, seed=seed, max_tokens=24), fork_of="r0" if seed else None)
        for seed in range(4)
    ]
    alone = [run(build_core(Schedule(), precision), [Prompt(child.token_ids, child.params)])[0] for child in children]
    core = build_core(Schedule(prefix_caching=prefix_caching, depth=depth), precision)
    in_use = []

    def collect(core: EngineCore, step: int) -> None:
        if core.scheduler.num_running == 4:
            in_use.append(core.scheduler.kv.pool.num_used_blocks)

    assert run(core, children, before_step=collect) == alone
    num_prompt_blocks = (len(token_ids) - 1) // BLOCK_SIZE
    assert in_use, "the four never ran together"
    assert min(in_use) <= num_prompt_blocks + 4 * 3, "the prompt's blocks are not shared"
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_output", [1, 2, 24])
def test_to_the_very_end_of_the_context(num_output: int, depth: int) -> None:
    """Prompt and output fill max_model_len: the last slot, the last block and the last row of the rotary table."""
    longest = max(range(len(QUESTIONS)), key=lambda index: len(prompts()[index].token_ids))
    prompt, tokens = prompts()[longest], _expected("float32")[longest]
    params = SamplingParams(temperature=0.0, max_tokens=num_output)
    schedule = Schedule(depth=depth, max_model_len=len(prompt.token_ids) + num_output)
    core = build_core(schedule, "float32")
    assert run(core, [Prompt(prompt.token_ids, params)]) == [tokens[:num_output]]
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_more_requests_than_at_the_start(depth: int) -> None:
    """max_num_seqs is raised while one request runs: the worker's rows grow under it."""
    core = build_core(Schedule(max_num_seqs=1, depth=depth), "bfloat16")
    num_running = []

    def widen(core: EngineCore, step: int) -> None:
        num_running.append(core.scheduler.num_running)
        if step == 5:
            core.set_limits(SetLimits(max_num_seqs=len(QUESTIONS)))

    assert run(core, prompts(), before_step=widen) == _expected("bfloat16")
    assert max(num_running[:6]) == 1
    assert max(num_running) == len(QUESTIONS)
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_the_worker_cannot_take_fails_alone(depth: int) -> None:
    """A fault that the front end misses ends one request; the rest of its batch is computed again, to the same
    tokens.
    """
    core = build_core(Schedule(depth=depth), "bfloat16")
    core.add(AddRequest("poison", [5, 6], SamplingParams(temperature=1.0), max_tokens=4))  # random, but without a seed
    assert run(core, prompts(), failing="poison") == _expected("bfloat16")
    core.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_without_numbers_fails_alone(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in one row's logits, while at depth 2 the batch behind it already computes that row's next token."""
    _, model = demo_model("bfloat16", None, IS_FULL)
    compute_logits, num_steps = model.compute_logits, count()

    def poisoned(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        logits_RV = compute_logits(hidden_RD, adapter_slots_R)
        if next(num_steps) == 4:
            logits_RV[1] = float("nan")
        return logits_RV

    wanted = _expected("bfloat16")
    monkeypatch.setattr(model, "compute_logits", poisoned)
    core = build_core(Schedule(depth=depth), "bfloat16")
    failed: list[object] = []
    monkeypatch.setattr(core.scheduler, "fail", lambda *arguments: failed.append(arguments) or [])
    tokens = run(core, prompts(), failing="r1")
    assert not failed, "a whole step failed with the row"
    assert tokens == [wanted[0], wanted[1][:4], *wanted[2:]]
    core.shutdown()


@pytest.mark.parametrize(
    ("isa", "precision", "schedule"),
    covering(
        cpu.isas(),
        [*PRECISIONS, CHECKPOINT],
        [Schedule(chunk=7), Schedule(chunk=BLOCK_SIZE + 1, depth=2), Schedule(num_blocks=5)],
        apart=[(0, 1), (1, 2)],  # they meet in the tests of kernels, and on the best one in the tests above
    ),
    ids=str,
)
def test_every_instruction_set(isa: str, precision: str, schedule: Schedule) -> None:
    """Chunks, batch mates and preemption once more on the paths other CPUs take."""
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        core = build_core(schedule, precision)
        assert run(core, brief()[:-1]) == _brief(precision)[: len(QUESTIONS) - 1]
        core.shutdown()
    finally:
        cpu.set_isa(best)
