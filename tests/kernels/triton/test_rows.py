"""The GPU kernels of norms, activations, rope and KV write against their plain-torch twins, on a GPU or under Triton's
interpreter.

Dimensions: T tokens, D hidden, I inner, H query heads, G kv heads, E head dim, B cache blocks, P block size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import kv_codes, reference
from quire.kernels.layer_rules import HeadRotation
from quire.kernels.triton.activation import gated_activation, gated_activation_to_fp8
from quire.kernels.triton.fp8 import quantize_rows
from quire.kernels.triton.norm import norm, rms_norm_to_fp8
from quire.kernels.triton.rope_cache import rope_and_cache
from tests.kernels import by_name

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Both sides round once from float32 (the interpreter: cut off), so they are neighbours at most.
TOLERANCES = {torch.float32: (1e-6, 4e-6), torch.float16: (1e-6, 1.1e-3), torch.bfloat16: (1e-6, 8.2e-3)}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    atol, rtol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [1, 33, 1024, 1100])
def test_rms_norm(dtype: torch.dtype, D: int) -> None:
    x_TD = randn(5, D + 5, dtype=dtype)[:, :D]
    for weight_dtype, offset in ((dtype, 0.0), (torch.float32, 1.0)):
        weight_D = randn(D, dtype=weight_dtype, seed=1)
        wide_TD = torch.zeros(5, D + 3, dtype=dtype, device=DEVICE)
        norm(x_TD, None, 1.0, weight_D, None, 1e-5, offset, wide_TD[:, 1 : D + 1])
        assert_close(wide_TD[:, 1 : D + 1], reference.rms_norm(x_TD, weight_D, 1e-5, offset))
        assert not wide_TD[:, 0].any()
        assert not wide_TD[:, D + 1 :].any(), "wrote behind out"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x_TD, residual_TD = randn(5, 111, dtype=dtype), randn(5, 111, dtype=dtype, seed=1)
    weight_D = randn(111, dtype=dtype, seed=2)
    sum_TD = residual_TD + 0.5 * x_TD
    norm(x_TD, residual_TD, 0.5, weight_D, None, 1e-6, 0.0, x_TD)
    assert_close(residual_TD, sum_TD)  # the interpreter cuts bfloat16 off where a GPU rounds
    assert_close(x_TD, reference.rms_norm(residual_TD, weight_D, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(dtype: torch.dtype) -> None:
    x_TD, weight_D, bias_D = (randn(5, 111, dtype=dtype, seed=seed) for seed in range(3))
    weight_D, bias_D = weight_D[0].clone(), bias_D[0].clone()
    out_TD = torch.empty_like(x_TD)
    norm(x_TD, None, 1.0, weight_D, bias_D, 1e-5, 0.0, out_TD)
    expected_TD = reference.layer_norm(x_TD, weight_D, bias_D, 1e-5)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out_TD, expected_TD, atol=max(atol, 2e-6, rtol), rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation(name: str, dtype: torch.dtype) -> None:
    x_T2I = 3 * randn(4, 2 * 1100, dtype=dtype)
    out_TI = torch.empty(4, 1100, dtype=dtype, device=DEVICE)
    gated_activation(name, x_T2I, out_TI)
    atol, rtol = TOLERANCES[dtype]
    expected_TI = reference.gated_activation(name, x_T2I)
    torch.testing.assert_close(out_TI, expected_TI, atol=max(atol, 2e-6), rtol=rtol)


def test_gated_activation_with_factors() -> None:
    x_T2I, factors_F = randn(4, 2 * 40, dtype=torch.float32), torch.tensor([0.5, 3.0, -2.0], device=DEVICE)
    order_T = torch.tensor([2, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    out_TI = torch.empty(4, 40, device=DEVICE)
    gated_activation("silu", x_T2I, out_TI, factors_F, order_T)
    expected_TI = reference.gated_activation("silu", x_T2I, factors_F, order_T)
    torch.testing.assert_close(out_TI, expected_TI, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [111, 1100])
def test_norms_and_activations_to_fp8_are_quantized_afterwards(D: int, dtype: torch.dtype) -> None:
    """To a bit, also rows of zeros and rows that are not finite."""
    x_TD, weight_D = randn(6, 2 * D, dtype=dtype)[:, :D], randn(D, dtype=torch.float32, seed=2)
    x_TD[1], x_TD[2, 3], x_TD[3, 0] = 0, torch.nan, torch.inf
    residual_TD = randn(6, D, dtype=dtype, seed=1)

    def assert_quantized(actual: tuple[Tensor, Tensor], y_TD: Tensor) -> None:
        codes_TD, scales_T1 = quantize_rows(y_TD)
        torch.testing.assert_close(actual[1], scales_T1, atol=0, rtol=0, equal_nan=True)
        is_finite_T = scales_T1.isfinite().flatten()
        assert is_finite_T.any()
        assert torch.equal(actual[0].view(torch.uint8)[is_finite_T], codes_TD.view(torch.uint8)[is_finite_T])

    for residual in (None, residual_TD):
        changed = None if residual is None else residual.clone()
        y_TD = torch.empty(6, D, dtype=dtype, device=DEVICE)
        norm(x_TD, changed, 1.0, weight_D, None, 1e-6, 1.0, y_TD)
        own = None if residual is None else residual.clone()
        assert_quantized(rms_norm_to_fp8(x_TD, own, 1.0, weight_D, 1e-6, 1.0), y_TD)
        if own is not None and changed is not None:
            torch.testing.assert_close(own, changed, atol=0, rtol=0, equal_nan=True)
    for name in ("silu", "gelu", "gelu_tanh"):
        x_T2I = randn(6, 2 * D, dtype=dtype, seed=3)
        y_TI = torch.empty(6, D, dtype=dtype, device=DEVICE)
        gated_activation(name, x_T2I, y_TI)
        assert_quantized(gated_activation_to_fp8(name, x_T2I), y_TI)


# H, G, E, rotary dims (0: no rotation), block size, with norm
ROPE_SHAPES = [
    (4, 2, 64, 64, 16, True),
    (7, 1, 24, 24, 8, False),
    (3, 3, 80, 32, 32, True),
    (2, 1, 128, 0, 16, True),
    (2, 2, 10, 6, 16, False),
]


def rope_inputs(shape: tuple[int, int, int, int, int, bool], dtype: torch.dtype) -> dict[str, Any]:
    H, G, E, R, P, has_norm = shape
    T, B = 8, 4
    qkv = randn(T, (H + 2 * G) * E, dtype=dtype)
    q_THE, k_TGE, v_TGE = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, G * E, G * E], dim=1))
    generator = torch.Generator().manual_seed(2)
    angles = torch.rand(50, max(R // 2, 1), generator=generator) * 6.3
    slots_T = torch.randperm(B * P, generator=generator)[:T]
    slots_T[::5] = -1
    caches = randn(2, B, G, P, E, dtype=dtype, seed=3)
    return {
        "q_THE": q_THE,
        "k_TGE": k_TGE,
        "v_TGE": v_TGE,
        "positions_T": torch.randint(0, 50, (T,), generator=generator).to(DEVICE),
        "cos_sin_PR": torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE) if R else None,
        "slot_mapping_T": slots_T.to(DEVICE),
        "k_cache_BGPE": caches[0],
        "v_cache_BGPE": caches[1],
        "q_norm_weight_E": randn(E, dtype=dtype, seed=5) if has_norm else None,
        "k_norm_weight_E": randn(E, dtype=dtype, seed=6) if has_norm else None,
        "norm_eps": 1e-6,
        "norm_weight_offset": 1.0,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
def test_rope_and_cache(shape: tuple[int, int, int, int, int, bool], dtype: torch.dtype) -> None:
    inputs, expected = rope_inputs(shape, dtype), rope_inputs(shape, dtype)
    by_name.rope_and_cache(rope_and_cache, **inputs)
    by_name.rope_and_cache(reference.rope_and_cache, **expected)
    for name in ("q_THE", "k_cache_BGPE"):
        # a rotation adds two products of opposite sign: the error is relative to the larger one
        torch.testing.assert_close(
            inputs[name], expected[name], atol=3e-6 if dtype == torch.float32 else 2e-2, rtol=TOLERANCES[dtype][1]
        )
    for name in ("k_TGE", "v_TGE", "v_cache_BGPE"):
        assert torch.equal(inputs[name], expected[name]), name


def test_caches_with_different_strides_are_refused() -> None:
    inputs = rope_inputs(ROPE_SHAPES[0], torch.float32)
    inputs["v_cache_BGPE"] = inputs["v_cache_BGPE"].repeat(1, 2, 1, 1)[:, :2]
    with pytest.raises(ValueError, match="v_cache has strides"):
        by_name.rope_and_cache(rope_and_cache, **inputs)


def special_rows(E: int) -> Tensor:
    """float32 rows with every code's neighbours: ties and both sides of them, zeros, what is too large, not finite."""
    halves = [torch.arange(0x7F, dtype=torch.uint8).view(dtype).float() for dtype in kv_codes.CODE_DTYPES[:2]]
    codes = torch.cat([x[x.isfinite()] for x in halves])
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    values = torch.cat([values, torch.tensor([1e-42, 449.0, 470.0, 57345.0, 1e38])])
    values = torch.cat([values, -values])
    rows = torch.nn.functional.pad(values, (0, -len(values) % E)).view(-1, E)
    tiny, zeros, bad = rows[-1:] * 0 + 1e-31, rows[-1:] * 0, rows[-1:].repeat(3, 1)
    bad[torch.arange(3), [3, 7, 0]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return torch.cat([rows, tiny, zeros, bad])


@pytest.mark.parametrize("codes", kv_codes.CODE_DTYPES, ids=str)
def test_codes_in_the_cache_are_the_twin_s_bit_for_bit(codes: torch.dtype) -> None:
    """Without norm and rotation; K and V alike. The twin on a CPU: on a GPU, torch's division by 127 rounds twice."""
    x_TGE = special_rows(24)[:, None]
    T, _, E = x_TGE.shape
    slots_T = torch.randperm(T + 3, generator=torch.Generator().manual_seed(1))[:T]
    slots_T[4] = -1
    found = []
    for function, device in ((rope_and_cache, DEVICE), (reference.rope_and_cache, "cpu")):
        caches = torch.zeros(2, -(-(T + 3) // 16), 1, 16, E, device=device).to(codes)
        scales = torch.zeros(2, len(caches[0]), 1, 16, device=device)
        cache = LayerCache(*caches, *(scales if codes == torch.int8 else ()))
        x, slots = x_TGE.to(device), slots_T.to(device)
        function(x.clone(), x, x, slots, slots, cache, HeadRotation())
        found.append((caches.cpu(), scales.cpu()))
    (caches, scales), (expected_caches, expected_scales) = found
    torch.testing.assert_close(caches.float(), expected_caches.float(), atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("codes", kv_codes.CODE_DTYPES, ids=str)
def test_rope_into_a_cache_of_codes(codes: torch.dtype) -> None:
    """Rotated keys differ by the last bit at most, so codes do by one step at most, and hardly ever."""
    inputs, expected = rope_inputs(ROPE_SHAPES[0], torch.float16), rope_inputs(ROPE_SHAPES[0], torch.float16)
    for arguments, function in ((inputs, rope_and_cache), (expected, reference.rope_and_cache)):
        for name in "kv":
            cache = arguments[f"{name}_cache_BGPE"] = torch.zeros_like(arguments[f"{name}_cache_BGPE"]).to(codes)
            arguments[f"{name}_scales_BGP"] = (
                torch.zeros(cache.shape[:3], device=DEVICE) if codes == torch.int8 else None
            )
        by_name.rope_and_cache(function, **arguments)
    assert torch.equal(inputs["v_cache_BGPE"].view(torch.uint8), expected["v_cache_BGPE"].view(torch.uint8))
    k, expected_k = inputs["k_cache_BGPE"].view(torch.uint8), expected["k_cache_BGPE"].view(torch.uint8)
    differs = k != expected_k
    assert differs.float().mean() < 0.01
    assert ((k.int() - expected_k.int()).abs()[differs] == 1).all()
