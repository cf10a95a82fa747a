"""FP8 weights on a GPU, or under Triton's interpreter: products against the float32 twin, rows that do not depend on
their number, rows quantized to the twin's bits, and when activations are quantized.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import fp8, gpu, reference
from quire.kernels.fp8 import fp8_linear, fp8_rows, pack_fp8, quantize_fp8
from quire.kernels.fp8_weight import Fp8Weight
from quire.kernels.triton import fp8 as triton_fp8
from quire.kernels.triton import parts
from quire.kernels.triton.parts import Tile, part_length
from quire.planning.graph_sizes import LARGEST_BATCH

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES_NK = [(1, 1), (19, 111), (130, 320)]
GROUP_SIZES = [32, 128, 192, 0]  # 0: the whole row
ATOL = 2e-5  # outputs are of order 1; the twin adds up in another order


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the test's device go where tensors of a GPU go."""
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)


def make(group_size: int, N: int, K: int, T: int, dtype: torch.dtype) -> tuple[Tensor, Fp8Weight]:
    """x_TK and a weight; every group has its own scale."""
    generator = torch.Generator().manual_seed(N * 7919 + K)
    x_TK = torch.randn(T, K, generator=generator).to(DEVICE, dtype)
    codes_NK = (torch.randn(N, K, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    G = -(-K // (group_size or K))
    scales_NG = (torch.rand(N, G, generator=generator) + 0.5) / (100 * K**0.5)
    return x_TK, Fp8Weight(codes_NK.to(DEVICE), scales_NG.to(DEVICE), group_size or -(-K // 32) * 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_matches_the_twin(group_size: int, dtype: torch.dtype) -> None:
    for N, K in SHAPES_NK:
        x_TK, weight = make(group_size, N, K, 5, dtype)
        packed = pack_fp8(weight)
        assert not packed.is_packed
        bias_N = None if N == 19 else torch.randn(N).to(DEVICE, dtype)
        actual_TN = fp8_linear(x_TK, packed, bias_N, torch.float32)
        expected_TN = reference.fp8_linear(x_TK, weight, bias_N, torch.float32)
        torch.testing.assert_close(actual_TN, expected_TN, atol=ATOL, rtol=0)
        rows_T = torch.tensor([N - 1, 0, N // 2], device=DEVICE)
        assert torch.equal(fp8_rows(packed, rows_T, torch.float32), reference.dequantize_fp8(weight)[rows_T])


def test_every_code_is_exact() -> None:
    """NaN stays in its output column."""
    codes_NK = torch.zeros(256, 64, dtype=torch.uint8, device=DEVICE)
    codes_NK[torch.arange(256), torch.arange(256) % 64] = torch.arange(256, device=DEVICE).to(torch.uint8)
    weight = Fp8Weight(codes_NK.view(torch.float8_e4m3fn), torch.ones(256, 1, device=DEVICE), 64)
    actual_TN = fp8_linear(torch.ones(3, 64, device=DEVICE, dtype=torch.float16), pack_fp8(weight))
    expected_N = weight.codes_NK.float().sum(1).half()
    torch.testing.assert_close(actual_TN, expected_N.expand(3, 256), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("group_size", [128, 0])
def test_rows_do_not_depend_on_their_number(group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of K in three parts: each by a program of its own, or one after the other."""
    N, K, T = 70, 544, 38
    monkeypatch.setattr(parts, "_SHORTEST_PART", 128)
    assert -(-K // part_length(N, K)) == 3
    if DEVICE == "cpu":  # numpy multiplies for the interpreter: its sums depend on a tile's size and the place in it
        monkeypatch.setattr(triton_fp8, "choose_tile", lambda *_: Tile(16, 64, 64, 4, 2))
    x_TK, weight = make(group_size, N, K, T, torch.float16)
    packed, bias_N = pack_fp8(weight), torch.randn(N).to(DEVICE)
    all_TN = fp8_linear(x_TK, packed, bias_N, torch.float32)
    expected_TN = reference.fp8_linear(x_TK, weight, bias_N, torch.float32)
    torch.testing.assert_close(all_TN, expected_TN, atol=ATOL, rtol=0)
    for is_split in (True, False):
        monkeypatch.setattr(parts, "is_split", lambda *_, is_split=is_split: is_split)
        for begin, end in ((0, 1), (16, 33), (0, T)):
            some_TN = fp8_linear(x_TK[begin:end], packed, bias_N, torch.float32)
            assert torch.equal(some_TN, all_TN[begin:end]), f"rows {begin} to {end}, split: {is_split}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantized_rows_are_the_twin_s_bit_for_bit(dtype: torch.dtype) -> None:
    """Among them a row of zeros, one with a large element, and rows that are not finite."""
    for K in (1, 111, 640):
        x_TK = torch.randn(7, K, generator=torch.Generator().manual_seed(K)).to(DEVICE, dtype)
        x_TK[0, 0] *= 3000
        x_TK[1] = 0
        x_TK[2, -1], x_TK[3, 0] = torch.nan, -torch.inf
        wide = torch.full((7, K + 5), torch.nan, dtype=dtype, device=DEVICE)
        wide[:, 2 : K + 2] = x_TK
        # the twin on a CPU: on a GPU, torch divides by one number by multiplying, which rounds twice
        actual, expected = quantize_fp8(wide[:, 2 : K + 2]), reference.quantize_fp8(x_TK.cpu())
        torch.testing.assert_close(actual.scales_NG.cpu(), expected.scales_NG, atol=0, rtol=0, equal_nan=True)
        is_finite_T = expected.scales_NG.isfinite().flatten()
        assert is_finite_T.tolist() == [True, True, False, False, True, True, True]
        codes, expected_codes = actual.codes_NK.cpu().view(torch.uint8), expected.codes_NK.view(torch.uint8)
        assert torch.equal(codes[is_finite_T], expected_codes[is_finite_T])


def test_many_rows_are_quantized_where_products_of_fp8_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8._FEWEST_QUANTIZED_ROWS > LARGEST_BATCH, "the padding of a graph decides how rows are computed"
    monkeypatch.setattr(fp8, "_FEWEST_QUANTIZED_ROWS", 64)
    x_TK, weight = make(0, 64, 96, 64, torch.bfloat16)
    packed = pack_fp8(weight)
    weight_only_TN = fp8_linear(x_TK, packed, out_dtype=torch.float32)
    monkeypatch.setattr(fp8, "_multiplies_fp8", lambda _: False)
    assert not fp8.quantizes_activations(x_TK, packed, torch.bfloat16)
    monkeypatch.setattr(fp8, "_multiplies_fp8", lambda _: True)
    assert fp8.quantizes_activations(x_TK, packed, torch.bfloat16)
    assert not fp8.quantizes_activations(x_TK[1:], packed, torch.bfloat16), "few rows"
    assert not fp8.quantizes_activations(x_TK, packed, torch.float16)
    assert not fp8.quantizes_activations(x_TK, pack_fp8(make(32, 64, 96, 1, torch.bfloat16)[1]), torch.bfloat16)
    assert not fp8.quantizes_activations(x_TK, pack_fp8(make(0, 63, 96, 1, torch.bfloat16)[1]), torch.bfloat16)
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of FP8")
    x_TK[5, 7] = torch.nan
    bias_N = torch.randn(64, device=DEVICE)
    actual_TN = fp8_linear(x_TK, packed, bias_N)
    expected_TN = reference.fp8_linear(
        reference.dequantize_fp8(reference.quantize_fp8(x_TK)), weight, bias_N.bfloat16(), torch.float32
    )
    assert actual_TN.dtype == torch.bfloat16
    assert actual_TN[5].isnan().all()
    torch.testing.assert_close(actual_TN.float(), expected_TN, atol=2e-2, rtol=1e-2, equal_nan=True)
    others_T = torch.arange(64, device=DEVICE) != 5
    # steps of 1/16 of a number, off by up to a half, in 96 products of order 1/10
    torch.testing.assert_close((actual_TN.float() - bias_N)[others_T], weight_only_TN[others_T], atol=0.15, rtol=0)
