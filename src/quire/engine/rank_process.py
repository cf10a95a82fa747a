"""The process of a rank other than the first: obeys the first rank's process, and ends with it.

Started as `python -m quire.engine.rank_process FD` with a connection to that process, and a RankLaunch on its standard
input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from quire import logs
from quire.distributed.shared_memory import ranks_on
from quire.engine.rank_messages import (
    Allocate,
    Answer,
    AskFacts,
    Capture,
    Execute,
    Failed,
    Load,
    Measure,
    RankLaunch,
    ToRank,
    UseIdleTime,
    decode_to_rank,
    encode,
)
from quire.model_config import load_model_config
from quire.planning import devices
from quire.planning.cut_stages import grid_of, part_of_rank
from quire.worker.worker import DeviceWorker

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

logger = logs.get_logger("quire.engine.rank_process")


def _worker(launch: RankLaunch) -> DeviceWorker:
    config = launch.config
    grid = grid_of(config)
    ranks = ranks_on(
        launch.memory, launch.rank, grid, launch.links, has_own_cores=devices.num_cores() >= grid.num_local
    )
    os.close(launch.memory)
    is_any = config.model_impl in ("auto", "transformers")
    model = load_model_config(Path(launch.model_folder), config.hf_overrides, any_architecture=is_any)
    part = part_of_rank(model, config, launch.rank)
    return DeviceWorker(part, lambda phase, share, detail: None, ranks=ranks)


def _obey(worker: DeviceWorker, message: ToRank) -> Answer:
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
            worker.execute(batch)
        case UseIdleTime(num_blocks_ever_used):
            return Answer(has_more=worker.use_idle_time(num_blocks_ever_used))
        case _:
            raise AssertionError(f"{type(message).__name__} comes once")
    return Answer()


def _listen(connection: Connection, frames: SimpleQueue[bytes]) -> None:
    """Hand on what the first rank says, and leave at once when it is gone: the main thread may wait for it."""
    while True:
        try:
            frames.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _die_with_parent() -> None:
    """Even where this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):  # the first rank's process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    logs.configure()
    connection = Connection(int(sys.argv[1]))
    frames: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, frames), name="first rank", daemon=True).start()
    launch = decode_to_rank(sys.stdin.buffer.read())
    assert isinstance(launch, RankLaunch)
    if launch.dies_with_parent:
        _die_with_parent()
    worker = _worker(launch)
    while True:
        message = decode_to_rank(frames.get())
        try:
            answer: Answer | Failed = _obey(worker, message)
        except Exception as error:
            answer = Failed.of(error)
            if not answer.kind:
                logger.exception("rank %d failed", launch.rank)
        connection.send_bytes(encode(answer))


if __name__ == "__main__":
    main()
