"""A model on the CPU: how much memory a step takes there, measured before the KV cache gets its part of the rest."""

from __future__ import annotations

import resource
import sys

from quire.formats.kv_groups import kv_groups, num_tables, pages_alone
from quire.forward_batch import LayerCache
from quire.life_cycle import Measured, WorkerSettings
from quire.messages import Progress
from quire.metrics.stopwatch import Lap, Stopwatch
from quire.models.decoder import Decoder
from quire.models.registry import CPU, CausalLM
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts, least_work_bytes, logits_bytes
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.worker import kv_cache
from quire.worker.accelerator import Host
from quire.worker.drafters import drafter_of, streams_for
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner
from quire.worker.recorded_steps import RecordedSteps

# Tokens of the run that measures working memory. Activations grow linearly with tokens, so a short run is enough.
PROFILE_TOKENS = 256


class OnHost:
    """The CPU as a worker's device."""

    kv_cache_knob = "VLLM_CPU_KVCACHE_SPACE"
    memory_device = CPU

    def measure(self, model: CausalLM, drafter: CausalLM | None, settings: WorkerSettings) -> Measured:
        """A short step, scaled to the token budget, and the logits of a full batch."""
        work_bytes, num_tokens, step = _measure_step(model, settings)
        drafter_bytes, mapped_bytes = 0, model.mapped_bytes
        if drafter is not None:
            work_bytes = max(work_bytes, _measure_step(drafter, settings.of_drafter())[0])
            drafter_bytes, mapped_bytes = drafter.weight_bytes(), mapped_bytes + drafter.mapped_bytes
        logits = logits_bytes(model.config, settings.num_logits_rows)
        memory = MemoryFacts(
            total_bytes=devices.total_memory_bytes(),
            free_bytes=devices.free_memory_bytes() - mapped_bytes,
            weight_bytes=model.weight_bytes() + drafter_bytes,
            work_bytes=work_bytes + logits + settings.hidden_bytes(model.config),
            logits_bytes=logits,
            drafter_weight_bytes=drafter_bytes,
        )
        return Measured(memory, num_tokens, step)

    def runner(
        self,
        model: CausalLM,
        drafter: CausalLM | None,
        cache: PagedCache,
        settings: WorkerSettings,
        progress: Progress,
    ) -> ModelRunner:
        """Steps are recorded when they first come."""
        form = settings.model
        sizes = (settings.max_num_seqs, form.max_model_len, form.block_size, model.config.vocab_size)
        inputs = InputBatch(*sizes, num_tables(kv_groups(model.config)))
        device, drafts, streams = Host(), None, streams_for(model, drafter, settings)
        if drafter is not None:
            recorded = _recorded(drafter, inputs, cache.drafter_layers)
            drafts = drafter_of(drafter, streams, cache, inputs, device, recorded, settings)
        recorded = _recorded(model, inputs, cache.layers)
        return ModelRunner(model, cache, inputs, form.logprobs_mode, device, recorded, drafts)


def _recorded(model: CausalLM, inputs: InputBatch, caches: list[LayerCache]) -> RecordedSteps | None:
    return RecordedSteps(model, inputs, caches) if isinstance(model, Decoder) else None


def _measure_step(model: CausalLM, settings: WorkerSettings) -> tuple[int, int, Lap]:
    """Peak memory of one step at the full token budget, logits aside: measured on a short run, and scaled.

    Also answers with that run's tokens and time. The run also warms the kernels: the first request does not pay for
    thread start and page faults.
    """
    form, budget = settings.model, settings.max_num_batched_tokens
    num_tokens = min(PROFILE_TOKENS, budget, form.max_model_len)
    groups = kv_groups(model.config)
    pages = pages_alone(groups, num_tokens, form.block_size, num_tokens)
    cache = kv_cache.allocate_for(model.config, form, len(pages), CPU)
    inputs = InputBatch(1, num_tokens, form.block_size, model.config.vocab_size, num_tables(groups))
    runner = ModelRunner(model, cache, inputs, "raw_logprobs", Host())
    before = devices.resident_memory_bytes()
    peak_before = _peak_resident_bytes()
    watch = Stopwatch()
    result = runner.execute(_profile_batch(num_tokens, pages))
    waited = watch.lap().waited
    growth = max(_peak_resident_bytes() - max(before, peak_before), devices.resident_memory_bytes() - before)
    growth -= cache.num_bytes
    floor = least_work_bytes(model.config, num_tokens, form.dtype)  # the peak may hide under that of loading
    seconds = result.prepare_seconds + result.forward_seconds + result.sample_seconds
    return int(max(growth, floor) * (budget / num_tokens)), num_tokens, Lap(seconds, waited)


def _peak_resident_bytes() -> int:
    """Highest resident memory of this process so far (KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _profile_batch(num_tokens: int, pages: list[int]) -> ScheduledBatch:
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
    )
