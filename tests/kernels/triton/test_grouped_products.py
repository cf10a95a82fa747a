"""The GPU kernel of grouped integer weights against the float32 twin, on a GPU or under Triton's interpreter: every
form, in the layout it shares with the CPU kernels; rows that do not depend on their number.

Dimensions: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.formats.weight_format import GroupedFormat
from quire.kernels import cpu, gpu, reference
from quire.kernels.grouped import grouped_linear, grouped_rows, pack_grouped
from quire.kernels.grouped_panels import to_panels
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.triton import grouped, parts
from quire.kernels.triton.parts import Tile, choose_tile, part_length
from tests.kernels.grouped_weights import FORMATS, random_weight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALVES = [torch.bfloat16, torch.float16]
# The twin adds up products of order 1 in another order. The interpreter cuts bfloat16 weights off where a GPU rounds.
ATOL = {torch.float32: 2e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5 if DEVICE == "cuda" else 4e-2}
# N around the panel width; K below, at and above whole groups and tiles
SHAPES_NK = [(1, 1), (19, 111), (130, 320)]


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the test's device go where tensors of a GPU go."""
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)


def on_device(weight: GroupedWeight) -> GroupedWeight:
    moved = {name: x.to(DEVICE) for name, x in vars(weight).items() if isinstance(x, Tensor)}
    return GroupedWeight(**{**vars(weight), **moved})


def make(weight_format: GroupedFormat, N: int, K: int, T: int, dtype: torch.dtype) -> tuple[Tensor, GroupedWeight]:
    x_TK = torch.randn(T, K, generator=torch.Generator().manual_seed(K)).to(dtype)
    return x_TK.to(DEVICE), on_device(random_weight(weight_format, N, K))


def twin(x_TK: Tensor, weight: GroupedWeight, bias_N: Tensor | None) -> Tensor:
    return reference.linear(x_TK, reference.dequantize_grouped(weight).to(x_TK.dtype), bias_N, torch.float32)


@pytest.mark.skipif(not cpu.available(), reason="compares with the compiled packing")
@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_the_layout_is_that_of_the_cpu_kernels(weight_format: GroupedFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "serves", lambda device: False)
    for N, K in SHAPES_NK:
        weight = random_weight(weight_format, N, K)
        strided = replace(
            weight, codes_NK=weight.codes_NK.T.contiguous().T, scales_NG=weight.scales_NG.T.contiguous().T
        )
        assert torch.equal(to_panels(strided), pack_grouped(weight).data)


@pytest.mark.parametrize(
    ("weight_format", "dtype"),
    [*((each, torch.float32) for each in FORMATS), *((each, dtype) for each in FORMATS[::5] for dtype in HALVES)],
    ids=str,
)
def test_matches_the_twin(weight_format: GroupedFormat, dtype: torch.dtype) -> None:
    for N, K in SHAPES_NK:
        x_TK, weight = make(weight_format, N, K, 5, dtype)
        packed = pack_grouped(weight)
        assert packed.nbytes == weight_format.num_bytes(N, K)
        bias_N = None if N == 19 else torch.randn(N).to(DEVICE, dtype)
        actual_TN = grouped_linear(x_TK, packed, bias_N, torch.float32)
        torch.testing.assert_close(actual_TN, twin(x_TK, weight, bias_N), atol=ATOL[dtype], rtol=0)
        rows_T = torch.tensor([N - 1, 0, N // 2], device=DEVICE)
        assert torch.equal(grouped_rows(packed, rows_T, dtype), reference.dequantize_grouped(weight)[rows_T].to(dtype))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_of_every_value_are_exact(bits: int) -> None:
    N, K = 66, 256
    codes_NK = (torch.arange(N * K, device=DEVICE) % (1 << bits)).to(torch.uint8).view(N, K)
    zeros_N1 = (torch.arange(N, device=DEVICE) % (1 << bits)).to(torch.uint8)[:, None]
    scales_N1 = torch.ones(N, 1, device=DEVICE)
    weight = GroupedWeight(codes_NK=codes_NK, bits=bits, group_size=K, scales_NG=scales_N1, zeros_NG=zeros_N1)
    x_TK = torch.eye(K, device=DEVICE)[::7].to(torch.float16)
    expected_TN = (codes_NK.float() - zeros_N1.float()).T[::7]
    assert torch.equal(grouped_linear(x_TK, pack_grouped(weight)), expected_TN.half())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=str)
def test_rows_do_not_depend_on_their_number(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of K in three parts: each by a program of its own, or one after the other."""
    N, K, T = 70, 544, 38
    monkeypatch.setattr(parts, "_SHORTEST_PART", 128)
    assert -(-K // part_length(N, K)) == 3
    if DEVICE == "cpu":  # numpy multiplies for the interpreter: its sums depend on a tile's size and the place in it
        monkeypatch.setattr(grouped, "choose_tile", lambda *_: Tile(16, 64, 64, 4, 2))
    x_TK, weight = make(GroupedFormat(4, 32, "float16", "float16"), N, K, T, dtype)
    packed, bias_N = pack_grouped(weight), torch.randn(N).to(DEVICE)
    all_TN = grouped_linear(x_TK, packed, bias_N, torch.float32)
    torch.testing.assert_close(all_TN, twin(x_TK, weight, bias_N), atol=ATOL[dtype], rtol=0)
    for is_split in (True, False):
        monkeypatch.setattr(parts, "is_split", lambda *_, is_split=is_split: is_split)
        for begin, end in ((0, 1), (16, 33), (0, T)):
            some_TN = grouped_linear(x_TK[begin:end], packed, bias_N, torch.float32)
            assert torch.equal(some_TN, all_TN[begin:end]), f"rows {begin} to {end}, split: {is_split}"


def test_strided_rows_and_a_row_that_is_not_finite() -> None:
    x_TK, weight = make(GroupedFormat(8, 64), 40, 192, 6, torch.float16)
    packed = pack_grouped(weight)
    expected_TN = grouped_linear(x_TK, packed)
    wide = torch.full((6, 300), torch.nan, dtype=torch.float16, device=DEVICE)
    wide[:, 50:242] = x_TK
    assert torch.equal(grouped_linear(wide[:, 50:242], packed), expected_TN)
    assert torch.equal(grouped_linear(x_TK.T.contiguous().T, packed), expected_TN)
    for bad in (torch.nan, torch.inf):
        x_TK[2, 100] = bad
        out_TN = grouped_linear(x_TK, packed)
        assert not out_TN[2].isfinite().any()
        assert torch.equal(out_TN[[0, 1, 3, 4, 5]], expected_TN[[0, 1, 3, 4, 5]])


def test_on_wgmma_every_number_of_rows_takes_it() -> None:
    for N in (64, 1024, 4160):
        tiles = [choose_tile(M, N, torch.bfloat16, is_wgmma=True) for M in (1, 16, 17, 64, 65, 4096)]
        assert all(tile.block_m % 64 == 0 and tile.num_warps % 4 == 0 for tile in tiles)
    assert choose_tile(1, 64, torch.bfloat16, is_wgmma=False).block_m == 16


def test_parts_follow_from_the_shape_of_the_weight() -> None:
    """Llama-3.1-8B: few columns are cut, many are not; every part is whole tiles."""
    assert {(N, K): -(-K // part_length(N, K)) for N, K in ((4096, 4096), (4096, 14336), (28672, 4096), (64, 128))} == {
        (4096, 4096): 8,
        (4096, 14336): 8,
        (28672, 4096): 1,
        (64, 128): 1,
    }
    assert part_length(4096, 14336) % 128 == 0
