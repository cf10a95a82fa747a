"""The share of one of several replicas: equal parts of the machine's cores and memory, or a GPU of its own."""

from __future__ import annotations

from dataclasses import replace

from quire import envs
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.planning import devices
from quire.planning.binding import is_bound
from quire.planning.memory_plan import MemoryFacts
from quire.resolve import DeviceFacts

logger = get_logger(__name__)


def check_machine(config: EngineConfig) -> None:
    """Raise ConfigError for more replicas than this machine has cores or GPUs for. Nothing is started or read.

    Threads of replicas and ranks without a core of their own are only a warning.
    """
    num_replicas, num_cores = config.num_local_replicas, devices.num_cores()
    if num_replicas > 1:
        _check_count(num_replicas, num_cores, "core")
        if config.device != "cpu" and (num_gpus := devices.num_gpus()):
            each = config.num_local_ranks
            _check_count(
                num_replicas,
                (len(config.gpu_ids) or num_gpus) // each,
                "GPU" if each == 1 else f"group of {each} GPU",
            )
    num_processes = num_replicas * config.num_local_ranks
    if num_processes > 1 and not is_bound(config) and not has_own_cores(config, num_cores):
        logger.warning(
            "%d processes with %d threads in all share %d cores: they slow each other down",
            num_processes,
            _num_threads(config, num_cores),
            num_cores,
        )


def has_own_cores(config: EngineConfig, num_cores: int) -> bool:
    """Whether the threads of all ranks of all replicas have a core of a machine each.

    Args:
        num_cores: the cores of the machine, or of this process where processes are bound.
    """
    if is_bound(config):
        return (config.num_threads or envs.NUM_THREADS.get()) <= num_cores
    return _num_threads(config, num_cores) <= num_cores


def num_early_ranks(config: EngineConfig) -> int:
    """The processes of ranks that an engine on this machine starts before the model's files tell which degrees are
    legal.
    """
    if config.distributed_executor_backend == "external_launcher":
        return 0
    num_own = 0 if config.headless else 1  # the first rank is in the engine's process
    return min(config.num_local_ranks, devices.num_cores()) - num_own


def _num_threads(config: EngineConfig, num_cores: int) -> int:
    """The threads of all processes that compute. If no number is given, each rank takes its share of the cores."""
    num_ranks = config.num_local_replicas * config.num_local_ranks
    return num_ranks * (config.num_threads or envs.NUM_THREADS.get() or max(num_cores // num_ranks, 1))


def _check_count(num_replicas: int, count: int, what: str) -> None:
    if num_replicas > count:
        fix = f"Lower --data-parallel-size to {count}" if count > 1 else "Leave --data-parallel-size out"
        raise ConfigError(
            f"There are more replicas than {what}s, and each needs one of its own",
            value=num_replicas,
            expected=f"at most {count}",
            fix=fix + (", or use --device cpu" if "GPU" in what else ""),
            param="data_parallel_size",
        )


def share_of_machine(device: DeviceFacts, config: EngineConfig) -> DeviceFacts:
    """The share of each replica of `config`. Raises ConfigError for fewer cores than replicas."""
    num_replicas = config.num_local_replicas
    if num_replicas == 1:
        return device
    _check_count(num_replicas, device.num_cores, "core")
    return replace(
        device,
        num_cores=device.num_cores // num_replicas,
        total_memory_bytes=device.total_memory_bytes // num_replicas,
        free_memory_bytes=device.free_memory_bytes // num_replicas,
    )


def share_of_memory(memory: MemoryFacts, num_replicas: int, free_bytes: int) -> MemoryFacts:
    """The memory that a replica on the CPU may plan with: its share of the free memory, less the memory that it has
    taken.

    Args:
        memory: measured by the replica. Others may have taken their share by then, or not yet.
        free_bytes: bytes of the machine's memory that were free before any replica began to load.
    """
    own = free_bytes // num_replicas - memory.taken_bytes
    return replace(memory, total_bytes=memory.total_bytes // num_replicas, free_bytes=min(memory.free_bytes, own))
