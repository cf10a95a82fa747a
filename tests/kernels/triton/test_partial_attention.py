"""Attention over the pages of one of several owners, and the join of their results: the GPU kernels against the
plain-torch twins, on a GPU or under Triton's interpreter.

Dimensions: T tokens, H query heads, E head dim, N owners.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import gpu, kv_codes, reference
from quire.kernels.layer_rules import AttentionRule
from quire.kernels.partial_attention import Partials, join_partials, partial_attention
from tests.kernels.triton import test_latent, test_paged_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter

DEVICE, TOLERANCES = test_paged_attention.DEVICE, test_paged_attention.TOLERANCES
ROWS = [(5, 5), (1, 80), (20, 57), (1, 1)]  # query tokens and lengths: with and without pages of each owner


@pytest.fixture(autouse=True)
def _serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the test's device go where tensors of a GPU go."""
    monkeypatch.setattr(gpu, "serves", lambda device: device.type == DEVICE)


def owned(cache: LayerCache, num_owners: int, owner: int) -> LayerCache:
    """The pages of an owner."""
    k_BGPE = cache.k_BGPE[owner::num_owners]
    v_BGPE = k_BGPE[..., : cache.v_BGPE.shape[3]] if cache.is_latent else cache.v_BGPE[owner::num_owners]
    if cache.k_scales_BGP is None or cache.v_scales_BGP is None:
        return LayerCache(k_BGPE, v_BGPE)
    return LayerCache(k_BGPE, v_BGPE, cache.k_scales_BGP[owner::num_owners], cache.v_scales_BGP[owner::num_owners])


def _divided(partials: Partials) -> tuple[Tensor, Tensor, Tensor]:
    """With values as sums of weights that add up to 1."""
    values_THV = partials.values_THV / partials.sums_TH.clamp(min=1e-30)[..., None]
    return values_THV, partials.maxima_TH, partials.sums_TH


def check(
    arguments: tuple[Tensor, LayerCache, Tensor, Tensor, Tensor],
    num_owners: int,
    rule: AttentionRule,
    sinks_H: Tensor | None = None,
) -> None:
    q_THE, cache, *rest = arguments
    atol, rtol = TOLERANCES[q_THE.dtype]
    found = []
    for owner in range(num_owners):
        own = (q_THE, owned(cache, num_owners, owner), *rest, rule, num_owners, owner)
        found.append(partial_attention(*own))
        twin = Partials(*reference.partial_attention(*own))
        assert {each.dtype for each in found[-1]} == {torch.float32}
        assert torch.equal(found[-1].sums_TH == 0, twin.sums_TH == 0), "a row sees other keys"
        for got, expected in zip(_divided(found[-1]), _divided(twin), strict=True):
            torch.testing.assert_close(got, expected, atol=max(atol, 2e-5), rtol=max(rtol, 2e-5))
    joined = join_partials(Partials(*map(torch.stack, zip(*found, strict=True))), sinks_H, q_THE.dtype)
    expected = reference.paged_attention(q_THE, cache, *rest, rule, sinks_H)
    torch.testing.assert_close(joined, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("dtype", "num_owners", "window", "chunk", "soft_cap"),
    [
        (torch.float32, 2, 0, 0, 0.0),
        (torch.float32, 3, 40, 0, 4.0),
        (torch.float32, 2, 0, 24, 0.0),
        pytest.param(torch.bfloat16, 2, 0, 0, 0.0, marks=pytest.mark.slow),
        (torch.bfloat16, 3, 40, 0, 4.0),
        pytest.param(torch.bfloat16, 2, 0, 24, 0.0, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_the_twin(dtype: torch.dtype, num_owners: int, window: int, chunk: int, soft_cap: float) -> None:
    arguments = test_paged_attention.make(4, 2, 64, 32, ROWS, dtype, window, chunk)
    sinks_H = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    check(arguments, num_owners, AttentionRule(0.2, window, soft_cap, chunk), sinks_H)


@pytest.mark.parametrize("codes", [pytest.param(None, marks=pytest.mark.slow), torch.int8], ids=str)
def test_latent_rows_equal_the_twin(codes: torch.dtype | None) -> None:
    check(test_latent.make(6, 48, 16, 32, ROWS, torch.float32, codes), 2, test_latent.RULE)


@pytest.mark.parametrize(
    "codes", [pytest.param(torch.float8_e5m2, marks=pytest.mark.slow), torch.float8_e4m3fn, torch.int8], ids=str
)
def test_caches_of_codes(codes: torch.dtype) -> None:
    q_THE, cache, *rest = test_paged_attention.make(4, 2, 64, 32, ROWS, torch.float32)
    (k, k_scales), (v, v_scales) = (kv_codes.encode(x_BGPE, codes) for x_BGPE in cache.tensors())
    if k_scales is not None and v_scales is not None:
        k_scales, v_scales = torch.stack((k_scales, v_scales), 1).unbind(1)  # as in a page
    check((q_THE, LayerCache(k, v, k_scales, v_scales), *rest), 2, AttentionRule(0.2))
