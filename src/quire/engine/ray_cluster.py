"""A Ray cluster that runs already: places on its machines, and our processes there.

Ray reserves the resources of a process and starts it. It also brings the process its settings and the cluster key. It
does not see later messages.
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
HERE = 0.001  # the amount of the resource by which Ray names a machine
# Variables that must be the same in all processes. Users set others, such as HF_TOKEN, where they start Ray.
_SHARED = (envs.PP_LAYER_PARTITION, envs.ISA, envs.NUM_THREADS, envs.ENGINE_READY_TIMEOUT_S, envs.LOGGING_LEVEL)

logger = get_logger(__name__)


class QuireProcess:
    """An actor: a process of the Ray cluster, which runs one of ours."""

    def run(self, program: Sequence[str], settings: bytes, environment: dict[str, str], version: str) -> int:
        """Its exit code. Raises RuntimeError where Quire has another version.

        Args:
            program: arguments of the interpreter.
            settings: a line on its standard input, which then stays open: its end is the end of the actor.
        """
        if version != __version__:
            raise RuntimeError(f"Quire {__version__} is installed there, and {version} here")
        command, environment = [sys.executable, "-P", *program], {**os.environ, **environment}
        with subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=environment) as process:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already, and its exit code says how
                process.stdin.write(settings + b"\n")
            return process.wait()


class RayCluster:
    """Raises ConfigError: no Ray, or no cluster.

    Args:
        param: the setting that asks for Ray.

    Attributes:
        key: the cluster key.
        address: the address of this machine in the network of the others: as Ray knows it, or --master-addr.
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
        """Raises ConfigError if Ray has no room.

        Args:
            bundles: the reservations. Reservations of other machines need no more than the first one.
            is_first_here: the first bundle is on this machine.
            whom: is to be placed, for people.
            expected: the expected state of the cluster, for people.
        """
        first = {**bundles[0], f"node:{self._here}": HERE} if is_first_here else bundles[0]
        self._places = self.ray.util.placement_group([dict(each) for each in (first, *bundles[1:])], strategy=strategy)
        if not self._places.wait(PLACE_SECONDS):
            raise self._no_room(bundles[0], whom, expected)

    def machines(self) -> dict[int, str]:
        """Where each bundle is now, by Ray's names of machines. A bundle whose machine is lost may have none."""
        found: dict[int, str] = self.ray.util.placement_group_table(self._places)["bundles_to_node_id"]
        return found

    def in_bundle(self, bundle: int, work: Any, **options: Any) -> Any:
        """A class or a function as Ray runs it there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=bundle)
        return self.ray.remote(work).options(scheduling_strategy=place, **options)

    def run(self, bundle: int, program: Sequence[str], settings: bytes, needs: Mapping[str, float]) -> tuple[Any, Any]:
        """Start one of our processes -> the actor around it, and its future exit code.

        Args:
            needs: CPU, and GPU if it uses some, of what its bundle has.
        """
        shared = {variable.name: text for variable in _SHARED if (text := os.environ.get(variable.name))}
        environment = {**shared, envs.CLUSTER_KEY.name: self.key}
        resources = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0)}
        actor = self.in_bundle(bundle, QuireProcess, max_restarts=0, **resources).remote()
        return actor, actor.run.remote(tuple(program), settings, environment, __version__)

    def end(self, actor: Any) -> None:
        """End an actor at once, with its process. If Ray is not reached, it has ended already."""
        try:
            self.ray.kill(actor)
        except Exception as error:  # Ray may raise errors of any class
            logger.warning("Ray has not ended a process: %s", last_line(error))

    def close(self) -> None:
        """Give the places back. If Ray is not reached, they are lost already."""
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
    """The reason, from Ray's error about a process that was not started or is lost."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines()]


def _connected(param: str) -> tuple[Any, bool]:
    """Ray, connected to its cluster, and whether this is new. Raises ConfigError."""
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
    """Runs on a daemon thread: Ray may wait without an end for a machine that does not answer."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="quire-ray", daemon=True).start()
    return result


def _connect(ray: Any) -> None:
    """Raises what Ray raises, and TimeoutError."""
    # Ray would take the handler of SIGTERM. Outside the main thread it does not, and warns about it.
    logging.getLogger("ray._private.worker").addFilter(lambda record: "SIGTERM handler" not in record.getMessage())
    connection = in_background(partial(ray.init, address="auto", configure_logging=False))
    try:
        connection.result(CONNECT_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer in {CONNECT_SECONDS:g} seconds") from None
