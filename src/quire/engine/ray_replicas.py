"""Lets Ray place the replicas of a server on the machines of its cluster, and starts an engine process for each.

A placement group holds the places as long as the server runs. Each engine process is the child of an actor of its own.
A replica that is restarted gets a new actor in the same place. The engine process connects to the server.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.engine.ray_cluster import RayCluster, last_line
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.messages import EngineLaunch
from quire.planning import devices

REPLICA_PROGRAM = ("-m", "quire.entry.replica")  # arguments of the interpreter
MEASURE_SECONDS = 60.0  # the time in which machines load Quire and report their free memory

logger = get_logger(__name__)


class RayReplicas:
    """Reserves places for all replicas.

    Without --data-parallel-size-local, Ray spreads the replicas over its machines. With it, each bundle holds this
    number of replicas on a machine of its own, and the last bundle may hold fewer. The first bundle is on this machine.

    Attributes:
        key: the cluster key.
        address: the address at which engines reach this machine.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or it has no room.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        count, self._bundle_size = config.data_parallel_size, config.num_local_replicas
        threads = config.num_threads or envs.NUM_THREADS.get()
        cpus = config.num_local_ranks * threads or max(devices.num_cores() // self._bundle_size, 1)
        self._needs = {"CPU": cpus}  # the resources of a replica
        if config.device == "cuda" or (config.device == "auto" and devices.has_gpu()):
            self._needs["GPU"] = config.num_local_ranks
        self._cluster = RayCluster(config, "data_parallel_backend")
        self.key, self.address = self._cluster.key.encode(), self._cluster.address
        try:
            self._take_places(count)
            self._free_bytes = self._measure_memory()
        except BaseException:
            self.close()
            raise

    def _take_places(self, count: int) -> None:
        size, is_local = self._bundle_size, self._config.data_parallel_size_local is not None
        sizes = [min(size, count - first) for first in range(0, count, size)]
        bundles = [{name: each * number for name, number in self._needs.items()} for each in sizes]
        room = " and ".join(f"{name} {number}" for name, number in self._needs.items())
        where = f": {size} here, and at most {size} on each of {len(sizes) - 1} other machines" if is_local else ""
        self._cluster.take_places(
            bundles,
            "STRICT_SPREAD" if is_local else "SPREAD",
            is_first_here=is_local,
            whom=f"{count} replicas",
            expected=f"{room} for each replica{where}",
        )
        addresses = {each["NodeID"]: each["NodeManagerAddress"] for each in self._cluster.ray.nodes()}
        places = ", ".join(f"{index} on {addresses[machine]}" for index, machine in enumerate(self._machines()))
        logger.info("Ray has places for the replicas: %s", places)
        logger.info("replicas connect to this machine at %s", self.address)

    def _machines(self) -> list[str]:
        """The present machine of each replica. It is "" if the machine is lost and Ray looks for another one."""
        machines = self._cluster.machines()
        return [machines.get(each // self._bundle_size) or "" for each in range(self._config.data_parallel_size)]

    def _measure_memory(self) -> dict[str, int]:
        """The free memory of each machine that several replicas share, before one of them begins to load."""
        counts = Counter(self._machines())
        shared = {machine: bundle for bundle, machine in self._cluster.machines().items() if counts[machine] > 1}
        measure = devices.free_memory_bytes
        asked = {name: self._cluster.in_bundle(bundle, measure, num_cpus=0).remote() for name, bundle in shared.items()}
        try:
            found = self._cluster.ray.get(list(asked.values()), timeout=MEASURE_SECONDS)
        except Exception as error:  # an error of another machine; Ray may raise errors of any class
            raise ConfigError(
                f"The free memory of Ray's machines is not known: {last_line(error)}",
                fix="Look at Ray's logs, and check that Quire is installed on each machine of the cluster",
                param="data_parallel_backend",
            ) from None
        return dict(zip(asked, found, strict=True))

    def start(self, index: int, launch: EngineLaunch) -> tuple[Any, Future[int]]:
        """Start an engine. Returns its actor, and a future of the exit code of its process.

        Args:
            index: the index of the replica.
            launch: the launch, without the fields that depend on the machine.
        """
        machines = self._machines()
        count = max(machines.count(machines[index]), 1) if machines[index] else 1
        launch.config = replace(self._config, data_parallel_size_local=count, hf_token=None)
        launch.free_memory_bytes = self._free_bytes.get(machines[index])
        num_ranks = min(self._config.num_local_ranks, self._needs["CPU"]) - 1  # they load their libraries meanwhile
        actor, run = self._cluster.run(
            index // self._bundle_size, (*REPLICA_PROGRAM, str(num_ranks)), msgspec.json.encode(launch), self._needs
        )
        ended: Future[int] = run.future()
        return actor, ended

    def end(self, actor: Any) -> None:
        """End an actor and its process at once."""
        self._cluster.end(actor)

    def close(self) -> None:
        """Give the reserved places back."""
        self._cluster.close()
