"""Ranks that somebody else has started, as torchrun does: each has a whole engine, and all schedule the same.

Each computes its part of a step. The first rank samples, and the others get its results. Before a step all compare what
they have scheduled, so ranks that were given different requests end with an error. They are on one machine.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from quire import envs
from quire.config import EngineConfig
from quire.distributed import wire
from quire.distributed.group import Failing
from quire.distributed.layout import Grid
from quire.distributed.shared_memory import make_memory, ranks_on
from quire.engine.rank_messages import Answer, Failed, FromRank, decode_from_rank, encode
from quire.errors import ConfigError, EngineDeadError, InvalidRequestError, PeerLostError
from quire.life_cycle import CacheSize, FirstWorker, Measured, WorkerSettings
from quire.lora.facts import AdapterFacts
from quire.messages import Progress
from quire.model_config import ModelConfig
from quire.planning import devices
from quire.planning.binding import bind, cpus_of_processes
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.planning.replicas import has_own_cores
from quire.resolve import DeviceFacts
from quire.schedule import Pending, Polled, ScheduledBatch, StepResult, StepTokens
from quire.worker.worker import DeviceWorker

MOST_RESULT_BYTES = 1 << 30
_RANK, _CREDENTIALS = struct.Struct("i"), struct.Struct("3i")
_digested: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


class Companions:
    """The connections of a rank to the first one, or of the first one to all others, by rank."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self.rank, self._peers = rank, peers
        self._is_closing = False

    def all(self, frame: bytes) -> list[bytes]:
        """What all ranks say, in their order."""
        if self.rank:
            self._send(0, frame)
            return msgspec.msgpack.decode(self._receive(0), type=list[bytes])
        frames = [frame, *(self._receive(rank) for rank in sorted(self._peers))]
        self.tell(_digested(frames))
        return frames

    def tell(self, frame: bytes) -> None:
        """The first one says it to all others."""
        for rank in self._peers:
            self._send(rank, frame)

    def hear(self) -> bytes:
        """What the first one says."""
        return self._receive(0)

    def watch(self, failing: Failing) -> None:
        """Tell ranks that wait for one that has ended, from now on."""
        ranks, poll = {peer.fileno(): rank for rank, peer in self._peers.items()}, select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)

        def look() -> None:
            for descriptor, _ in poll.poll():
                if not self._is_closing:
                    failing.fail_for(ranks[descriptor])

        if ranks:
            threading.Thread(target=look, name="other ranks", daemon=True).start()

    def close(self) -> None:
        self._is_closing = True
        for peer in self._peers.values():
            wire.end(peer)  # the thread that watches holds it open
            peer.close()

    def _send(self, rank: int, frame: bytes) -> None:
        try:
            wire.send(self._peers[rank], frame)
        except OSError as error:
            raise _lost(rank) from error

    def _receive(self, rank: int) -> bytes:
        try:
            return wire.receive(self._peers[rank], MOST_RESULT_BYTES)
        except (wire.WireError, OSError) as error:
            raise _lost(rank) from error


def _lost(rank: int) -> EngineDeadError:
    return EngineDeadError(f"Rank {rank} has ended")


def start_external(
    config: EngineConfig, model_config: ModelConfig, progress: Progress, *, is_server: bool
) -> ExternalExecutor:
    """The executor of this rank, as soon as all ranks are there. Raises ConfigError."""
    if is_server or config.nnodes > 1:
        raise ConfigError(
            "Ranks that somebody else starts have an engine each, and serve nobody",
            value=config.distributed_executor_backend,
            fix="Use LLM(...) in a script that torchrun starts, or leave --distributed-executor-backend out",
            param="distributed_executor_backend",
        )
    grid = grid_of(config)
    rank, name = _place(grid)
    if cpus := cpus_of_processes(config):
        bind(cpus[rank])
    until = time.monotonic() + envs.ENGINE_READY_TIMEOUT_S.get()
    progress("load", 0.0, f"rank {rank} of {grid.size} waits for the others")
    try:
        companions, memory = _meet(rank, grid, name, until)
    except OSError as error:
        raise ConfigError(
            f"The ranks have not met: {error}", fix="Start as many as WORLD_SIZE says, on one machine", param="RANK"
        ) from error
    try:
        ranks = ranks_on(
            memory,
            rank,
            grid,
            has_own_cores=has_own_cores(config, devices.num_cores()),
            timeout_seconds=config.distributed_timeout_seconds,
        )
    finally:
        os.close(memory)
    companions.watch(ranks.failing)
    worker = DeviceWorker(part_of_rank(model_config, config, rank), progress, ranks=ranks)
    return ExternalExecutor(worker, companions)


def _place(grid: Grid) -> tuple[int, str]:
    """The number of this rank, and the name under which all meet."""
    size, local = envs.WORLD_SIZE.get(), envs.LOCAL_WORLD_SIZE.get()
    if size != grid.size:
        raise ConfigError(
            "Somebody has started another number of ranks than the settings say",
            value=size,
            expected=f"WORLD_SIZE = tensor_parallel_size x pipeline_parallel_size = {grid.size}",
            fix="Start this script with torchrun, with as many processes",
            param="distributed_executor_backend",
        )
    if local not in (0, size):
        raise ConfigError(
            "Ranks that somebody else starts are on one machine in this version",
            value=local,
            expected=f"LOCAL_WORLD_SIZE = {size}",
            fix="On the first machine use LLM(..., pipeline_parallel_size, nnodes, master_addr) without torchrun, and on "
            "each other one `quire serve --headless --nnodes --node-rank --master-addr` (docs/parallel.md)",
            param="distributed_executor_backend",
        )
    if not 0 <= envs.RANK.get() < size:
        raise ConfigError("No such rank", value=envs.RANK.get(), expected=f"RANK of 0 to {size - 1}", param="RANK")
    return envs.RANK.get(), f"\0quire-ranks-{envs.MASTER_ADDR.get()}-{envs.MASTER_PORT.get()}"


def _meet(rank: int, grid: Grid, name: str, until: float) -> tuple[Companions, int]:
    """Connections to processes of the same user, and the memory that all share. Raises OSError."""
    with ExitStack() as on_error:
        found = _join(rank, name, until, on_error) if rank else _gather(grid, name, until, on_error)
        on_error.pop_all()
    return found


def _gather(grid: Grid, name: str, until: float, on_error: ExitStack) -> tuple[Companions, int]:
    """The first rank waits for the others, and shares the memory with them."""
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        while len(peers) < grid.size - 1:
            listener.settimeout(max(until - time.monotonic(), 0.001))
            peer = on_error.enter_context(listener.accept()[0])
            if not _is_ours(peer):
                peer.close()
                continue
            peer.settimeout(max(until - time.monotonic(), 0.001))
            if len(frame := peer.recv(_RANK.size, socket.MSG_WAITALL)) < _RANK.size:
                raise ConnectionError("a rank has ended")
            peer.settimeout(None)
            peers[_RANK.unpack(frame)[0]] = peer
    memory = make_memory(grid)
    on_error.callback(os.close, memory)
    for peer in peers.values():
        socket.send_fds(peer, [b"memory"], [memory])
    return Companions(0, dict(sorted(peers.items()))), memory


def _join(rank: int, name: str, until: float, on_error: ExitStack) -> tuple[Companions, int]:
    """Another rank connects to the first one, and gets the memory."""
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(name)
            break
        except OSError:
            peer.close()
            if time.monotonic() > until:
                raise
            time.sleep(wire.RETRY_SECONDS)
    on_error.enter_context(peer)
    if not _is_ours(peer):
        raise PermissionError("another user's process is in the place of rank 0")
    peer.sendall(_RANK.pack(rank))
    peer.settimeout(max(until - time.monotonic(), 0.001))
    _, descriptors, _, _ = socket.recv_fds(peer, len(b"memory"), 1)
    if not descriptors:
        raise ConnectionError("rank 0 has ended")
    peer.settimeout(None)
    return Companions(rank, {0: peer}), descriptors[0]


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process is the same user's."""
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


class ExternalExecutor:
    """The WorkerExecutor of one of the ranks: each method is called on all of them, in the same order."""

    def __init__(self, worker: FirstWorker, companions: Companions) -> None:
        self.worker, self._companions = worker, companions
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"quire-worker-{companions.rank}")
        self._untold: list[StepTokens] = []

    def facts(self, wants_gpu: bool) -> list[DeviceFacts]:
        answers = self._everywhere(lambda: Answer(facts=self.worker.facts(wants_gpu)))
        return [answer.facts for answer in answers if answer.facts is not None]

    def load(self, settings: WorkerSettings) -> None:
        self._everywhere(lambda: self.worker.load(settings))

    def measure(self) -> list[Measured]:
        answers = self._everywhere(lambda: Answer(measured=self.worker.measure()))
        return [answer.measured for answer in answers if answer.measured is not None]

    def allocate(self, size: CacheSize) -> None:
        self._everywhere(lambda: self.worker.allocate(size))

    def capture(self) -> None:
        self._everywhere(self.worker.capture)

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """There are no grammars."""

    def prepare_grammar(self, text: str) -> Polled[None]:
        raise InvalidRequestError(
            "Grammars are not read where somebody else has started the ranks",
            fix="Leave structured output out, or let Quire start the ranks",
        )

    def check_alive(self) -> None:
        """Whoever has started the ranks watches them."""

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return self.worker.use_idle_time(num_blocks_ever_used)

    def load_adapter(self, path: str, digest: str | None) -> Polled[AdapterFacts]:
        raise AssertionError("a config with adapters is refused")

    def drop_adapter(self, digest: str) -> None:
        raise AssertionError("a config with adapters is refused")

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        digests = self._companions.all(_digest(batch))
        if (other := next((rank for rank, each in enumerate(digests) if each != digests[0]), None)) is not None:
            self._companions.close()
            raise EngineDeadError(
                f"Rank {other} has scheduled something else than rank 0: give all ranks the same requests, with the "
                "same parameters, in the same order"
            )
        batch.tokens_before, self._untold = self._untold, []
        return _Shared(self._thread.submit(self.worker.execute, batch), self._companions, self._note)

    def _note(self, tokens: StepTokens) -> None:
        self._untold.append(tokens)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        self.worker.close()
        self._companions.close()

    def _everywhere(self, step: Callable[[], Answer | None]) -> list[Answer]:
        """What all ranks answer. Raises the error of one that has one: of the others, some have waited for it."""
        own: FromRank
        try:
            own = step() or Answer()
        except Exception as error:
            own = Failed.of(error)
        answers = [decode_from_rank(frame) for frame in self._companions.all(encode(own))]
        errors = [answer.error() for answer in answers if isinstance(answer, Failed)]
        if errors:
            raise next((error for error in errors if not isinstance(error, PeerLostError)), errors[0])
        return [answer for answer in answers if isinstance(answer, Answer)]


class _Shared:
    """A step whose result the first rank has."""

    def __init__(self, own: Future[StepResult], companions: Companions, note: Callable[[StepTokens], None]) -> None:
        self._own, self._companions, self._note = own, companions, note

    def result(self) -> StepResult:
        error: Exception | None = None
        try:
            result = self._own.result()
            own: FromRank = Answer(result=result) if self._companions.rank == 0 else Answer()
        except EngineDeadError:
            self._companions.close()
            raise
        except Exception as failure:
            error, own = failure, Failed.of(failure)
        answers = [decode_from_rank(frame) for frame in self._companions.all(encode(own))]
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failed):
                raise error if error is not None and rank == self._companions.rank else answer.error()
        answer = answers[0]
        assert isinstance(answer, Answer)
        assert answer.result is not None
        self._note(StepTokens(answer.result.step_id, answer.result.token_ids))
        return answer.result


def _digest(batch: ScheduledBatch) -> bytes:
    """Of all that decides about tokens, but for parameters of sampling: only the first rank samples."""
    rows = [(new.request_id, new.token_ids, new.block_ids, new.rope_offset) for new in batch.new_rows]
    seen = (
        batch.step_id,
        batch.request_ids,
        batch.num_computed_tokens,
        batch.num_scheduled_tokens,
        batch.num_logits,
        [list(drafts) for drafts in batch.draft_token_ids],
        batch.new_block_ids,
        batch.removed_request_ids,
        batch.block_copies,
        rows,
    )
    return hashlib.sha256(_digested(seen)).digest()
