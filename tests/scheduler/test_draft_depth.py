"""Depths of drafts against a search through all of them, and against every fixed depth on streams of known chances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.schedule import StepResult
from quire.scheduler.adaptive_depth import MEMORY, MOST_SAVED, AdaptiveDepth, DrafterTime, StepSeconds
from quire.scheduler.draft_depth import LEAST_WEIGHT, MOST_WEIGHT, Acceptance, best_depths, chances, prior_weight
from quire.scheduler.speculation import Speculation
from quire.spec_decode.by_worker import DraftedByWorker
from tests.covering import covering
from tests.examples import examples

MOST = 7
RATES = st.lists(st.floats(0, 1), max_size=4)


def rate(
    depths: Sequence[int],
    chances_of: Sequence[Sequence[float]],
    seconds: Sequence[float],
    fixed: float,
    per_token: float,
    first: float,
) -> float:
    """Tokens per second with these depths."""
    tokens = len(depths) + sum(sum(row[:depth]) for row, depth in zip(chances_of, depths, strict=True))
    drafting = max(depths) * fixed + sum(depths) * per_token + any(depths) * first
    return tokens / (seconds[sum(depths)] + drafting)


@settings(max_examples=examples(200), deadline=None)
@given(
    rates=st.lists(RATES, min_size=1, max_size=3),
    steps=st.lists(st.floats(0, 0.5), min_size=0, max_size=9),
    least_gain=st.sampled_from([0.0, 0.1]),
    fixed=st.sampled_from([0.0, 0.1, 0.3]),
    per_token=st.sampled_from([0.0, 0.02]),
    first=st.sampled_from([0.0, 0.2]),
)
def test_no_depths_give_more_tokens_per_second(
    rates: list[list[float]], steps: list[float], least_gain: float, fixed: float, per_token: float, first: float
) -> None:
    chances_of, seconds = [chances(row) for row in rates], [1.0]
    for step in steps:
        seconds.append(seconds[-1] + step)
    found = best_depths(chances_of, seconds, lambda n: fixed + per_token * n, least_gain, first)
    every = [d for d in product(*(range(len(row) + 1) for row in rates)) if sum(d) < len(seconds)]
    best = max(rate(depths, chances_of, seconds, fixed, per_token, first) for depths in every)
    if any(found):
        assert sum(found) < len(seconds)
        assert rate(found, chances_of, seconds, fixed, per_token, first) == pytest.approx(best)
    else:
        assert best <= (1 + least_gain) * len(rates) * (1 + 1e-9)


def test_rates_follow_what_held_and_begin_where_they_are_expected() -> None:
    acceptance = Acceptance(memory=10)
    prior = [0.8, 0.5, 0.5]
    assert acceptance.rates(prior, 4) == prior
    for _ in range(200):
        acceptance.add(3, 1)  # the first holds, the second does not, and the third was not tried
    first, second, third = acceptance.rates(prior, 4)
    assert (first, second, third) == pytest.approx(((10 + 4 * 0.8) / 14, 4 * 0.5 / 14, 0.5))


def acceptance_of(num_tried: int, num_held: int) -> Acceptance:
    acceptance = Acceptance(memory=1e9)
    for number in range(num_tried):
        acceptance.add(1, int(number < num_held))
    return acceptance


@pytest.mark.parametrize(
    ("held", "rate", "weight"),
    [
        ((16, 15, 18, 17, 14, 16, 17, 15), 0.8, MOST_WEIGHT),
        ((20, 20, 20, 20, 0, 0, 1, 0), 0.5, LEAST_WEIGHT),
        ((19, 2, 3, 1, 2, 3, 2, 2), 0.2, LEAST_WEIGHT),
        ((16,), 0.8, LEAST_WEIGHT),
        ((), 0.8, LEAST_WEIGHT),
    ],
)
def test_requests_that_are_alike_share_their_rates(held: Sequence[int], rate: float, weight: float) -> None:
    """Of 20 drafts of each. One request, or none, says nothing of others."""
    assert prior_weight([acceptance_of(20, count) for count in held], rate) == weight


@pytest.mark.parametrize(("weight", "num_drafts"), [(12, 60), (20, 20), (40, 150)])
def test_the_weight_of_the_rate_of_all_is_found_again(weight: int, num_drafts: int) -> None:
    """Rates of requests are drawn from a beta distribution with a weight of `weight` drafts. Old ones are forgotten."""
    draw, requests = Random(0), []
    for _ in range(3000):
        own, acceptance = draw.betavariate(0.7 * weight, 0.3 * weight), Acceptance(MEMORY)
        for _ in range(num_drafts):
            acceptance.add(1, int(draw.random() < own))
        requests.append(acceptance)
    assert prior_weight(requests, 0.7) == pytest.approx(weight, rel=0.08)


def steps_of(rows: Sequence[int], costs: Sequence[float]) -> StepSeconds:
    """Seconds by rows, as a line through these points: (rows, seconds)."""

    def seconds(num_tokens: int) -> float:
        for (low, low_cost), (high, high_cost) in pairwise(points):
            if num_tokens <= high:
                return low_cost + (high_cost - low_cost) * (num_tokens - low) / (high - low)
        return points[-1][1] * num_tokens / points[-1][0]

    points = list(zip(rows, costs, strict=True))
    return lambda starts, most: [seconds(len(starts) + count) for count in range(most + 1)]


# Seconds of a 0.6B model with two cores, by rows, about: bfloat16 and int4. And a batch bound by arithmetic.
BFLOAT16 = steps_of([1, 8, 16, 32, 128], [18.6e-3, 19.3e-3, 22e-3, 40e-3, 141e-3])
INT4 = steps_of([1, 8, 16, 32, 128], [8.7e-3, 10.6e-3, 14e-3, 27e-3, 100e-3])
# Int4 without a matrix unit: the time follows the rows from the second one on.
VECTORS = steps_of([1, 8, 16, 32, 128], [11e-3, 18e-3, 30e-3, 55.5e-3, 225e-3])
# Bfloat16 without a matrix unit: six rows are computed together, and 24 rows fill their tiles.
FEW_ROWS = steps_of([1, 6, 8, 16, 24, 32, 64], [35e-3, 38e-3, 50e-3, 67e-3, 79e-3, 105e-3, 214e-3])
ARITHMETIC = steps_of([1, 1000], [1e-3, 1.0])
CHEAP = steps_of([1, 1000], [20e-3, 120e-3])
LOST = 0.1  # of a step that waits for the tokens of the one before, with two steps in flight


class Stream:
    """Requests whose drafts are found and hold with known chances. It counts the tokens and the seconds.

    With two steps in flight, a newest token is known only in a step that has waited for it.
    """

    def __init__(
        self,
        num_requests: int,
        rates: Sequence[float],
        step_seconds: StepSeconds,
        draft_seconds: DrafterTime | None = None,
        steps_in_flight: int = 1,
        found: Sequence[float] | None = None,
    ) -> None:
        self.is_known, self.steps_in_flight, self.num_waits = True, steps_in_flight, 0
        self.found = [1.0] * num_requests if found is None else found
        self.requests = [
            Request(f"r{i}", [0], SamplingParams(), 10**6, frozenset(), output_token_ids=[0])
            for i in range(num_requests)
        ]
        self.rates, self.draft_seconds = rates, draft_seconds
        self.seconds_of = step_seconds([50] * num_requests, MOST * num_requests)
        self.random = Random(0)
        self.extra_seconds: Callable[[], float] = lambda: 0.0  # of a step

    def run(
        self,
        num_steps: int,
        choose: Callable[[], Sequence[int]],
        settle: Callable[[Request, int, int], None] = lambda request, depth, held: None,
    ) -> float:
        """Tokens per second of these steps."""
        tokens, seconds = 0, 0.0
        for _ in range(num_steps):
            depths = list(choose())
            has_waited = self.steps_in_flight > 1 and self.is_known
            seconds += self.seconds_of[sum(depths)] + LOST * self.seconds_of[0] * has_waited
            seconds += self.extra_seconds()
            self.num_waits += has_waited
            if self.draft_seconds is not None:
                seconds += self.draft_seconds.of_step(depths)
            for request, depth in zip(self.requests, depths, strict=True):
                held = 0
                while held < depth and self.random.random() < self.rates[held]:
                    held += 1
                tokens += 1 + held
                request.output_token_ids.extend([0] * (1 + held))
                if depth:
                    settle(request, depth, held)
        return tokens / seconds

    def adaptive(self, adaptive: AdaptiveDepth) -> Callable[[], Sequence[int]]:
        def choose() -> Sequence[int]:
            self.is_known = self.steps_in_flight == 1 or adaptive.waits
            depths = [0] * len(self.requests)
            if adaptive.begin_step(self.requests, MOST, MOST * len(self.requests)) and self.is_known:
                for index, request in enumerate(self.requests):
                    depth = adaptive.depth(request, MOST)
                    if depth and self.random.random() < self.found[index]:
                        depths[index] = depth
                        adaptive.drafted(request, depth)
            return depths

        return choose


Case = tuple[int, Sequence[float], StepSeconds, DrafterTime | None]


def adaptive_rate(num_steps: int, case: Case) -> float:
    """Tokens per second."""
    adaptive, stream = AdaptiveDepth(case[2], case[3]), Stream(*case)
    return stream.run(num_steps, stream.adaptive(adaptive), adaptive.settle)


def fixed_rate(num_steps: int, case: Case, depth: int) -> float:
    """Tokens per second with that depth in all steps."""
    return Stream(*case).run(num_steps, lambda: [depth] * case[0])


COSTS = {"bfloat16": BFLOAT16, "int4": INT4, "arithmetic": ARITHMETIC}
DRAFTERS = {"text": None, "model": DrafterTime(2.5e-3)}


@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("costs", COSTS)
def test_a_drafter_that_is_always_wrong_costs_little(costs: str, drafter: str, num_requests: int) -> None:
    case = num_requests, [0.0] * MOST, COSTS[costs], DRAFTERS[drafter]
    assert adaptive_rate(300, case) > 0.98 * fixed_rate(300, case, 0)


@pytest.mark.parametrize("error", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.74])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("costs", "num_requests"), [("int4", 1), ("int4", 8), ("bfloat16", 8), ("arithmetic", 8)])
def test_short_answers_lose_at_most_four_steps_though_costs_of_drafts_are_not_known_yet(
    costs: str, num_requests: int, drafter: str, acceptance: float, error: float
) -> None:
    """The time of steps with drafts is predicted with an error, until eight of them were measured."""

    def predicted(starts: Sequence[int], most: int) -> list[float]:
        seconds, factor = COSTS[costs](starts, most), error if num_measured < 8 else 1.0
        return [seconds[0], *(seconds[0] + factor * (later - seconds[0]) for later in seconds[1:])]

    def settle(request: Request, depth: int, held: int) -> None:
        nonlocal num_measured
        num_measured += request is stream.requests[0]
        adaptive.settle(request, depth, held)

    case, num_measured = (num_requests, [acceptance] * MOST, COSTS[costs], DRAFTERS[drafter]), 0
    adaptive, stream = AdaptiveDepth(predicted, case[3]), Stream(*case)
    assert stream.run(96, stream.adaptive(adaptive), settle) > 0.96 * fixed_rate(96, case, 0)


@pytest.mark.parametrize(
    ("costs", "drafter", "num_requests", "acceptance"),
    covering(["bfloat16", "int4"], [*DRAFTERS], [1, 2, 8], [0.1, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0]),
)
def test_depths_are_nearly_as_fast_as_the_best_fixed_one(
    costs: str, drafter: str, num_requests: int, acceptance: float
) -> None:
    """Also near the break-even, where a model that drafts has to be tried to be known."""
    case, num_steps = (num_requests, [acceptance] * MOST, COSTS[costs], DRAFTERS[drafter]), 2400 // num_requests
    best = max(fixed_rate(num_steps, case, depth) for depth in range(MOST + 1))
    found = adaptive_rate(num_steps, case)
    assert found > 0.95 * best
    assert found > 0.98 * fixed_rate(num_steps, case, 0)


@pytest.mark.parametrize(("num_requests", "slow"), [(8, (17, 32)), (1, (5, 8))])
@pytest.mark.parametrize("acceptance", [0.74, 0.8, 0.86])
def test_a_size_that_is_believed_to_take_too_long_is_tried(
    acceptance: float, num_requests: int, slow: tuple[int, int]
) -> None:
    """Steps of `slow` numbers of rows are predicted a seventh too long, until one of them has run. Measured: bfloat16
    without a matrix unit. The best depth has such a step.
    """
    is_known = False

    def predicted(starts: Sequence[int], most: int) -> list[float]:
        seconds = FEW_ROWS(starts, most)
        longer = [
            each * (1.15 if slow[0] <= len(starts) + count <= slow[1] and not is_known else 1.0)
            for count, each in enumerate(seconds)
        ]
        return [max(longer[: count + 1]) for count in range(most + 1)]

    def run(num_steps: int) -> float:
        nonlocal is_known
        rates = []
        for _ in range(num_steps):
            depths = choose()
            rates.append(1 / stream.run(1, lambda depths=depths: depths, adaptive.settle))
            is_known |= slow[0] <= num_requests + sum(depths) <= slow[1]
        return len(rates) / sum(rates)

    case = num_requests, [acceptance] * MOST, FEW_ROWS, DrafterTime(3.3e-3)
    adaptive, stream = AdaptiveDepth(predicted, DrafterTime(3.3e-3)), Stream(*case)
    choose = stream.adaptive(adaptive)
    run(60)
    assert is_known
    best = max(range(MOST + 1), key=lambda depth: fixed_rate(400, case, depth))
    assert slow[0] <= num_requests * (1 + best) <= slow[1]


def test_one_more_draft_that_no_text_gives_is_not_asked_for_again_at_once() -> None:
    """Half of the requests find nothing, so no step has the size that is tried."""
    num_looks, asked = 0, list[int]()

    def counted(starts: Sequence[int], most: int) -> list[float]:
        nonlocal num_looks
        num_looks += 1
        return FEW_ROWS(starts, most)

    stream = Stream(8, [0.8, *[0.1] * (MOST - 1)], FEW_ROWS, found=[1.0, 0.0] * 4)
    adaptive = AdaptiveDepth(counted)
    choose = stream.adaptive(adaptive)

    def noted() -> Sequence[int]:
        depths = choose()
        asked.append(adaptive._further)
        return depths

    stream.run(640, noted, adaptive.settle)
    assert 0 < sum(asked) <= 20
    assert num_looks <= 64


@pytest.mark.parametrize("acceptance", [0.6, 0.7, 0.77, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_drafts_have_gained_is_not_lost_where_they_do_not_pay(drafter: str, acceptance: float) -> None:
    """Drafts of one request pay, and then eight requests come whose drafts do not."""
    rates = [acceptance] * MOST
    alone = Stream(1, rates, VECTORS, DRAFTERS[drafter])
    adaptive = AdaptiveDepth(VECTORS, DRAFTERS[drafter])
    alone.run(200, alone.adaptive(adaptive), adaptive.settle)
    adaptive.forget(alone.requests[0].request_id)
    case = 8, rates, VECTORS, DRAFTERS[drafter]
    together = Stream(*case)
    found = together.run(64, together.adaptive(adaptive), adaptive.settle)
    assert found > 0.98 * fixed_rate(64, case, 0)


@pytest.mark.parametrize("costs", [INT4, VECTORS, BFLOAT16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_one_request_has_saved_is_not_spent_at_once_by_others(drafter: str, costs: StepSeconds) -> None:
    """The drafts of nobody hold. A long answer leaves time for trials, and eight short ones come, each with a prompt
    that the drafter would have to read.
    """
    time_of = DRAFTERS[drafter]
    alone, adaptive = Stream(1, [0.0] * MOST, costs, time_of), AdaptiveDepth(costs, time_of)
    alone.run(3000, alone.adaptive(adaptive), adaptive.settle)
    adaptive.forget(alone.requests[0].request_id)
    together = Stream(8, [0.0] * MOST, costs, time_of)
    together.extra_seconds = lambda: adaptive.reading_seconds
    for request in together.requests:
        request.prompt_token_ids = [0] * 40
        adaptive.admit(request, 0)
    found = together.run(64, together.adaptive(adaptive), adaptive.settle)
    assert found > 0.97 * fixed_rate(64, (8, [0.0] * MOST, costs, None), 0)


@pytest.mark.parametrize("costs", [INT4, BFLOAT16])
def test_a_long_answer_saves_for_its_own_trial_while_others_come_and_go(costs: StepSeconds) -> None:
    """A drafter would have to read its long prompt, for more than is kept when the number of requests changes. The
    others' prompts are as long, and their answers short.
    """
    drafter = DrafterTime(1.7e-3)
    stream, adaptive = Stream(2, [0.0] * MOST, costs, drafter), AdaptiveDepth(costs, drafter)
    stream.extra_seconds = lambda: adaptive.reading_seconds
    (old, guest), num_guests, off = stream.requests, 0, fixed_rate(1, (1, [0.0], costs, None), 0)
    old.prompt_token_ids = [0] * 1000
    choose = stream.adaptive(adaptive)

    def run(num_turns: int) -> float:
        """The mean tokens per second."""
        nonlocal num_guests
        rates = []
        for turn in range(num_turns):
            stream.requests = [old]
            if turn % 2:
                num_guests += 1
                name = f"guest {num_guests}"
                stream.requests.append(
                    replace(guest, request_id=name, prompt_token_ids=[0] * 1000, output_token_ids=[0])
                )
                adaptive.admit(stream.requests[1], 0)
            stream.seconds_of = costs([50] * len(stream.requests), MOST * len(stream.requests))
            rates.append(stream.run(20, choose, adaptive.settle) / len(stream.requests))
            if turn % 2:
                adaptive.forget(stream.requests[1].request_id)
        return sum(rates) / num_turns

    adaptive.admit(old, 0)
    assert run(200) > 0.9 * off
    stream.rates = [0.9] * MOST
    run(100)
    assert run(20) > 1.3 * off


def test_what_is_kept_apart_is_bounded() -> None:
    """The number of requests changes often, and nobody drafts."""
    stream, adaptive = Stream(2, [0.0] * MOST, INT4), AdaptiveDepth(INT4)
    base, running = INT4([50], 0)[0], stream.requests
    choose = stream.adaptive(adaptive)
    for turn in range(40):
        stream.requests = running[: 1 + turn % 2]
        stream.seconds_of = INT4([50] * len(stream.requests), MOST * len(stream.requests))
        stream.run(1200, choose, adaptive.settle)
        assert 0 <= adaptive._kept_apart <= MOST_SAVED * base * 1.3
    assert adaptive._kept_apart > 0


def test_a_request_saves_for_its_trial_from_its_last_drafts_on() -> None:
    """It has drafted for long. Then it has lost its blocks, and its drafts do not pay any more: a trial would read all
    of its tokens. What was kept apart while it drafted is not its own.
    """
    drafter = DrafterTime(1.7e-3)
    stream, adaptive = Stream(1, [0.95] * MOST, INT4, drafter), AdaptiveDepth(INT4, drafter)
    (request,) = stream.requests
    choose = stream.adaptive(adaptive)
    stream.run(2000, choose, adaptive.settle)
    stream.rates = [0.0] * MOST
    while any(depths := choose()):
        stream.run(1, lambda depths=depths: depths, adaptive.settle)
    request.prompt_token_ids, request.output_token_ids, request.max_tokens = [0] * 1000, [0], 20
    adaptive.admit(request, 0)
    adaptive._credit, adaptive._kept_apart = 0.0, 1.0
    waited = next(count for count in range(10**6) if any(choose()))
    assert waited * adaptive._share * INT4([50], 0)[0] > 0.4 * drafter(1000)


@pytest.mark.parametrize(("share", "is_on"), [(0.69, False), (0.9, True)])
def test_a_small_gain_is_no_reason_to_draft_for_more_requests(share: float, is_on: bool) -> None:
    """Drafts of one request pay. With eight requests, one draft each would gain 2 % or 14 %."""
    adaptive, (alone,) = AdaptiveDepth(VECTORS), Stream(1, [], VECTORS).requests
    for number in range(200):
        assert adaptive.begin_step([alone], 1, 1)
        assert adaptive.depth(alone, 1) == 1
        adaptive.drafted(alone, 1)
        adaptive.settle(alone, 1, int(number * share % 1 < share))
    adaptive.forget(alone.request_id)
    adaptive._credit = 0.0
    adaptive.begin_step(Stream(8, [], VECTORS).requests, 1, 8)
    assert (adaptive._most_depth > 0) == is_on


@pytest.mark.parametrize("acceptance", [0.7, 0.85])
def test_trials_are_rare_where_their_outcome_is_known(acceptance: float) -> None:
    """Most of them hold, as expected, and yet drafts do not pay."""
    drafter, num_drafts = DrafterTime(1.6e-3), 0
    stream, adaptive = Stream(8, [acceptance] * MOST, VECTORS, drafter), AdaptiveDepth(VECTORS, drafter)

    def settle(request: Request, depth: int, held: int) -> None:
        nonlocal num_drafts
        num_drafts += depth
        adaptive.settle(request, depth, held)

    choose = stream.adaptive(adaptive)
    stream.run(200, choose, settle)
    num_drafts = 0
    stream.run(1000, choose, settle)
    assert 0 < num_drafts < 40


@pytest.mark.parametrize("num_tokens", [64, 200])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.6])
def test_answers_after_others_lose_little_where_drafts_do_not_pay(acceptance: float, num_tokens: int) -> None:
    """Eight answers at a time, of the same length: a draft that held gains nothing if another request ends later."""
    drafter = DrafterTime(2e-3)
    adaptive = AdaptiveDepth(INT4, drafter, reads_late=False)
    stream = Stream(8, [acceptance] * MOST, INT4, drafter)
    seconds, plain, requests, off = 0.0, 0.0, stream.requests, INT4([50] * 8, 0)[0]
    for turn in range(40):
        stream.requests = [
            replace(request, request_id=f"{turn}-{index}", output_token_ids=[0], max_tokens=num_tokens)
            for index, request in enumerate(requests)
        ]
        taken = 0.0
        while stream.requests:
            count = len(stream.requests)
            stream.seconds_of, stream.found = INT4([50] * count, MOST * count), [1.0] * count
            before = sum(len(request.output_token_ids) for request in stream.requests)
            rate = stream.run(1, stream.adaptive(adaptive), adaptive.settle)
            taken += (sum(len(request.output_token_ids) for request in stream.requests) - before) / rate
            for request in [each for each in stream.requests if len(each.output_token_ids) >= num_tokens]:
                stream.requests.remove(request)
                adaptive.forget(request.request_id)
        if turn >= 8:
            seconds, plain = seconds + taken, plain + off * (num_tokens - 1)
    assert plain > 0.988 * seconds


def test_a_new_request_tries_later_where_others_have_tried() -> None:
    drafter, is_known = DrafterTime(1.6e-3), False
    adaptive = AdaptiveDepth(VECTORS, drafter)
    for _ in range(3):
        drafted, stream = list[bool](), Stream(8, [0.7] * MOST, VECTORS, drafter)
        choose = stream.adaptive(adaptive)
        for _ in range(300):
            depths = choose()
            drafted.append(any(depths))
            stream.run(1, lambda depths=depths: depths, adaptive.settle)
        for request in stream.requests:
            adaptive.forget(request.request_id)
        assert any(drafted)
        assert any(drafted[:16]) != is_known
        is_known = True


@pytest.mark.parametrize("num_others", [0, 2])
def test_a_request_in_the_place_of_another_drafts_from_its_first_step(num_others: int) -> None:
    """The number of running requests stays the same. The one before was too short to draft."""

    def begin(name: str, num_tokens: int, max_tokens: int) -> Request:
        request = Request(name, [0] * num_tokens, SamplingParams(), max_tokens, frozenset(), output_token_ids=[0])
        adaptive.admit(request, 0)
        return request

    def step(running: Sequence[Request]) -> list[int]:
        may_draft = adaptive.begin_step(running, MOST, MOST * len(running))
        depths = [adaptive.depth(request, MOST) if may_draft else 0 for request in running]
        for request, depth in zip(running, depths, strict=True):
            if depth:
                adaptive.drafted(request, depth)
                adaptive.settle(request, depth, depth)
        return depths

    adaptive = AdaptiveDepth(BFLOAT16, DrafterTime(2.5e-3))
    running = [begin(f"other {index}", 50, 400) for index in range(1 + num_others)]
    for _ in range(200):
        step(running)
    for num_tokens, max_tokens in ((2000, 4), (50, 400)):
        for request in running:
            adaptive.forget(request.request_id)
        running = [begin(f"{num_tokens}-{index}", num_tokens, max_tokens) for index in range(1 + num_others)]
        for _ in range(3):
            depths = step(running)
            assert all(depths) == any(depths) == (num_tokens == 50)


@pytest.mark.parametrize(
    ("drafter", "num_prompt_tokens", "count"),
    [
        ("text", 0, 8),
        ("text", 1000, 8),
        ("text", 320, 3),
        ("text", 99, 0),
        ("model", 0, 8),
        ("model", 1000, 5),
        ("model", 400, 1),
        ("model", 380, 0),
    ],
)
def test_drafts_beside_a_prompt_take_at_most_a_hundredth_of_the_step(
    drafter: str, num_prompt_tokens: int, count: int
) -> None:
    """A token of a prompt takes 1 ms, and so does a draft. A drafter in the worker takes its time too. Eight requests
    would draft one token each.
    """
    time_of, requests = DRAFTERS[drafter], Stream(8, [], BFLOAT16).requests
    adaptive = AdaptiveDepth(BFLOAT16, time_of, beside_prompts=lambda count: (1e-3 * count, 1e-3))

    def seconds(depths: Sequence[int]) -> float:
        return 1e-3 * sum(depths) + (0.0 if time_of is None else time_of.of_step(depths))

    for _ in range(20):
        depths: list[int] = []
        if adaptive.begin_step(requests, 7, 56, lambda: num_prompt_tokens):
            for request in requests:
                if (depth := adaptive.depth(request, 7)) > 0:
                    adaptive.drafted(request, depth)
                    depths.append(depth)
        assert sum(depths) == count or (num_prompt_tokens == 0 and sum(depths) == 2 * count)  # one more is tried
        assert depths or not adaptive.waits, "a step without drafts waits for no tokens"
        if num_prompt_tokens:
            assert seconds(depths) <= 1e-5 * num_prompt_tokens * (1 + 1e-9)
            assert count == 8 or seconds([*depths, 1]) > 1e-5 * num_prompt_tokens, "there was room for another"
        adaptive._depths.clear()


@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_drafts_that_cannot_pay_are_not_tried(num_requests: int) -> None:
    """Where a step takes as long as it has tokens."""
    case = num_requests, [1.0] * MOST, ARITHMETIC, DRAFTERS["model"]
    assert adaptive_rate(100, case) == fixed_rate(100, case, 0)


@pytest.mark.parametrize("costs", ["bfloat16", "int4"])
def test_an_old_request_drafts_again_after_a_long_time_without(costs: str) -> None:
    """Even though a drafter in the worker has to read all missing tokens, which are more with every step."""
    drafter = {"bfloat16": 2.5e-3, "int4": 1.7e-3}[costs]
    stream = Stream(1, [0.0] * MOST, COSTS[costs], DrafterTime(drafter))
    adaptive = AdaptiveDepth(COSTS[costs], DrafterTime(drafter))
    choose = stream.adaptive(adaptive)
    off = fixed_rate(1, (1, [0.0], COSTS[costs], None), 0)
    stream.extra_seconds = lambda: adaptive.reading_seconds
    assert stream.run(6000, choose, adaptive.settle) > 0.98 * off
    stream.rates = [0.9] * MOST
    stream.run(1500, choose, adaptive.settle)
    assert stream.run(200, choose, adaptive.settle) > 1.3 * off


def test_a_text_that_becomes_predictable_is_drafted_again() -> None:
    case = 1, [0.0] * MOST, INT4, None
    adaptive, stream = AdaptiveDepth(INT4), Stream(*case)
    choose = stream.adaptive(adaptive)
    stream.run(300, choose, adaptive.settle)
    stream.rates = [0.95] * MOST
    assert stream.run(200, choose, adaptive.settle) > 0.8 * fixed_rate(200, (1, stream.rates, INT4, None), MOST)


@pytest.mark.parametrize("num_requests", [1, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("found", [1.0, 0.1, 0.0])
def test_waiting_for_wrong_drafts_costs_little(found: float, drafter: str, num_requests: int) -> None:
    case = num_requests, [0.0] * MOST, INT4, DRAFTERS[drafter]
    stream, adaptive = Stream(*case, 2, [found] * num_requests), AdaptiveDepth(INT4, DRAFTERS[drafter], 2)
    assert stream.run(1000, stream.adaptive(adaptive), adaptive.settle) > 0.98 * fixed_rate(1, case, 0)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("costs", ["bfloat16", "int4"])
def test_trials_become_rare_where_none_has_held(costs: str, drafter: str, num_requests: int) -> None:
    """And yet a text that becomes predictable is found."""
    case = num_requests, [0.0] * MOST, COSTS[costs], DRAFTERS[drafter]
    stream, adaptive = Stream(*case), AdaptiveDepth(COSTS[costs], DRAFTERS[drafter], reads_late=False)
    choose = stream.adaptive(adaptive)
    stream.run(2000, choose, adaptive.settle)
    assert stream.run(4000, choose, adaptive.settle) > 0.995 * fixed_rate(1, case, 0)
    stream.rates = [0.95] * MOST
    stream.run(400, choose, adaptive.settle)
    best = max(fixed_rate(200, (num_requests, stream.rates, *case[2:]), depth) for depth in range(1, MOST + 1))
    assert stream.run(200, choose, adaptive.settle) > 0.85 * best


@pytest.mark.parametrize("news", ["ends", "is admitted", "settles", "stops"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_most_steps_without_drafts_ask_for_nothing(drafter: str, news: str) -> None:
    """Neither for the tokens of prompts, nor for the state of each request. News are seen at once, each by itself."""
    stream, adaptive = Stream(8, [0.0] * MOST, INT4, DRAFTERS[drafter]), AdaptiveDepth(INT4, DRAFTERS[drafter])
    stream.run(1000, stream.adaptive(adaptive), adaptive.settle)
    asked = list[int]()

    def count() -> int:
        asked.append(adaptive._step)
        return 0

    def step() -> None:
        if adaptive.begin_step(stream.requests, MOST, 8 * MOST, count):
            for request in stream.requests:
                if adaptive.depth(request, MOST):
                    adaptive.drafted(request, 1)
                    adaptive.settle(request, 1, 0)

    for _ in range(1000):
        step()
    assert 0 < len(asked) < 200
    while not adaptive._is_idle or adaptive._step + 2 >= min(adaptive._next_look, adaptive._next_search):
        step()
    asked.clear()
    step()
    assert not asked
    if news == "ends":  # and another request, which was admitted before, takes its place
        adaptive.forget("r0")
        stream.requests[0] = replace(stream.requests[0], request_id="another", output_token_ids=[0])
    elif news == "is admitted":  # in place of one that was preempted
        adaptive.admit(stream.requests[0], 0)
    elif news == "settles":
        adaptive.settle(stream.requests[0], 1, 0)
    else:
        adaptive.stop(stream.requests[0])
    step()
    assert len(asked) == 1


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("found", [1.0, 0.1, 0.0])
def test_drafts_worth_waiting_for_are_found_out(found: float, num_requests: int) -> None:
    stream, adaptive = (
        Stream(num_requests, [0.0] * MOST, INT4, None, 2, [found] * num_requests),
        AdaptiveDepth(INT4, None, 2),
    )
    choose = stream.adaptive(adaptive)
    stream.run(1000, choose, adaptive.settle)
    stream.rates, stream.found = [0.95] * MOST, [1.0] * num_requests
    stream.run(200, choose, adaptive.settle)
    best = max(fixed_rate(100, (num_requests, stream.rates, INT4, None), depth) for depth in range(MOST + 1))
    assert stream.run(100, choose, adaptive.settle) > 0.8 * best


@pytest.mark.parametrize(("longest", "least", "total"), [(MOST, 3, 8), (1, 1, 2)])
def test_drafts_that_are_not_found_are_left_to_other_requests_if_they_probably_hold(
    longest: int, least: int, total: int
) -> None:
    """Two of four requests find nothing, and the step has room for two drafts of each."""
    room, requests, draw = 8, Stream(4, [], BFLOAT16).requests, Random(0)
    adaptive = AdaptiveDepth(lambda starts, most: [1 + 0.02 * count for count in range(most + 1)])
    for _ in range(40):
        left, found = room, list[int]()
        assert adaptive.begin_step(requests, MOST, room)
        for index, request in enumerate(requests):
            depth = adaptive.depth(request, left) if left else 0
            if depth and index % 2:
                adaptive.drafted(request, depth)
                held = next((at for at in range(min(depth, longest)) if draw.random() > 0.8), min(depth, longest))
                adaptive.settle(request, depth, held)
                found.append(depth)
                left -= depth
    assert len(found) == 2
    assert (min(found) >= least, sum(found)) == (True, total)


def test_one_request_whose_drafts_hold_is_worth_waiting_for_beside_many_without_drafts() -> None:
    stream = Stream(16, [0.95] * MOST, CHEAP, None, 2, [1.0] + [0.0] * 15)
    adaptive = AdaptiveDepth(CHEAP, None, 2)
    stream.run(400, stream.adaptive(adaptive), adaptive.settle)
    assert stream.num_waits > 0.8 * 400


def test_what_is_read_of_a_request_follows_its_blocks() -> None:
    def step() -> None:
        assert adaptive.begin_step(requests, MOST, MOST * len(requests))
        for request in requests:
            if depth := adaptive.depth(request, MOST):
                adaptive.drafted(request, depth)
                is_drafted.append(request.request_id)

    drafter, is_drafted = DrafterTime(2.5e-3), list[str]()
    adaptive = AdaptiveDepth(BFLOAT16, drafter)
    requests = [Request("a", [0] * 50, SamplingParams(), 99, frozenset(), output_token_ids=[0])]
    adaptive.admit(requests[0], 0)
    for seconds in (drafter(51), drafter.of_step([1])):  # it reads, which says nothing of drafts; and it only drafts
        step()
        adaptive.settle_drafter(seconds, [1])
        assert drafter(1) == pytest.approx(2.5e-3)
    for name, num_cached in (("cached", 1990), ("long", 0)):
        requests.append(Request(name, [0] * 2000, SamplingParams(), 5, frozenset(), output_token_ids=[0]))
        adaptive.admit(requests[-1], num_cached)
    is_drafted.clear()
    step()
    assert is_drafted == ["a", "cached"]
    adaptive.settle_drafter(2.5e-3, [1])
    adaptive.admit(requests[0], 0)  # it was preempted
    requests[1:] = []
    step()
    adaptive.settle_drafter(1.0, [1])
    assert drafter(1) == pytest.approx(2.5e-3)


def test_a_drafter_that_raises_while_it_reads_says_nothing_of_later_steps() -> None:
    drafter = DrafterTime(2.5e-3)
    adaptive = AdaptiveDepth(BFLOAT16, drafter)
    read = Request("a", [0] * 50, SamplingParams(), 99, frozenset(), output_token_ids=[0])
    adaptive.admit(read, 0)
    for seconds in (None, 5e-3, 5e-3):
        assert adaptive.begin_step([read], MOST, MOST)
        adaptive.drafted(read, adaptive.depth(read, MOST))
        adaptive.settle_drafter(seconds, [1])
    assert drafter(1) > 2.5e-3, "only later steps were measured, and they read nothing"


@pytest.mark.parametrize("reads_late", [False, True])
def test_the_first_drafts_of_a_request_show_what_a_head_takes(reads_late: bool) -> None:
    """Each request drafts once. A draft model reads in such a step, so it shows less there."""
    drafter, stream = DrafterTime(1e-3), Stream(1, [], INT4)
    adaptive = AdaptiveDepth(INT4, drafter, reads_late=reads_late)
    for number in range(9):
        request = replace(stream.requests[0], request_id=f"r{number}")
        adaptive.admit(request, 0)
        adaptive.begin_step([request], MOST, MOST)
        adaptive.drafted(request, 1)
        adaptive.settle(request, 1, 0)
        adaptive.settle_drafter(3e-3, [1])
        adaptive.forget(request.request_id)
    assert drafter.of_step([1]) == pytest.approx(1e-3 * (1 + 2 / 16) if reads_late else 3e-3)


def test_a_drafter_does_not_read_a_long_prompt_for_a_short_answer() -> None:
    drafter = DRAFTERS["model"]
    for length, max_tokens, is_drafted in ((2000, 4, False), (2000, 400, True), (8000, 40, False), (8000, 4000, True)):
        adaptive = AdaptiveDepth(BFLOAT16, drafter)
        request = Request("a", [0] * length, SamplingParams(), max_tokens, frozenset(), output_token_ids=[0])
        assert adaptive.begin_step([request], MOST, MOST) == is_drafted


def test_requests_that_draft_no_more_are_not_waited_for() -> None:
    adaptive, stream = AdaptiveDepth(BFLOAT16, steps_in_flight=2), Stream(2, [1.0] * MOST, BFLOAT16)
    speculation = Speculation(DraftedByWorker(), MOST, (), adaptive, max_tokens=200, waits=True)
    beyond, failing = stream.requests
    while beyond.num_tokens <= 200:
        assert speculation.begin_step(stream.requests, 2 * MOST)
        for request in stream.requests:
            num_drafts = len(speculation.propose(request, MOST))
            assert num_drafts <= 201 - request.num_tokens
            speculation.settle(request, 0, num_drafts, StepResult(0, [[7] * (num_drafts + 1)]))
            request.output_token_ids.extend([0] * (1 + num_drafts))
    assert speculation.waits
    failing.output_token_ids.clear()
    speculation.fail(failing, "no reason")
    assert not speculation.propose(beyond, MOST)
    assert not speculation.propose(failing, MOST)
    assert speculation.begin_step(stream.requests, 2 * MOST) == 0
    assert not speculation.waits


def test_a_trial_pays_for_what_its_drafter_has_read() -> None:
    """A prompt that is read in two steps costs the same as in one."""
    drafter, spent = DRAFTERS["model"], []
    assert drafter is not None
    for num_unread in (0, 100):
        adaptive = AdaptiveDepth(BFLOAT16, drafter)
        request = Request("a", [0] * 200, SamplingParams(), 2, frozenset(), output_token_ids=[0])
        for _ in range(1000):
            adaptive.begin_step([request], MOST, MOST)
        assert adaptive.depth(request, MOST) == 1
        before = adaptive._credit
        adaptive.drafted(request, 1)
        adaptive.read_later(request, num_unread)
        spent.append(before - adaptive._credit)
    assert spent[0] - spent[1] == pytest.approx(drafter(100))


def test_what_is_on_and_off_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        adaptive = AdaptiveDepth(BFLOAT16)
        adaptive.begin_step(Stream(1, [0.0], BFLOAT16).requests, MOST, MOST)
    (line,) = caplog.messages
    assert line == (
        "Drafts are on, up to 7 each, with 1 running requests: 60 % of the first drafts hold, and a step that takes "
        "18.6 ms takes 19.3 ms with 7 drafts."
    )


def test_a_change_of_depth_is_logged_with_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    """All drafts of the first position hold, and no others."""
    stream, adaptive = Stream(1, [1.0, *[0.0] * (MOST - 1)], BFLOAT16), AdaptiveDepth(BFLOAT16)
    with caplog.at_level("INFO"):
        stream.run(40, stream.adaptive(adaptive), adaptive.settle)
    first, second, *_ = caplog.messages
    assert first.startswith("Drafts are on, up to 7 each, with 1 running requests: 60 % of the first drafts hold")
    assert second.startswith("Drafts are on, up to 6 each, with 1 running requests: ")


def test_a_drafter_is_known_by_its_steps() -> None:
    drafter = DrafterTime(20e-3)
    for number in range(60):
        drafter.observe(30e-3 if number % 3 == 0 else 7e-3, [2, 0, 1])  # two rows, and then one; some are recorded
    of_one = 7e-3 / (17 / 16 + 1 + drafter.reading(2) / drafter(1))
    assert drafter(1) == pytest.approx(of_one)
    assert drafter.of_step([2, 0, 1]) == pytest.approx(7e-3)
    assert drafter(17) == pytest.approx(2 * drafter(1))


def test_what_reading_costs_is_learned() -> None:
    """Here 124 tokens take 28 ms, which is far more than one token would suggest."""
    drafter = DrafterTime(1.7e-3)
    for number in range(60):
        drafter.observe_reading(28e-3 if number % 3 else 80e-3, [1, 1, 1, 1], 124)  # some are recorded
        drafter.observe(2.9e-3, [1, 1, 1, 1])
    assert drafter(124) == pytest.approx(28e-3, rel=0.15)
    assert drafter.of_step([1, 1, 1, 1]) == pytest.approx(2.9e-3, rel=0.05)


def test_what_a_drafter_really_takes_is_paid() -> None:
    """Every third of its steps is recorded and takes 30 ms longer, which no prediction tells."""
    drafter, num_trials = DrafterTime(2.5e-3), 0
    stream, adaptive = Stream(1, [0.0] * MOST, INT4), AdaptiveDepth(INT4, drafter, reads_late=False)
    seconds = 0.0
    stream.extra_seconds = lambda: seconds
    inner = stream.adaptive(adaptive)

    def choose() -> Sequence[int]:
        nonlocal num_trials, seconds
        depths, seconds = inner(), 0.0
        if any(depths):
            num_trials += 1
            seconds = drafter.of_step(depths) + adaptive.reading_seconds + (30e-3 if num_trials % 3 == 0 else 0.0)
            adaptive.settle_drafter(seconds, depths)
        return depths

    assert stream.run(4000, choose, adaptive.settle) > 0.985 * fixed_rate(1, (1, [0.0], INT4, None), 0)
    assert num_trials > 5


def test_what_is_read_of_a_prompt_counts_as_a_cost() -> None:
    """Eight new requests, each with some tokens that the drafter has not read."""
    drafter = DrafterTime(1.6e-3)
    adaptive = AdaptiveDepth(VECTORS, drafter)
    requests = Stream(8, [], VECTORS).requests
    for request in requests:
        request.output_token_ids.extend([0] * 29)
        adaptive.admit(request, 0)
    adaptive._credit = drafter(31)
    adaptive.begin_step(requests, MOST, MOST)
    assert sum(adaptive.depth(request, 1) for request in requests) <= 1
