"""From a config to an engine core that has produced a token: model facts, worker, scheduler, executor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import InlineExecutor, ThreadExecutor
from quire.engine.expectation import put_expectation
from quire.engine.warm_up import produce_tokens
from quire.kv_groups import kv_groups
from quire.messages import EngineReady, Progress
from quire.model_config import ModelConfig, load_model_config
from quire.resolve import Resolved
from quire.schedule import Executor
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.residency import BlockResidency
from quire.scheduler.scheduler import Scheduler
from quire.worker.prefault import Prefault
from quire.worker.worker import Worker, start_worker


@dataclass(frozen=True)
class StartedEngine:
    """A core that is ready to serve, and what it resolved to."""

    core: EngineCore
    resolved: Resolved
    model_config: ModelConfig
    prefault: Prefault

    def ready_message(self) -> EngineReady:
        return EngineReady(
            max_model_len=self.resolved.max_model_len,
            num_blocks=self.resolved.num_blocks,
            block_size=self.resolved.block_size,
            max_num_seqs=self.resolved.max_num_seqs,
            max_num_batched_tokens=self.resolved.max_num_batched_tokens,
            resolved=self.resolved.as_dict(),
        )


def start_engine(config: EngineConfig, model_folder: Path, *, is_server: bool, progress: Progress) -> StartedEngine:
    """Load the model in `model_folder` and make it answer once. Raises QuireErrors fit for the user."""
    model_config = load_model_config(
        model_folder, config.hf_overrides, any_architecture=config.model_impl in ("auto", "transformers")
    )
    worker = start_worker(config, model_config, is_server=is_server, progress=progress)
    resolved = worker.resolved
    kv = KVCacheManager(
        BlockPool(
            resolved.num_blocks,
            resolved.block_size,
            BlockResidency(resolved.kv_cache_metrics_sample) if resolved.kv_cache_metrics else None,
        ),
        kv_groups(model_config),
        step_tokens=resolved.max_num_batched_tokens,
        enable_prefix_caching=resolved.enable_prefix_caching,
        watermark=resolved.watermark,
    )
    limits = SchedulerLimits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        long_prefill_token_threshold=resolved.long_prefill_token_threshold,
        max_num_queued_reqs=resolved.max_num_queued_reqs,
        max_shared_prefill_tokens=resolved.max_shared_prefill_tokens,
    )
    scheduler = Scheduler(
        limits,
        kv,
        policy=resolved.scheduling_policy,
        enable_chunked_prefill=resolved.enable_chunked_prefill,
        rope_switches_after=model_config.rope.switches_after(resolved.max_model_len),
    )
    core = EngineCore(scheduler, _executor(worker, resolved), depth=2 if resolved.async_scheduling else 1)
    num_tokens, prompt = worker.measured_step
    core.cost.add(num_tokens, prompt.seconds)
    progress("warm up", 2 / 3, "producing a token")
    put_expectation(resolved, model_config, produce_tokens(core), num_tokens, prompt)
    progress("warm up", 1.0, "first token produced")
    return StartedEngine(core, resolved, model_config, worker.prefault)


def _executor(worker: Worker, resolved: Resolved) -> Executor:
    if worker.runner.device.runs_ahead:
        return worker.runner  # it launches, and waits for results when they are asked for
    return ThreadExecutor(worker.runner) if resolved.async_scheduling else InlineExecutor(worker.runner)
