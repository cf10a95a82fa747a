"""The memory of the paged KV cache: K and V of each layer, with scales where its dtype has them, and block copies.

Dimensions: B blocks, G kv heads, P block size, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.forward_batch import LayerCache
from quire.kernels import cpu, gpu
from quire.kv_format import kv_format
from quire.model_config import ModelConfig
from quire.settings import ModelSettings


def allocate(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """Uninitialised caches of `dtype`, int8 with scales. On CPU the pages, huge ones where there are some, are taken by
    the operating system when first written."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if tensor.device.type == "cpu":
            cpu.advise_huge_pages(tensor)
        return tensor

    def layer() -> LayerCache:
        scales = [empty(shape[:3], torch.float32) for _ in "kv"] if dtype == torch.int8 else []
        return LayerCache(empty(shape, dtype), empty(shape, dtype), *scales)

    return [layer() for _ in range(num_layers)]


def allocate_for(model: ModelConfig, form: ModelSettings, num_blocks: int, device: torch.device) -> list[LayerCache]:
    """The caches of a model in the form that was settled."""
    spec, *others = model.kv_specs()
    shape = (1 + len(others), num_blocks, spec.num_kv_heads, form.block_size, spec.head_dim_k)
    return allocate(*shape, cache_dtype(form), device)


def cache_dtype(form: ModelSettings) -> torch.dtype:
    """Of the elements of K and V."""
    dtype: torch.dtype = getattr(torch, kv_format(form.kv_cache_dtype, form.dtype).torch_dtype)
    return dtype


def num_bytes(caches: Sequence[LayerCache]) -> int:
    """Bytes the caches take when fully written."""
    return sum(tensor.nbytes for cache in caches for tensor in cache.tensors())


def copy_blocks(caches: Sequence[LayerCache], copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination) in every layer. Sources are read before destinations are written."""
    if not copies:
        return
    device = caches[0].k_BGPE.device
    sources, destinations = (gpu.place(torch.tensor(blocks), device) for blocks in zip(*copies, strict=True))
    for tensor in (tensor for cache in caches for tensor in cache.tensors()):
        tensor[destinations] = tensor[sources]
