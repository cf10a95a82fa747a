"""Latent attention: its rotation and cache write, products of heads, and attention over rows that are key and value.

Against the plain-torch twins and a dense float64 softmax; the same bits however tokens are batched and chunked.
Dimensions: T tokens, H query heads, L elements of a row, V latents, R rotary dims, P block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import cpu, kv_codes, ops, reference
from quire.kernels.head_linear import head_linear, pack_heads
from quire.kernels.layer_rules import AttentionRule, LatentRotation
from tests.covering import covering
from tests.examples import IS_FULL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float32: sums of a few hundred products. The others: rounding of the result, and in bfloat16 of the probabilities too.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (8e-3, 1.6e-2)}


def attend(
    parts: list[tuple[Tensor, Tensor, int, int]],
    V: int,
    P: int = 16,
    function: Callable[..., Tensor] = ops.paged_attention,
    codes: torch.dtype | None = None,
) -> list[Tensor]:
    """One call for tokens [begin, end) of each (q, rows), over a shuffled cache whose unseen slots are NaN."""
    dtype, L = parts[0][1].dtype, parts[0][1].shape[1]
    counts = [-(-end // P) for *_, end in parts]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).int()
    # a strided view, like one layer of a cache of several
    wide = torch.full((len(order), 3, 1, P, L), 3.0 if codes == torch.int8 else math.nan).to(codes or dtype)
    rows_BGPE = wide[:, 1]
    scales = torch.full((len(order), 1, P), math.nan) if codes == torch.int8 else None
    tables = torch.full((len(parts), max(counts) + 1), -1, dtype=torch.int32)
    for s, ((_, rows_TL, _, end), count) in enumerate(zip(parts, counts, strict=True)):
        tables[s, :count] = order[sum(counts[:s]) :][:count]
        positions = torch.arange(end)
        blocks, offsets = tables[s].long()[positions // P], positions % P
        held, row_scales = (rows_TL[:end], None) if codes is None else kv_codes.encode(rows_TL[:end].float(), codes)
        rows_BGPE[blocks, 0, offsets] = held
        if scales is not None:
            scales[blocks, 0, offsets] = row_scales
    lens = torch.tensor([end - begin for *_, begin, end in parts])
    q_THL = torch.cat([q[begin:end] for q, _, begin, end in parts])
    out = function(
        torch.cat((q_THL, q_THL), dim=1)[:, : q_THL.shape[1]],
        LayerCache(rows_BGPE, rows_BGPE[..., :V], scales, scales),
        tables,
        torch.tensor([end for *_, end in parts], dtype=torch.int32),
        torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
        AttentionRule(1.3 / math.sqrt(L)),
    )
    return list(out.split(lens.tolist()))


def sequence(length: int, H: int, L: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, H, L, generator=generator).to(dtype), torch.randn(length, L, generator=generator).to(
        dtype
    )


def dense(q_THL: Tensor, rows_TL: Tensor, begin: int, end: int, V: int) -> Tensor:
    q, rows = q_THL[begin:end].double(), rows_TL[:end].double()
    scores = torch.einsum("qhl,kl->qhk", q, rows) * (1.3 / math.sqrt(rows.shape[1]))
    is_hidden = torch.arange(end) > torch.arange(begin, end)[:, None, None]
    return scores.masked_fill(is_hidden, -math.inf).softmax(-1) @ rows[:, :V]


# H, L, V, block size, [(begin, end)]
SHAPES = [
    (16, 576, 512, 16, [(0, 5), (299, 300), (530, 570)]),  # DeepSeek-V2-Lite
    (5, 27, 21, 8, [(260, 290), (0, 1)]),
    (40, 96, 64, 32, [(255, 256), (256, 257), (0, 33)]),
    (3, 64, 32, 24, [(40, 41), (500, 501)]),
    (1, 576, 511, 16, [(250, 260)]),
]


@pytest.mark.parametrize(("isa", "dtype", "shape"), covering(cpu.isas(), DTYPES, SHAPES), indirect=["isa"])
def test_attention_equals_dense_softmax(isa: str, dtype: torch.dtype, shape: tuple) -> None:
    H, L, V, P, ranges = shape
    parts = [(*sequence(end, H, L, dtype, seed), begin, end) for seed, (begin, end) in enumerate(ranges)]
    for out, part in zip(attend(parts, V, P), parts, strict=True):
        atol, rtol = TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), dense(*part, V), atol=atol, rtol=rtol)


@pytest.mark.parametrize("shape", SHAPES)
def test_twin_equals_dense_softmax(shape: tuple) -> None:
    H, L, V, P, ranges = shape
    parts = [(*sequence(end, H, L, torch.float32, seed), begin, end) for seed, (begin, end) in enumerate(ranges)]
    for out, part in zip(attend(parts, V, P, reference.paged_attention), parts, strict=True):
        torch.testing.assert_close(out.double(), dense(*part, V), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("isa", "dtype", "shape", "threads"),
    covering(cpu.isas(), DTYPES, [(16, 576, 512), (3, 64, 32), (20, 27, 21)], [1, 2]),
    indirect=["isa"],
)
def test_any_schedule_gives_the_bits_of_one_prefill(
    isa: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    threads: int,
    set_num_threads: Callable[[int], None],
) -> None:
    H, L, V = shape
    set_num_threads(threads)
    length = 530 if IS_FULL else 290  # over ranges of 256 positions
    q, rows = sequence(length, H, L, dtype)
    whole = attend([(q, rows, 0, length)], V)[0]
    for chunk in (7, 256, 257) if IS_FULL else (67, 256, 257):
        parts = [attend([(q, rows, begin, min(begin + chunk, length))], V)[0] for begin in range(0, length, chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk} tokens differ from one prefill"
    for query_len in (1, 3, 17):
        ends = [end for end in (17, 31, 32, 33, 255, 256, 257, 288, 512, 530) if end <= length]
        parts = [(q, rows, end - query_len, end) for end in ends]
        for out, (*_, begin, end) in zip(attend(parts, V), parts, strict=True):
            assert torch.equal(out, whole[begin:end]), f"{query_len} tokens before {end} differ from one prefill"


@pytest.mark.parametrize(
    ("isa", "dtype", "codes"),
    covering(cpu.isas(), [torch.float32, torch.bfloat16], kv_codes.CODE_DTYPES),
    indirect=["isa"],
)
def test_caches_of_codes(isa: str, dtype: torch.dtype, codes: torch.dtype) -> None:
    parts = [(*sequence(end, 16, 80, dtype, end), begin, end) for begin, end in ((299, 300), (0, 40))]
    outs = attend(parts, 64, codes=codes)
    expected = attend(parts, 64, function=reference.paged_attention, codes=codes)
    for out, want in zip(outs, expected, strict=True):
        # int8 rows become bfloat16 in the kernels of that dtype
        torch.testing.assert_close(out, want, atol=3e-2 if dtype == torch.bfloat16 else 2e-5, rtol=1.6e-2)


# H, V, R; interleaved or not
ROTATIONS = [(16, 512, 64, True), (5, 21, 6, True), (3, 40, 24, False), (1, 1, 2, False)]


@pytest.mark.parametrize(
    ("isa", "dtype", "codes", "shape"),
    covering(cpu.isas(), DTYPES, [None, *kv_codes.CODE_DTYPES], ROTATIONS),
    indirect=["isa"],
)
def test_rotation_and_cache_write_equal_the_twin(
    isa: str, dtype: torch.dtype, codes: torch.dtype | None, shape: tuple[int, int, int, bool]
) -> None:
    H, V, R, is_interleaved = shape
    T, P, L = 150, 8, V + R
    generator = torch.Generator().manual_seed(7)
    q_THE = torch.randn(T, H, R + 5, generator=generator).to(dtype)
    rows_TL = torch.randn(T, L + 3, generator=generator).to(dtype)[:, :L]
    angles = torch.randn(90, R // 2, generator=generator)
    rotation = LatentRotation(torch.cat((angles.cos(), angles.sin()), 1), is_interleaved)
    positions_T = torch.randint(90, (T,), generator=generator)
    slots_T = torch.randperm(30 * P, generator=generator)[:T]
    slots_T[4] = -1
    caches, outs = [], []
    for function in (ops.latent_rope_and_cache, reference.latent_rope_and_cache):
        rows_BGPE = torch.zeros(30, 1, P, L).to(codes or dtype)
        scales = torch.zeros(30, 1, P) if codes == torch.int8 else None
        wide_THL = torch.full((T, H, L), 7.0).to(dtype)
        cache = LayerCache(rows_BGPE, rows_BGPE[..., :V], scales, scales)
        function(q_THE[..., 5:], rows_TL, positions_T, slots_T, cache, rotation, wide_THL[..., V:])
        assert (wide_THL[..., :V] == 7).all(), "wrote in front of out"
        caches.append(kv_codes.decode(rows_BGPE, scales))
        outs.append(wide_THL)
    # one rounding, and of codes: one step
    atol, rtol = {torch.float32: (2e-6, 1e-5), torch.float16: (1e-3, 1e-3), torch.bfloat16: (8e-3, 8e-3)}[dtype]
    torch.testing.assert_close(*outs, atol=atol, rtol=rtol)
    steps = {
        None: (atol, rtol),
        torch.int8: (0.04, 0),
        torch.float8_e4m3fn: (0.004, 0.13),
        torch.float8_e5m2: (0.004, 0.26),
    }
    torch.testing.assert_close(*caches, atol=steps[codes][0], rtol=steps[codes][1])
    assert (caches[0] != 0).any(-1).sum() == T - 1


# H, N, K, T
PRODUCTS = [(16, 512, 128, 3), (5, 21, 10, 1), (3, 11, 200, 70), (1, 130, 33, 300), (130, 7, 5, 2)]


@pytest.mark.parametrize(("isa", "dtype", "shape"), covering(cpu.isas(), DTYPES, PRODUCTS), indirect=["isa"])
def test_products_of_heads_equal_the_twin(isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Each token alone gets the bits that it gets among others."""
    H, N, K, T = shape
    generator = torch.Generator().manual_seed(3)
    x_THK = torch.randn(T, H, K + 3, generator=generator).to(dtype)[..., 3:]
    weight_HNK = (torch.randn(H, K, N, generator=generator) / math.sqrt(K)).to(dtype).mT
    packed = pack_heads(weight_HNK)
    out_THN = torch.full((T, H, N + 2), 7.0).to(dtype)
    head_linear(x_THK, packed, out_THN[..., :N])
    assert (out_THN[..., N:] == 7).all(), "wrote behind out"
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out_THN[..., :N], reference.head_linear(x_THK, weight_HNK), atol=atol, rtol=rtol)
    alone = torch.cat([head_linear(x_THK[t : t + 1], packed) for t in range(0, T, 7)])
    assert torch.equal(alone, out_THN[::7, :, :N])


def test_wrong_arguments_are_refused() -> None:
    rows = torch.zeros(4, 1, 8, 24)
    latent = LayerCache(rows, rows[..., :16])
    positions, slots = torch.zeros(2, dtype=torch.int64), torch.arange(2)
    rotation, q = LatentRotation(torch.zeros(9, 8), True), torch.zeros(2, 3, 8)
    good = (q, torch.zeros(2, 24), positions, slots, latent, rotation, torch.zeros(2, 3, 8))
    ops.latent_rope_and_cache(*good)
    for at, bad, says in (
        (0, torch.zeros(2, 3, 6), "q is"),
        (1, torch.zeros(2, 8), "rows is"),
        (1, torch.zeros(2, 25), "cache is"),
        (2, torch.full((2,), 9), r"positions\[0\] is 9"),
        (3, torch.full((2,), 32), r"slot_mapping\[0\] is 32"),
        (4, LayerCache(torch.zeros(4, 1, 8, 24), torch.zeros(4, 1, 8, 16)), "v_cache is"),
        (6, torch.zeros(2, 3, 7), "out is"),
    ):
        with pytest.raises((ValueError, IndexError), match=says):
            ops.latent_rope_and_cache(*good[:at], bad, *good[at + 1 :])
    packed = pack_heads(torch.zeros(3, 5, 4))
    with pytest.raises(ValueError, match="x is"):
        head_linear(torch.zeros(2, 3, 5), packed)
    heads = torch.zeros(2, 1, 24)
    with pytest.raises(ValueError, match="v_cache is"):
        ops.rope_and_cache(heads, heads, heads, positions, slots, latent, ops.HeadRotation())
