"""The workers of an engine. The first rank is a worker in this process; each other rank is a process."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.distributed import wire
from quire.distributed.group import STOPPED, Failing
from quire.distributed.layout import Grid
from quire.distributed.network import cause_of
from quire.distributed.pulse import Pulse, is_silence, why
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine.nodes import Joined, NodeLost, Starting, decode, let_in
from quire.engine.rank_messages import (
    MOST_MESSAGE_BYTES,
    AddAdapter,
    Allocate,
    Answer,
    AskFacts,
    Capture,
    DropAdapter,
    Failed,
    Load,
    LoadAdapter,
    Measure,
    RankLaunch,
    Report,
    StepOrders,
    ToRank,
    UseIdleTime,
    decode_from_rank,
    encode,
)
from quire.engine.rank_spawn import RankInterpreter
from quire.errors import AdapterError, ConfigError, EngineDeadError
from quire.life_cycle import AdapterLoad, CacheSize, Measured, Worker, Workers, WorkerSettings
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.planning import devices
from quire.planning.binding import bind, cpus_of_processes
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.planning.replicas import has_own_cores
from quire.resolve import DeviceFacts
from quire.schedule import Pending, ScheduledBatch, StepResult
from quire.worker.worker import DeviceWorker

LOOK_SECONDS = 0.25  # seconds between two checks of a process
CLOSE_SECONDS = 5.0  # the time in which a process may end by itself
SAY_SECONDS = 1.0  # the time in which a node or a rank can say why it ends
# Of all orders that a rank has not answered yet: the system takes as many bytes although the rank hangs.
MOST_BEGUN_BYTES = 64 << 10

logger = get_logger(__name__)


def start_ranks(
    config: EngineConfig,
    model_folder: Path,
    model_config: ModelConfig,
    progress: Progress,
    *,
    drafter_folder: Path | None,
    is_server: bool,
    engine_index: int,
    interpreters: list[RankInterpreter],
) -> Workers:
    """Start the ranks of an engine, on this machine and on others. They still load their libraries when this returns.

    Args:
        model_config: the config of the whole model.
        drafter_folder: the folder of the model that drafts; None: no model drafts.
        engine_index: the index of the replica.
        interpreters: interpreters for ranks of this machine. Used ones are removed, and missing ones are started.

    Raises:
        ConfigError: other nodes have not come, or Ray cannot start them.
    """
    grid = grid_of(config)
    cpus = cpus_of_processes(config)[engine_index * grid.num_local :]
    if cpus:
        bind(cpus[0])
    if grid.size == 1:
        return (DeviceWorker(model_config, progress),)
    if config.headless:
        raise ConfigError(
            "This machine computes for machine 0, and has no engine",
            value=config.node_rank,
            fix="Start `quire serve --headless` with the same flags here",
            param="headless",
        )
    if grid.num_nodes == 1 and config.distributed_executor_backend == "ray":
        logger.warning(
            "all ranks are on this machine, so Ray has nothing to start; --nnodes spreads them over machines"
        )
    joined, starting, others, orders = Joined(), None, list[Worker](), StepOrders()
    with ExitStack() as on_error:
        if grid.num_nodes > 1:
            if starting := _starting(config):
                on_error.callback(starting.close)
            joined = let_in(
                config, model_folder, lambda detail: progress("load", 0.0, detail), starting, drafter_folder
            )
            for peer in joined.peers():
                on_error.callback(peer.close)
                on_error.callback(wire.end, peer)
        with ExitStack() as given:  # it closes the descriptors that the processes have got
            memory = make_memory(grid)
            given.callback(os.close, memory)
            own = joined.links.pop(0, {})
            for peer in (peer for links in joined.links.values() for peer in links.values()):
                given.callback(peer.close)
            ranks = ranks_on(
                memory,
                0,
                grid,
                {other: peer.detach() for other, peer in own.items()},
                has_own_cores=has_own_cores(config, devices.num_cores()),
                timeout_seconds=config.distributed_timeout_seconds,
            )
            on_error.callback(ranks.close)
            model, drafter = str(model_folder), None if drafter_folder is None else str(drafter_folder)
            for rank in grid.ranks_of(0)[1:]:
                own_cpus = cpus[rank] if cpus else set[int]()
                interpreter = interpreters.pop() if interpreters else RankInterpreter()
                on_error.callback(interpreter.end)
                own_links = {other: peer.fileno() for other, peer in joined.links.get(rank, {}).items()}
                own_gpu = None if config.device == "cpu" else devices.gpu_of_rank(rank)
                launch = RankLaunch(
                    config, model, drafter, rank, -1, memory, None, is_server, own_links, own_cpus, own_gpu
                )
                others.append(process := RankProcess(launch, grid, ranks.failing, orders, interpreter))
                on_error.callback(process.close)
        homes = dict[int, Home]()
        for node, peer in joined.homes.items():
            there = grid.ranks_of(node)
            ends = [uses[rank].dup() for uses in (joined.ranks, joined.adapters) for rank in there if rank in uses]
            homes[node] = Home(peer, there[0], ranks.failing, ends)
            on_error.callback(homes[node].close)
        for rank, peer in sorted(joined.ranks.items()):
            last, home = starting if rank == grid.size - 1 else None, homes[grid.node(rank)]
            connection = Connection(peer.detach())
            adapters = Connection(joined.adapters[rank].detach()) if joined.adapters else None
            others.append(RemoteRank(rank, grid, ranks.failing, orders, connection, adapters, home, last))
        first = DeviceWorker(part_of_rank(model_config, config, 0), progress, ranks=ranks)
        on_error.pop_all()
    return (first, *others)


def _starting(config: EngineConfig) -> Starting | None:
    """The object that starts the other nodes; None: people start them. Raises ConfigError."""
    if config.distributed_executor_backend != "ray":
        return None
    from quire.engine.ray_nodes import RayNodes

    return RayNodes(config)


def rank_name(rank: int, grid: Grid) -> str:
    """The name of a rank, as text for people."""
    name = f"Rank {rank} of {grid.size}"
    return name if grid.num_stages == 1 else f"{name}, in stage {grid.stage(rank)} of {grid.num_stages}"


class OtherRank(ABC):
    """A life_cycle.Worker at the other end of a connection. Each method waits for its answer.

    Args:
        failing: is told if the rank is lost.
        orders: all ranks of an engine have the same.
        adapters: a connection over which it reads adapters beside its steps; None: there are no adapters.

    Attributes:
        adapters: see Args.
    """

    def __init__(
        self,
        rank: int,
        grid: Grid,
        failing: Failing,
        orders: StepOrders,
        connection: Connection,
        adapters: Connection | None,
    ) -> None:
        self._rank, self._failing, self._connection, self.adapters = rank, failing, connection, adapters
        self._orders = orders
        self._unanswered, self._num_unanswered_bytes = deque[int](), 0  # the bytes of the orders of steps
        self._name, self._report, self._num_loads = rank_name(rank, grid), "", 0
        self._num_told = self._num_heard = 0  # steps that it was told of, and answers to them
        self._heard: dict[int, Answer | Failed] = {}  # the answers that nobody has asked for yet, by their number

    @abstractmethod
    def _is_lost(self) -> bool:
        """Whether its process has ended."""

    @abstractmethod
    def _end(self) -> str:
        """A text for people that says which rank has ended, where, and how."""

    def check_alive(self) -> None:
        """See Worker. A rank whose device has failed between orders has said so."""
        if self._is_lost():
            raise EngineDeadError(self._end())
        while self._has_said():
            answer = self._next(self._connection)
            if self._num_heard == self._num_told:
                _checked(answer)  # only an error comes without an order
                raise AssertionError("an answer without an order")
            self._keep(answer)
        for failed in (answer for answer in self._heard.values() if isinstance(answer, Failed)):
            if isinstance(error := failed.error(), EngineDeadError):
                raise error
        if self._failing.failed_rank == self._rank:
            cause = self._failing.cause
            raise EngineDeadError(f"{self.describe()} has failed{cause and f': {cause}'}")

    def _has_said(self) -> bool:
        """Whether it has sent anything. A rank that has failed gets some time to say why."""
        with self._is_there():
            return self._connection.poll(SAY_SECONDS if self._failing.failed_rank == self._rank else 0.0)

    def describe(self) -> str:
        return f"{self._name} ({self._place()}{self._report})"

    @abstractmethod
    def _place(self) -> str:
        """The place of the rank, as text for people."""

    def give_up(self) -> None:
        self._failing.fail_for(self._rank)

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> AdapterLoad:
        """See Worker. Results come in the order of the loads. Only the oldest load may be asked whether it is done."""
        assert self.adapters is not None, "adapters are enabled"
        self.say(self.adapters, LoadAdapter(path, digest, is_awaited))
        load = _LoadOfRank(self, self.adapters, self._num_loads)
        self._num_loads += 1
        return load

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        facts = self.ask(AskFacts(wants_gpu)).facts
        assert facts is not None
        return facts

    def load(self, settings: WorkerSettings) -> None:
        self.ask(Load(settings))

    def measure(self) -> Measured:
        measured = self.ask(Measure()).measured
        assert measured is not None
        return measured

    def allocate(self, size: CacheSize) -> None:
        self.ask(Allocate(size))

    def capture(self) -> None:
        self.ask(Capture())

    def begin(self, batch: ScheduledBatch) -> Pending[StepResult] | None:
        """See Worker."""
        return None

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """See Worker. The result has no tokens if the rank does not sample."""
        return self.submit(batch).result()

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        return self._tell(self._orders.encode(batch), batch.step_id)

    def _tell(self, order: bytes, step_id: int) -> Pending[StepResult]:
        """Send the order for a step."""
        with self._is_there():
            self._connection.send_bytes(order)
        self._num_told += 1
        self._unanswered.append(len(order))
        self._num_unanswered_bytes += len(order)
        return _StepOfOther(self, step_id, self._num_told - 1)

    def hear_step(self, step_id: int, number: int) -> StepResult:
        """Wait for the result of a step. `number`: of how many steps the rank was told before."""
        self._hear_steps(number + 1)
        answer = _checked(self._heard.pop(number))
        return answer.result or StepResult(step_id, [], ranks=answer.ranks)

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return self.ask(UseIdleTime(num_blocks_ever_used)).has_more

    def drop_adapter(self, digest: str) -> None:
        self.ask(DropAdapter(digest))

    def close(self) -> None:
        """End the rank."""
        self._connection.close()
        if self.adapters is not None:
            self.adapters.close()

    def ask(self, message: ToRank) -> Answer:
        """Send an order and wait for its answer. The answers of steps in flight come before; `hear_step` gives them."""
        self.say(self._connection, message)
        self._hear_steps(self._num_told)
        return self.hear(self._connection)

    def _hear_steps(self, count: int) -> None:
        """Have the answers of the first `count` steps."""
        while self._num_heard < count:
            self._keep(self._next(self._connection))

    def _keep(self, answer: Answer | Failed) -> None:
        """Keep the answer to the oldest step that has none yet, for `hear_step`."""
        self._heard[self._num_heard] = answer
        self._num_heard += 1
        self._num_unanswered_bytes -= self._unanswered.popleft()

    def say(self, connection: Connection, message: ToRank) -> None:
        with self._is_there():
            connection.send_bytes(encode(message))

    def hear(self, connection: Connection) -> Answer:
        return _checked(self._next(connection))

    def _next(self, connection: Connection) -> Answer | Failed:
        with self._is_there():
            while isinstance(answer := decode_from_rank(connection.recv_bytes(MOST_MESSAGE_BYTES)), Report):
                self._report = f", {answer.phase} {answer.share:.0%} {answer.detail}".rstrip()
            self._report = ""
        return answer

    @contextmanager
    def _is_there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._failing.fail_for(self._rank, cause=cause_of(error))
            raise EngineDeadError(self._end()) from error


def _checked(answer: Answer | Failed) -> Answer:
    """The answer of a rank. Raises its error if it has failed."""
    if isinstance(answer, Failed):
        raise answer.error()
    return answer


class _StepOfOther:
    """A step that another process computes."""

    def __init__(self, rank: OtherRank, step_id: int, number: int) -> None:
        self._rank, self._step_id, self._number = rank, step_id, number

    def result(self) -> StepResult:
        return self._rank.hear_step(self._step_id, self._number)


class RankProcess(OtherRank):
    """A rank of this machine, in a process of its own.

    Args:
        launch: the launch, without its connections.
        interpreter: the process, which becomes the rank.
    """

    def __init__(
        self, launch: RankLaunch, grid: Grid, failing: Failing, orders: StepOrders, interpreter: RankInterpreter
    ) -> None:
        connection, theirs = multiprocessing.Pipe()
        adapters, their_adapters = multiprocessing.Pipe()
        super().__init__(launch.rank, grid, failing, orders, connection, adapters)
        ends = {"connection": theirs.fileno(), "adapters": their_adapters.fileno()}
        self._process = interpreter.launch(msgspec.structs.replace(launch, **ends))
        theirs.close()
        their_adapters.close()
        self._is_closing = threading.Event()
        watch = (self._process, self._rank, self._name, failing, self._is_closing)
        self._watching = threading.Thread(target=_watch, args=watch, name=f"rank {self._rank} watch", daemon=True)
        self._watching.start()

    def begin(self, batch: ScheduledBatch) -> Pending[StepResult] | None:
        """See Worker. None: sending the order may have to wait, because it is long, or orders before it are not
        answered; or the rank is lost, as `execute` says.

        A rank answers an order before it takes the next one, and on one machine an answer is there at once.
        """
        order = self._orders.encode(batch)
        if self._num_unanswered_bytes + len(order) <= MOST_BEGUN_BYTES:
            with suppress(EngineDeadError):
                return self._tell(order, batch.step_id)
        return None

    def give_up(self) -> None:
        """See Worker. The process may hang, so it is ended too."""
        super().give_up()
        self._is_closing.set()
        self._process.kill()

    def close(self) -> None:
        self._is_closing.set()
        super().close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_lost(self) -> bool:
        return not self._watching.is_alive()

    def _end(self) -> str:
        return end_of(self._process, self._name)

    def _place(self) -> str:
        return place_of(self._process)


class _LoadOfRank:
    """An AdapterLoad in another process.

    Args:
        connection: the rank's connection for adapters.
        number: see AddAdapter.
    """

    def __init__(self, rank: OtherRank, connection: Connection, number: int) -> None:
        self._rank, self._connection, self._number = rank, connection, number
        self._facts: AdapterFacts | None = None

    def done(self) -> bool:
        return self._facts is not None or self._connection.poll()

    def result(self) -> AdapterFacts:
        if self._facts is None:
            self._facts = self._rank.hear(self._connection).adapter
        assert self._facts is not None
        return self._facts

    def add(self) -> None:
        self._rank.ask(AddAdapter(self._number))


class Home:
    """The connection to another node. Over it, the node says why it ends, and both notice when the network is cut.

    Args:
        rank: the first rank of the node.
        failing: is told if the node is lost.
        others: the other connections to ranks of the node. They end when the node is lost. `close` closes them.
    """

    def __init__(self, peer: socket.socket, rank: int, failing: Failing, others: Sequence[socket.socket]) -> None:
        self.host = peer.getpeername()[0]
        self._rank, self._failing, self._others = rank, failing, others
        self._why = self._cause = ""
        self._is_lost = threading.Event()
        self._pulse = Pulse(peer, self._on_end, self._on_message)

    def _on_message(self, message: bytes) -> None:
        with suppress(msgspec.MsgspecError):
            if isinstance(said := decode(message), NodeLost):
                self._why = said.why
                self._is_lost.set()
                return
        self._cause = "its node has sent something that no node sends"
        self._pulse.end()

    def _on_end(self, error: Exception) -> None:
        ended = why(error) if is_silence(error) else f"the connection to its node has ended ({error})"
        self._cause = self._cause or ended
        if not self._why or is_silence(error):  # otherwise one of its ranks is lost, and that rank's connections end
            self._failing.fail_for(self._rank, cause=cause_of(error))
            for other in self._others:
                wire.end(other)
        self._is_lost.set()

    def close(self) -> None:
        """Let the node end."""
        self._pulse.close()
        for other in self._others:
            other.close()

    def give_up(self) -> None:
        """Stop waiting for the node."""
        self._pulse.end()

    def is_lost(self) -> bool:
        """Whether the node has ended."""
        return self._is_lost.is_set()

    def end(self, name: str) -> str:
        """The reason why a rank of the node is lost, as text for people."""
        lost = f"{name} (on {self.host}) is lost: "
        if not self._is_lost.wait(2 * LOOK_SECONDS + SAY_SECONDS):
            return f"{lost}its connection has ended, and its node has not said why"
        return self._why or f"{lost}{self._cause}"


class RemoteRank(OtherRank):
    """A rank of another node, which watches the rank's process.

    Args:
        home: the connection to the node.
        starting: the object that has started the nodes. Only the rank that is closed last has it.
    """

    def __init__(
        self,
        rank: int,
        grid: Grid,
        failing: Failing,
        orders: StepOrders,
        connection: Connection,
        adapters: Connection | None,
        home: Home,
        starting: Starting | None,
    ) -> None:
        super().__init__(rank, grid, failing, orders, connection, adapters)
        self._home, self._starting = home, starting

    def hear(self, connection: Connection) -> Answer:
        """See OtherRank. Each machine reads its own copy of an adapter, so an error names the machine."""
        try:
            return super().hear(connection)
        except AdapterError as error:
            what = f"{error.what.rstrip('.')}, {self._place()}"
            raise type(error)(what, value=error.value, expected=error.expected, fix=error.fix) from None

    def give_up(self) -> None:
        super().give_up()
        self._home.give_up()

    def close(self) -> None:
        super().close()
        self._home.close()
        if self._starting is not None:
            self._starting.close()

    def _is_lost(self) -> bool:
        return self._home.is_lost()

    def _end(self) -> str:
        return self._home.end(self._name)

    def _place(self) -> str:
        return f"on {self._home.host}"


def _watch(
    process: subprocess.Popen[bytes], rank: int, name: str, failing: Failing, is_closing: threading.Event
) -> None:
    """Tell the other ranks when the process has ended, or when two checks have found it stopped."""
    num_stopped = 0
    while process.poll() is None and num_stopped < 2:
        num_stopped = num_stopped + 1 if is_stopped(process.pid) else 0
        time.sleep(LOOK_SECONDS)
    if process.returncode != 0 and not is_closing.is_set():
        failing.fail_for(rank, cause=STOPPED if process.returncode is None else 0)
        logger.error("%s", end_of(process, name))
        process.kill()  # a stopped process does not react to other signals
        process.wait()


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP, for example)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def place_of(process: subprocess.Popen[bytes]) -> str:
    """The place of a process, as text for people."""
    return f"process {process.pid} on {platform.node()}"


def end_of(process: subprocess.Popen[bytes], name: str) -> str:
    """A text for people that says which process has ended, where, and how."""
    who = f"{name} ({place_of(process)})"
    if is_stopped(process.pid):
        return f"{who} was stopped by a signal"
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return f"{who} does not answer any more"
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code}"
