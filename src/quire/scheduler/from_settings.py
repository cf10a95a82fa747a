"""Makes a scheduler from settings, for a real worker or for a simulated one."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.cost.model import CostModel
from quire.formats.kv_groups import kv_groups
from quire.lora.registry import AdapterRegistry
from quire.model_config import ModelConfig
from quire.scheduler.adapter_turns import AdapterTurns
from quire.scheduler.adaptive_depth import AdaptiveDepth, DrafterTime
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.lanes import Lanes
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.proposer import Proposer
from quire.scheduler.queue import ORDER_KEYS
from quire.scheduler.residency import BlockResidency
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from quire.settings import Planned, SchedulerSettings
from quire.spec_decode.by_worker import DraftedByWorker
from quire.spec_decode.ngram import NgramProposer
from quire.spec_decode.suffix import SuffixProposer
from quire.speculative_config import BY_WORKER, SUFFIX_SHARED_BYTES, SpeculativeConfig

# The assumed time of a drafter as a share of the model's time, until it has drafted: for a tenth of the model's size.
DRAFTER_SHARE = 0.15


def scheduler_of(
    resolved: Planned,
    model_config: ModelConfig,
    cost: CostModel,
    clock: Callable[[], float] = time.monotonic,
    adapters: AdapterRegistry | None = None,
) -> Scheduler | Lanes:
    """A scheduler with an empty KV cache of the planned size. With lanes, there is one scheduler for each lane.

    Args:
        cost: predicts the times of steps.
        adapters: the adapters that requests may name.
    """
    if (num_lanes := resolved.scheduler.num_lanes) > 1:
        return Lanes([_of_lane(resolved, model_config, cost, clock, adapters) for _ in range(num_lanes)])
    return _of_lane(resolved, model_config, cost, clock, adapters)


def _of_lane(
    resolved: Planned,
    model_config: ModelConfig,
    cost: CostModel,
    clock: Callable[[], float],
    adapters: AdapterRegistry | None,
) -> Scheduler:
    model, schedule = resolved.model, resolved.scheduler
    turns = None
    if adapters is not None and resolved.lora is not None:
        order = ORDER_KEYS[schedule.scheduling_policy]
        turns = AdapterTurns(resolved.lora.max_loras, order, adapters.is_in_memory)
    kv = KVCacheManager(
        BlockPool(
            resolved.memory.num_blocks,
            model.block_size,
            BlockResidency(schedule.kv_cache_metrics_sample, clock) if schedule.kv_cache_metrics else None,
        ),
        kv_groups(model_config),
        step_tokens=schedule.max_num_batched_tokens,
        depth=schedule.depth,
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
        most_answer_times=schedule.most_answer_times,
        slo_itl=schedule.slo_itl or 0.0,
        slo_attainment=schedule.slo_attainment,
    )
    return Scheduler(
        limits,
        kv,
        policy=schedule.scheduling_policy,
        enable_chunked_prefill=schedule.enable_chunked_prefill,
        rope_switches_after=model_config.rope.switches_after(model.max_model_len),
        speculation=None
        if schedule.speculation is None
        else speculation_of(
            schedule.speculation,
            cost,
            schedule,
            None if resolved.drafter is None else resolved.drafter.form.max_model_len,
            model_config.vocab_size,
        ),
        adapters=turns,
        predicts=cost,
        clock=clock,
        num_stages=schedule.pipeline_parallel_size,
        vocab_size=model_config.vocab_size,
    )


def speculation_of(
    config: SpeculativeConfig,
    cost: CostModel,
    schedule: SchedulerSettings,
    max_tokens: int | None,
    vocab_size: int,
) -> Speculation:
    """The drafter that was asked for.

    Args:
        max_tokens: see Speculation.
        vocab_size: the number of tokens of the model.
    """
    # With several stages each request waits by itself. But a drafter in the last stage keeps all stages waiting, so a
    # step with its drafts is alone.
    waits = schedule.pipeline_parallel_size == 1 or config.method in BY_WORKER
    drafter = DrafterTime(DRAFTER_SHARE * cost.with_drafts([0], 0)[0]) if config.method in BY_WORKER else None
    adaptive = None
    if config.adaptive:
        reads_late = config.method == "draft_model"  # a head reads the model's hidden states in every step
        adaptive = AdaptiveDepth(
            cost.with_drafts,
            drafter,
            schedule.depth,
            num_stages=schedule.pipeline_parallel_size if waits else 1,
            reads_late=reads_late,
            beside_prompts=cost.beside_prompts,
        )
    most_by_rows = config.num_speculative_tokens_per_batch_size
    proposer, most = proposer_of(config), config.num_speculative_tokens
    return Speculation(
        proposer,
        most,
        most_by_rows,
        adaptive,
        max_tokens=max_tokens,
        waits=waits,
        drafter_time=drafter,
        vocab_size=None if config.method in BY_WORKER else vocab_size,
    )


def proposer_of(config: SpeculativeConfig) -> Proposer:
    """The proposer in the scheduler's process.

    Raises ConfigError if drafts are to be searched in texts, and the compiled extension is not there.
    """
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            SUFFIX_SHARED_BYTES,
        )
    return DraftedByWorker()
