"""From a config to an engine core that has produced a token: model facts, worker, scheduler, executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import InlineExecutor, ThreadExecutor
from quire.engine.expectation import expectation
from quire.engine.warm_up import produce_tokens
from quire.kv_groups import kv_groups
from quire.messages import EngineReady, Progress
from quire.model_config import ModelConfig, load_model_config
from quire.schedule import Executor
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.residency import BlockResidency
from quire.scheduler.scheduler import Scheduler
from quire.settings import Planned, Resolved, as_dict
from quire.worker.prefault import Prefault
from quire.worker.worker import Worker, start_worker


@dataclass(frozen=True)
class StartedEngine:
    """A core that is ready to serve, and what it resolved to."""

    core: EngineCore
    resolved: Planned
    model_config: ModelConfig
    prefault: Prefault

    def ready_message(self) -> EngineReady:
        resolved = self.resolved
        return EngineReady(
            max_model_len=resolved.model.max_model_len,
            num_blocks=resolved.memory.num_blocks,
            block_size=resolved.model.block_size,
            max_num_seqs=resolved.scheduler.max_num_seqs,
            max_num_batched_tokens=resolved.scheduler.max_num_batched_tokens,
            resolved=as_dict(resolved.settings),
        )


def start_engine(config: EngineConfig, model_folder: Path, *, is_server: bool, progress: Progress) -> StartedEngine:
    """Load the model in `model_folder` and make it answer once. Raises QuireErrors fit for the user."""
    model_config = load_model_config(
        model_folder, config.hf_overrides, any_architecture=config.model_impl in ("auto", "transformers")
    )
    worker = start_worker(config, model_config, is_server=is_server, progress=progress)
    resolved = worker.resolved
    model, schedule = resolved.model, resolved.scheduler
    kv = KVCacheManager(
        BlockPool(
            resolved.memory.num_blocks,
            model.block_size,
            BlockResidency(schedule.kv_cache_metrics_sample) if schedule.kv_cache_metrics else None,
        ),
        kv_groups(model_config),
        step_tokens=schedule.max_num_batched_tokens,
        enable_prefix_caching=schedule.enable_prefix_caching,
        watermark=schedule.watermark,
    )
    limits = SchedulerLimits(
        max_num_seqs=schedule.max_num_seqs,
        max_num_batched_tokens=schedule.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        long_prefill_token_threshold=schedule.long_prefill_token_threshold,
        max_num_queued_reqs=schedule.max_num_queued_reqs,
        max_shared_prefill_tokens=schedule.max_shared_prefill_tokens,
    )
    scheduler = Scheduler(
        limits,
        kv,
        policy=schedule.scheduling_policy,
        enable_chunked_prefill=schedule.enable_chunked_prefill,
        rope_switches_after=model_config.rope.switches_after(model.max_model_len),
    )
    core = EngineCore(scheduler, _executor(worker, resolved), depth=2 if schedule.async_scheduling else 1)
    num_tokens, prompt = worker.measured_step
    core.cost.add(num_tokens, prompt.seconds)
    progress("warm up", 2 / 3, "producing a token")
    steps = produce_tokens(core)
    resolved = resolved.noting(expectation(schedule.max_num_seqs, model_config, steps, num_tokens, prompt))
    progress("warm up", 1.0, "first token produced")
    return StartedEngine(core, resolved, model_config, worker.prefault)


def _executor(worker: Worker, resolved: Resolved) -> Executor:
    if worker.runner.device.runs_ahead:
        return worker.runner  # it launches, and waits for results when they are asked for
    return ThreadExecutor(worker.runner) if resolved.scheduler.async_scheduling else InlineExecutor(worker.runner)
