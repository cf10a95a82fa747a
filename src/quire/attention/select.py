"""Which attention backend serves a layer: the one that the settings name (resolve.py, which also knows the
environment), or where they name none, QUIRE_ATTENTION_BACKEND or the first that supports the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire import envs
from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.cpu import CpuAttention
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.gpu import TritonAttention
from quire.attention.reference import ReferenceAttention
from quire.errors import ConfigError
from quire.forward_batch import HostStep, LayerCache

# Best first. The last one supports everything. FlashInfer has to be named.
_BACKENDS: tuple[type[CpuAttention] | type[TritonAttention] | type[ReferenceAttention], ...] = (
    TritonAttention,
    CpuAttention,
    ReferenceAttention,
)
_NAMED = (*_BACKENDS, FlashInferAttention)
_VLLM_NAMES = {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton", "CPU_ATTN": "cpu"}


def select_backend(spec: AttentionSpec, device: torch.device, name: str | None = None) -> AttentionBackend:
    """A backend for layers of this spec.

    Args:
        name: the backend to use, also by vLLM's name; None or auto reads QUIRE_ATTENTION_BACKEND, and empty means the
            first that supports the spec.

    Raises:
        ConfigError: the named backend does not exist or cannot serve the spec, with its reason.
    """
    name = envs.ATTENTION_BACKEND.get() if name in (None, "auto") else name
    assert name is not None
    name = _VLLM_NAMES.get(name, name)
    names = [backend.name for backend in _NAMED]
    if name and name not in names:
        raise ConfigError(
            "Unknown attention backend",
            value=name,
            expected="one of " + ", ".join(names),
            param=envs.ATTENTION_BACKEND.name,
        )
    for backend in _NAMED if name else _BACKENDS:
        if name and backend.name != name:
            continue
        reason = backend.unsupported(spec, device)
        if reason is None:
            return backend(spec)
        if name:
            raise ConfigError(
                f"The attention backend {name} cannot be used: {reason}",
                fix=f"Unset {envs.ATTENTION_BACKEND.name} and leave --attention-backend out to use the best one",
                param=envs.ATTENTION_BACKEND.name,
            )
    raise AssertionError("the reference backend supports every spec")


class SharedBackends:
    """The backends of one model.

    Layers with the same spec and block table share an instance, and with it what prepare() does.

    Args:
        tables: by layer, the number of its block table.
        cache_dtype: of the KV cache; None: each layer's own.
    """

    def __init__(
        self,
        tables: Sequence[int],
        device: torch.device,
        name: str | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self._tables, self._device, self._name, self._cache_dtype = tables, device, name, cache_dtype
        self._backends: dict[tuple[AttentionSpec, int], tuple[int, AttentionBackend]] = {}  # and one of their layers

    def get(self, layer: int, spec: AttentionSpec) -> AttentionBackend:
        """That of a layer with this spec."""
        spec = replace(spec, cache_dtype=self._cache_dtype)
        key = spec, self._tables[layer]
        if key not in self._backends:
            self._backends[key] = layer, select_backend(spec, self._device, self._name)
        return self._backends[key][1]

    def prepare(self, step: HostStep, caches: Sequence[LayerCache]) -> None:
        """Once per step on a GPU, before the first layer. `caches`: by layer."""
        for layer, backend in self._backends.values():
            backend.prepare(step, caches[layer])
