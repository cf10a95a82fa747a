"""Brings a device up: load the model, measure its working memory, plan and allocate the KV cache, build the runner."""

from __future__ import annotations

import gc
import resource
import sys
from dataclasses import dataclass, replace

import torch

from quire.config import EngineConfig
from quire.cost import devices
from quire.cost.stopwatch import Lap, Stopwatch
from quire.errors import MemoryPlanError
from quire.kernels import cpu, extension, gpu, gpu_facts
from quire.kv_format import kv_format
from quire.kv_groups import kv_groups, num_tables, pages_alone
from quire.loader.load import load_model
from quire.logs import get_logger
from quire.memory_plan import (
    MemoryFacts,
    least_work_bytes,
    logits_bytes,
    plan_kv_cache,
    planned_weight_bytes,
    weights_do_not_fit,
)
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.models.decoder import Decoder
from quire.models.registry import CPU, CausalLM
from quire.resolve import DeviceFacts, resolve, shown_bytes
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, ScheduledBatch
from quire.settings import Planned, Resolved
from quire.worker import gpu_memory, kv_cache
from quire.worker.accelerator import Accelerator, Cuda, Host
from quire.worker.cuda_graphs import StepGraphs, paddings, warn_about_dropped_sizes
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner
from quire.worker.prefault import Prefault
from quire.worker.recorded_steps import RecordedSteps

logger = get_logger(__name__)

# Tokens of the run that measures working memory. Activations grow linearly with tokens, so a short run is enough.
PROFILE_TOKENS = 256


@dataclass(frozen=True)
class Worker:
    """A device that is ready to run batches."""

    runner: ModelRunner
    resolved: Planned
    measured_step: tuple[int, Lap]  # tokens and time of the run that measured working memory
    prefault: Prefault


def start_worker(config: EngineConfig, model_config: ModelConfig, *, is_server: bool, progress: Progress) -> Worker:
    """Load and allocate everything. Errors are ConfigError, WeightsError or MemoryPlanError, fit for the user."""
    if (wished := extension.wished_isa()) is not None:
        cpu.set_isa(wished)
    isa = cpu.isa() if cpu.available() else "torch"
    found = "none was looked for" if config.device == "cpu" else gpu_facts.detect()
    device = devices.detect(isa, found)
    resolved = resolve(config, model_config, device, is_server=is_server)
    total_bytes, _ = device.memory_of(resolved.device.device)
    # Refused before minutes are spent on reading them.
    planned = planned_weight_bytes(resolved, model_config)
    if planned >= total_bytes:
        raise weights_do_not_fit(resolved, planned, total_bytes)
    if cpu.available():
        cpu.set_num_threads(resolved.device.num_threads)
    torch.set_num_threads(resolved.device.num_threads)
    if resolved.device.deterministic and resolved.device.device == "cuda":
        gpu.be_deterministic()
    dtype: torch.dtype = getattr(torch, resolved.model.dtype)
    model_config = replace(model_config, max_model_len=resolved.model.max_model_len)
    progress("load", 0.0, "")
    model = load_model(
        model_config,
        dtype,
        config.load_format,
        progress,
        config.model_impl,
        resolved.model.quantization,
        config.packed_weights_cache,
        torch.device(resolved.device.device),
        resolved.device.attention_backend,
        _cache_dtype(resolved),
    )
    form = resolved.model.quantization or resolved.model.dtype
    form = f"packed {form}" if cpu.available() and resolved.device.device == "cpu" else form
    progress("load", 1.0, f"{shown_bytes(model.weight_bytes())} of {form}")
    progress("warm up", 0.0, "measuring working memory")
    if resolved.device.device == "cuda":
        return bring_up_gpu(config, model_config, resolved, model, Cuda(), progress)
    return _bring_up_cpu(config, model_config, resolved, model, device, progress)


def _bring_up_cpu(
    config: EngineConfig,
    model_config: ModelConfig,
    resolved: Resolved,
    model: CausalLM,
    device: DeviceFacts,
    progress: Progress,
) -> Worker:
    logits = logits_bytes(model_config, resolved.scheduler.max_num_seqs)
    measured_bytes, measured_step = _measure(model, model_config, resolved)
    work_bytes = measured_bytes + logits
    memory = MemoryFacts(
        total_bytes=device.total_memory_bytes,
        free_bytes=devices.free_memory_bytes() - model.mapped_bytes,
        weight_bytes=model.weight_bytes(),
        work_bytes=work_bytes,
        logits_bytes=logits,
    )
    planned = plan_kv_cache(config, model_config, resolved, memory)
    if planned.memory.kv_cache_bytes + work_bytes > memory.free_bytes:
        logger.warning(
            "the KV cache may grow to %s, and only %s are free: when it does, the system may end this process",
            shown_bytes(planned.memory.kv_cache_bytes),
            shown_bytes(memory.free_bytes),
        )
    progress("warm up", 1 / 3, "allocating the KV cache")
    cache = _allocate_planned(model_config, planned, memory, "VLLM_CPU_KVCACHE_SPACE")
    inputs = InputBatch(
        planned.scheduler.max_num_seqs,
        planned.model.max_model_len,
        planned.model.block_size,
        model_config.vocab_size,
        num_tables(kv_groups(model_config)),
    )
    recorded = RecordedSteps(model, inputs, cache.layers) if isinstance(model, Decoder) else None
    runner = ModelRunner(model, cache, inputs, config.logprobs_mode, Host(), recorded)
    return Worker(runner, planned, measured_step, Prefault(cache.pages))


def bring_up_gpu(
    config: EngineConfig,
    model_config: ModelConfig,
    resolved: Resolved,
    model: CausalLM,
    accelerator: Accelerator,
    progress: Progress,
) -> Worker:
    """The rest of a start once the model's weights are on the GPU."""
    gc.collect()  # what loading has left of tensors
    work = gpu_memory.measure(model, _allocate(model_config, resolved, 1, accelerator.device), resolved, accelerator)
    gc.collect()
    accelerator.release()
    free_bytes, total_bytes = accelerator.memory()
    memory = MemoryFacts(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        weight_bytes=model.weight_bytes(),
        work_bytes=work.step_bytes + work.graph_bytes,
        logits_bytes=logits_bytes(model_config, resolved.scheduler.max_num_seqs),
        work_detail=f"{work.step_bytes:,} in a step of {work.largest_step[0]} tokens, {work.graph_bytes:,} in graphs",
    )
    planned = plan_kv_cache(config, model_config, resolved, memory)
    progress("warm up", 1 / 3, "allocating the KV cache")
    cache = _allocate_planned(model_config, planned, memory, "--gpu-memory-utilization", accelerator.device)
    depth = 2 if planned.scheduler.async_scheduling else 1
    inputs = gpu_memory.make_inputs(planned, model_config, accelerator, depth)
    graphs = None
    warn_about_dropped_sizes(planned)
    if sizes := paddings(planned):
        graphs = StepGraphs(model, cache.layers, inputs, accelerator, sizes)
        graphs.capture(lambda done, total: progress("warm up", (1 + done / total) / 3, f"graph {done} of {total}"))
    runner = ModelRunner(model, cache, inputs, config.logprobs_mode, accelerator, graphs)
    num_tokens, seconds = work.largest_step
    return Worker(runner, planned, (num_tokens, Lap(seconds)), Prefault(cache.pages))


def _allocate_planned(
    model_config: ModelConfig, resolved: Planned, memory: MemoryFacts, knob: str, device: torch.device = CPU
) -> PagedCache:
    """The KV cache; `knob` is what sets its size on this device, beside the exact numbers."""
    try:
        return _allocate(model_config, resolved, resolved.memory.num_blocks, device)
    except RuntimeError as error:  # torch's allocator: more than the system promises to anybody
        raise MemoryPlanError(
            f"The system refuses {shown_bytes(resolved.memory.kv_cache_bytes)} for the KV cache",
            expected=f"less than the {shown_bytes(memory.free_bytes)} that are free",
            fix=f"Lower --kv-cache-memory-bytes, {knob} or --num-gpu-blocks-override",
            param="kv_cache_memory_bytes",
        ) from error


def _allocate(model_config: ModelConfig, resolved: Resolved, num_pages: int, device: torch.device = CPU) -> PagedCache:
    groups = kv_groups(model_config)
    return kv_cache.allocate(groups, num_pages, resolved.model.block_size, _cache_dtype(resolved), device)


def _cache_dtype(resolved: Resolved) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kv_format(resolved.model.kv_cache_dtype, resolved.model.dtype).torch_dtype)
    return dtype


def _peak_resident_bytes() -> int:
    """Highest resident memory of this process so far (KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _measure(model: CausalLM, model_config: ModelConfig, resolved: Resolved) -> tuple[int, tuple[int, Lap]]:
    """Peak memory of one step at the full token budget, logits aside: measured on a short run, and scaled.

    Also answers with that run's tokens and time.

    The run also warms the kernels: the first request does not pay for thread start and page faults.
    """
    num_tokens = min(PROFILE_TOKENS, resolved.scheduler.max_num_batched_tokens, resolved.model.max_model_len)
    groups = kv_groups(model_config)
    pages = pages_alone(groups, num_tokens, resolved.model.block_size, num_tokens)
    cache = _allocate(model_config, resolved, len(pages))
    inputs = InputBatch(1, num_tokens, resolved.model.block_size, model_config.vocab_size, num_tables(groups))
    runner = ModelRunner(model, cache, inputs, "raw_logprobs", Host())
    before = devices.resident_memory_bytes()
    peak_before = _peak_resident_bytes()
    watch = Stopwatch()
    result = runner.execute(_profile_batch(num_tokens, pages))
    waited = watch.lap().waited
    growth = max(_peak_resident_bytes() - max(before, peak_before), devices.resident_memory_bytes() - before)
    growth -= cache.num_bytes
    floor = least_work_bytes(model_config, num_tokens, resolved.model.dtype)  # the peak may hide under that of loading
    scale: float = resolved.scheduler.max_num_batched_tokens / num_tokens
    seconds = result.prepare_seconds + result.forward_seconds + result.sample_seconds
    return int(max(growth, floor) * scale), (num_tokens, Lap(seconds, waited))


def _profile_batch(num_tokens: int, pages: list[int]) -> ScheduledBatch:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    row = NewRow("profile", [0] * num_tokens, num_tokens, params, pages)
    return ScheduledBatch(
        step_id=0,
        request_ids=["profile"],
        num_computed_tokens=[0],
        num_scheduled_tokens=[num_tokens],
        new_block_ids=[[]],
        new_rows=[row],
    )
