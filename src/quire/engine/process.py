"""The engine process. It reads messages from the API process, steps the core, and sends one message per step.

It is started as `python -m quire.engine.process RANKS`, with one JSON line (EngineLaunch) on its standard input. The
line may come while the libraries are still being loaded. At the same time, RANKS processes of further ranks load their
libraries. The parent keeps the pipe open and writes nothing more. So the pipe ends when the parent ends, in every case,
and then the engine ends too.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from quire import logs
from quire.distributed.wire import WireError
from quire.engine.core import EngineCore
from quire.engine.libraries import load
from quire.engine.rank_spawn import RankInterpreter, spawned_ranks
from quire.engine.server_link import ServerLink, TcpLink, UnixLink
from quire.errors import EngineDeadError, QuireError
from quire.messages import (
    Abort,
    AddRequest,
    Command,
    EngineBeat,
    EngineBegun,
    EngineFailed,
    EngineInput,
    EngineLaunch,
    EngineMessage,
    EngineOutputs,
    EngineProgress,
    LoadAdapter,
    ObservedOverhead,
    Progress,
    RequestDelta,
    SetLimits,
    UnixSockets,
    UnloadAdapter,
    UseTokenizer,
)
from quire.planning import devices

if TYPE_CHECKING:
    from quire.engine.start import StartedEngine  # loads torch

PAUSE_SECONDS = 1.0
BEAT_SECONDS = 1.0  # the time between two signs of life; the front end gives up after ten missing ones

# Finds the folder of the model and the folder of the drafter on this machine. It raises ConfigErrors.
FindModel = Callable[[EngineLaunch, Progress], tuple[Path, Path | None]]

logger = logs.get_logger("quire.engine.process")  # __name__ is __main__ if this module is run as a program


class EngineProcess:
    """The message loop around one EngineCore.

    Args:
        launch: the config, the folders of models, and the address of the server.
        interpreters, start_time: see start.start_engine.
        find_model: finds the model if the launch names no folder.

    Raises OSError or WireError if a server on another machine cannot be reached.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        interpreters: list[RankInterpreter] | None = None,
        start_time: float | None = None,
        find_model: FindModel | None = None,
    ) -> None:
        self._launch, self._interpreters, self._start_time = launch, interpreters, start_time
        self._find_model = find_model
        self._link: ServerLink
        if isinstance(launch.link, UnixSockets):
            self._link = UnixLink(launch.link)
        else:
            self._link = TcpLink(launch.link, lambda: os._exit(0))  # the process ends when the server is gone
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineInput)
        self._stopping = False
        self._phase, self._phase_start_time = "", 0.0
        self._started: StartedEngine | None = None
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)

    def run(self) -> int:
        """Start the engine, serve until a message says to stop, and return the exit code."""
        from quire.engine.start import start_engine

        self._beats.start()
        config, folder, drafter = self._launch.config, self._launch.model_folder, self._launch.drafter_folder
        # If Ray places the replicas, Ray has chosen their GPUs already.
        if config.device != "cpu" and (config.num_replicas > 1 or config.gpu_ids) and not config.has_ray_replicas:
            num_ranks = config.num_local_ranks
            devices.take_gpus(self._launch.engine_index * num_ranks, num_ranks, config.gpu_ids)
        try:
            model_folder, drafter_folder = Path(folder), Path(drafter) if drafter else None
            if self._find_model is not None:
                model_folder, drafter_folder = self._find_model(self._launch, self._send_progress)
            started = start_engine(
                config,
                model_folder,
                is_server=True,
                progress=self._send_progress,
                is_first=self._launch.is_first,
                drafter_folder=drafter_folder,
                free_memory_bytes=self._launch.free_memory_bytes,
                engine_index=self._launch.engine_index,
                interpreters=self._interpreters,
                start_time=self._start_time,
                on_begun=self._tell_begun,
            )
        except QuireError as error:
            self._send(EngineFailed(error.message, error.code))
            return 1
        except Exception as error:
            logger.exception("the engine could not start")
            self._send(EngineFailed(f"The engine could not start: {type(error).__name__}: {error}"))
            return 1
        try:
            if self._launch.gets_tokenizer:
                self._take_tokenizer(started.core)
            self._send(started.ready_message())
            self._serve(started)
        except EngineDeadError as error:
            logger.error("%s", error.message)
            self._send(EngineFailed(error.message))
            return 1
        except Exception as error:
            logger.exception("the engine loop ended")
            self._send(
                EngineFailed(f"The engine stopped after an internal error ({type(error).__name__}); see its log")
            )
            return 1
        finally:
            started.core.shutdown()
        return 0

    def _take_tokenizer(self, core: EngineCore) -> None:
        """Take in the first message, the tokenizer.

        Python's lock is held for up to 0.8 s while its tables are made. So they are made before there are requests.
        """
        message = self._decoder.decode(self._link.receive())
        assert isinstance(message, UseTokenizer)
        try:
            core.use_tokenizer(message)
        except QuireError as error:
            logger.warning("requests with a constraint are refused: %s", error.message)

    def fail(self, error: Exception) -> int:
        """Report why the libraries could not be loaded, and return the exit code."""
        what = str(error).partition("\n")[0]
        self._send(EngineFailed(f"The engine's libraries cannot be loaded: {type(error).__name__} {what}".rstrip()))
        return 1

    def _serve(self, started: StartedEngine) -> None:
        self._started, core = started, started.core
        self._send(self._sign_of_life())  # it is the first message that names the ranks
        while not self._stopping:
            if not core.has_work():
                self._wait(started)
            self._receive(core)
            if not core.has_work():
                continue
            deltas = core.step()
            if core.adapters is not None:
                for state in core.adapters.take_states():
                    self._send(state)
            if deltas or core.last_record is not None:
                self._send(EngineOutputs(deltas, core.last_record))
        started.keep_costs()

    def _wait(self, started: StartedEngine) -> None:
        """Wait for a message. Idle work is done meanwhile."""
        while not self._link.wait(0.0) and started.take_memory():
            pass
        # A request that comes while a step is measured must wait. So steps are measured only in longer pauses.
        if not self._link.wait(PAUSE_SECONDS):
            while not self._link.wait(0.0) and started.calibrate():
                pass
            started.keep_costs()
        while not self._link.wait(PAUSE_SECONDS):
            started.check_alive()

    def _receive(self, core: EngineCore) -> None:
        """Take in all messages that have come."""
        handlers: dict[type, Callable[..., None]] = {
            AddRequest: core.add,
            Abort: lambda message: core.abort(message.request_ids),
            SetLimits: core.set_limits,
            ObservedOverhead: core.note_overhead,
            Command: self._command(core),
        }
        if core.adapters is not None:
            handlers |= {LoadAdapter: core.adapters.load, UnloadAdapter: core.adapters.unload}
        while (frame := self._link.take()) is not None:
            try:
                message = self._decoder.decode(frame)
                handlers[type(message)](message)
            except Exception as error:  # only this message fails, and running requests go on
                logger.exception("a message could not be handled")
                self._refuse(frame, error)

    def _refuse(self, frame: bytes, error: Exception) -> None:
        """If the message was about a request, tell the front end that it will not be answered."""
        try:
            fields = msgspec.msgpack.decode(frame)
        except msgspec.MsgspecError:
            return  # the error is logged, and the message names no request
        request_id = fields.get("request_id") if isinstance(fields, dict) else None
        if isinstance(request_id, str):
            message = f"The engine could not take the request ({type(error).__name__})"
            self._send(EngineOutputs([RequestDelta(request_id, finish_reason="error", error=message)]))

    def _command(self, core: EngineCore) -> Callable[[Command], None]:
        def handle(command: Command) -> None:
            if command.name == "shutdown":
                self._stopping = True
            else:
                core.command(command)

        return handle

    def _send(self, message: EngineMessage) -> None:
        self._link.send(self._encoded(message))

    def _tell_begun(self, request_ids: list[str]) -> None:
        """For EngineCore. The message must arrive even if a request ends the process at once."""
        self._link.deliver(self._encoded(EngineBegun(request_ids)))

    def _encoded(self, message: EngineMessage) -> bytes:
        message.engine_index = self._launch.engine_index
        return self._encoder.encode(message)

    def _send_progress(self, phase: str, fraction: float, detail: str) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_start_time = phase, now
        self._send(EngineProgress(phase, fraction, detail, now - self._phase_start_time))

    def _beat(self) -> None:
        """Send a sign of life every BEAT_SECONDS, with the predicted time of the step, on a thread of its own."""
        with self._link.beats() as send:
            encoder = msgspec.msgpack.Encoder()
            while True:
                send(encoder.encode(self._sign_of_life()))
                if self._closing.wait(BEAT_SECONDS):
                    return

    def _sign_of_life(self) -> EngineBeat:
        started, config = self._started, self._launch.config
        beat = EngineBeat(0.0, engine_index=self._launch.engine_index)
        if started is not None:
            beat.predicted_seconds = started.core.predicted_seconds
            if config.num_ranks > 1:
                beat.rank, beat.late_ranks = started.executor.describe(), started.executor.late_ranks()
                beat.rank_timeout_seconds = config.distributed_timeout_seconds
        return beat

    def close(self) -> None:
        self._closing.set()
        if self._beats.ident is not None:
            self._beats.join()
        self._link.close()


def _watch_parent(lines: SimpleQueue[bytes]) -> None:
    """Pass the parent's line on. Then wait for the end of standard input, and end the process: the parent is gone."""
    # sys.stdin is not used, because the main thread may end the interpreter while this thread holds its lock.
    line = b""
    while not line.endswith(b"\n"):
        if not (piece := os.read(0, 65_536)):
            os._exit(0)
        line += piece
    lines.put(line)
    while os.read(0, 1):
        pass
    # If the parent was killed, it could not remove the folder of its sockets.
    link = msgspec.json.decode(line, type=EngineLaunch).link
    if isinstance(link, UnixSockets):
        shutil.rmtree(Path(link.input_address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


def _import_engine() -> Exception | None:
    """Import the engine's modules, which takes a second or two. Returns the error, for example too little memory."""
    try:
        load("quire.engine.start")
    except Exception as error:
        return error
    gc.freeze()  # so the garbage collector does not look at the loaded objects again
    return None


def main(num_ranks: int = 0, find_model: FindModel | None = None) -> int:
    """Run an engine process until it is told to stop. Returns the exit code.

    Args:
        num_ranks: the number of processes of further ranks that load their libraries at the same time.
        find_model: see EngineProcess.
    """
    # The parent decides when to stop: a Ctrl-C in the terminal, or a service manager's SIGTERM, reaches both processes,
    # and the parent drains first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process of the terminal may write log lines
    logs.configure()
    start_time = time.monotonic()
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_watch_parent, args=(lines,), name="parent watch", daemon=True).start()
    with spawned_ranks(num_ranks) as interpreters:
        failure = _import_engine()
        launch = msgspec.json.decode(lines.get(), type=EngineLaunch)
        try:
            process = EngineProcess(launch, interpreters, start_time, find_model)
        except (OSError, WireError) as error:
            logger.error("the server cannot be reached: %s", error)
            return 1
        try:
            return process.run() if failure is None else process.fail(failure)
        finally:
            process.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
