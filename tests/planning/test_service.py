"""Times and rates of a server: they follow from step times, and searches find the same as a walk through all."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import pairwise

import pytest

from quire.cost.arithmetic import Load
from quire.cost.calibrate import Fit
from quire.cost.collectives import Exchanges, Link, Links, Traffic
from quire.cost.model import CostModel
from quire.cost.step_time import Constants, StepTime
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.planning.service import Goals, Point, Service
from tests.cost.models import CONSTANTS, cost_model

LENGTHS = RequestLengths("test", [RequestLength(600, 200)])


def service(room: int = 64, spread: float = 0.25, lengths: RequestLengths = LENGTHS) -> Service:
    return Service(cost_model(CONSTANTS, spread), lengths, 2048, room)


def test_one_request_alone() -> None:
    """Its prompt in one step, then a step per token."""
    found, cost = service().at(1), cost_model(CONSTANTS, 0.25)
    count = cost.arithmetic
    prompt = cost.predict(count.load([0], [600], 1)).seconds
    decode = cost.predict(count.load([699], [1], 1)).seconds
    assert found.ttft.value == pytest.approx(prompt)
    assert found.itl.value == pytest.approx(decode)
    assert found.requests_per_second.value == pytest.approx(1 / (prompt + 200 * decode))
    assert found.tokens_per_second.value == pytest.approx(200 * found.requests_per_second.value)
    for estimate in (found.ttft, found.itl, found.requests_per_second):
        assert (estimate.low, estimate.high) == pytest.approx((estimate.value / 1.25, estimate.value * 1.25))


class SurerDecodes(CostModel):
    """Decodes lie within a tenth of their prediction, steps with prompts within a factor of two."""

    def predict(self, load: Load, pause: float = 0.0) -> StepTime:
        step = super().predict(load, pause)
        ratio = 1.1 if load.num_tokens == load.num_rows else 2.0
        return StepTime(step.seconds, step.seconds / ratio, step.seconds * ratio, step.bound)


def test_times_have_the_intervals_of_their_steps() -> None:
    """Of a request alone: the first token that of its prompt, the others that of decodes, and the rate between both."""
    cost = SurerDecodes(cost_model().arithmetic, Fit(CONSTANTS, 0.25))
    found = Service(cost, LENGTHS, 2048, 64).at(1)
    assert (found.ttft.low, found.ttft.high) == pytest.approx((found.ttft.value / 2, found.ttft.value * 2))
    assert (found.itl.low, found.itl.high) == pytest.approx((found.itl.value / 1.1, found.itl.value * 1.1))
    slowest = found.ttft.value * 2 + LENGTHS.mean_output * found.itl.value * 1.1
    assert found.requests_per_second.low == pytest.approx(1 / slowest)
    crowd = Service(cost, LENGTHS, 2048, 64).at(8)
    assert 1.1 < crowd.itl.high / crowd.itl.value < 2, "some of these steps have prompts"


def test_more_requests_wait_longer_and_get_more_done() -> None:
    every = [service().at(count) for count in range(1, 65)]
    for one, more in pairwise(every):
        assert more.itl.value > one.itl.value
        assert more.ttft.value > one.ttft.value
        assert more.requests_per_second.value > one.requests_per_second.value


@pytest.mark.parametrize("length", [RequestLength(600, 200), RequestLength(1500, 20), RequestLength(5000, 300)])
def test_no_more_than_full_steps_can_do(length: RequestLength) -> None:
    """The prompts of all served requests were computed: at best in whole steps, with nothing beside them."""
    served, cost = service(room=2048, lengths=RequestLengths("test", [length])), cost_model(CONSTANTS, 0.25)
    full = cost.predict(cost.arithmetic.load([0], [2048], 1)).seconds
    rates = [served.at(count).requests_per_second.value for count in range(1, served.most + 1)]
    assert max(rates) * length.prompt / 2048 * full < 1
    assert all(more > 0.995 * one for one, more in pairwise(rates)), "more requests never get less done"


def test_searches_find_what_a_walk_finds() -> None:
    served = service()
    every = [served.at(count) for count in range(1, served.most + 1)]
    for goals in (Goals(ttft=every[20].ttft.value), Goals(itl=every[9].itl.value), Goals(ttft=1e-9), Goals(itl=1e9)):
        kept = [point.num_requests for point in every if goals.are_kept(point)]
        assert served.within(goals) == max(kept, default=0)
    rate = every[30].requests_per_second.value
    assert served.for_rate(rate) == 31
    assert served.for_rate(1e9) == served.most + 1


def test_a_few_long_steps_with_prompts_may_take_most_of_the_time() -> None:
    """One step in six has tokens of a prompt, and takes far more than five times as long as one without."""
    fast = Constants(1e-6, 1e-9, 4e-11, 2e-12, 5e-11, 4e-12, 4e-11, 2.0)
    cost, lengths = cost_model(fast), RequestLengths("test", [RequestLength(2000, 50)])
    alone = Service(cost, lengths, 2048, 64).at(1)
    assert (alone.ttft_bound, alone.bound) == ("arithmetic", "memory")
    assert Service(cost, lengths, 2048, 64).at(8).bound == "arithmetic"


def test_steps_hold_only_so_many_prompts() -> None:
    """Prompts of 8,192 tokens before one answered token: 2,048 tokens a step are a prompt in four steps."""
    long = RequestLengths("long", [RequestLength(8192, 1)])
    assert service(room=1000, lengths=long).most == 1
    assert service(room=1000).most == 2048 * 200 // 800


def test_the_knee_is_where_products_take_as_long_as_reads() -> None:
    served, cost = service(room=10_000), cost_model(CONSTANTS, 0.25)
    demand = cost.arithmetic.demand(cost.arithmetic.load([699] * served.knee, [1] * served.knee, served.knee))
    reads = demand.weight_bytes * CONSTANTS.per_weight_byte
    products = (demand.linear_flops + demand.linear_int8_ops) * CONSTANTS.per_operation
    assert served.knee == served.most or products == pytest.approx(reads, rel=1 / served.knee + 0.01)


def test_exchanges_over_links_are_added() -> None:
    def at_one(near: Link) -> Point:
        cost, between = cost_model(CONSTANTS, 0.25), Exchanges(Traffic(10, 8192.0))
        arithmetic = copy(cost.arithmetic)
        arithmetic.exchanges = between
        constants = replace(CONSTANTS, links=Links(near))
        return Service(CostModel(arithmetic, Fit(constants, 0.25)), LENGTHS, 2048, 64).at(1)

    more = at_one(Link(20e-6, 1e-9)).itl
    assert more.value == pytest.approx(service().at(1).itl.value + 10 * 20e-6 + 8192e-9)
    assert (more.low, more.high) == pytest.approx((more.value / 1.25, more.value * 1.25))
    assert at_one(Link(1.0)).bound == "links"
