"""Constraints are compiled in processes: one that explodes ends its own request, and a killed process is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire import demo
from quire.errors import CompilerLostError, InvalidRequestError, QuireError, VocabularyError
from quire.frontend import bounded_pool
from quire.frontend.grammar_pool import GrammarPool
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.tokenizer import Tokenizer
from quire.grammar import kept
from quire.grammar.text import grammar_text
from quire.messages import UseTokenizer
from quire.sampling_params import StructuredOutputsParams as Structured
from tests.nursery import BoundedPopen

INPUTS = InputProcessor(Tokenizer.from_folder(demo.path("target")), ModelLimits(512, 4096))
DIGITS = Structured(regex="[0-9]{3}")
# Takes seconds, within all of llguidance's own bounds.
SLOW = Structured(json={"type": "object", "properties": {f"k{index}": {} for index in range(30_000)}})


@pytest.fixture(scope="module", autouse=True)
def bounded_processes() -> Iterator[None]:
    """They are forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", BoundedPopen)
        yield


def compilers() -> list[psutil.Process]:
    """The running grammar processes of this process."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile; a zombie is one of these to psutil
            if GrammarPool.module in child.cmdline() or GrammarPool.module.endswith(child.name()):
                found.append(child)
    return found


def in_pool(use: Callable[[GrammarPool], Awaitable[None]], max_seconds: float = 5.0) -> None:
    async def run() -> None:
        pool = GrammarPool(INPUTS, max_seconds)
        try:
            await use(pool)
        finally:
            pool.close()

    asyncio.run(run())
    assert not compilers()


def test_the_text_is_that_of_the_caller() -> None:
    """And it is kept: a second one needs no process."""

    async def use(pool: GrammarPool) -> None:
        for asked in (DIGITS, Structured(json={"type": "object", "properties": {"ä": {"const": 1.5}}})):
            assert await pool.grammar(asked) == grammar_text(asked)
        (process,) = compilers()
        process.kill()
        while compilers():
            await asyncio.sleep(0.01)
        assert await pool.grammar(DIGITS) == grammar_text(DIGITS)
        assert not compilers()

    in_pool(use)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Structured(regex="("), "unclosed group"),
        (Structured(json={"not": {}}), "not supported: #/not"),
        (Structured(json={"const": float("nan")}), "expected value"),
        (Structured(json={"$ref": "#"}), "has to contain itself"),
        (Structured(grammar="start: start"), "has to contain itself"),
    ],
)
def test_refusals_come_through(asked: Structured, why: str) -> None:
    async def use(pool: GrammarPool) -> None:
        with pytest.raises(InvalidRequestError, match=why):
            await pool.grammar(asked)
        assert len(compilers()) == 1

    in_pool(use)


def nested(levels: int) -> Structured:
    """A schema of objects in objects, by references: llguidance takes a few KiB of its thread's stack for each."""
    schemas = {str(at): {"properties": {"a": {"$ref": f"#/$defs/{at + 1}"}}} for at in range(levels)}
    return Structured(json={"$ref": "#/$defs/0", "$defs": {**schemas, str(levels): {"type": "string"}}})


def test_a_stack_that_overflows_is_the_fault_of_the_constraint() -> None:
    """Half of an engine's stack is allowed: a process alone ends by what would end an engine."""

    async def use(pool: GrammarPool) -> None:
        assert await pool.grammar(nested(200)) == grammar_text(nested(200))
        for levels in (600, 4000):
            with pytest.raises(InvalidRequestError, match="made its process crash"):
                await pool.grammar(nested(levels))
        assert await pool.grammar(DIGITS) == grammar_text(DIGITS)

    in_pool(use)


COMPILE = """
import threading
from quire import demo
from quire.grammar.matchers import Grammars
from quire.grammar.text import grammar_text
from tests.frontend.test_grammar_pool import nested

threading.stack_size(2 << 20)
grammars = Grammars(4096)
grammars.use_tokenizer((demo.path("target") / "tokenizer.json").read_text(), [0])
preparation = grammars.prepare(grammar_text(nested(300)))
preparation.work.result()
"""


def test_what_passes_does_not_end_an_engine_whose_threads_have_small_stacks() -> None:
    """As where the limit of stacks is lifted: a thread has 2 MiB then."""

    async def use(pool: GrammarPool) -> None:
        assert await pool.grammar(nested(300))

    in_pool(use)
    child = subprocess.run([sys.executable, "-c", COMPILE], cwd=Path(__file__).parents[2], check=False, timeout=100)
    assert child.returncode == 0


def test_a_slow_constraint_ends_alone() -> None:
    """The others are compiled meanwhile."""

    async def use(pool: GrammarPool) -> None:
        await pool.grammar(DIGITS)
        slow = asyncio.create_task(pool.grammar(SLOW))
        await asyncio.sleep(0.01)
        for length in range(4, 7):
            await pool.grammar(Structured(regex=f"[0-9]{{{length}}}"))
        with pytest.raises(InvalidRequestError, match="more processor time than it may have"):
            await slow

    in_pool(use, max_seconds=0.3)


def test_nobody_waits_for_the_work_of_callers_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that gives up and asks again would else fill the queue with constraints that nobody wants."""
    monkeypatch.setattr(bounded_pool, "MAX_PROCESSES", 1)
    exchange, compiled = bounded_pool._BoundedProcess.exchange, list[bytes]()

    async def recorded(process: bounded_pool._BoundedProcess, frame: bytes) -> bytes:
        compiled.append(frame)
        return await exchange(process, frame)

    monkeypatch.setattr(bounded_pool._BoundedProcess, "exchange", recorded)

    async def use(pool: GrammarPool) -> None:
        await pool.grammar(DIGITS)
        (process,) = compilers()
        process.suspend()
        waiting = [asyncio.create_task(pool.grammar(Structured(regex=f"[0-9]{{{length}}}"))) for length in range(4, 9)]
        while len(compiled) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(2 * bounded_pool.PATIENCE_SECONDS)
        for task in waiting[1:-1]:
            task.cancel()
        await asyncio.wait(waiting[1:-1])
        process.resume()
        await asyncio.gather(waiting[0], waiting[-1])
        assert len(compiled) == 3, "DIGITS, and the constraints of the first and the last caller"

    in_pool(use)


def test_no_process_starts_for_callers_that_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_pool, "PATIENCE_SECONDS", 1.0)

    async def use(pool: GrammarPool) -> None:
        await pool.grammar(DIGITS)
        (process,) = compilers()
        process.suspend()
        first, *others = [asyncio.create_task(pool.grammar(Structured(regex=f"[0-9]{{{n}}}"))) for n in range(4, 7)]
        await asyncio.sleep(0.01)
        for task in others:
            task.cancel()
        await asyncio.sleep(1.5 * bounded_pool.PATIENCE_SECONDS)
        assert compilers() == [process], "a process for those who have left"
        first.cancel()
        process.resume()

    in_pool(use)


def test_a_process_that_is_killed_at_any_stage_is_replaced() -> None:
    """While it is idle, while it starts, while it compiles: the request is tried again once."""

    async def use(pool: GrammarPool) -> None:
        first = asyncio.create_task(pool.grammar(DIGITS))
        while not compilers():
            await asyncio.sleep(0.001)
        compilers()[0].kill()  # while it starts
        assert await first == grammar_text(DIGITS)
        compilers()[0].kill()  # while it is idle
        assert await pool.grammar(Structured(regex="[0-9]{4}"))
        (process,) = compilers()
        os.kill(process.pid, signal.SIGSTOP)
        compiling = asyncio.create_task(pool.grammar(Structured(regex="[0-9]{5}")))
        await asyncio.sleep(0.05)
        process.kill()  # while it compiles
        assert await compiling == grammar_text(Structured(regex="[0-9]{5}"))

    in_pool(use)


def test_processes_that_all_die_are_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_pool, "send", lambda connection, preparation: [each.kill() for each in compilers()])

    async def use(pool: GrammarPool) -> None:
        with pytest.raises(CompilerLostError, match="ended or stood still"):
            await pool.grammar(DIGITS)

    in_pool(use)


def test_a_vocabulary_without_tables_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them takes too long, or llguidance does not know the kind of tokenizer."""

    async def use(pool: GrammarPool) -> None:
        with pytest.raises(VocabularyError, match="cannot be used for constraints") as error:
            await pool.grammar(DIGITS)
        assert error.value.status == 501

    in_pool(use, max_seconds=0.001)
    monkeypatch.setattr(InputProcessor, "use_tokenizer", lambda inputs: UseTokenizer("{}", [0]))
    in_pool(use)


BROKEN = """from quire.frontend import grammar_process
def broken(asked, special_ids):
    raise {error}
grammar_process.grammar_text = broken
grammar_process.main()"""


@pytest.mark.parametrize("error", ["KeyError('a defect')", "type('Panic', (BaseException,), {})('a defect')"])
def test_a_defect_is_answered_as_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    """Not as a process that was lost: it is not tried again, and the process goes on."""
    Popen = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return Popen([sys.executable, "-c", BROKEN.format(error=error), GrammarPool.module], **options)

    monkeypatch.setattr(bounded_pool.subprocess, "Popen", popen)

    async def use(pool: GrammarPool) -> None:
        for _ in range(2):
            with pytest.raises(QuireError, match="failed") as raised:
                await pool.grammar(DIGITS)
            assert raised.value.code == "internal_error"
        assert caplog.text.count("Traceback") == caplog.text.count("a defect") == 2
        assert len(compilers()) == 1

    in_pool(use)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constraint that needs more than its process may have ends with 400, here 2 GiB in place of a grammar."""
    Popen = subprocess.Popen
    program = BROKEN.replace("raise {error}", "return bytearray(1 << 31)")

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return Popen([sys.executable, "-c", program, GrammarPool.module], **options)

    monkeypatch.setattr(bounded_pool.subprocess, "Popen", popen)

    async def use(pool: GrammarPool) -> None:
        with pytest.raises(InvalidRequestError, match="needed more memory"):
            await pool.grammar(DIGITS)

    in_pool(use)


def test_what_was_asked_for_last_is_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_KEPT", 3)

    async def use(pool: GrammarPool) -> None:
        for length in range(1, 6):
            await pool.grammar(Structured(regex=f"[0-9]{{{length}}}"))
        assert len(pool._kept) == 3

    in_pool(use)
