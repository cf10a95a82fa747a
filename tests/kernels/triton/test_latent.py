"""The GPU kernels of latent attention against their plain-torch twins, on a GPU or under Triton's interpreter.

Dimensions: T tokens, H query heads, L elements of a row, V latents, R rotary dims, P block size.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import kv_codes, reference
from quire.kernels.layer_rules import AttentionRule, LatentRotation
from quire.kernels.triton.latent import latent_attention, latent_rope_and_cache

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
RULE = AttentionRule(0.2)


def make(
    H: int, V: int, R: int, P: int, rows: list[tuple[int, int]], dtype: torch.dtype, codes: torch.dtype | None = None
) -> tuple[Tensor, LayerCache, Tensor, Tensor, Tensor]:
    """Arguments for rows of (query tokens, length): unseen slots of the cache are NaN."""
    generator = torch.Generator().manual_seed(H * 31 + V)
    counts = [-(-length // P) for _, length in rows]
    order = torch.randperm(sum(counts) + 2, generator=generator).int()
    rows_BGPE = torch.full((len(order), 1, P, V + R), math.nan)
    tables = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32)
    for s, ((_, length), count) in enumerate(zip(rows, counts, strict=True)):
        tables[s, :count] = order[sum(counts[:s]) :][:count]
        positions = torch.arange(length)
        blocks, offsets = tables[s].long()[positions // P], positions % P
        rows_BGPE[blocks, 0, offsets] = torch.randn(length, V + R, generator=generator)
    held, scales = (rows_BGPE.to(dtype), None) if codes is None else kv_codes.encode(rows_BGPE, codes)
    held, scales = held.to(DEVICE), None if scales is None else scales.to(DEVICE)
    query_lens = torch.tensor([query_len for query_len, _ in rows])
    q_THL = torch.randn(int(query_lens.sum()), H, V + R, generator=generator).to(DEVICE, dtype)
    return (
        q_THL,
        LayerCache(held, held[..., :V], scales, scales),
        tables.to(DEVICE),
        torch.tensor([length for _, length in rows], dtype=torch.int32).to(DEVICE),
        torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int().to(DEVICE),
    )


# H, V, R, block size, rows of (query tokens, length)
MIXED = [
    (4, 32, 8, 16, [(5, 5), (1, 80), (20, 57)]),
    (6, 21, 6, 8, [(9, 70), (1, 1)]),
    (40, 24, 4, 16, [(1, 64), (1, 65), (3, 33)]),  # more heads than a program takes
]
SPLIT = (5, 20, 6, 16, [(1, 3), (1, 200), (1, 33), (1, 129)])


def check(arguments: tuple[Tensor, LayerCache, Tensor, Tensor, Tensor], range_len: int) -> Tensor:
    atol, rtol = TOLERANCES[arguments[0].dtype]
    expected = reference.paged_attention(*arguments, RULE)
    assert expected.isfinite().all()
    out = torch.full_like(expected, math.nan)
    latent_attention(*arguments, RULE, out, range_len)
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MIXED)
def test_equals_the_twin(shape: tuple, dtype: torch.dtype) -> None:
    check(make(*shape, dtype), 1024)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranges_of_their_own_give_the_bits_of_one_program(dtype: torch.dtype) -> None:
    """Decodes are split into ranges. The last two tokens of each sequence together are not."""
    q_THL, cache, tables_SM, lens_S, starts_S1 = make(*SPLIT, dtype)
    split = check((q_THL, cache, tables_SM, lens_S, starts_S1), 64)
    together = torch.empty_like(split).repeat_interleave(2, 0)
    latent_attention(q_THL.repeat_interleave(2, 0), cache, tables_SM, lens_S, 2 * starts_S1, RULE, together, 64)
    assert torch.equal(together[1::2], split)


@pytest.mark.parametrize("codes", kv_codes.CODE_DTYPES, ids=str)
def test_caches_of_codes(codes: torch.dtype) -> None:
    check(make(4, 32, 8, 16, MIXED[0][-1], torch.float32, codes), 64)


@pytest.mark.parametrize("codes", [None, *kv_codes.CODE_DTYPES], ids=str)
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rotation_and_cache_write(is_interleaved: bool, codes: torch.dtype | None) -> None:
    H, V, R, T, P = 3, 21, 6, 7, 4
    generator = torch.Generator().manual_seed(1)
    q_THR, rows_TL = torch.randn(T, H, R, generator=generator), torch.randn(T, V + R + 2, generator=generator)
    angles = torch.randn(9, R // 2, generator=generator)
    rotation = LatentRotation(torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE), is_interleaved)
    positions_T, slots_T = torch.tensor([8, 1, 2, 3, 0, 5, 6]), torch.tensor([3, 9, -1, 4, 0, 11, 7])
    arguments = [x.to(DEVICE) for x in (q_THR, rows_TL[:, : V + R], positions_T, slots_T)]
    results = []
    for function in (latent_rope_and_cache, reference.latent_rope_and_cache):
        rows_BGPE = torch.zeros(3, 1, P, V + R, device=DEVICE).to(codes or torch.float32)
        scales = torch.zeros(3, 1, P, device=DEVICE) if codes == torch.int8 else None
        out_THR = torch.empty(T, H, R, device=DEVICE)
        function(*arguments, LayerCache(rows_BGPE, rows_BGPE[..., :V], scales, scales), rotation, out_THR)
        results.append((out_THR, kv_codes.decode(rows_BGPE, scales)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=4e-6)
