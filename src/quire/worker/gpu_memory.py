"""How much of a GPU's memory a step and the CUDA graphs take, measured before the KV cache gets the rest.

Everything runs on a cache of one block: where keys and values lie does not change what a step takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from quire.kv_groups import kv_groups, num_tables
from quire.model_config import ModelConfig
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.settings import Resolved
from quire.worker.accelerator import Accelerator
from quire.worker.cuda_graphs import StepGraphs, paddings
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
RANDOM = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=1, seed=0)
# Triton compiles a kernel for counts of 1, of multiples of 16, and of others: while serving it would hold up everybody.
_ROWS_OF_VARIANTS = (1, 2, 16)
_LENGTHS_OF_VARIANTS = (1, 2)  # attention has a form for single tokens


@dataclass(frozen=True)
class GpuWork:
    """What is needed beside weights and KV cache, in bytes, and the tokens and seconds of the largest step."""

    step_bytes: int
    graph_bytes: int
    largest_step: tuple[int, float]


def make_inputs(
    resolved: Resolved, model: ModelConfig, accelerator: Accelerator, steps_in_flight: int
) -> DeviceInputBatch:
    """Rows for all requests that may run, and staging for the largest step."""
    return DeviceInputBatch(
        resolved.scheduler.max_num_seqs,
        resolved.model.max_model_len,
        resolved.model.block_size,
        model.vocab_size,
        num_tables(kv_groups(model)),
        max_tokens=max(resolved.scheduler.max_num_batched_tokens, resolved.scheduler.max_num_seqs),
        accelerator=accelerator,
        steps_in_flight=steps_in_flight,
    )


def measure(model: CausalLM, cache: PagedCache, resolved: Resolved, accelerator: Accelerator) -> GpuWork:
    """Load all kernels, run the largest step, twice, and capture the two largest graphs.

    Args:
        cache: of one page.
    """
    inputs = make_inputs(resolved, model.config, accelerator, 1)
    runner = ModelRunner(model, cache, inputs, "raw_logprobs", accelerator)
    before = accelerator.release()
    tables, limits = inputs.num_tables, resolved.scheduler
    for num_rows, length in product(_ROWS_OF_VARIANTS, _LENGTHS_OF_VARIANTS):
        for params in (GREEDY, RANDOM):
            if num_rows <= limits.max_num_seqs and length * num_rows <= limits.max_num_batched_tokens:
                _run(runner, prompts(resolved, [length] * num_rows, params, tables))
    accelerator.release()  # what stays is scratch of kernels, and counts
    _run(runner, largest_batch(resolved, tables))
    step_bytes = accelerator.reserved_peak() - before
    batch = largest_batch(resolved, tables)
    started = time.perf_counter()
    _run(runner, batch)
    largest_step = batch.num_tokens, time.perf_counter() - started
    graph_bytes = _measure_graphs(model, cache, inputs, resolved, accelerator)
    return GpuWork(step_bytes, graph_bytes, largest_step)


def largest_batch(resolved: Resolved, num_tables: int) -> ScheduledBatch:
    """Prompts of all requests that may run at once, together of the whole token budget; all of them sample."""
    num_rows = min(resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens)
    num_tokens = min(resolved.scheduler.max_num_batched_tokens, num_rows * resolved.model.max_model_len)
    return prompts(resolved, [(num_tokens + row) // num_rows for row in range(num_rows)], RANDOM, num_tables)


def prompts(resolved: Resolved, lens: Sequence[int], params: SamplingParams, num_tables: int) -> ScheduledBatch:
    """New rows with prompts of these lengths, computed in one step."""
    batch = ScheduledBatch(step_id=0)
    for row, length in enumerate(lens):
        blocks = [0] * -(-length // resolved.model.block_size) * num_tables
        batch.request_ids.append(f"profile {row}")
        batch.num_computed_tokens.append(0)
        batch.num_scheduled_tokens.append(length)
        batch.new_block_ids.append([])
        batch.new_rows.append(NewRow(f"profile {row}", [0] * length, length, params, blocks))
    return batch


def _run(runner: ModelRunner, batch: ScheduledBatch) -> None:
    runner.execute(batch)
    runner.input_batch.apply(ScheduledBatch(step_id=0, removed_request_ids=batch.request_ids))


def _measure_graphs(
    model: CausalLM, cache: PagedCache, inputs: DeviceInputBatch, resolved: Resolved, accelerator: Accelerator
) -> int:
    """Bytes of all graphs: the largest one brings the scratch memory, each further one what the second one takes."""
    sizes = paddings(resolved)
    if not sizes:
        return 0
    free = []
    graphs = StepGraphs(model, cache.layers, inputs, accelerator, sizes[:2])

    def note(done: int = 0, total: int = 0) -> None:
        accelerator.release()
        free.append(accelerator.memory()[0])

    note()
    graphs.capture(note)
    differences = [before - after for before, after in pairwise(free)]
    return max(differences[0], 0) + (len(sizes) - 1) * max(differences[-1], 0)
