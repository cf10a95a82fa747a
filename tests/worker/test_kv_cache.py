"""The arena of the KV cache: pages are whole blocks, and every byte belongs to one layer."""

from __future__ import annotations

import pytest
import torch

from quire.formats.kv_format import KV_FORMATS
from quire.formats.kv_groups import KvGroup, page_bytes
from quire.layer_spec.kv_spec import KvSpec
from quire.worker.kv_cache import allocate

CPU = torch.device("cpu")
BLOCK_SIZE = 8


def group(num_layers: int, num_kv_heads: int = 2, head_dim: int = 16) -> KvGroup:
    spec = KvSpec(kind="full", num_kv_heads=num_kv_heads, head_dim_k=head_dim, head_dim_v=head_dim)
    return KvGroup(spec, tuple(range(num_layers)), num_layers)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_layers_share_pages_and_no_byte(name: str) -> None:
    kv = KV_FORMATS[name]
    cache = allocate([group(3)], 5, BLOCK_SIZE, getattr(torch, kv.torch_dtype), CPU)
    assert (
        cache.pages.shape
        == (5, page_bytes([group(3)], kv, BLOCK_SIZE))
        == (5, 3 * BLOCK_SIZE * 2 * 2 * kv.row_bytes(16))
    )
    assert cache.num_bytes == cache.pages.nbytes
    assert cache.pages.is_contiguous(), "a page is one piece of memory"
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors()]
    assert len(tensors) == 3 * (4 if kv.scale_bytes else 2)
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.full(tensor.shape, number))
    for number, tensor in enumerate(tensors):
        assert bool((tensor.float() == number).all())
    assert sum(tensor.nbytes for tensor in tensors) == cache.num_bytes


def test_copies_read_before_they_write() -> None:
    cache = allocate([group(2, 1, 2)], 4, BLOCK_SIZE, torch.float32, CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors()]
    for tensor in tensors:
        tensor.copy_(torch.arange(4.0).view(4, 1, 1, 1).expand_as(tensor))
    cache.copy_pages([(0, 1), (1, 2)])
    for tensor in tensors:
        assert tensor[:, 0, 0, 0].tolist() == [0.0, 0.0, 1.0, 3.0]
