"""Groups of layers that keep keys and values in the same way, and their blocks in pages of one size. No torch.

A page holds a block of tokens of some layers of one group. All groups take pages from one pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quire.formats.kv_format import KvFormat
from quire.layer_spec.kv_spec import KvSpec
from quire.model_config import ModelConfig

MAX_PADDING = 0.04  # a group's layers may leave this share of its pages unused in the last table
_LINE = 64  # bytes of a cache line
_MOST_TOKENS = 1 << 24  # the limit of one request: attention counts positions in float32


@dataclass(frozen=True)
class KvGroup:
    """Layers with the same spec. A block of tokens takes one page in each of the group's `num_tables` block tables.

    Attributes:
        layers: the numbers of the layers, in order. Only layers that keep keys, values or states are numbered.
        layers_per_page: the number of layers in a page. They lie one after the other.
        least_tables: the least number of tables. All pipeline stages have the same number, so some tables may be empty
            in this stage.
    """

    spec: KvSpec
    layers: tuple[int, ...]
    layers_per_page: int
    least_tables: int = 1

    @property
    def num_tables(self) -> int:
        return max(-(-len(self.layers) // max(self.layers_per_page, 1)), self.least_tables)

    @property
    def keeps_all(self) -> bool:
        """Whether a request holds the blocks of all its tokens."""
        return self.spec.kind in ("full", "latent")

    def tables(self) -> Iterator[tuple[int, ...]]:
        """For each table, its layers."""
        for table in range(self.num_tables):
            yield self.layers[table * self.layers_per_page : (table + 1) * self.layers_per_page]

    def first_needed(self, position: int) -> int:
        """The first position that the token at `position` reads. Later tokens read no earlier position."""
        if self.spec.kind == "window":
            return max(position - self.spec.window + 1, 0)
        return position // self.spec.window * self.spec.window if self.spec.kind == "chunked" else 0

    def most_blocks(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds.

        Args:
            step_tokens: the most tokens of one request in all steps in flight, before their results are known.
        """
        if self.spec.kind == "state":
            return 1  # one block is enough for any length
        num_blocks = -(-num_tokens // block_size)
        if self.keeps_all:
            return num_blocks
        # A run of positions may begin inside a block, so it can touch one block more than it fills.
        return min(num_blocks, -(-(self.spec.window - 1 + step_tokens - 1) // block_size) + 1)


ONE_LAYER = KvGroup(KvSpec(kind="full", num_kv_heads=1, head_dim_k=1, head_dim_v=1), (0,), 1)  # enough for tables


def kv_groups(model: ModelConfig) -> tuple[KvGroup, ...]:
    """The groups of a model's layers, in the order of the layers.

    A model that runs through transformers has one group: only transformers' code knows which tokens its layers see.
    """
    layers_of: dict[KvSpec, list[int]] = {}
    for index, spec in enumerate(model.kv_specs()):
        spec = spec if model.is_native else replace(spec, kind="full", window=0)
        layers_of.setdefault(spec, []).append(index)
    if model.stage is not None:
        own = ((spec, tuple(layers_of.get(spec, ())), count) for spec, count in model.stage.tables)
        return tuple(KvGroup(spec, layers, -(-len(layers) // count), count) for spec, layers, count in own)
    per_page = _layers_per_page([len(layers) for layers in layers_of.values()])
    return tuple(KvGroup(spec, tuple(layers), per_page) for spec, layers in layers_of.items())


def _layers_per_page(counts: Sequence[int]) -> int:
    """The largest number of layers per page with which no group pads its pages by more than MAX_PADDING.

    Few tables cost less.
    """

    def padding(count: int, per_page: int) -> float:
        return -(-count // per_page) * per_page / count - 1

    fits = (size for size in range(max(counts), 0, -1) if max(padding(c, size) for c in counts) <= MAX_PADDING)
    return next(fits)


def num_tables(groups: Sequence[KvGroup]) -> int:
    """The number of block tables of one request."""
    return sum(group.num_tables for group in groups)


def table_of_layer(groups: Sequence[KvGroup]) -> list[int]:
    """The number of the block table of each layer that keeps keys, values or states."""
    tables = (layers for group in groups for layers in group.tables())
    found = {layer: table for table, layers in enumerate(tables) for layer in layers}
    return [found[layer] for layer in range(len(found))]


def page_bytes(groups: Sequence[KvGroup], kv: KvFormat, block_size: int, num_owners: int = 1) -> int:
    """The bytes of a page. It holds a block of tokens, or the state of a sequence, for the layers of one table.

    Args:
        num_owners: the number of ranks that share the pages. Each rank has whole pages.
    """

    def of_layer(spec: KvSpec) -> int:
        return spec.state_bytes or block_size * spec.bytes_per_token(kv)

    most = max(group.layers_per_page * of_layer(group.spec) for group in groups)
    return most if num_owners == 1 else -(-most // (_LINE * num_owners)) * _LINE * num_owners


@dataclass(frozen=True)
class DrafterLayers:
    """The layers of a drafter that keep something. They lie after the model's layers in the pages of one table.

    So block copies, forks and prefix hits of the model also hold for the drafter. The pages of other tables have the
    same size, and leave this room unused.

    Attributes:
        table: a table of a group that keeps the blocks of all tokens of a request.
    """

    specs: tuple[KvSpec, ...]
    kv: KvFormat
    table: int

    def page_bytes(self, block_size: int) -> int:
        """The bytes by which a page grows."""
        return block_size * self.bytes_per_token()

    def bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token(self.kv) for spec in self.specs)


def full_table(groups: Sequence[KvGroup]) -> int | None:
    """The first block table of a group that keeps the blocks of all tokens; None: every group forgets some blocks."""
    tables = (group for group in groups for _ in range(group.num_tables))
    return next((table for table, group in enumerate(tables) if group.keeps_all), None)


def pages_for(groups: Sequence[KvGroup], num_tokens: int, block_size: int, step_tokens: int) -> int:
    """The most pages that one request of `num_tokens` tokens holds.

    Args:
        step_tokens: the most of its tokens in all steps in flight. While it decodes, each step has one token.
    """
    return sum(group.num_tables * group.most_blocks(num_tokens, block_size, step_tokens) for group in groups)


def longest_request(groups: Sequence[KvGroup], num_pages: int, block_size: int, step_tokens: int) -> int:
    """The number of tokens of the longest request that fits into `num_pages` pages."""

    def needed(num_blocks: int) -> int:
        return pages_for(groups, num_blocks * block_size, block_size, step_tokens)

    return max(bisect_right(range(_MOST_TOKENS // block_size + 1), num_pages, key=needed) - 1, 0) * block_size


def pages_alone(groups: Sequence[KvGroup], num_tokens: int, block_size: int, step_tokens: int) -> list[int]:
    """Block ids, in the form of NewRow, for a request that has the first `pages_for` pages for itself.

    A group that does not keep all blocks uses its pages again and again, in turn.
    """
    ids: list[int] = []
    num_blocks = -(-num_tokens // block_size)
    first = 0
    columns = []
    for group in groups:
        count = group.most_blocks(num_tokens, block_size, step_tokens)
        for _ in range(group.num_tables):
            columns.append([first + block % count for block in range(num_blocks)])
            first += count
    for row in zip(*columns, strict=True):
        ids += row
    return ids
