"""Which attention backend serves a layer: the one that the settings name (resolve.py, which also knows the
environment), or where they name none, QUIRE_ATTENTION_BACKEND or the first that supports the layer."""

from __future__ import annotations

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
    """The backends of one model: layers with the same spec share an instance, and with it what prepare() does.

    Args:
        cache_dtype: of the KV cache; None: each layer's own.
    """

    def __init__(self, device: torch.device, name: str | None = None, cache_dtype: torch.dtype | None = None) -> None:
        self._device, self._name, self._cache_dtype = device, name, cache_dtype
        self._by_spec: dict[AttentionSpec, AttentionBackend] = {}

    def get(self, spec: AttentionSpec) -> AttentionBackend:
        spec = replace(spec, cache_dtype=self._cache_dtype)
        if spec not in self._by_spec:
            self._by_spec[spec] = select_backend(spec, self._device, self._name)
        return self._by_spec[spec]

    def prepare(self, step: HostStep, cache: LayerCache) -> None:
        """Once per step on a GPU, before the first layer. `cache`: of any layer."""
        for backend in self._by_spec.values():
            backend.prepare(step, cache)
