"""Greedy, sample and logprobs against their sorting twins, and the distribution that is drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import ops, reference

CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.8, 40, 0.5, 0.02),
    (2.0, 1, 0.01, 1.0),
]


def _logits(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, ::3] = float("-inf")
        logits[:, 1] = 0.0  # at least one stays
    return logits


def _parameters(rows: int, case: tuple[float, int, float, float], uniform: Tensor) -> tuple[Tensor, ...]:
    temperature, top_k, top_p, min_p = case
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        uniform,
    )


@pytest.mark.parametrize("vocab", [2, 19, 1000, 5003])
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
def test_greedy(isa: str, kind: str, vocab: int) -> None:
    logits = _logits(kind, 5, vocab)
    assert torch.equal(ops.greedy(logits), reference.greedy(logits))
    logits[2, vocab // 2] = float("nan")
    assert ops.greedy(logits)[2] == -1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("vocab", [7, 1000, 5003])
def test_nothing_outside_the_kept_set_and_all_of_it(
    isa: str, vocab: int, kind: str, case: tuple[float, int, float, float]
) -> None:
    """Draws at many points of [0, 1) hit exactly the tokens the sorted definition keeps, in proportion."""
    logits = _logits(kind, 1, vocab)
    temperature, top_k, top_p, min_p = case
    units = reference.sampling_units(logits[0], temperature, top_k, top_p, min_p).double()
    count = 4001
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = ops.sample(logits.expand(count, vocab).contiguous(), *_parameters(count, case, uniform))
    observed = torch.bincount(drawn, minlength=vocab).double() / count
    expected = units / units.sum()
    assert not observed[units == 0].any(), "a filtered token was drawn"
    # A grid of `count` points hits an interval of length p in p * count points, plus or minus one.
    assert (observed - expected).abs().max() <= 1.0 / count + 1e-4


def test_rows_do_not_depend_on_each_other(isa: str) -> None:
    logits = _logits("plain", 17, 5003)
    uniform = torch.rand(17, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    parameters = _parameters(17, (0.9, 50, 0.95, 0.0), uniform)
    together = ops.sample(logits, *parameters)
    for row in range(17):
        assert ops.sample(logits[row : row + 1], *(p[row : row + 1] for p in parameters)) == together[row]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("vocab", [20, 1000, 5003])
def test_logprobs(isa: str, vocab: int, kind: str, num_top: int) -> None:
    logits = _logits(kind, 4, vocab)
    token_ids = torch.tensor([0, 1, vocab - 1, vocab // 2])
    actual, expected = ops.logprobs(logits, token_ids, num_top), reference.logprobs(logits, token_ids, num_top)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1], expected[1]), "ranks differ"
    finite = expected[3].isfinite()
    assert torch.equal(actual[2][finite], expected[2][finite]), "the most likely tokens differ"
    torch.testing.assert_close(actual[3][finite], expected[3][finite], rtol=1e-5, atol=1e-5)


def test_a_row_without_a_softmax_is_reported(isa: str) -> None:
    logits = torch.zeros(3, 11)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), float("-inf")
    uniform = torch.full((3,), 0.5, dtype=torch.float64)
    assert ops.sample(logits, *_parameters(3, (1.0, 0, 1.0, 0.0), uniform)).tolist() == [-1, -1, -1]
    assert ops.logprobs(logits, torch.zeros(3, dtype=torch.int64), 2)[1].tolist() == [-1, -1, -1]
