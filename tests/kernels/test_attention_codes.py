"""Paged attention over caches of 8-bit codes: exact attention over the values of the codes, and the same bits however
the tokens are batched and chunked.

Dimensions: H query heads, G KV heads, E head_dim, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quire.kernels import cpu, kv_codes, reference
from tests.covering import covering
from tests.kernels.test_attention import (
    DECODE_SAME_BITS,
    DTYPES,
    SAME_BITS,
    SHAPES,
    TOLERANCES,
    Options,
    Sequence,
    attend,
    dense,
    make_sequence,
)

CODES = list(kv_codes.CODE_DTYPES)


def as_read(s: Sequence, codes: torch.dtype) -> Sequence:
    """With the keys and values that the codes stand for, in float32."""
    k_LGE, v_LGE = (kv_codes.decode(*kv_codes.encode(x.float(), codes)) for x in (s.k_LGE, s.v_LGE))
    return replace(s, k_LGE=k_LGE, v_LGE=v_LGE)


@pytest.mark.parametrize(
    ("isa", "codes", "dtype", "shape"),
    covering(cpu.isas(), CODES, DTYPES, SHAPES, apart=[(0, 3)]),  # they meet in test_attention.py
    indirect=["isa"],
)
def test_equals_dense_softmax_over_decoded_rows(isa: str, dtype: torch.dtype, shape: tuple, codes: torch.dtype) -> None:
    H, G, E, options, ranges = shape
    parts = [(make_sequence(end, H, G, E, dtype, seed=i), begin, end) for i, (begin, end) in enumerate(ranges)]
    twins = attend(parts, options, reference.paged_attention, codes=codes)
    for out, twin, (s, begin, end) in zip(attend(parts, options, codes=codes), twins, parts, strict=True):
        atol, rtol = TOLERANCES[dtype]
        expected = dense(as_read(s, codes), begin, end, options)
        torch.testing.assert_close(twin.double(), expected, atol=atol, rtol=rtol)
        # rows of scaled int8 are rounded to bfloat16 if the products take bfloat16
        atol, rtol = (2 * atol, 2 * rtol) if codes == torch.int8 and dtype == torch.bfloat16 else (atol, rtol)
        torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


# Root mean square error of the result, relative to exact attention: steps of 1/16 (e4m3) and 1/8 (e5m2) of a number,
# and of 1/127 of the largest in a row, uniformly off by up to a half, in keys (once more through the softmax) and
# values.
ERRORS = {torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.10, torch.int8: 0.014}


@pytest.mark.parametrize("codes", CODES)
def test_error_against_exact_attention(codes: torch.dtype) -> None:
    s = make_sequence(600, 8, 2, 128, torch.bfloat16)
    out, exact = attend([(s, 560, 600)], Options(), codes=codes)[0].double(), dense(s, 560, 600, Options())
    error = ((out - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert ERRORS[codes] / 4 < error < ERRORS[codes]


@pytest.mark.parametrize(
    ("isa", "codes", "dtype", "shape"), covering(cpu.isas(), CODES, DTYPES, SAME_BITS), indirect=["isa"]
)
def test_chunks_and_decode_give_the_bits_of_one_prefill(
    isa: str, dtype: torch.dtype, shape: tuple[Options, int, int, int], codes: torch.dtype
) -> None:
    options, H, G, E = shape
    s = make_sequence(300, H, G, E, dtype)
    whole = attend([(s, 0, 300)], options, codes=codes)[0]
    for chunk in (16, 97):
        parts = [attend([(s, at, min(at + chunk, 300))], options, codes=codes)[0] for at in range(0, 300, chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk} tokens differ from one prefill"
    for position in (0, 15, 16, 31, 32, 255, 256, 257, 299):
        alone = attend([(s, position, position + 1)], options, codes=codes)[0]
        assert torch.equal(alone[0], whole[position]), f"decode at position {position} differs from prefill"


@pytest.mark.parametrize(
    ("isa", "codes", "dtype", "shape", "threads"),
    covering(cpu.isas(), CODES, [torch.float32, torch.bfloat16], DECODE_SAME_BITS, [1, 2]),
    indirect=["isa"],
)
def test_short_queries_of_a_batch_give_the_bits_of_one_prefill(
    isa: str,
    dtype: torch.dtype,
    shape: tuple[Options, int, int, int],
    threads: int,
    codes: torch.dtype,
    set_num_threads: Callable[[int], None],
) -> None:
    options, H, G, E = shape
    set_num_threads(threads)
    s = make_sequence(300, H, G, E, dtype)
    whole = attend([(s, 0, 300)], options, codes=codes)[0]
    for query_len in (1, 3, 16):
        parts = [(s, end - query_len, end) for end in (17, 31, 32, 33, 65, 255, 256, 257, 272, 300)]
        for out, (_, begin, end) in zip(attend(parts, options, codes=codes), parts, strict=True):
            assert torch.equal(out, whole[begin:end]), f"{query_len} tokens before {end} differ from one prefill"


@pytest.mark.parametrize(
    ("isa", "dtype", "bad", "codes", "E"),
    covering(  # E of 96: 64 codes at once, and 32
        cpu.isas(), [torch.float32, torch.bfloat16], [math.nan, math.inf, -math.inf], CODES, [16, 96]
    ),
    indirect=["isa"],
)
def test_what_is_not_finite_stays_in_its_sequence(
    isa: str, dtype: torch.dtype, bad: float, codes: torch.dtype, E: int
) -> None:
    hit, good = (make_sequence(300, 4, 2, E, dtype, seed=i) for i in (0, 1))
    alone = attend([(good, 250, 300)], Options(), codes=codes)[0]
    hit.v_LGE[100, :, 3] = bad
    outs = attend([(hit, 90, 300), (good, 250, 300)], Options(), codes=codes)
    assert not outs[0][10:, :, 3].isfinite().any(), "a value that is not finite must not be hidden"
    assert torch.equal(outs[1], alone)
    decoded = attend([(hit, 299, 300)], Options(), codes=codes)[0]
    assert torch.equal(decoded.nan_to_num(7), outs[0][-1:].nan_to_num(7)), "decode differs from prefill"
    hit.v_LGE[100] = 0
    hit.k_LGE[100] = bad
    outs = attend([(hit, 90, 300), (good, 250, 300)], Options(), codes=codes)
    assert outs[0][:10].isfinite().all(), "tokens before it do not see it"
    if math.isnan(bad):
        assert outs[0][10:].isnan().all(), "a NaN key must not be hidden"
        assert attend([(hit, 299, 300)], Options(), codes=codes)[0].isnan().all()
    assert torch.equal(outs[1], alone)


@pytest.mark.parametrize(
    ("isa", "codes", "dtype"),
    covering(cpu.isas(), [torch.float8_e4m3fn, torch.float8_e5m2], [torch.float32, torch.bfloat16]),
    indirect=["isa"],
)
def test_every_finite_code_is_read_as_what_it_means(isa: str, dtype: torch.dtype, codes: torch.dtype) -> None:
    """Of one position the result is its value. Of two the weights say what a key's element is worth."""
    numbers_GE = torch.arange(256).to(torch.uint8).view(codes).float()
    numbers_GE = torch.where(numbers_GE.isfinite(), numbers_GE, 0.0).view(2, 128).to(dtype)
    s = make_sequence(1, 2, 2, 128, dtype)
    s.v_LGE[0] = numbers_GE
    assert torch.equal(attend([(s, 0, 1)], Options(), codes=codes)[0][0], numbers_GE)
    s = make_sequence(2, 2, 2, 128, dtype)
    s.k_LGE[0], s.k_LGE[1] = numbers_GE, 0.0
    s.v_LGE[0], s.v_LGE[1] = 1.0, 0.0
    inverse_GE = torch.where(numbers_GE == 0, 0.0, 8 / numbers_GE.float()).to(dtype)
    for e in range(128):
        s.q_LHE[1] = 0.0
        s.q_LHE[1, :, e] = inverse_GE[:, e]
        out = attend([(s, 1, 2)], Options(), codes=codes)[0]
        torch.testing.assert_close(out.double(), dense(s, 1, 2, Options()), atol=5e-3, rtol=0)
