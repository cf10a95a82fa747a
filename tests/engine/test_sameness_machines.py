"""Ranks of one stage on several machines give the tokens and logprobs of one rank, to the bit.

Machines are threads here that have no memory in common; tests/engine/test_nodes.py has processes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import demo
from quire.kernels import cpu
from quire.worker import expert_balancer
from tests.engine.harness import run, run_despite_errors, two_layers
from tests.engine.ranks import fail_at, started, watch_recordings
from tests.engine.test_rank_processes import EXPERTS
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import FORMS, answers, expected_of_two_layers, of_ranks
from tests.engine.test_sameness_ranks_drafters import drafted, of_one
from tests.engine.test_sameness_ranks_families import LIMITS, VOCABULARY
from tests.engine.test_sameness_ranks_lora import LORA, tokens, write
from tests.engine.test_sameness_stages_drafters import engine_with
from tests.models.test_families import CASES, random_hf_model

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")


@pytest.mark.parametrize(
    ("form", "num_ranks", "num_stages", "num_nodes"),
    [
        *(("bfloat16", 4, 1, 2), ("float32", 2, 2, 4), ("int8", 3, 1, 3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("int4", 2, 1, 2), ("bfloat16", 4, 2, 4))),
    ],
)
def test_tokens_and_logprobs(form: str, num_ranks: int, num_stages: int, num_nodes: int) -> None:
    """With chunks of prompts and two batches in flight."""
    asked: dict[str, Any] = {"max_num_batched_tokens": 17, "async_scheduling": num_stages == 1, **FORMS[form]}
    found = of_ranks(num_ranks, two_layers(), num_stages=num_stages, nnodes=num_nodes, **asked)
    assert found == expected_of_two_layers(form, cpu.isa())


@pytest.mark.parametrize("more", [{"enable_batch_sharded_sampling": True}, {"max_num_batched_tokens": 512}])
def test_steps_are_recorded(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each rank samples some requests."""
    recorded = watch_recordings(monkeypatch)
    assert of_ranks(2, two_layers(), nnodes=2, **more) == expected_of_two_layers("bfloat16", cpu.isa())
    assert recorded, "no step was recorded"
    assert all(recorded)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_drafter_and_adapters_in_stages(method: str, tmp_path: Path) -> None:
    """The last of two stages is on two machines, and so is the drafter."""
    adapters = write(tmp_path, demo.path("target"))
    engine = engine_with(method, width=2, num_stages=2, nnodes=4, **LORA)
    assert tokens(engine, adapters) == tokens(started(1, **LORA), adapters)
    found, num_drafts, num_held = drafted(engine)
    engine.core.shutdown()
    assert found == of_one()
    assert num_drafts > num_held > 5


@pytest.mark.parametrize(
    ("family", "width", "num_lanes", "num_nodes", "more"),
    [
        ("qwen2_moe", 1, 2, 2, {"async_scheduling": True}),
        ("qwen3_moe", 2, 2, 2, {"max_num_batched_tokens": 17}),
        ("deepseek_v3", 1, 4, 2, {}),
        pytest.param("qwen2_moe", 3, 2, 2, {"max_num_batched_tokens": 17}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, 4, 4, {"async_scheduling": True}, marks=pytest.mark.slow),
    ],
)
def test_lanes(family: str, width: int, num_lanes: int, num_nodes: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Each machine has whole lanes. Some have no rows, because lanes end earlier or are more than requests."""
    case = CASES[family]
    random_hf_model(replace(case, settings=case.settings | VOCABULARY)).save_pretrained(tmp_path)
    lanes = {"data_parallel_size": num_lanes, "enable_expert_parallel": True}
    found = of_ranks(width, tmp_path, nnodes=num_nodes, **LIMITS | lanes | more)
    assert found == of_ranks(1, tmp_path, **LIMITS)


def test_experts_that_move_between_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From machine to machine."""
    monkeypatch.setattr(expert_balancer, "BUDGET_BYTES", 1)
    case = CASES["qwen2_moe"]
    random_hf_model(replace(case, settings=case.settings | VOCABULARY)).save_pretrained(tmp_path)
    lanes = {"data_parallel_size": 2, "enable_expert_parallel": True}
    engine = started(1, tmp_path, nnodes=2, enable_eplb=True, eplb_config={"step_interval": 1}, **LIMITS, **lanes)
    balancers = [worker.runner.balancer for worker in engine.executor.workers]  # type: ignore[attr-defined]
    before = balancers[0].num_moved
    assert answers(engine.core) == of_ranks(1, tmp_path, **LIMITS)
    engine.core.shutdown()
    assert balancers[0].num_moved == balancers[1].num_moved > before


@pytest.mark.parametrize(
    ("rank", "where", "error"),
    [
        (3, "model.embed", MemoryError()),
        (2, "sampler.launch", RuntimeError("once")),
        (1, "model.compute_logits", OSError("once")),
    ],
)
def test_lanes_of_all_machines_agree_on_errors_in_a_step(
    rank: int, where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank leaves the step in its lane and among all ranks, on other machines too. The step is computed again."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    form: dict[str, Any] = {"max_model_len": 128, "load_format": "dummy"}
    lanes = {"data_parallel_size": 2, "enable_expert_parallel": True, "nnodes": 2}
    engine = started(2, tmp_path, **form, **lanes)
    owner = engine.executor.workers[rank].runner  # type: ignore[attr-defined]
    owner_name, name = where.split(".")
    calls = fail_at(monkeypatch, getattr(owner, owner_name), name, 3, error)
    found = run_despite_errors(engine.core, brief())
    assert len(calls) > 3
    failed = [request_id for request_id, tokens in found.items() if tokens[-1] is None]
    assert len(failed) <= isinstance(error, MemoryError), found
    monkeypatch.undo()
    wanted = run(started(1, tmp_path, **form).core, brief())
    assert all(found[f"r{index}"] == tokens for index, tokens in enumerate(wanted) if f"r{index}" not in failed)
    assert run(engine.core, brief(), prefix="again") == wanted
    engine.core.shutdown()


def test_whole_experts_that_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From machine to machine, between steps."""
    monkeypatch.setattr(expert_balancer, "BUDGET_BYTES", 1)
    case = CASES["qwen2_moe"]
    random_hf_model(replace(case, settings=case.settings | VOCABULARY)).save_pretrained(tmp_path)
    moving = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"step_interval": 3}}
    engine = started(3, tmp_path, nnodes=3, **LIMITS, **moving)
    balancers = [worker.runner.balancer for worker in engine.executor.workers]  # type: ignore[attr-defined]
    before = balancers[0].num_moved
    assert answers(engine.core) == of_ranks(1, tmp_path, **LIMITS)
    engine.core.shutdown()
    assert balancers[0].num_moved > before
