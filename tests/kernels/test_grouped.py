"""Grouped integer weights: quantization against its twin bit for bit, products against the float32 twin on odd sizes,
every instruction set; bit-equality of rows.

Dimensions: T tokens, K in-features, N out-features, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu, reference
from quire.kernels.grouped import grouped_linear, grouped_rows, pack_grouped, quantize_grouped
from quire.kernels.grouped_weight import GroupedWeight
from tests.covering import covering
from tests.kernels.grouped_weights import FORMATS, PLAIN_FORMATS, random_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FACTOR_FORMATS = [form for form in FORMATS if form.scales == "int8"]
CONTRASTING_FORMATS = [
    GroupedFormat(8, None),
    GroupedFormat(4, 128),
    GroupedFormat(4, 16, "int8", "int8", super_size=16, is_ordered=True),
]
# N around the panel width (64); K below, at and above whole groups, and, 2500, over several blocks of K
SHAPES_NK = [(1, 1), (19, 111), (64, 128), (130, 640), (70, 2500)]
BATCHES = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130]

# Integer sums are exact; the twin adds up to 2500 products in float32, the kernels one per group.
ATOL = 5e-5


def make(weight_format: GroupedFormat, N: int, K: int, T: int, dtype: torch.dtype) -> tuple[Tensor, GroupedWeight]:
    """x_TK and a weight such that outputs are of order 1."""
    x_TK = torch.randn(T, K, generator=torch.Generator().manual_seed(K)).to(dtype)
    return x_TK, random_weight(weight_format, N, K)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_format", PLAIN_FORMATS, ids=str)
def test_quantization_is_the_twin_s_bit_for_bit(isa: str, weight_format: GroupedFormat, dtype: torch.dtype) -> None:
    for N, K in SHAPES_NK:
        weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(K)).to(dtype)
        weight_NK[0, 0] *= 30  # a group with one large element
        weight_NK[-1] = 0
        wide = torch.full((N, K + 5), float("nan")).to(dtype)
        wide[:, 2 : K + 2] = weight_NK
        size = weight_format.group_size_of(K)
        actual = quantize_grouped(wide[:, 2 : K + 2], weight_format.bits, size)
        expected = reference.quantize_grouped(weight_NK, weight_format.bits, size)
        assert torch.equal(actual.scales_NG, expected.scales_NG)
        assert torch.equal(actual.codes_NK, expected.codes_NK)


@pytest.mark.parametrize("weight_format", PLAIN_FORMATS, ids=str)
def test_rounding_error_is_within_half_a_step(weight_format: GroupedFormat) -> None:
    """8 bits: everywhere. 4 bits: but for the end opposite to the largest element, which is clamped to 7 steps."""
    weight_NK = torch.randn(33, 500)
    size = weight_format.group_size_of(500)
    weight = quantize_grouped(weight_NK, weight_format.bits, size)
    restored_NK = reference.dequantize_grouped(weight)
    steps_NK = weight.scales_NG.abs().repeat_interleave(size, 1)[:, :500]
    error_NK = (restored_NK - weight_NK).abs()
    if weight_format.bits == 8:
        assert weight.codes_NK.min() >= 1, "codes are symmetric around 128"
    is_clamped_NK = (weight.codes_NK == 15) & (weight_format.bits == 4)
    assert (error_NK[~is_clamped_NK] <= 0.5001 * steps_NK[~is_clamped_NK]).all()
    assert (error_NK <= 1.0001 * steps_NK).all()
    assert is_clamped_NK.float().mean() < 0.1


@pytest.mark.parametrize(
    ("isa", "shape", "weight_format", "dtype"),
    covering(cpu.isas(), SHAPES_NK, FORMATS, DTYPES),
    indirect=["isa"],
    ids=str,
)
def test_matches_the_twin(isa: str, shape: tuple[int, int], weight_format: GroupedFormat, dtype: torch.dtype) -> None:
    N, K = shape
    x_TK, weight = make(weight_format, N, K, 37, dtype)
    packed = pack_grouped(weight)
    assert packed.is_packed
    assert packed.nbytes == weight_format.num_bytes(N, K)
    bias_N = torch.randn(N).to(dtype)
    for bias in (None, bias_N):
        sums_TN = grouped_linear(x_TK, packed, bias, torch.float32)
        expected_TN = reference.grouped_linear(x_TK, weight, bias, torch.float32)
        torch.testing.assert_close(sums_TN, expected_TN, atol=ATOL, rtol=0)
        for out_dtype in DTYPES:  # rounded once, from the same float32 sum
            assert torch.equal(grouped_linear(x_TK, packed, bias, out_dtype), sums_TN.to(out_dtype))
    assert grouped_linear(x_TK, packed).dtype == dtype


def test_a_result_goes_where_it_is_wanted(isa: str) -> None:
    """Into columns of a larger one, whose other columns stay."""
    x_TK, weight = make(FORMATS[0], 70, 320, 5, torch.bfloat16)
    packed = pack_grouped(weight)
    larger = torch.full((5, 100), 7.0, dtype=torch.bfloat16)
    columns_TN = larger[:, 20:90]
    assert grouped_linear(x_TK, packed, out=columns_TN) is columns_TN
    assert torch.equal(columns_TN, grouped_linear(x_TK, packed))
    assert (larger[:, :20] == 7).all()
    assert (larger[:, 90:] == 7).all()
    for wrong in (larger, larger[:, :70].T.contiguous().T, torch.empty(4, 70, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"out is|out has strides"):
            grouped_linear(x_TK, packed, out=wrong)


@pytest.mark.parametrize("weight_format", PLAIN_FORMATS, ids=str)
def test_codes_of_every_value(isa: str, weight_format: GroupedFormat) -> None:
    """Zeros, the extremes, and all in between; sums of the largest magnitude do not overflow."""
    K, N = 4096, 66
    codes_NK = (torch.arange(N * K) % (1 << weight_format.bits)).to(torch.uint8).view(N, K)
    codes_NK[1], codes_NK[2] = 0, (1 << weight_format.bits) - 1
    size = weight_format.group_size_of(K)
    scales_NG = torch.ones(N, -(-K // size))
    packed = pack_grouped(
        GroupedWeight(codes_NK=codes_NK, bits=weight_format.bits, group_size=size, scales_NG=scales_NG)
    )
    x_TK = torch.ones(40, K)
    x_TK[1] = -1
    x_TK[2, ::2] = -1
    expected_TN = x_TK.double() @ (codes_NK.double() - (1 << (weight_format.bits - 1))).T
    # the scale of a row is 1/127 in float32
    torch.testing.assert_close(grouped_linear(x_TK, packed).double(), expected_TN, atol=1e-6, rtol=1e-5)
    rows_N = torch.randperm(N)
    restored_NK = grouped_rows(packed, rows_N, torch.float32)
    assert torch.equal(restored_NK, codes_NK[rows_N].float() - (1 << (weight_format.bits - 1)))


@pytest.mark.parametrize("T", [1, 7, 40])
def test_products_of_mxfp4_are_exact(isa: str, T: int) -> None:
    """Every code, several scales; the largest values with x at both ends of its range, in signs that alternate.

    Rows of x are integers up to 127 in each group, which quantization keeps.
    """
    N, K = 130, 640
    generator = torch.Generator().manual_seed(T)
    codes_NK = torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator)
    codes_NK[0], codes_NK[1], codes_NK[2, ::2] = 7, 15, 7
    scales_NG = torch.randint(126, 129, (N, K // 32), dtype=torch.uint8, generator=generator)
    weight = GroupedWeight(codes_NK=codes_NK, bits=4, group_size=32, scales_NG=scales_NG)
    x_TK = torch.randint(-127, 128, (T, K), generator=generator).float()
    x_TK[:, ::32], x_TK[0] = 127, 127
    x_TK[T // 2, 1::2] = -127
    packed = pack_grouped(weight)
    expected_TN = x_TK.double() @ reference.dequantize_grouped(weight).double().T
    assert torch.equal(grouped_linear(x_TK, packed).double(), expected_TN)
    rows_N = torch.randperm(N, generator=generator)
    assert torch.equal(grouped_rows(packed, rows_N, torch.float32), reference.dequantize_grouped(weight.rows(rows_N)))


def test_scales_of_mxfp4_at_their_ends(isa: str) -> None:
    """The smallest is subnormal; 255 is NaN, also for codes of zero, and other columns stay what they are."""
    codes_NK = torch.full((3, 32), 2, dtype=torch.uint8)
    codes_NK[2] = 0
    scales_NG = torch.tensor([[0], [254], [255]], dtype=torch.uint8)
    weight = GroupedWeight(codes_NK=codes_NK, bits=4, group_size=32, scales_NG=scales_NG)
    expected_N = torch.tensor([2.0**-127, 2.0**127, math.nan])
    assert_close = partial(torch.testing.assert_close, atol=0, rtol=0, equal_nan=True)
    assert_close(reference.dequantize_grouped(weight)[:, 0], expected_N)
    packed = pack_grouped(weight)
    assert_close(grouped_rows(packed, torch.arange(3), torch.float32)[:, 0], expected_N)
    x_TK = torch.zeros(2, 32)
    x_TK[:, 0] = 1.0
    y_TN = grouped_linear(x_TK, packed)
    assert y_TN[:, 2].isnan().all()
    assert_close(y_TN[:, 1], torch.full((2,), 2.0**127))


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_the_largest_products_fit_into_all_sums(isa: str, weight_format: GroupedFormat) -> None:
    """Every code and every element at an end of its range, with equal signs and with signs that alternate."""
    N, K = 66, 1280
    codes_NK = torch.zeros(N, K, dtype=torch.uint8)
    x_TK = -torch.ones(13, K)
    for step in (1, 2, 4, 8):
        is_first_K = torch.arange(K) // step % 2 == 0
        codes_NK[step, is_first_K] = codes_NK[step + 16] = (1 << weight_format.bits) - 1
        x_TK[step % 7, is_first_K] = 1
    x_TK[7:] = -x_TK[:6]
    weight = replace(random_weight(weight_format, N, K), codes_NK=codes_NK)
    packed = pack_grouped(weight)
    # in float64: the sums of the twin may lose more to cancellation than the kernels' exact ones
    expected_TN = (x_TK.double() @ reference.dequantize_grouped(weight).double().T).float()
    for T in (1, 7, 13):
        torch.testing.assert_close(grouped_linear(x_TK[:T], packed), expected_TN[:T], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("T", [1, 13])
def test_sums_of_the_largest_group(isa: str, T: int) -> None:
    """65,536 elements, which is the most whose sums fit into 32 bits."""
    N, K = 66, 65_536
    codes_NK = torch.full((N, K), 255, dtype=torch.uint8)
    codes_NK[1], codes_NK[2, ::2], codes_NK[3, K // 2 :] = 0, 0, 0
    x_TK = torch.ones(T, K)
    x_TK[T // 2], x_TK[T - 1, 1::2] = -1, -1
    packed = pack_grouped(GroupedWeight(codes_NK=codes_NK, bits=8, group_size=K, scales_NG=torch.ones(N, 1)))
    expected_TN = x_TK.double() @ (codes_NK.double() - 128).T
    # the scale of a row is 1/127 in float32
    torch.testing.assert_close(grouped_linear(x_TK, packed).double(), expected_TN, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_rows_of_the_weight_are_what_was_packed(weight_format: GroupedFormat) -> None:
    weight = random_weight(weight_format, 130, 611)
    packed = pack_grouped(weight)
    restored_NK = reference.dequantize_grouped(weight)
    rows_T = torch.tensor([129, 0, 64, 63, 0])
    for dtype in DTYPES:
        assert torch.equal(grouped_rows(packed, rows_T, dtype), restored_NK[rows_T].to(dtype))
    for row in (-1, packed.N):
        with pytest.raises(IndexError):
            grouped_rows(packed, torch.tensor([0, row]), torch.float32)
    x_TK = torch.randn(3, 611, generator=torch.Generator().manual_seed(611))
    # Rounded to 8 bits: an error of some 0.4 % of the largest element per group.
    torch.testing.assert_close(grouped_linear(x_TK, packed), x_TK @ restored_NK.T, atol=0.08, rtol=0)


@pytest.mark.parametrize(
    "weight_format", [GroupedFormat(4, 128, "float16", "uint8"), GroupedFormat(8, 512, "float32", "uint8")], ids=str
)
def test_codes_at_their_zero_give_zeros(isa: str, weight_format: GroupedFormat) -> None:
    """The zero of each group is taken off exactly."""
    weight = random_weight(weight_format, 66, 1000)
    assert weight.zeros_NG is not None
    at_zero = replace(weight, codes_NK=weight.zeros_NG.repeat_interleave(weight.group_size, 1)[:, :1000])
    x_TK = torch.full((33, 1000), 3.0)
    assert torch.equal(grouped_linear(x_TK, pack_grouped(at_zero)), torch.zeros(33, 66))


@pytest.mark.parametrize(
    ("isa", "shape", "weight_format"),
    covering(cpu.isas(), [(130, 111), (70, 2500)], FORMATS),
    indirect=["isa"],
    ids=str,
)
def test_rows_do_not_depend_on_the_batch(isa: str, shape: tuple[int, int], weight_format: GroupedFormat) -> None:
    N, K = shape
    x_TK, weight = make(weight_format, N, K, max(BATCHES), torch.bfloat16)
    packed = pack_grouped(weight)
    all_TN = grouped_linear(x_TK, packed, out_dtype=torch.float32)
    for T in BATCHES:
        first_TN = grouped_linear(x_TK[:T], packed, out_dtype=torch.float32)
        assert torch.equal(first_TN, all_TN[:T]), f"first {T} rows"
        last_TN = grouped_linear(x_TK[-T:], packed, out_dtype=torch.float32)
        assert torch.equal(last_TN, all_TN[-T:]), f"last {T} rows"


@pytest.mark.parametrize("weight_format", CONTRASTING_FORMATS, ids=str)
def test_long_prefill_rows_do_not_depend_on_the_batch(isa: str, weight_format: GroupedFormat) -> None:
    """More rows than one chunk of the driver (1024), and several row blocks."""
    x_TK, weight = make(weight_format, 66, 160, 1100, torch.bfloat16)
    packed = pack_grouped(weight)
    all_TN = grouped_linear(x_TK, packed)
    for begin, end in [(0, 1), (1020, 1030), (1099, 1100), (500, 1100)]:
        assert torch.equal(grouped_linear(x_TK[begin:end], packed), all_TN[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize("weight_format", FACTOR_FORMATS, ids=str)
def test_with_factors_a_super_group_of_the_input_shares_a_scale(isa: str, weight_format: GroupedFormat) -> None:
    """A small element vanishes beside a large one in another group of its super-group, and nowhere else."""
    weight = random_weight(weight_format, 70, 600)
    packed = pack_grouped(weight)
    order_K = torch.arange(600) if weight.order_K is None else weight.order_K
    large, beside, elsewhere = order_K[[3, 200, 300]].tolist()
    x_TK = torch.zeros(4, 600)
    x_TK[0:3, large] = 127
    x_TK[1, beside] = 0.4
    x_TK[2:4, elsewhere] = 0.4
    y_TN = grouped_linear(x_TK, packed)
    assert torch.equal(y_TN[1], y_TN[0])
    torch.testing.assert_close(y_TN[2], y_TN[0] + y_TN[3], atol=ATOL, rtol=0)
    assert y_TN[3].abs().max() > 0


@pytest.mark.parametrize(
    ("bits", "super_size"),  # groups of 256, 48 and 16; planes of 3 and 5 bits are shared by 32 elements
    [
        (bits, super_size)
        for bits in (2, 3, 4, 5, 6, 8)
        for super_size in (1, 5, 16)
        if (bits % 2, super_size) != (1, 5)
    ],
)
def test_the_largest_sums_with_factors(isa: str, bits: int, super_size: int) -> None:
    """Codes, factors and input at their extremes stay within 32 bits, minima within pairs of 16."""
    N, size = 66, 256 // super_size // 16 * 16
    K = 2 * size * super_size
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([-128, 127], dtype=torch.int8)
    factors_NG, minima_NG = ends[torch.randint(2, (2, N, K // size), generator=generator)]
    factors_NG[0], minima_NG[0] = -128, 127
    codes_NK = (torch.randint(2, (N, K), generator=generator) * ((1 << bits) - 1)).to(torch.uint8)
    codes_NK[0] = (1 << bits) - 1
    x_TK = torch.randint(2, (17, K), generator=generator) * 254.0 - 127  # enough for AMX with groups of every size
    x_TK[0], x_TK[1] = 127, -127
    for has_minima in (False, True):
        weight = GroupedWeight(
            codes_NK=codes_NK,
            bits=bits,
            group_size=size,
            scales_NG=factors_NG,
            minima_NG=minima_NG if has_minima else None,
            super_scales_NS=torch.ones(N, 2).half(),
            super_minima_NS=torch.ones(N, 2).half() if has_minima else None,
            super_size=super_size,
        )
        expected_TN = x_TK.double() @ reference.dequantize_grouped(weight).double().T
        actual_TN = grouped_linear(x_TK, pack_grouped(weight)).double()
        # integers up to 2^31 in float32, added twice
        torch.testing.assert_close(actual_TN, expected_TN, atol=512, rtol=2.0**-22)


@pytest.mark.skipif(len(cpu.isas()) < 3, reason="there are no two instruction sets with fused multiply-adds")
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize(("N", "K"), [(130, 111), (70, 2500)])
def test_every_instruction_set_gives_the_same_bits(N: int, K: int, weight_format: GroupedFormat) -> None:
    """But for the scalar one, which has no fused multiply-adds. Few rows take other tiles than many."""
    x_TK, weight = make(weight_format, N, K, 20, torch.bfloat16)
    packed = pack_grouped(weight)
    before, results, first = cpu.isa(), {}, cpu.isas()[1]
    try:
        for isa in cpu.isas()[1:]:
            cpu.set_isa(isa)
            results[isa] = [grouped_linear(x_TK[:T], packed, out_dtype=torch.float32) for T in (1, 3, 20)]
    finally:
        cpu.set_isa(before)
    for isa, found in results.items():
        for y_TN, expected_TN in zip(found, results[first], strict=True):
            assert torch.equal(y_TN, expected_TN), f"{isa} and {first} differ with {len(y_TN)} rows"


@pytest.mark.skipif("amx" not in cpu.isas(), reason="this CPU has no AMX")
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_amx_gives_the_bits_of_the_dot_products(weight_format: GroupedFormat) -> None:
    """So the kernel may be chosen by the number of rows."""
    x_TK, weight = make(weight_format, 130, 640, 70, torch.bfloat16)
    packed = pack_grouped(weight)
    before, results = cpu.isa(), []
    for isa in ("avx512_bf16", "amx"):
        cpu.set_isa(isa)
        results.append(grouped_linear(x_TK, packed, out_dtype=torch.float32))
    cpu.set_isa(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("weight_format", CONTRASTING_FORMATS, ids=str)
def test_result_does_not_depend_on_the_threads(
    isa: str, weight_format: GroupedFormat, set_num_threads: Callable[[int], None]
) -> None:
    x_TK, weight = make(weight_format, 500, 257, 70, torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3, 5):
        set_num_threads(num_threads)
        packed = pack_grouped(weight)
        results.append([grouped_linear(x_TK[:T], packed) for T in (1, 6, 33, 70)])
    for num_threads, result in zip((2, 3, 5), results[1:], strict=True):
        for one, many in zip(results[0], result, strict=True):
            assert torch.equal(one, many), f"{num_threads} threads, {len(one)} rows"


@pytest.mark.parametrize("weight_format", CONTRASTING_FORMATS, ids=str)
def test_strided_rows(isa: str, weight_format: GroupedFormat) -> None:
    x_TK, weight = make(weight_format, 50, 100, 9, torch.bfloat16)
    packed = pack_grouped(weight)
    wide_x = torch.full((9, 120), float("nan")).bfloat16()
    wide_x[:, 7:107] = x_TK
    wide_codes = torch.full((50, 120), 3, dtype=torch.uint8)
    wide_codes[:, 5:105] = weight.codes_NK
    expected_TN = grouped_linear(x_TK, packed)
    strided = pack_grouped(replace(weight, codes_NK=wide_codes[:, 5:105]))
    assert torch.equal(grouped_linear(wide_x[:, 7:107], strided), expected_TN)
    assert torch.equal(grouped_linear(x_TK.t().contiguous().t(), packed), expected_TN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("weight_format", CONTRASTING_FORMATS, ids=str)
def test_non_finite_values_stay_in_their_row(isa: str, weight_format: GroupedFormat, value: float) -> None:
    x_TK, weight = make(weight_format, 40, 300, 20, torch.bfloat16)
    packed = pack_grouped(weight)
    clean_TN = grouped_linear(x_TK, packed)
    x_TK[3, 7] = value
    dirty_TN = grouped_linear(x_TK, packed)
    assert dirty_TN[3].isnan().all()
    dirty_TN[3] = clean_TN[3]
    assert torch.equal(dirty_TN, clean_TN)


def test_rows_of_zeros_and_of_tiny_values_give_zeros(isa: str) -> None:
    _, weight = make(PLAIN_FORMATS[3], 40, 300, 1, torch.float32)
    packed = pack_grouped(weight)
    x_TK = torch.zeros(5, 300)
    x_TK[1, 5] = 1e-38
    assert torch.equal(grouped_linear(x_TK, packed), torch.zeros(5, 40))


def test_no_rows(isa: str) -> None:
    _, weight = make(FORMATS[0], 5, 6, 1, torch.float32)
    assert grouped_linear(torch.empty(0, 6), pack_grouped(weight)).shape == (0, 5)


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_without_the_extension_the_twin_computes(weight_format: GroupedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK, weight = make(weight_format, 19, 111, 7, torch.bfloat16)
    on_kernels = pack_grouped(weight)
    expected_TN, rows_T = grouped_linear(x_TK, on_kernels, out_dtype=torch.float32), torch.tensor([3, 18, 3])
    expected_TK = grouped_rows(on_kernels, rows_T, torch.bfloat16)
    monkeypatch.setattr(cpu, "_available", False)
    packed = pack_grouped(weight)
    assert not packed.is_packed
    actual_TN = grouped_linear(x_TK, packed, out_dtype=torch.float32)
    torch.testing.assert_close(actual_TN, expected_TN, atol=ATOL, rtol=0)
    assert torch.equal(grouped_rows(packed, rows_T, torch.bfloat16), expected_TK)
    weight_NK = torch.randn(4, 70)
    mine, other = quantize_grouped(weight_NK, 4, 32), reference.quantize_grouped(weight_NK, 4, 32)
    assert torch.equal(mine.codes_NK, other.codes_NK)
    assert torch.equal(mine.scales_NG, other.scales_NG)


def test_rows_copy_no_more_than_was_asked_for() -> None:
    """An embedding lookup in a large table: none of its sections is copied as a whole."""
    weight = quantize_grouped(torch.randn(64 * 50, 256), 4, 32)
    packed = pack_grouped(weight)
    rows_T = torch.tensor([3, 2000])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        grouped_rows(packed, rows_T, torch.bfloat16)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < packed.nbytes / 50, f"{largest} bytes at once, the weight has {packed.nbytes}"
