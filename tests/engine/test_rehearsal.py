"""Steps that are computed ahead: one of each recorded size, before requests need them."""

from __future__ import annotations

import pytest

import quire.demo
from quire.config import EngineConfig
from quire.cost.step_time import Constants
from quire.engine.rehearsal import MAX_STEP_SECONDS, Rehearsal
from quire.engine.start import start_engine
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams
from quire.schedule import MAX_RECORDED_TOKENS, ScheduledBatch
from tests.cost.models import cost_model
from tests.scheduler.driver import Driver, request


def computed(driver: Driver) -> list[int]:
    """The tokens of each step."""
    return [batch.num_tokens for batch in driver.batches]


@pytest.mark.parametrize(
    ("max_tokens", "last", "full"), [(20, 20, []), (8192, MAX_RECORDED_TOKENS, []), (100, MAX_RECORDED_TOKENS, [100])]
)
def test_each_size_once(max_tokens: int, last: int, full: list[int]) -> None:
    driver = Driver(num_blocks=64, block_size=4, cost=cost_model())
    rehearsal = Rehearsal(driver.core, cost_model(), max_tokens)
    while rehearsal.step():
        pass
    assert computed(driver) == [*range(1, last + 1), *full]
    driver.add(request("a", range(8), 3))
    driver.run()
    driver.check_outputs()


def test_requests_come_first() -> None:
    driver = Driver(num_blocks=64, block_size=4, cost=cost_model())
    rehearsal = Rehearsal(driver.core, cost_model(), 3)
    assert rehearsal.step()
    driver.add(request("a", range(8), 3))
    assert not rehearsal.step()
    driver.run()
    while rehearsal.step():
        pass
    assert computed(driver)[0] == 1
    assert computed(driver)[-2:] == [2, 3]
    driver.check_outputs()


def test_nobody_waits_for_a_long_step() -> None:
    cost = cost_model(Constants(1e-3, 0.0, 4e-11, 1e-9, 5e-11, 4e-12, 4e-11, 2.0))
    driver = Driver(num_blocks=64, block_size=4, cost=cost)
    rehearsal = Rehearsal(driver.core, cost, 64)
    while rehearsal.step():
        pass
    *_, last = computed(driver)
    assert 1 <= last < 64
    for num_tokens, is_short in ((last, True), (last + 1, False)):
        seconds = cost.predict(cost.arithmetic.load([0], [num_tokens], 1)).seconds
        assert (seconds <= MAX_STEP_SECONDS) == is_short


def test_a_step_that_fails_ends_it() -> None:
    def fail(batch: ScheduledBatch, is_computed: bool) -> Exception | None:
        return MemoryError() if batch.num_tokens == 5 and batch.request_ids[0] == "probe 0" else None

    driver = Driver(failure=fail, cost=cost_model())
    rehearsal = Rehearsal(driver.core, cost_model(), 20)
    while rehearsal.step():
        pass
    assert computed(driver)[-1] == 5
    assert not rehearsal.step()
    driver.add(request("a", range(8), 3))
    driver.run()
    driver.check_outputs()


@pytest.mark.skipif(not cpu.available(), reason="only compiled kernels are recorded")
def test_no_step_of_a_request_is_recorded_afterwards() -> None:
    config = EngineConfig(max_model_len=2048, num_gpu_blocks_override=256, device="cpu")
    engine = start_engine(config, quire.demo.path(), is_server=True, progress=lambda *_: None)
    try:
        while engine.calibrate():
            pass
        captured, params = [], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        for length in (7, 23, MAX_RECORDED_TOKENS, 1500):
            engine.core.add(AddRequest(f"r{length}", [5] * length, params, 20))
            while engine.core.has_work():
                engine.core.step()
                if engine.core.last_record is not None:
                    captured.append(engine.core.last_record.has_captured)
    finally:
        engine.executor.shutdown()
    assert len(captured) >= 80
    assert not any(captured)
    recorded = engine.executor.workers[0].runner.forward_pass.captured  # type: ignore[attr-defined]
    sizes = {num_tokens for num_tokens, *_ in recorded._recordings}
    assert sizes == {*range(1, MAX_RECORDED_TOKENS + 1), engine.resolved.scheduler.max_num_batched_tokens}
