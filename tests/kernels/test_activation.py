"""Gated activations against their plain-torch twin, which is checked against the formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, ops, reference
from tests.covering import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float32: the approximations of exp and erf. The others round once: the same value or its neighbour.
TOLERANCES = {torch.float32: (5e-7, 2e-6), torch.float16: (1e-6, 1.1e-3), torch.bfloat16: (1e-6, 8.2e-3)}
OPS: dict[str, Callable[..., Tensor]] = {
    name: partial(ops.gated_activation, name) for name in ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
}
FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda x, up: x / (1 + torch.exp(-x)) * up,
    "gelu": lambda x, up: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))) * up,
    "gelu_tanh": lambda x, up: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * up,
    "clamped_swiglu": lambda x, up: x.clamp(max=7) / (1 + torch.exp(-1.702 * x.clamp(max=7))) * (up.clamp(-7, 7) + 1),
}


SHAPES_TI = [(1, 1), (3, 7), (19, 111), (2, 16384), (5, 20001), (70, 512)]


@pytest.mark.parametrize(
    ("isa", "name", "dtype", "shape"), covering(cpu.isas(), list(OPS), DTYPES, SHAPES_TI), indirect=["isa"]
)
def test_equals_twin(isa: str, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    T, inner = shape
    x = (torch.randn(T, 2 * inner + 3, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)[:, : 2 * inner]
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(OPS[name](x), reference.gated_activation(name, x), atol=atol * 16, rtol=rtol)


@pytest.mark.parametrize("name", OPS)
def test_values_near_and_far_from_zero(isa: str, name: str) -> None:
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 1e-3, -1e-3, 0.7, -0.7, 5, -5, 12, -12, 40, -40, 100, -100, 1e4, -1e4, 3e38, -3e38]
    )
    out = OPS[name](torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    expected = FORMULAS[name](gate.double(), torch.ones(()).double())
    expected = torch.where(gate < -100, torch.zeros((), dtype=torch.float64), expected)  # float64 overflows on the way
    torch.testing.assert_close(out.double(), expected, atol=3e-7, rtol=2e-6)


@pytest.mark.parametrize("name", OPS)
def test_nan_and_infinity(isa: str, name: str) -> None:
    out = OPS[name](torch.tensor([[math.nan, math.inf, 1.0, 1.0, 1.0, math.nan]]))[0]
    assert out[0].isnan(), "a NaN gate must not be hidden"
    assert out[1] > (13.99 if name == "clamped_swiglu" else 1e38)
    assert out[2].isnan(), "a NaN factor must not be hidden"


@pytest.mark.parametrize("name", OPS)
def test_twin_equals_formula(name: str) -> None:
    x = torch.linspace(-10, 10, 2002).reshape(1, -1)
    gate, up = x.double().chunk(2, dim=1)
    expected = FORMULAS[name](gate, up)
    # float32 loses digits where 1 + erf or 1 + tanh cancels, times up to 100
    torch.testing.assert_close(reference.gated_activation(name, x).double(), expected, atol=1e-5, rtol=2e-6)


def test_rows_may_have_factors(isa: str) -> None:
    x = torch.randn(7, 46, generator=torch.Generator().manual_seed(0))
    factors_F, order_T = torch.tensor([1.0, -2.5, 0.25]), torch.tensor([2, 0, 1, 1, 2, 0, 1], dtype=torch.int32)
    scaled = x * factors_F[order_T.long(), None]
    assert torch.equal(OPS["gelu"](x, factors_F=factors_F, order_T=order_T), OPS["gelu"](scaled))
    torch.testing.assert_close(
        reference.gated_activation("gelu", x, factors_F, order_T), reference.gated_activation("gelu", scaled)
    )
    order_T[3] = 3
    with pytest.raises(IndexError, match=r"order\[3\] is 3"):
        OPS["gelu"](x, factors_F=factors_F, order_T=order_T)


@pytest.mark.parametrize("name", OPS)
def test_writes_into_out(isa: str, name: str) -> None:
    x = torch.randn(5, 46, dtype=torch.bfloat16)
    wide = torch.zeros(5, 40, dtype=torch.bfloat16)
    OPS[name](x, out=wide[:, 8:31])
    assert torch.equal(wide[:, 8:31], OPS[name](x))
    assert not wide[:, :8].any(), "wrote in front of out"
    assert not wide[:, 31:].any(), "wrote behind out"


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_does_not_depend_on_the_others(
    isa: str, name: str, dtype: torch.dtype, set_num_threads: Callable[[int], None]
) -> None:
    x = torch.randn(70, 2 * 1031, generator=torch.Generator().manual_seed(0)).to(dtype)
    set_num_threads(1)
    alone = torch.cat([OPS[name](x[i : i + 1]) for i in range(70)])
    set_num_threads(3)
    assert torch.equal(OPS[name](x), alone)
