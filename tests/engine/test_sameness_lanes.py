"""Lanes of one engine share experts: tokens and logprobs of one process, to the bit, with any neighbours.

Ranks are threads here; tests/engine/test_rank_processes.py has processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.model_config import load_model_config
from quire.sampling_params import SamplingParams
from quire.schedule import RowsFailedError
from quire.scheduler import from_settings
from quire.scheduler.speculation import DraftCounts
from quire.speculative_config import SpeculativeConfig
from quire.worker import expert_balancer
from tests.engine.harness import run, run_despite_errors
from tests.engine.ranks import fail_at, started
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import Answer, answers, of_ranks
from tests.engine.test_sameness_ranks_lora import LORA
from tests.engine.test_sameness_ranks_lora import tokens as with_adapters
from tests.guesser import Guesser
from tests.lora.adapters import random_tensors, write_adapter
from tests.models.test_families import CASES, random_hf_model

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LIMITS: dict[str, Any] = {"max_model_len": 128, "dtype": "bfloat16"}
TWO: dict[str, Any] = {"enable_expert_parallel": True, "data_parallel_size": 2}
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 17, "async_scheduling": True}
# Blocks for one request after another: every second prompt of a batch of four waits.
SCARCE: dict[str, Any] = {"num_gpu_blocks_override": 42, "enable_prefix_caching": True, "block_size": 8}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a family, as transformers writes it."""

    def write(name: str) -> Path:
        folder, case = tmp_path_factory.mktemp(name), CASES[name]
        random_hf_model(replace(case, settings=case.settings | {"vocab_size": 5000})).save_pretrained(folder)
        return folder

    return cache(write)


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str], Answer]:
    """Of one process."""
    return cache(lambda family: of_ranks(1, folder_of(family), **LIMITS))


@pytest.mark.parametrize(
    ("family", "width", "num_lanes", "more"),
    [
        ("qwen3_moe", 1, 2, {}),
        ("qwen3_moe", 2, 2, CHUNKS),
        ("qwen2_moe", 1, 2, CHUNKS | {"expert_placement_strategy": "round_robin"}),
        ("deepseek_v3", 2, 2, {}),
        pytest.param("deepseek_v2", 1, 2, CHUNKS, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 1, 4, {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 1, 2, CHUNKS, marks=pytest.mark.slow),
    ],
)
def test_families(
    family: str,
    width: int,
    num_lanes: int,
    more: dict[str, Any],
    folder_of: Callable[[str], Path],
    expected: Callable[[str], Answer],
) -> None:
    """Experts of 2 and 4 ranks. More lanes than requests, and lanes that end earlier: some have no rows."""
    one = expected(family)
    assert len({tuple(tokens) for tokens, _ in one}) > 2
    asked = LIMITS | TWO | {"data_parallel_size": num_lanes} | more
    assert of_ranks(width, folder_of(family), **asked) == one


@pytest.fixture(scope="module")
def lanes(folder_of: Callable[[str], Path]) -> Any:
    """Two lanes of a rank each."""
    engine = started(1, folder_of("qwen2_moe"), **LIMITS, **TWO)
    yield engine
    engine.core.shutdown()


@pytest.fixture(scope="module")
def wanted(folder_of: Callable[[str], Path]) -> list[list[int]]:
    engine = started(1, folder_of("qwen2_moe"), **LIMITS)
    found = run(engine.core, brief())
    engine.core.shutdown()
    return found


def _run_on(core: EngineCore, lane: int, prefix: str) -> list[list[int]]:
    """The brief prompts on one lane."""
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(brief()):
        request_id = f"{prefix}{index}"
        found[request_id] = []
        params = structs.replace(prompt.params)
        core.add(AddRequest(request_id, list(prompt.token_ids), params, params.max_tokens or 1, [2], lane=lane))
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            found[delta.request_id] += delta.token_ids
        if core.last_record is not None:
            idle = core.last_record.lanes[1 - lane]
            assert (idle.num_tokens, idle.num_running, idle.num_blocks_in_use) == (0, 0, 0)
    return list(found.values())


@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_without_rows_takes_part(lane: int, lanes: Any, wanted: list[list[int]]) -> None:
    """Also the lane of the engine's process. The request leaves no trace in its cache."""
    assert _run_on(lanes.core, lane, f"alone{lane}-") == _run_on(lanes.core, lane, f"again{lane}-")
    assert lanes.core.last_record.lanes[lane].num_tokens > 0
    assert run(lanes.core, brief(), prefix=f"both{lane}-") == wanted


def test_each_lane_has_its_own_prefix_cache(lanes: Any, wanted: list[list[int]]) -> None:
    """A prompt goes where its prefix is; there it is found, and nowhere else."""
    core, prompt = lanes.core, [7] * 60
    core.scheduler.reset_prefix_cache()

    def hits(name: str, **fields: Any) -> tuple[int, int]:
        params, cached, lane = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), 0, -1
        core.add(AddRequest(name, prompt, params, 2, **fields))
        while core.has_work():
            core.step()
            if core.last_record is not None:
                cached += core.last_record.prefix_cache_hits
                lane = next(index for index, each in enumerate(core.last_record.lanes) if each.num_tokens)
        return cached, lane

    assert hits("cold", lane=1) == (0, 1)
    assert hits("warm") == (48, 1)
    assert hits("elsewhere", lane=0) == (0, 0)


def test_lanes_that_are_short_of_blocks(folder_of: Callable[[str], Path], wanted: list[list[int]]) -> None:
    """Requests are preempted and computed again in their lane."""
    engine = started(1, folder_of("qwen2_moe"), **LIMITS, **TWO, **SCARCE)
    num_preemptions = 0

    def count(core: EngineCore, step: int) -> None:
        nonlocal num_preemptions
        num_preemptions += 0 if core.last_record is None else core.last_record.num_preemptions
        if step == 3:
            core.scheduler.lanes[1].preempt_last()  # type: ignore[union-attr]

    assert run(engine.core, brief(), before_step=count) == wanted
    assert num_preemptions > 0
    engine.core.shutdown()


def test_an_aborted_request_frees_its_lane(lanes: Any, wanted: list[list[int]]) -> None:
    core = lanes.core
    for lane in (0, 1):
        endless = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        core.add(AddRequest(f"endless{lane}", [5, 7, 9], endless, 60, lane=lane))
    for _ in range(5):
        core.step()
    core.abort(["endless1"])
    core.step()
    assert [lane.num_blocks_in_use > 0 for lane in core.last_record.lanes] == [True, False]
    core.abort(["endless0"])
    assert not core.scheduler.has_requests()
    assert run(core, brief(), prefix="behind-") == wanted


@pytest.fixture(scope="module")
def lanes_of_two(folder_of: Callable[[str], Path]) -> Iterator[StartedEngine]:
    """Two lanes of two ranks."""
    engine = started(2, folder_of("qwen2_moe"), async_scheduling=True, **LIMITS, **TWO)
    yield engine
    engine.core.shutdown()


@pytest.mark.parametrize(
    ("rank", "where", "error"),
    [
        (3, "input_batch.apply", RowsFailedError(["r0", "r1"], "only this rank cannot")),
        (2, "model.compute_logits", MemoryError()),
        (1, "model.embed", OSError("once")),
        (2, "sampler.launch", RuntimeError("once")),
        (0, "input_batch.learn_tokens", RuntimeError("behind all that ranks do together")),
    ],
)
def test_ranks_of_all_lanes_agree_on_errors_in_a_step(
    rank: int,
    where: str,
    error: Exception,
    lanes_of_two: StartedEngine,
    wanted: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guilty requests end, the step is computed again by all lanes, and the engine goes on."""
    engine = lanes_of_two
    engine.core.scheduler.reset_prefix_cache()
    *path, name = where.split(".")
    owner = engine.executor.workers[rank].runner  # type: ignore[attr-defined]
    for each in path:
        owner = getattr(owner, each)
    fail_at(monkeypatch, owner, name, 3, error)
    found = run_despite_errors(engine.core, brief())
    failed = [request_id for request_id, tokens in found.items() if tokens[-1] is None]
    assert len(failed) <= 2 * isinstance(error, (RowsFailedError, MemoryError)), found
    for index, tokens in enumerate(wanted):
        assert f"r{index}" in failed or found[f"r{index}"] == tokens
    monkeypatch.undo()
    assert run(engine.core, brief(), prefix="again") == wanted


def test_experts_that_move_between_lanes(
    folder_of: Callable[[str], Path], expected: Callable[[str], Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_balancer, "BUDGET_BYTES", 1)
    asked = {"enable_eplb": True, "expert_metrics": True, "eplb_config": {"step_interval": 1}}
    engine = started(1, folder_of("qwen2_moe"), **LIMITS, **TWO, **CHUNKS, **asked)
    balancers = [worker.runner.balancer for worker in engine.executor.workers]  # type: ignore[attr-defined]
    before = balancers[0].num_moved
    assert answers(engine.core) == expected("qwen2_moe")
    assert balancers[0].num_moved == balancers[1].num_moved > before
    engine.core.shutdown()


@pytest.mark.parametrize(("width", "most"), [(1, {}), (2, {"max_loras": 1, "max_cpu_loras": 1})])
def test_adapters(width: int, most: dict[str, int], folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Each lane has all of an adapter. If there is one place for adapters, requests of all lanes take turns."""
    folder = folder_of("qwen3_moe")
    config, modules = load_model_config(folder), (("q_proj", "o_proj", "lm_head"), ("k_proj", "v_proj", "embed_tokens"))
    adapters = [
        write_adapter(tmp_path / str(seed), random_tensors(config, 8, modules=each, seed=seed, size=0.2), rank=8)
        for seed, each in enumerate(modules)
    ]
    one, several = started(1, folder, **LIMITS, **LORA), started(width, folder, **LIMITS, **LORA, **TWO, **most)
    wanted = with_adapters(one, adapters)
    assert wanted != run(one.core, brief(), prefix="base"), "the adapters change nothing"
    assert with_adapters(several, adapters) == wanted
    several.core.shutdown()


@pytest.mark.parametrize(("width", "more"), [(1, {}), (2, CHUNKS)])
def test_drafts_from_text(
    width: int,
    more: dict[str, Any],
    folder_of: Callable[[str], Path],
    expected: Callable[[str], Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right and wrong ones, in all lanes. A row with drafts has several tokens, and other lanes have its experts."""
    one = expected("qwen3_moe")
    guesser = Guesser(0.6, vocab_size=5000)
    guesser.continuation_of = lambda request_id: one[int(request_id[1:])][0] if request_id[1:].isdigit() else ()
    monkeypatch.setattr(from_settings, "proposer_of", lambda config: guesser)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4, adaptive=False)
    engine = started(width, folder_of("qwen3_moe"), **LIMITS | TWO | more, speculative_config=drafts)
    counts, take = DraftCounts(), engine.core.scheduler.speculation.take_counts

    def note() -> DraftCounts:
        counts.join(found := take())
        return found

    monkeypatch.setattr(engine.core.scheduler.speculation, "take_counts", note)
    assert answers(engine.core) == one
    assert 5 < counts.num_accepted_tokens < counts.num_draft_tokens - 5
    engine.core.shutdown()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size does not go together with experts"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size does not go together with experts"),
        ({"enable_lora": True}, "a rank does not know the adapters of other lanes' rows"),
        ({"distributed_executor_backend": "external_launcher"}, "--distributed-executor-backend does not go"),
        ({"distributed_executor_backend": "uni"}, "does not go together with --distributed-executor-backend uni"),
        ({"data_parallel_size": 8, "tensor_parallel_size": 9}, "8 x 9 ranks would share the experts"),
        ({"data_parallel_size": 9}, "each rank holds whole ones"),
    ],
)
def test_what_lanes_cannot_do_is_refused(asked: dict[str, Any], message: str, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=message):
        started(1, folder_of("qwen2_moe"), **LIMITS | TWO | asked)
