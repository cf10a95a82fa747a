"""Tokens that a grammar forces take no steps of their own: under any schedule, with any drafter, on a CPU and a GPU.

The accelerator is a fake, and the kernels are the CPU's. tests/grammar/test_jump_forward.py has whole engines, and
tests/engine/test_sameness_stages.py has ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

import quire.demo
from quire.engine.core import EngineCore
from quire.engine.executor import ThreadExecutor
from quire.grammar.matchers import RowGrammar
from quire.grammar.text import grammar_text
from quire.messages import AddRequest
from quire.sampling.batch_params import SamplingState
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.scheduler.scheduler import Scheduler
from quire.spec_decode.ngram import NgramProposer
from quire.worker.model_runner import ModelRunner
from tests.covering import covering, in_turn
from tests.engine import heads
from tests.engine.harness import EOS, Prompt, Schedule, build_core, demo_draft, run
from tests.engine.test_draft_model import ByWorker
from tests.engine.test_gpu_path import SIZES
from tests.examples import IS_FULL
from tests.worker.fake_accelerator import FakeAccelerator

KEYS = {"the_first_of_the_keys": {"const": "a text that is known"}, "ключ": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}
GRAMMAR = grammar_text(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
NUMBERS = grammar_text(StructuredOutputsParams(regex=r"([0-9] and then ){6}"))
MAX_MODEL_LEN = 512
DRAFTERS = ("none", "ngram", "draft model", "eagle3")


def prompts() -> list[Prompt]:
    """With a grammar, but for one; most end by it, two by their length, one of these within a span."""
    plain: dict[str, Any] = {"temperature": 1.0, "max_tokens": 64}
    given: list[dict[str, Any]] = [
        {"grammar": GRAMMAR, "temperature": 0.0},
        {"grammar": GRAMMAR, "repetition_penalty": 1.1},
        {"grammar": NUMBERS, "presence_penalty": 0.5},
        {"grammar": GRAMMAR, "max_tokens": 9},
        {"grammar": NUMBERS, "logprobs": 2},
        {"grammar": GRAMMAR, "min_tokens": 3, "bad_words_token_ids": [[5, 6]], "logit_bias": {5: 1.0}},
        {"max_tokens": 30},
    ]
    found = [
        Prompt((5, 6, 7 + index), SamplingParams(**plain | {"seed": index} | each)) for index, each in enumerate(given)
    ]
    forks = [Prompt(found[1].token_ids, SamplingParams(seed=seed, grammar=GRAMMAR, **plain), "r1") for seed in (8, 9)]
    return [*found, *forks]


@cache
def drafting(name: str) -> dict[str, Any]:
    """Fields of a Schedule."""
    if name == "ngram":
        return {"proposer": NgramProposer(1, 3)}
    if name == "none":
        return {}
    draft = demo_draft() if name == "draft model" else heads.load_for(MAX_MODEL_LEN, "bfloat16")
    return {"proposer": ByWorker(3), "draft": draft}


def core_of(schedule: Schedule) -> EngineCore:
    core = build_core(schedule, "bfloat16")
    executor = core.executor
    runner = executor.workers[0] if isinstance(executor, ThreadExecutor) else executor
    assert isinstance(runner, ModelRunner)
    grammars = runner.input_batch.grammars
    grammars.use_tokenizer((quire.demo.path("target") / "tokenizer.json").read_text(), [EOS])
    core._preparer = SimpleNamespace(prepare_grammar=grammars.prepare)
    return core


def expected(drafter: str) -> list[list[int]]:
    """By the plain path, with a step for each token."""
    return _expected(schedule_for(drafter).is_whole)


@cache
def _expected(is_whole: bool) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowGrammar, "forced_token", lambda grammar: None)
        core = core_of(Schedule(max_model_len=MAX_MODEL_LEN, is_whole=is_whole))
        tokens = run(core, prompts())
        assert core.scheduler._next_step_id > max(map(len, tokens))
        return tokens


@pytest.fixture
def num_forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokens were forced until now."""
    forced: list[int] = []
    take_forced = SamplingState.take_forced

    def noted(state: SamplingState, row: int, most: int) -> list[int]:
        found = take_forced(state, row, most)
        forced.extend(found)
        return found

    monkeypatch.setattr(SamplingState, "take_forced", noted)
    return lambda: len(forced)


def core_on(device: str, drafter: str, **limits: Any) -> EngineCore:
    """On the CPU, or on a GPU that does its work early or late."""
    if device != "cpu":
        limits |= {"accelerator": FakeAccelerator(is_late=device == "late"), "graph_sizes": SIZES}
    return core_of(schedule_for(drafter, **limits))


def schedule_for(drafter: str, **limits: Any) -> Schedule:
    is_whole = IS_FULL or drafter == "eagle3"  # which reads six layers
    return Schedule(max_model_len=MAX_MODEL_LEN, is_whole=is_whole, **drafting(drafter), **limits)


DEVICES = ("cpu", "late", "early")


@pytest.mark.parametrize(
    ("drafter", "device", "depth", "limits"),
    covering(
        DRAFTERS,
        DEVICES,
        [1, 2, 3],
        [{}, {"chunk": 9}, {"max_num_seqs": 2}, {"prefix_caching": True, "waits": True}],
    ),
)
def test_any_schedule(
    drafter: str, device: str, depth: int, limits: dict[str, Any], num_forced: Callable[[], int]
) -> None:
    assert run(core_on(device, drafter, depth=depth, **limits), prompts()) == expected(drafter)
    assert num_forced() > 60


@pytest.mark.parametrize(
    ("drafter", "device", "depth", "at_step"),
    covering(DRAFTERS, DEVICES, [1, 2, 3], range(0, 24, 1 if IS_FULL else 5), apart=[(0, 3)]),
)
def test_preemption_at_any_step(
    drafter: str, device: str, depth: int, at_step: int, num_forced: Callable[[], int]
) -> None:
    """Before, while and behind a span that is computed."""

    def preempt(core: EngineCore, step: int) -> None:
        assert isinstance(core.scheduler, Scheduler)
        while step == at_step and core.scheduler.num_running:
            core.scheduler.preempt_last()

    assert run(core_on(device, drafter, depth=depth), prompts(), before_step=preempt) == expected(drafter)
    assert num_forced() > 40


@pytest.mark.parametrize(("drafter", "depth"), in_turn([[(drafter,)] for drafter in DRAFTERS], [2, 3, 1]))
def test_a_row_that_is_given_again(drafter: str, depth: int, num_forced: Callable[[], int]) -> None:
    """Requests end at every step, and others take their rows while a step of theirs is in flight."""
    core = core_on("late", drafter, depth=depth, max_num_seqs=2)
    ids = [f"r{index}" for index in range(7)]

    def abort(core: EngineCore, step: int) -> None:
        if step % 3 == 2 and ids:
            core.abort([ids.pop(0)])

    tokens = run(core, [*prompts()[:7], *prompts()[:7]], before_step=abort)
    wanted = expected(drafter)[:7]
    assert tokens[:7] == [each[: len(found)] for each, found in zip(wanted, tokens, strict=False)]
    assert tokens[7:] == wanted
    assert num_forced() > 20


@pytest.mark.parametrize("device", ["cpu", "late"])
@pytest.mark.parametrize("drafter", ["draft model", "eagle3"])
def test_a_span_behind_drafts(drafter: str, device: str) -> None:
    """The step that verifies drafts answers with the span behind them too."""
    grammar = grammar_text(StructuredOutputsParams(regex="[a-f]{12}: and that is all that there is to say"))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=64, grammar=grammar)
    core = core_on(device, drafter, depth=2, waits=True)
    core.add(AddRequest("r0", [5, 6, 7], params, 64, stop_token_ids=[EOS]))
    deltas = []
    while core.has_work():
        deltas += core.step()
    assert any(delta.drafts and len(delta.token_ids) > delta.drafts[0] + 1 for delta in deltas)
