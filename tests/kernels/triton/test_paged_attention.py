"""The GPU attention kernel against the plain-torch twin, on a GPU or under Triton's interpreter: mixed batches, split
sequences.

Dimensions: T tokens, H query heads, G kv heads, E head dim, B cache blocks, P block size.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import kv_codes, reference
from quire.kernels.layer_rules import AttentionRule
from quire.kernels.triton.attention import AttentionShape, choose_shape, paged_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}


def make(
    H: int, G: int, E: int, P: int, rows: list[tuple[int, int]], dtype: torch.dtype, window: int = 0, chunk: int = 0
) -> tuple[Tensor, LayerCache, Tensor, Tensor, Tensor]:
    """Arguments for rows of (query tokens, length): q as a view of a fused tensor, unseen slots of the cache NaN."""
    generator = torch.Generator().manual_seed(H * 31 + E)
    num_blocks = [-(-length // P) for _, length in rows]
    order = torch.randperm(sum(num_blocks) + 2, generator=generator).int()
    caches = torch.full((2, len(order), G, P, E), math.nan).to(dtype)
    tables = torch.full((len(rows), max(num_blocks) + 1), -1, dtype=torch.int32)
    for s, ((query_len, length), count) in enumerate(zip(rows, num_blocks, strict=True)):
        first = max(length - query_len - window + 1, 0) if window else 0
        first = (length - query_len) // chunk * chunk if chunk else first
        tables[s, first // P : count] = order[sum(num_blocks[:s]) :][first // P : count]
        positions = torch.arange(first, length)  # what no token of the call sees is nowhere
        blocks, offsets = tables[s].long()[positions // P], positions % P
        caches[:, blocks, :, offsets] = torch.randn(len(positions), 2, G, E, generator=generator).to(dtype)
    query_lens = torch.tensor([query_len for query_len, _ in rows])
    fused = torch.randn(int(query_lens.sum()), (H + 3) * E, generator=generator).to(dtype)
    caches = caches.to(DEVICE)
    return (
        fused.to(DEVICE)[:, : H * E].unflatten(1, (H, E)),
        LayerCache(caches[0], caches[1]),
        tables.to(DEVICE),
        torch.tensor([length for _, length in rows], dtype=torch.int32).to(DEVICE),
        torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int().to(DEVICE),
    )


# H, G, E, block size, window, soft cap, rows of (query tokens, length)
MIXED = [
    (4, 2, 64, 16, 0, 0.0, [(5, 5), (1, 80), (20, 57)]),
    (6, 2, 80, 8, 0, 4.0, [(9, 70), (1, 1)]),
    (2, 2, 24, 24, 20, 0.0, [(30, 90)]),
    (3, 1, 128, 32, 0, 0.0, [(1, 64), (1, 65), (33, 33)]),
    (5, 1, 16, 16, 7, 1.5, [(19, 50), (1, 33)]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("H", "G", "E", "P", "window", "soft_cap", "rows"), MIXED)
def test_equals_the_twin(
    H: int, G: int, E: int, P: int, window: int, soft_cap: float, rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    arguments = make(H, G, E, P, rows, dtype, window)
    rule = AttentionRule(1.3 / math.sqrt(E), window, soft_cap)
    expected = reference.paged_attention(*arguments, rule)
    out = torch.full_like(expected, math.nan)
    paged_attention(*arguments, rule, out, AttentionShape(16, 32, 1, 4, 2))
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype][0], rtol=TOLERANCES[dtype][1])


# Every dtype where most segments are merged, and one of them else.
SPLIT = [
    pytest.param(dtype, segments, window, marks=() if dtype == torch.float16 or segments == 8 else pytest.mark.slow)
    for dtype, (segments, window) in product(DTYPES, [(2, 0), (8, 0), (4, 40)])
]


@pytest.mark.parametrize(("dtype", "segments", "window"), SPLIT, ids=str)
def test_split_sequences_equal_the_twin(dtype: torch.dtype, segments: int, window: int) -> None:
    """Lengths from less than a tile to several segments; a window that leaves whole segments out."""
    arguments = make(6, 2, 64, 16, [(1, 3), (1, 200), (1, 33), (1, 129)], dtype, window)
    rule = AttentionRule(0.2, window)
    expected = reference.paged_attention(*arguments, rule)
    out = torch.full_like(expected, math.nan)
    paged_attention(*arguments, rule, out, AttentionShape(16, 16, segments, 4, 2))
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype][0], rtol=TOLERANCES[dtype][1])


# The kernel rounds probabilities (of int8: times the scale of the value) to q's dtype; codes themselves are exact.
@pytest.mark.parametrize("codes", kv_codes.CODE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_of_codes(codes: torch.dtype, dtype: torch.dtype) -> None:
    """Mixed batches and split sequences; unused slots hold NaN, and int8 ones a scale that is none."""
    for rows, segments in ((MIXED[0][-1], 1), ([(1, 3), (1, 100)], 4)):
        q_THE, elements, *tables = make(4, 2, 40, 16, rows, dtype)
        (k_codes, k_scales), (v_codes, v_scales) = (kv_codes.encode(x.float(), codes) for x in elements.tensors())
        if k_scales is not None and v_scales is not None:
            k_scales, v_scales = torch.stack((k_scales, v_scales), 1).unbind(1)  # as in a page
        cache, rule = LayerCache(k_codes, v_codes, k_scales, v_scales), AttentionRule(0.2)
        expected = reference.paged_attention(q_THE, cache, *tables, rule)
        assert expected.isfinite().all()
        out = torch.full_like(expected, math.nan)
        paged_attention(q_THE, cache, *tables, rule, out, AttentionShape(16, 32, segments, 4, 2))
        torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype][0], rtol=TOLERANCES[dtype][1])


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_code_is_decoded(codes: torch.dtype) -> None:
    """A sequence of one token for each value: its attention is that value. NaN and infinities stay what they are."""
    v_codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(codes).view(16, 1, 1, 16)
    k_codes = torch.zeros_like(v_codes)
    tables_S1 = torch.arange(16, dtype=torch.int32, device=DEVICE)[:, None]
    lens_S = torch.ones(16, dtype=torch.int32, device=DEVICE)
    starts_S1 = torch.arange(17, dtype=torch.int32, device=DEVICE)
    q_THE = torch.zeros(16, 1, 16, device=DEVICE)
    out_THE = torch.empty_like(q_THE)
    tables = (tables_S1, lens_S, starts_S1)
    cache, rule = LayerCache(k_codes, v_codes), AttentionRule(1.0)
    paged_attention(q_THE, cache, *tables, rule, out_THE, AttentionShape(16, 16, 1, 4, 1))
    torch.testing.assert_close(out_THE.flatten(), v_codes.float().flatten(), atol=0, rtol=0, equal_nan=True)


def test_prompts_in_blocks_of_the_size_that_prefill_takes() -> None:
    arguments = make(4, 2, 32, 16, [(70, 70), (1, 10), (65, 100)], torch.float32)
    shape = choose_shape(136, 3, 2, 2, 32)
    assert shape.block_m == 128
    expected = reference.paged_attention(*arguments, AttentionRule(0.3))
    out = torch.full_like(expected, math.nan)
    paged_attention(*arguments, AttentionRule(0.3), out, shape)
    torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiles_that_are_chosen(dtype: torch.dtype) -> None:
    """Of prompts and of decodes, with heads whose groups do not divide a tile."""
    for rows in ([(40, 40), (1, 10), (20, 50)], [(1, 70), (1, 3)]):
        arguments = make(7, 1, 32, 16, rows, dtype)
        expected = reference.paged_attention(*arguments, AttentionRule(0.3))
        out = torch.full_like(expected, math.nan)
        paged_attention(*arguments, AttentionRule(0.3), out)
        torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype][0], rtol=TOLERANCES[dtype][1])


@pytest.mark.parametrize(("segments", "window", "chunk"), [(1, 0, 24), (1, 20, 0), (4, 0, 40)])
def test_sinks_and_chunks(segments: int, window: int, chunk: int) -> None:
    rows = [(1, 3), (1, 200), (1, 121)] + [(19, 50), (30, 30)] * (segments == 1)
    arguments = make(6, 2, 32, 16, rows, torch.float32, window, chunk)
    rule, sinks_H = AttentionRule(0.2, window, chunk=chunk), torch.linspace(-3, 12, 6, device=DEVICE)
    expected = reference.paged_attention(*arguments, rule, sinks_H)
    for range_len in (0, 64):
        out = torch.full_like(expected, math.nan)
        shape = AttentionShape(16, 16, segments, 4, 2, range_len)
        paged_attention(*arguments, rule, out, shape, sinks_H)
        torch.testing.assert_close(out, expected, atol=5e-6, rtol=1e-5)


def test_few_decodes_are_split_and_many_are_not() -> None:
    assert choose_shape(1, 1, 4, 8, 128).segments == 32
    assert choose_shape(256, 256, 4, 8, 128).segments == 1
    assert choose_shape(1, 1, 4, 8, 128, is_float32=True).segments == 32
    assert choose_shape(256, 4, 4, 8, 128, is_float32=True).segments == 1


def test_what_no_launch_can_take_is_refused() -> None:
    arguments = make(4, 1, 16, 8, [(1, 9)], torch.float32)
    out = torch.empty_like(arguments[0])
    fewer_rows = AttentionShape(block_m=2, tile=16, segments=1, num_warps=4, num_stages=1)
    with pytest.raises(ValueError, match="4 query heads, expected at most 2"):
        paged_attention(*arguments, AttentionRule(0.3), out, fewer_rows)
    q_THE, cache, *tables = arguments
    wide = LayerCache(cache.k_BGPE, cache.v_BGPE.repeat(1, 2, 1, 1)[:, :1])
    with pytest.raises(ValueError, match="v_cache has strides"):
        paged_attention(q_THE, wide, *tables, AttentionRule(0.3), out)
