"""Kernels of the deterministic mode, on a GPU or under Triton's interpreter: each row's bits equal the bits of the row
alone, for any batch, however a prompt is cut, by one program or by several; and which kernels the mode chooses.

Dimensions: M rows, K in-features, N out-features; H query heads, G kv heads, E head dim, P block size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import cpu, fp8, gpu, kv_codes, reference
from quire.kernels.dense import linear, pack_linear
from quire.kernels.fp8 import fp8_linear, pack_fp8, quantize_fp8
from quire.kernels.layer_rules import AttentionRule
from quire.kernels.ops import add_rms_norm, gated_activation, greedy, paged_attention
from quire.kernels.triton import attention, dense, parts
from quire.kernels.triton.attention import AttentionShape, choose_fixed_shape
from quire.kernels.triton.launch import IS_INTERPRETED
from quire.kernels.triton.parts import part_length
from tests.covering import covering
from tests.examples import IS_FULL
from tests.kernels.triton.test_paged_attention import make

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
BATCHES = ((0, 1), (3, 5), (16, 33), (0, 70))


def _product(a: Any, b: Any) -> np.ndarray[Any, Any]:
    """a @ b in float32 by float64, where sums of these products are exact: BLAS has another order at the edges."""
    product: np.ndarray[Any, Any] = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    return product


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_is_deterministic", True)
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)
    monkeypatch.setattr(cpu, "_available", False)
    if IS_INTERPRETED:
        from triton.runtime import interpreter

        def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
            return interpreter.TensorHandle(_product(a.data, b.data) + d.data, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (19, 111), (130, 320)])
def test_dense_products_equal_the_float32_product(N: int, K: int, dtype: torch.dtype) -> None:
    x_MK, weight_NK = randn(5, K + 3, dtype=dtype)[:, :K], randn(N, K, dtype=dtype, seed=1) / K**0.5
    bias_N = None if N == 19 else randn(N, dtype=dtype, seed=2)
    expected_MN = x_MK.float() @ weight_NK.float().T + (0.0 if bias_N is None else bias_N.float())
    packed = pack_linear(weight_NK)
    actual_MN = linear(x_MK, packed, bias_N, out_dtype=torch.float32)
    torch.testing.assert_close(actual_MN, expected_MN, atol=2e-5, rtol=0)
    wide_MN = torch.zeros(5, N + 2, dtype=dtype, device=DEVICE)
    linear(x_MK, packed, bias_N, out=wide_MN[:, 1:-1])
    torch.testing.assert_close(wide_MN[:, 1:-1].float(), expected_MN, atol=2e-5, rtol=8.2e-3)
    assert not wide_MN[:, 0].any()
    assert not wide_MN[:, -1].any()


@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_rows_of_products_are_those_of_the_row_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that each number of rows gets; K in three parts, by programs of their own or one after the other."""
    N, K = 70, 544
    monkeypatch.setattr(parts, "_SHORTEST_PART", 128)
    assert -(-K // part_length(N, K)) == 3
    x_MK, weight_NK = randn(70, K, dtype=torch.float16), randn(N, K, dtype=torch.float16, seed=1) / K**0.5
    bias_N = randn(N, seed=2)
    if kind == "dense":
        packed = pack_linear(weight_NK)

        def product(x: Tensor) -> Tensor:
            return linear(x, packed, bias_N, out_dtype=torch.float32)
    else:
        codes = pack_fp8(quantize_fp8(weight_NK))

        def product(x: Tensor) -> Tensor:
            return fp8_linear(x, codes, bias_N, torch.float32)

    all_MN = product(x_MK)
    for is_split in (True, False):
        monkeypatch.setattr(parts, "is_split", lambda *_, is_split=is_split: is_split)
        for begin, end in BATCHES:
            assert torch.equal(product(x_MK[begin:end]), all_MN[begin:end]), f"{begin} to {end}, split: {is_split}"


def test_rows_of_norms_activations_and_choices_are_those_of_the_row_alone() -> None:
    x_MD, residual_MD, weight_D = randn(70, 666), randn(70, 666, seed=1), randn(666, seed=2)

    def normed(begin: int, end: int) -> Tensor:
        return add_rms_norm(x_MD[begin:end].clone(), residual_MD[begin:end].clone(), weight_D, 1e-6)

    all_normed, all_gated, all_chosen = normed(0, 70), gated_activation("silu", x_MD), greedy(x_MD)
    for begin, end in BATCHES[:-1]:
        assert torch.equal(normed(begin, end), all_normed[begin:end])
        assert torch.equal(gated_activation("silu", x_MD[begin:end]), all_gated[begin:end])
        assert torch.equal(greedy(x_MD[begin:end]), all_chosen[begin:end])


def pieces(length: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(first position, end) of each piece of a prompt that is cut at these positions."""
    edges = [0, *cuts, length]
    return [(begin, end) for begin, end in pairwise(edges) if begin < end]


@pytest.mark.parametrize(
    ("codes", "form", "how"),
    covering(
        [None, *kv_codes.CODE_DTYPES],
        [(0, 0.0), (40, 0.0), (0, 3.0)],
        ["in pieces", "beside others", "as decodes"],
        apart=[(0, 1), (0, 2)],  # codes are read one by one
    ),
    ids=str,
)
def test_attention_does_not_depend_on_the_batch_nor_on_the_cut(
    codes: torch.dtype | None, form: tuple[int, float], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of 64 keys: a prompt of 150 tokens at once, in pieces, beside others, and some of it as decodes."""
    window, soft_cap = form
    monkeypatch.setattr(attention, "_SHORTEST_RANGE", 64)
    monkeypatch.setattr(attention, "PROGRAMS_WANTED", 3)  # up to two sequences are split
    length, H, G, E, P = 150, 2, 1, 32, 16
    q_THE, cache, tables_SM, _, _ = make(H, G, E, P, [(length, length), (1, 100), (1, 40)], torch.float16)
    if codes is not None:
        encoded = [kv_codes.encode(x.float(), codes) for x in cache.tensors()]
        cache = LayerCache(*(code for code, _ in encoded), *(scale for _, scale in encoded))
    rule = AttentionRule(0.2, window, soft_cap)
    splits: list[int] = []
    fixed = choose_fixed_shape

    def noted(*arguments: Any) -> AttentionShape:
        shape = fixed(*arguments)
        splits.append(shape.segments)
        return shape

    monkeypatch.setattr(attention, "choose_fixed_shape", noted)

    def attend(rows: list[int], begins: list[int], ends: list[int]) -> Tensor:
        """Tokens begin .. end of these rows; tokens of row 0 have their own queries, others the last two of q."""
        lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
        q = torch.cat(
            [q_THE[b:e] if r == 0 else q_THE[-3 + r :][:1] for r, b, e in zip(rows, begins, ends, strict=True)]
        )
        cu = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32, device=DEVICE)
        seq_lens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        tables = tables_SM[torch.tensor(rows, device=DEVICE)]
        return paged_attention(q, cache, tables, seq_lens, cu, rule)

    whole = attend([0], [0], [length])
    expected = reference.paged_attention(
        *(q_THE[:length], cache, tables_SM[:1]),
        torch.tensor([length], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, length], dtype=torch.int32, device=DEVICE),
        rule,
    )
    torch.testing.assert_close(whole, expected, atol=2e-3, rtol=2e-3)
    for cuts in ((7, 64, 65), (100,)) if IS_FULL else ((7, 64, 65),):
        for begin, end in pieces(length, cuts):
            if how == "in pieces":
                assert torch.equal(attend([0], [begin], [end]), whole[begin:end]), f"positions {begin} to {end}"
            elif how == "beside others":
                beside = attend([1, 0, 2], [99, begin, 39], [100, end, 40])
                assert torch.equal(beside[1:-1], whole[begin:end]), f"positions {begin} to {end} beside others"
    for position in (*((0,) if IS_FULL else ()), 63, 64, 149) if how == "as decodes" else ():
        for rows, at in (([0], 0), ([2, 0], 1), ([1, 2, 0, 1], 2)):
            ends = [position + 1 if row == 0 else 100 - 60 * (row == 2) for row in rows]
            row = attend(rows, [end - 1 for end in ends], ends)[at]
            assert torch.equal(row, whole[position]), f"position {position} as decode of {len(rows)}"
    assert set(splits) == ({1} if how == "beside others" else {1, 3}), "sequences were all split, or none"


@pytest.mark.parametrize("max_keys", [1024, 8192, 131072])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("is_wgmma", "is_float32"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("group", [4, 7])
def test_tiles_and_ranges_are_those_of_every_batch(
    max_keys: int, head_dim: int, group: int, is_wgmma: bool, is_float32: bool
) -> None:
    sizes = [(1, 1), (8, 8), (256, 256), (2048, 1), (2048, 64)]
    shapes = [choose_fixed_shape(*size, group, 8, head_dim, max_keys, is_wgmma, is_float32) for size in sizes]
    assert len({(x.block_m, x.tile, x.num_warps, x.num_stages, x.range_len) for x in shapes}) == 1
    assert shapes[0].range_len % shapes[0].tile == 0
    assert shapes[0].segments == -(-max_keys // shapes[0].range_len) <= 32, "one sequence is split"
    assert {x.segments for x in shapes[2:]} == {1}
    if is_wgmma:
        assert shapes[0].block_m == 64


def test_what_the_mode_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton product in place of cuBLAS, weights decoded in place of _scaled_mm; without the mode, both again."""
    called: list[str] = []
    monkeypatch.setattr(gpu, "kernels", lambda: type("Kernels", (), {"linear": lambda *_: called.append("linear")}))
    monkeypatch.setattr(fp8, "_multiplies_fp8", lambda _: True)
    x_TK, packed = randn(300, 32, dtype=torch.bfloat16), pack_linear(randn(16, 32, dtype=torch.bfloat16))
    weight = reference.quantize_fp8(randn(16, 32, dtype=torch.bfloat16))
    codes = fp8.PackedFp8(None, weight, 16, 32, weight.group_size)
    linear(x_TK, packed)
    assert called == ["linear"]
    assert not fp8.quantizes_activations(x_TK, codes, torch.bfloat16)
    monkeypatch.setattr(gpu, "_is_deterministic", False)
    linear(x_TK, packed)
    assert called == ["linear"]
    assert fp8.quantizes_activations(x_TK, codes, torch.bfloat16)


def test_it_is_chosen_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_is_deterministic", False)
    gpu.be_deterministic()
    assert gpu.is_deterministic()


def test_tiles_of_products_have_one_instruction() -> None:
    """On sm_90 from the first row on; on sm_80 there is one for all sizes."""
    from quire.kernels.triton.parts import choose_tile

    tiles = [choose_tile(M, 4096, torch.bfloat16, is_wgmma=True) for M in (1, 16, 64, 65, 2048)]
    assert {tile.block_m for tile in tiles} == {64, 128}
    assert {tile.block_k for tile in tiles} == {64}
    assert {dense.for_dense(tile).num_warps for tile in tiles} == {8}
