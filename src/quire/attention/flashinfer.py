"""Attention by the kernels of FlashInfer, if it is installed (0.6.14: docs.flashinfer.ai/api/attention.html).

Its `plan` runs on the host and distributes a step's work over the GPU by the lengths of the rows. Every layer calls
`run`. Each captured decode step has its own wrapper; the wrapper copies its plan to the memory that the graph reads.

Dimensions: T tokens, S rows, H query heads, G kv heads, E head dim, P block size, I blocks of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.errors import ConfigError
from quire.forward_batch import ForwardBatch, HostStep, LayerCache
from quire.kernels import gpu
from quire.planning.flashinfer_facts import why_not_flashinfer

_LAYOUT = "HND"  # the order in a block: heads, tokens, dimensions
_WORKSPACE_BYTES, _PLAN_BYTES = 128 << 20, 8 << 20  # FlashInfer recommends the first and takes the second for a plan
_TILE_ROWS = 128  # the largest tile of its prefill kernel: queries times heads of a group
# With this number of query heads per KV head or more its tensor-core kernel decodes faster ("large group size").
_TENSOR_CORE_GROUP = 4

_cuda: Any = torch.cuda  # without types in some versions of torch


@contextmanager
def _installation() -> Iterator[None]:
    """Wrap code that loads FlashInfer or builds its kernels: every error except full memory becomes a ConfigError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the import system, its loader of libraries or the compiler that it calls may raise
        raise ConfigError(
            f"FlashInfer cannot be loaded or cannot build its kernels: {error}",
            fix="Use --attention-backend TRITON_ATTN, which are Quire's own kernels, or repair its installation",
            param="attention_backend",
        ) from error


@dataclass
class _Wrapper:
    """One of FlashInfer's wrappers. It writes its plan into its own pinned memory, and the GPU reads it later."""

    flashinfer: Any
    copied: Any = None  # the event after the copies of the last plan
    is_built: bool = False

    def plan(self, device: torch.device, *arguments: Any, **settings: Any) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        with nullcontext() if self.is_built else _installation():
            self.flashinfer.plan(*arguments, **settings)
        self.is_built = True
        if device.type == "cuda":
            self.copied = _cuda.Event()
            self.copied.record()


@dataclass(frozen=True)
class _Pages:
    """The KV cache of a step's rows as FlashInfer's page table: int32, `indices` on the device, the others pinned."""

    indptr_S1: Tensor
    indices_I: Tensor
    last_page_lens_S: Tensor
    seq_lens_S: Tensor


class FlashInferAttention:
    """Uses FlashInfer's decode wrapper if each row computes one token, else its prefill wrapper.

    Raises:
        ConfigError: FlashInfer cannot be loaded, or it cannot build its kernels.
    """

    name = "FLASHINFER"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        with _installation():
            self._module = import_module("flashinfer")
        self._has_tensor_cores = spec.num_q_heads // spec.num_kv_heads >= _TENSOR_CORE_GROUP
        self._prefill: _Wrapper | None = None
        self._decode: _Wrapper | None = None
        self._captured: dict[int, _Wrapper] = {}  # the key is the padded number of rows
        self._captured_indices: Tensor | None = None
        self._captured_plan: Tensor | None = None
        self._captured_workspace: Tensor | None = None
        self._planned: Any = None

    @staticmethod
    def unsupported(spec: AttentionSpec, device: torch.device) -> str | None:
        """See AttentionBackend. resolve.py also asks `why_not_flashinfer`, before a layer exists."""
        if not gpu.serves(device):
            return f"it runs on CUDA, not on {device.type}"
        dtype, cache_dtype = (str(each).removeprefix("torch.") for each in (spec.dtype, spec.cache_dtype or spec.dtype))
        features = {"chunks": spec.chunk > 0, "sinks": spec.has_sinks, "latent rows": spec.value_dim is not None}
        others = [name for name, has in features.items() if has]
        return why_not_flashinfer([spec.head_dim], dtype, cache_dtype, gpu.is_deterministic(), others)

    def prepare(self, step: HostStep, cache: LayerCache) -> None:
        """Plan the step: see AttentionBackend. Raises ConfigError if the first plan cannot build the kernels."""
        device = cache.k_BGPE.device
        pages = _pages(step, cache.table, cache.k_BGPE.shape[2], self._spec.sliding_window, device)
        is_decode = bool((step.query_lens_S <= 1).all())
        if step.padded_rows is not None:
            wrapper = self._captured_wrapper(step, device)
        elif is_decode:
            wrapper = self._decode = self._decode or self._new(self._module.BatchDecodeWithPagedKVCacheWrapper, device)
        else:
            wrapper = self._prefill = self._prefill or self._new(
                self._module.BatchPrefillWithPagedKVCacheWrapper, device
            )
        spec = self._spec
        sizes = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, cache.k_BGPE.shape[2])
        settings: dict[str, Any] = {
            "window_left": spec.sliding_window - 1,  # a token sees this number of keys before it; -1: all
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": cache.k_BGPE.dtype,
            "seq_lens": pages.seq_lens_S,
        }
        tables = (pages.indptr_S1, pages.indices_I, pages.last_page_lens_S)
        if is_decode:
            wrapper.plan(device, *tables, *sizes, **settings)
        else:
            query_indptr_S1 = _pinned(_sums(step.query_lens_S), device)
            wrapper.plan(device, query_indptr_S1, *tables, *sizes, causal=True, **settings)
        self._planned = wrapper.flashinfer

    def _new(self, wrapper: Any, device: torch.device) -> _Wrapper:
        settings = {} if "Prefill" in wrapper.__name__ else {"use_tensor_cores": self._has_tensor_cores}
        return _Wrapper(wrapper(self._workspace(device), _LAYOUT, **settings))

    def _workspace(self, device: torch.device, padded_rows: int = 0) -> Tensor:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        return _workspace(device, max(_WORKSPACE_BYTES, split_bytes(self._spec, num_sms, padded_rows)))

    def _captured_wrapper(self, step: HostStep, device: torch.device) -> _Wrapper:
        """The wrapper of one CUDA graph. Its tensors never move. Graphs run one after the other, so they share scratch
        memory.
        """
        size = step.padded_rows
        assert size is not None
        if size not in self._captured:
            num_indices = size * step.block_tables_NCM.shape[2]
            if self._captured_indices is None or self._captured_plan is None or self._captured_workspace is None:
                self._captured_workspace = self._workspace(device, size)
                self._captured_indices = torch.empty(num_indices, dtype=torch.int32, device=device)
                self._captured_plan = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
            assert num_indices <= len(self._captured_indices), "the largest size is captured first"
            wrapper = self._module.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
                self._captured_workspace,
                torch.empty(size + 1, dtype=torch.int32, device=device),
                self._captured_indices[:num_indices],
                torch.empty(size, dtype=torch.int32, device=device),
                _LAYOUT,
                self._has_tensor_cores,
            )
            wrapper.reset_workspace_buffer(self._captured_workspace, self._captured_plan)
            self._captured[size] = _Wrapper(wrapper)
        return self._captured[size]

    def forward(self, q_THE: Tensor, cache: LayerCache, batch: ForwardBatch, sinks_H: Tensor | None = None) -> Tensor:
        assert self._planned is not None, "a step that was not prepared"
        out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
        self._planned.run(q_THE, (cache.k_BGPE, cache.v_BGPE), out=out_THE)
        return out_THE


def split_bytes(spec: AttentionSpec, num_sms: int, padded_rows: int = 0) -> int:
    """Bytes that FlashInfer's prefill kernel, which also decodes on tensor cores, needs for split sequences.

    FlashInfer's planner (PrefillPlan in attention/scheduler.cuh of 0.6.14) refuses a step with less. It reserves a
    float32 output and a float32 sum for every row of every tile. There are two tiles for each multiprocessor, or more
    if the captured rows need more.

    Args:
        num_sms: the multiprocessors of the GPU.
        padded_rows: the number of rows of the captured step; 0: the step is not captured.
    """
    group = spec.num_q_heads // spec.num_kv_heads
    rows_of_a_token = 16 if group <= 16 else 64  # the rows of a tile that holds one token
    num_rows = max(_TILE_ROWS * (2 * num_sms // spec.num_kv_heads), padded_rows * (group + rows_of_a_token))
    return 4 * spec.num_q_heads * (spec.head_dim + 1) * num_rows + (1 << 10)  # the last KiB is for alignment


@cache
def _workspace(device: torch.device, num_bytes: int) -> Tensor:
    """Scratch memory that all wrappers share: the device runs one kernel after the other."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _sums(counts_S: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts_S)))


def _pinned(values: NDArray[np.int64], device: torch.device) -> Tensor:
    """The values as int32 in pinned memory: `plan` reads them on the host, and a copy to the device does not wait."""
    tensor = torch.from_numpy(values.astype(np.int32))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def _pages(step: HostStep, table: int, block_size: int, window: int, device: torch.device) -> _Pages:
    """The page table of a step. A row of padding has one token in block 0, because a page holds at least one token.

    Blocks before a window are left out, as if the sequence began after them: the table may have no such blocks.
    """
    padding = 0 if step.padded_rows is None else step.padded_rows - len(step.rows_S)
    firsts_S = (step.seq_lens_S - step.query_lens_S - window + 1).clip(min=0) // block_size if window else 0
    seq_lens_S = np.concatenate((step.seq_lens_S - firsts_S * block_size, np.ones(padding, np.int64)))
    counts_S = -(-seq_lens_S // block_size)
    indptr_S1 = _sums(counts_S)
    real = counts_S[: len(step.rows_S)]
    columns_I = np.arange(real.sum()) - np.repeat(indptr_S1[: len(real)] - firsts_S, real)
    indices_I = step.block_tables_NCM[table, np.repeat(step.rows_S, real), columns_I]
    indices_I = np.concatenate((indices_I, np.zeros(padding, np.int32)))
    return _Pages(
        _pinned(indptr_S1, device),
        gpu.place(torch.from_numpy(indices_I.astype(np.int32)), device),
        _pinned(seq_lens_S - (counts_S - 1) * block_size, device),
        _pinned(seq_lens_S, device),
    )
