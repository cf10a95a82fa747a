"""Ray starts the other nodes of an engine, on machines of a cluster that runs already.

Ray reserves cores and starts processes: a bundle of a placement group for each node, each on a machine of its own, the
first one here. Ray also brings the settings and the cluster key to the nodes. They connect as those of --nnodes do, and
Ray sees nothing of what they say then.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.planning import devices
from quire.planning.binding import cpus_of_processes

NODE_PROGRAM = ("-m", "quire.entry.node")  # arguments of the interpreter
CONNECT_SECONDS = 20.0  # for Ray to reach its cluster
PLACE_SECONDS = 8.0  # for Ray to find machines
END_SECONDS = 6.0  # for a node to end by itself
_HERE = 0.001  # of the resource by which Ray names a machine
# What nodes must have alike. People set others, such as HF_TOKEN, where they start Ray.
_SHARED = (envs.PP_LAYER_PARTITION, envs.ISA, envs.NUM_THREADS, envs.ENGINE_READY_TIMEOUT_S, envs.LOGGING_LEVEL)

logger = get_logger(__name__)


class Node:
    """A process of the Ray cluster, which runs the process of a node."""

    def run(self, settings: bytes, environment: dict[str, str]) -> int:
        """Its exit code.

        Args:
            settings: an EngineConfig as JSON.
        """
        command = [sys.executable, "-P", *NODE_PROGRAM]
        return subprocess.run(command, input=settings, env={**os.environ, **environment}, check=False).returncode


class RayNodes:
    """Places for all nodes, and the nodes that run there. Raises ConfigError: no Ray, no cluster, or no room.

    Attributes:
        key: the cluster key.
        address: where node 0 listens.
        port: 0: any.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.key = wire.cluster_key().decode() if envs.CLUSTER_KEY.get() else secrets.token_hex(32)
        threads = config.num_threads or envs.NUM_THREADS.get()
        bound = sum(map(devices.physical_cores, cpus_of_processes(config)))
        self._cpus = config.num_local_ranks * threads or bound or devices.num_cores()
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # what a node will answer -> its number
        self._places: Any = None
        self._ray, self._is_connected_here = _connected()
        try:
            self._take_places(config)
        except BaseException:
            self.close()
            raise

    def _take_places(self, config: EngineConfig) -> None:
        own = self._ray.get_runtime_context().get_node_id()
        here = next(each["NodeManagerAddress"] for each in self._ray.nodes() if each["NodeID"] == own)
        is_given = {name: config.sources[name] != "default" for name in ("master_addr", "master_port")}
        self.address = config.master_addr if is_given["master_addr"] else here
        self.port = config.master_port if is_given["master_port"] else 0
        bundles: list[dict[str, float]] = [{"CPU": self._cpus} for _ in range(config.nnodes)]
        bundles[0][f"node:{here}"] = _HERE
        self._places = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._places.wait(PLACE_SECONDS):
            raise self._no_room(here)

    def start(self, address: str, port: int) -> None:
        """Start the other nodes, which will come to this address."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        logger.info("Ray starts %d nodes, which come to %s, port %d", self._config.nnodes - 1, address, port)
        shared = {variable.name: text for variable in _SHARED if (text := os.environ.get(variable.name))}
        environment = {**shared, envs.CLUSTER_KEY.name: self.key}
        for node in range(1, self._config.nnodes):
            place = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=node)
            remote = self._ray.remote(Node).options(num_cpus=self._cpus, scheduling_strategy=place, max_restarts=0)
            config = replace(
                self._config, node_rank=node, headless=True, master_addr=address, master_port=port, hf_token=None
            )
            actor = remote.remote()
            self._actors.append(actor)
            self._runs[actor.run.remote(msgspec.json.encode(config), environment)] = node

    def check(self) -> None:
        """Raise ConfigError if a node has ended."""
        for run in self._ray.wait(list(self._runs), timeout=0)[0]:
            try:
                how = f"ended with exit code {self._ray.get(run)}"
            except Exception as error:  # of the node, in any form that Ray gives it
                how = f"was not started by Ray: {_lines(error)[-1]}"
            raise ConfigError(
                f"Node {self._runs[run]} {how}",
                fix="Look at what it says, here or in Ray's logs; Quire is installed on each machine of the cluster",
                param="distributed_executor_backend",
            )

    def close(self) -> None:
        """Let the nodes end, and give the places back."""
        if self._runs:
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=END_SECONDS)
        for actor in self._actors:
            self._ray.kill(actor)
        self._runs.clear()
        self._actors.clear()
        if self._places is not None:
            self._ray.util.remove_placement_group(self._places)
        if self._is_connected_here:
            self._ray.shutdown()

    def _no_room(self, here: str) -> ConfigError:
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        machines = []
        for each in self._ray.nodes():
            if each["Alive"]:
                count, total = free.get(each["NodeID"], {}).get("CPU", 0), each["Resources"].get("CPU", 0)
                which = " (this one)" if each["NodeManagerAddress"] == here else ""
                lacks = f", {self._cpus - count:g} too few" if count < self._cpus else ""
                machines.append(f"{each['NodeManagerAddress']}{which} has {count:g} of {total:g} CPUs free{lacks}")
        return ConfigError(
            f"Ray has no room for {self._config.nnodes} nodes: " + "; ".join(machines),
            value=f"{len(machines)} machines",
            expected=f"{self._config.nnodes} machines with {self._cpus} free CPUs each, this one among them",
            fix="Start Ray on more machines (`ray start --address`), or give a smaller --nnodes or --num-threads",
            param="distributed_executor_backend",
        )


def _lines(error: Exception) -> list[str]:
    return (str(error).strip() or type(error).__name__).splitlines()


def _connected() -> tuple[Any, bool]:
    """Ray, connected to its cluster, and whether this is new. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed",
            value="ray",
            fix="Install it on each machine: pip install 'quire[ray]', or leave --distributed-executor-backend out",
            param="distributed_executor_backend",
        ) from None
    if ray.is_initialized():
        return ray, False
    try:
        _connect(ray)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"No Ray cluster is reached: {_lines(error)[0]}",
            value=os.environ.get("RAY_ADDRESS"),
            fix="Start one with `ray start --head`, and `ray start --address` on other machines, or set RAY_ADDRESS",
            param="distributed_executor_backend",
        ) from None
    return ray, True


def _connect(ray: Any) -> None:
    """Raises what Ray raises, and TimeoutError: Ray may wait without an end for a machine that does not answer."""
    connection: Future[None] = Future()

    def connect() -> None:
        try:
            ray.init(address="auto", configure_logging=False)
            connection.set_result(None)
        except BaseException as error:
            connection.set_exception(error)

    # Outside the main thread Ray leaves the handler of SIGTERM alone, which it would take, and warns of that.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM handler" not in record.getMessage())
    threading.Thread(target=connect, name="quire-ray", daemon=True).start()  # nobody waits for its end
    try:
        connection.result(CONNECT_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {CONNECT_SECONDS:g} seconds") from None
