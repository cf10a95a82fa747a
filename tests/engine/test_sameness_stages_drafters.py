"""Drafters that are models, in the last of several stages: tokens and logprobs are those of one process, to the bit.

Ranks are threads here; test_nodes.py and test_external.py have processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire import demo
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.errors import EngineDeadError
from quire.kernels import cpu
from quire.life_cycle import WorkerSettings
from quire.messages import SetLimits
from quire.model_config import load_model_config
from quire.planning.memory_plan import KvPages, planned_weight_bytes
from quire.schedule import ScheduledBatch
from quire.worker.drafter import Drafted
from quire.worker.input_batch import InputBatch, StepRows
from quire.worker.worker import DeviceWorker
from tests.engine import heads
from tests.engine.harness import run
from tests.engine.ranks import fail_at, started
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import answers
from tests.engine.test_sameness_ranks_drafters import drafted, of_one, speculation

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

NUM_LAYERS = load_model_config(demo.path("target")).num_layers
NUM_ANSWERS = len(brief())

Drafts = dict[tuple[int, ...], list[int]]


def last_stage(engine: StartedEngine) -> list[DeviceWorker]:
    workers = engine.executor.workers  # type: ignore[attr-defined]
    return [worker for worker in workers if worker.model.config.has_output]


def engine_with(method: str, folder: Path | None = None, *, width: int = 1, num_stages: int = 1, **more: Any) -> Any:
    """An engine with a drafter of the bundled ones, or with the layer for multi-token prediction in `folder`."""
    bundled = {"draft_model": "draft", "eagle3": "eagle3"}
    drafter = demo.path(bundled[method]) if method in bundled else folder
    arguments = speculation(method, drafter if method in bundled else None)
    return started(width, folder, drafter_folder=drafter, num_stages=num_stages, **arguments | more)


def noting(engine: StartedEngine) -> Drafts:
    """The drafts after each sequence of tokens for which the drafter is asked from now on."""
    drafting, found = last_stage(engine)[0].runner.drafting, Drafts()
    inputs, draft = drafting._inputs, drafting.drafter.draft

    def note(rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        before = [tuple(inputs.token_ids[row, : inputs.num_tokens[row]].tolist()) for row in rows]
        drafts = draft(rows, counts)
        unread = drafts.unread
        found.update(
            {key: ids for at, (key, ids) in enumerate(zip(before, drafts.token_ids, strict=True)) if at not in unread}
        )
        return drafts

    drafting.drafter.draft = note
    return found


@cache
def drafts_of_one(method: str, folder: Path | None) -> tuple[list[list[int]], Drafts]:
    engine = engine_with(method, folder)
    drafts = noting(engine)
    return run(engine.core, brief()), drafts


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.write_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.mark.parametrize(
    ("method", "width", "partition"),
    [
        ("draft_model", 1, "3,3"),
        ("draft_model", 2, "3,3"),
        ("eagle3", 1, "1,3,2"),
        ("eagle3", 2, "3,3"),
        ("mtp", 1, "2,2,2"),
        ("mtp", 2, "3,3"),
    ],
)
def test_drafts_and_tokens(
    method: str, width: int, partition: str, mimo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter drafts what it drafts beside the whole model, so what it reads of other stages has arrived."""
    num_stages, folder = partition.count(",") + 1, mimo if method == "mtp" else None
    wanted, of_whole = drafts_of_one(method, folder)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    engine = engine_with(method, folder, width=width, num_stages=num_stages)
    drafts = noting(engine)
    tokens, num_drafts, num_held = drafted(engine)
    engine.core.shutdown()
    assert tokens == wanted
    assert num_drafts > 20
    assert num_held > 10 or method == "mtp", "the layer of the tests is random"
    both = drafts.keys() & of_whole.keys()
    assert len(both) > 8
    length = {key: min(len(drafts[key]), len(of_whole[key])) for key in both}
    assert {key: drafts[key][: length[key]] for key in both} == {key: of_whole[key][: length[key]] for key in both}


@pytest.mark.parametrize(("method", "num_stages"), [("draft_model", 3), ("eagle3", 2)])
def test_logprobs_of_pieces(method: str, num_stages: int) -> None:
    """Pieces of prompts follow each other through the stages, and no row drafts meanwhile."""
    engine, one = (
        engine_with(method, num_stages=num_stages, max_num_batched_tokens=17),
        started(1, max_num_batched_tokens=17),
    )
    assert answers(engine.core) == answers(one.core)
    engine.core.shutdown()


class Knowing:
    """A Drafter that knows the answers to the brief prompts, and is right with a probability."""

    def __init__(self, inputs: InputBatch, right: float) -> None:
        self._inputs, self._right = inputs, right

    def follow(self, batch: ScheduledBatch) -> None: ...

    def learn(self, step: StepRows) -> None: ...

    def draft(self, rows: Sequence[int], counts: Sequence[int]) -> Drafted:
        return Drafted([self._of(row, count) for row, count in zip(rows, counts, strict=True)])

    def _of(self, row: int, count: int) -> list[int]:
        begin, end = int(self._inputs.num_prompt_tokens[row]), int(self._inputs.num_tokens[row])
        known, chance = tuple(self._inputs.token_ids[row, :end].tolist()), Random(end)
        (answer,) = (
            answer
            for prompt, answer in zip(brief(), of_one(), strict=True)
            if prompt.token_ids == known[:begin] and tuple(answer[: end - begin]) == known[begin:]
        )
        rest = [*answer[end - begin :], *[1] * count][:count]
        return [token if chance.random() < self._right else token + 1 for token in rest]


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(("width", "num_stages"), [(1, 2), (1, 3), (2, 2)])
def test_a_drafter_that_knows_the_answers(width: int, num_stages: int, right: float) -> None:
    engine = engine_with("draft_model", width=width, num_stages=num_stages)
    for worker in last_stage(engine):
        worker.runner.drafting.drafter = Knowing(worker.runner.input_batch, right)
    tokens, num_drafts, num_held = drafted(engine)
    engine.core.shutdown()
    assert tokens == of_one()
    assert num_drafts > 20
    assert 0 < num_held < num_drafts if right == 0.6 else (num_held > num_drafts // 2) == (right == 1.0)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_hits_and_preemption(method: str) -> None:
    engine, preempted, held, hits = engine_with(method, num_stages=2), list[int](), list[int](), list[int]()

    def preempt(core: EngineCore, step: int) -> None:
        while step in (5, 9) and core.scheduler.num_running:
            core.scheduler.preempt_last()
            preempted.append(step)

    def note(core: EngineCore, step: int) -> None:
        if core.last_record is not None:
            held.append(core.last_record.num_accepted_tokens)
            hits.append(core.last_record.prefix_cache_hits)

    assert run(engine.core, brief(), before_step=preempt) == of_one()
    assert run(engine.core, brief()[::-1], prefix="again", before_step=note) == of_one()[::-1]
    assert len(preempted) > 2
    assert sum(hits) > 0
    assert sum(held) > 10 or method == "mtp"
    engine.core.shutdown()


@pytest.mark.parametrize(("method", "num_stages"), [("draft_model", 2), ("eagle3", 3)])
def test_drafts_that_come_and_go(method: str, num_stages: int) -> None:
    """Without drafts, stages compute parts of the requests side by side; with drafts, all requests are in one step."""
    engine, steps = engine_with(method, num_stages=num_stages), list[tuple[int, bool]]()
    submit, held = engine.executor.submit, list[int]()

    def note(batch: ScheduledBatch) -> Any:
        steps.append((len(engine.core._in_flight), any(map(any, batch.draft_token_ids))))
        return submit(batch)

    def turn(core: EngineCore, step: int) -> None:
        core.set_limits(SetLimits(spec_tokens=3 if step // 4 % 2 else 0))
        held.append(0 if core.last_record is None else core.last_record.num_accepted_tokens)

    engine.core.executor.submit = note
    assert run(engine.core, brief(), before_step=turn) == of_one()
    assert sum(held) > 3
    assert {others for others, has_drafts in steps if has_drafts} == {0}
    assert any(others for others, has_drafts in steps if not has_drafts)
    engine.core.shutdown()


def test_an_error_of_the_drafter_costs_drafts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other stages get drafts all the same, which are wrong."""
    engine = engine_with("draft_model", num_stages=3)
    drafter = last_stage(engine)[0].runner.drafting.drafter
    calls = fail_at(monkeypatch, drafter, "_draft_one", 2, OSError("no drafts today"))
    failures: list[int] = []

    def note(core: EngineCore, step: int) -> None:
        failures.append(0 if core.last_record is None else core.last_record.num_draft_failures)

    assert run(engine.core, brief(), before_step=note) == of_one()
    assert sum(failures) > 0
    assert len(calls) > 2, "it drafts again"
    engine.core.shutdown()


def test_an_error_of_one_of_several_ranks_that_draft_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages before wait for the drafts, so the step cannot be left. Requests go on in the next engine."""
    engine = engine_with("draft_model", width=2, num_stages=2)
    fail_at(monkeypatch, last_stage(engine)[1].runner.drafting.drafter, "_draft_one", 2, OSError("no drafts today"))
    with pytest.raises(EngineDeadError, match=r"Rank 1 of 4 failed in a step: OSError: no drafts today"):
        run(engine.core, brief())
    engine.core.shutdown()


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_the_plan_is_what_is_allocated(method: str, mimo: Path) -> None:
    """The drafter, its KV, and embeddings for a head are in the last stage; streams that it reads in all before it."""
    folder = mimo if method == "mtp" else None
    plain, engine = started(1, folder, num_stages=2), engine_with(method, folder, num_stages=2)
    (_, first), (last,) = engine.executor.workers, last_stage(engine)
    of_plain = last_stage(plain)[0]
    settings = WorkerSettings.of(engine.resolved)
    assert first.drafter is None
    for worker in (first, last):
        config, drafter = worker.model.config, worker.drafter
        own = worker.model.weight_bytes() + (0 if drafter is None else drafter.weight_bytes())
        assert own == planned_weight_bytes(engine.resolved, config) == worker.measured.memory.weight_bytes
        page_bytes = KvPages.of(engine.resolved, config).page_bytes
        assert worker.cache.num_bytes == page_bytes * engine.resolved.memory.num_blocks
    assert len(last.cache.drafter_layers) == len(last.drafter.config.layers)
    assert not first.cache.drafter_layers
    names = [set(worker.model.expected_weights()) for worker in (last, of_plain)]
    assert names[0] - names[1] >= ({"model.embed_tokens.weight"} if method == "mtp" else set())
    streams = first.runner.forward_pass._streams
    assert (streams is not None) == (method == "eagle3")
    assert settings.hidden_bytes(first.model.config) == (0 if streams is None else streams.kept_TX.nbytes)
    if method != "draft_model":
        assert settings.hidden_bytes(last.model.config) == last.runner.drafting.drafter.num_bytes
    for each in (engine, plain):
        each.core.shutdown()
