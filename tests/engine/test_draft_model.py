"""The bundled draft model drafts for the bundled target: no token changes, and its drafts equal its own answers
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.core import EngineCore
from quire.formats.kv_groups import kv_groups
from quire.kernels import cpu
from quire.request import Request
from quire.sampling.batch_params import SamplingState
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.schedule import MAX_RECORDED_TOKENS
from quire.spec_decode.by_worker import DraftedByWorker
from quire.worker import kv_cache
from quire.worker.accelerator import Host
from quire.worker.draft_model import DraftModel
from quire.worker.drafter import Drafted
from quire.worker.input_batch import InputBatch, StagedStep, StepRows
from quire.worker.model_runner import ModelRunner
from tests.covering import in_turn
from tests.engine.harness import EOS, MOST_DRAFTS, Prompt, Schedule, build_core, demo_draft, run
from tests.engine.test_drafts import (
    GREEDY,
    KINDS,
    RANDOM,
    VOCAB_SIZE,
    Interfered,
    answers,
    expected,
    interfered,
    params,
)
from tests.engine.test_sameness import prompts
from tests.examples import examples


class ByWorker(DraftedByWorker):
    """Up to `most` drafts; with a seed sometimes fewer, or none."""

    def __init__(self, most: int = 5, seed: int | None = None) -> None:
        self.most, self._random = most, None if seed is None else Random(seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        most = min(most, self.most)
        return super().propose(request, most if self._random is None else self._random.randint(0, most))


# Each kind with one way to draw drafts. Another test has all kinds with a drafter that draws like the target:
# test_drafts_are_those_of_the_model_alone.
@pytest.mark.parametrize(("name", "is_greedy"), in_turn([[(name,)] for name in KINDS], [False, True]))
def test_every_kind_of_sampling(name: str, is_greedy: bool) -> None:
    core = build_core(Schedule(proposer=ByWorker(), draft=demo_draft(), drafts_greedily=is_greedy), "bfloat16")
    assert answers(core, [name])[name] == expected(name)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(case=interfered(), most=st.integers(1, MOST_DRAFTS), seed=st.integers(0, 1000))
def test_any_schedule(case: Interfered, most: int, seed: int) -> None:
    case.check(proposer=ByWorker(most, seed), draft=demo_draft(), drafts_greedily=bool(seed % 2))


@dataclass(frozen=True)
class Proposal:
    """What was drafted behind the tokens of a row."""

    request_id: str
    token_ids: tuple[int, ...]
    drafts: tuple[int, ...]


class Notes:
    """The drafts of a core's draft model, and the number of tokens in each of its forward passes.

    The tokens of a row are noted when it drafts, so they are known to be true.
    """

    def __init__(self, core: EngineCore) -> None:
        self.proposals: list[Proposal] = []
        self.failures: dict[str, str] = {}
        self.pass_tokens: list[int] = []
        runner = core.executor
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner.drafting.drafter, DraftModel)
        self.drafter, inputs = runner.drafting.drafter, runner.input_batch
        draft, stage = self.drafter.draft, self.drafter.forward_pass.stage

        def noted_draft(rows: Sequence[int], counts: Sequence[int]) -> Drafted:
            names = {row: name for name, row in inputs.row_of.items()}
            before = [tuple(inputs.token_ids[row, : inputs.num_tokens[row]].tolist()) for row in rows]
            drafted = draft(rows, counts)
            self.failures |= {names[rows[index]]: why for index, why in drafted.failures.items()}
            assert [len(drafts) for drafts in drafted.token_ids] == list(counts)
            for index, (row, token_ids) in enumerate(zip(rows, before, strict=True)):
                if index not in drafted.unread:
                    self.proposals.append(Proposal(names[row], token_ids, tuple(drafted.token_ids[index])))
            return drafted

        def noted_stage(step: StepRows, *arguments: Any) -> StagedStep:
            self.pass_tokens.append(int(step.lens_S.sum()))
            return stage(step, *arguments)

        self.drafter.draft = noted_draft  # type: ignore[method-assign]
        self.drafter.forward_pass.stage = noted_stage  # type: ignore[method-assign]


@cache
def plain_runner() -> ModelRunner:
    """The draft model alone, on a cache of its own."""
    config, model = demo_draft()
    cache = kv_cache.allocate(kv_groups(config), 64, 16, torch.bfloat16, torch.device("cpu"))
    return ModelRunner(model, cache, InputBatch(1, 1024, 16, config.vocab_size), "raw_logprobs", Host())


def drafted_plainly(proposal: Proposal, num_prompt_tokens: int, sampling: SamplingParams) -> tuple[int, ...]:
    """The samples of the draft model alone after each token of a proposal, with all tokens before appended."""
    sequence = [*proposal.token_ids, *proposal.drafts[:-1]]
    logits_TV = torch.cat(list(plain_runner().sequence_logits(sequence, 1024)))
    found = []
    for length in range(len(proposal.token_ids), len(sequence) + 1):
        state = SamplingState(1, VOCAB_SIZE)
        stop = [EOS, *(sampling.stop_token_ids or [])]
        state.add_row(0, sampling, sequence[:num_prompt_tokens], sequence[num_prompt_tokens:length], stop)
        found += Sampler(state)(logits_TV[length - 1 : length].clone(), [0]).token_ids
    return tuple(found)


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_the_model_alone(name: str) -> None:
    core = build_core(Schedule(proposer=ByWorker(seed=4), draft=demo_draft()), "bfloat16")
    notes = Notes(core)
    assert answers(core, [name])[name] == expected(name)
    assert len(notes.proposals) > 2
    for proposal in notes.proposals:
        assert proposal.drafts == drafted_plainly(proposal, len(prompts()[4].token_ids), params()[name])


@pytest.mark.parametrize(("block_size", "drafts_greedily"), in_turn([[(8,), (16,)]], [False, True]))
def test_drafts_are_the_same_under_any_schedule(block_size: int, drafts_greedily: bool) -> None:
    """Preempted and resumed, with prefix hits and forks, and with room for few: no page has rows of another one."""
    sampling = [
        SamplingParams(max_tokens=40, **fields)
        for fields in (RANDOM, RANDOM | {"seed": 8}, GREEDY, RANDOM | {"seed": 9, "repetition_penalty": 1.2})
    ]
    asked = [Prompt(prompts()[index].token_ids, sampling[index % 4]) for index in (4, 0, 1, 4, 2)]
    asked.append(Prompt(asked[0].token_ids, sampling[1], fork_of="r0"))
    schedule = Schedule(block_size=block_size, num_blocks=30 * 16 // block_size, chunk=40, prefix_caching=True)
    core = build_core(schedule, "bfloat16")
    plain = run(core, asked) + run(core, asked, prefix="again ")
    core = build_core(
        replace(schedule, proposer=ByWorker(), draft=demo_draft(), drafts_greedily=drafts_greedily), "bfloat16"
    )
    notes = Notes(core)

    def interfere(core: EngineCore, step: int) -> None:
        if step % 5 == 4 and core.scheduler.num_running:
            core.scheduler.preempt_last()

    assert run(core, asked, before_step=interfere) + run(core, asked, prefix="again ") == plain
    assert len(notes.proposals) > 40
    assert not notes.failures
    for proposal in notes.proposals:
        prompt = asked[int(proposal.request_id[-1])]
        twin = msgspec.structs.replace(prompt.params, temperature=0.0) if drafts_greedily else prompt.params
        assert proposal.drafts == drafted_plainly(proposal, len(prompt.token_ids), twin)


def test_nothing_is_computed_twice_or_for_nobody() -> None:
    """The draft model computes a prompt when it drafts first; a prefix that it has computed is there for others."""
    proposer = ByWorker(most=0)
    core = build_core(Schedule(prefix_caching=True, proposer=proposer, draft=demo_draft()), "bfloat16")
    notes = Notes(core)
    prompt = max(prompts(), key=lambda prompt: len(prompt.token_ids))
    long = Prompt(prompt.token_ids * 3, SamplingParams(temperature=0.0, max_tokens=20))
    run(core, [long], prefix="without")
    assert not notes.pass_tokens
    proposer.most = 3
    run(core, [long], prefix="first")
    num_tokens = len(long.token_ids)
    assert notes.pass_tokens[0] == num_tokens + 1
    assert max(notes.pass_tokens[1:]) <= 2, "of what holds, only the last draft is computed again"
    notes.pass_tokens.clear()
    run(core, [long], prefix="second")
    assert notes.pass_tokens[0] <= num_tokens % 16 + 16 + 1, "the blocks of the prefix are computed again"


@pytest.mark.skipif(not cpu.available(), reason="the reference has no kernel calls")
def test_the_first_token_waits_for_no_draft_model() -> None:
    """A prompt costs the kernel calls that it costs without drafts, also behind drafts of others."""
    prompt = Prompt((7,) * 2 * MAX_RECORDED_TOKENS, SamplingParams(temperature=0.0, max_tokens=1))

    def calls_of(schedule: Schedule) -> list[type]:
        core = build_core(schedule, "bfloat16")
        answers(core, ["greedy"])
        with cpu.recorded_calls() as calls:
            run(core, [prompt])
        return [type(call.__self__) for call in calls]

    plain = calls_of(Schedule())
    assert len(plain) > 20
    assert calls_of(Schedule(proposer=ByWorker(), draft=demo_draft())) == plain


def test_a_long_prompt_is_read_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads as many tokens as one of the target has. Places of drafts that were not made do not count."""
    core = build_core(Schedule(chunk=16, proposer=ByWorker(most=2), draft=demo_draft()), "bfloat16")
    notes, results, tokens_of_calls = Notes(core), [], []
    monkeypatch.setattr(core.executor, "submit", noting(core.executor.submit, results))
    draft, num_draft_tokens = notes.drafter.draft, 0

    def noted(rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        num_before = len(notes.pass_tokens)
        drafted = draft(rows, counts)
        tokens_of_calls.append(sum(notes.pass_tokens[num_before:]))
        return drafted

    def count(step: int) -> None:
        nonlocal num_draft_tokens
        num_draft_tokens += core.last_record.num_draft_tokens if core.last_record is not None else 0

    monkeypatch.setattr(notes.drafter, "draft", noted)
    assert answers(core, ["random", "flat"], count) == {name: expected(name) for name in ("random", "flat")}
    assert 16 <= max(tokens_of_calls) <= 16 + 2, "a second draft of two rows is computed too"
    assert sum(len(result.unread) for result in results) > 2
    assert num_draft_tokens in range(1, sum(len(proposal.drafts) for proposal in notes.proposals) + 1)
    for proposal in notes.proposals:
        sampling = params()[proposal.request_id]
        assert proposal.drafts == drafted_plainly(proposal, len(prompts()[4].token_ids), sampling)


@pytest.mark.parametrize("what", ["raises", "nan"])
def test_a_drafter_that_fails_fails_nothing_else(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = demo_draft()
    compute_logits, calls = model.compute_logits, []

    def failing(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        logits_RV = compute_logits(hidden_RD, adapter_slots_R)
        calls.append(len(hidden_RD))
        if len(calls) % 3 == 0:
            if what == "raises":
                raise ValueError("no drafts today")
            logits_RV[-1, 5:7] = torch.nan
        return logits_RV

    monkeypatch.setattr(model, "compute_logits", failing)
    core = build_core(Schedule(proposer=ByWorker(), draft=demo_draft()), "bfloat16")
    results = []
    monkeypatch.setattr(core.executor, "submit", noting(core.executor.submit, results))
    names = ["greedy", "random", "penalties"]
    assert answers(core, names) == {name: expected(name) for name in names}
    why = {failure for result in results for failure in result.draft_failures.values()}
    errors = [result.draft_error for result in results]
    if what == "raises":
        assert not why
        assert set(errors) == {"", "The drafter failed (ValueError)"}
        assert errors.count("") - errors.index("The drafter failed (ValueError)") > 3, "nothing was drafted again"
    else:
        assert why == {"The drafter's logits are not numbers (NaN) or infinite, or no token is left to draft"}
        assert not any(errors)
    assert all(result.draft_seconds > 0 for result in results if result.draft_failures or result.draft_error)


@pytest.mark.parametrize("token_id", [-1, -(2**40), VOCAB_SIZE, 2**70])
def test_illegal_tokens_of_a_drafter_end_the_drafts_of_their_request(
    token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = build_core(Schedule(proposer=ByWorker(), draft=demo_draft()), "bfloat16")
    notes, results, names = Notes(core), [], ["greedy", "random", "penalties"]
    monkeypatch.setattr(core.executor, "submit", noting(core.executor.submit, results))
    draft, num_calls = notes.drafter.draft, 0

    def illegal(rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        nonlocal num_calls
        drafted, num_calls = draft(rows, counts), num_calls + 1
        if num_calls == 3:
            drafted.token_ids[0][-1] = token_id
        return drafted

    monkeypatch.setattr(notes.drafter, "draft", illegal)
    assert answers(core, names) == {name: expected(name) for name in names}
    (why,) = [why for result in results for why in result.draft_failures.values()]
    assert f"{token_id}" in why
    assert "and the model has 4096 tokens" in why
    assert num_calls > 6, "others draft on"


def noting(submit: Any, results: list[Any]) -> Any:
    """submit, whose results are kept."""

    def noted(batch: Any) -> Any:
        pending = submit(batch)
        results.append(pending.step_result)
        return pending

    return noted


@pytest.mark.parametrize("width", [4094, 4200])
def test_padding_of_the_vocabularies_may_differ(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that only the draft model has are never drafted; a token that it lacks stops the drafts of a request."""
    config, model = demo_draft()
    compute_logits = model.compute_logits

    def other_width(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        logits_RV = compute_logits(hidden_RD, adapter_slots_R)
        more = torch.full((len(hidden_RD), max(width - VOCAB_SIZE, 0)), 100.0)
        return torch.cat([logits_RV[:, :width], more], dim=1)

    monkeypatch.setattr(model, "compute_logits", other_width)
    monkeypatch.setattr(model, "config", replace(config, vocab_size=width))
    core = build_core(Schedule(proposer=ByWorker(), draft=demo_draft()), "bfloat16")
    notes = Notes(core)
    unknown = Prompt((5, 4095, 9), SamplingParams(temperature=0.0, min_tokens=3, max_tokens=3))
    (tokens,) = run(build_core(Schedule(), "bfloat16"), [unknown])
    assert run(core, [unknown]) == [tokens]
    assert answers(core, ["random"])["random"] == expected("random")
    assert all(draft < min(width, VOCAB_SIZE) for proposal in notes.proposals for draft in proposal.drafts)
    assert notes.failures == (
        {"r0": "The draft model has 4094 tokens, and 4095 is not one of them"} if width < VOCAB_SIZE else {}
    )


def test_beyond_the_context_of_the_draft_model_nothing_is_drafted() -> None:
    config, model = demo_draft()
    length = len(prompts()[4].token_ids)
    draft = replace(config, max_model_len=length + 9), model
    core = build_core(Schedule(proposer=ByWorker(most=3), draft=draft), "bfloat16")
    notes = Notes(core)
    assert answers(core, ["flat"])["flat"] == expected("flat")
    assert not notes.failures
    lengths = [len(proposal.token_ids) for proposal in notes.proposals]
    assert len(set(lengths)) > 2
    assert max(len(proposal.token_ids) + len(proposal.drafts) - 1 for proposal in notes.proposals) <= length + 9
    assert max(lengths) < length + len(expected("flat")[0]) - 4, "the last tokens came without"
