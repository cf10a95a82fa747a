"""What one of several replicas has of a machine: an equal share of its cores and of its memory, or a GPU of its own."""

from __future__ import annotations

from dataclasses import replace

from quire import envs
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.planning import devices
from quire.planning.memory_plan import MemoryFacts
from quire.resolve import DeviceFacts

logger = get_logger(__name__)


def check_machine(config: EngineConfig) -> None:
    """Raise ConfigError for more replicas than this machine has cores or GPUs for. Nothing is started or read."""
    num_replicas = config.data_parallel_size
    if num_replicas == 1:
        return
    _check_count(num_replicas, devices.num_cores(), "core")
    if config.device != "cpu" and (num_gpus := devices.num_gpus()):
        _check_count(num_replicas, num_gpus, "GPU")
    num_threads = num_replicas * config.num_local_ranks * (config.num_threads or envs.NUM_THREADS.get())
    if num_threads > devices.num_cores():
        logger.warning(
            "%d replicas with %d threads in all share %d cores: each other's threads hold them up",
            num_replicas,
            num_threads,
            devices.num_cores(),
        )


def _check_count(num_replicas: int, count: int, what: str) -> None:
    if num_replicas > count:
        fix = f"Lower --data-parallel-size to {count}" if count > 1 else "Leave --data-parallel-size out"
        raise ConfigError(
            f"There are more replicas than {what}s, and each needs one of its own",
            value=num_replicas,
            expected=f"at most {count}",
            fix=fix + (", or use --device cpu" if what == "GPU" else ""),
            param="data_parallel_size",
        )


def share_of_machine(device: DeviceFacts, config: EngineConfig) -> DeviceFacts:
    """What each replica of `config` has of a machine. Raises ConfigError for fewer cores than replicas."""
    num_replicas = config.data_parallel_size
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
    """What a replica on the CPU may plan with: its share of what was free, without what it has taken.

    Args:
        memory: measured by the replica. Others may have taken their share by then, or not yet.
        free_bytes: of the machine before any replica began to load.
    """
    own = free_bytes // num_replicas - memory.taken_bytes
    return replace(memory, total_bytes=memory.total_bytes // num_replicas, free_bytes=min(memory.free_bytes, own))
