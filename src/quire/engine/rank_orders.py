"""The work of the process of a rank: it carries out the orders of the first rank."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from quire.distributed.shared_memory import ranks_on
from quire.engine.rank_messages import (
    MOST_MESSAGE_BYTES,
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
    Report,
    ToRank,
    UseIdleTime,
    decode_to_rank,
    encode,
)
from quire.engine.rank_spawn import die_with_parent
from quire.life_cycle import AdapterLoad
from quire.loader.drafter import load_with_drafter
from quire.logs import get_logger
from quire.messages import Progress
from quire.planning import devices
from quire.planning.binding import bind
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.planning.replicas import has_own_cores
from quire.worker.worker import DeviceWorker

IDLE_SECONDS = 0.05  # seconds without an order, after which a rank looks whether its device has ended its steps

logger = get_logger(__name__)


def _worker(launch: RankLaunch, progress: Progress) -> DeviceWorker:
    config = launch.config
    ranks = ranks_on(
        launch.memory,
        launch.rank,
        grid_of(config),
        launch.links,
        has_own_cores=has_own_cores(config, devices.num_cores()),
        timeout_seconds=config.distributed_timeout_seconds,
    )
    os.close(launch.memory)
    drafter_folder = None if launch.drafter_folder is None else Path(launch.drafter_folder)
    model = load_with_drafter(Path(launch.model_folder), drafter_folder, config)
    part = part_of_rank(model, config, launch.rank)
    return DeviceWorker(part, progress, ranks=ranks)


_Loads = deque[tuple[int, AdapterLoad]]  # the numbers and loads of adapters that were read; the oldest is first


def _answer(worker: DeviceWorker, loads: _Loads, message: ToRank) -> Answer:
    """Carry out an order of the first rank."""
    match message:
        case AskFacts(wants_gpu):
            return Answer(facts=worker.facts(wants_gpu))
        case Load(settings):
            worker.load(settings)
        case Measure():
            return Answer(measured=worker.measure())
        case Allocate(size):
            worker.allocate(size)
        case Capture():
            worker.capture()
        case Execute(batch):
            result = worker.execute(batch)
            return Answer(result=result) if worker.samples else Answer(ranks=result.ranks)
        case AddAdapter(number):
            while loads[0][0] < number:  # another rank could not read this adapter, so it is dropped
                loads.popleft()
            _, load = loads.popleft()
            load.add()
        case DropAdapter(digest):
            worker.drop_adapter(digest)
        case UseIdleTime(num_blocks_ever_used):
            return Answer(has_more=worker.use_idle_time(num_blocks_ever_used))
        case _:
            raise AssertionError(f"{type(message).__name__} comes once")
    return Answer()


def _read_adapters(worker: DeviceWorker, loads: _Loads, connection: Connection) -> None:
    """Read adapters one after the other, at the same time as steps run."""
    with suppress(EOFError, OSError):
        for number in count():
            message = decode_to_rank(connection.recv_bytes(MOST_MESSAGE_BYTES))
            assert isinstance(message, LoadAdapter)
            try:
                load = worker.load_adapter(message.path, message.digest, message.is_awaited)
                answer: Answer | Failed = Answer(adapter=load.result())
                loads.append((number, load))
            except Exception as error:
                answer = Failed.of(error)
            connection.send_bytes(encode(answer))


def _end_with(descriptor: int) -> None:
    """End the process when the connection to the first rank ends. The main thread may be waiting for the first rank."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    os._exit(0)


def _next_order(connection: Connection, seconds: float | None) -> ToRank | None:
    """Wait for an order, at most `seconds`. None: there is none. The process ends with the connection."""
    try:
        if seconds is not None and not connection.poll(seconds):
            return None
        return decode_to_rank(connection.recv_bytes(MOST_MESSAGE_BYTES))
    except (EOFError, OSError):
        os._exit(0)


def obey(launch: RankLaunch) -> None:
    """Carry out orders until the first rank is gone. Then the process ends.

    A rank that does not sample does not wait for its device in a step. If it hears of a failure while it has no order,
    it sends the error without being asked.
    """
    connection = Connection(launch.connection)
    threading.Thread(target=_end_with, args=(launch.connection,), name="first rank", daemon=True).start()
    if launch.dies_with_parent:
        die_with_parent()
    if launch.cpus:
        bind(launch.cpus)
    if launch.gpu is not None:
        devices.see_gpu(launch.gpu)
    worker = _worker(launch, lambda phase, share, detail: connection.send_bytes(encode(Report(phase, share, detail))))
    loads: _Loads = deque()
    if launch.adapters is not None:
        reading = (worker, loads, Connection(launch.adapters))
        threading.Thread(target=_read_adapters, args=reading, name="adapters", daemon=True).start()
    while True:
        message = _next_order(connection, IDLE_SECONDS if worker.is_behind else None)
        try:
            if message is None:
                worker.catch_up()
                continue
            answer: Answer | Failed = _answer(worker, loads, message)
        except Exception as error:
            answer = Failed.of(error)
            if not answer.kind:
                logger.exception("rank %d failed", launch.rank)
        connection.send_bytes(encode(answer))
