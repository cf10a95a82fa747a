"""Drafts that hold at random, for benchmarks: as often as asked for, at each position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.engine.start import start_engine
from quire.messages import AddRequest
from quire.request import Request
from quire.sampling.sampler import SampledTokens
from quire.sampling_params import SamplingParams
from quire.scheduler import from_settings
from quire.speculative_config import SpeculativeConfig
from quire.worker.drafts import HoldAtRandom


def test_drafts_hold_as_often_as_asked_for() -> None:
    rates, sampled = (0.8, 0.5, 0.2), SampledTokens([90, 91, 92, 93], {}, {})
    random = HoldAtRandom(rates)
    found = [random.verify(sampled, 0, [1, 2, 3]) for _ in range(4000)]
    assert {tuple(each) for each in found} == {(90,), (1, 91), (1, 2, 92), (1, 2, 3, 93)}
    for position, rate in enumerate(rates, 1):
        assert sum(len(each) > position for each in found) / len(found) == pytest.approx(rate, abs=0.04)
    assert random.verify(sampled, 2, []) == [92]


def test_never_and_always() -> None:
    sampled = SampledTokens([90, 91, 92], {}, {})
    assert HoldAtRandom((0.0, 0.0)).verify(sampled, 0, [1, 2]) == [90]
    assert HoldAtRandom((1.0, 1.0)).verify(sampled, 0, [1, 2]) == [1, 2, 92]


class Same:
    """The same drafts again and again."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return [70, 2000][:most]

    def forget(self, request_id: str) -> None:
        pass


def test_an_engine_whose_drafts_hold_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_settings, "proposer_of", lambda *arguments: Same())
    speculation = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=2,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(1.0, 0.0),
        adaptive=False,
    )
    config = EngineConfig(max_model_len=256, kv_cache_memory_bytes=32 << 20, speculative_config=speculation)
    core = start_engine(config, quire.demo.path("target"), is_server=False, progress=lambda *report: None).core
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    core.add(AddRequest("r", [5, 6, 7], params, max_tokens=9))
    token_ids: list[int] = []
    while core.has_work():
        for delta in core.step():
            token_ids += delta.token_ids
    core.shutdown()
    assert len(token_ids) == 9
    assert token_ids[1::2][:3] == [70] * 3, "every first draft holds, and no second one"
    assert 2000 not in token_ids
