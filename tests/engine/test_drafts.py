"""Drafts on the demo model: any sampling, logprobs and schedule gives the same as without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.core import EngineCore
from quire.forward_batch import ForwardBatch
from quire.kernels import cpu
from quire.messages import AddRequest, SetLimits
from quire.models.decoder import Decoder
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.schedule import MAX_RECORDED_TOKENS, ScheduledBatch
from quire.worker.model_runner import ModelRunner, PendingStep
from quire.worker.recorded_steps import RecordedSteps
from tests.covering import in_turn
from tests.engine.harness import EOS, Schedule, build_core, demo_model, run
from tests.engine.test_sameness import PRECISIONS, prompts
from tests.examples import IS_FULL, examples
from tests.guesser import Guesser
from tests.worker.fake_accelerator import FakeAccelerator

MOST = 24  # tokens of an output
VOCAB_SIZE = 4096
GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 1.5, "top_p": 0.95, "seed": 7}


KINDS = (
    "greedy",
    "random",
    "flat",
    "penalties",
    "greedy penalties",
    "min tokens",
    "stop",
    "bad words",
    "bias",
    "allowed",
    "logprobs",
    "logprobs of tokens",
    "sibling",
)


@cache
def params() -> dict[str, SamplingParams]:
    """Every kind of sampling whose tokens depend on earlier ones, so that uncounted drafts would show."""
    (plain,) = run(build_core(Schedule(), "bfloat16"), [prompts()[4]])
    common = max(set(plain), key=plain.count)
    kinds = {
        "greedy": GREEDY,
        "random": RANDOM,
        "flat": {"temperature": 2.0, "top_k": 500, "min_p": 0.001, "seed": 3},
        "penalties": RANDOM | {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        "greedy penalties": GREEDY | {"repetition_penalty": 1.3},
        "min tokens": GREEDY | {"min_tokens": 20, "stop_token_ids": plain[5:9]},
        "stop": GREEDY | {"stop_token_ids": [plain[13]]},
        "bad words": GREEDY | {"bad_words_token_ids": [plain[3:5], plain[8:11], [plain[12]]]},
        "bias": RANDOM | {"logit_bias": {common: 4.0}, "frequency_penalty": 1.0},
        "allowed": {"temperature": 2.0, "seed": 5, "allowed_token_ids": sorted(set(plain)), "presence_penalty": 2.0},
        "logprobs": RANDOM | {"logprobs": 3, "prompt_logprobs": 2, "repetition_penalty": 1.2},
        "logprobs of tokens": RANDOM | {"logprob_token_ids": [common, 7]},
        "sibling": RANDOM | {"seed": 8},
    }
    return {name: SamplingParams(max_tokens=MOST, **fields) for name, fields in kinds.items()}


Answer = tuple[list[int], list[Any], Any, str | None]  # tokens, logprobs, logprobs of the prompt, why it ended


def answers(core: EngineCore, names: list[str], before_step: Any = lambda step: None) -> dict[str, Answer]:
    """The results of the requests with these names, all at once; the sibling is a fork of "random" (n > 1)."""
    found: dict[str, Answer] = {}
    token_ids = prompts()[4].token_ids
    for name in names:
        stop = [EOS, *(params()[name].stop_token_ids or [])]
        parent = "random" if name == "sibling" else None
        core.add(AddRequest(name, list(token_ids), params()[name], MOST, stop_token_ids=stop, fork_of=parent))
        found[name] = ([], [], None, None)
    step = 0
    while core.has_work():
        before_step(step)
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens, logprobs, of_prompt, _ = found[delta.request_id]
            tokens += delta.token_ids
            logprobs += delta.logprobs or []
            found[delta.request_id] = (tokens, logprobs, of_prompt or delta.prompt_logprobs, delta.finish_reason)
        step += 1
    core.scheduler.kv.check()
    core.shutdown()
    return found


@cache
def expected(name: str) -> Answer:
    """Of the request alone, without drafts."""
    return answers(build_core(Schedule(), "bfloat16"), [name])[name]


def guesser(right: float, **options: Any) -> Guesser:
    found = Guesser(right, vocab_size=VOCAB_SIZE, **options)
    found.continuation_of = lambda name: expected(name)[0]
    return found


def test_the_kinds_of_sampling_differ() -> None:
    assert tuple(params()) == KINDS
    outputs = {name: tuple(expected(name)[0]) for name in KINDS}
    assert len(set(outputs.values())) >= 7, f"too many kinds say the same: {outputs}"
    assert len(outputs["min tokens"]) >= 20
    assert expected("stop")[3] == "stop"


@pytest.mark.parametrize(
    ("name", "right"), [*((name, 0.7) for name in KINDS), *in_turn([[(name,)] for name in KINDS], [0.0, 1.0])]
)
def test_every_kind_of_sampling(name: str, right: float) -> None:
    """With drafts that are sometimes right, and with drafts that always are or never."""
    proposer = guesser(right)
    assert answers(build_core(Schedule(proposer=proposer), "bfloat16"), [name])[name] == expected(name)
    assert proposer.num_right + proposer.num_wrong > 5


@dataclass(frozen=True)
class Interfered:
    """Requests under some schedule, with limits that move and preemptions."""

    names: list[str]
    schedule: Schedule
    preempt_every: int

    def check(self, **drafting: Any) -> None:
        """They get the same as alone and without drafts.

        Args:
            drafting: fields of Schedule.
        """
        core = build_core(replace(self.schedule, **drafting), "bfloat16")
        chunk = self.schedule.chunk

        def interfere(step: int) -> None:
            if step < 60 and step % self.preempt_every == self.preempt_every - 1 and core.scheduler.num_running:
                core.scheduler.preempt_last()
            # A request that a step has no token for knows its newest one: with two in flight it gets drafts then.
            core.set_limits(SetLimits(max_num_batched_tokens=1 if step % 8 < 4 else chunk))

        assert answers(core, self.names, interfere) == {name: expected(name) for name in self.names}


@st.composite
def interfered(draw: st.DrawFn) -> Interfered:
    block_size, is_on_a_device = draw(st.sampled_from([8, 16])), draw(st.booleans())
    schedule = Schedule(
        chunk=draw(st.sampled_from([7, 12, 16, 40, 2048])),
        block_size=block_size,
        num_blocks=draw(st.sampled_from([12, 24, 256])) * 16 // block_size,
        depth=draw(st.integers(1, 2)),
        prefix_caching=draw(st.booleans()),
        max_num_seqs=12,
        accelerator=FakeAccelerator() if is_on_a_device else None,
        graph_sizes=(4, 12) if is_on_a_device else (),
        mixed_sizes=(8, 16) if is_on_a_device else (),
    )
    names = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6, unique=True))
    return Interfered(names, schedule, draw(st.sampled_from([3, 7, 1000])))


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(case=interfered(), right=st.floats(0.3, 1.0), longest=st.integers(1, 9), seed=st.integers(0, 1000))
def test_any_schedule(case: Interfered, right: float, longest: int, seed: int) -> None:
    case.check(proposer=guesser(right, longest=longest, seed=seed))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_logits_of_a_verifying_step_are_those_of_single_steps(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a bit: with right drafts the rows of logits, one behind the other, are the rows of a run without drafts."""
    _, model = demo_model(precision, None, IS_FULL)
    compute_logits, seen = model.compute_logits, []

    def noted(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        logits_RV = compute_logits(hidden_RD, adapter_slots_R)
        seen.append(logits_RV.clone())
        return logits_RV

    monkeypatch.setattr(model, "compute_logits", noted)
    prompt = prompts()[0]
    (tokens,) = run(build_core(Schedule(), precision), [prompt])
    single_RV, num_steps = torch.cat(seen), len(seen)
    seen.clear()
    proposer = Guesser(1.0, longest=7)
    proposer.continuation_of = lambda request_id: tokens
    assert run(build_core(Schedule(proposer=proposer), precision), [prompt]) == [tokens]
    assert len(seen) < num_steps / 2, "hardly any drafts"
    verified_RV = torch.cat(seen)[:num_steps]  # the rows after a stop belong to drafts that are dropped
    assert torch.equal(verified_RV, single_RV)


@pytest.mark.parametrize("depth", [1, 2])
def test_logits_behind_a_wrong_draft_may_be_anything(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not numbers: no token reads them, so the request goes on, and nothing is reported."""
    _, model = demo_model("bfloat16", None, IS_FULL)
    compute_logits, num_behind = model.compute_logits, 0

    def spoilt(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        nonlocal num_behind
        logits_RV = compute_logits(hidden_RD, adapter_slots_R)
        num_behind += len(logits_RV) - 1
        logits_RV[1:] = torch.nan  # one request: its rows after the first follow a draft, and every draft is wrong
        return logits_RV

    wanted = {name: expected(name) for name in ("greedy", "random", "logprobs of tokens")}
    monkeypatch.setattr(model, "compute_logits", spoilt)
    for name, answer in wanted.items():
        core = build_core(Schedule(proposer=guesser(0.0, longest=4), depth=depth, waits=True), "bfloat16")
        assert answers(core, [name]) == {name: answer}
    assert num_behind > 50


def steps_of(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.Tensor], list[int], list[int], list[int]]:
    """Of requests with drafts: the logits of every step, the tokens of every step, and the tokens of steps not
    repeated and of steps that were captured.
    """
    requests = [(name, params()[name], expected(name)) for name in ("greedy", "random", "flat")]
    runner = core.executor
    assert isinstance(runner, ModelRunner)
    model = runner.model
    assert isinstance(model, Decoder)
    compute_logits, run_blocks, submit = model.compute_logits, model.run_blocks, runner.submit
    logits: list[torch.Tensor] = []
    sizes: list[int] = []
    anew: list[int] = []
    captured: list[int] = []

    def submitted(batch: ScheduledBatch) -> PendingStep:
        sizes.append(batch.num_tokens)
        return submit(batch)

    def noted(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        logits.append(compute_logits(hidden_RD, adapter_slots_R).clone())
        return logits[-1]

    def run_anew(residual_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        anew.append(sizes[-1])
        return run_blocks(residual_TD, batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "submit", submitted)
        patch.setattr(model, "compute_logits", noted)
        patch.setattr(model, "run_blocks", run_anew)
        for name, sampling, _ in requests:
            core.add(AddRequest(name, list(prompts()[4].token_ids), sampling, MOST, stop_token_ids=[EOS]))
        while core.has_work():
            core.step()
            assert core.last_record is not None
            if core.last_record.has_captured:
                captured.append(sizes[-1])
    return logits, sizes, anew, captured


@pytest.mark.skipif(not cpu.available(), reason="only compiled kernels are recorded")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_verifying_steps_are_repeated_from_recordings(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows the tokens belong to: a number of tokens is run once; to the bits of steps that are all run."""
    found = []
    for is_recorded in (True, False):
        if not is_recorded:
            monkeypatch.setattr(RecordedSteps, "size_for", lambda self, step: None)
        found.append(steps_of(build_core(Schedule(proposer=guesser(0.7, longest=12)), precision), monkeypatch))
    (repeated, sizes, anew, captured), (run_logits, run_sizes, all_run, none_captured) = found
    short = [size for size in sizes if size <= MAX_RECORDED_TOKENS]
    assert sizes == run_sizes == all_run
    assert max(short) > 3, "nothing was verified"
    assert sorted(anew) == sorted([*set(short), *(size for size in sizes if size > MAX_RECORDED_TOKENS)])
    assert len(short) > len(set(short)), "nothing was repeated"
    assert (sorted(captured), none_captured) == (sorted(set(short)), [])
    assert all(torch.equal(a, b) for a, b in zip(repeated, run_logits, strict=True))


def test_verifying_steps_are_graphs_that_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    sizes = {"max_num_seqs": 12, "graph_sizes": (4,), "mixed_sizes": (8, 16, 40)}
    proposer = guesser(0.7, longest=12)
    core = build_core(Schedule(accelerator=accelerator, proposer=proposer, **sizes), "bfloat16")
    _, steps, _, captured = steps_of(core, monkeypatch)
    assert not captured, "graphs are captured before the first step"
    assert max(steps) > 3, "nothing was verified"
    assert sum(graph.num_replays for graph in accelerator.graphs) == sum(size <= 40 for size in steps)


class Faulty(Guesser):
    """Is always right, but makes one fault for the request `random` after some drafts."""

    def __init__(self, fault: Callable[[list[int]], list[int]]) -> None:
        super().__init__(1.0, vocab_size=VOCAB_SIZE)
        self.continuation_of = lambda name: expected(name)[0]
        self.fault, self.num_asked = fault, 0

    def propose(self, request: Request, most: int) -> list[int]:
        drafts = super().propose(request, most)
        if request.request_id != "random":
            return drafts
        self.num_asked += 1
        return self.fault(drafts) if self.num_asked == 3 else drafts


def refuse(drafts: list[int]) -> list[int]:
    raise ValueError("no drafts today")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda drafts: [-1], "The drafter chose [-1], and the model has 4096 tokens"),
        (lambda drafts: [5, -(2**40)], "The drafter chose [5, -1099511627776], and"),
        (lambda drafts: [VOCAB_SIZE], "The drafter chose [4096], and"),
        (lambda drafts: [2**70, 5], "The drafter chose [1180591620717411303424, 5], and"),
        (refuse, "The drafter failed (ValueError)"),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_fault_of_a_drafter_ends_the_drafts_of_one_request(
    depth: int, fault: Callable[[list[int]], list[int]], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody ends, no token changes, and the fault is counted."""
    proposer, names = Faulty(fault), ["greedy", "random", "penalties"]
    core, num_failures = build_core(Schedule(proposer=proposer, depth=depth, waits=True), "bfloat16"), 0

    def count(step: int) -> None:
        nonlocal num_failures
        num_failures += core.last_record.num_draft_failures if core.last_record is not None else 0

    assert answers(core, names, count) == {name: expected(name) for name in names}
    assert (num_failures, proposer.num_asked) == (1, 3)
    assert f"Request random goes on without drafts: {why}" in caplog.text
    assert ("in refuse" in caplog.text) == (fault is refuse), "the traceback of an error says where it came from"


def test_a_request_that_is_aborted_while_its_drafts_are_verified() -> None:
    """The others get their tokens, no block is lost, and the next request with this id gets its own tokens."""
    proposer = guesser(1.0, longest=4)
    core = build_core(Schedule(proposer=proposer, depth=2, waits=True), "bfloat16")
    submit, batches, num_aborted = core.executor.submit, list[ScheduledBatch](), 0
    tokens: dict[str, list[int]] = {name: [] for name in ("greedy", "random", "flat")}

    def noted(batch: ScheduledBatch) -> Any:
        batches.append(batch)
        return submit(batch)

    def add(name: str) -> None:
        core.add(AddRequest(name, list(prompts()[4].token_ids), params()[name], MOST, stop_token_ids=[EOS]))

    core.executor.submit = noted  # type: ignore[method-assign]
    for name in tokens:
        add(name)
    while core.has_work():
        for delta in core.step():
            tokens[delta.request_id] += delta.token_ids
        drafts = dict(zip(batches[-1].request_ids, batches[-1].draft_token_ids, strict=True))
        if core._in_flight and drafts.get("flat") and num_aborted < 3:
            num_aborted += 1
            core.abort(["flat"])
            tokens["flat"].clear()
            add("flat")
    assert num_aborted > 0
    assert tokens == {name: expected(name)[0] for name in tokens}
    assert proposer.forgotten.count("flat") == num_aborted + 1
    core.scheduler.kv.check()
    core.shutdown()
