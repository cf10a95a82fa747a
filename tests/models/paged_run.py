"""Runs a model on a paged KV cache with scattered blocks, without scheduler or worker: the test chooses each step."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from quire.forward_batch import ForwardBatch, LayerCache, StepTable
from quire.models.registry import CausalLM


class PagedRun:
    """Sequences by number; each call of `step` gives some of them some more tokens. To longrope, all are long."""

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        num_blocks: int = 64,
        block_size: int = 8,
        *,
        adapter_slot: int = -1,  # of all sequences
    ) -> None:
        config = model.config
        spec = config.kv_specs()[0]
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim_k)

        def cache() -> LayerCache:
            # NaN where nothing was written: reading a foreign slot shows at once
            k_BGPE, v_BGPE = torch.full((2, *shape), torch.nan, dtype=dtype)
            return LayerCache(k_BGPE, k_BGPE[..., : spec.head_dim_v] if spec.kind == "latent" else v_BGPE)

        self.caches = [cache() for _ in range(config.num_layers)]
        self.model, self.block_size, self.adapter_slot = model, block_size, adapter_slot
        self.rope_offset = config.rope.switches_after(config.max_model_len) or 0
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def forward(self, batch: ForwardBatch) -> Tensor:
        """hidden_TD of a step."""
        return self.model.forward(batch)

    @torch.inference_mode()
    def step(self, rows: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute the new tokens of every sequence together -> their logits [new tokens, V]."""
        token_ids, positions, slots, starts = [], [], [], [0]
        for sequence, tokens in rows.items():
            table = self.tables.setdefault(sequence, [])
            first = self.lengths.get(sequence, 0)
            self.lengths[sequence] = first + len(tokens)
            while len(table) * self.block_size < first + len(tokens):
                table.append(self.free.pop())
            for position, token in enumerate(tokens, first):
                token_ids.append(token)
                positions.append(position)
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
            starts.append(len(token_ids))
        longest = max(len(self.tables[sequence]) for sequence in rows)
        tables = [self.tables[sequence] + [0] * (longest - len(self.tables[sequence])) for sequence in rows]
        batch = ForwardBatch(
            token_ids_T=torch.tensor(token_ids),
            positions_T=torch.tensor(positions) + self.rope_offset,
            cu_seqlens_q_S1=torch.tensor(starts, dtype=torch.int32),
            seq_lens_S=torch.tensor([self.lengths[sequence] for sequence in rows], dtype=torch.int32),
            tables=(StepTable(torch.tensor(slots), torch.tensor(tables, dtype=torch.int32)),),
            caches=self.caches,
        )
        if self.adapter_slot >= 0:
            batch.adapter_slots_T = torch.full((len(token_ids),), self.adapter_slot, dtype=torch.int32)
        logits = self.model.compute_logits(self.forward(batch), batch.adapter_slots_T)
        return {sequence: logits[starts[i] : starts[i + 1]] for i, sequence in enumerate(rows)}


def greedy(
    model: CausalLM, dtype: torch.dtype, prompt: list[int], max_tokens: int, stop: int | None = None
) -> list[int]:
    """The most likely continuation, token by token, up to and including `stop`."""
    run = PagedRun(model, dtype, num_blocks=64, block_size=16)
    output: list[int] = []
    tokens = prompt
    while len(output) < max_tokens and (not output or output[-1] != stop):
        tokens = [int(run.step({0: tokens})[0][-1].argmax())]
        output += tokens
    return output
