"""The bytes that a step reads and the operations that it computes, from its rows and the model's sizes. No torch.

Nothing else counts them: predictions, plans, metrics and the hardware limit of benchmarks ask here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import NamedTuple

from quire.cost.collectives import NO_EXCHANGES, Exchanges
from quire.formats.kv_format import kv_format
from quire.formats.weight_format import Fp8Format, GroupedFormat
from quire.layer_spec.feed_forward import distinct_experts
from quire.layer_spec.kv_spec import KvKind, KvSpec
from quire.layer_spec.shapes import LinearShape
from quire.model_config import ModelConfig

KEPT_SIZES = 256  # sizes of steps whose products are counted once: running answers have one size for many steps


class Load(NamedTuple):
    """The properties of a step's rows that cost time. Tuples have an entry per LayerKind."""

    num_tokens: int
    num_rows: int
    num_logits: int  # rows of logits
    kv_tokens: tuple[int, ...]  # the sum over the rows of the tokens that are read from the KV cache
    pairs: tuple[int, ...]  # pairs of a new token and a token that it sees
    other_tokens: int = 0  # tokens of other lanes: of all weights they meet those of the experts alone


class Demand(NamedTuple):
    """The bytes and operations of a step. A multiplication and an addition are two operations."""

    weight_bytes: float  # all weights that the step reads, with the experts that its tokens are expected to hit
    kv_bytes: float  # keys and values that the step reads
    written_bytes: float  # keys and values of the new tokens
    linear_flops: float  # FLOPs of products with weights in floating point
    linear_int8_ops: float  # operations of products with weights in integers
    attention_flops: float
    num_logits: int
    rescanned_bytes: float = 0.0  # the part of weight_bytes that tiles of rows take turns over
    filling_ops: float = 0.0  # operations on rows that fill up tiles (AMX); no other number contains them
    near_exchanges: int = 0  # of ranks on one machine: see cost/collectives.py
    near_bytes: float = 0.0
    far_exchanges: int = 0  # of ranks on several machines
    far_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Operations on numbers of every type."""
        return self.linear_flops + self.linear_int8_ops + self.attention_flops


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers in which a token sees the same tokens. Sizes are sums over these layers.

    Attributes:
        window: tokens, for the kinds `window` and `chunked`.
        token_bytes: keys and values of a token.
        state_bytes: states of a sequence.
    """

    kind: KvKind
    window: int
    token_bytes: int
    state_bytes: int
    flops_per_pair: int

    def seen(self, starts: Sequence[int], count: int) -> int:
        """Tokens that the last one of `count` tokens sees, with itself: the sum over sequences that go on after
        `starts` tokens.
        """
        if self.kind == "state":
            return 0
        window = self.window
        if self.kind == "chunked":
            return sum((start + count - 1) % window + 1 for start in starts)
        inside = starts if not window else [start for start in starts if start < window - count]
        return sum(inside) + count * len(inside) + window * (len(starts) - len(inside))

    def span(self, start: int, count: int) -> int:
        """Tokens that are seen by at least one of `count` tokens after the first `start` tokens."""
        if self.kind == "state":
            return 0
        if self.kind == "window":
            return min(start + count, self.window + count - 1)
        return start + count - (start // self.window * self.window if self.kind == "chunked" else 0)

    def area(self, start: int, count: int) -> int:
        """Pairs of a token and a token that it sees, for `count` tokens after the first `start` tokens."""
        if self.kind == "state":
            return 0
        return self._pairs_up_to(start + count) - self._pairs_up_to(start)

    def _pairs_up_to(self, end: int) -> int:
        window = self.window
        if self.kind == "chunked":
            chunks, rest = divmod(end, window)
            return chunks * _triangle(window) + _triangle(rest)
        if self.kind == "window" and end > window:
            return _triangle(window) + (end - window) * window
        return _triangle(end)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


class Tiles(NamedTuple):
    """The rows that CPU kernels compute together.

    For up to `num_streamed` tiles of rows, weights are read once, and the products hide behind the reading. More rows
    take turns over a part of the weights while it is in a cache, and then less is hidden.

    Attributes:
        num_rows: rows of a tile.
        is_filled: the last tile costs as much as a full one. Otherwise a tile costs what its rows cost.
    """

    num_rows: int
    num_streamed: int
    is_filled: bool

    @property
    def most_streamed(self) -> int:
        """The most rows for which weights are read once."""
        return self.num_streamed * self.num_rows

    def rescanned_share(self, num_rows: int, *, has_codes: bool) -> float:
        """The share of a product's weights that count once more. Measured: see benchmarks/NOTES.md, 2026-11-28 and 29.

        On a matrix unit, codes cost the same for one tile as for two, and floats do not.
        """
        if num_rows > self.most_streamed:
            return 1.0
        return 0.5 if num_rows > self.num_rows and not has_codes else 0.0

    def filling_rows(self, num_rows: int) -> int:
        """Rows that pad the last tile. Few rows have none: reading the weights takes all of their time."""
        is_padded = self.is_filled and num_rows > self.most_streamed
        return -num_rows % self.num_rows if is_padded else 0


_MATRIX_UNIT = Tiles(16, 2, is_filled=True)  # csrc/kernels/gemm_amx.cpp
_VECTORS = Tiles(6, 1, is_filled=False)  # csrc/kernels: kMaxRows of gemm_row_tiles.h and gemm_grouped*
_VECTORS_WITHOUT_DOTS = Tiles(2, 1, is_filled=False)  # csrc/kernels/gemm_grouped_neon.h: kMaxRows without kHasDots
_UNKNOWN = Tiles(sys.maxsize, 1, is_filled=False)  # one tile for all rows
_TILES = {"amx": _MATRIX_UNIT} | dict.fromkeys(
    ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "neon", "neon_dotprod", "neon_i8mm"), _VECTORS
)
_INTEGER_TILES = _TILES | {"neon": _VECTORS_WITHOUT_DOTS}


def tiles(isa: str, *, is_integer: bool) -> Tiles:
    """The tiles of an instruction set's products with most weights of a part of the model."""
    return (_INTEGER_TILES if is_integer else _TILES).get(isa, _UNKNOWN)


class StepArithmetic:
    """Counts of one model in one form.

    Args:
        dtype: the dtype of activations, a key of DTYPE_BYTES.
        quantization: the quantization of the weights, in the words of ModelConfig.weight_bytes.
        kv_cache_dtype: the setting with this name.
        isa: the instruction set of the CPU's kernels; any other name has no tiles that are known.
        exchanges: those of the ranks that share the model. Then `model` is the part of one of them, with all layers.

    Attributes:
        exchanges: see Args.
        num_layers: the layers of the model.
        is_fp8: most weights of the blocks are held and multiplied in FP8.
        is_integer: most of them are multiplied in integers, on a CPU.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: str,
        quantization: str | None,
        kv_cache_dtype: str,
        isa: str = "",
        exchanges: Exchanges = NO_EXCHANGES,
    ) -> None:
        self.exchanges = exchanges
        kv = kv_format(kv_cache_dtype, dtype)
        counts: Counter[tuple[KvSpec, int]] = Counter()
        for layer, count in model.layer_kinds:
            if (part := layer.attention) is not None:
                counts[part.kv_spec, part.flops_per_pair] += count
        sums: dict[tuple[KvKind, int], list[int]] = {}
        for (spec, flops), count in counts.items():
            sizes = sums.setdefault((spec.kind, spec.window), [0, 0, 0])
            more = (spec.bytes_per_token(kv), spec.state_bytes, flops)
            sums[spec.kind, spec.window] = [size + count * each for size, each in zip(sizes, more, strict=True)]
        self.kinds = tuple(LayerKind(kind, window, *sizes) for (kind, window), sizes in sums.items())
        output = model.output_linear()
        self.output_bytes = sum(
            part.num_bytes(dtype, is_packed=model.is_native) for part in model.stored(output, quantization)
        )
        expert_bytes: Counter[tuple[int, int]] = Counter()
        for experts, num_bytes in model.expert_bytes(dtype, quantization):
            expert_bytes[experts.num_experts, experts.num_active_here] += num_bytes
        # By (number of experts, number of active ones): the bytes of one expert in each layer that has them.
        self._expert_bytes = tuple((*counts, num_bytes) for counts, num_bytes in expert_bytes.items())
        active = sum(num_active * num_bytes for _, num_active, num_bytes in self._expert_bytes)
        self.always_read_bytes = model.read_bytes_per_step(dtype, quantization) - active
        self._blocks = 2 * model.num_block_parameters()
        self._output = 2 * output.num_weights
        blocks = _num_held(model, model.counted_active_linears(), quantization)
        self.num_layers = len(model.layers)
        self.is_fp8 = blocks[Fp8Format] > blocks.total() / 2
        self.is_integer = blocks[GroupedFormat] > blocks.total() / 2
        self._int8_blocks = 2 * blocks[GroupedFormat]
        of_experts = _num_held(model, _active_stacks(model), quantization)
        self._experts, self._int8_experts = 2 * of_experts.total(), 2 * of_experts[GroupedFormat]
        of_output = _num_held(model, [(output, 1)], quantization)
        self._int8_output = 2 * of_output[GroupedFormat]
        output_is_integer = of_output[GroupedFormat] > of_output.total() / 2
        self._tiles, self._output_tiles = (
            tiles(isa, is_integer=is_integer) for is_integer in (self.is_integer, output_is_integer)
        )
        # Codes become numbers on their way to the tiles, which takes as long for one tile of rows as for two.
        self._has_codes, self._output_has_codes = (
            counts[GroupedFormat] + counts[Fp8Format] > counts.total() / 2 for counts in (blocks, of_output)
        )
        self._products = lru_cache(KEPT_SIZES)(self._count_products)

    def load(self, starts: Sequence[int], counts: Sequence[int], num_logits: int) -> Load:
        """The load of rows that have `counts` new tokens each, at least one, after `starts` computed tokens."""
        num_tokens = sum(counts)
        longer: list[tuple[int, int]] = []
        num_more, row = num_tokens - len(counts), len(counts)
        while num_more:  # prompts are the last rows
            row -= 1
            if counts[row] > 1:
                longer.append((starts[row], counts[row]))
                num_more -= counts[row] - 1
        if not longer:  # as in most steps: answers alone
            seen = tuple([kind.seen(starts, 1) for kind in self.kinds])
            return Load(num_tokens, len(counts), num_logits, seen, seen)
        ends, own_ends = list(map(add, starts, counts)), list(map(sum, longer))
        kv_tokens, pairs = [], []
        for kind in self.kinds:
            # First every row counts as if it had one token. Then the longer rows are counted anew.
            others = kind.seen(ends, 0) - kind.seen(own_ends, 0)
            kv_tokens.append(others + sum(kind.span(*each) for each in longer))
            pairs.append(others + sum(kind.area(*each) for each in longer))
        return Load(num_tokens, len(counts), num_logits, tuple(kv_tokens), tuple(pairs))

    def with_row(self, load: Load, start: int, count: int, num_logits: int) -> Load:
        """The load with one more row."""
        kv_tokens = tuple(
            tokens + kind.span(start, count) for tokens, kind in zip(load.kv_tokens, self.kinds, strict=True)
        )
        pairs = tuple(pairs + kind.area(start, count) for pairs, kind in zip(load.pairs, self.kinds, strict=True))
        num_tokens, num_logits = load.num_tokens + count, load.num_logits + num_logits
        return Load(num_tokens, load.num_rows + 1, num_logits, kv_tokens, pairs, load.other_tokens)

    def weight_bytes(self, num_tokens: int) -> float:
        """Bytes of the weights that a step of this number of tokens reads, with logits. Routing is taken as uniform."""
        return self.always_read_bytes + sum(
            distinct_experts(num_experts, num_active, num_tokens) * num_bytes
            for num_experts, num_active, num_bytes in self._expert_bytes
        )

    def demand(self, load: Load) -> Demand:
        """Every step reads its weights once. It reads the output's weights only if it has logits."""
        kv_bytes = written = attention = 0
        for kind, kv_tokens, pairs in zip(self.kinds, load.kv_tokens, load.pairs, strict=True):
            state = kind.state_bytes * load.num_rows
            kv_bytes += kind.token_bytes * kv_tokens + state
            written += kind.token_bytes * load.num_tokens + state
            attention += kind.flops_per_pair * pairs
        size = load.num_tokens, load.num_logits, load.other_tokens
        weights, linear, int8_ops, rescanned, filling = self._products(*size)
        near, far = self.exchanges.near, self.exchanges.far
        return Demand(
            weights,
            kv_bytes,
            written,
            linear,
            int8_ops,
            attention,
            load.num_logits,
            rescanned,
            filling,
            near.count,
            near.num_bytes(*size),
            far.count,
            far.num_bytes(*size),
        )

    def _count_products(self, tokens: int, logits: int, others: int) -> tuple[float, float, float, float, float]:
        """The amounts of products, which depend on the number of tokens, rows of logits, and others' tokens alone."""
        int8_ops = self._int8_blocks * tokens + self._int8_output * logits + self._int8_experts * others
        weights = self.weight_bytes(tokens + others) - (0 if logits else self.output_bytes)
        linear = self._blocks * tokens + self._output * logits + self._experts * others - int8_ops
        blocks = self.always_read_bytes - self.output_bytes
        rescanned = blocks * self._tiles.rescanned_share(tokens, has_codes=self._has_codes)
        rescanned += self.output_bytes * self._output_tiles.rescanned_share(logits, has_codes=self._output_has_codes)
        filling = self._blocks * self._tiles.filling_rows(tokens)
        filling += self._output * self._output_tiles.filling_rows(logits)
        return weights, linear, int8_ops, rescanned, filling

    def same_tiles(self, num_tokens: int) -> int:
        """The most tokens of a step that costs no further tile than one of `num_tokens`; sys.maxsize: any number.

        More tokens than this can take much longer.
        """
        if self._tiles.is_filled:
            return num_tokens + -num_tokens % self._tiles.num_rows
        return self._tiles.most_streamed if num_tokens <= self._tiles.most_streamed else sys.maxsize


def _active_stacks(model: ModelConfig) -> Iterator[tuple[LinearShape, int]]:
    """The linear layers of the experts that one token uses, with the number of each."""
    for experts, count in Counter(model.experts()).items():
        for linear in experts.expert.linears:
            yield replace(linear, num_experts=experts.num_active_here), count


def _num_held(
    model: ModelConfig, linears: Iterable[tuple[LinearShape, int]], quantization: str | None
) -> Counter[type]:
    """The number of weights by the type of the format that holds them. GroupedFormat means integers.

    Args:
        linears: linear layers, with the number of each.
    """
    counts: Counter[type] = Counter()
    for linear, count in linears:
        for part in model.stored(linear, quantization):
            counts[type(part.held)] += count * part.shape.num_weights
    return counts
