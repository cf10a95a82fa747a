"""FP8 weights: codes against torch's conversion bit for bit, products against the float32 twin on odd sizes, every
instruction set; bit-equality of rows.

Dimensions: T tokens, K in-features, N out-features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, reference
from quire.kernels.fp8 import fp8_linear, fp8_rows, pack_fp8, quantize_fp8
from quire.kernels.fp8_weight import Fp8Weight
from tests.covering import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Groups of one step of 32, of the common checkpoints (128), of more than a block of K, a whole row (0)
GROUP_SIZES = [32, 128, 192, 2080, 0]
# N around the panel width (64); K below, at and above whole groups, and, 2500, over several blocks of K
SHAPES_NK = [(1, 1), (19, 111), (64, 128), (130, 640), (70, 2500)]
BATCHES = [1, 2, 3, 4, 5, 6, 7, 13, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130]

# The twin rounds scale * code, and adds up to 2500 products in another order.
ATOL = 5e-5


def make(group_size: int, N: int, K: int, T: int, dtype: torch.dtype) -> tuple[Tensor, Fp8Weight]:
    """x_TK and a weight such that outputs are of order 1; every group has its own scale."""
    generator = torch.Generator().manual_seed(N * 7919 + K)
    x_TK = torch.randn(T, K, generator=generator).to(dtype)
    weight = quantize_fp8(torch.randn(N, K, generator=generator) / K**0.5)
    if group_size == 0:
        return x_TK, weight
    G = -(-K // group_size)
    factors_NG = torch.rand(N, G, generator=generator) + 0.5
    return x_TK, Fp8Weight(weight.codes_NK, weight.scales_NG * factors_NG, group_size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantization_is_torch_s_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    for N, K in SHAPES_NK:
        weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(K)).to(dtype)
        weight_NK[0, 0] *= 3000  # so that others become subnormal codes
        weight_NK[-1] = 0
        wide = torch.full((N, K + 5), float("nan")).to(dtype)
        wide[:, 2 : K + 2] = weight_NK
        actual, expected = quantize_fp8(wide[:, 2 : K + 2]), reference.quantize_fp8(weight_NK)
        assert torch.equal(actual.scales_NG, expected.scales_NG)
        assert torch.equal(actual.codes_NK.view(torch.uint8), expected.codes_NK.view(torch.uint8))


def test_quantization_rounds_every_tie_to_even(isa: str) -> None:
    """All codes, all values halfway between two of them, and their neighbours in float32."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(1e9))])
    weight_NK = torch.stack([values, -values])
    weight_NK[:, 0] = 448  # the scale is 1
    actual = quantize_fp8(weight_NK)
    assert torch.equal(actual.scales_NG, torch.ones(2, 1))
    expected = weight_NK.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(actual.codes_NK.view(torch.uint8), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gets_the_scale_nan(isa: str, value: float) -> None:
    weight_NK = torch.randn(3, 50)
    weight_NK[1, 7] = value
    for weight in (quantize_fp8(weight_NK), reference.quantize_fp8(weight_NK)):
        assert weight.scales_NG.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_exact(isa: str, dtype: torch.dtype) -> None:
    """Each of the 256 codes alone in a row of zeros, at every place of a step; NaN stays in its output column."""
    codes_NK = torch.zeros(256, 64, dtype=torch.uint8)
    places = torch.arange(256) % 64
    codes_NK[torch.arange(256), places] = torch.arange(256).to(torch.uint8)
    codes_NK = codes_NK.view(torch.float8_e4m3fn)
    packed = pack_fp8(Fp8Weight(codes_NK, torch.ones(256, 1), 64))
    expected_N = codes_NK.float()[torch.arange(256), places]
    assert expected_N.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    for T in (1, 20, 40):
        actual_TN = fp8_linear(torch.ones(T, 64, dtype=dtype), packed, out_dtype=torch.float32)
        torch.testing.assert_close(actual_TN, expected_N.expand(T, 256), atol=0, rtol=0, equal_nan=True)
    rows_N = torch.randperm(256)
    restored_NK = fp8_rows(packed, rows_N, torch.float32)
    torch.testing.assert_close(restored_NK, codes_NK.float()[rows_N], atol=0, rtol=0, equal_nan=True)


def test_a_nan_stays_in_its_column(isa: str) -> None:
    """NaN codes of both signs in every second column, one in each, at places of all kinds."""
    N, K = 130, 96
    _, weight = make(32, N, K, 1, torch.float32)
    codes_NK = weight.codes_NK.view(torch.uint8).clone()
    columns = torch.arange(0, N, 2)
    codes_NK[columns, columns * 7 // 2 % K] = torch.where(columns % 4 == 0, 0x7F, 0xFF).to(torch.uint8)
    with_nan = pack_fp8(Fp8Weight(codes_NK.view(torch.float8_e4m3fn), weight.scales_NG, 32))
    for T in (1, 2, 5, 20):
        x_TK = torch.randn(T, K)
        actual_TN = fp8_linear(x_TK, with_nan)
        assert actual_TN.isnan().all(0).nonzero().flatten().tolist() == columns.tolist()
        assert torch.equal(actual_TN[:, 1::2], fp8_linear(x_TK, pack_fp8(weight))[:, 1::2])


@pytest.mark.parametrize(
    ("isa", "shape", "group_size", "dtype"),
    covering(cpu.isas(), SHAPES_NK, GROUP_SIZES, DTYPES),
    indirect=["isa"],
    ids=str,
)
def test_matches_the_twin(isa: str, shape: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    N, K = shape
    x_TK, weight = make(group_size, N, K, 37, dtype)
    packed = pack_fp8(weight)
    assert packed.is_packed
    bias_N = torch.randn(N).to(dtype)
    for bias in (None, bias_N):
        sums_TN = fp8_linear(x_TK, packed, bias, torch.float32)
        expected_TN = reference.fp8_linear(x_TK, weight, bias, torch.float32)
        torch.testing.assert_close(sums_TN, expected_TN, atol=ATOL, rtol=0)
        for out_dtype in DTYPES:  # rounded once, from the same float32 sum
            assert torch.equal(fp8_linear(x_TK, packed, bias, out_dtype), sums_TN.to(out_dtype))
    assert fp8_linear(x_TK, packed).dtype == dtype
    rows_T = torch.tensor([N - 1, 0, N // 2])
    restored_NK = reference.dequantize_fp8(weight)
    for out_dtype in DTYPES:
        assert torch.equal(fp8_rows(packed, rows_T, out_dtype), restored_NK[rows_T].to(out_dtype))
    for row in (-1, N):
        with pytest.raises(IndexError):
            fp8_rows(packed, torch.tensor([0, row]), dtype)


@pytest.mark.parametrize(
    ("isa", "shape", "group_size", "dtype"),
    covering(cpu.isas(), [(130, 111), (70, 2500)], GROUP_SIZES, [torch.bfloat16, torch.float16]),
    indirect=["isa"],
    ids=str,
)
def test_rows_do_not_depend_on_the_batch(isa: str, shape: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    N, K = shape
    x_TK, weight = make(group_size, N, K, max(BATCHES), dtype)
    packed = pack_fp8(weight)
    all_TN = fp8_linear(x_TK, packed, out_dtype=torch.float32)
    for T in BATCHES:
        assert torch.equal(fp8_linear(x_TK[:T], packed, out_dtype=torch.float32), all_TN[:T]), f"first {T} rows"
        assert torch.equal(fp8_linear(x_TK[-T:], packed, out_dtype=torch.float32), all_TN[-T:]), f"last {T} rows"


def test_long_prefill_rows_do_not_depend_on_the_batch(isa: str) -> None:
    """More rows than one chunk of the driver (1024), and several row blocks."""
    x_TK, weight = make(128, 66, 160, 1100, torch.bfloat16)
    packed = pack_fp8(weight)
    all_TN = fp8_linear(x_TK, packed)
    for begin, end in [(0, 1), (1020, 1030), (1099, 1100), (500, 1100)]:
        assert torch.equal(fp8_linear(x_TK[begin:end], packed), all_TN[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize("group_size", [128, 0])
def test_result_does_not_depend_on_the_threads(
    isa: str, group_size: int, set_num_threads: Callable[[int], None]
) -> None:
    x_TK, weight = make(group_size, 500, 257, 70, torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3, 5):
        set_num_threads(num_threads)
        packed = pack_fp8(weight)
        results.append([fp8_linear(x_TK[:T], packed) for T in (1, 6, 33, 70)])
    for num_threads, result in zip((2, 3, 5), results[1:], strict=True):
        for one, many in zip(results[0], result, strict=True):
            assert torch.equal(one, many), f"{num_threads} threads, {len(one)} rows"


def test_strided_rows(isa: str) -> None:
    x_TK, weight = make(128, 50, 100, 9, torch.bfloat16)
    wide_x = torch.full((9, 120), float("nan")).bfloat16()
    wide_x[:, 7:107] = x_TK
    wide_codes = torch.full((50, 120), 3.0).to(torch.float8_e4m3fn)
    wide_codes[:, 5:105] = weight.codes_NK
    expected_TN = fp8_linear(x_TK, pack_fp8(weight))
    strided = pack_fp8(Fp8Weight(wide_codes[:, 5:105], weight.scales_NG, 128))
    assert torch.equal(fp8_linear(wide_x[:, 7:107], strided), expected_TN)
    assert torch.equal(fp8_linear(x_TK.t().contiguous().t(), strided), expected_TN)
    columns_TN = torch.zeros(len(expected_TN), 3 + expected_TN.shape[1], dtype=expected_TN.dtype)[:, 3:]
    assert fp8_linear(x_TK, strided, out=columns_TN) is columns_TN
    assert torch.equal(columns_TN, expected_TN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_non_finite_values_stay_in_their_row(isa: str, dtype: torch.dtype, value: float) -> None:
    x_TK, weight = make(128, 40, 300, 20, dtype)
    packed = pack_fp8(weight)
    clean_TN = fp8_linear(x_TK, packed)
    x_TK[3, 7] = value
    dirty_TN = fp8_linear(x_TK, packed)
    assert not dirty_TN[3].isfinite().any()
    dirty_TN[3] = clean_TN[3]
    assert torch.equal(dirty_TN, clean_TN)


def test_no_rows(isa: str) -> None:
    _, weight = make(0, 5, 6, 1, torch.float32)
    assert fp8_linear(torch.empty(0, 6), pack_fp8(weight)).shape == (0, 5)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_without_the_extension_the_twin_computes(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK, weight = make(group_size, 19, 111, 7, torch.bfloat16)
    on_kernels = pack_fp8(weight)
    expected_TN, rows_T = fp8_linear(x_TK, on_kernels, out_dtype=torch.float32), torch.tensor([3, 18, 3])
    expected_TK = fp8_rows(on_kernels, rows_T, torch.bfloat16)
    monkeypatch.setattr(cpu, "_available", False)
    packed = pack_fp8(weight)
    assert not packed.is_packed
    actual_TN = fp8_linear(x_TK, packed, out_dtype=torch.float32)
    torch.testing.assert_close(actual_TN, expected_TN, atol=ATOL, rtol=0)
    assert torch.equal(fp8_rows(packed, rows_T, torch.bfloat16), expected_TK)
