"""Every attention backend against a dense softmax written here, on mixed batches over a scattered paged cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.select import SharedBackends, select_backend
from quire.errors import ConfigError
from quire.forward_batch import ForwardBatch, LayerCache, StepTable
from quire.kernels import cpu

CPU = torch.device("cpu")
# (query length, sequence length): a decode, a whole prompt, a chunk in the middle, one token of one
ROWS = [(1, 23), (9, 9), (7, 31), (1, 1)]
SPECS = {
    "plain": AttentionSpec(6, 6, 16, 0.25, 0, 0.0, torch.float32),
    "grouped": AttentionSpec(6, 2, 24, 0.2, 0, 0.0, torch.float32),
    "one-kv-head": AttentionSpec(5, 1, 8, 0.3, 0, 0.0, torch.float32),
    "window": AttentionSpec(6, 2, 16, 0.25, 5, 0.0, torch.float32),
    "window-1": AttentionSpec(4, 2, 16, 0.25, 1, 0.0, torch.float32),
    "soft-cap": AttentionSpec(4, 2, 16, 1.0, 0, 3.0, torch.float32),
    "window-soft-cap-bf16": AttentionSpec(4, 2, 32, 0.2, 6, 5.0, torch.bfloat16),
    "fp16": AttentionSpec(4, 4, 64, 0.125, 0, 0.0, torch.float16),
    "chunk": AttentionSpec(6, 2, 16, 0.25, 0, 0.0, torch.float32, chunk=6),
}
# The output is a mean of values of size 1: rounded once to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def dense_attention(q_QHE: Tensor, k_LGE: Tensor, v_LGE: Tensor, spec: AttentionSpec) -> Tensor:
    """Head by head, token by token."""
    num_queries, seq_len = len(q_QHE), len(k_LGE)
    out = torch.zeros(q_QHE.shape, dtype=torch.float64)
    for i in range(num_queries):
        position = seq_len - num_queries + i
        first = max(0, position + 1 - spec.sliding_window) if spec.sliding_window else 0
        first = position // spec.chunk * spec.chunk if spec.chunk else first
        for head in range(spec.num_q_heads):
            kv_head = head // (spec.num_q_heads // spec.num_kv_heads)
            keys = k_LGE[first : position + 1, kv_head].double()
            scores = keys @ q_QHE[i, head].double() * spec.scale
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            out[i, head] = torch.softmax(scores, dim=0) @ v_LGE[first : position + 1, kv_head].double()
    return out


def make_batch(
    spec: AttentionSpec, block_size: int, rows: list[tuple[int, int]]
) -> tuple[ForwardBatch, list[Tensor], list[Tensor], Tensor]:
    """A batch with random K and V in scattered blocks of the cache, NaN elsewhere; K and V by sequence; queries."""
    generator = torch.Generator().manual_seed(17)
    max_blocks = max(-(-seq_len // block_size) for _, seq_len in rows)
    num_blocks = len(rows) * max_blocks + 1
    tables = torch.randperm(num_blocks, generator=generator)[: len(rows) * max_blocks].view(len(rows), max_blocks)
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    cache = LayerCache(*(torch.full(shape, torch.nan, dtype=spec.dtype) for _ in range(2)))
    keys, values = [], []
    for row, (_, seq_len) in enumerate(rows):
        k, v = (
            torch.randn(seq_len, spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype) for _ in range(2)
        )
        positions = torch.arange(seq_len)
        blocks, offsets = tables[row][positions // block_size], positions % block_size
        cache.k_BGPE[blocks, :, offsets], cache.v_BGPE[blocks, :, offsets] = k, v
        keys.append(k)
        values.append(v)
    query_lens = torch.tensor([query_len for query_len, _ in rows])
    num_tokens = int(query_lens.sum())
    queries = torch.randn(num_tokens, spec.num_q_heads, spec.head_dim, generator=generator).to(spec.dtype)
    unused = torch.zeros(num_tokens, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids_T=unused,
        positions_T=unused,
        cu_seqlens_q_S1=torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int(),
        seq_lens_S=torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32),
        tables=(StepTable(unused, tables.int()),),
        caches=[cache],
    )
    return batch, keys, values, queries


def run(backend: AttentionBackend, batch: ForwardBatch, queries: Tensor) -> Tensor:
    return backend.forward(queries, batch.caches[0], batch)


@pytest.fixture(params=["reference", "CPU_ATTN"])
def backend_name(request: pytest.FixtureRequest) -> str:
    if request.param == "CPU_ATTN" and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    return request.param


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("name", SPECS)
def test_equals_a_dense_softmax(name, block_size, backend_name):
    spec = SPECS[name]
    batch, keys, values, queries = make_batch(spec, block_size, ROWS)
    out = run(select_backend(spec, CPU, backend_name), batch, queries)
    assert out.shape == queries.shape
    assert out.dtype == spec.dtype
    assert out.is_contiguous()
    pieces = out.split([query_len for query_len, _ in ROWS])
    inputs = queries.split([query_len for query_len, _ in ROWS])
    for row, (q, k, v, piece) in enumerate(zip(inputs, keys, values, pieces, strict=True)):
        want = dense_attention(q, k, v, spec)
        error = (piece.double() - want).abs().max().item()
        assert error <= TOLERANCES[spec.dtype], f"row {row} {ROWS[row]} is off by {error}"


def test_queries_may_be_views_of_a_fused_tensor(backend_name):
    spec = SPECS["grouped"]
    batch, _, _, queries = make_batch(spec, 8, ROWS)
    fused = torch.randn(len(queries), spec.num_q_heads + 2 * spec.num_kv_heads, spec.head_dim)
    fused[:, : spec.num_q_heads] = queries
    backend = select_backend(spec, CPU, backend_name)
    assert torch.equal(run(backend, batch, fused[:, : spec.num_q_heads]), run(backend, batch, queries))


def test_rows_do_not_depend_on_their_mates(backend_name):
    spec = SPECS["window"]
    batch, _, _, queries = make_batch(spec, 8, ROWS)
    backend = select_backend(spec, CPU, backend_name)
    together = run(backend, batch, queries)
    start, unused_T = 0, batch.tables[0].slot_mapping_T
    for row, (query_len, seq_len) in enumerate(ROWS):
        alone = ForwardBatch(
            token_ids_T=batch.token_ids_T[:query_len],
            positions_T=batch.positions_T[:query_len],
            cu_seqlens_q_S1=torch.tensor([0, query_len], dtype=torch.int32),
            seq_lens_S=torch.tensor([seq_len], dtype=torch.int32),
            tables=(StepTable(unused_T[:query_len], batch.tables[0].block_tables_SM[row : row + 1]),),
            caches=batch.caches,
        )
        piece = slice(start, start + query_len)
        assert torch.equal(run(backend, alone, queries[piece]), together[piece]), (
            f"row {row} changes with its batch mates"
        )
        start += query_len


@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_op_takes_the_kernels_where_they_are_built(has_kernels, monkeypatch):
    """The choice of the backend is no second choice of the kernel."""
    if has_kernels and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    monkeypatch.setattr(cpu, "_available", has_kernels)
    calls = []
    real = cpu.paged_attention
    monkeypatch.setattr(
        cpu, "paged_attention", lambda *arguments, **more: (calls.append(1), real(*arguments, **more))[1]
    )
    batch, _, _, queries = make_batch(SPECS["plain"], 8, ROWS)
    want = run(select_backend(SPECS["plain"], CPU, "reference"), batch, queries)
    torch.testing.assert_close(run(select_backend(SPECS["plain"], CPU), batch, queries), want)
    assert len(calls) == has_kernels


def test_named_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "_available", False)
    with pytest.raises(
        ConfigError,
        match=r"CPU_ATTN cannot be used: the compiled kernels are not in use.*unset QUIRE_ATTENTION_BACKEND",
    ):
        select_backend(SPECS["plain"], CPU, "CPU_ATTN")
    monkeypatch.setattr(cpu, "_available", True)
    with pytest.raises(ConfigError, match="it runs on CPU, not on cuda"):
        select_backend(SPECS["plain"], torch.device("cuda"), "CPU_ATTN")


def test_heads_too_wide_for_the_kernel_run_on_the_reference(monkeypatch):
    monkeypatch.setattr(cpu, "_available", True)
    wide = dataclasses.replace(SPECS["plain"], head_dim=cpu.MAX_HEAD_DIM + 8)
    batch, _, _, queries = make_batch(wide, 8, ROWS)
    want = run(select_backend(wide, CPU, "reference"), batch, queries)
    assert torch.equal(run(select_backend(wide, CPU), batch, queries), want)
    with pytest.raises(ConfigError, match=f"up to {cpu.MAX_HEAD_DIM} dimensions, not {cpu.MAX_HEAD_DIM + 8}"):
        select_backend(wide, CPU, "CPU_ATTN")


def test_layers_of_one_spec_and_one_block_table_share_a_backend():
    backends = SharedBackends([0, 0, 1], CPU)
    assert backends.get(0, SPECS["plain"]) is backends.get(1, SPECS["plain"])
    assert backends.get(0, SPECS["plain"]) is not backends.get(1, SPECS["window"])
    assert backends.get(0, SPECS["plain"]) is not backends.get(2, SPECS["plain"])
