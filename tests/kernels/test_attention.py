"""Paged attention against a dense float64 softmax and its twin, and the same bits however the tokens are batched and
chunked.

Dimensions: T tokens, H query heads, G KV heads, E head_dim, B cache blocks, P block_size, L positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels import cpu, kv_codes, ops, reference
from quire.kernels.layer_rules import AttentionRule
from tests.covering import covering
from tests.examples import IS_FULL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# float32: sums of a few hundred products. The others: rounding of the result, and in bfloat16 of the probabilities too.
TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.float16: (1e-3, 2e-3), torch.bfloat16: (8e-3, 1.6e-2)}


@dataclass
class Sequence:
    """All tokens of one sequence; attention is asked for the last ones up to some length."""

    q_LHE: Tensor
    k_LGE: Tensor
    v_LGE: Tensor


def make_sequence(length: int, H: int, G: int, E: int, dtype: torch.dtype, seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(length, heads, E, generator=generator).to(dtype) for heads in (H, G, G))
    return Sequence(q, k, v)


@dataclass
class Options:
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0
    chunk: int = 0
    has_sinks: bool = False

    def first_visible(self, position: int) -> int:
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(position - self.sliding_window + 1, 0) if self.sliding_window else 0

    def sinks(self, s: Sequence) -> Tensor | None:
        """From small ones to one that is larger than any score."""
        return torch.linspace(-3, 12, s.q_LHE.shape[1]).to(s.q_LHE.dtype) if self.has_sinks else None

    def scale(self, E: int) -> float:
        return 1.3 / math.sqrt(E)


def attend(
    parts: list[tuple[Sequence, int, int]],
    options: Options,
    function: Callable[..., Tensor] = ops.paged_attention,
    codes: torch.dtype | None = None,
) -> list[Tensor]:
    """One call for tokens [begin, end) of each sequence, over a shuffled cache whose unseen slots are NaN.

    `codes` of the cache; None: it has the dtype of the sequences.
    """
    P = options.block_size
    sequence = parts[0][0]
    G, E = sequence.k_LGE.shape[1:]
    num_blocks = [-(-end // P) for _, _, end in parts]
    order = torch.randperm(sum(num_blocks) + 2, generator=torch.Generator().manual_seed(1)).int()
    # a strided view, like one layer of a cache of several
    caches = torch.full((len(order), 2, 2, G, P, E), 3.0 if codes == torch.int8 else math.nan)
    caches = caches.to(codes or sequence.k_LGE.dtype)
    k_cache_BGPE, v_cache_BGPE = caches[:, 1, 0], caches[:, 0, 1]
    scales = [None, None]
    if codes == torch.int8:  # behind one another in each block, as one layer of a page-major cache has them
        scales = list(torch.full((len(order), 2, G, P), math.nan).unbind(1))
    block_tables = torch.full((len(parts), max(num_blocks) + 1), -1, dtype=torch.int32)
    for row, ((s, begin, end), count) in enumerate(zip(parts, num_blocks, strict=True)):
        first = options.first_visible(begin)
        block_tables[row, first // P : count] = order[sum(num_blocks[:row]) :][first // P : count]
        positions = torch.arange(first, end)  # what no token of the call sees is nowhere
        blocks, offsets = block_tables[row].long()[positions // P], positions % P
        for x_LGE, cache_BGPE, scales_BGP in (
            (s.k_LGE, k_cache_BGPE, scales[0]),
            (s.v_LGE, v_cache_BGPE, scales[1]),
        ):
            rows, row_scales = (
                (x_LGE[first:end], None) if codes is None else kv_codes.encode(x_LGE[first:end].float(), codes)
            )
            cache_BGPE[blocks, :, offsets] = rows
            if scales_BGP is not None:
                scales_BGP[blocks, :, offsets] = row_scales
    query_lens = torch.tensor([end - begin for _, begin, end in parts])
    q_THE = torch.cat([s.q_LHE[begin:end] for s, begin, end in parts])
    fused = torch.cat((q_THE.flatten(1), q_THE.flatten(1)), dim=1)  # q as a view of the qkv projection
    out = function(
        fused[:, : q_THE[0].numel()].unflatten(1, q_THE.shape[1:]),
        LayerCache(k_cache_BGPE, v_cache_BGPE, *scales),
        block_tables,
        torch.tensor([end for _, _, end in parts], dtype=torch.int32),
        torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int(),
        AttentionRule(options.scale(E), options.sliding_window, options.soft_cap, options.chunk),
        sinks_H=options.sinks(sequence),
    )
    return list(out.split(query_lens.tolist()))


def dense(s: Sequence, begin: int, end: int, options: Options) -> Tensor:
    """Softmax attention written down token by token in float64."""
    q, k, v = s.q_LHE.double(), s.k_LGE.double(), s.v_LGE.double()
    H, G, sinks_H = q.shape[1], k.shape[1], options.sinks(s)
    rows = []
    for position in range(begin, end):
        first = options.first_visible(position)
        heads = []
        for h in range(H):
            g = h * G // H
            scores = k[first : position + 1, g] @ q[position, h] * options.scale(q.shape[2])
            if options.soft_cap:
                scores = options.soft_cap * (scores / options.soft_cap).tanh()
            top = scores.max() if sinks_H is None else max(scores.max(), sinks_H[h].double())
            weights, sink = (scores - top).exp(), 0 if sinks_H is None else (sinks_H[h].double() - top).exp()
            heads.append(weights @ v[first : position + 1, g] / (weights.sum() + sink))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


# H, G, E, options, [(begin, end)]
SHAPES = [
    (4, 2, 64, Options(), [(0, 5), (299, 300), (530, 570)]),
    (6, 2, 80, Options(block_size=8, soft_cap=4.0), [(667, 700), (0, 1)]),
    (2, 2, 24, Options(block_size=24, sliding_window=100), [(490, 530)]),
    (3, 1, 128, Options(block_size=32), [(255, 256), (256, 257), (0, 33)]),
    (19, 1, 16, Options(sliding_window=7), [(41, 50)]),
    (4, 4, 96, Options(block_size=128, sliding_window=300, soft_cap=1.5), [(590, 600)]),
    (2, 1, 112, Options(block_size=40), [(60, 70)]),
    (2, 1, 192, Options(), [(20, 49)]),
    (5, 1, 256, Options(block_size=64), [(0, 20), (270, 271)]),
    (2, 1, 20, Options(block_size=6), [(0, 13), (40, 41)]),
    (6, 2, 64, Options(has_sinks=True), [(0, 5), (299, 300), (530, 570)]),
    (8, 2, 32, Options(block_size=8, sliding_window=40, has_sinks=True), [(0, 70), (299, 300)]),
    (4, 2, 64, Options(chunk=48), [(0, 100), (299, 300), (288, 289), (287, 288), (500, 620)]),
    (3, 1, 24, Options(block_size=24, chunk=300, soft_cap=2.0, has_sinks=True), [(590, 605), (0, 1)]),
]


@pytest.mark.parametrize(("isa", "dtype", "shape"), covering(cpu.isas(), DTYPES, SHAPES), indirect=["isa"])
def test_equals_dense_softmax(isa: str, dtype: torch.dtype, shape: tuple) -> None:
    H, G, E, options, ranges = shape
    parts = [(make_sequence(end, H, G, E, dtype, seed=i), begin, end) for i, (begin, end) in enumerate(ranges)]
    for out, part in zip(attend(parts, options), parts, strict=True):
        atol, rtol = TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), dense(*part, options), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_twin_equals_dense_softmax(dtype: torch.dtype, shape: tuple) -> None:
    H, G, E, options, ranges = shape
    parts = [(make_sequence(end, H, G, E, dtype, seed=i), begin, end) for i, (begin, end) in enumerate(ranges)]
    outs = attend(parts, options, reference.paged_attention)
    for out, part in zip(outs, parts, strict=True):
        atol, rtol = TOLERANCES[dtype]
        torch.testing.assert_close(out.double(), dense(*part, options), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_twin_on_sharp_scores(isa: str, dtype: torch.dtype) -> None:
    """Scores of hundreds: most probabilities underflow, and the running maximum jumps from split to split."""
    s = make_sequence(900, 4, 2, 32, dtype)
    s.q_LHE.mul_(60)
    part = (s, 880, 900)
    out, twin = (attend([part], Options(), f)[0].float() for f in (ops.paged_attention, reference.paged_attention))
    # a probability is off by the rounding of scores around 600 in float32
    torch.testing.assert_close(out, twin, atol=1e-3 + TOLERANCES[dtype][0], rtol=TOLERANCES[dtype][1])


SAME_BITS = [
    (Options(), 4, 2, 64),
    (Options(block_size=8, sliding_window=130), 7, 1, 24),
    (Options(block_size=32, soft_cap=2.0), 2, 2, 80),
    (Options(block_size=8, chunk=70, has_sinks=True), 4, 2, 64),
]


@pytest.mark.parametrize(("isa", "dtype", "shape"), covering(cpu.isas(), DTYPES, SAME_BITS), indirect=["isa"])
def test_chunks_and_decode_give_the_bits_of_one_prefill(
    isa: str, dtype: torch.dtype, shape: tuple[Options, int, int, int]
) -> None:
    options, H, G, E = shape
    s = make_sequence(600, H, G, E, dtype)
    whole = attend([(s, 0, 600)], options)[0]
    for chunk in (7, 16, 255, 256, 257) if IS_FULL else (37, 255, 256, 257):
        parts = [attend([(s, begin, min(begin + chunk, 600))], options)[0] for begin in range(0, 600, chunk)]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk} tokens differ from one prefill"
    for position in (0, 1, 15, 16, 31, 32, 100, 254, 255, 256, 257, 288, 511, 512, 513, 599):
        alone = attend([(s, position, position + 1)], options)[0]
        assert torch.equal(alone[0], whole[position]), f"decode at position {position} differs from prefill"


# Decode takes several KV heads together when there are enough sequences, and has its own kernels on vector units.
DECODE_SAME_BITS = [
    (Options(), 16, 8, 128),  # 8 KV heads fill the 16 rows of a tile
    (Options(block_size=24, sliding_window=70), 6, 3, 64),  # KV heads left over
    (Options(soft_cap=3.0), 14, 2, 96),  # 7 query heads for a KV head
    (Options(block_size=32), 8, 8, 80),  # a head size that is no whole number of vectors
    (Options(), 40, 2, 32),  # more rows than a tile has
    (Options(sliding_window=33, has_sinks=True), 16, 4, 64),
    (Options(chunk=33, has_sinks=True), 6, 3, 64),
]


@pytest.mark.parametrize(
    ("isa", "dtype", "shape", "threads"), covering(cpu.isas(), DTYPES, DECODE_SAME_BITS, [1, 2]), indirect=["isa"]
)
def test_short_queries_of_a_batch_give_the_bits_of_one_prefill(
    isa: str,
    dtype: torch.dtype,
    shape: tuple[Options, int, int, int],
    threads: int,
    set_num_threads: Callable[[int], None],
) -> None:
    options, H, G, E = shape
    set_num_threads(threads)
    s = make_sequence(300, H, G, E, dtype)
    whole = attend([(s, 0, 300)], options)[0]
    for query_len in (1, 2, 3, 7, 15, 16, 17) if IS_FULL else (1, 3, 7, 16, 17):
        all_ends = (17, 31, 32, 33, 40, 64, 65, 100, 255, 256, 257, 272, 288, 300)
        ends = [end for end in (all_ends if IS_FULL else all_ends[::2] + all_ends[9::4]) if end >= query_len]
        parts = [(s, end - query_len, end) for end in ends]
        for out, (_, begin, end) in zip(attend(parts, options), parts, strict=True):
            assert torch.equal(out, whole[begin:end]), f"{query_len} tokens before {end} differ from one prefill"


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_mates_do_not_change_bits(isa: str, dtype: torch.dtype) -> None:
    parts = [
        (make_sequence(end, 4, 2, 64, dtype, seed=i), begin, end)
        for i, (begin, end) in enumerate([(0, 70), (299, 300), (0, 1), (511, 512), (280, 400), (512, 513)])
    ]
    together = attend(parts, Options())
    for i, part in enumerate(parts):
        assert torch.equal(attend([part], Options())[0], together[i]), f"sequence {i} is different alone"


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_change_bits(isa: str, dtype: torch.dtype, set_num_threads: Callable[[int], None]) -> None:
    """With many threads one long sequence is cut into splits that meet again; with one thread it is not."""
    long, options = make_sequence(2100, 4, 2, 64, dtype), Options(has_sinks=True)
    cases = [[(long, 2099, 2100)], [(long, 2060, 2100)], [(long, 1000, 1001), (long, 40, 90)]]
    results = []
    for threads in (1, 2, 8):
        set_num_threads(threads)
        results.append([attend(parts, options) for parts in cases])
    for other, threads in ((results[1], 2), (results[2], 8)):
        for i, outs in enumerate(other):
            same = all(torch.equal(x, y) for x, y in zip(outs, results[0][i], strict=True))
            assert same, f"case {i} with {threads} threads differs from one thread"


def test_writes_into_out(isa: str) -> None:
    s = make_sequence(40, 4, 2, 16, torch.float32)
    wide = torch.full((40, 4, 32), -7.0)
    options = Options()
    fresh = attend([(s, 0, 40)], options)[0]
    attend([(s, 0, 40)], options, partial(ops.paged_attention, out_THE=wide[..., 8:24]))
    assert torch.equal(wide[..., 8:24], fresh)
    assert (wide[..., :8] == -7).all(), "wrote in front of out"
    assert (wide[..., 24:] == -7).all(), "wrote behind out"


def test_nan_stays_in_its_sequence(isa: str) -> None:
    bad, good = (make_sequence(300, 4, 2, 16, torch.float32, seed=i) for i in (0, 1))
    alone = attend([(good, 250, 300)], Options())[0]
    bad.k_LGE[100] = math.nan
    outs = attend([(bad, 90, 300), (good, 250, 300)], Options())
    assert outs[0][:10].isfinite().all(), "tokens before the NaN do not see it"
    assert outs[0][10:].isnan().all(), "a NaN key must not be hidden"
    assert torch.equal(outs[1], alone)
