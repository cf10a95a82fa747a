"""Heads that draft from hidden states of the demo model: no token changes, and their drafts equal a twin's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer

from quire import demo
from quire.demo.data import render
from quire.demo.train_head import HEAD_DIM, STREAMS
from quire.engine.core import EngineCore
from quire.forward_batch import ForwardBatch
from quire.models.head import Head
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.schedule import StepResult
from quire.scheduler.adaptive_depth import DrafterTime
from quire.scheduler.speculation import MOST_ERRORS
from quire.settings import LEAST_KEPT
from quire.spec_decode.by_worker import DraftedByWorker
from quire.worker.drafter import Drafted
from quire.worker.head_drafter import HeadDrafter
from quire.worker.input_batch import StepRows
from quire.worker.model_runner import ModelRunner
from tests.engine import heads
from tests.engine.harness import MOST_DRAFTS, Prompt, Schedule, core_over, run
from tests.engine.heads import EAGLE3, SPECULATORS, Pair, Twin, eagle3_tensors, mtp_tensors
from tests.engine.test_draft_model import ByWorker, noting
from tests.engine.test_drafts import GREEDY, RANDOM
from tests.engine.test_sameness import prompts
from tests.worker.fake_accelerator import FakeAccelerator

KINDS = ("eagle3", "speculators", "mtp", "bundled")


@cache
def pair_of(kind: str, dtype: torch.dtype = torch.float32) -> Pair:
    if kind == "bundled":
        return heads.load(demo.path("eagle3"), "eagle3", dtype=dtype)
    with TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "mtp":
            heads.write_mimo(folder)
            return heads.load(folder, "mtp", target=folder, dtype=dtype)
        if kind == "speculators":
            heads.write(folder, SPECULATORS, eagle3_tensors(prefix="layers.0.", is_whole=True))
        else:
            heads.write(folder, EAGLE3, eagle3_tensors())
        return heads.load(folder, "eagle3", dtype=dtype)


@cache
def twin_of(kind: str) -> Twin:
    if kind == "mtp":
        return Twin(mtp_tensors())
    if kind == "bundled":
        tensors = safetensors.torch.load_file(demo.path("eagle3") / "model.safetensors")
        return Twin(tensors, layers=STREAMS, head_dim=HEAD_DIM)
    is_whole = kind == "speculators"
    return Twin(eagle3_tensors(is_whole=is_whole), norm_before_residual=is_whole)


def core_with(pair: Pair, schedule: Schedule, precision: str = "float32") -> EngineCore:
    return core_over(pair.config, pair.model, schedule, precision)


@dataclass(frozen=True)
class Proposal:
    """What was drafted behind the tokens of a row."""

    token_ids: tuple[int, ...]
    drafts: tuple[int, ...]


class Notes:
    """What a core's head drafts."""

    def __init__(self, core: EngineCore) -> None:
        self.proposals: list[Proposal] = []
        self.failures: list[str] = []
        self.num_drafts = self.num_held = 0
        runner = core.executor
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner.drafting.drafter, HeadDrafter)
        self.drafter, inputs = runner.drafting.drafter, runner.input_batch
        draft = self.drafter.draft

        def noted(rows: Sequence[int], counts: Sequence[int]) -> Drafted:
            before = [tuple(inputs.token_ids[row, : inputs.num_tokens[row]].tolist()) for row in rows]
            drafted = draft(rows, counts)
            self.failures += drafted.failures.values()
            assert [len(drafts) for drafts in drafted.token_ids] == list(counts)
            for index, token_ids in enumerate(before):
                if index not in drafted.unread:
                    self.proposals.append(Proposal(token_ids, tuple(drafted.token_ids[index])))
            return drafted

        self.drafter.draft = noted  # type: ignore[method-assign]

    def count(self, core: EngineCore, step: int) -> None:
        """Before a step: the fate of the drafts of the last one."""
        if core.last_record is not None:
            self.num_drafts += core.last_record.num_draft_tokens
            self.num_held += core.last_record.num_accepted_tokens


def asked() -> list[Prompt]:
    kinds = (GREEDY, RANDOM, RANDOM | {"seed": 8}, GREEDY)
    sampling = [SamplingParams(max_tokens=20, **fields) for fields in kinds]
    return [Prompt(prompts()[index].token_ids, sampling[at]) for at, index in enumerate((4, 0, 1, 2))]


@cache
def plain(kind: str) -> list[list[int]]:
    return run(core_with(pair_of(kind), Schedule()), asked())


SCHEDULES = {
    "plain": Schedule(),
    "pieces": Schedule(chunk=16, block_size=8, num_blocks=40),
    "more kept": Schedule(chunk=24, num_kept=max(MOST_DRAFTS + 2, LEAST_KEPT)),
    "small pieces": Schedule(chunk=5, num_blocks=30),
    "graphs": Schedule(accelerator=FakeAccelerator(), graph_sizes=(1, 2, 4, 8), mixed_sizes=(8, 16)),
    "two in flight": Schedule(accelerator=FakeAccelerator(), chunk=24, depth=2, waits=True),
}
# Heads of the first and the third kind share no code of their own, so both meet every schedule.
QUICK = {
    "eagle3": [*SCHEDULES],
    "speculators": ["pieces", "two in flight"],
    "mtp": [*SCHEDULES],
    "bundled": ["small pieces", "graphs"],
}


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, marks=() if schedule in QUICK[kind] else pytest.mark.slow)
        for kind in KINDS
        for schedule in SCHEDULES
    ],
)
def test_drafts_are_those_of_the_twin(kind: str, schedule: str) -> None:
    """Drafts of random depth, none for some steps, rows preempted and resumed; and no token changes."""
    drafting = replace(
        SCHEDULES[schedule], proposer=ByWorker(most=9, seed=3), draft=pair_of(kind).draft, drafts_greedily=True
    )
    core = core_with(pair_of(kind), drafting)
    notes = Notes(core)

    def interfere(core: EngineCore, step: int) -> None:
        notes.count(core, step)
        if step in (9, 16):
            core.scheduler.preempt_last()

    assert run(core, asked(), before_step=interfere) == plain(kind)
    assert not notes.failures
    assert len(notes.proposals) > 20
    assert len({draft for proposal in notes.proposals for draft in proposal.drafts}) > 30
    assert kind != "bundled" or notes.num_held > 20
    for prompt, tokens in zip(asked(), plain(kind), strict=True):
        heads.streams((*prompt.token_ids, *tokens))
    for number, proposal in enumerate(notes.proposals):
        count = len(proposal.drafts) if number % 8 == 0 else 1
        assert proposal.drafts[:count] == twin_of(kind).drafts(proposal.token_ids, count)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_is_only_read_needs_no_queries(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody drafts."""
    pair = pair_of(kind)
    head = pair.draft[1]
    assert isinstance(head, Head)
    queries, others = head._layers[-1][0]._mixer.reader.parts  # type: ignore[attr-defined]
    multiply, read = others._apply, list[int]()

    def count(layer: Any, x_TK: Any, *more: Any) -> Any:
        read.append(len(x_TK))
        return multiply(layer, x_TK, *more)

    def refuse(*given: Any) -> Any:
        raise AssertionError("queries that nobody asks for")

    monkeypatch.setattr(queries, "_apply", refuse)
    monkeypatch.setattr(others, "_apply", count)
    core = core_with(pair, Schedule(proposer=ByWorker(most=0), draft=pair.draft, num_kept=LEAST_KEPT))
    notes = Notes(core)
    assert run(core, asked(), before_step=notes.count) == plain(kind)
    assert not notes.num_drafts
    assert sum(read) > 100


class Seldom(DraftedByWorker):
    """One draft, and then none for some steps."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        num_tokens = len(request.output_token_ids)
        return super().propose(request, min(most, int(num_tokens % 6 == 5)))


class NotedTime(DrafterTime):
    """It notes what it learns."""

    def __init__(self) -> None:
        super().__init__(1e-3)
        self.observed: list[float] = []

    def observe(self, seconds: float, depths: Sequence[int]) -> None:
        self.observed.append(seconds)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_waits_is_no_cost_of_a_trial(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of drafts computes one position of each row, and its time is without that of reading."""
    pair, pause = pair_of(kind), 0.02
    core = core_with(pair, Schedule(proposer=Seldom(), draft=pair.draft))
    notes, results, observed = Notes(core), list[StepResult](), NotedTime()
    forward_pass, head = notes.drafter.forward_pass, pair.draft[1]
    assert isinstance(head, Head)
    stage, read, lens = forward_pass.stage, head.read, list[int]()

    def note(step: StepRows, *more: Any) -> Any:
        lens.extend(step.lens_S.tolist())
        return stage(step, *more)

    def read_slowly(batch: ForwardBatch) -> None:
        time.sleep(pause)
        read(batch)

    monkeypatch.setattr(forward_pass, "stage", note)
    monkeypatch.setattr(head, "read", read_slowly)
    monkeypatch.setattr(core.executor, "submit", noting(core.executor.submit, results))
    core.scheduler.speculation.drafter_time = observed
    assert run(core, asked(), before_step=notes.count) == plain(kind)
    assert len(notes.proposals) == len(lens) > 8
    assert set(lens) == {1}
    tried = [result for result in results if result.draft_seconds]
    assert all(pause <= result.draft_read_seconds < result.draft_seconds for result in tried)
    assert observed.observed == [result.draft_seconds - result.draft_read_seconds for result in tried]


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hits_forks_and_every_kind_of_sampling(kind: str) -> None:
    """Positions that the head lacks in a shared page cost only drafts. Blocks of 8 tokens: prompts end at their borders
    too.
    """
    fields: tuple[dict[str, Any], ...] = (
        RANDOM | {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
        GREEDY | {"min_tokens": 12, "bad_words_token_ids": [[300]]},
        {"temperature": 2.0, "top_k": 500, "min_p": 0.001, "seed": 3},
        RANDOM | {"logprobs": 3},
    )
    prompt = prompts()[4].token_ids
    several = [
        Prompt(prompt[:-index] or prompt, SamplingParams(max_tokens=16, **each)) for index, each in enumerate(fields)
    ]
    several += [Prompt(prompt, SamplingParams(max_tokens=16, **RANDOM), fork_of="r0")]
    schedule = Schedule(block_size=8, num_blocks=60, chunk=40, prefix_caching=True)
    core = core_with(pair_of(kind, torch.bfloat16), schedule, "bfloat16")
    expected = [run(core, several), run(core, several, prefix="again ")]
    draft = pair_of(kind, torch.bfloat16).draft
    core = core_with(pair_of(kind, torch.bfloat16), replace(schedule, proposer=ByWorker(), draft=draft), "bfloat16")
    notes = Notes(core)
    assert [run(core, several), run(core, several, prefix="again ")] == expected
    assert not notes.failures
    assert len(notes.proposals) > 30


ASKED_ABOUT = ("os.path.join", "math.gcd", "json.dumps", "heapq.heappush", "shutil.copytree", "itertools.chain")


@pytest.mark.parametrize("is_greedy", [True, False])
def test_most_first_drafts_of_the_bundled_head_hold(is_greedy: bool) -> None:
    """In greedy answers, and in answers at temperature 1."""
    pair, tokenizer = pair_of("bundled", torch.bfloat16), Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    sampling = SamplingParams(temperature=0.0 if is_greedy else 1.0, seed=5, max_tokens=60)
    texts = [render([("user", f"What does {name} do?")]) + "<|im_start|>assistant\n" for name in ASKED_ABOUT]
    asked = [Prompt(tuple(tokenizer.encode(text).ids), sampling) for text in texts]
    schedule = Schedule(proposer=ByWorker(most=1), draft=pair.draft)
    core = core_with(pair, schedule, "bfloat16")
    notes = Notes(core)
    run(core, asked, before_step=notes.count)
    assert notes.num_drafts > 60
    assert notes.num_held >= 0.8 * notes.num_drafts


def test_hidden_states_that_are_not_numbers_stop_the_drafts_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("eagle3")
    core = core_with(pair, Schedule(proposer=ByWorker(), draft=pair.draft))
    notes = Notes(core)
    drafter = notes.drafter
    learn, num_steps = drafter.learn, 0

    def learn_nan(step: StepRows) -> None:
        nonlocal num_steps
        num_steps += 1
        learn(step)
        if num_steps == 4:
            drafter._kept_CWX[int(step.rows_S[0])] = torch.nan

    monkeypatch.setattr(drafter, "learn", learn_nan)
    assert run(core, asked()) == plain("eagle3")
    assert len(notes.failures) == 1
    assert "not numbers (NaN)" in notes.failures[0]


def test_a_head_that_cannot_learn_ends_drafts_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of("eagle3")
    core = core_with(pair, Schedule(proposer=ByWorker(), draft=pair.draft))
    notes, num_steps = Notes(core), 0

    def fail(step: StepRows) -> None:
        nonlocal num_steps
        num_steps += 1
        raise ValueError("no memory of it")

    monkeypatch.setattr(notes.drafter, "learn", fail)
    counts = []

    def note(core: EngineCore, step: int) -> None:
        counts.append(0 if core.last_record is None else core.last_record.num_draft_failures)

    assert run(core, asked(), before_step=note) == plain("eagle3")
    assert len(asked()) <= sum(counts) <= (1 + MOST_ERRORS) * len(asked())
    assert not notes.proposals
