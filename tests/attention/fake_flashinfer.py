"""FlashInfer 0.6.14's paged wrappers as documented, in plain torch: docs.flashinfer.ai/api/attention.html.

Layout HND, page tables as indptr, indices and length of the last page, inclusive left windows, soft caps. A use that
the documentation forbids is an AssertionError here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Paged:
    """The common part of the three wrappers. `device_of` checks a plan's inputs: all but the indices are on the
    host.
    """

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 128 << 20
        assert kv_layout == "HND"
        self.num_plans = 0
        self._tables: tuple[Tensor, Tensor, Tensor] = (torch.empty(0),) * 3

    def _plan(
        self,
        query_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
    ) -> None:
        for tensor in (query_indptr, indptr, indices, last_page_len, seq_lens):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
        batch = len(last_page_len)
        assert len(indptr) == len(query_indptr) == batch + 1
        assert indptr[0] == query_indptr[0] == 0
        assert len(indices) == indptr[-1], "indices of pages that the rows do not have"
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert torch.equal(seq_lens, (indptr.diff() - 1) * page_size + last_page_len)
        assert num_qo_heads % num_kv_heads == 0
        self.num_plans += 1
        self._query_indptr = query_indptr.clone()
        self._sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._window_left, self._soft_cap, self._scale = window_left, logits_soft_cap, sm_scale
        self._dtypes = (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        k_cache, v_cache = paged_kv_cache
        H, G, E, P = self._sizes
        assert (q.dtype, k_cache.dtype) == self._dtypes
        assert q.shape[1:] == (H, E)
        assert q.stride(2) == 1
        assert k_cache.shape[1:] == v_cache.shape[1:] == (G, P, E)
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert len(q) == self._query_indptr[-1]
        indptr, indices, last_page_len = self._tables
        for s in range(len(last_page_len)):
            pages = indices[indptr[s] : indptr[s + 1]].long()
            length = (len(pages) - 1) * P + int(last_page_len[s])
            k, v = (x[pages].transpose(1, 2).reshape(-1, G, E)[:length].float() for x in (k_cache, v_cache))
            begin, end = int(self._query_indptr[s]), int(self._query_indptr[s + 1])
            for token in range(begin, end):
                position = length - (end - token)  # causal, aligned at the end
                first = 0 if self._window_left < 0 else max(0, position - self._window_left)
                for head in range(H):
                    seen = slice(first, position + 1)
                    scores = k[seen, head // (H // G)] @ q[token, head].float() * self._scale
                    if self._soft_cap > 0:
                        scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
                    out[token, head] = (scores.softmax(0) @ v[seen, head // (H // G)]).to(out.dtype)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def plan(self, qo_indptr: Tensor, *tables: Any, causal: bool, **settings: Any) -> None:
        assert causal
        self._plan(qo_indptr, *tables, **settings)
        self._tables = tables[:3]


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool) -> None:
        super().__init__(workspace, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(self, *tables: Any, **settings: Any) -> None:
        self._plan(torch.arange(len(tables[2]) + 1, dtype=torch.int32), *tables, **settings)
        if not self.use_tensor_cores:
            assert tables[3] // tables[4] in (1, 2, 3, 4, 8), "the kernel without tensor cores has no such group"
        self._tables = tables[:3]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`run` reads only the buffers given here; a plan fills them."""

    def __init__(
        self,
        workspace: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str,
        use_tensor_cores: bool,
    ) -> None:
        super().__init__(workspace, kv_layout, use_tensor_cores=use_tensor_cores)
        assert len(indptr_buffer) == len(last_page_len_buffer) + 1
        self._buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        self.int_workspace: Tensor | None = None

    def reset_workspace_buffer(self, float_workspace: Tensor, int_workspace: Tensor) -> None:
        assert int_workspace.numel() == 8 << 20
        self.int_workspace = int_workspace

    def plan(self, *tables: Any, **settings: Any) -> None:
        super().plan(*tables, **settings)
        assert len(tables[2]) == len(self._buffers[2]), "the batch size of a graph is fixed"
        for buffer, table in zip(self._buffers, tables, strict=False):
            buffer[: len(table)].copy_(table)
        self._tables = self._buffers
