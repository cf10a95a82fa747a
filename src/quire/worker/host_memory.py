"""Measures the memory of a step on the CPU. The KV cache gets its part of the rest."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.cost.arithmetic import StepArithmetic
from quire.cost.collectives import NO_LINKS
from quire.cost.devices import Ceilings
from quire.distributed.group import Ranks
from quire.formats.kv_groups import kv_groups, num_tables, pages_alone
from quire.forward_batch import LayerCache
from quire.kernels import cpu
from quire.kernels.weight_memory import OF_PROCESS
from quire.life_cycle import Measured, WorkerSettings
from quire.messages import Progress
from quire.metrics.stopwatch import Lap, Stopwatch
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.form import CPU
from quire.models.registry import CausalLM
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts, logits_bytes, work_bytes
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.settings import ModelSettings
from quire.worker import kv_cache
from quire.worker.accelerator import Host
from quire.worker.drafters import drafter_of, streams_for
from quire.worker.expert_balancer import ExpertBalancer
from quire.worker.expert_use import ExpertCounter
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import PagedCache, page_share
from quire.worker.link_times import measure_links
from quire.worker.live_buffers import LiveBuffers
from quire.worker.model_runner import ModelRunner
from quire.worker.recorded_steps import RecordedSteps

PROFILE_TOKENS = 256  # tokens of the run that is timed
LEAST_READ_BYTES, READ_BYTES = 1 << 20, 1 << 28  # the second is more than the caches of most processors
COUNTED_TOKENS = 16  # tokens of the run whose buffers are counted; buffers grow in proportion


class OnHost:
    """The CPU as the device of a worker: see worker.Place.

    Args:
        ranks: the ranks that share the model and the memory of the machine; None: there is one rank.
    """

    kv_cache_knob = "VLLM_CPU_KVCACHE_SPACE"
    memory_device = CPU

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks

    def measure(self, model: CausalLM, drafter: CausalLM | None, settings: WorkerSettings) -> Measured:
        """Measure the buffers of a short step, scale them to the token budget, and add the logits of a full batch."""
        buffer_bytes, num_tokens, step = _measure_step(model, settings, self._ranks)
        drafter_bytes, mapped_bytes = 0, model.mapped_bytes
        if drafter is not None:
            ranks = None if self._ranks is None else self._ranks.of_stage()
            buffer_bytes = max(buffer_bytes, _measure_step(drafter, settings.of_drafter(), ranks)[0])
            drafter_bytes, mapped_bytes = drafter.weight_bytes(), mapped_bytes + drafter.mapped_bytes
        logits = logits_bytes(model.config, settings.num_logits_rows, "cpu")
        num_ranks = 1 if self._ranks is None else self._ranks.grid.num_local
        memory = MemoryFacts(
            total_bytes=devices.total_memory_bytes() // num_ranks,
            free_bytes=devices.free_memory_bytes() // num_ranks - mapped_bytes,
            weight_bytes=model.weight_bytes() + drafter_bytes,
            work_bytes=work_bytes(buffer_bytes, "cpu") + logits + settings.hidden_bytes(model.config),
            logits_bytes=logits,
            drafter_weight_bytes=drafter_bytes,
            taken_bytes=devices.taken_memory_bytes() + mapped_bytes,
        )
        links = NO_LINKS if self._ranks is None else measure_links(self._ranks)
        return Measured(memory, num_tokens, step, _ceilings(model.config, memory, settings.model, self._ranks), links)

    def runner(
        self,
        model: CausalLM,
        drafter: CausalLM | None,
        adapters: Mapping[str, int],
        cache: PagedCache,
        settings: WorkerSettings,
        progress: Progress,
    ) -> ModelRunner:
        """Make the runner. It records a step when its size comes for the first time. All steps share one memory for
        logits.
        """
        form = settings.model
        sizes = (settings.max_num_seqs, form.max_model_len, form.block_size, model.config.vocab_size)
        pages = page_share(form.decode_context_parallel_size, self._ranks)
        has_grammars = self._ranks is None or self._ranks.samples
        tables = num_tables(kv_groups(model.config))
        inputs = InputBatch(*sizes, tables, adapters, pages=pages, has_grammars=has_grammars)
        device, drafts, streams = Host(), None, streams_for(model, drafter, settings)
        if drafter is not None:
            recorded = _recorded(drafter, inputs, cache.drafter_layers, settings)
            group = None if self._ranks is None else self._ranks.group
            drafts = drafter_of(drafter, streams, cache, inputs, device, recorded, settings, group)
        recorded = _recorded(model, inputs, cache.layers, settings)
        if isinstance(model, Decoder):
            model.keep_logits_memory()
        is_watched = form.expert_metrics or form.balancing is not None
        watched = model.watch_experts() if is_watched and isinstance(model, Decoder) else []
        balancer = None
        if form.balancing is not None and watched:
            group = None if self._ranks is None else self._ranks.everyone or self._ranks.group
            assert group is not None, "one rank has nothing to exchange"
            balancer = ExpertBalancer(watched, group, form.balancing)
        experts = ExpertCounter(watched, balancer) if form.expert_metrics and watched else None
        return ModelRunner(
            model,
            cache,
            inputs,
            form.logprobs_mode,
            device,
            recorded,
            drafts,
            experts=experts,
            ranks=self._ranks,
            balancer=balancer,
            shards_sampling=form.enable_batch_sharded_sampling,
            streams=streams,
        )


def _recorded(
    model: CausalLM, inputs: InputBatch, caches: list[LayerCache], settings: WorkerSettings
) -> RecordedSteps | None:
    if not isinstance(model, Decoder):
        return None
    return RecordedSteps(model, inputs, caches, settings.max_num_batched_tokens)


def _measure_step(model: CausalLM, settings: WorkerSettings, ranks: Ranks | None = None) -> tuple[int, int, Lap]:
    """Count the bytes of the buffers of a short step, without logits, and scale them to the full token budget.

    The runs also warm the kernels up, so the first request does not pay for the start of threads and for page faults.
    The scratch memory of the kernels stays, and no longer counts as free.

    Returns:
        The bytes, and the tokens and the time of a longer run.
    """
    form, budget = settings.model, settings.max_num_batched_tokens
    num_tokens = min(PROFILE_TOKENS, budget, form.max_model_len)
    groups = kv_groups(model.config)
    pages = pages_alone(groups, num_tokens, form.block_size, num_tokens)
    cache = kv_cache.allocate_for(model.config, form, len(pages), CPU)
    own_pages = page_share(form.decode_context_parallel_size, ranks)
    inputs = InputBatch(1, num_tokens, form.block_size, model.config.vocab_size, num_tables(groups), pages=own_pages)
    runner = ModelRunner(model, cache, inputs, "raw_logprobs", Host(), ranks=ranks)
    num_counted, num_lanes = min(COUNTED_TOKENS, num_tokens), 1 if ranks is None else ranks.grid.num_lanes
    buffer_bytes = _count_buffers(runner, _profile_batch(num_counted, pages, num_lanes))
    others = 0.0 if ranks is None else ranks.waited_seconds
    watch = Stopwatch()
    result = runner.execute(_profile_batch(num_tokens, pages, num_lanes))
    lap = watch.lap()
    others = 0.0 if ranks is None else ranks.waited_seconds - others  # waited for ranks, not for other programs
    waited = max(lap.waited - others / lap.seconds, 0.0)
    seconds = result.prepare_seconds + result.forward_seconds + result.sample_seconds
    return buffer_bytes * budget // num_counted, num_tokens, Lap(seconds, waited)


def _ceilings(model: ModelConfig, memory: MemoryFacts, form: ModelSettings, ranks: Ranks | None) -> Ceilings | None:
    """What the threads of this process reach: they read packed weights, up to READ_BYTES.

    Small weights are read from the processor's caches. It takes 0.02 s at 40 GB/s. If the weights are mapped from a
    file, new memory of this size is read, which the KV cache gets later. Ranks of a stage measure at the same time,
    because they share memory.

    Returns: None without the kernels, which measure, or with nearly no memory.
    """
    if not cpu.available():
        return None
    if ranks is not None and (group := ranks.everyone or ranks.group) is not None:
        group.gather(torch.zeros((1, 1), dtype=torch.uint8), [1] * group.size)
    num_bytes, weights = min(READ_BYTES, memory.weight_bytes), OF_PROCESS.longest()
    if weights is None or weights.nbytes < max(num_bytes // 2, LEAST_READ_BYTES):
        num_bytes, weights = min(num_bytes, memory.free_bytes // 4), None
    if num_bytes < LEAST_READ_BYTES:
        return None
    # The rate of products with 4-bit codes, which no other codes exceed.
    is_integer = StepArithmetic(model, form.dtype, form.quantization, form.kv_cache_dtype).is_integer
    flops = cpu.peak_int8_ops(bits=4) if is_integer else cpu.peak_flops(getattr(torch, form.dtype))
    if weights is None:
        return Ceilings(cpu.read_bandwidth(num_bytes, repeats=2), flops)
    return Ceilings(cpu.bandwidth_over(weights[:READ_BYTES], repeats=2), flops)


@torch.inference_mode()
def _count_buffers(runner: ModelRunner, batch: ScheduledBatch) -> int:
    """The most bytes of tensors that live at the same time in the forward pass of a batch."""
    runner.input_batch.apply(batch)
    step = runner.input_batch.step_rows(batch)
    staged = runner.forward_pass.stage(step)
    buffers = LiveBuffers()
    with buffers:
        runner.forward_pass.hidden(staged)
    runner.input_batch.apply(ScheduledBatch(0, removed_request_ids=batch.request_ids))
    return buffers.peak_bytes


def _profile_batch(num_tokens: int, pages: list[int], num_lanes: int) -> ScheduledBatch:
    """A batch of one prompt. With lanes, each lane has the same prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    row = NewRow("profile", [0] * num_tokens, num_tokens, params, pages)
    return ScheduledBatch(
        step_id=0,
        request_ids=["profile"],
        num_computed_tokens=[0],
        num_scheduled_tokens=[num_tokens],
        num_logits=[1],
        new_block_ids=[[]],
        new_rows=[row],
        lane_tokens=[num_tokens] * num_lanes if num_lanes > 1 else [],
    )
