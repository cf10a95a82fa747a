"""The memory of the paged KV cache, and copies of pages. A page holds a block of tokens of several layers.

Dimensions: B pages, G kv heads, P block size, E head dim.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from quire.distributed.group import Group, Ranks
from quire.distributed.layout import ALL_PAGES, PageShare
from quire.formats.kv_format import KV_FORMATS
from quire.formats.kv_groups import DrafterLayers, KvGroup, kv_groups, page_bytes
from quire.forward_batch import LayerCache
from quire.kernels import gpu
from quire.kernels.weight_memory import map_huge_pages
from quire.layer_spec.kv_spec import KvSpec
from quire.model_config import ModelConfig
from quire.settings import DrafterSettings, ModelSettings

COPY_BYTES = 4 << 20  # the most bytes of page copies beside the cache


@dataclass(frozen=True)
class PagedCache:
    """All memory of the KV cache.

    Attributes:
        pages: uint8 [B, bytes of a page]: the pages of this rank. A page is one piece of memory.
        layers: for each layer that keeps something, views of `pages`. In a page, the parts of a layer lie side by side:
            keys, values, and the scales of both.
        drafter_layers: the same for the layers of a drafter. They lie after the model's layers in the pages of one
            block table.
        num_owners: the number of ranks that share the cache: see PageShare.
    """

    pages: Tensor
    layers: list[LayerCache]
    drafter_layers: list[LayerCache] = field(default_factory=list)
    num_owners: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory when all of it has been written."""
        return self.pages.nbytes

    def copy_pages(self, copies: Sequence[tuple[int, int]], group: Group | None = None) -> None:
        """Copy whole pages. All sources are read before any destination is written.

        Args:
            copies: pairs of (source page, destination page).
            group: the ranks that share the cache; all of them call this method. None: this rank has all pages.

        Raises GroupError and StepVoid like `Group.gather`, if ranks share the cache.
        """
        if not copies:
            return
        if self.num_owners > 1:
            assert group is not None, "one rank has all pages"
            return self._copy_of_owners(copies, group)
        sources, destinations = (
            gpu.place(torch.tensor(pages), self.pages.device) for pages in zip(*copies, strict=True)
        )
        for piece in torch.split(self.pages, max(1, COPY_BYTES // len(copies)), dim=1):
            piece[destinations] = piece[sources]

    def _copy_of_owners(self, copies: Sequence[tuple[int, int]], group: Group) -> None:
        """Copy between ranks: every rank sends its source pages, and takes the rows for its own pages."""
        count, owner = self.num_owners, group.rank % self.num_owners
        sources = [[source // count for source, _ in copies if source % count == each] for each in range(count)]
        firsts = [0, *accumulate(len(sources[rank % count]) for rank in range(group.size))]
        places = [0] * count  # for each owner, the place of its next row
        taken: list[tuple[int, int]] = []  # pairs of a row among the rows of all ranks and a page of this rank
        for source, destination in copies:
            row = firsts[group.rank - owner + source % count] + places[source % count]
            places[source % count] += 1
            if destination % count == owner:
                taken.append((row, destination // count))
        device, own = self.pages.device, slice(*firsts[group.rank : group.rank + 2])
        begins = gpu.place(torch.tensor(firsts, dtype=torch.int32), device)
        own_sources = gpu.place(torch.tensor(sources[owner], dtype=torch.int64), device)
        taken_rows, taken_pages = gpu.place(torch.tensor(taken, dtype=torch.int64).view(-1, 2).T.contiguous(), device)
        for piece in torch.split(self.pages, max(1, COPY_BYTES // firsts[-1]), dim=1):
            rows = torch.empty((firsts[-1], piece.shape[1]), dtype=torch.uint8, device=device)
            rows[own] = piece[own_sources]
            columns = [range(piece.shape[1])] * group.size
            found = group.exchange(rows, begins, range(group.size + 1), columns)
            piece[taken_pages] = found[taken_rows]


def page_share(num_owners: int, ranks: Ranks | None) -> PageShare:
    """The part of a KV cache that this rank has, if neighbours share the cache."""
    return ALL_PAGES if ranks is None else PageShare.of(num_owners, ranks.grid.place(ranks.rank))


def allocate(
    groups: Sequence[KvGroup],
    num_pages: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    drafter: DrafterLayers | None = None,
    num_owners: int = 1,
) -> PagedCache:
    """An empty cache of `dtype`; an int8 cache has scales too. If there are several owners, each has some of the pages.

    The memory is zero, because a head that drafts may read places that were never written: see HeadDrafter. On a CPU,
    the operating system provides the memory at the first write, in huge pages if it has them.

    Raises:
        OSError, OverflowError, RuntimeError: the system refuses the memory.
    """
    kv = next(kv for kv in KV_FORMATS.values() if kv.torch_dtype == str(dtype).removeprefix("torch."))
    begin, num_own = page_bytes(groups, kv, block_size, num_owners), PageShare(num_owners).num_pages(num_pages)
    pages = _empty_pages(num_own, begin + (0 if drafter is None else drafter.page_bytes(block_size)), device)
    layers: dict[int, LayerCache] = {}
    tables = [(group, of_table) for group in groups for of_table in group.tables()]
    for table, (group, of_table) in enumerate(tables):
        layer_bytes = block_size * group.spec.bytes_per_token(kv)
        for at, layer in enumerate(of_table):
            layers[layer] = _layer_cache(pages[:, at * layer_bytes :], group.spec, block_size, dtype, table)
    cache = PagedCache(pages, [layers[layer] for layer in range(len(layers))], num_owners=num_owners)
    if drafter is not None:
        drafter_dtype: torch.dtype = getattr(torch, drafter.kv.torch_dtype)
        for spec in drafter.specs:
            cache.drafter_layers.append(_layer_cache(pages[:, begin:], spec, block_size, drafter_dtype, drafter.table))
            begin += block_size * spec.bytes_per_token(drafter.kv)
    return cache


def allocate_for(
    model: ModelConfig,
    form: ModelSettings,
    num_pages: int,
    device: torch.device,
    drafter: DrafterSettings | None = None,
) -> PagedCache:
    """The cache of a model with the settled dtype and block size, and with the layers of a drafter if there is one."""
    layers = None if drafter is None else drafter.layers(model)
    dtype: torch.dtype = getattr(torch, form.cache_dtype)
    return allocate(
        kv_groups(model), num_pages, form.block_size, dtype, device, layers, form.decode_context_parallel_size
    )


def _empty_pages(num_pages: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_pages, num_bytes], zero. On a CPU with Linux it may have more bytes than are free."""
    if device.type != "cpu" or sys.platform != "linux":
        return torch.zeros((num_pages, num_bytes), dtype=torch.uint8, device=device)
    mapped, begin = map_huge_pages(num_pages * num_bytes, is_reserved=False)
    whole = torch.frombuffer(mapped, dtype=torch.uint8, count=num_pages * num_bytes, offset=begin)  # keeps the mapping
    return whole.view(num_pages, num_bytes)


def _layer_cache(pages: Tensor, spec: KvSpec, block_size: int, dtype: torch.dtype, table: int) -> LayerCache:
    """Views of the first bytes of each page. The value of a latent row is the beginning of its key."""
    begin = 0

    def view(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal begin
        num_bytes = math.prod(shape) * dtype.itemsize
        piece = pages[:, begin : begin + num_bytes].view(dtype)
        begin += num_bytes
        return piece.view(len(pages), *shape)

    rows = (spec.num_kv_heads, block_size)
    if spec.kind == "latent":
        rows_BGPE = view(dtype, *rows, spec.head_dim_k)
        scales_BGP = view(torch.float32, *rows) if dtype == torch.int8 else None
        return LayerCache(rows_BGPE, rows_BGPE[..., : spec.head_dim_v], scales_BGP, scales_BGP, table)
    k_BGPE, v_BGPE = view(dtype, *rows, spec.head_dim_k), view(dtype, *rows, spec.head_dim_v)
    if dtype != torch.int8:
        return LayerCache(k_BGPE, v_BGPE, table=table)
    return LayerCache(k_BGPE, v_BGPE, view(torch.float32, *rows), view(torch.float32, *rows), table)
