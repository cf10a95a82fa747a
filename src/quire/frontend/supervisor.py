"""Keeps an engine running: notices one that has ended, hangs or was stopped, ends it and starts the next.

`Watch` and `RestartPolicy` decide and know neither clocks nor processes; `Supervisor` is the task that acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.errors import EngineDeadError, QuireError
from quire.frontend.client import EngineClient
from quire.frontend.output_processor import error_of
from quire.frontend.stats import FailureReason
from quire.logs import get_logger
from quire.messages import EngineBeat, EngineFailed, EngineMessage, EngineReady

logger = get_logger(__name__)


@dataclass(frozen=True)
class RecoveryLimits:
    """When an engine counts as failed, and how often it is started again. Seconds.

    Args:
        min_step_seconds: a step may take max(this, slow_step_factor x its predicted time).
        silence_seconds: the process sends a beat every second; without one for so long it is stopped or hangs.
        start_silence_seconds: the same while it starts, when reading weights may hold up everything.
        start_seconds: from the start of a process to its first token.
        check_seconds: between two looks at all this.
        max_failures: this one is the last: nothing is started any more.
        good_seconds: an engine that served for so long before it failed has made up for the failures before.
        max_delay_seconds: before a start. The first is at once, then after 1, 2, 4, ... seconds.
    """

    min_step_seconds: float = 10.0
    slow_step_factor: float = 20.0
    silence_seconds: float = 10.0
    start_silence_seconds: float = 60.0
    start_seconds: float = 600.0
    check_seconds: float = 0.25
    max_failures: int = 8
    good_seconds: float = 600.0
    max_delay_seconds: float = 30.0


class Watch:
    """What the engine has shown of itself, and what to think of it. Times are the caller's."""

    def __init__(self, limits: RecoveryLimits, now: float) -> None:
        self._limits = limits
        self.on_start(now)

    def on_start(self, now: float) -> None:
        """A new process."""
        self._start_time = self._beat_time = self._step_time = now
        self._ready_time: float | None = None
        self._sends_beats = False
        self._predicted_seconds = 0.0

    def on_ready(self, now: float) -> None:
        """It has produced a token."""
        self._ready_time = self._beat_time = self._step_time = now

    def on_beat(self, now: float, predicted_seconds: float) -> None:
        """It runs, and its steps in flight should take so long."""
        self._sends_beats, self._beat_time, self._predicted_seconds = True, now, predicted_seconds

    def on_step(self, now: float) -> None:
        """It ended a step, or it had nothing to do until now."""
        self._step_time = now

    def forgive(self, now: float) -> None:
        """This process stood still itself, so nothing could be heard."""
        self._beat_time = self._step_time = now

    @property
    def is_ready(self) -> bool:
        """It has produced a token."""
        return self._ready_time is not None

    def good_seconds(self, now: float) -> float:
        """How long it has served."""
        return 0.0 if self._ready_time is None else now - self._ready_time

    def verdict(self, now: float, *, has_work: bool) -> FailureReason | None:
        """Why it has to be ended; None: it is well."""
        limits = self._limits
        silence = now - self._beat_time
        if self._ready_time is None:
            is_late = now - self._start_time > limits.start_seconds
            return "start" if is_late or silence > limits.start_silence_seconds else None
        if self._sends_beats and silence > limits.silence_seconds:
            return "silent"
        allowed = max(limits.min_step_seconds, limits.slow_step_factor * self._predicted_seconds)
        if has_work and now - self._step_time > allowed:
            # A process that is stopped in a step may be caught here first.
            return "silent" if self._sends_beats and silence > limits.silence_seconds / 2 else "stuck"
        return None


class RestartPolicy:
    """Exponential back-off, and when to give up."""

    def __init__(self, limits: RecoveryLimits) -> None:
        self._limits = limits
        self.num_failures = 0  # without good_seconds between them

    def on_failure(self, good_seconds: float) -> float | None:
        """Seconds to wait before the next start; None: give up.

        Args:
            good_seconds: for which the engine that failed had served.
        """
        if good_seconds >= self._limits.good_seconds:
            self.num_failures = 0
        self.num_failures += 1
        if self.num_failures >= self._limits.max_failures:
            return None
        if self.num_failures == 1:
            return 0.0
        return min(2.0 ** (self.num_failures - 2), self._limits.max_delay_seconds)


class EngineStarter(Protocol):
    """Whoever can start engine processes, one at a time."""

    def launch(self) -> EngineClient:
        """Start a process. Raises OSError."""
        ...

    def kill(self) -> None:
        """End the process at once, whatever its state, and wait until it is gone."""
        ...

    def describe_end(self) -> str | None:
        """How the process ended, for people, if there is something to say."""
        ...


class SupervisedFrontEnd(Protocol):
    """What the supervisor tells: Replica."""

    @property
    def num_unfinished(self) -> int: ...

    def on_message(self, message: EngineMessage) -> None:
        """Raises EngineDeadError if it cannot be answered."""
        ...

    def on_lost(self, reason: FailureReason) -> None:
        """The engine is gone, with all it knew; the next one is on its way."""
        ...

    def on_gone(self, error: QuireError) -> None:
        """The engine is gone, and no other will come."""
        ...


_WHAT = {
    "silent": "The engine process gives no sign of life",
    "stuck": "The engine has not finished a step for too long",
    "start": "The engine did not start in time",
}


class Supervisor:
    """Receives from one engine after another.

    Args:
        client: of the first engine; owned from now on.
        starter: None: the first engine is the only one, and is not judged.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        front_end: SupervisedFrontEnd,
        client: EngineClient,
        starter: EngineStarter | None,
        limits: RecoveryLimits,
        clock: Callable[[], float],
    ) -> None:
        self.client = client
        self.watch = Watch(limits, clock())
        self._front_end, self._starter, self._limits, self._clock = front_end, starter, limits, clock
        self._policy = RestartPolicy(limits)
        self._verdict: FailureReason | None = None

    async def run(self) -> None:
        """Until no engine is left and none will come."""
        checking = asyncio.create_task(self._check(), name="engine watch") if self._starter is not None else None
        try:
            while True:
                error = await self._receive()
                final = error if self._starter is None else await self._replace(self._starter, error)
                if final is not None:
                    self._front_end.on_gone(final)
                    return
        finally:
            if checking is not None:
                checking.cancel()

    async def _receive(self) -> QuireError:
        """Hand messages on until the engine is lost. Answers why."""
        failed: QuireError | None = None
        while True:
            try:
                message = await self.client.receive()
                match message:
                    case EngineBeat():
                        self.watch.on_beat(self._clock(), message.predicted_seconds)
                    case EngineFailed():
                        failed = failed or error_of(message.code, message.message)
                        if self.client.is_alive:
                            return failed
                    case _:
                        if isinstance(message, EngineReady):
                            self.watch.on_ready(self._clock())
                        self._front_end.on_message(message)
            except EngineDeadError as error:  # and nothing is left of what it sent before
                return failed or error
            await asyncio.sleep(0)  # readers run between two messages, however fast these come

    async def _check(self) -> None:
        """Judge the engine again and again; one that fails counts as dead, and `_receive` hears of it."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(self._limits.check_seconds)
            now = self._clock()
            if loop.time() - before > self._limits.check_seconds + self._limits.silence_seconds / 5:
                self.watch.forgive(now)
            reason = self.watch.verdict(now, has_work=self._front_end.num_unfinished > 0)
            if reason is not None and self.client.is_alive:
                self._verdict = reason
                self.client.mark_dead(_WHAT[reason])

    async def _replace(self, starter: EngineStarter, error: QuireError) -> QuireError | None:
        """End what is left of the engine and start the next. Answers why there is none, if so."""
        if not self.watch.is_ready and self._policy.num_failures == 0:
            return error  # it never served: what the user has to know at once
        while True:
            reason: FailureReason = (self._verdict or "crash") if self.watch.is_ready else "start"
            delay = self._policy.on_failure(self.watch.good_seconds(self._clock()))
            self._verdict = None
            self.watch.on_start(self._clock())
            if delay is not None:
                self._front_end.on_lost(reason)
            self.client.close()
            await asyncio.to_thread(starter.kill)
            what = " ".join(filter(None, (error.message, starter.describe_end())))
            if delay is None:
                return EngineDeadError(f"The engine failed {self._policy.num_failures} times. The last time: {what}")
            logger.error("%s Starting it again %s", what, f"in {delay:g} s" if delay else "now")
            await asyncio.sleep(delay)
            self.watch.on_start(self._clock())
            try:
                self.client = starter.launch()
            except OSError as failure:
                error = EngineDeadError(f"The engine process could not be started: {failure.strerror}")
            else:
                return None
