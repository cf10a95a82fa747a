"""Drafters that are models, with lanes that share experts: tokens and logprobs of one process without drafts.

Each lane has a drafter of its own. The target is the demo model with experts. Ranks are threads here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import demo
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.kernels import cpu
from quire.messages import AddRequest, SetLimits
from quire.planning.memory_plan import planned_weight_bytes
from quire.speculative_config import SpeculativeConfig
from tests.engine import heads, mtp_layers
from tests.engine.harness import run
from tests.engine.ranks import fail_at, started
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import Answer, answers
from tests.engine.test_sameness_ranks_drafters import drafted, speculation
from tests.engine.test_sameness_stages_drafters import noting

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LANES: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
BUNDLED = {"draft_model": "draft", "eagle3": "eagle3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.write_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Callable[[], Answer]:
    """Of one process without drafts."""

    def compute() -> Answer:
        engine = started(1, folder)
        found = answers(engine.core)
        engine.core.shutdown()
        return found

    return cache(compute)


def tokens_of(answer: Answer) -> list[list[int]]:
    return [tokens for tokens, _ in answer]


def engine_with(method: str, folder: Path, width: int = 1, drafter: Path | None = None, **more: Any) -> StartedEngine:
    drafter = drafter or demo.path(BUNDLED[method])
    given: dict[str, Any] = {"method": method, "model": str(drafter), "num_speculative_tokens": 3, "adaptive": False}
    given |= more.pop("drafts", {})
    return started(width, folder, drafter, speculative_config=SpeculativeConfig(**given), **LANES | more)


@pytest.mark.parametrize(
    ("method", "width", "more"),
    [
        ("draft_model", 1, {}),
        ("draft_model", 2, {"max_num_batched_tokens": 17, "async_scheduling": True}),
        ("eagle3", 1, {"max_num_batched_tokens": 17, "async_scheduling": True}),
        ("eagle3", 2, {}),
        ("eagle3", 1, {"data_parallel_size": 4, "nnodes": 2}),
        pytest.param("draft_model", 1, {"nnodes": 2, "drafts": {"adaptive": True}}, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_logprobs(
    method: str, width: int, more: dict[str, Any], folder: Path, wanted: Callable[[], Answer]
) -> None:
    """Lanes draft for their own requests. The last ones have no rows: they end earlier, or are more than requests."""
    engine = engine_with(method, folder, width, **more)
    tokens, num_drafts, num_held = drafted(engine)
    assert tokens == tokens_of(wanted())
    if not more.get("drafts"):
        assert num_drafts > num_held > 5
    assert answers(engine.core) == wanted()
    engine.core.shutdown()


def test_a_draft_model_with_experts(folder: Path, wanted: Callable[[], Answer]) -> None:
    """Each lane has all of its experts, cut among the ranks of the lane. The model that drafts is the target itself."""
    engine = engine_with("draft_model", folder, 2, drafter=folder)
    tokens, num_drafts, num_held = drafted(engine)
    engine.core.shutdown()
    assert tokens == tokens_of(wanted())
    assert num_drafts > 15
    assert num_held > 0.8 * num_drafts, "the same model drafts"


@pytest.mark.parametrize(
    ("family", "width", "more"),
    [
        ("glm4_moe", 1, {"async_scheduling": True}),
        ("deepseek_v3", 2, {"max_num_batched_tokens": 17}),
        ("deepseek_v3", 1, {"nnodes": 2}),
    ],
)
def test_a_layer_for_multi_token_prediction(family: str, width: int, more: dict[str, Any], tmp_path: Path) -> None:
    """It has experts. Each rank has all of them, so it drafts what it drafts in one process, and waits for nobody."""
    mtp_layers.write(family, tmp_path)
    limits, given = {"max_model_len": 128, "dtype": "bfloat16"}, speculation("mtp", None)
    plain, one = started(1, tmp_path, **limits), started(1, tmp_path, tmp_path, **limits, **given)
    engine = started(width, tmp_path, tmp_path, **LANES, **limits, **given, **more)
    drafts, of_one = noting(engine), noting(one)
    assert run(one.core, brief()) == run(plain.core, brief())
    tokens, num_drafts, _ = drafted(engine)
    assert num_drafts > 20
    assert tokens == run(plain.core, brief(), prefix="again")
    assert answers(engine.core) == answers(plain.core)
    both = drafts.keys() & of_one.keys()
    assert len(both) > 5
    assert {key: drafts[key][:1] for key in both} == {key: of_one[key][:1] for key in both}
    engine.core.shutdown()


@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_drafts_alone(lane: int, folder: Path, wanted: Callable[[], Answer]) -> None:
    """The other one has no rows, and computes experts of rows that it does not know."""
    engine = engine_with("eagle3", folder)
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(brief()):
        name, limit = f"r{index}", prompt.params.max_tokens or 1
        found[name] = []
        engine.core.add(AddRequest(name, list(prompt.token_ids), prompt.params, limit, [2], lane=lane))
    num_held = 0
    while engine.core.has_work():
        for delta in engine.core.step():
            found[delta.request_id] += delta.token_ids
        if (record := engine.core.last_record) is not None:
            num_held += record.num_accepted_tokens
            assert record.lanes[1 - lane].num_tokens == 0
            assert (record.draft_seconds > 0) == (record.num_draft_tokens > 0)
    engine.core.shutdown()
    assert [*found.values()] == tokens_of(wanted())
    assert num_held > 5


def test_drafts_that_come_and_go_while_requests_are_preempted(folder: Path, wanted: Callable[[], Answer]) -> None:
    engine, num_preemptions = engine_with("eagle3", folder, async_scheduling=True), 0

    def turn(core: EngineCore, step: int) -> None:
        nonlocal num_preemptions
        core.set_limits(SetLimits(spec_tokens=3 if step // 4 % 2 else 0))
        num_preemptions += 0 if core.last_record is None else core.last_record.num_preemptions
        for lane in core.scheduler.lanes if step in (5, 9) else ():  # type: ignore[union-attr]
            if lane.num_running:
                lane.preempt_last()

    assert run(engine.core, brief(), before_step=turn) == tokens_of(wanted())
    assert num_preemptions > 0
    engine.core.shutdown()


@pytest.mark.parametrize("width", [1, 2])
def test_an_error_of_a_drafter(
    width: int, folder: Path, wanted: Callable[[], Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs drafts of its lane. If ranks of a lane draft together, all lanes compute the step again."""
    engine = engine_with("draft_model", folder, width)
    drafter = engine.executor.workers[-1].runner.drafting.drafter  # type: ignore[attr-defined]
    calls = fail_at(monkeypatch, drafter, "_draft_one", 2, OSError("no drafts today"))
    num_failures = 0

    def note(core: EngineCore, step: int) -> None:
        nonlocal num_failures
        num_failures += 0 if core.last_record is None else core.last_record.num_draft_failures

    assert run(engine.core, brief(), before_step=note) == tokens_of(wanted())
    assert len(calls) > 2, "it drafts again"
    assert (num_failures > 0) == (width == 1)
    engine.core.shutdown()


@pytest.mark.parametrize("method", BUNDLED)
def test_the_weights_of_a_rank_are_planned(method: str, folder: Path) -> None:
    """All lanes hold a drafter."""
    plain, engine = started(1, folder, **LANES), engine_with(method, folder)
    workers: Any = engine.executor.workers  # type: ignore[attr-defined]
    for worker in workers:
        planned = planned_weight_bytes(engine.resolved, worker._model_config)
        assert planned == worker.model.weight_bytes() + worker.drafter.weight_bytes()
    assert engine.resolved.memory.weight_bytes > plain.resolved.memory.weight_bytes
    for each in (plain, engine):
        each.core.shutdown()
