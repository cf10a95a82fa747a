"""Grouped integer weights: quantization against its twin bit for bit, products against the float32 twin on odd sizes,
every instruction set; bit-equality of rows.

Dimensions: T tokens, K in-features, N out-features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, ops, reference
from quire.weight_format import GroupedFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Groups of one AMX step (64), of half a step (32, which AMX leaves to the dot products), of several (128), a whole row
FORMATS = [
    GroupedFormat(8, None),
    GroupedFormat(8, 128),
    GroupedFormat(8, 32),
    GroupedFormat(4, 128),
    GroupedFormat(4, 64),
    GroupedFormat(4, 32),
]
# N around the panel width (64); K below, at and above whole groups, and, 2500, over several blocks of K
SHAPES_NK = [(1, 1), (19, 111), (64, 128), (130, 640), (70, 2500)]
BATCHES = [1, 2, 3, 4, 5, 6, 7, 13, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130]

# Integer sums are exact; the twin adds up to 2500 products in float32, the kernels one per group.
ATOL = 5e-5


def make(weight_format: GroupedFormat, N: int, K: int, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x_TK, codes_NK, scales_NG such that outputs are of order 1."""
    generator = torch.Generator().manual_seed(N * 7919 + K)
    x_TK = torch.randn(T, K, generator=generator).to(dtype)
    weight_NK = (torch.randn(N, K, generator=generator) / K**0.5).to(dtype)
    return x_TK, *ops.quantize_grouped(weight_NK, weight_format.bits, weight_format.group_size_of(K))


def pack(weight_format: GroupedFormat, codes_NK: Tensor, scales_NG: Tensor) -> ops.PackedGrouped:
    return ops.pack_grouped(codes_NK, scales_NG, weight_format.bits, weight_format.group_size_of(codes_NK.shape[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_quantization_is_the_twin_s_bit_for_bit(isa: str, weight_format: GroupedFormat, dtype: torch.dtype) -> None:
    for N, K in SHAPES_NK:
        weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(K)).to(dtype)
        weight_NK[0, 0] *= 30  # a group with one large element
        weight_NK[-1] = 0
        wide = torch.full((N, K + 5), float("nan")).to(dtype)
        wide[:, 2 : K + 2] = weight_NK
        size = weight_format.group_size_of(K)
        codes_NK, scales_NG = ops.quantize_grouped(wide[:, 2 : K + 2], weight_format.bits, size)
        expected_codes_NK, expected_scales_NG = reference.quantize_grouped(weight_NK, weight_format.bits, size)
        assert torch.equal(scales_NG, expected_scales_NG)
        assert torch.equal(codes_NK, expected_codes_NK)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_rounding_error_is_within_half_a_step(weight_format: GroupedFormat) -> None:
    """8 bits: everywhere. 4 bits: but for the end opposite to the largest element, which is clamped to 7 steps."""
    weight_NK = torch.randn(33, 500)
    size = weight_format.group_size_of(500)
    codes_NK, scales_NG = ops.quantize_grouped(weight_NK, weight_format.bits, size)
    restored_NK = reference.dequantize_grouped(codes_NK, scales_NG, weight_format.bits, size)
    steps_NK = scales_NG.abs().repeat_interleave(size, 1)[:, :500]
    error_NK = (restored_NK - weight_NK).abs()
    is_clamped_NK = codes_NK == (15 if weight_format.bits == 4 else 256)
    assert (error_NK[~is_clamped_NK] <= 0.5001 * steps_NK[~is_clamped_NK]).all()
    assert (error_NK <= 1.0001 * steps_NK).all()
    assert is_clamped_NK.float().mean() < 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "K"), SHAPES_NK)
def test_matches_the_twin(isa: str, N: int, K: int, weight_format: GroupedFormat, dtype: torch.dtype) -> None:
    x_TK, codes_NK, scales_NG = make(weight_format, N, K, 37, dtype)
    packed = pack(weight_format, codes_NK, scales_NG)
    assert packed.is_packed
    assert packed.nbytes == weight_format.num_bytes(N, K)
    bias_N = torch.randn(N).to(dtype)
    arguments = (codes_NK, scales_NG, packed.bits, packed.group_size)
    for bias in (None, bias_N):
        sums_TN = ops.grouped_linear(x_TK, packed, bias, torch.float32)
        expected_TN = reference.grouped_linear(x_TK, *arguments, bias, torch.float32)
        torch.testing.assert_close(sums_TN, expected_TN, atol=ATOL, rtol=0)
        for out_dtype in DTYPES:  # rounded once, from the same float32 sum
            assert torch.equal(ops.grouped_linear(x_TK, packed, bias, out_dtype), sums_TN.to(out_dtype))
    assert ops.grouped_linear(x_TK, packed).dtype == dtype


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_codes_of_every_value(isa: str, weight_format: GroupedFormat) -> None:
    """Zeros, the extremes, and all in between; sums of the largest magnitude do not overflow."""
    K, N = 4096, 66
    codes_NK = (torch.arange(N * K) % (1 << weight_format.bits)).to(torch.uint8).view(N, K)
    codes_NK[1], codes_NK[2] = 0, (1 << weight_format.bits) - 1
    scales_NG = torch.ones(N, -(-K // weight_format.group_size_of(K)))
    packed = pack(weight_format, codes_NK, scales_NG)
    x_TK = torch.ones(40, K)
    x_TK[1] = -1
    x_TK[2, ::2] = -1
    expected_TN = x_TK.double() @ (codes_NK.double() - (1 << (weight_format.bits - 1))).T
    # the scale of a row is 1/127 in float32
    torch.testing.assert_close(ops.grouped_linear(x_TK, packed).double(), expected_TN, atol=1e-6, rtol=1e-5)
    rows_N = torch.randperm(N)
    restored_NK = ops.grouped_rows(packed, rows_N, torch.float32)
    assert torch.equal(restored_NK, codes_NK[rows_N].float() - (1 << (weight_format.bits - 1)))


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "K"), [(130, 111), (70, 2500)])
def test_rows_do_not_depend_on_the_batch(isa: str, N: int, K: int, weight_format: GroupedFormat) -> None:
    x_TK, codes_NK, scales_NG = make(weight_format, N, K, max(BATCHES), torch.bfloat16)
    packed = pack(weight_format, codes_NK, scales_NG)
    all_TN = ops.grouped_linear(x_TK, packed, out_dtype=torch.float32)
    for T in BATCHES:
        first_TN = ops.grouped_linear(x_TK[:T], packed, out_dtype=torch.float32)
        assert torch.equal(first_TN, all_TN[:T]), f"first {T} rows"
        last_TN = ops.grouped_linear(x_TK[-T:], packed, out_dtype=torch.float32)
        assert torch.equal(last_TN, all_TN[-T:]), f"last {T} rows"


@pytest.mark.parametrize("weight_format", [FORMATS[0], FORMATS[3]], ids=str)
def test_long_prefill_rows_do_not_depend_on_the_batch(isa: str, weight_format: GroupedFormat) -> None:
    """More rows than one chunk of the driver (1024), and several row blocks."""
    x_TK, codes_NK, scales_NG = make(weight_format, 66, 160, 1100, torch.bfloat16)
    packed = pack(weight_format, codes_NK, scales_NG)
    all_TN = ops.grouped_linear(x_TK, packed)
    for begin, end in [(0, 1), (1020, 1030), (1099, 1100), (500, 1100)]:
        assert torch.equal(ops.grouped_linear(x_TK[begin:end], packed), all_TN[begin:end]), f"rows {begin} to {end}"


@pytest.mark.skipif("amx" not in cpu.isas(), reason="this CPU has no AMX")
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_amx_gives_the_bits_of_the_dot_products(weight_format: GroupedFormat) -> None:
    """So the kernel may be chosen by the number of rows."""
    x_TK, codes_NK, scales_NG = make(weight_format, 130, 640, 70, torch.bfloat16)
    packed = pack(weight_format, codes_NK, scales_NG)
    before, results = cpu.isa(), []
    for isa in ("avx512_bf16", "amx"):
        cpu.set_isa(isa)
        results.append(ops.grouped_linear(x_TK, packed, out_dtype=torch.float32))
    cpu.set_isa(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("weight_format", [FORMATS[0], FORMATS[3]], ids=str)
def test_result_does_not_depend_on_the_threads(
    isa: str, weight_format: GroupedFormat, set_num_threads: Callable[[int], None]
) -> None:
    x_TK, codes_NK, scales_NG = make(weight_format, 500, 257, 70, torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3, 5):
        set_num_threads(num_threads)
        packed = pack(weight_format, codes_NK, scales_NG)
        results.append([ops.grouped_linear(x_TK[:T], packed) for T in (1, 6, 33, 70)])
    for num_threads, result in zip((2, 3, 5), results[1:], strict=True):
        for one, many in zip(results[0], result, strict=True):
            assert torch.equal(one, many), f"{num_threads} threads, {len(one)} rows"


@pytest.mark.parametrize("weight_format", [FORMATS[0], FORMATS[3]], ids=str)
def test_strided_rows(isa: str, weight_format: GroupedFormat) -> None:
    x_TK, codes_NK, scales_NG = make(weight_format, 50, 100, 9, torch.bfloat16)
    packed = pack(weight_format, codes_NK, scales_NG)
    wide_x = torch.full((9, 120), float("nan")).bfloat16()
    wide_x[:, 7:107] = x_TK
    wide_codes = torch.full((50, 120), 3, dtype=torch.uint8)
    wide_codes[:, 5:105] = codes_NK
    expected_TN = ops.grouped_linear(x_TK, packed)
    assert torch.equal(
        ops.grouped_linear(wide_x[:, 7:107], pack(weight_format, wide_codes[:, 5:105], scales_NG)), expected_TN
    )
    assert torch.equal(ops.grouped_linear(x_TK.t().contiguous().t(), packed), expected_TN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("weight_format", [FORMATS[0], FORMATS[3]], ids=str)
def test_non_finite_values_stay_in_their_row(isa: str, weight_format: GroupedFormat, value: float) -> None:
    x_TK, codes_NK, scales_NG = make(weight_format, 40, 300, 20, torch.bfloat16)
    packed = pack(weight_format, codes_NK, scales_NG)
    clean_TN = ops.grouped_linear(x_TK, packed)
    x_TK[3, 7] = value
    dirty_TN = ops.grouped_linear(x_TK, packed)
    assert dirty_TN[3].isnan().all()
    dirty_TN[3] = clean_TN[3]
    assert torch.equal(dirty_TN, clean_TN)


def test_rows_of_zeros_and_of_tiny_values_give_zeros(isa: str) -> None:
    _, codes_NK, scales_NG = make(FORMATS[3], 40, 300, 1, torch.float32)
    packed = pack(FORMATS[3], codes_NK, scales_NG)
    x_TK = torch.zeros(5, 300)
    x_TK[1, 5] = 1e-38
    assert torch.equal(ops.grouped_linear(x_TK, packed), torch.zeros(5, 40))


def test_no_rows(isa: str) -> None:
    _, codes_NK, scales_NG = make(FORMATS[0], 5, 6, 1, torch.float32)
    assert ops.grouped_linear(torch.empty(0, 6), pack(FORMATS[0], codes_NK, scales_NG)).shape == (0, 5)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_without_the_extension_the_twin_computes(weight_format: GroupedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK, codes_NK, scales_NG = make(weight_format, 19, 111, 7, torch.bfloat16)
    on_kernels = pack(weight_format, codes_NK, scales_NG)
    expected_TN, rows_T = ops.grouped_linear(x_TK, on_kernels, out_dtype=torch.float32), torch.tensor([3, 18, 3])
    expected_TK = ops.grouped_rows(on_kernels, rows_T, torch.bfloat16)
    monkeypatch.setattr(cpu, "_available", False)
    packed = pack(weight_format, codes_NK, scales_NG)
    assert not packed.is_packed
    actual_TN = ops.grouped_linear(x_TK, packed, out_dtype=torch.float32)
    torch.testing.assert_close(actual_TN, expected_TN, atol=ATOL, rtol=0)
    assert torch.equal(ops.grouped_rows(packed, rows_T, torch.bfloat16), expected_TK)
    weight_NK = torch.randn(4, 70)
    for mine, other in zip(
        ops.quantize_grouped(weight_NK, 4, 32), reference.quantize_grouped(weight_NK, 4, 32), strict=True
    ):
        assert torch.equal(mine, other)
