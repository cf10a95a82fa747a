"""Greedy choice, sampling and log-probabilities against the sorted definition, on every instruction set and both paths.

Dimensions: R rows, V vocabulary, N highest tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, ops, reference
from tests.covering import covering
from tests.examples import IS_FULL, examples

SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 8191, 8192, 8193, 40000]
# One unit of the kernels' fixed point, in which probabilities are truncated, and the error of exp in float32.
RELATIVE_ERROR = 1e-6


def randn(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


PATHS = [*cpu.isas(), "reference"]


@pytest.fixture(params=PATHS)
def sampling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every instruction set, and the plain-torch path."""
    if request.param == "reference":
        monkeypatch.setattr(cpu, "takes", lambda x: False)
        yield request.param
        return
    before = cpu.isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


def draw(
    logits_RV: Tensor,
    uniforms: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[int]:
    """Sample the same row (or rows) with one parameter set."""
    R = len(uniforms)
    return ops.sample(
        logits_RV.expand(R, -1).contiguous(),
        torch.full((R,), temperature),
        torch.full((R,), top_k, dtype=torch.int32),
        torch.full((R,), top_p),
        torch.full((R,), min_p),
        torch.tensor(uniforms, dtype=torch.float64),
    ).tolist()


def kept_tokens(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float] | None:
    """The definition, by sorting, in float64: token -> probability; None when rounding could decide about a token."""
    # float32 parameters, as the op gets them
    top_p, min_p = (torch.tensor(x).item() for x in (top_p, min_p))
    highest = max(logits)
    weights = [math.exp((x - highest) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if any(abs(weights[i] - min_p) < RELATIVE_ERROR * min_p and weights[i] != min_p for i in order):
        return None
    kept = [i for i in order if weights[i] >= min_p]
    if 0 < top_k < len(kept):
        kept = [i for i in kept if logits[i] >= logits[kept[top_k - 1]]]
    if top_p < 1:
        total, mass, nucleus = sum(weights[i] for i in kept), 0.0, []
        equal = all(logits[i] == highest for i in kept)
        for i in kept:
            if mass >= top_p * total and nucleus:
                break
            nucleus.append(i)
            mass += weights[i]
            if abs(mass - top_p * total) < RELATIVE_ERROR * total and not equal:
                return None
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def random_logits(rng: random.Random, V: int) -> list[float]:
    """Ties, masked tokens, flat rows, peaked rows."""
    kind = rng.randrange(5)
    if kind == 0:
        values = [float(rng.randrange(4)) for _ in range(V)]
    elif kind == 1:
        values = [rng.gauss(0, 3) for _ in range(V)]
    elif kind == 2:
        values = [rng.choice([0.0, -0.0, 1.5]) for _ in range(V)]
    elif kind == 3:
        values = [rng.gauss(-50, 0.1) for _ in range(V)]
    else:
        values = [rng.uniform(-30, 30) for _ in range(V)]
    if rng.random() < 0.5:
        values = [x if rng.random() < 0.6 else -math.inf for x in values]
    if max(values) == -math.inf:
        values[rng.randrange(V)] = 0.0
    return torch.tensor(values).tolist()


@dataclass(frozen=True)
class Filtered:
    """A row with parameters, and the tokens that the sorted definition keeps."""

    logits: list[float]
    parameters: tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
    kept: dict[int, float]


@cache
def filtered() -> list[Filtered]:
    """The same for every path. None of them is decided by rounding."""
    rng, found = random.Random(1), []
    for _ in range(250):
        V = rng.choice([1, 2, 3, 7, 16, 40, 300, 700])
        logits = random_logits(rng, V)
        temperature = rng.choice([0.3, 1.0, 1.0, 2.5, 30.0])
        top_k = rng.choice([0, 0, 1, 2, 5, 17, V, V + 9])
        top_p = rng.choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.75, 0.9, 0.99])
        min_p = rng.choice([0.0, 0.0, 0.05, 0.4, 1.0])
        parameters = (temperature, top_k, top_p, min_p)
        if (kept := kept_tokens(logits, *parameters)) is not None:
            found.append(Filtered(logits, parameters, kept))
    assert len(found) > 150, "nearly all cases were skipped"
    return found


def test_kept_set_and_masses_equal_the_sorted_definition(sampling: str) -> None:
    """A uniform number in the middle of a token's share of the mass must draw it: this fixes the set and the shares."""
    for row in filtered():
        tokens, uniforms, cumulated = [], [], 0.0
        for token, share in row.kept.items():
            if share > 1e-5:
                tokens.append(token)
                uniforms.append(cumulated + share / 2)
            cumulated += share
        logits = torch.tensor([row.logits])
        *got, first, last = draw(logits, [*uniforms, 0.0, 1 - 2**-53], *row.parameters)
        case = f"V={len(row.logits)} temperature, top_k, top_p, min_p={row.parameters} logits={row.logits[:20]}"
        assert got == tokens, case
        assert {first, last} <= row.kept.keys(), f"drew a token that was filtered out: {case}"


@pytest.mark.parametrize(
    ("sampling", "V", "scale"), covering(PATHS, [40_000, 9_000], [0.01, 2.0, 8.0]), indirect=["sampling"]
)
def test_large_vocabulary_keeps_what_the_sorted_definition_keeps(sampling: str, V: int, scale: float) -> None:
    logits = randn(1, V, scale=scale)
    for parameters in (
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 3000},
        {"top_k": 900, "top_p": 0.5, "min_p": 1e-3},
        {"min_p": 0.02, "temperature": 3.0},
        {"temperature": 1.7},
        {"top_p": 0.999, "temperature": 40.0},
    ):
        units = reference.sampling_units(
            logits[0],
            parameters.get("temperature", 1.0),
            parameters.get("top_k", 0),
            parameters.get("top_p", 1.0),
            parameters.get("min_p", 0.0),
        ).double()
        ends = units.cumsum(0) / units.sum()
        tokens = (units / units.sum()).topk(8).indices.tolist()
        uniforms = [(ends[t] - units[t] / units.sum() / 2).item() for t in tokens]
        got = draw(logits, uniforms, **parameters)
        # Rounding of exp moves a boundary by at most RELATIVE_ERROR, less than half a share unless shares are that
        # small.
        expected_shares = (units[tokens] / units.sum()).tolist()
        for token, expected, share in zip(got, tokens, expected_shares, strict=True):
            assert token == expected or share < 10 * RELATIVE_ERROR, f"{parameters}: drew {token}, expected {expected}"
        last = int(units.nonzero()[-1])
        assert draw(logits, [1 - 2**-53], **parameters)[0] == last, f"{parameters}: another last token"
        assert draw(logits, [0.0], **parameters)[0] == int(units.nonzero()[0]), f"{parameters}: another first token"


def adversarial_logits(name: str, V: int) -> Tensor:
    """Rows that are hard on a search for a threshold that is guided by every n-th value."""
    normal_V, place_V = randn(V, seed=4, scale=1.0), torch.arange(V)
    rows = {
        "flat": normal_V * 2,
        "all equal": torch.full((V,), -3.0),
        "two values": (normal_V > 0).float() * 1.5,
        "nearly equal": normal_V * 1e-5,
        "ties, bfloat16": (normal_V * 2).bfloat16().float(),
        "most are tied": normal_V.where(place_V % 5 < 2, torch.tensor(0.25)),
        "one spike": (normal_V * 0.1).index_fill(0, torch.tensor([V // 3]), 200.0),
        "geometric": -0.003 * place_V,
        "denormal": normal_V * 1e-40,
        "huge": normal_V * 1e30,
        "heavy tails": normal_V / randn(V, seed=5),
        "uniform": place_V * 7919 % V / V * 60 - 30,
        "few are allowed": (normal_V * 2).masked_fill(place_V % 97 != 5, -math.inf),
        "the sample sees low ones": (normal_V * 2).masked_fill(place_V % 8 == 0, -9.0),
        "the sample sees high ones": (normal_V * 0.1).masked_fill(place_V % 8 == 0, 3.0),
        "the sample sees ties": (normal_V.abs() * 0.1).masked_fill(place_V % 8 == 0, 0.0),
    }
    return rows[name].unsqueeze(0)


ADVERSARIAL: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.95},
    {"top_p": 0.3},
    {"top_p": 1e-30},
    {"top_p": 1 - 2**-24},
    {"temperature": 1e-30, "top_p": 0.9},
    {"temperature": 1e30, "top_p": 0.9},
    {"top_k": 7000, "top_p": 0.8},
    {"top_k": 700},
)


@cache
def adversarial_shares(
    name: str, V: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor, int]:
    """The shares of all tokens of the row by the sorted definition, their sums, and the last token that has a share.

    The same for every path.
    """
    top_p = torch.tensor(top_p).item()  # float32, as the op gets it
    units = reference.sampling_units(adversarial_logits(name, V)[0], temperature, top_k, top_p, min_p=0.0).double()
    shares = units / units.sum()
    return shares, units.cumsum(0) / units.sum(), int(units.nonzero()[-1])


@pytest.mark.parametrize(
    "name",
    [
        "flat",
        "all equal",
        "two values",
        "nearly equal",
        "ties, bfloat16",
        "most are tied",
        "one spike",
        "geometric",
        "denormal",
        "huge",
        "heavy tails",
        "uniform",
        "few are allowed",
        "the sample sees low ones",
        "the sample sees high ones",
        "the sample sees ties",
    ],
)
def test_adversarial_rows_keep_what_the_sorted_definition_keeps(sampling: str, name: str) -> None:
    V = 20_480  # a sample of 256 takes every 80th value
    logits = adversarial_logits(name, V)
    uniforms = [0.0, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53]
    for parameters in ADVERSARIAL if IS_FULL else ADVERSARIAL[PATHS.index(sampling) % 2 :: 2]:
        shares, ends, last_of_all = adversarial_shares(name, V, **parameters)
        *tokens, last = draw(logits, uniforms, **parameters)
        assert last == last_of_all, f"{parameters}: another last token"
        for uniform, token in zip(uniforms, tokens, strict=False):
            before = ends[token] - shares[token]
            assert before - RELATIVE_ERROR <= uniform <= ends[token] + RELATIVE_ERROR, f"{parameters}: {uniform}"


@pytest.mark.parametrize("V", SIZES)
def test_greedy(sampling: str, V: int) -> None:
    logits = randn(9, V + 3).round()[:, :V]  # rounding makes ties
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert ops.greedy(logits).tolist() == expected
    assert draw(logits[:1], [0.3], temperature=0.0) == expected[:1], "temperature 0 is greedy"
    assert draw(logits[:1], [0.3], temperature=1e-40) == expected[:1], "so is one whose reciprocal overflows"


def test_rows_without_a_choice_fail_alone(sampling: str) -> None:
    logits = randn(6, 300)
    logits[1, 77] = math.nan
    logits[2, 299] = math.nan
    logits[3, 5] = math.inf
    logits[4] = -math.inf
    assert [t >= 0 for t in ops.greedy(logits).tolist()] == [True, False, False, True, True, True]
    assert ops.greedy(logits)[3] == 5
    half = torch.full((6,), 0.5)
    tokens = ops.sample(logits, half, torch.zeros(6, dtype=torch.int32), half, torch.zeros(6), half.double())
    assert [t >= 0 for t in tokens.tolist()] == [True, False, False, False, False, True]


def test_masked_tokens_are_never_drawn(sampling: str) -> None:
    logits = torch.full((1, 5000), -math.inf)
    logits[0, [3, 4000]] = torch.tensor([1.0, 2.0])
    uniforms = [i / 50 for i in range(50)]
    for parameters in ({}, {"top_k": 100}, {"top_p": 0.99999}, {"min_p": 0.001}, {"top_k": 4999, "top_p": 0.99999}):
        assert set(draw(logits, uniforms, **parameters)) == {3, 4000}, parameters


def test_ties_at_the_edge_of_the_nucleus_go_to_the_lowest_ids(sampling: str) -> None:
    """Ten equal tokens: top_p keeps just as many as it needs, top_k all that tie."""
    logits = torch.full((1, 600), -5.0)
    logits[0, 100:600:50] = 2.0
    uniforms = [(i + 0.5) / 40 for i in range(40)]
    assert set(draw(logits, uniforms, top_k=10, top_p=0.45)) == {100, 150, 200, 250, 300}
    assert set(draw(logits, uniforms, top_k=3)) == set(range(100, 600, 50))
    assert set(draw(logits, uniforms, top_k=3, top_p=0.09)) == {100}


FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.5},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.01},
)


@pytest.mark.parametrize(
    ("sampling", "parameters"),
    [  # the tests above show the kept tokens and their shares on all paths
        pytest.param(path, parameters, marks=() if (path_at + at) % 3 == 0 else pytest.mark.slow)
        for path_at, path in enumerate(PATHS)
        for at, parameters in enumerate(FILTERS)
    ],
    indirect=["sampling"],
)
def test_chi_square(sampling: str, parameters: dict[str, float]) -> None:
    """Draws with random uniforms follow the filtered softmax (false alarm once in 10^5 seeds; the seed is
    fixed)."""
    logits = randn(1, 30, seed=5, scale=1.5)
    rng = random.Random(7)
    counts = torch.zeros(30)
    num_draws = examples(8000)
    for token in draw(logits, [rng.random() for _ in range(num_draws)], **parameters):
        counts[token] += 1
    arguments = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    kept = kept_tokens(logits[0].tolist(), **arguments)
    assert kept is not None
    assert set(counts.nonzero().flatten().tolist()) <= kept.keys()
    expected = torch.tensor([num_draws * kept.get(i, 0.0) for i in range(30)])
    used = expected > 0
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum().item()
    degrees = int(used.sum()) - 1
    # Wilson-Hilferty: (statistic / degrees)^(1/3) is normal with these moments
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert z < 4.26, f"chi-square {statistic:.1f} with {degrees} degrees of freedom"


def random_masks(M: int, V: int) -> Tensor:
    """Of all, of no, and of some tokens in a word."""
    masks_MW = torch.randint(-(1 << 31), 1 << 31, (M, -(-V // 32)), generator=torch.Generator().manual_seed(V))
    kinds_MW = masks_MW % 3
    return masks_MW.masked_fill(kinds_MW == 0, 0).masked_fill(kinds_MW == 1, -1).to(torch.int32)


@pytest.mark.parametrize("V", [31, 32, 33, *SIZES])
def test_tokens_without_a_bit_are_forbidden_and_nothing_else_changes(
    sampling: str, set_num_threads: Callable[[int], None], V: int
) -> None:
    wide = randn(5, V + 3)
    wide[3, 0] = math.nan
    rows_M = torch.tensor([3, 1, 3], dtype=torch.int32)  # a row with two masks
    masks_MW = random_masks(len(rows_M), V)
    expected = wide.tolist()
    for row, words in zip(rows_M.tolist(), masks_MW.tolist(), strict=True):
        for token in range(V):
            if not words[token // 32] >> token % 32 & 1:
                expected[row][token] = -math.inf
    for threads in (1, 3):
        set_num_threads(threads)
        got = wide.clone()
        ops.forbid_tokens(got[:, :V], masks_MW, rows_M)
        torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    ops.forbid_tokens(got[:, :V], masks_MW[:0], rows_M[:0])


def test_rows_and_threads_do_not_change_a_row(isa: str, set_num_threads: Callable[[int], None]) -> None:
    R, V = 9, 30_000
    logits = randn(R, V)
    generator = torch.Generator().manual_seed(3)
    temperature = torch.rand(R, generator=generator) * 2
    temperature[4] = 0
    top_k = torch.tensor([0, 5, 0, 1000, 0, 0, 50, 0, 20_000], dtype=torch.int32)
    top_p = torch.tensor([1, 1, 0.9, 0.5, 0.3, 0.99, 0.8, 1, 0.999])
    min_p = torch.tensor([0, 0, 0, 0, 0.1, 0.01, 0, 0.2, 0])
    uniform = torch.rand(R, generator=generator, dtype=torch.float64)
    parameters = (temperature, top_k, top_p, min_p, uniform)
    token_ids = torch.randint(0, V, (R,), generator=generator)
    results = []
    for threads in (1, 2, 16):
        set_num_threads(threads)
        together = (ops.sample(logits, *parameters), ops.greedy(logits), *ops.logprobs(logits, token_ids, 20))
        alone = [
            (
                ops.sample(logits[r : r + 1], *(x[r : r + 1] for x in parameters)),
                ops.greedy(logits[r : r + 1]),
                *ops.logprobs(logits[r : r + 1], token_ids[r : r + 1], 20),
            )
            for r in range(R)
        ]
        results += [together, [torch.cat(parts) for parts in zip(*alone, strict=True)]]
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("V", SIZES)
def test_logprobs(sampling: str, V: int) -> None:
    R, num_top = 5, min(V, 20)
    logits = randn(R, V + 1)[:, :V].mul(4).round() / 4  # ties
    logits[1, : V // 2] = -math.inf
    token_ids = torch.randint(0, V, (R,), generator=torch.Generator().manual_seed(1))
    values, ranks, top_ids, top_values = ops.logprobs(logits, token_ids, num_top)
    dense = logits.double().log_softmax(dim=-1)
    for r in range(R):
        order = logits[r].argsort(descending=True, stable=True)[:num_top]
        assert torch.equal(top_ids[r], order)
        assert ranks[r] == 1 + (logits[r] > logits[r, token_ids[r]]).sum()
        torch.testing.assert_close(values[r].double(), dense[r, token_ids[r]], atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(top_values[r].double(), dense[r, order], atol=2e-6, rtol=1e-6)
    assert [x.dtype for x in (values, ranks, top_ids, top_values)] == [
        torch.float32,
        torch.int64,
        torch.int64,
        torch.float32,
    ]


def test_logprobs_of_the_whole_vocabulary_and_of_none(sampling: str) -> None:
    logits = randn(2, 700)
    _, _, ids, values = ops.logprobs(logits, torch.tensor([0, 1]), 700)
    assert [sorted(row) for row in ids.tolist()] == [list(range(700))] * 2
    assert (values.diff(dim=1) <= 0).all(), "descending"
    torch.testing.assert_close(values.double().exp().sum(dim=1), torch.ones(2, dtype=torch.float64), atol=1e-5, rtol=0)
    assert ops.logprobs(logits, torch.tensor([0, 1]), 0)[2].shape == (2, 0)


def test_logprobs_of_a_row_without_softmax(sampling: str) -> None:
    logits = randn(3, 300)
    logits[1, 9] = math.nan
    values, ranks, ids, top_values = ops.logprobs(logits, torch.tensor([1, 2, 3]), 4)
    assert values.isnan().tolist() == [False, True, False]
    assert ranks[1] == -1
    assert ids[1].tolist() == [-1] * 4
    assert top_values[1].isnan().all()
    assert (ids[[0, 2]] >= 0).all()
