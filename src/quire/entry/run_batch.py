"""`quire run-batch`: answers OpenAI's batch files without a server. The engine runs until all lines have answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import uvloop
from starlette.applications import Starlette
from tqdm import tqdm

from quire import logs
from quire.config import EngineConfig, ServerConfig
from quire.entry.launch import open_model, start_async_engine
from quire.entry.serve import server_settings
from quire.entry.spawn import EngineInterpreter
from quire.errors import ConfigError
from quire.frontend.supervisor import ready_seconds
from quire.screen.start_display import shown_start
from quire.server.app import create_app
from quire.server.batch_lines import answer_line, entry_id
from quire.server.state import ServerState


@dataclass(frozen=True)
class BatchFiles:
    """The file of requests, and the file of their answers. Raises ConfigErrors."""

    input: Path
    output: Path

    def __post_init__(self) -> None:
        if not self.input.is_file():
            raise ConfigError(
                "The input file does not exist",
                value=str(self.input),
                expected="a file of JSON lines; one at a URL has to be downloaded first",
                param="input_file",
            )
        if not self.output.parent.is_dir():
            raise ConfigError(
                "The folder of the output file does not exist", value=str(self.output), param="output_file"
            )

    @property
    def partial(self) -> Path:
        """The file with the answers so far, in the order in which they came."""
        return self.output.with_name(self.output.name + ".partial")


class _Seen(msgspec.Struct):
    id: str
    error: dict[str, Any] | None = None


class _Answers:
    """The entries of the output file that are written so far.

    Args:
        file: the partial file, open for reading and writing. The half line of an interrupted run is cut off.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._seen: dict[str, tuple[int, bool]] = {}  # id -> place in the file, whether it is an error
        self._places: dict[int, int] = {}  # number of the line in the input -> place
        self.num_errors = 0
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            seen = msgspec.json.decode(line, type=_Seen)
            self._seen[seen.id] = (end, seen.error is not None)
            end += len(line)
        file.seek(end)
        file.truncate()

    @property
    def num_lines(self) -> int:
        return len(self._places)

    def has(self, number: int, line_id: str) -> bool:
        """Whether an earlier run has answered the line."""
        if (seen := self._seen.get(line_id)) is None:
            return False
        self._places[number], is_error = seen
        self.num_errors += is_error
        return True

    def add(self, number: int, entry: bytes, *, is_error: bool) -> None:
        self._places[number] = self._file.tell()
        self.num_errors += is_error
        self._file.write(entry + b"\n")
        self._file.flush()

    def write_sorted(self, path: Path) -> None:
        """Write all entries in the order of the input."""
        with path.open("wb") as file:
            for number in sorted(self._places):
                self._file.seek(self._places[number])
                file.write(self._file.readline())


def run_batch(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    files: BatchFiles,
    interpreters: Sequence[EngineInterpreter],
    *,
    is_quiet: bool,
) -> int:
    """Answer every line, except the lines that an interrupted run has answered. The output file appears at the end.

    Returns the exit code 0, also if lines have errors. Raises QuireErrors if the engine does not start or has ended.
    """
    with ExitStack() as start:
        progress = start.enter_context(shown_start(is_quiet=is_quiet))
        parts = open_model(engine_config, progress)
        settings = server_settings(engine_config, server_config, parts)
        engine, processes = start_async_engine(engine_config, parts, interpreters=interpreters)
        engine.on_progress = lambda report: progress(report.phase, report.fraction, report.detail)
        app = create_app(engine, parts.tokenizer, settings)
        try:
            answers = uvloop.run(_run(app, files, start.close, is_quiet=is_quiet))
        finally:
            processes.stop()
    logs.say(f"{answers.num_lines} lines answered, {answers.num_errors} of them with an error: {files.output}")
    return 0


async def _run(app: Starlette, files: BatchFiles, on_ready: Callable[[], None], *, is_quiet: bool) -> _Answers:
    state: ServerState = app.state.quire
    state.engine.start()
    try:
        ready = await state.engine.wait_ready(ready_seconds())
        state.engine.on_progress = None
        on_ready()
        with files.partial.open("a+b") as partial, files.input.open("rb") as lines:
            partial.seek(0)
            answers = _Answers(partial)
            with tqdm(total=_num_lines(files.input), disable=is_quiet or None, unit="line", dynamic_ncols=True) as bar:
                todo = _todo(lines, answers, bar)
                num_workers = 2 * ready.max_num_seqs * ready.num_lanes * len(state.engine.replicas)
                await asyncio.gather(*(_work(app, state, todo, answers, bar) for _ in range(num_workers)))
            unsorted = files.output.with_name(files.output.name + ".new")
            answers.write_sorted(unsorted)
        os.replace(unsorted, files.output)
        files.partial.unlink()
    finally:
        await state.close()
        await state.engine.shutdown()
    return answers


async def _work(
    app: Starlette, state: ServerState, todo: Iterator[tuple[int, bytes]], answers: _Answers, bar: tqdm[Any]
) -> None:
    """Answer one line after the other. Several of these tasks share the lines."""
    for number, line in todo:
        entry = await answer_line(app, entry_id(number, line), line)
        if (error := state.engine.error) is not None:
            raise error  # the next run answers the lines that are left
        answers.add(number, msgspec.json.encode(entry), is_error=entry.error is not None)
        bar.update()


def _todo(lines: IO[bytes], answers: _Answers, bar: tqdm[Any]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        if answers.has(number, entry_id(number, line)):
            bar.update()
        else:
            yield number, line


def _num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(bool(line.strip()) for line in file)
