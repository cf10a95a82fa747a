"""Times of running steps: the compiled class beside its twin in Python."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import pytest

from quire import extension
from quire.cost.arithmetic import KEPT_SIZES, Load, StepArithmetic
from quire.cost.calibrate import Fit
from quire.cost.collectives import Exchanges, Link, Links, Traffic
from quire.cost.correct import MAX_RATIO
from quire.cost.model import CostModel
from quire.cost.running_steps import PlainSteps, RunningSteps, running_steps
from quire.cost.step_time import StepTime
from quire.layer_spec.kv_spec import KvKind
from tests.cost.models import CONSTANTS, cost_model, model_with

pytestmark = pytest.mark.skipif(not extension.is_used(), reason="needs the extension")


def both(arithmetic: StepArithmetic, fit: Fit) -> tuple[RunningSteps, RunningSteps]:
    plain, compiled = PlainSteps(arithmetic, fit), running_steps(arithmetic, fit)
    assert not isinstance(compiled, PlainSteps)
    return plain, compiled


def random_rows(rng: random.Random) -> tuple[list[int], list[int], int]:
    """Starts, counts, and rows of logits: answers, or answers with drafts, and often prompts behind them."""
    most = 6 if rng.random() < 0.2 else 1
    counts = [rng.randint(1, most) for _ in range(rng.choice([1, 2, 5, 40, 256]))]
    counts += [rng.randrange(1, 600) for _ in range(rng.choice([0, 0, 1, 3]))]
    furthest = rng.choice([50, 5000])
    return [rng.randrange(furthest) for _ in counts], counts, rng.randint(0, len(counts))


@pytest.mark.parametrize("isa", ["", "avx512", "amx"])
@pytest.mark.parametrize("kinds", [("full",), ("full", "window"), ("chunked", "state", "full"), ("window",)])
def test_the_compiled_numbers_are_those_of_the_twin(kinds: tuple[KvKind, ...], isa: str) -> None:
    """Bit by bit, for a thousand random steps and their corrections, in noise that reaches the limits."""
    rng = random.Random(repr((kinds, isa)))
    between = Exchanges(Traffic(3, 5000.0, 800.0, 64.0), Traffic(1, 1000.0))
    arithmetic = StepArithmetic(model_with(*kinds), "bfloat16", None, "auto", isa, between)
    links = Links(Link(rng.choice([0.0, 1e-5]), 1e-9), Link(rng.choice([1e-5, 1.0]), 1e-8))
    constants = replace(CONSTANTS, overlap=rng.uniform(1, 3), links=links)
    plain, compiled = both(arithmetic, Fit(constants, rng.uniform(0.01, 0.5), {5: 1.2, 2: 0.7, 8: MAX_RATIO}))
    for number in range(1000):
        rows, others, pause = random_rows(rng), rng.choice([0, 0, 1, 300]), rng.choice([0.0, 1e-4, 3.0])
        plain.cold = compiled.cold = rng.choice([0.0, 1e-3])
        load, found = plain.predict_rows(*rows, pause, others)
        assert compiled.predict_rows(*rows, pause, others) == (load, found), rows
        assert compiled.predict(load, pause) == found
        measured = found.seconds * rng.lognormvariate(0, rng.choice([0.1, 0.1, 2.0]))
        for steps in (plain, compiled):
            steps.correct(load.num_tokens, found.seconds, measured)
            if number % 100 == 0:
                steps.set_spread(0.25)
        assert list(compiled.factors()) == list(plain.factors())
        assert (compiled.spread, compiled.num_corrections) == (plain.spread, number + 1)
        assert compiled.factor(number + 1) == plain.factor(number + 1)


def test_the_results_have_their_types() -> None:
    load, found = cost_model().predict_rows([3, 0], [1, 5], 2)
    assert (type(load), type(found)) == (Load, StepTime)
    assert (hash(load), hash(found)) == (hash((*load,)), hash((*found,)))
    assert (load.num_tokens, load.num_rows, load.num_logits) == (6, 2, 2)
    assert found.low < found.seconds < found.high


def test_amounts_beyond_64_bits_are_exact() -> None:
    """A prompt of 2^31 tokens: its operations of attention are more than 2^63."""
    arithmetic = cost_model().arithmetic
    load = arithmetic.load([0], [1 << 31], 1)
    assert arithmetic.demand(load).attention_flops > 1 << 63
    plain, compiled = both(arithmetic, Fit(CONSTANTS, 0.1))
    assert compiled.predict(load, 0.0) == plain.predict(load, 0.0)


def test_products_of_a_size_are_counted_once_while_it_is_one_of_the_kept() -> None:
    counted, arithmetic = [], cost_model().arithmetic

    class Counting(StepArithmetic):
        def __init__(self) -> None:
            self.__dict__ |= vars(arithmetic)

        def demand(self, load: Load) -> object:  # type: ignore[override]
            counted.append(load.num_tokens)
            return arithmetic.demand(load)

    steps = running_steps(Counting(), Fit(CONSTANTS, 0.1))
    for size in [*range(1, KEPT_SIZES + 1)] * 2:
        steps.predict_rows([0], [size], 1, 0.0, 0)
    assert counted == [*range(1, KEPT_SIZES + 1)]
    for size in (KEPT_SIZES + 1, 1):
        steps.predict_rows([0], [size], 1, 0.0, 0)
    assert counted[KEPT_SIZES:] == [KEPT_SIZES + 1, 1]


def test_what_would_lead_outside_of_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic = cost_model().arithmetic
    steps = running_steps(arithmetic, Fit(CONSTANTS, 0.1))
    with pytest.raises(ValueError, match="3 starts for 1 rows"):
        steps.predict_rows([0, 0, 0], [1], 1, 0.0, 0)
    for start, count in ((-1, 1), (0, 0), (0, 1 << 28), (1 << 28, 1)):
        with pytest.raises(ValueError, match=f"a row of {count} tokens after {start}"):
            steps.predict_rows([start], [count], 1, 0.0, 0)
    with pytest.raises(ValueError, match="other kinds of layers"):
        steps.predict(Load(1, 1, 1, (1,), (1,)), 0.0)
    for size in (-1, 65):
        with pytest.raises(ValueError, match=f"size {size}"):
            running_steps(arithmetic, Fit(CONSTANTS, 0.1, {size: 1.0}))
    monkeypatch.setattr("quire.cost.running_steps.StepTime", dict)
    with pytest.raises(ValueError, match="a class without tuples"):
        running_steps(arithmetic, Fit(CONSTANTS, 0.1))


def test_a_model_that_nobody_holds_is_freed() -> None:
    """Plans make thousands. The compiled class is unknown to the collector of cycles, so there may be none."""
    cost = cost_model()
    cost.observe(cost.arithmetic.load([0], [1], 1), 1.0, 1.0)
    cost.observe(cost.arithmetic.load([0], [40], 1), 1.0, 1.0)
    gc.disable()
    try:
        seen = weakref.ref(cost)
        del cost
        assert seen() is None
    finally:
        gc.enable()


def test_without_the_extension_the_twin_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = cost_model().predict_rows([3, 0], [1, 5], 2)
    monkeypatch.setattr(extension, "is_used", lambda: False)
    cost: CostModel = cost_model()
    assert cost.predict_rows([3, 0], [1, 5], 2) == expected
