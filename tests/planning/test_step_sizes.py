"""Default sizes of steps: from the knee and from memory, and as good as the best on six workloads."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import defaults
from quire.config import EngineConfig
from quire.cost.arithmetic import Load
from quire.cost.step_time import Constants, step_seconds
from quire.planning.knee import PROMPT_UNIT, Knee
from quire.planning.step_sizes import StepSizes
from quire.resolve import DeviceFacts, resolve
from quire.settings import Resolved
from tests.cost.models import CONSTANTS, cost_model

GIB = 1 << 30
MACHINE = defaults.Machine.read(defaults.RECORDED)
BEST = json.loads(defaults.RECORDED.read_text())["best"]  # by the seed of the requests
SEED = str(defaults.SEED)
LEAST_SHARE = 0.95  # of the best goodput
LONG_STEPS = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_shared_prefill_tokens": 512}


def is_as_good(form: str, workload: str, settings: dict[str, int], seed: str = SEED) -> bool:
    """Whether 95 % of the requests keep their times at nearly the best goodput of a recorded sweep."""
    case = defaults.Case(MACHINE, form, workload, seed=int(seed))
    best = BEST[seed][form][workload]["goodput"]
    return case.share_good(settings, LEAST_SHARE * best) >= defaults.GOOD_SHARE


CASES = list(itertools.product(defaults.WORKLOADS, defaults.FORMATS))
# `make test` has every workload and every format.
FEW = [(workload, defaults.FORMATS[at % len(defaults.FORMATS)]) for at, workload in enumerate(defaults.WORKLOADS)]


@pytest.mark.parametrize(
    ("workload", "form"), [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in CASES]
)
def test_a_start_without_flags_is_within_5_percent_of_the_best(form: str, workload: str) -> None:
    assert is_as_good(form, workload, {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(BEST.keys() - {SEED}))
@pytest.mark.parametrize(("workload", "form"), CASES)
def test_so_it_is_with_other_requests(form: str, workload: str, seed: str) -> None:
    assert is_as_good(form, workload, {}, seed)


def test_bad_settings_are_not() -> None:
    assert not is_as_good("none", "code", LONG_STEPS)


def settled(device: DeviceFacts = MACHINE.device, is_server: bool = True, **arguments: Any) -> Resolved:
    return resolve(EngineConfig.from_kwargs(**arguments), MACHINE.model, device, is_server=is_server)


def sizes(resolved: Resolved) -> tuple[int, int, int]:
    found = resolved.scheduler
    return found.max_num_seqs, found.max_num_batched_tokens, found.max_shared_prefill_tokens


def test_every_start_of_a_machine_settles_the_same() -> None:
    """However much memory is free just then."""
    busy = replace(MACHINE.device, free_memory_bytes=1 * GIB)
    assert sizes(settled(busy)) == sizes(settled())


def test_the_reason_and_vllms_value_are_said() -> None:
    found = settled().settings
    budget = found["max_num_batched_tokens"]
    assert budget.source == "formula"
    assert f"knee: a step of {budget.value:,} prompt tokens reaches 99% of the rate of longer ones" in budget.detail
    assert "vLLM on CPU takes 2,048" in budget.detail
    assert "others may have more: see most_answer_times" in found["max_shared_prefill_tokens"].detail


@pytest.mark.parametrize(
    ("arguments", "times", "why"),
    [
        ({}, 8, "without slo_itl"),
        ({"max_num_batched_tokens": 512}, 8, "without slo_itl"),
        ({"max_shared_prefill_tokens": 64}, 0, "was given holds"),
        ({"max_shared_prefill_tokens": 0}, 0, "prompts go in order"),
        ({"long_prefill_token_threshold": 64}, 0, "prompts go in order"),
        ({"enable_chunked_prefill": False}, 0, "prompts go in order"),
        ({"slo_itl": 0.5}, 0, "slo_itl says"),
        ({"performance_mode": "interactivity"}, 0, "interactivity"),
        ({"is_server": False}, 0, "prompts go in order"),
        # Its processes must schedule alike, so they have no clock.
        ({"is_server": False, "distributed_executor_backend": "external_launcher"}, 0, "prompts go in order"),
        ({"pipeline_parallel_size": 2}, 0, "other stages"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, 0, "other lanes"),
        ({"async_scheduling": True}, 0, "async_scheduling"),
        ({"scheduling_policy": "priority"}, 0, "low priority"),
    ],
    ids=str,
)
def test_only_a_chosen_number_of_shared_tokens_is_a_least_one(
    arguments: dict[str, Any], times: float, why: str
) -> None:
    resolved = settled(**arguments)
    shown = resolved.settings["most_answer_times"]
    assert resolved.scheduler.most_answer_times == shown.value == times
    assert why in shown.detail


def test_on_a_gpu_prompts_share_the_whole_budget() -> None:
    sizes = StepSizes(EngineConfig(), None, 1, 80 * GIB, is_server=True)
    budget, source, _ = sizes.max_shared_prefill_tokens(8192)
    assert sizes.most_answer_times(budget, source, is_async=True) == (
        0,
        "formula",
        "prompts share the whole budget already",
    )


def test_steps_of_an_offline_batch_are_longer() -> None:
    """A start with few requests, whose number does not set the budget."""
    offline, server = (
        settled(is_server=is_server, max_num_seqs=8).settings["max_num_batched_tokens"] for is_server in (False, True)
    )
    assert offline.value >= 2 * server.value
    assert f"a step of {offline.value:,} prompt tokens reaches 99.7% of the rate of longer ones" in offline.detail


def test_given_values_stay() -> None:
    given = {"max_num_seqs": 100, "max_num_batched_tokens": 5000, "max_shared_prefill_tokens": 7}
    resolved = settled(**given)
    assert sizes(resolved) == (100, 5000, 7)
    assert {resolved.settings[name].source for name in given} == {"argument"}
    assert settled(max_num_seqs=1000).scheduler.max_num_batched_tokens >= 1000


def test_little_memory_holds_few_requests() -> None:
    """The requests of 256 tokens that fit beside the weights, rounded down."""
    found = settled(replace(MACHINE.device, total_memory_bytes=3 * GIB)).settings["max_num_seqs"]
    token = 2 * 28 * 8 * 128 * 2  # bytes of keys and values
    fitting = (3 * GIB - 1_192_099_840) // (256 * token)
    assert found.value == 1 << (fitting.bit_length() - 1) < 128
    assert found.detail.startswith(f"memory holds {fitting} requests of 256 tokens; vLLM on CPU takes 128")
    assert settled(num_gpu_blocks_override=20 * 16).scheduler.max_num_seqs == 16
    assert settled(kv_cache_memory_bytes=40 * 256 * token).scheduler.max_num_seqs == 32
    assert settled(num_gpu_blocks_override=1).scheduler.max_num_seqs == 8


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("constants", [Constants(1e-4, 1e-5, 4e-11, 2e-12, 5e-11, 8e-12, 4e-11, p) for p in (1.5, 3.0)])
def test_the_knee(share: float, constants: Constants) -> None:
    """A step of the size reaches about the share, one of half the size does not."""
    arithmetic = cost_model().arithmetic
    knee = Knee(arithmetic, constants)

    def prompts(count: int) -> float:
        return count / step_seconds(arithmetic.demand(Load(count, 1, 1, (0, 0), (0, 0))), constants)

    def decodes(count: int) -> float:
        return count / step_seconds(arithmetic.demand(arithmetic.load([16] * count, [1] * count, count)), constants)

    for rate, size in ((prompts, knee.prompt_tokens(share)), (decodes, knee.requests(share))):
        most = rate(1 << 16)
        assert rate(2 * size) >= share * most
        assert size == 1 or rate(size // 2) < share * most


def test_prompts_make_a_shared_step_about_twice_as_long() -> None:
    cost = cost_model(replace(CONSTANTS, per_step=1e-2))
    answers = cost.arithmetic.load([1023] * 8, [1] * 8, 8)
    size = Knee(cost.arithmetic, cost.fit.constants).prompt_tokens_beside(8, 1024, 2)

    def times(count: int) -> float:
        longer = answers._replace(num_tokens=8 + count, num_rows=9, num_logits=9)
        return cost.predict(longer).seconds / cost.predict(answers).seconds

    assert size > PROMPT_UNIT
    assert times(size - PROMPT_UNIT) < 2 < times(size + PROMPT_UNIT)


def test_faster_products_over_equal_memory_want_longer_steps() -> None:
    avx2, amx = (settled(replace(MACHINE.device, isa=isa)) for isa in ("avx2", "amx"))
    assert sizes(avx2)[1:] < sizes(settled())[1:] < sizes(amx)[1:]
