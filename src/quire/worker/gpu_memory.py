"""How much of a GPU's memory a step and the CUDA graphs take, measured before the KV cache gets the rest.

Everything runs on a cache of one block: where keys and values lie does not change what a step takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from quire.forward_batch import LayerCache
from quire.models.registry import CausalLM
from quire.resolve import Resolved
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.worker.accelerator import Accelerator
from quire.worker.cuda_graphs import DecodeGraphs, capture_sizes
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.device_runner import DeviceRunner


@dataclass(frozen=True)
class GpuWork:
    """What is needed beside weights and KV cache, in bytes, and the tokens and seconds of the largest step."""

    step_bytes: int
    graph_bytes: int
    largest_step: tuple[int, float]


def make_inputs(
    resolved: Resolved, vocab_size: int, accelerator: Accelerator, steps_in_flight: int
) -> DeviceInputBatch:
    """Rows for all requests that may run, and staging for the largest step."""
    return DeviceInputBatch(
        resolved.max_num_seqs,
        resolved.max_model_len,
        resolved.block_size,
        vocab_size,
        max_tokens=max(resolved.max_num_batched_tokens, resolved.max_num_seqs),
        accelerator=accelerator,
        steps_in_flight=steps_in_flight,
    )


def measure(model: CausalLM, cache: list[LayerCache], resolved: Resolved, accelerator: Accelerator) -> GpuWork:
    """Run the largest step, twice, and capture the two largest graphs. What is held in the end is given back.

    Args:
        cache: of one block.
    """
    inputs = make_inputs(resolved, model.config.vocab_size, accelerator, 1)
    runner = DeviceRunner(model, cache, inputs, "raw_logprobs", accelerator)
    before = accelerator.release()
    runner.execute(largest_batch(resolved))  # compiles kernels, so its time says nothing
    step_bytes = accelerator.reserved_peak() - before
    started = time.perf_counter()
    again = largest_batch(resolved)
    again.removed_request_ids = again.request_ids
    runner.execute(again)
    largest_step = again.num_tokens, time.perf_counter() - started
    graph_bytes = 0
    if not resolved.enforce_eager:
        graph_bytes = _measure_graphs(model, cache, inputs, resolved, accelerator)
    return GpuWork(step_bytes, graph_bytes, largest_step)


def largest_batch(resolved: Resolved) -> ScheduledBatch:
    """Prompts of all requests that may run at once, together of the whole token budget; all of them sample."""
    num_rows = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
    num_tokens = min(resolved.max_num_batched_tokens, num_rows * resolved.max_model_len)
    params = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=1, seed=0)
    batch = ScheduledBatch(step_id=0)
    for row in range(num_rows):
        length = (num_tokens + row) // num_rows
        blocks = [0] * -(-length // resolved.block_size)
        batch.request_ids.append(f"profile {row}")
        batch.num_computed_tokens.append(0)
        batch.num_scheduled_tokens.append(length)
        batch.new_block_ids.append([])
        batch.new_rows.append(NewRow(f"profile {row}", [0] * length, length, params, blocks))
    return batch


def _measure_graphs(
    model: CausalLM, cache: list[LayerCache], inputs: DeviceInputBatch, resolved: Resolved, accelerator: Accelerator
) -> int:
    """Bytes of all graphs: the largest one brings the scratch memory, each further one what the second one takes."""
    sizes = capture_sizes(resolved.max_num_seqs)
    free = []
    graphs = DecodeGraphs(model, cache, inputs, accelerator, sizes[-2:])

    def note(done: int = 0, total: int = 0) -> None:
        accelerator.release()
        free.append(accelerator.memory()[0])

    note()
    graphs.capture(note)
    differences = [before - after for before, after in pairwise(free)]
    return max(differences[0], 0) + (len(sizes) - 1) * max(differences[-1], 0)
