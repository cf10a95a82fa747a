"""The engine's path for GPUs on CPU tensors: the tokens equal the plain path's, whatever the device delays.

The accelerator is a fake, and the kernels are the CPU's; test_gpu_kernels.py compares the kernels of a GPU.
"""

from __future__ import annotations

from functools import cache

import pytest

from quire.engine.core import EngineCore
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams
from quire.worker.model_runner import ModelRunner
from tests.covering import covering
from tests.engine.harness import EOS, Prompt, Schedule, build_core, run
from tests.engine.test_sameness import NUM_BRIEF, QUESTIONS, brief, prompts
from tests.examples import IS_FULL
from tests.worker.fake_accelerator import FakeAccelerator
from tests.worker.queued_accelerator import QueuedAccelerator, run_ahead

SIZES = (1, 2, 4, 8)


TIMINGS = ("late", "early", "behind")  # of copies to the host, or the device computes behind the host


@pytest.fixture(params=TIMINGS)
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    if request.param == "behind":
        run_ahead(monkeypatch.setattr)
        return QueuedAccelerator()
    return FakeAccelerator(is_late=request.param == "late")


@cache
def expected() -> list[list[int]]:
    """By the plain path, all at once."""
    return run(build_core(Schedule(), "bfloat16"), prompts())


@pytest.mark.parametrize(
    ("accelerator", "chunk", "depth", "captured"),
    covering(TIMINGS, [1, 7, 17, 2048], [1, 2, 3], [((), ()), (SIZES, ()), (SIZES, (7, 17, 40))]),
    indirect=["accelerator"],
)
def test_batches(
    accelerator: FakeAccelerator, chunk: int, depth: int, captured: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    graph_sizes, mixed_sizes = captured
    schedule = Schedule(
        chunk=chunk, depth=depth, accelerator=accelerator, graph_sizes=graph_sizes, mixed_sizes=mixed_sizes
    )
    core = build_core(schedule, "bfloat16")
    assert run(core, prompts()) == expected()
    assert accelerator.num_unread == 0
    if depth == 2 or IS_FULL:
        assert run(core, prompts(), prefix="again") == expected(), "rows that were used before"


@pytest.mark.parametrize("depth", [1, 2])
def test_prefix_cache_and_forks(accelerator: FakeAccelerator, depth: int) -> None:
    """Copied blocks, shared blocks, and hits."""
    core = build_core(
        Schedule(depth=depth, prefix_caching=True, accelerator=accelerator, graph_sizes=SIZES), "bfloat16"
    )
    assert run(core, prompts(), prefix="first") == expected()
    assert run(core, prompts(), prefix="second") == expected()
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=12) for seed in range(4)]
    ids = prompts()[0].token_ids
    forked = [Prompt(ids, params[0]), *(Prompt(ids, each, fork_of="f0") for each in params[1:])]
    assert run(core, forked, prefix="f") == run(build_core(Schedule(), "bfloat16"), [Prompt(ids, p) for p in params])


@pytest.mark.parametrize(
    ("accelerator", "at_step", "depth"), covering(TIMINGS, range(0, 26, 5), [1, 2, 3]), indirect=["accelerator"]
)
def test_preemption_at_any_step(accelerator: FakeAccelerator, at_step: int, depth: int) -> None:
    core = build_core(Schedule(chunk=17, depth=depth, accelerator=accelerator, graph_sizes=SIZES), "bfloat16")

    def preempt(core: EngineCore, step: int) -> None:
        while step == at_step and core.scheduler.num_running:
            core.scheduler.preempt_last()

    assert run(core, prompts(), before_step=preempt) == expected()


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_by_lack_of_blocks(accelerator: FakeAccelerator, depth: int) -> None:
    needed = max(len(prompt.token_ids) for prompt in prompts()) + 24
    schedule = Schedule(num_blocks=needed // 16 + 3, depth=depth, accelerator=accelerator, graph_sizes=SIZES)
    core = build_core(schedule, "bfloat16")
    assert run(core, prompts()) == expected()
    assert core.scheduler.take_stats().num_preemptions >= 0


@pytest.mark.parametrize(
    ("accelerator", "at_step", "depth"), covering(TIMINGS, [0, 1, 2, 5, 11], [1, 2, 3]), indirect=["accelerator"]
)
def test_aborts_free_blocks_that_a_step_in_flight_writes_to(
    accelerator: FakeAccelerator, at_step: int, depth: int
) -> None:
    """The blocks of two requests go to requests that wait, while steps with the old owners are still to be computed."""
    needed = max(len(prompt.token_ids) for prompt in prompts()) + 24
    schedule = Schedule(
        num_blocks=2 * (-(-needed // 16) + 1), max_num_seqs=2, depth=depth, accelerator=accelerator, graph_sizes=(1, 2)
    )
    core = build_core(schedule, "bfloat16")
    for name in ("gone 1", "gone 2"):
        params = SamplingParams(temperature=0.0, max_tokens=24)
        core.add(AddRequest(name, list(prompts()[-1].token_ids), params, 24, stop_token_ids=[EOS]))

    def abort(core: EngineCore, step: int) -> None:
        if step == at_step:
            core.abort(["gone 1", "gone 2"])

    deltas: dict[str, list[int]] = {}
    for index, prompt in enumerate(brief()):
        core.add(AddRequest(f"r{index}", list(prompt.token_ids), prompt.params, NUM_BRIEF, stop_token_ids=[EOS]))
    step = 0
    while core.has_work():
        abort(core, step)
        for delta in core.step():
            deltas.setdefault(delta.request_id, []).extend(delta.token_ids)
        step += 1
    assert [deltas[f"r{index}"] for index in range(len(prompts()))] == [tokens[:NUM_BRIEF] for tokens in expected()]
    core.scheduler.kv.check()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_late_stops(accelerator: FakeAccelerator, depth: int) -> None:
    """A stop is seen when later steps of the request are in flight already: their tokens are dropped."""
    for prompt, tokens in list(zip(prompts(), expected(), strict=True))[: 5 if IS_FULL else 2]:
        stop = tokens[len(tokens) // 2]
        kept = tokens[: tokens.index(stop) + 1]
        core = build_core(Schedule(depth=depth, accelerator=accelerator, graph_sizes=(1,)), "bfloat16")
        core.add(AddRequest("a", list(prompt.token_ids), prompt.params, 24, stop_token_ids=[EOS, stop]))
        found = [token for _ in iter(core.has_work, False) for delta in core.step() for token in delta.token_ids]
        assert found == kept
        core.scheduler.kv.check()


HISTORY = {
    "penalties": SamplingParams(
        temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3, max_tokens=20
    ),
    "greedy repetition": SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=20),
    "min tokens": SamplingParams(temperature=0.0, min_tokens=12, max_tokens=20),
    "allowed": SamplingParams(temperature=1.0, seed=5, allowed_token_ids=list(range(300, 360)), max_tokens=20),
    "bias": SamplingParams(temperature=0.0, logit_bias={400: 30.0}, max_tokens=20),
    "min p": SamplingParams(temperature=1.2, min_p=0.1, top_k=7, seed=8, max_tokens=20),
}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_depends_on_earlier_tokens(accelerator: FakeAccelerator, depth: int) -> None:
    """Penalties and minimum lengths wait for the tokens before; the others do not."""
    batch = [Prompt(prompts()[index % 5].token_ids, params) for index, params in enumerate(HISTORY.values())]
    words = SamplingParams(temperature=0.0, max_tokens=20)
    words.bad_words_token_ids = [expected()[0][3:5], expected()[0][1:2]]
    batch.append(Prompt(prompts()[0].token_ids, words))
    want = run(build_core(Schedule(), "bfloat16"), batch)
    assert want[-1] != expected()[0][:20], "the bad words change nothing"
    core = build_core(Schedule(depth=depth, accelerator=accelerator, graph_sizes=SIZES), "bfloat16")
    assert run(core, batch) == want


@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs(accelerator: FakeAccelerator, depth: int) -> None:
    """Of outputs and prompts, beside requests without."""
    wishes = [
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=6),
        SamplingParams(temperature=1.3, seed=2, logprobs=0, prompt_logprobs=2, max_tokens=6),
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(temperature=0.0, logprobs=2, presence_penalty=0.5, max_tokens=6),
        SamplingParams(temperature=0.0, logprob_token_ids=[7, 300, 9], max_tokens=6),
    ]

    def outputs(schedule: Schedule) -> dict[str, list[object]]:
        core = build_core(schedule, "bfloat16")
        for index, params in enumerate(wishes):
            ids = list(prompts()[index].token_ids)
            core.add(AddRequest(f"r{index}", ids, params, 6, stop_token_ids=[EOS]))
        found: dict[str, list[object]] = {}
        while core.has_work():
            for delta in core.step():
                assert delta.error is None
                found.setdefault(delta.request_id, []).append((delta.token_ids, delta.logprobs, delta.prompt_logprobs))
        return found

    for chunk in (2048, 7):
        assert outputs(Schedule(chunk=chunk, depth=depth, accelerator=accelerator)) == outputs(Schedule(chunk=chunk))


def test_the_next_step_is_launched_before_the_result_is_waited_for() -> None:
    accelerator = FakeAccelerator()
    core = build_core(Schedule(depth=2, accelerator=accelerator, graph_sizes=SIZES), "bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    core.add(AddRequest("a", list(prompts()[0].token_ids), params, 8, stop_token_ids=[EOS]))
    core.step()
    unread = []
    while core.has_work():
        core.step()
        unread.append(accelerator.num_unread)
    assert unread == [1] * 7 + [0], "a step is in flight behind every result but the last"
    assert sum(graph.num_replays for graph in accelerator.graphs) == 7, "all steps but the prompt's are replays"


@pytest.mark.parametrize("depth", [1, 2])
def test_mixed_steps_are_replays(accelerator: FakeAccelerator, depth: int) -> None:
    """Pieces of prompts beside decodes: every step of at most 16 tokens has a size that holds it."""
    schedule = Schedule(
        chunk=16, depth=depth, max_num_seqs=4, accelerator=accelerator, graph_sizes=(1, 2, 4), mixed_sizes=(16,)
    )
    core = build_core(schedule, "bfloat16")
    steps: list[int] = []
    assert run(core, prompts(), before_step=lambda core, step: steps.append(step)) == expected()
    num_replays = sum(graph.num_replays for graph in accelerator.graphs)
    runner = core.executor
    assert isinstance(runner, ModelRunner)
    assert runner.forward_pass.captured is not None
    launched = len(accelerator.downloads)
    assert num_replays == launched <= len(steps)
    assert accelerator.graphs[0].num_replays > 5, "steps of 16 tokens"


def test_a_row_without_numbers_ends_alone(accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step is in flight already, with a token that exists."""
    core = build_core(Schedule(depth=2, accelerator=accelerator), "bfloat16")
    runner = core.executor
    assert isinstance(runner, ModelRunner)
    compute_logits, calls = runner.model.compute_logits, []

    def poisoned(hidden_RD, adapter_slots_R):  # type: ignore[no-untyped-def]
        logits_RV = compute_logits(hidden_RD, adapter_slots_R)
        calls.append(len(logits_RV))
        if len(calls) == 4:
            logits_RV[1, 7] = float("nan")
        return logits_RV

    monkeypatch.setattr(runner.model, "compute_logits", poisoned)
    tokens = run(core, prompts(), failing="r1")
    want = expected()
    assert [tokens[index] for index in (0, 2, 3, 4)] == [want[index] for index in (0, 2, 3, 4)]
    assert tokens[1] == want[1][:3]


def test_a_failed_allocation_ends_the_newest_request(
    accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = build_core(Schedule(depth=2, accelerator=accelerator, graph_sizes=SIZES), "bfloat16")
    runner = core.executor
    assert isinstance(runner, ModelRunner)
    compute_logits, calls = runner.model.compute_logits, []

    def fails_once(hidden_RD, adapter_slots_R):  # type: ignore[no-untyped-def]
        calls.append(None)
        if len(calls) == 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return compute_logits(hidden_RD, adapter_slots_R)

    monkeypatch.setattr(runner.model, "compute_logits", fails_once)
    last = len(QUESTIONS) - 1
    tokens = run(core, prompts(), failing=f"r{last}")
    assert tokens[:last] == expected()[:last]
