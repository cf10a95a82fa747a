"""Lets Ray start the other nodes of an engine, each on a machine of its own. Node 0 is on this machine.

The nodes connect in the same way as with --nnodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.engine.ray_cluster import RayCluster, last_line
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.planning import devices
from quire.planning.binding import cpus_of_processes

NODE_PROGRAM = ("-m", "quire.entry.node")  # arguments of the interpreter
END_SECONDS = 6.0  # the time in which a node may end by itself

logger = get_logger(__name__)


class RayNodes:
    """Reserves places for all nodes in a Ray cluster, and starts nodes there.

    Attributes:
        key: the cluster key.
        address: the address at which node 0 listens.
        port: the port at which node 0 listens; 0: the system chooses one.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or it has no room.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        threads = config.num_threads or envs.NUM_THREADS.get()
        bound = sum(map(devices.physical_cores, cpus_of_processes(config)))
        self._needs = {"CPU": config.num_local_ranks * threads or bound or devices.num_cores()}
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # the future answer of a node -> the number of the node
        self._cluster = RayCluster(config, "distributed_executor_backend")
        self.key, self.address = self._cluster.key, self._cluster.address
        self.port = config.master_port if config.sources["master_port"] != "default" else 0
        count = config.nnodes
        try:
            self._cluster.take_places(
                [self._needs] * count,
                "STRICT_SPREAD",
                is_first_here=True,
                whom=f"{count} nodes",
                expected=f"{count} machines with {self._needs['CPU']} free CPUs each, this one among them",
            )
        except BaseException:
            self.close()
            raise

    def start(self, address: str, port: int) -> None:
        """Start the other nodes. They will connect to this address."""
        logger.info("Ray starts %d nodes, which connect to %s, port %d", self._config.nnodes - 1, address, port)
        for node in range(1, self._config.nnodes):
            config = replace(
                self._config, node_rank=node, headless=True, master_addr=address, master_port=port, hf_token=None
            )
            actor, run = self._cluster.run(node, NODE_PROGRAM, msgspec.json.encode(config), self._needs)
            self._actors.append(actor)
            self._runs[run] = node

    def check(self) -> None:
        """Raise ConfigError if a node has ended."""
        ray = self._cluster.ray
        for run in ray.wait(list(self._runs), timeout=0)[0]:
            try:
                how = f"ended with exit code {ray.get(run)}"
            except Exception as error:  # an error of the node; Ray may raise errors of any class
                how = f"was not started by Ray: {last_line(error)}"
            raise ConfigError(
                f"Node {self._runs[run]} {how}",
                fix="Look at what it says, here or in Ray's logs; Quire is installed on each machine of the cluster",
                param="distributed_executor_backend",
            )

    def close(self) -> None:
        """Let the nodes end, and give the reserved places back."""
        if self._runs:
            self._cluster.ray.wait(list(self._runs), num_returns=len(self._runs), timeout=END_SECONDS)
        for actor in self._actors:
            self._cluster.end(actor)
        self._runs.clear()
        self._actors.clear()
        self._cluster.close()
