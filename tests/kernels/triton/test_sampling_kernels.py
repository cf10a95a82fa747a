"""GPU sampling against the plain-torch twin, on a GPU or under Triton's interpreter: the same token for the same
uniform number.

Dimensions: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.triton.sampling import forbid_tokens, greedy, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, SLICE = 100, 64
# temperature, top-k, top-p, min-p
PARAMETERS = [
    (0.8, 0, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.3, 0, 0.7, 0.0),
    (0.6, 0, 1.0, 0.1),
    (1.0, 40, 0.6, 0.01),
    (2.0, 1, 0.5, 0.0),
    (1.0, 400, 0.999, 0.0),
    (0.0, 5, 0.5, 0.5),
    (5.0, 0, 1e-9, 0.0),
]


def parameters(R: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = list(zip(*(PARAMETERS * (R // len(PARAMETERS) + 1))[:R], strict=True))
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    temperature_R, top_k_R, top_p_R, min_p_R = (
        torch.tensor(column, dtype=dtype).to(DEVICE) for column, dtype in zip(columns, dtypes, strict=True)
    )
    return temperature_R, top_k_R, top_p_R, min_p_R


def drawn(logits_RV: Tensor, uniform_R: Tensor) -> Tensor:
    R = len(logits_RV)
    token_ids_R = torch.empty(R, dtype=torch.int64, device=DEVICE)
    sample(logits_RV, *parameters(R), uniform_R, token_ids_R, slice_size=SLICE)
    return token_ids_R


def logits_of(kind: str, R: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    logits_RV = torch.randn(R, V, generator=generator) * 2
    if kind == "ties":
        logits_RV = logits_RV.round()
    elif kind == "excluded":
        logits_RV[torch.rand(R, V, generator=generator) < 0.9] = -math.inf
    return logits_RV.to(DEVICE)


@pytest.mark.parametrize("kind", [pytest.param("random", marks=pytest.mark.slow), "ties", "excluded"])
def test_draws_the_twin_s_tokens(kind: str) -> None:
    R = len(PARAMETERS)
    logits_RV = logits_of(kind, R)
    uniform_R = torch.rand(R, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    uniform_R[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    expected_R = reference.sample(logits_RV, *parameters(R), uniform_R)
    assert torch.equal(drawn(logits_RV, uniform_R), expected_R)
    assert len(set(expected_R.tolist())) > 4


def test_tokens_without_a_bit_are_forbidden_and_nothing_else_changes() -> None:
    wide = logits_of("random", 4)
    generator = torch.Generator().manual_seed(1)
    masks_MW = torch.randint(-(1 << 31), 1 << 31, (3, 3), generator=generator).to(DEVICE, torch.int32)
    rows_M = torch.tensor([3, 1, 3], dtype=torch.int32, device=DEVICE)
    expected = wide.clone()
    reference.forbid_tokens(expected[:, : V - 7], masks_MW, rows_M)
    forbid_tokens(wide[:, : V - 7], masks_MW, rows_M, slice_size=SLICE)
    assert torch.equal(wide, expected)


def test_greedy_takes_the_first_of_equals_and_reports_what_is_no_number() -> None:
    logits_RV = logits_of("ties", 6)
    logits_RV[1, 99] = 100
    logits_RV[2, 17] = math.nan
    logits_RV[3] = -math.inf
    token_ids_R = torch.empty(6, dtype=torch.int64, device=DEVICE)
    greedy(logits_RV, token_ids_R, slice_size=SLICE)
    assert torch.equal(token_ids_R, reference.greedy(logits_RV))


def test_rows_without_a_softmax_get_no_token() -> None:
    logits_RV = logits_of("random", 6)
    uniform_R = torch.full((6,), 0.3, dtype=torch.float64, device=DEVICE)
    expected_R = reference.sample(logits_RV, *parameters(6), uniform_R)
    logits_RV[4, 70], logits_RV[1, 3] = math.nan, math.inf
    expected_R[[1, 4]] = -1
    assert torch.equal(drawn(logits_RV, uniform_R), expected_R)
