"""Starts an engine: from a config to an engine core that has produced a token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.config import EngineConfig
from quire.cost.arithmetic import StepArithmetic
from quire.cost.calibrate import CACHE_BYTES, MeasuredStep, Rows, fit, points
from quire.cost.model import CostModel
from quire.engine.bring_up import RunningWorkers, bring_up
from quire.engine.calibration import Calibration, KeptCosts
from quire.engine.core import EngineCore, OnBegun
from quire.engine.rank_spawn import RankInterpreter
from quire.engine.ranks import start_ranks
from quire.engine.ready import check_targets, ready_message
from quire.engine.rehearsal import Rehearsal
from quire.engine.warm_up import produce_tokens
from quire.formats.kv_format import kv_format
from quire.formats.kv_groups import kv_groups, num_tables
from quire.life_cycle import WorkerExecutor, Workers
from quire.loader.drafter import load_with_drafter
from quire.lora.registry import AdapterRegistry
from quire.messages import WARM_UP, EngineReady, Progress
from quire.model_config import ModelConfig
from quire.planning.cut_stages import check_cuts, cut_of, exchanges_of, part_of_rank
from quire.planning.expectation import expectation
from quire.planning.step_costs import (
    EARLIER_START,
    assumed_fit,
    calibration_file,
    ceilings,
    decode_step,
    peaks,
    step_arithmetic,
)
from quire.scheduler.from_settings import scheduler_of
from quire.settings import Planned

MOST_OVERESTIMATE = 1.5  # a kept calibration may predict at most this multiple of the time that a step takes now
CALIBRATION_SHARE = 0.1  # the share by which calibration may make a start longer; later it goes on in idle time


@dataclass(frozen=True)
class StartedEngine:
    """An engine core that is ready to serve, with its resolved settings."""

    core: EngineCore
    resolved: Planned
    model_config: ModelConfig
    executor: WorkerExecutor
    calibration: Calibration | None  # the steps that must still be measured; None: there are none
    rehearsal: Rehearsal | None  # the steps that are computed ahead; None: there are none
    kept_costs: KeptCosts

    def take_memory(self) -> bool:
        """Touch some memory of the KV cache that will be needed; False: there is nothing to do now. See Prefault."""
        return self.executor.use_idle_time(self.core.scheduler.num_blocks_ever_used)

    def check_alive(self) -> None:
        """Raise EngineDeadError if a rank is lost. A step notices this by itself; an idle engine must call this."""
        self.executor.check_alive()

    def calibrate(self) -> bool:
        """Measure a step, or compute one ahead; False: there is nothing to do now."""
        if self.calibration is not None and self.calibration.step():
            return True
        return self.rehearsal is not None and self.rehearsal.step()

    def keep_costs(self) -> None:
        """Store the corrections that running steps have given, for later starts."""
        self.kept_costs.keep()

    def ready_message(self) -> EngineReady:
        return ready_message(self.resolved, self.core.cost, self.core.scheduler.limits)


def start_engine(
    config: EngineConfig,
    model_folder: Path,
    *,
    is_server: bool,
    progress: Progress,
    make_workers: Callable[[ModelConfig, Progress], Workers] | None = None,
    is_first: bool = True,
    drafter_folder: Path | None = None,
    free_memory_bytes: int | None = None,
    engine_index: int = 0,
    interpreters: list[RankInterpreter] | None = None,
    start_time: float | None = None,
    on_begun: OnBegun = lambda request_ids: None,
) -> StartedEngine:
    """Load the model in `model_folder`, and let it answer once.

    Args:
        make_workers: makes the workers from the config of the whole model; None: one worker is in this process, and
            each further rank is a process.
        is_first: whether targets that cannot be reached are refused. An engine that replaces a failed one keeps them.
        drafter_folder: the folder of the model that drafts; None: no model drafts.
        free_memory_bytes: the bytes of the machine's memory that were free before the first replica began to load;
            None: there is one replica.
        engine_index: the index of the replica.
        interpreters: interpreters for further ranks: see start_ranks.
        start_time: the time of the start of the engine: see ThreadExecutor.
        on_begun: see EngineCore.

    Raises:
        QuireError: the engine cannot start. All these errors are meant for the user.
    """
    started = time.monotonic()
    if is_external := config.distributed_executor_backend == "external_launcher":
        from quire.engine.external import placed, start_external  # it loads torch

        config = placed(config, is_server=is_server)
    model_config = load_with_drafter(model_folder, drafter_folder, config)
    check_cuts(model_config, config)
    with ExitStack() as on_error:
        executor, num_ranks = None, config.num_ranks
        if is_external:
            executor = start_external(config, model_config, progress)
            on_error.callback(executor.shutdown)
            workers: Workers = (executor.worker,)
        else:
            make_workers = make_workers or partial(
                start_ranks,
                config,
                model_folder,
                drafter_folder=drafter_folder,
                is_server=is_server,
                engine_index=engine_index,
                interpreters=[] if interpreters is None else interpreters,
            )
            workers = make_workers(model_config, progress)
            num_ranks = len(workers)
            for worker in reversed(workers):
                on_error.callback(worker.close)
        parts = [part_of_rank(model_config, config, rank) for rank in range(num_ranks)]
        whole, model_config = model_config, cut_of(model_config, config).part()
        running = bring_up(
            config,
            model_config,
            workers,
            is_server=is_server,
            progress=progress,
            free_memory_bytes=free_memory_bytes,
            parts=parts,
            executor=executor,
            start_time=start_time,
        )
        on_error.pop_all()
        on_error.callback(running.executor.shutdown)
        has_clock = executor is None
        arithmetic = step_arithmetic(
            running.resolved, model_config, exchanges_of(whole, config, running.resolved.model.dtype)
        )
        engine = _answering(
            running, model_config, arithmetic, started, progress, on_begun, is_first=is_first, has_clock=has_clock
        )
        on_error.pop_all()
    return engine


def _answering(
    running: RunningWorkers,
    model_config: ModelConfig,
    arithmetic: StepArithmetic,
    started: float,
    progress: Progress,
    on_begun: OnBegun,
    *,
    is_first: bool,
    has_clock: bool,
) -> StartedEngine:
    """Make an engine and let it produce some tokens.

    Args:
        started: the time at which the start began.
        has_clock: whether the engine's decisions may depend on times. If several engines must schedule alike, they may
            not.
    """
    resolved, measured = running.resolved, running.measured
    schedule = resolved.scheduler
    first = MeasuredStep(arithmetic.demand(arithmetic.load([0], [measured.num_tokens], 1)), measured.step.seconds)
    guess = assumed_fit(ceilings(resolved, arithmetic, running.facts), running.links).constants
    cost = CostModel(arithmetic, fit([first], guess))
    adapters = None if resolved.lora is None else AdapterRegistry(running.executor, resolved.lora.max_cpu_loras)
    clock = time.monotonic if has_clock else lambda: 0.0
    scheduler = scheduler_of(resolved, model_config, cost, clock, adapters)
    core = EngineCore(
        scheduler,
        running.executor,
        schedule.depth,
        cost,
        clock,
        preparer=running.executor,
        adapters=adapters,
        on_begun=on_begun,
    )
    file = calibration_file(resolved, model_config, running.facts, arithmetic.exchanges)
    if (known := file.read()) is not None:
        cost.calibrate(replace(known, constants=replace(known.constants, links=running.links)))
    predicted = decode_step(cost, 1).seconds
    progress(WARM_UP, 2 / 3, "producing a token")
    laps = produce_tokens(core, has_time_limit=has_clock)
    calibration = None
    # If steps are much faster now than in the earlier start, then that start ran on a busy machine.
    is_slower = known is None or MOST_OVERESTIMATE * min(lap.seconds for lap in laps) < predicted
    if is_slower and has_clock:
        calibration = Calibration(core, cost, guess, _points(core, running, model_config), file.write)
        calibration.run(CALIBRATION_SHARE * (time.monotonic() - started))
    rehearsal, limits = None, scheduler.limits
    # Other models are not recorded. With lanes, there is a recording for each split of the tokens: too many.
    is_recorded = model_config.runs_natively(resolved.model.model_impl) and schedule.num_lanes == 1
    if has_clock and resolved.device.device == "cpu" and is_recorded:
        rehearsal = Rehearsal(core, cost, min(limits.max_num_batched_tokens, limits.max_model_len))
    if is_first:
        check_targets(schedule, cost, scheduler.limits)
    waited = max(min(lap.waited for lap in laps), measured.step.waited)
    origin = EARLIER_START if calibration is None else "this start measured steps"
    expected = expectation(resolved, cost, origin, waited)
    progress(WARM_UP, 1.0, "first token produced")
    return StartedEngine(
        core,
        resolved.noting(
            {**expected, **peaks(resolved, arithmetic, running.facts, running.num_ranks, running.ceilings)}
        ),
        model_config,
        running.executor,
        calibration,
        rehearsal,
        KeptCosts(cost, file.write, calibration),
    )


def _points(core: EngineCore, running: RunningWorkers, model: ModelConfig) -> Iterator[Rows]:
    """The steps that calibration measures."""
    resolved, limits = running.resolved, core.scheduler.limits
    form = resolved.model
    kv_bytes = max(model.kv_bytes_per_token(kv_format(form.kv_cache_dtype, form.dtype)), 1)
    num_slots = resolved.memory.num_blocks // num_tables(kv_groups(model)) * form.block_size
    return points(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        min(CACHE_BYTES // kv_bytes, num_slots),
        form.block_size,
    )
