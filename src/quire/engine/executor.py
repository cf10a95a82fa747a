"""Executors that take workers through their life: in the caller's thread, or each on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

from quire import envs
from quire.distributed.group import StepVoid
from quire.engine.worker_thread import WorkerThread
from quire.errors import AdapterChangedError, EngineDeadError, PeerLostError, QuireError
from quire.life_cycle import AdapterLoad, CacheSize, Measured, Worker, Workers, WorkerSettings
from quire.logs import get_logger
from quire.lora.facts import AdapterFacts
from quire.resolve import DeviceFacts
from quire.schedule import Pending, Polled, RowsFailedError, ScheduledBatch, StepResult, StepTokens

logger = get_logger(__name__)

LOOK_SECONDS = 0.25  # seconds between two checks of ranks that compute
LEAVE_SECONDS = 2.0  # the time in which ranks stop waiting after a rank has failed
GRACE_SECONDS = 1.0  # the time in which a rank names the rank that it waited for

T = TypeVar("T")


class InlineExecutor:
    """Calls all workers in the caller's thread, phase by phase. Steps work only with one worker.

    The device of this worker may run ahead.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def facts(self, wants_gpu: bool) -> list[DeviceFacts]:
        return self._tell(lambda worker: worker.facts(wants_gpu), "loading its libraries")

    def load(self, settings: WorkerSettings) -> None:
        self._tell(lambda worker: worker.load(settings), "reading its weights")

    def measure(self) -> list[Measured]:
        return self._tell(lambda worker: worker.measure(), "measuring its working memory")

    def allocate(self, size: CacheSize) -> None:
        self._tell(lambda worker: worker.allocate(size), "allocating its KV cache")

    def capture(self) -> None:
        self._tell(lambda worker: worker.capture(), "preparing its steps")

    def use_tokenizer(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        self.workers[0].use_tokenizer(tokenizer, eos_token_ids)

    def prepare_grammar(self, text: str) -> Polled[object]:
        return self.workers[0].prepare_grammar(text)

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return any(self._tell(lambda worker: worker.use_idle_time(num_blocks_ever_used)))

    def check_alive(self) -> None:
        self._tell(lambda worker: worker.check_alive())

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> Polled[AdapterFacts]:
        return _AllLoads([worker.load_adapter(path, digest, is_awaited) for worker in self.workers], self._run_on)

    def drop_adapter(self, digest: str) -> None:
        for rank, worker in enumerate(self.workers):
            self._run_on(rank, partial(worker.drop_adapter, digest))

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        assert len(self.workers) == 1, "ranks compute side by side"
        return self.workers[0].submit(batch)

    def describe(self) -> str:
        return self.workers[0].describe()

    def late_ranks(self) -> str:
        return ""

    def shutdown(self) -> None:
        for worker in self.workers:
            worker.close()

    def _run_on(self, rank: int, task: Callable[[], None]) -> None:
        """Run a function on a rank, after the submitted steps and before later ones."""
        task()

    def _tell(self, step: Callable[[Worker], T], phase: str = "") -> list[T]:
        """Call all workers, and return their answers.

        Args:
            phase: the name of a phase of the start, for errors; empty: it is no phase of the start.
        """
        return [step(worker) for worker in self.workers]


class ThreadExecutor(InlineExecutor):
    """Calls each worker on a thread of its own. Workers compute side by side while the caller schedules the next step.

    With several workers there are two time limits. If the start takes longer than ENGINE_READY_TIMEOUT_S, or if no rank
    makes progress in a step for `timeout_seconds`, it raises EngineDeadError.

    Args:
        start_time: the time of the start of the engine, on the monotonic clock; None: now.
        timeout_seconds: the most seconds that a rank may wait for another one.
        loads: for each rank, the semaphore that it holds while it reads weights; none: all ranks read at once.
    """

    def __init__(
        self,
        workers: Workers,
        start_time: float | None = None,
        timeout_seconds: float = 600.0,
        *,
        loads: Sequence[AbstractContextManager[object]] = (),
    ) -> None:
        super().__init__(workers)
        self._takes_turns, self._runs_ahead = bool(loads), False
        self._loads = loads or [nullcontext()] * len(workers)
        self._queuing: set[int] = set()  # the ranks that have to wait until others have read their weights
        self._timeout_seconds = timeout_seconds
        self._awaited: Sequence[_Step] = ()  # the results of the step that is waited for
        self._given_up: set[int] = set()
        self._looks: list[Future[None]] = []  # see check_alive
        self._behind: Sequence[_Step] = ()  # see _Led
        start_time = time.monotonic() if start_time is None else start_time
        self._ready_by = start_time + envs.ENGINE_READY_TIMEOUT_S.get()
        self._threads = [WorkerThread(f"quire-worker-{rank}") for rank in range(len(workers))]

    def load(self, settings: WorkerSettings) -> None:
        self._runs_ahead = settings.device.device == "cuda" and settings.steps_in_flight > 1
        ranks = {id(worker): rank for rank, worker in enumerate(self.workers)}
        self._queuing = set(ranks.values())
        has_failed = threading.Event()

        def load(worker: Worker) -> None:
            rank = ranks[id(worker)]
            with self._loads[rank]:
                self._queuing.discard(rank)
                if self._takes_turns and has_failed.is_set():  # the start ends with the error of another rank
                    return
                try:
                    worker.load(settings)
                except BaseException:
                    has_failed.set()
                    raise

        self._tell(load, "reading its weights")

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        if self._runs_ahead:
            return _Ahead(self, self._on_threads(lambda worker: worker.submit(batch)), batch.step_id)
        first, *others = self._begin([batch] * len(self.workers))
        return _Led(first, others, self.take_in_led) if others else first

    def _begin(self, batches: Sequence[ScheduledBatch]) -> list[_Step]:
        """Let all ranks compute a step. There is a batch for each rank.

        Other processes are told here: their threads would wait for Python's lock, which the first rank's thread holds.
        """
        begun = [None] + [
            worker.begin(batch) if thread.is_idle else None
            for thread, worker, batch in zip(self._threads[1:], self.workers[1:], batches[1:], strict=True)
        ]
        return [
            thread.submit(worker.execute, batch) if step is None else _Begun(step)
            for thread, worker, batch, step in zip(self._threads, self.workers, batches, begun, strict=True)
        ]

    def _heard(self, steps: Sequence[_Step]) -> list[Future[StepResult]]:
        """The same steps, of all ranks or of the first ones. The ranks' threads wait for them."""
        return [
            thread.submit(step.result) if isinstance(step, _Begun) else step
            for thread, step in zip(self._threads, steps, strict=False)
        ]

    def take_in_led(self, first: _Step, others: Sequence[_Step]) -> StepResult:
        """See _Led."""
        before, self._behind = self._behind, ()
        for step in before:
            if isinstance(step, _Begun):
                step.next_step = first
        self._await([first, *before])
        if first.exception() is not None or not all(thread.is_idle for thread in self._threads[1:]):
            _, *before = self._heard([first, *before])
            self._await([first, *before])
        answers = self._answers(before)
        if (is_lost := len(answers) < len(before)) or first.exception() is not None:
            ended: list[_Step] = [*self._heard([first, *others])]
            self.await_all(ended)
            if is_lost:
                ended[1 + len(answers)] = before[len(answers)]  # it says why
            _results(ended)
        self._behind, result = others, first.result()
        result.ranks += tuple(each.ranks[0] for each in answers if each is not None and each.ranks)
        return result

    def _answers(self, steps: Sequence[_Step]) -> list[StepResult | None]:
        """The answers of the other ranks to a step that the first one has ended. They end before that of a lost rank.

        None: the rank has failed behind its part of the step. This is only logged, because the step is complete.
        """
        answers: list[StepResult | None] = []
        for rank, step in enumerate(steps, 1):
            error = step.exception()
            if isinstance(error, EngineDeadError):
                break
            if error is not None:
                logger.error("worker %d of %d failed behind a step: %s", rank + 1, len(self.workers), error)
            answers.append(None if error is not None else step.result())
        return answers

    def take_in(self, launches: Sequence[Future[Pending[StepResult]]]) -> list[Future[StepResult]]:
        """Take in the results of a step on all threads. Steps that were submitted meanwhile are launched before."""
        return [
            thread.submit(lambda launch: launch.result().result(), launch)
            for thread, launch in zip(self._threads, launches, strict=True)
        ]

    def check_alive(self) -> None:
        """See WorkerExecutor. A rank whose thread is busy is looked at later: its process may hang."""
        if all(look.done() for look in self._looks):
            self._looks = self._on_threads(lambda worker: worker.check_alive())
        done, _ = wait(self._looks, LEAVE_SECONDS)
        _results([look for look in self._looks if look in done])

    def late_ranks(self) -> str:
        pending = [rank for rank, step in enumerate(self._awaited) if not step.done()]
        late = self.workers[0].late(pending) if pending else {}
        return "; ".join(f"{self.workers[rank].describe()} {doing}" for rank, doing in late.items())

    def shutdown(self) -> None:
        for rank, thread in enumerate(self._threads):
            thread.shutdown(wait=rank not in self._given_up)
        super().shutdown()

    def await_all(self, steps: Sequence[_Step]) -> None:
        """Wait until the step has ended on all ranks.

        Raises EngineDeadError if it does not end, or if a rank has failed that has answered before.
        """
        self._await(steps)
        dead = [step.exception() for step in steps if _is_dead(step)]
        if dead and all(isinstance(error, PeerLostError) for error in dead):
            self.check_alive()  # the rank that has failed says why

    def _await(self, steps: Sequence[_Step]) -> None:
        """Wait until these are done: one of each rank. Raises EngineDeadError if one does not end."""
        self._awaited = steps
        patience: _Patience | None = None
        for step in steps:
            while not step.done():
                with suppress(TimeoutError):
                    step.exception(LOOK_SECONDS)
                    break
                patience = patience or _Patience(self._timeout_seconds)
                if patience.is_over(steps, self.workers[0].whereabouts()):
                    self._give_up(steps)
        self._awaited = ()

    def _give_up(self, steps: Sequence[_Step]) -> None:
        """Raise EngineDeadError for a rank that has failed, or for ranks that are late."""
        late = self.late_ranks()
        self._given_up = {rank for rank, step in enumerate(steps) if not step.done()}
        if not self._given_up:
            return  # the last result has just come
        dead = [step for step in steps if _is_dead(step)]
        self._let_go()
        _results(dead)
        raise EngineDeadError(
            f"{late}, and has made no progress for {self._timeout_seconds:g} s (--distributed-timeout-seconds)"
        )

    def _let_go(self) -> None:
        """Stop waiting for the ranks that are given up, because the program may end before the engine is closed."""
        for rank in sorted(self._given_up):
            self.workers[rank].give_up()
            self._threads[rank].shutdown(wait=False)

    def _run_on(self, rank: int, task: Callable[[], None]) -> None:
        self._threads[rank].submit(task).add_done_callback(_log_failure)

    def _tell(self, step: Callable[[Worker], T], phase: str = "") -> list[T]:
        pending = self._on_threads(step)
        if phase and len(pending) > 1:
            self._wait(pending, phase)
        return _results(pending)

    def _on_threads(self, task: Callable[[Worker], T]) -> list[Future[T]]:
        return [thread.submit(task, worker) for thread, worker in zip(self._threads, self.workers, strict=True)]

    def _wait(self, pending: Sequence[Future[T]], phase: str) -> None:
        """Wait until all are done. Raises EngineDeadError when the start takes too long."""
        late = wait(pending, self._ready_by - time.monotonic()).not_done
        if not late:
            return
        self._given_up = {rank for rank, each in enumerate(pending) if each in late}
        self._let_go()
        limit = envs.ENGINE_READY_TIMEOUT_S
        to_blame = self._given_up - self._queuing or self._given_up
        names = ", ".join(self.workers[rank].describe() for rank in sorted(to_blame))
        raise EngineDeadError(f"{names} did not end {phase} in time: a start may take {limit.get()} s ({limit.name})")


class PipelineExecutor(ThreadExecutor):
    """Executes on the workers of several pipeline stages. Other ranks learn the sampled tokens with a later batch.

    This is early enough, because a row waits for its own token before it is scheduled again.
    """

    _untold: tuple[StepTokens, ...] = ()  # what the other ranks have not learnt yet

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        batch.tokens_before, self._untold = list(self._untold), ()
        return _Noted(super().submit(batch), self._note)

    def _note(self, result: StepResult) -> None:
        self._untold += (StepTokens(result.step_id, result.token_ids),)


class LanesExecutor(ThreadExecutor):
    """Executes on the workers of several lanes of equal size. Each worker gets the batch of its lane."""

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        width = len(self.workers) // len(batch.lanes)
        steps = self._begin([batch.lanes[rank // width] for rank in range(len(self.workers))])
        return _AllRanks(self._heard(steps), batch.step_id, self.await_all, width)


class _Ahead:
    """A step of several ranks whose devices compute behind their hosts.

    Args:
        launches: for each rank, the launched step.
    """

    def __init__(self, executor: ThreadExecutor, launches: Sequence[Future[Pending[StepResult]]], step_id: int) -> None:
        self._executor, self._launches, self._step_id = executor, launches, step_id

    def result(self) -> StepResult:
        steps = self._executor.take_in(self._launches)
        return _AllRanks(steps, self._step_id, self._executor.await_all).result()


class _Noted:
    """A pending step that also passes its result to a function."""

    def __init__(self, pending: Pending[StepResult], note: Callable[[StepResult], None]) -> None:
        self._pending, self._note = pending, note

    def result(self) -> StepResult:
        result = self._pending.result()
        self._note(result)
        return result


class _Begun:
    """A step of a rank that was begun: see Worker.begin. Its methods are those of a Future.

    `result` and `exception` wait without a limit. They do not wait if the next step has ended without an error.

    Attributes:
        next_step: the first rank's next step, when there is one.
    """

    def __init__(self, pending: Pending[StepResult]) -> None:
        self._pending = pending
        self._outcome: StepResult | Exception | None = None
        self.next_step: _Step | None = None

    def done(self) -> bool:
        return self.next_step is not None and self.next_step.done()

    def exception(self, timeout: float | None = None) -> Exception | None:
        try:
            self.result()
        except Exception as error:
            return error
        return None

    def result(self) -> StepResult:
        if self._outcome is None:
            try:
                self._outcome = self._pending.result()
            except Exception as error:
                self._outcome = error
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


_Step = Future[StepResult] | _Begun


class _Led:
    """A step of several ranks that the first one leads: only its result counts, and only it is waited for.

    When it has ended the step, the others have computed their parts of it: it needed all of them. They answer
    meanwhile, and their answers are read with the next step. If one of them failed behind its part, that is logged, and
    if it is lost, the next step fails. If the first one has failed, the others are waited for, because they may know
    why.

    Args:
        take_in: the method of the executor that waits for the first rank's step.
    """

    def __init__(
        self, first: _Step, others: Sequence[_Step], take_in: Callable[[_Step, Sequence[_Step]], StepResult]
    ) -> None:
        self._first, self._others, self._take_in = first, others, take_in

    def result(self) -> StepResult:
        return self._take_in(self._first, self._others)


class _AllRanks:
    """A step of several ranks. The first rank of each lane has a result. The joined result has the times of all ranks.

    Args:
        await_all: returns when the step has ended on all ranks.
        width: the number of ranks of a lane; None: there is one lane.
    """

    def __init__(
        self,
        steps: Sequence[Future[StepResult]],
        step_id: int,
        await_all: Callable[[Sequence[Future[StepResult]]], None],
        width: int | None = None,
    ) -> None:
        self._steps, self._step_id, self._await_all, self._width = steps, step_id, await_all, width

    def result(self) -> StepResult:
        self._await_all(self._steps)
        results = _results(self._steps)
        ranks = tuple(each.ranks[0] for each in results if each.ranks)
        joined = results[0] if self._width is None else StepResult.of_lanes(self._step_id, results[:: self._width])
        joined.ranks = ranks
        return joined


class _Patience:
    """Decides how long a step of several ranks is waited for: as long as any of them makes progress."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds, self._since = timeout_seconds, time.monotonic()
        self._seen: tuple[object, ...] = ()

    def is_over(self, steps: Sequence[_Step], whereabouts: tuple[object, ...]) -> bool:
        ended = [step.done() for step in steps]
        if self._seen != (seen := (ended, whereabouts)):
            self._seen, self._since = seen, time.monotonic()
        limit = LEAVE_SECONDS if any(map(_is_dead, steps)) else self._timeout_seconds + GRACE_SECONDS
        return time.monotonic() - self._since > limit


def _is_dead(step: _Step) -> bool:
    """Whether the rank is known to be lost; a step that was begun does not say so before its answer is read."""
    return isinstance(step, Future) and step.done() and isinstance(step.exception(), EngineDeadError)


class _AllLoads:
    """An AdapterLoad of all ranks: they add the adapter when all of them have read it."""

    def __init__(self, loads: Sequence[AdapterLoad], run_on: Callable[[int, Callable[[], None]], None]) -> None:
        self._loads, self._run_on = loads, run_on

    def done(self) -> bool:
        return all(load.done() for load in self._loads)

    def result(self) -> AdapterFacts:
        facts, *others = _results(self._loads)
        if any(other.digest != facts.digest for other in others):
            raise AdapterChangedError(
                "The adapter's files changed while the ranks read them",
                fix="Load the adapter again when all files are written",
            )
        for rank, load in enumerate(self._loads):
            self._run_on(rank, load.add)
        return facts


def _log_failure(future: Future[None]) -> None:
    """Log the error of a task. Nobody else asks for its result."""
    if (error := future.exception()) is not None:
        logger.error("a worker's task between steps failed", exc_info=error)


def _results(pending: Sequence[Pending[T]]) -> list[T]:
    """Wait for the results of all ranks. If some failed, the most informative error is raised and the others logged."""
    results: list[T] = []
    errors: list[tuple[int, Exception]] = []
    for rank, each in enumerate(pending):
        try:
            results.append(each.result())
        except Exception as error:
            errors.append((rank, error))
    if not errors:
        return results
    rank, worst = min(errors, key=lambda failed: _weight(failed[1]))
    for other, less in errors:
        if other != rank and not isinstance(less, StepVoid) and str(less) != str(worst):
            logger.error("worker %d of %d failed too: %s", other + 1, len(pending), less)
    if len(pending) == 1 or _weight(worst) < 3:
        raise worst
    raise RuntimeError(f"Worker {rank + 1} of {len(pending)} failed: {type(worst).__name__}: {worst}") from worst


def _weight(error: Exception) -> int:
    """The rank of an error; the error with the lowest number is raised.

    0: the engine is dead. 1: the error is meant for the user. 2: the engine is dead because of another rank. 3: any
    other error. 4: another rank has left the step.
    """
    if isinstance(error, EngineDeadError):
        return 2 if isinstance(error, PeerLostError) else 0
    if isinstance(error, (QuireError, RowsFailedError)):
        return 1
    return 4 if isinstance(error, StepVoid) else 3
