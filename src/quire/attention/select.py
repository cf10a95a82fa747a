"""Chooses the attention backend of a layer by its name, which resolve.py has settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.paged import CpuAttention, PagedAttention, TritonAttention
from quire.attention.reference import ReferenceAttention
from quire.errors import ConfigError
from quire.forward_batch import HostStep, LayerCache

_BACKENDS: dict[str, type[PagedAttention] | type[FlashInferAttention]] = {
    backend.name: backend
    for backend in (PagedAttention, CpuAttention, TritonAttention, FlashInferAttention, ReferenceAttention)
}


def select_backend(spec: AttentionSpec, device: torch.device, name: str = "auto") -> AttentionBackend:
    """The backend with this name, for layers with this spec.

    Raises:
        ConfigError: the backend cannot serve the spec; the message gives the reason.
    """
    backend = _BACKENDS[name]
    if (reason := backend.unsupported(spec, device)) is not None:
        raise ConfigError(
            f"The attention backend {name} cannot be used: {reason}",
            fix="Leave --attention-backend out, and unset QUIRE_ATTENTION_BACKEND, to use the best one",
            param="attention_backend",
        )
    return backend(spec)


class SharedBackends:
    """The attention backends of one model.

    Layers with the same spec and the same block table share an instance. So its `prepare` runs once for all of them.

    Args:
        tables: for each layer, the index of its block table.
        name: the name of the backend, as in `select_backend`.
        cache_dtype: the dtype of the KV cache; None: it is the dtype of the layer.
    """

    def __init__(
        self,
        tables: Sequence[int],
        device: torch.device,
        name: str = "auto",
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._tables, self._device, self._name, self._cache_dtype = tables, device, name, cache_dtype
        # Each backend is stored with one of the layers that use it.
        self._backends: dict[tuple[AttentionSpec, int], tuple[int, AttentionBackend]] = {}

    def get(self, layer: int, spec: AttentionSpec) -> AttentionBackend:
        """The backend of a layer with this spec. Raises ConfigError like `select_backend`."""
        spec = replace(spec, cache_dtype=self._cache_dtype)
        key = spec, self._tables[layer]
        if key not in self._backends:
            self._backends[key] = layer, select_backend(spec, self._device, self._name)
        return self._backends[key][1]

    def prepare(self, step: HostStep, caches: Sequence[LayerCache]) -> None:
        """Do the host's work of one step on a GPU, before the first layer. `caches`: the KV caches by layer."""
        for layer, backend in self._backends.values():
            backend.prepare(step, caches[layer])
