"""One step on the device: rows -> forward pass -> logits -> sampled tokens and logprobs.

Dimensions: T tokens, S rows, R rows that sample, X prompt positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.models.registry import CausalLM
from quire.sampling.logprobs import most_likely
from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch, StepResult, TokenLogprobs
from quire.worker.input_batch import InputBatch, StepRows
from quire.worker.kv_cache import copy_blocks

# Prompt positions turned into logits at once: bounds the [X, V] float32 scratch (64 x 152k x 4 bytes = 39 MB).
PROMPT_LOGPROBS_CHUNK = 64


class ModelRunner:
    """Executes ScheduledBatch after ScheduledBatch; the rows it holds are its only state."""

    def __init__(self, model: CausalLM, caches: list[LayerCache], input_batch: InputBatch, logprobs_mode: str) -> None:
        self.model = model
        self.caches = caches
        self.input_batch = input_batch
        self.sampler = Sampler(input_batch.sampling, logprobs_mode=logprobs_mode)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step. A row that fails is reported in `errors`; the others are not affected."""
        started = time.perf_counter()
        inputs = self.input_batch
        inputs.apply(batch)
        copy_blocks(self.caches, batch.block_copies)
        result = StepResult(batch.step_id, [[] for _ in batch.request_ids])
        step = inputs.step_rows(batch)
        forward_batch = inputs.forward_batch(step, self.caches)
        prepared = time.perf_counter()
        hidden_TD = self.model.forward(forward_batch)
        sampling = np.flatnonzero(step.samples_S)
        logits_RV: Tensor | None = None
        if len(sampling):
            everything = len(sampling) == forward_batch.num_tokens
            hidden_RD = hidden_TD if everything else hidden_TD[forward_batch.logits_indices_R]
            logits_RV = self.model.compute_logits(hidden_RD)
        forwarded = time.perf_counter()
        if logits_RV is not None:
            self._sample(logits_RV, step, sampling, result)
        if inputs.num_prompt_logprobs:
            self._prompt_logprobs(hidden_TD, forward_batch.cu_seqlens_q_S1.tolist(), step, result)
        result.prepare_seconds = prepared - started
        result.forward_seconds = forwarded - prepared
        result.sample_seconds = time.perf_counter() - forwarded
        return result

    @torch.inference_mode()
    def sequence_logits(self, token_ids: list[int], step_tokens: int) -> Iterator[Tensor]:
        """logits_XV of every position of one sequence, in order, a chunk of positions at a time.

        Takes the first blocks of the KV cache, whoever holds them: not beside requests.

        Args:
            step_tokens: most tokens of one forward pass.
        """
        inputs = self.input_batch
        block_ids = list(range(-(-len(token_ids) // inputs.block_size)))
        row = NewRow("sequence", token_ids, len(token_ids), SamplingParams(temperature=0.0, max_tokens=1), block_ids)
        try:
            for start in range(0, len(token_ids), step_tokens):
                length = min(step_tokens, len(token_ids) - start)
                new_rows = [row] if start == 0 else []
                batch = ScheduledBatch(0, [row.request_id], [start], [length], [[]], new_rows)
                inputs.apply(batch)
                hidden_TD = self.model.forward(inputs.forward_batch(inputs.step_rows(batch), self.caches))
                for hidden_XD in torch.split(hidden_TD, PROMPT_LOGPROBS_CHUNK):
                    yield self.model.compute_logits(hidden_XD)
        finally:
            inputs.apply(ScheduledBatch(0, removed_request_ids=[row.request_id]))

    def _sample(self, logits_RV: Tensor, step: StepRows, sampling: np.ndarray, result: StepResult) -> None:
        rows = step.rows_S[sampling].tolist()
        sampled = self.sampler(logits_RV, rows)
        for index, (position, row) in enumerate(zip(sampling.tolist(), rows, strict=True)):
            if index in sampled.errors:
                result.errors[position] = sampled.errors[index]
                continue
            token_id = sampled.token_ids[index]
            result.token_ids[position].append(token_id)
            self.input_batch.append_token(row, token_id)
        for index, logprobs in sampled.logprobs.items():
            result.logprobs[int(sampling[index])] = [logprobs]

    def _prompt_logprobs(self, hidden_TD: Tensor, cu_seqlens: list[int], step: StepRows, result: StepResult) -> None:
        """Logprobs of the prompt tokens that follow the positions computed in this step."""
        inputs = self.input_batch
        for position, row in enumerate(step.rows_S.tolist()):
            num_top = inputs.num_prompt_logprobs.get(row)
            if num_top is None:
                continue
            start = int(step.starts_S[position])
            stop = min(start + int(step.lens_S[position]), int(inputs.num_prompt_tokens[row]) - 1)
            entries: list[TokenLogprobs] = []
            for begin in range(start, stop, PROMPT_LOGPROBS_CHUNK):
                end = min(begin + PROMPT_LOGPROBS_CHUNK, stop)
                offset = cu_seqlens[position] - start
                logits_XV = self.model.compute_logits(hidden_TD[offset + begin : offset + end])
                next_token_ids = torch.from_numpy(inputs.token_ids[row, begin + 1 : end + 1])
                entries += most_likely(logits_XV, next_token_ids, num_top)
            if entries:
                result.prompt_logprobs[position] = entries
