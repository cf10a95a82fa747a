"""Runs our processes on the machines of a running Ray cluster.

Ray reserves resources for a process and starts it. It also brings the settings and the cluster key to the process.
Later messages do not go through Ray.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from quire import __version__, envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.errors import ConfigError
from quire.logs import get_logger

CONNECT_SECONDS = 20.0  # the time in which Ray must reach its cluster
PLACE_SECONDS = 8.0  # the time in which Ray must find machines
HERE = 0.001  # the amount to ask for of the resource with which Ray marks a machine
# These variables must be the same in all processes. Users set others, such as HF_TOKEN, where they start Ray.
_SHARED = (envs.PP_LAYER_PARTITION, envs.ISA, envs.NUM_THREADS, envs.ENGINE_READY_TIMEOUT_S, envs.LOGGING_LEVEL)

logger = get_logger(__name__)


class QuireProcess:
    """An actor: a process of the Ray cluster, which runs one of ours."""

    def run(self, program: Sequence[str], settings: bytes, environment: dict[str, str], version: str) -> int:
        """Run a program until it ends, and return its exit code. Raises RuntimeError if Quire has another version here.

        Args:
            program: the arguments of the interpreter.
            settings: a line for the program's standard input. Then the input stays open until the actor ends.
            version: the version of Quire that the caller has.
        """
        if version != __version__:
            raise RuntimeError(f"Quire {__version__} is installed there, and {version} here")
        command, environment = [sys.executable, "-P", *program], {**os.environ, **environment}
        with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=environment) as process:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the program has ended already, and its exit code says how
                process.stdin.write(settings + b"\n")
            return process.wait()


class RayCluster:
    """The connection to a running Ray cluster.

    Args:
        param: the setting that asks for Ray. Errors name it.

    Attributes:
        key: the cluster key.
        address: the address at which other machines reach this one: the one that Ray knows, or --master-addr.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """

    def __init__(self, config: EngineConfig, param: str) -> None:
        self.key = wire.cluster_key().decode() if envs.CLUSTER_KEY.get() else secrets.token_hex(32)
        self._param = param
        self._places: Any = None
        self.ray, self._is_connected_here = _connected(param)
        own = self.ray.get_runtime_context().get_node_id()
        self._here = next(each["NodeManagerAddress"] for each in self.ray.nodes() if each["NodeID"] == own)
        self.address = config.master_addr if config.sources["master_addr"] != "default" else self._here

    def take_places(
        self, bundles: Sequence[Mapping[str, float]], strategy: str, *, is_first_here: bool, whom: str, expected: str
    ) -> None:
        """Reserve resources. Raises ConfigError if Ray has no room.

        Args:
            bundles: the reservations, each on one machine. None of them is larger than the first one.
            strategy: Ray's name of a placement strategy.
            is_first_here: whether the first bundle must be on this machine.
            whom: names what is to be placed, as text for people.
            expected: the expected state of the cluster, as text for people.
        """
        first = {**bundles[0], f"node:{self._here}": HERE} if is_first_here else bundles[0]
        self._places = self.ray.util.placement_group([dict(each) for each in (first, *bundles[1:])], strategy=strategy)
        if not self._places.wait(PLACE_SECONDS):
            raise self._no_room(bundles[0], whom, expected)

    def machines(self) -> dict[int, str]:
        """The machine of each bundle, by Ray's name. A bundle has no entry while its machine is lost."""
        found: dict[int, str] = self.ray.util.placement_group_table(self._places)["bundles_to_node_id"]
        return found

    def in_bundle(self, bundle: int, work: Any, **options: Any) -> Any:
        """Ray's version of a class or a function, which runs in a bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=bundle)
        return self.ray.remote(work).options(scheduling_strategy=place, **options)

    def run(self, bundle: int, program: Sequence[str], settings: bytes, needs: Mapping[str, float]) -> tuple[Any, Any]:
        """Start one of our processes. Returns the actor around it, and a future of its exit code.

        Args:
            program, settings: see QuireProcess.run.
            needs: the resources of the bundle that the process uses: CPU, and GPU if it uses some.
        """
        shared = {variable.name: text for variable in _SHARED if (text := os.environ.get(variable.name))}
        environment = {**shared, envs.CLUSTER_KEY.name: self.key}
        resources = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0)}
        actor = self.in_bundle(bundle, QuireProcess, max_restarts=0, **resources).remote()
        return actor, actor.run.remote(tuple(program), settings, environment, __version__)

    def end(self, actor: Any) -> None:
        """End an actor and its process at once. If Ray cannot be reached, they have ended already."""
        try:
            self.ray.kill(actor)
        except Exception as error:  # Ray may raise errors of any class
            logger.warning("Ray has not ended a process: %s", last_line(error))

    def close(self) -> None:
        """Give the reserved places back. If Ray cannot be reached, they are lost already."""
        places, self._places = self._places, None
        if places is not None:
            try:
                self.ray.util.remove_placement_group(places)
            except Exception as error:  # Ray may raise errors of any class
                logger.warning("Ray has not freed the reserved places: %s", last_line(error))
        if self._is_connected_here:
            self.ray.shutdown()

    def _no_room(self, bundle: Mapping[str, float], whom: str, expected: str) -> ConfigError:
        from ray._private.state import available_resources_per_node

        available, machines = available_resources_per_node(), []
        for each in self.ray.nodes():
            if each["Alive"]:
                free, which = available.get(each["NodeID"], {}), each["NodeManagerAddress"]
                has = [
                    f"{free.get(name, 0):g} of {each['Resources'].get(name, 0):g} {name}s free"
                    + (f", {needed - free.get(name, 0):g} too few" if free.get(name, 0) < needed else "")
                    for name, needed in bundle.items()
                ]
                this = " (this one)" if which == self._here else ""
                machines.append(f"{which}{this} has {' and '.join(has)}")
        return ConfigError(
            f"Ray has no room for {whom}: " + "; ".join(machines),
            value=f"{len(machines)} machines",
            expected=expected,
            fix="Start Ray on more machines (`ray start --address`), or ask for less: fewer of them, or a smaller "
            "--num-threads",
            param=self._param,
        )


def last_line(error: BaseException) -> str:
    """The reason in Ray's error about a process that was not started, or was lost: its last line."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines()]


def _connected(param: str) -> tuple[Any, bool]:
    """The module ray, connected to a cluster, and whether this call has connected it. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "Ray is not installed",
            value="ray",
            fix=f"Install it on each machine: pip install 'quire[ray]', or leave --{param.replace('_', '-')} out",
            param=param,
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
            param=param,
        ) from None
    return ray, True


T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run work on a daemon thread, because Ray may wait for ever for a machine that does not answer."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="quire-ray", daemon=True).start()
    return result


def _connect(ray: Any) -> None:
    """Connect to the cluster. Raises Ray's errors, and TimeoutError."""
    # In the main thread, Ray would replace the handler of SIGTERM. In another thread it only warns that it cannot.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM handler" not in record.getMessage())
    connection = in_background(partial(ray.init, address="auto", configure_logging=False))
    try:
        connection.result(CONNECT_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {CONNECT_SECONDS:g} seconds") from None
