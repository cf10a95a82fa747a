"""The bundled draft model drafts for the bundled target: nothing of it shows, and it drafts what it would say alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.messages import SetLimits
from quire.request import Request
from quire.schedule import UNDRAFTED
from tests.engine.harness import MOST_DRAFTS, Schedule, build_core
from tests.engine.test_drafts import KINDS, answers, expected
from tests.examples import examples
from tests.worker.fake_accelerator import FakeAccelerator


class ByWorker:
    """Leaves all drafts to the worker; sometimes fewer, or none."""

    def __init__(self, most: int = 5, seed: int | None = None) -> None:
        self.most, self._random = most, None if seed is None else Random(seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        most = min(most, self.most)
        return [UNDRAFTED] * (most if self._random is None else self._random.randint(0, most))


@pytest.mark.parametrize("is_greedy", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_sampling(name: str, is_greedy: bool) -> None:
    core = build_core(Schedule(proposer=ByWorker(), drafts_greedily=is_greedy), "bfloat16")
    assert answers(core, [name])[name] == expected(name)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6, unique=True),
    most=st.integers(1, MOST_DRAFTS),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([12, 16, 40, 2048]),
    block_size=st.sampled_from([8, 16]),
    num_blocks=st.sampled_from([12, 24, 256]),
    depth=st.integers(1, 2),
    prefix_caching=st.booleans(),
    preempt_every=st.sampled_from([3, 7, 1000]),
    on_a_device=st.booleans(),
)
def test_any_schedule(  # type: ignore[no-untyped-def]
    names, most, seed, chunk, block_size, num_blocks, depth, prefix_caching, preempt_every, on_a_device
) -> None:
    schedule = Schedule(
        chunk=chunk,
        block_size=block_size,
        num_blocks=num_blocks * 16 // block_size,
        depth=depth,
        prefix_caching=prefix_caching,
        max_num_seqs=12,
        accelerator=FakeAccelerator() if on_a_device else None,
        graph_sizes=(4, 12) if on_a_device else (),
        mixed_sizes=(8, 16) if on_a_device else (),
        proposer=ByWorker(most, seed),
        drafts_greedily=bool(seed % 2),
    )
    core = build_core(schedule, "bfloat16")

    def interfere(step: int) -> None:
        if step < 60 and step % preempt_every == preempt_every - 1 and core.scheduler.num_running:
            core.scheduler.preempt_last()
        core.set_limits(SetLimits(max_num_batched_tokens=1 if step % 8 < 4 else chunk))

    assert answers(core, names, interfere) == {name: expected(name) for name in names}
