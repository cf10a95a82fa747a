"""Measures the memory of a step and of the CUDA graphs on a GPU. The KV cache gets the rest.

All steps here run on a cache of one block: the place of keys and values does not change the memory of a step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import MappingProxyType

from quire.distributed.group import Group, Ranks
from quire.formats.kv_groups import kv_groups, num_tables
from quire.forward_batch import LayerCache
from quire.life_cycle import Measured, WorkerSettings
from quire.messages import WARM_UP, Progress
from quire.metrics.stopwatch import Lap
from quire.model_config import ModelConfig
from quire.models.registry import CausalLM
from quire.planning.memory_plan import MemoryFacts, logits_bytes
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.worker import kv_cache
from quire.worker.accelerator import Accelerator
from quire.worker.cuda_graphs import StepGraphs, paddings
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.drafters import drafter_of, streams_for
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
RANDOM = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=1, seed=0)
# Triton compiles a kernel three times: for a count of 1, for multiples of 16, and for other counts. All variants are
# compiled at the start, because compiling while serving would hold up all requests.
_ROWS_OF_VARIANTS = (1, 2, 16)
_LENGTHS_OF_VARIANTS = (1, 2)  # attention has a variant for rows of one token


@dataclass(frozen=True)
class GpuWork:
    """Memory in bytes beside weights and KV cache, and the tokens and seconds of the largest step."""

    step_bytes: int
    graph_bytes: int
    largest_step: tuple[int, float]


class OnGpu:
    """A GPU as the device of a worker: see worker.Place."""

    kv_cache_knob = "--gpu-memory-utilization"

    def __init__(self, accelerator: Accelerator, ranks: Ranks | None = None) -> None:
        self.memory_device = accelerator.device
        self._accelerator, self._ranks = accelerator, ranks

    def measure(self, model: CausalLM, drafter: CausalLM | None, settings: WorkerSettings) -> Measured:
        """Measure the memory of the largest step and of all graphs."""
        gc.collect()  # loading may have left tensors in reference cycles
        cache = kv_cache.allocate_for(model.config, settings.model, 1, self.memory_device)
        max_model_len = settings.model.max_model_len
        work = measure_work(model, cache, settings, self._accelerator, max_model_len, self._ranks)
        drafter_bytes = 0
        if drafter is not None:
            form, drafter_bytes = settings.of_drafter(), drafter.weight_bytes()
            cache = kv_cache.allocate_for(drafter.config, form.model, 1, self.memory_device)
            ranks = None if self._ranks is None else self._ranks.of_stage()
            more = measure_work(drafter, cache, form, self._accelerator, max_model_len, ranks)
            step_bytes, graph_bytes = max(work.step_bytes, more.step_bytes), work.graph_bytes + more.graph_bytes
            work = replace(work, step_bytes=step_bytes, graph_bytes=graph_bytes)
        del cache
        gc.collect()
        self._accelerator.release()
        free_bytes, total_bytes = self._accelerator.memory()
        num_tokens, seconds = work.largest_step
        logits = logits_bytes(model.config, settings.num_logits_rows, "cuda")
        # The step had fewer rows.
        further = logits_bytes(model.config, settings.num_logits_rows - settings.max_num_seqs, "cuda")
        memory = MemoryFacts(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            weight_bytes=model.weight_bytes() + drafter_bytes,
            drafter_weight_bytes=drafter_bytes,
            work_bytes=work.step_bytes + work.graph_bytes + further + settings.hidden_bytes(model.config),
            logits_bytes=logits,
            work_detail=f"{work.step_bytes:,} in a step of {num_tokens} tokens, {work.graph_bytes:,} in graphs",
        )
        return Measured(memory, num_tokens, Lap(seconds))

    def runner(
        self,
        model: CausalLM,
        drafter: CausalLM | None,
        adapters: Mapping[str, int],
        cache: PagedCache,
        settings: WorkerSettings,
        progress: Progress,
    ) -> ModelRunner:
        """Make the runner, and capture its graphs."""
        max_model_len = settings.model.max_model_len
        inputs = make_inputs(settings, model.config, self._accelerator, max_model_len, self._ranks, adapters)

        def captured(model: CausalLM, caches: list[LayerCache], settings: WorkerSettings) -> StepGraphs | None:
            if not (sizes := paddings(settings)):
                return None
            graphs = StepGraphs(model, caches, inputs, self._accelerator, sizes, _group_of(self._ranks))
            graphs.capture(lambda done, total: progress(WARM_UP, (1 + done / total) / 3, f"graph {done} of {total}"))
            return graphs

        streams = streams_for(model, drafter, settings)
        graphs, drafts = captured(model, cache.layers, settings), None
        if drafter is not None:
            own = captured(drafter, cache.drafter_layers, settings.of_drafter())
            group = _group_of(self._ranks)
            drafts = drafter_of(drafter, streams, cache, inputs, self._accelerator, own, settings, group)
        mode = settings.model.logprobs_mode
        device, ranks = self._accelerator, self._ranks
        return ModelRunner(model, cache, inputs, mode, device, graphs, drafts, ranks=ranks, streams=streams)


def _group_of(ranks: Ranks | None) -> Group | None:
    return None if ranks is None else ranks.group


def make_inputs(
    settings: WorkerSettings,
    model: ModelConfig,
    accelerator: Accelerator,
    max_model_len: int,
    ranks: Ranks | None = None,
    adapters: Mapping[str, int] = MappingProxyType({}),
) -> DeviceInputBatch:
    """An InputBatch with rows for all requests that may run, and staging memory for the largest step."""
    return DeviceInputBatch(
        settings.max_num_seqs,
        max_model_len,
        settings.model.block_size,
        model.vocab_size,
        num_tables(kv_groups(model)),
        adapters,
        max_tokens=settings.most_tokens,
        accelerator=accelerator,
        steps_in_flight=settings.steps_in_flight,
        pages=kv_cache.page_share(settings.model.decode_context_parallel_size, ranks),
        has_grammars=ranks is None or ranks.samples,
    )


def measure_work(
    model: CausalLM,
    cache: PagedCache,
    settings: WorkerSettings,
    accelerator: Accelerator,
    max_model_len: int,
    ranks: Ranks | None = None,
) -> GpuWork:
    """Load all kernels, run the largest step twice, and capture the two largest graphs.

    Args:
        cache: a cache of one page.
        max_model_len: the target's, also for a drafter: kernels are compiled for the width of the block tables.
    """
    before = accelerator.release()
    inputs = make_inputs(replace(settings, steps_in_flight=1), model.config, accelerator, max_model_len, ranks)
    runner, tables = ModelRunner(model, cache, inputs, "raw_logprobs", accelerator, ranks=ranks), inputs.num_tables
    for num_rows, length in product(_ROWS_OF_VARIANTS, _LENGTHS_OF_VARIANTS):
        for params in (GREEDY, RANDOM):
            if num_rows <= settings.max_num_seqs and length * num_rows <= settings.max_num_batched_tokens:
                _run(runner, prompts(settings, [length] * num_rows, params, tables))
    accelerator.release()  # only the scratch memory of kernels stays, and it counts
    _run(runner, largest_batch(settings, tables))
    step_bytes = accelerator.reserved_peak() - before
    batch = largest_batch(settings, tables)
    started = time.perf_counter()
    _run(runner, batch)
    largest_step = batch.num_tokens, time.perf_counter() - started
    graph_bytes = _measure_graphs(model, cache, inputs, settings, accelerator)
    return GpuWork(step_bytes, graph_bytes, largest_step)


def largest_batch(settings: WorkerSettings, num_tables: int) -> ScheduledBatch:
    """A batch of prompts: one for each request that may run at once, together the whole token budget. All sample."""
    num_rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    num_tokens = min(settings.max_num_batched_tokens, num_rows * settings.model.max_model_len)
    return prompts(settings, [(num_tokens + row) // num_rows for row in range(num_rows)], RANDOM, num_tables)


def prompts(settings: WorkerSettings, lens: Sequence[int], params: SamplingParams, num_tables: int) -> ScheduledBatch:
    """A batch of new rows with prompts of these lengths. All their tokens are computed in one step."""
    batch = ScheduledBatch(step_id=0)
    for row, length in enumerate(lens):
        blocks = [0] * -(-length // settings.model.block_size) * num_tables
        batch.request_ids.append(f"profile {row}")
        batch.num_computed_tokens.append(0)
        batch.num_scheduled_tokens.append(length)
        batch.num_logits.append(1)
        batch.new_block_ids.append([])
        batch.new_rows.append(NewRow(f"profile {row}", [0] * length, length, params, blocks))
    return batch


def _run(runner: ModelRunner, batch: ScheduledBatch) -> None:
    runner.execute(batch)
    runner.input_batch.apply(ScheduledBatch(step_id=0, removed_request_ids=batch.request_ids))


def _measure_graphs(
    model: CausalLM,
    cache: PagedCache,
    inputs: DeviceInputBatch,
    settings: WorkerSettings,
    accelerator: Accelerator,
) -> int:
    """Estimate the bytes of all graphs. The first one, the largest, includes the scratch memory that all share.

    Each further graph is taken to need as much as the second.
    """
    sizes = paddings(settings)
    if not sizes:
        return 0
    free = []
    alike = [size for size in sizes if size.has_adapters == sizes[0].has_adapters][:2]
    graphs = StepGraphs(model, cache.layers, inputs, accelerator, alike)

    def note(done: int = 0, total: int = 0) -> None:
        accelerator.release()
        free.append(accelerator.memory()[0])

    note()
    graphs.capture(note)
    differences = [before - after for before, after in pairwise(free)]
    return max(differences[0], 0) + (len(sizes) - 1) * max(differences[-1], 0)
