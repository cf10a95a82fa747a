"""The sizes of steps that are captured in CUDA graphs. It imports no torch, because `quire explain` uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens of a step: above it the products take longer than the launches.
LARGEST_BATCH = 256
# Tokens of mixed steps.
_MIXED_SIZES = (32, 64, 128, LARGEST_BATCH)
_MAX_SHOWN = 8  # sizes in a description


@dataclass(frozen=True)
class GraphSizes:
    """The rows of decodes and the tokens of mixed steps, ascending; and wished sizes that fit neither."""

    decodes: list[int]
    mixed: list[int]
    dropped: list[int]

    @property
    def largest(self) -> int:
        """The largest captured size; 0: nothing is captured."""
        return max((*self.decodes, *self.mixed), default=0)

    def describe(self) -> str:
        """For people."""
        parts = [f"decodes of {_listed(self.decodes)} rows"] if self.decodes else []
        parts += [f"mixed steps of {_listed(self.mixed)} tokens"] if self.mixed else []
        text = "captured: " + (", ".join(parts) or "nothing")
        return f"{text}; too large: {_listed(self.dropped)}" if self.dropped else text


def graph_sizes(
    mode: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    wished: Sequence[int] = (),
    bound: int | None = None,
) -> GraphSizes:
    """The sizes that a mode captures: FULL, FULL_DECODE_ONLY or NONE. NONE captures nothing, and drops no wish.

    Args:
        wished: the sizes to capture; empty: they are chosen here.
        bound: the largest size; None: LARGEST_BATCH, which is the limit in any case.
    """
    if mode == "NONE":
        return GraphSizes([], [], [])
    bound = min(LARGEST_BATCH if bound is None else bound, LARGEST_BATCH)
    decodes = capture_sizes(max_num_seqs, wished, bound)
    mixed = mixed_sizes(max_num_batched_tokens, wished, bound) if mode == "FULL" else []
    return GraphSizes(decodes, mixed, sorted({*wished} - {*decodes, *mixed}))


def capture_sizes(max_num_seqs: int, wished: Sequence[int] = (), bound: int = LARGEST_BATCH) -> list[int]:
    """The batch sizes to capture, ascending: 1, 2, 4, the multiples of 8, and the largest batch itself; or the wished
    ones up to it.
    """
    largest = min(max_num_seqs, LARGEST_BATCH)
    sizes = wished or (1, 2, 4, *range(8, largest + 1, 8), largest)
    return sorted({size for size in sizes if size <= min(largest, bound)})


def mixed_sizes(max_num_batched_tokens: int, wished: Sequence[int] = (), bound: int = LARGEST_BATCH) -> list[int]:
    """The token counts of mixed steps to capture, ascending: few, or the wished ones; never above LARGEST_BATCH."""
    return sorted({size for size in wished or _MIXED_SIZES if 2 <= size <= min(max_num_batched_tokens, bound)})


def _listed(sizes: Sequence[int]) -> str:
    if len(sizes) > _MAX_SHOWN:
        return f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)"
    return ", ".join(map(str, sizes))
