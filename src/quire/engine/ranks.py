"""The workers of an engine: the first rank is a worker of this process, each other rank is a process."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from quire import envs
from quire.config import EngineConfig
from quire.distributed.shared_memory import SharedMemoryGroup, make_memory
from quire.engine.rank_messages import (
    AddAdapter,
    Allocate,
    Answer,
    AskFacts,
    Capture,
    DropAdapter,
    Execute,
    Failed,
    Load,
    LoadAdapter,
    Measure,
    RankLaunch,
    ToRank,
    UseIdleTime,
    decode_from_rank,
    encode,
)
from quire.errors import EngineDeadError
from quire.life_cycle import AdapterLoad, CacheSize, Measured, Worker, WorkerSettings
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.planning import devices
from quire.planning.cut_model import ModelCut
from quire.planning.replicas import has_own_cores
from quire.resolve import DeviceFacts
from quire.schedule import Pending, Polled, ScheduledBatch, StepResult
from quire.worker.worker import DeviceWorker

PROGRAM = ("-m", "quire.engine.rank_process")  # arguments of the interpreter
LOOK_SECONDS = 0.25  # between two looks at a process
CLOSE_SECONDS = 5.0  # for a process to end by itself

logger = get_logger(__name__)


def start_ranks(
    config: EngineConfig,
    model_folder: Path,
    model_config: ModelConfig,
    progress: Progress,
    *,
    drafter_folder: Path | None,
    is_server: bool,
) -> list[Worker]:
    """The ranks of an engine on this machine. The processes load their libraries when this returns.

    Args:
        model_config: of the whole model.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return [DeviceWorker(model_config, progress)]
    memory = make_memory(size)
    try:
        group = SharedMemoryGroup(memory, 0, size, has_own_cores=has_own_cores(config, devices.num_cores()))
        others = [
            RankProcess(config, (model_folder, drafter_folder), rank, memory, group, dies_with_parent=is_server)
            for rank in range(1, size)
        ]
    finally:
        os.close(memory)
    return [DeviceWorker(ModelCut(model_config, size).part(), progress, group=group), *others]


class RankProcess:
    """A Worker in another process. Each method waits for its answer.

    Args:
        folders: of the model, and of its drafter.
        memory, dies_with_parent: see RankLaunch.
        group: of the first rank; it learns that the process has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        folders: tuple[Path, Path | None],
        rank: int,
        memory: int,
        group: SharedMemoryGroup,
        *,
        dies_with_parent: bool,
    ) -> None:
        self._rank, self._group = rank, group
        self._connection, theirs = multiprocessing.Pipe()
        self._adapters, their_adapters = multiprocessing.Pipe()
        # -P: a module of the current folder must not stand in for one of ours or of the standard library.
        command = [sys.executable, "-P", *PROGRAM, str(theirs.fileno())]
        fds = (theirs.fileno(), their_adapters.fileno(), memory)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, env=envs.for_children())
        model, drafter = str(folders[0]), None if folders[1] is None else str(folders[1])
        launch = RankLaunch(config, model, drafter, rank, memory, their_adapters.fileno(), dies_with_parent)
        theirs.close()
        their_adapters.close()
        self._is_closing = threading.Event()
        self._connection.send_bytes(encode(launch))
        watch = (self._process, self._rank, group, self._is_closing)
        threading.Thread(target=_watch, args=watch, name=f"rank {self._rank} watch", daemon=True).start()

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        facts = self._ask(AskFacts(wants_gpu)).facts
        assert facts is not None
        return facts

    def load(self, settings: WorkerSettings) -> None:
        self._ask(Load(settings))

    def measure(self) -> Measured:
        measured = self._ask(Measure()).measured
        assert measured is not None
        return measured

    def allocate(self, size: CacheSize) -> None:
        self._ask(Allocate(size))

    def capture(self) -> None:
        self._ask(Capture())

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        raise NotImplementedError("ranks are asked side by side")

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """The result has no tokens: the first rank has them."""
        self._ask(Execute(batch))
        return StepResult(batch.step_id, [])

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """Only the first rank has grammars."""

    def prepare_grammar(self, text: str) -> Polled[object]:
        raise NotImplementedError("only the first rank has grammars")

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return self._ask(UseIdleTime(num_blocks_ever_used)).has_more

    def load_adapter(self, path: str, digest: str | None) -> AdapterLoad:
        """One at a time: the result of the one before was asked for."""
        self._say(self._adapters, LoadAdapter(path, digest))
        return _LoadOfRank(self)

    def drop_adapter(self, digest: str) -> None:
        self._ask(DropAdapter(digest))

    def close(self) -> None:
        """End the process."""
        self._is_closing.set()
        self._connection.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: ToRank) -> Answer:
        self._say(self._connection, message)
        return self._hear(self._connection)

    def _say(self, connection: Connection, message: ToRank) -> None:
        with self._is_there():
            connection.send_bytes(encode(message))

    def _hear(self, connection: Connection) -> Answer:
        with self._is_there():
            answer = decode_from_rank(connection.recv_bytes())
        if isinstance(answer, Failed):
            raise answer.error()
        return answer

    @contextmanager
    def _is_there(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._group.fail_for(self._rank)
            raise EngineDeadError(_end_of(self._process, self._rank, self._group.size)) from error


class _LoadOfRank:
    """An AdapterLoad of another process."""

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank
        self._facts: AdapterFacts | None = None

    def done(self) -> bool:
        return self._facts is not None or self._rank._adapters.poll()

    def result(self) -> AdapterFacts:
        if self._facts is None:
            self._facts = self._rank._hear(self._rank._adapters).adapter
        assert self._facts is not None
        return self._facts

    def add(self) -> None:
        self._rank._ask(AddAdapter(self.result().digest))


def _watch(process: subprocess.Popen[bytes], rank: int, group: SharedMemoryGroup, is_closing: threading.Event) -> None:
    """Tell the group when the process ends, or has been stopped for two looks."""
    num_stopped = 0
    while process.poll() is None and num_stopped < 2:
        num_stopped = num_stopped + 1 if _is_stopped(process.pid) else 0
        time.sleep(LOOK_SECONDS)
    if process.returncode != 0 and not is_closing.is_set():
        group.fail_for(rank)
        logger.error("%s", _end_of(process, rank, group.size))
        process.kill()  # one that is stopped
        process.wait()


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _end_of(process: subprocess.Popen[bytes], rank: int, size: int) -> str:
    """Who has ended, where, and how."""
    who = f"Rank {rank} of {size} (process {process.pid} on {platform.node()})"
    if _is_stopped(process.pid):
        return f"{who} was stopped by a signal"
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return f"{who} does not answer any more"
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code}"
