"""Packed linear layers: against the float32 twin on odd sizes, every dtype and instruction set; bit-equality of rows;
the weight's own rows.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu, dense, reference
from tests.covering import covering

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# N around the panel width (64) and its quarters; K odd, around the AMX step (32) and, 2500, over one K block of every
# kernel
SHAPES_NK = [(1, 1), (19, 111), (64, 32), (130, 33), (63, 64), (100, 1000), (70, 2500)]
# Around the row tiles (6 rows of vectors, 16 and 32 of AMX tiles)
BATCHES = [1, 2, 5, 6, 7, 12, 13, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130]

# Sums of up to 2500 products of about 1/sqrt(K): float32 rounding of the sum itself, in another order than the twin's.
FLOAT32_ATOL = 2e-5


def random_linear(N: int, K: int, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x_TK, weight_NK, bias_N such that outputs are of order 1."""
    generator = torch.Generator().manual_seed(N * 7919 + K)
    x_TK = torch.randn(T, K, generator=generator).to(dtype)
    weight_NK = (torch.randn(N, K, generator=generator) / K**0.5).to(dtype)
    return x_TK, weight_NK, torch.randn(N, generator=generator).to(dtype)


@pytest.mark.parametrize(("isa", "shape", "dtype"), covering(cpu.isas(), SHAPES_NK, DTYPES), indirect=["isa"], ids=str)
def test_matches_the_twin(isa: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    N, K = shape
    x_TK, weight_NK, bias_N = random_linear(N, K, 37, dtype)
    packed = dense.pack_linear(weight_NK)
    assert packed.is_packed
    assert (packed.N, packed.K, packed.dtype) == (N, K, dtype)
    for bias in (None, bias_N, bias_N.float()):
        sums_TN = dense.linear(x_TK, packed, bias, out_dtype=torch.float32)
        expected_TN = reference.linear(x_TK, weight_NK, bias, torch.float32)
        torch.testing.assert_close(sums_TN, expected_TN, atol=FLOAT32_ATOL, rtol=0)
        # the output type is rounded once, from the same float32 sum
        for out_dtype in DTYPES:
            assert torch.equal(dense.linear(x_TK, packed, bias, out_dtype=out_dtype), sums_TN.to(out_dtype))
        assert dense.linear(x_TK, packed, bias).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), [(130, 111), (70, 2500)])
def test_rows_do_not_depend_on_the_batch(isa: str, N: int, K: int, dtype: torch.dtype) -> None:
    x_TK, weight_NK, bias_N = random_linear(N, K, max(BATCHES), dtype)
    packed = dense.pack_linear(weight_NK)
    all_TN = dense.linear(x_TK, packed, bias_N, out_dtype=torch.float32)
    for T in BATCHES:
        first_TN = dense.linear(x_TK[:T], packed, bias_N, out_dtype=torch.float32)
        assert torch.equal(first_TN, all_TN[:T]), f"first {T} rows"
        last_TN = dense.linear(x_TK[-T:], packed, bias_N, out_dtype=torch.float32)
        assert torch.equal(last_TN, all_TN[-T:]), f"last {T} rows"


def test_long_prefill_rows_do_not_depend_on_the_batch(isa: str) -> None:
    """More rows than one chunk of the driver (1024), and several row blocks."""
    x_TK, weight_NK, _ = random_linear(66, 96, 1100, torch.bfloat16)
    packed = dense.pack_linear(weight_NK)
    all_TN = dense.linear(x_TK, packed)
    for begin, end in [(0, 1), (1020, 1030), (1099, 1100), (500, 1100)]:
        assert torch.equal(dense.linear(x_TK[begin:end], packed), all_TN[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize("column", [0, 8])
def test_large_outputs_have_the_bits_of_small_ones(isa: str, column: int) -> None:
    """With AMX the output of many rows is stored past the caches, where its rows begin with a cache line."""
    T, N = 130, 4150
    assert T * N * 2 >= 1 << 20
    x_TK, weight_NK, bias_N = random_linear(N, 64, T, torch.bfloat16)
    packed = dense.pack_linear(weight_NK)
    small_TN = torch.cat([dense.linear(rows_TK, packed, bias_N) for rows_TK in x_TK.split(32)])
    memory = torch.full((T, 4224), 7, dtype=torch.bfloat16)
    assert memory.data_ptr() % 64 == 0
    dense.linear(x_TK, packed, bias_N, out=memory[:, column : column + N])
    assert torch.equal(memory[:, column : column + N], small_TN)
    assert bool((memory[:, :column] == 7).all())
    assert bool((memory[:, column + N :] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_does_not_depend_on_the_threads(
    isa: str, dtype: torch.dtype, set_num_threads: Callable[[int], None]
) -> None:
    x_TK, weight_NK, _ = random_linear(500, 257, 70, dtype)
    results = []
    for num_threads in (1, 2, 3, 5):
        set_num_threads(num_threads)
        packed = dense.pack_linear(weight_NK)
        results.append([dense.linear(x_TK[:T], packed) for T in (1, 6, 33, 70)])
    for num_threads, result in zip((2, 3, 5), results[1:], strict=True):
        for one, many in zip(results[0], result, strict=True):
            assert torch.equal(one, many), f"{num_threads} threads, {len(one)} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(isa: str, dtype: torch.dtype) -> None:
    x_TK, weight_NK, _ = random_linear(50, 40, 9, dtype)
    expected_TN = dense.linear(x_TK, dense.pack_linear(weight_NK))
    wide_x = torch.full((9, 60), float("nan")).to(dtype)
    wide_x[:, 7:47] = x_TK
    wide_weight = torch.full((50, 60), float("nan")).to(dtype)
    wide_weight[:, 3:43] = weight_NK
    wide_out = torch.full((9, 70), 5.0).to(dtype)
    out = dense.linear(wide_x[:, 7:47], dense.pack_linear(wide_weight[:, 3:43]), out=wide_out[:, 10:60])
    assert out.data_ptr() == wide_out[:, 10:60].data_ptr()
    assert torch.equal(wide_out[:, 10:60], expected_TN)
    assert (wide_out[:, :10] == 5).all(), "wrote to the left of its columns"
    assert (wide_out[:, 60:] == 5).all(), "wrote to the right of its columns"
    by_columns = dense.linear(x_TK.t().contiguous().t(), dense.pack_linear(weight_NK.t().contiguous().t()))
    assert torch.equal(by_columns, expected_TN)


def test_rows_may_be_any_number_of_elements_from_the_start_of_memory(isa: str) -> None:
    """bfloat16 rows of odd length start at addresses that no 32-bit load likes."""
    x_TK, weight_NK, _ = random_linear(20, 33, 4, torch.bfloat16)
    expected_TN = reference.linear(x_TK, weight_NK, out_dtype=torch.float32)
    memory = torch.zeros(1 + 4 * 33, dtype=torch.bfloat16)
    memory[1:] = x_TK.flatten()
    actual_TN = dense.linear(memory[1:].view(4, 33), dense.pack_linear(weight_NK), out_dtype=torch.float32)
    torch.testing.assert_close(actual_TN, expected_TN, atol=FLOAT32_ATOL, rtol=0)


def test_non_finite_values_stay_in_their_row_and_column(isa: str) -> None:
    x_TK, weight_NK, _ = random_linear(40, 50, 20, torch.bfloat16)
    clean_TN = dense.linear(x_TK, dense.pack_linear(weight_NK))
    x_TK[3, 7] = float("inf")
    weight_NK[11, 9] = float("nan")
    dirty_TN = dense.linear(x_TK, dense.pack_linear(weight_NK))
    assert not dirty_TN[3].isfinite().any()
    assert dirty_TN[:, 11].isnan().all()
    dirty_TN[3], dirty_TN[:, 11] = clean_TN[3], clean_TN[:, 11]
    assert torch.equal(dirty_TN, clean_TN)


def test_vocabulary_sized_output(isa: str) -> None:
    x_TK, weight_NK, _ = random_linear(151_936, 32, 3, torch.bfloat16)
    logits_TN = dense.linear(x_TK, dense.pack_linear(weight_NK), out_dtype=torch.float32)
    expected_TN = reference.linear(x_TK, weight_NK, out_dtype=torch.float32)
    torch.testing.assert_close(logits_TN, expected_TN, atol=FLOAT32_ATOL, rtol=0)


def test_no_rows(isa: str) -> None:
    _, weight_NK, _ = random_linear(5, 6, 1, torch.float32)
    assert dense.linear(torch.empty(0, 6), dense.pack_linear(weight_NK)).shape == (0, 5)


@pytest.mark.parametrize(
    ("isa", "shape", "dtype"),
    covering(cpu.isas(), [(1, 1), (63, 31), (64, 32), (65, 33), (131, 48), (200, 111)], DTYPES),
    indirect=["isa"],
    ids=str,
)
def test_rows_of_a_packed_weight_are_exact(isa: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    N, K = shape
    weight_NK = torch.randn(N, K).to(dtype)
    rows_T = torch.randint(0, N, (19,))
    rows_T[0], rows_T[1] = 0, N - 1
    packed = dense.pack_linear(weight_NK)
    assert packed.is_packed
    assert torch.equal(dense.packed_rows(packed, rows_T), weight_NK[rows_T])
    assert torch.equal(dense.packed_rows(packed, rows_T[:0]), weight_NK[:0])
    for row in (-1, N):
        with pytest.raises(IndexError):
            dense.packed_rows(packed, torch.tensor([0, row]))


def test_packed_size_is_the_weight_with_padding(isa: str) -> None:
    for dtype, size in [(torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2)]:
        K = 128 if dtype is torch.bfloat16 else 111  # pairs come in steps of 32
        assert dense.pack_linear(torch.zeros(70, 111, dtype=dtype)).nbytes == 128 * K * size


def test_without_the_extension_the_weight_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_available", False)
    x_TK, weight_NK, bias_N = random_linear(19, 111, 7, torch.bfloat16)
    packed = dense.pack_linear(weight_NK)
    assert not packed.is_packed
    assert packed.data is weight_NK
    expected_TN = reference.linear(x_TK, weight_NK, bias_N)
    torch.testing.assert_close(dense.linear(x_TK, packed, bias_N), expected_TN, atol=0.02, rtol=0.01)
    assert dense.linear(x_TK, packed, out_dtype=torch.float32).dtype == torch.float32
    rows_T = torch.tensor([18, 0, 3, 3])
    assert torch.equal(dense.packed_rows(packed, rows_T), weight_NK[rows_T])
    assert torch.equal(dense.packed_rows(packed, rows_T[:0]), weight_NK[:0])
    for row in (-1, 19):
        with pytest.raises(IndexError):
            dense.packed_rows(packed, torch.tensor([0, row]))


@pytest.mark.skipif(not cpu.available(), reason="needs the compiled kernels")
def test_wrong_arguments_are_named() -> None:
    packed = dense.pack_linear(torch.zeros(5, 6))
    with pytest.raises(ValueError, match=r"x is \[2, 7\], expected \[T, 6\]"):
        dense.linear(torch.zeros(2, 7), packed)
    with pytest.raises(TypeError, match=r"x is torch\.bfloat16, expected torch\.float32"):
        dense.linear(torch.zeros(2, 6, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="bias"):
        dense.linear(torch.zeros(2, 6), packed, torch.zeros(4))
    with pytest.raises(ValueError, match="out is"):
        dense.linear(torch.zeros(2, 6), packed, out=torch.zeros(2, 4))
    with pytest.raises(TypeError, match=r"expected torch\.float32 or torch\.bfloat16 or torch\.float16"):
        dense.pack_linear(torch.zeros(5, 6, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"rows is torch\.int32, expected torch\.int64"):
        dense.packed_rows(packed, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rows is \[1, 2\], expected \[T\]"):
        dense.packed_rows(packed, torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="mmx"):
        cpu.set_isa("mmx")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        cpu.set_num_threads(0)
