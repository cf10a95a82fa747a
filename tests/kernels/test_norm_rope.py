"""Norms and rope + KV write, also as codes, against their plain-torch twins on sizes nobody would choose.

Dimensions: T tokens, D hidden, H query heads, G KV heads, E head_dim, B cache blocks, P block_size, R rotary_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import cpu, kv_codes, ops, reference
from quire.kernels.layer_rules import HeadRotation
from tests.covering import covering
from tests.kernels.by_name import rope_and_cache

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Both round once from float32: results are the same or neighbours, and neighbours differ by one unit in the last place.
TOLERANCES = {torch.float32: (1e-6, 2e-6), torch.float16: (1e-6, 1.1e-3), torch.bfloat16: (1e-6, 8.2e-3)}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    atol, rtol = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("isa", "dtype", "D"), covering(cpu.isas(), DTYPES, [1, 7, 16, 33, 111, 1024, 2560]), indirect=["isa"]
)
def test_rms_norm(isa: str, dtype: torch.dtype, D: int) -> None:
    x = randn(19, D + 5, dtype=dtype)[:, :D]
    for weight_dtype, offset in ((dtype, 0.0), (torch.float32, 1.0)):
        weight = randn(D, dtype=weight_dtype, seed=1)
        assert_close(ops.rms_norm(x, weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset))


@pytest.mark.parametrize(("isa", "dtype", "D"), covering(cpu.isas(), DTYPES, [1, 7, 33, 111, 1024]), indirect=["isa"])
def test_add_rms_norm(isa: str, dtype: torch.dtype, D: int) -> None:
    x, residual, weight = (randn(19, D, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0].clone()
    expected_residual = residual + x
    out = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, expected_residual), "the residual is the sum, rounded to its dtype"
    assert_close(out, reference.rms_norm(expected_residual, weight, 1e-6))


@pytest.mark.parametrize(("isa", "dtype", "D"), covering(cpu.isas(), DTYPES, [1, 7, 33, 111, 1024]), indirect=["isa"])
def test_layer_norm(isa: str, dtype: torch.dtype, D: int) -> None:
    """Rows far from 0: a variance as a difference of squares would lose its digits."""
    x = randn(19, D + 5, dtype=dtype)[:, :D] + 100
    for weight_dtype in (dtype, torch.float32):
        weight, bias = randn(D, dtype=weight_dtype, seed=1), randn(D, dtype=weight_dtype, seed=2)
        torch.testing.assert_close(
            ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5), atol=2e-5, rtol=8.2e-3
        )


@pytest.mark.parametrize(("isa", "dtype"), covering(cpu.isas(), DTYPES), indirect=["isa"])
def test_what_is_added_is_multiplied_and_rounded_first(isa: str, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(5, 111, dtype=dtype, seed=i) for i in range(3))
    weight, expected_residual = weight[0].clone(), residual + x * 0.22
    bias = torch.zeros_like(weight)
    for added in (
        lambda residual: ops.add_rms_norm(x, residual, weight, 1e-6, multiplier=0.22),
        lambda residual: ops.add_layer_norm(x, residual, weight, bias, 1e-6, multiplier=0.22),
    ):
        changed = residual.clone()
        added(changed)
        assert torch.equal(changed, expected_residual)
    assert_close(
        ops.add_layer_norm(x, residual, weight, bias, 1e-6, multiplier=0.22),
        reference.layer_norm(expected_residual, weight, bias, 1e-6),
    )


def test_norm_writes_into_out_and_over_its_input(isa: str) -> None:
    x, residual, weight = randn(5, 40, dtype=torch.bfloat16), randn(5, 40, dtype=torch.bfloat16, seed=1), torch.ones(40)
    expected = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    wide = torch.zeros(5, 60, dtype=torch.bfloat16)
    out = ops.add_rms_norm(x, residual.clone(), weight, 1e-6, out=wide[:, 10:50])
    assert out.data_ptr() == wide[:, 10:50].data_ptr()
    assert torch.equal(wide[:, 10:50], expected)
    assert not wide[:, :10].any(), "wrote in front of out"
    assert not wide[:, 50:].any(), "wrote behind out"
    ops.add_rms_norm(x, residual, weight, 1e-6, out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_row_does_not_depend_on_the_others(
    isa: str, dtype: torch.dtype, set_num_threads: Callable[[int], None]
) -> None:
    x, weight = randn(70, 1031, dtype=dtype), randn(1031, dtype=dtype, seed=1)
    set_num_threads(1)
    alone = torch.cat([ops.rms_norm(x[i : i + 1], weight, 1e-6) for i in range(70)])
    for threads in (1, 3):
        set_num_threads(threads)
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), alone)


# H, G, E, R (0 = no rotation), P, with norm
ROPE_SHAPES = [
    (4, 2, 64, 64, 16, True),
    (7, 1, 24, 24, 8, False),
    (3, 3, 80, 32, 32, True),
    (2, 1, 128, 0, 16, True),
    (2, 2, 10, 6, 16, False),
    (16, 8, 128, 128, 16, True),
    (1, 1, 256, 256, 64, False),
]


def rope_inputs(shape: tuple, dtype: torch.dtype, T: int = 37) -> dict[str, Tensor | float | None]:
    H, G, E, R, P, has_norm = shape
    qkv = randn(T, (H + 2 * G) * E, dtype=dtype)
    q, k, v = (x.unflatten(1, (-1, E)) for x in qkv.split([H * E, G * E, G * E], dim=1))
    generator = torch.Generator().manual_seed(2)
    B = T // P + 3
    angles = torch.rand(50, max(R // 2, 1), generator=generator) * 6.3
    slots = torch.randperm(B * P, generator=generator)[:T]
    slots[::5] = -1
    return {
        "q_THE": q,
        "k_TGE": k,
        "v_TGE": v,
        "positions_T": torch.randint(0, 50, (T,), generator=generator),
        "cos_sin_PR": torch.cat((angles.cos(), angles.sin()), dim=1) if R else None,
        "slot_mapping_T": slots,
        "k_cache_BGPE": randn(B, 2, G, P, E, dtype=dtype, seed=3)[:, 1],  # its blocks lie further apart
        "v_cache_BGPE": randn(B, G, P, E, dtype=dtype, seed=4),
        "q_norm_weight_E": randn(E, dtype=dtype, seed=5) if has_norm else None,
        "k_norm_weight_E": randn(E, dtype=dtype, seed=6) if has_norm else None,
        "norm_eps": 1e-6,
        "norm_weight_offset": 1.0,
    }


def with_codes(inputs: dict[str, Tensor | float | None], codes: torch.dtype) -> dict[str, Tensor | float | None]:
    """Caches of codes, with the scales of their rows if they have some; their old content can be recognised."""
    shape = inputs["v_cache_BGPE"].shape
    for name in ("k", "v"):
        inputs[f"{name}_cache_BGPE"] = torch.full(shape, 1.0).to(codes)
        if codes == torch.int8:
            inputs[f"{name}_scales_BGP"] = torch.full((shape[0], 2, *shape[1:3]), -1.0)[:, 1]
    return inputs


def clone(inputs: dict[str, Tensor | float | None]) -> dict[str, Tensor | float | None]:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


@pytest.mark.parametrize(("isa", "dtype", "shape"), covering(cpu.isas(), DTYPES, ROPE_SHAPES), indirect=["isa"])
def test_rope_and_cache(isa: str, dtype: torch.dtype, shape: tuple) -> None:
    inputs = rope_inputs(shape, dtype)
    expected = clone(inputs)
    before = clone(inputs)
    rope_and_cache(reference.rope_and_cache, **expected)
    rope_and_cache(ops.rope_and_cache, **inputs)
    for name in ("q_THE", "k_cache_BGPE"):
        # a rotation adds two products of opposite sign: the error is relative to the larger one
        torch.testing.assert_close(inputs[name], expected[name], atol=2e-2 if dtype != torch.float32 else 3e-6, rtol=0)
    assert torch.equal(inputs["v_cache_BGPE"], expected["v_cache_BGPE"]), "values are copied bit by bit"
    for name in ("k_TGE", "v_TGE"):
        assert torch.equal(inputs[name], before[name]), f"{name} was changed"
    written = torch.zeros(before["v_cache_BGPE"].shape[0::2][:2], dtype=torch.bool).flatten()
    written[inputs["slot_mapping_T"][inputs["slot_mapping_T"] >= 0]] = True
    for name in ("k_cache_BGPE", "v_cache_BGPE"):
        same = (inputs[name] == before[name]).transpose(1, 2).flatten(0, 1).flatten(1).all(dim=1)
        assert same[~written].all(), f"{name} was written in a slot that is not mapped"
        assert not same[written].any(), f"{name} misses a slot"


@pytest.mark.parametrize(
    ("isa", "codes", "dtype", "shape"),
    covering(cpu.isas(), list(kv_codes.CODE_DTYPES), DTYPES, ROPE_SHAPES),
    indirect=["isa"],
)
def test_rope_and_cache_as_codes(isa: str, dtype: torch.dtype, shape: tuple, codes: torch.dtype) -> None:
    inputs = with_codes(rope_inputs(shape, dtype), codes)
    expected = clone(inputs)
    before = clone(inputs)
    rope_and_cache(reference.rope_and_cache, **expected)
    rope_and_cache(ops.rope_and_cache, **inputs)
    assert torch.equal(inputs["v_cache_BGPE"].float(), expected["v_cache_BGPE"].float()), "values are not rounded so"
    for name in ("k", "v"):
        assert torch.equal(inputs[f"{name}_TGE"], before[f"{name}_TGE"]), f"{name} was changed"
        rows, twins, olds = (
            kv_codes.decode(each[f"{name}_cache_BGPE"], each.get(f"{name}_scales_BGP"))
            for each in (inputs, expected, before)
        )
        # keys are rotated in float32, and may then fall to the neighbouring code
        step = 0 if name == "v" else 0.02 if codes == torch.int8 else torch.finfo(codes).eps
        torch.testing.assert_close(rows, twins, atol=4 * step if codes == torch.int8 else 0.01 * bool(step), rtol=step)
        is_kept = (rows == olds).transpose(1, 2).flatten(0, 1).flatten(1).all(dim=1)
        written = inputs["slot_mapping_T"][inputs["slot_mapping_T"] >= 0]
        assert is_kept.sum() == len(is_kept) - len(written), f"{name}: other slots than the mapped ones were written"
        assert not is_kept[written].any(), f"{name} misses a slot"


def hostile_rows(dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, halves between codes, zeros, numbers that are too large or too small, and no numbers."""
    sizes = (0, 1e-30, 1e-5, 0.01, 1, 100, 3e4, 1e30)
    random = torch.cat([randn(40, 40, dtype=torch.float32, seed=i) * size for i, size in enumerate(sizes)])
    edges = [
        448,
        449,
        464,
        465,
        57344,
        61440,
        65536,
        2**-6,
        2**-9,
        2**-10,
        3 * 2**-11,
        2**-14,
        2**-16,
        2**-17,
        1.0625,
        1.1875,
    ]
    edge_rows = torch.tensor([edges, [-x for x in edges]]).repeat(1, 3)[:, :40]
    bad = randn(6, 40, dtype=torch.float32)
    bad[:3, 7], bad[3:5, 39] = torch.tensor([math.nan, math.inf, -math.inf]), torch.tensor([math.nan, math.inf])
    bad[5] = math.inf
    return torch.cat((random, edge_rows, bad)).to(dtype)


@pytest.mark.parametrize("codes", kv_codes.CODE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_twin(isa: str, dtype: torch.dtype, codes: torch.dtype) -> None:
    rows_T1E = hostile_rows(dtype).unsqueeze(1)
    T, P = len(rows_T1E), 8
    caches = torch.zeros(2, -(-T // P), 1, P, 40).to(codes)
    scales = torch.zeros(2, -(-T // P), 1, P) if codes == torch.int8 else [None, None]
    positions = torch.arange(T)
    ops.rope_and_cache(
        *(rows_T1E.clone(), rows_T1E, -rows_T1E, positions, positions),
        LayerCache(*caches, *scales),
        HeadRotation(),
    )
    for sign, cache, row_scales in zip((1, -1), caches, scales, strict=True):
        expected_codes, expected_scales = kv_codes.encode(sign * rows_T1E[:, 0].float(), codes)
        found = cache.flatten(0, 2)[:T]
        expected = kv_codes.decode(expected_codes, expected_scales)
        decoded = kv_codes.decode(found, None if row_scales is None else row_scales.flatten()[:T])
        assert torch.equal(decoded.nan_to_num(nan=-7.5), expected.nan_to_num(nan=-7.5))
        is_finite = rows_T1E[:, 0].isfinite().all(1)
        assert decoded[is_finite].isfinite().all(), "a number became none"
        assert not decoded[~is_finite].isfinite().all(1).any(), "a number that is not finite was hidden"


def test_norm_of_only_one_of_q_and_k(isa: str) -> None:
    inputs = rope_inputs(ROPE_SHAPES[0], torch.float32)
    inputs["q_norm_weight_E"] = None
    expected = clone(inputs)
    rope_and_cache(reference.rope_and_cache, **expected)
    rope_and_cache(ops.rope_and_cache, **inputs)
    for name in ("q_THE", "k_cache_BGPE"):
        torch.testing.assert_close(inputs[name], expected[name], atol=3e-6, rtol=0)


@pytest.mark.parametrize("rotates", [True, False])
def test_queries_grow_with_the_position(isa: str, rotates: bool) -> None:
    """As in Llama 4's layers without rotation; keys stay."""
    inputs = rope_inputs(ROPE_SHAPES[0], torch.float32)
    if not rotates:
        inputs |= {"cos_sin_PR": None, "q_norm_weight_E": None, "k_norm_weight_E": None}
    tuned = clone(inputs) | {"temperature": 0.1, "temperature_floor": 3.0}
    expected = clone(tuned)
    for each in (inputs, tuned):
        rope_and_cache(ops.rope_and_cache, **each)
    rope_and_cache(reference.rope_and_cache, **expected)
    factors_T = torch.tensor([1 + 0.1 * math.log(1 + (p + 1) // 3) for p in inputs["positions_T"].tolist()])
    assert factors_T.max() > 1.05
    for q_THE in (tuned["q_THE"], expected["q_THE"]):
        torch.testing.assert_close(q_THE, inputs["q_THE"] * factors_T[:, None, None], atol=3e-6, rtol=1e-6)
    assert torch.equal(tuned["k_cache_BGPE"], inputs["k_cache_BGPE"])


def test_twin_rotates_as_complex_numbers() -> None:
    """Dimensions i and i + R / 2 are the parts of one complex number; a rotation multiplies it with exp(i angle)."""
    inputs = rope_inputs((2, 1, 16, 12, 8, False), torch.float32, T=5)
    q, angles = inputs["q_THE"].clone(), inputs["cos_sin_PR"][inputs["positions_T"]]
    rope_and_cache(reference.rope_and_cache, **inputs)
    rotation_T1R = torch.complex(angles[:, :6], angles[:, 6:]).unsqueeze(1)
    turned = torch.complex(q[..., :6], q[..., 6:12]) * rotation_T1R
    torch.testing.assert_close(inputs["q_THE"], torch.cat((turned.real, turned.imag, q[..., 12:]), dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_of_a_token_does_not_depend_on_the_others(
    isa: str, dtype: torch.dtype, set_num_threads: Callable[[int], None]
) -> None:
    inputs = rope_inputs(ROPE_SHAPES[5], dtype, T=40)
    set_num_threads(3)
    together = clone(inputs)
    rope_and_cache(ops.rope_and_cache, **together)
    set_num_threads(1)
    for t in range(40):
        row = {
            name: x[t : t + 1] if isinstance(x, Tensor) and name.rsplit("_", 1)[1].startswith("T") else x
            for name, x in inputs.items()
        }
        rope_and_cache(ops.rope_and_cache, **row)
    for name in ("q_THE", "k_cache_BGPE", "v_cache_BGPE"):
        assert torch.equal(inputs[name], together[name]), name
