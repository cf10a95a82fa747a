"""From a config to an engine core that has produced a token: model facts, worker, scheduler, executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.config import EngineConfig
from quire.cost.calibrate import CACHE_BYTES, MeasuredStep, Rows, fit, points
from quire.cost.model import CostModel
from quire.engine.bring_up import RunningWorkers, bring_up
from quire.engine.calibration import Calibration, KeptCosts
from quire.engine.core import EngineCore
from quire.engine.rank_spawn import RankInterpreter
from quire.engine.ranks import start_ranks
from quire.engine.ready import check_targets, ready_message
from quire.engine.warm_up import produce_tokens
from quire.formats.kv_format import kv_format
from quire.formats.kv_groups import kv_groups, num_tables
from quire.life_cycle import WorkerExecutor, Workers
from quire.loader.drafter import load_with_drafter
from quire.lora.registry import AdapterRegistry
from quire.messages import WARM_UP, EngineReady, Progress
from quire.model_config import ModelConfig
from quire.planning.cut_stages import check_cuts, cut_of, part_of_rank
from quire.planning.step_costs import (
    EARLIER_START,
    assumed_fit,
    calibration_file,
    ceilings,
    decode_step,
    expectation,
    peaks,
    step_arithmetic,
)
from quire.scheduler.from_settings import scheduler_of
from quire.settings import Planned

MOST_OVERESTIMATE = 1.5  # the largest ratio by which a kept calibration may be slower than a step is now
CALIBRATION_SHARE = 0.1  # measuring may make a start longer by this share; the rest is measured while no request waits


@dataclass(frozen=True)
class StartedEngine:
    """A core that is ready to serve, and its resolved settings."""

    core: EngineCore
    resolved: Planned
    model_config: ModelConfig
    executor: WorkerExecutor
    calibration: Calibration | None  # the steps that are left to measure
    kept_costs: KeptCosts

    def take_memory(self) -> bool:
        """Take a little of the memory that will be needed; False: there is nothing to take now."""
        return self.executor.use_idle_time(self.core.scheduler.num_blocks_ever_used)

    def check_alive(self) -> None:
        """Raise EngineDeadError if a rank is lost. A step finds out by itself; an engine without requests looks."""
        self.executor.check_alive()

    def calibrate(self) -> bool:
        """Measure a step; False: there is nothing to measure now."""
        return self.calibration is not None and self.calibration.step()

    def keep_costs(self) -> None:
        """Keep the corrections by running steps for later starts."""
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
) -> StartedEngine:
    """Load the model in `model_folder` and make it answer once. Raises QuireErrors fit for the user.

    Args:
        make_workers: makes the workers from the whole model; None: one worker of this process, and a process for each
            further rank.
        is_first: refuse targets that cannot be reached. An engine that takes over from one that failed keeps them.
        drafter_folder: the folder of the model that drafts for it.
        free_memory_bytes: the bytes of the machine's memory that were free before the first replica began to load;
            None: there is one replica.
        engine_index: the index of the replica.
        interpreters: for further ranks; see start_ranks.
        start_time: since when ranks are awaited; see ThreadExecutor.
    """
    started = time.monotonic()
    if is_external := config.distributed_executor_backend == "external_launcher":
        from quire.engine.external import placed, start_external  # it loads torch

        config = placed(config, is_server=is_server)
    model_config = load_with_drafter(model_folder, drafter_folder, config)
    check_cuts(model_config, config)
    executor, num_ranks = None, config.num_ranks
    if is_external:
        executor = start_external(config, model_config, progress)
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
    parts = [part_of_rank(model_config, config, rank) for rank in range(num_ranks)]
    model_config = cut_of(model_config, config).part()
    try:
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
    except BaseException:
        if executor is not None:
            executor.shutdown()
        else:
            for worker in workers:
                worker.close()
        raise
    try:
        return _answering(running, model_config, started, progress, is_first=is_first, has_clock=executor is None)
    except BaseException:
        running.executor.shutdown()
        raise


def _answering(
    running: RunningWorkers,
    model_config: ModelConfig,
    started: float,
    progress: Progress,
    *,
    is_first: bool,
    has_clock: bool,
) -> StartedEngine:
    """An engine that has produced tokens.

    Args:
        started: the time when the start began.
        has_clock: its decisions may depend on times. Engines that must schedule alike know none.
    """
    resolved, measured = running.resolved, running.measured
    schedule = resolved.scheduler
    arithmetic = step_arithmetic(resolved, model_config)
    first = MeasuredStep(arithmetic.demand(arithmetic.load([0], [measured.num_tokens], 1)), measured.step.seconds)
    guess = assumed_fit(ceilings(resolved, arithmetic, running.facts)).constants
    cost = CostModel(arithmetic, fit([first], guess))
    adapters = None if resolved.lora is None else AdapterRegistry(running.executor, resolved.lora.max_cpu_loras)
    clock = time.monotonic if has_clock else lambda: 0.0
    scheduler = scheduler_of(resolved, model_config, cost, clock, adapters)
    core = EngineCore(
        scheduler, running.executor, schedule.depth, cost, clock, preparer=running.executor, adapters=adapters
    )
    file = calibration_file(resolved, model_config, running.facts)
    if (known := file.read()) is not None:
        cost.calibrate(known)
    predicted = decode_step(cost, 1).seconds
    progress(WARM_UP, 2 / 3, "producing a token")
    laps = produce_tokens(core, has_time_limit=has_clock)
    calibration = None
    # Steps that are much faster than an earlier start has found: the earlier start ran on a busy machine.
    is_slower = known is None or MOST_OVERESTIMATE * min(lap.seconds for lap in laps) < predicted
    if is_slower and has_clock:
        calibration = Calibration(core, cost, guess, _points(core, running, model_config), file.write)
        calibration.run(CALIBRATION_SHARE * (time.monotonic() - started))
    if is_first:
        check_targets(schedule, cost, scheduler.limits)
    waited = max(min(lap.waited for lap in laps), measured.step.waited)
    origin = EARLIER_START if calibration is None else "this start measured steps"
    expected = expectation(schedule.max_num_seqs, cost, origin, waited)
    progress(WARM_UP, 1.0, "first token produced")
    return StartedEngine(
        core,
        resolved.noting({**expected, **peaks(resolved, arithmetic, running.facts)}),
        model_config,
        running.executor,
        calibration,
        KeptCosts(cost, file.write, calibration),
    )


def _points(core: EngineCore, running: RunningWorkers, model: ModelConfig) -> Iterator[Rows]:
    """The steps to measure of an engine."""
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
