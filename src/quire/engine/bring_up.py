"""Takes workers through their life, up to the first step. They report facts, the engine decides, and they obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Semaphore

from quire.config import EngineConfig
from quire.cost.collectives import Links
from quire.cost.collectives import slowest as slowest_links
from quire.cost.devices import Ceilings
from quire.engine.executor import InlineExecutor, LanesExecutor, PipelineExecutor, ThreadExecutor
from quire.errors import ConfigError
from quire.life_cycle import CacheSize, Measured, WorkerExecutor, Workers, WorkerSettings
from quire.logs import get_logger
from quire.messages import WARM_UP, Progress
from quire.model_config import ModelConfig
from quire.planning.binding import bound_facts, is_bound
from quire.planning.cut_stages import grid_of
from quire.planning.memory_plan import (
    MemoryFacts,
    plan_kv_cache,
    planned_weight_bytes,
    weights_do_not_fit,
    with_later_bytes,
)
from quire.planning.replicas import share_of_machine, share_of_memory
from quire.resolve import DeviceFacts, resolve, shown_bytes
from quire.settings import Planned, Resolved

logger = get_logger(__name__)


@dataclass(frozen=True)
class RunningWorkers:
    """Workers that are ready for steps."""

    executor: WorkerExecutor
    resolved: Planned
    facts: DeviceFacts
    measured: Measured  # the times of the slowest of them
    num_ranks: int
    ceilings: Ceilings | None  # of all of them together; None: not measured
    links: Links  # between them


def bring_up(
    config: EngineConfig,
    model_config: ModelConfig,
    workers: Workers,
    *,
    is_server: bool,
    progress: Progress,
    free_memory_bytes: int | None = None,
    parts: Sequence[ModelConfig] = (),
    executor: WorkerExecutor | None = None,
    start_time: float | None = None,
) -> RunningWorkers:
    """Settle everything and get the workers ready. Raises ConfigError, WeightsError or MemoryPlanError.

    Args:
        model_config: the config of all layers, with the largest part of each.
        free_memory_bytes: the bytes of the machine's memory that were free before the first replica began to load;
            None: there is one replica.
        parts: the part that each worker holds; none: the whole model.
        executor: the executor of the workers; None: the workers are of this engine alone, and it makes one.
        start_time: see ThreadExecutor.
    """
    wants_gpu = config.device != "cpu"
    if executor is None and len(workers) > 1:
        executor = _executor_of_ranks(workers, config, start_time)
    found = [workers[0].facts(wants_gpu)] if executor is None else executor.facts(wants_gpu)
    facts = _share_of_rank(config, least_facts(found, _names(workers, len(found))))
    resolved = resolve(config, model_config, facts, is_server=is_server)
    # Stages on CPUs share one memory, and each GPU has its own.
    checked = list(parts) if parts and resolved.device.device == "cuda" else [model_config]
    _check_weights(config, checked, resolved, facts, free_memory_bytes)
    executor = executor or _executor_of_one(workers, resolved)
    settings = WorkerSettings.of(resolved)
    progress("load", 0.0, "")
    executor.load(settings)
    progress(WARM_UP, 0.0, "measuring working memory")
    measured = executor.measure()
    memories = [each.memory for each in measured]
    if free_memory_bytes is not None and resolved.device.device == "cpu":
        own_bytes = free_memory_bytes // config.num_local_ranks
        memories = [share_of_memory(each, config.num_local_replicas, own_bytes) for each in memories]
    planned, memory = plan_least(config, parts or [model_config] * len(workers), resolved, memories)
    if resolved.device.device == "cuda":
        warn_about_dropped_sizes(resolved)
    elif planned.memory.kv_cache_bytes + memory.work_bytes > memory.free_bytes:
        logger.warning(
            "the KV cache may grow to %s, but only %s are free: if it grows so far, the system may end this process",
            shown_bytes(planned.memory.kv_cache_bytes),
            shown_bytes(memory.free_bytes),
        )
    progress(WARM_UP, 1 / 3, "allocating the KV cache")
    num_blocks, num_bytes = planned.memory.num_blocks, planned.memory.kv_cache_bytes
    executor.allocate(CacheSize(num_blocks, num_bytes, planned.model.max_model_len))
    executor.capture()
    slowest, reached = max(measured, key=lambda each: each.step.seconds), [each.ceilings for each in measured]
    links = slowest_links(each.links for each in measured)
    return RunningWorkers(executor, planned, facts, slowest, len(measured), _together(reached), links)


def _together(ceilings: Sequence[Ceilings | None]) -> Ceilings | None:
    """The ceilings of ranks that compute at the same time; None: a rank did not measure."""
    known = [each for each in ceilings if each is not None]
    if len(known) < len(ceilings):
        return None
    return Ceilings(sum(each.read_bandwidth for each in known), sum(each.flops for each in known))


def _share_of_rank(config: EngineConfig, facts: DeviceFacts) -> DeviceFacts:
    """The cores and the memory that a rank has, beside other replicas and ranks of its machine."""
    if is_bound(config):
        facts = bound_facts(facts, config, facts.num_cores)
    facts = share_of_machine(facts, config)
    return facts.shared_by(config.num_local_ranks, config.pipeline_parallel_size)


def _check_weights(
    config: EngineConfig,
    parts: Sequence[ModelConfig],
    resolved: Resolved,
    facts: DeviceFacts,
    free_memory_bytes: int | None,
) -> None:
    """Raise MemoryPlanError for weights that cannot fit, before minutes are spent on reading them.

    Args:
        parts: models whose weights need a memory each: of each rank with a GPU, or the whole model on a CPU.
    """
    total_bytes, _ = facts.memory_of(resolved.device.device)
    if free_memory_bytes is not None and resolved.device.device == "cpu":
        total_bytes = min(total_bytes, free_memory_bytes // (config.num_local_replicas * config.tensor_parallel_size))
    planned_bytes = max(planned_weight_bytes(resolved, part) for part in parts)
    if planned_bytes >= total_bytes:
        raise weights_do_not_fit(resolved, planned_bytes, total_bytes, config.num_local_replicas)


def _names(workers: Workers, num_ranks: int) -> list[str]:
    """The names of all ranks, as text for people. Those of ranks that another program has started are not known."""
    if len(workers) == num_ranks:
        return [worker.describe() for worker in workers]
    return [f"Rank {rank} of {num_ranks}" for rank in range(num_ranks)]


def least_facts(facts: Sequence[DeviceFacts], names: Sequence[str]) -> DeviceFacts:
    """The facts of all ranks. Raises ConfigError for ranks with different kernels, and for ranks with the same GPU.

    Args:
        names: the names of the ranks, as text for people.
    """
    first = facts[0]
    gpus = [each.gpu for each in facts if each.gpu is not None]
    if gpus and (why := [f"{name}: {each.no_gpu}" for name, each in zip(names, facts, strict=True) if not each.gpu]):
        raise ConfigError(
            "Some ranks have a GPU, and others have none that they can use",
            value="; ".join(why),
            expected=f"a GPU of its own for each of {len(facts)} ranks. The first one sees {gpus[0].num_visible}",
            fix="Lower --tensor-parallel-size or --pipeline-parallel-size, or use --device cpu",
            param="tensor_parallel_size",
        )
    owners: dict[str, str] = {}
    for name, uuid in zip(names, (gpu.uuid for gpu in gpus), strict=False):
        if uuid and owners.setdefault(uuid, name) != name:
            raise ConfigError(
                "Two ranks have the same GPU",
                value=f"{owners[uuid]}; {name}: {uuid}",
                expected=f"a GPU of its own for each of {len(facts)} ranks",
                fix="Give each process its own GPU in CUDA_VISIBLE_DEVICES, or all of them the same list of all GPUs, "
                "or lower --tensor-parallel-size or --pipeline-parallel-size",
                param="tensor_parallel_size",
            )
    kinds = {
        each.isa if each.gpu is None else f"{each.isa} and {each.gpu.isa}": name
        for name, each in zip(names, facts, strict=True)
    }
    if len(kinds) > 1:
        raise ConfigError(
            "The devices of one engine are not alike",
            value="; ".join(f"{name}: {kind}" for kind, name in kinds.items()),
            fix="Run an engine on devices of one kind",
        )
    gpu = first.gpu and replace(
        first.gpu,
        # A program that starts ranks may let each of them see its own GPU only.
        num_visible=len(gpus) if all(each.num_visible == 1 for each in gpus) else first.gpu.num_visible,
        total_memory_bytes=min(each.total_memory_bytes for each in gpus),
        free_memory_bytes=min(each.free_memory_bytes for each in gpus),
    )
    return replace(
        first,
        gpu=gpu,
        num_cores=min(each.num_cores for each in facts),
        total_memory_bytes=min(each.total_memory_bytes for each in facts),
        free_memory_bytes=min(each.free_memory_bytes for each in facts),
    )


def plan_least(
    config: EngineConfig, parts: Sequence[ModelConfig], resolved: Resolved, memories: Sequence[MemoryFacts]
) -> tuple[Planned, MemoryFacts]:
    """The plan of the rank with the fewest blocks, and its memory. Raises MemoryPlanError if not even one request
    fits.
    """
    memories = [with_later_bytes(resolved, part, memory) for part, memory in zip(parts, memories, strict=True)]
    plans = [
        (plan_kv_cache(config, part, resolved, memory), memory) for part, memory in zip(parts, memories, strict=True)
    ]
    return min(plans, key=lambda plan: plan[0].memory.num_blocks)


def warn_about_dropped_sizes(resolved: Resolved) -> None:
    """Log what was wished and is not captured."""
    sizes = WorkerSettings.of(resolved).graph_sizes()
    if sizes.dropped:
        logger.warning("not every size of --cudagraph-capture-sizes is captured: %s", sizes.describe())
    bound = resolved.settings["max_cudagraph_capture_size"]
    if resolved.device.cudagraph_mode != "NONE" and bound.detail:
        logger.warning("--max-cudagraph-capture-size is taken as %d: %s", bound.value, bound.detail)


def _executor_of_ranks(workers: Workers, config: EngineConfig, start_time: float | None) -> WorkerExecutor:
    """Threads: ranks compute side by side."""
    if config.pipeline_parallel_size > 1:
        kind: type[ThreadExecutor] = PipelineExecutor
    else:
        kind = LanesExecutor if config.num_lanes > 1 else ThreadExecutor
    return kind(workers, start_time, config.distributed_timeout_seconds, loads=_loads(config))


def _loads(config: EngineConfig) -> list[Semaphore]:
    """For each rank, the semaphore of its machine; none: all ranks read weights at once."""
    if config.max_parallel_loading_workers is None:
        return []
    grid = grid_of(config)
    of_machines = [Semaphore(config.max_parallel_loading_workers) for _ in range(grid.num_nodes)]
    return [of_machines[grid.node(rank)] for rank in range(grid.size)]


def _executor_of_one(workers: Workers, resolved: Resolved) -> WorkerExecutor:
    """A thread for a CPU that computes while the next step is scheduled: a GPU does by itself."""
    is_behind = resolved.scheduler.async_scheduling and resolved.device.device == "cpu"
    return ThreadExecutor(workers) if is_behind else InlineExecutor(workers)
