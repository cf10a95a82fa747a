"""Keeps an engine running. It finds an engine that has ended, hangs or was stopped, ends it and starts the next one.

`Watch` and `RestartPolicy` decide, without clocks and processes. `Supervisor` is the task that acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire import envs
from quire.errors import EngineDeadError, QuireError
from quire.frontend.client import EngineClient
from quire.frontend.output_processor import error_of
from quire.frontend.stats import FailureReason
from quire.logs import get_logger
from quire.messages import EngineBeat, EngineFailed, EngineMessage, EngineProgress, EngineReady

logger = get_logger(__name__)

START_GRACE_SECONDS = 5.0  # the time in which an engine itself can say which of its ranks is late


def start_seconds() -> float:
    """The seconds that a process may take until its first token."""
    return envs.ENGINE_READY_TIMEOUT_S.get() + START_GRACE_SECONDS


def ready_seconds() -> float:
    """The seconds to wait for an engine. If a supervisor gives the engine up, it says so earlier."""
    return start_seconds() + START_GRACE_SECONDS


@dataclass(frozen=True)
class RecoveryLimits:
    """The rules for failed engines and restarts, in seconds.

    Args:
        min_step_seconds: a step may take max(this, slow_step_factor x its predicted time).
        silence_seconds: the process sends a beat every second. Without a beat for this time it is stopped or hangs.
        start_silence_seconds: the same during the start, because reading weights may delay everything.
        start_seconds: the most time from the start of a process to its first token.
        check_seconds: between two checks.
        max_failures: after this failure no engine is started again.
        good_seconds: if an engine served this long before it failed, earlier failures do not count.
        max_delay_seconds: the longest wait before a start. The first start is at once, then after 1, 2, 4, ... seconds.
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
    """Follows an engine's signs of life and judges them. The caller gives the times."""

    def __init__(self, limits: RecoveryLimits, now: float) -> None:
        self._limits = limits
        self.on_start(now)

    def on_start(self, now: float) -> None:
        """Note that a new process starts."""
        self._start_time = self._beat_time = self._step_time = now
        self._ready_time: float | None = None
        self._sends_beats = False
        self._beat = EngineBeat(0.0)

    def on_ready(self, now: float) -> None:
        """The engine has produced a token."""
        self._ready_time = self._beat_time = self._step_time = now

    def on_beat(self, now: float, beat: EngineBeat) -> None:
        self._sends_beats, self._beat_time, self._beat = True, now, beat

    def on_step(self, now: float) -> None:
        """Note that the engine has ended a step, or that it had no work until now."""
        self._step_time = now

    def forgive(self, now: float) -> None:
        """Excuse missing beats, because this process stood still itself and could not receive them."""
        self._beat_time = self._step_time = now

    @property
    def is_ready(self) -> bool:
        """The engine has produced a token."""
        return self._ready_time is not None

    def good_seconds(self, now: float) -> float:
        """The seconds for which the engine has served."""
        return 0.0 if self._ready_time is None else now - self._ready_time

    def verdict(self, now: float, *, has_work: bool) -> FailureReason | None:
        """The reason to end the engine; None: it is well."""
        limits = self._limits
        silence = now - self._beat_time
        if self._ready_time is None:
            is_late = now - self._start_time > limits.start_seconds
            return "start" if is_late or silence > limits.start_silence_seconds else None
        if self._sends_beats and silence > limits.silence_seconds:
            return "silent"
        if has_work and now - self._step_time > self._allowed_seconds:
            # A process that was stopped during a step may be found here first.
            return "silent" if self._sends_beats and silence > limits.silence_seconds / 2 else "stuck"
        return None

    @property
    def _allowed_seconds(self) -> float:
        """The seconds that a step may take."""
        return max(self._limits.min_step_seconds, self._limits.slow_step_factor * self._beat.predicted_seconds)

    def describe(self, verdict: FailureReason, now: float, *, has_work: bool) -> str:
        """What a verdict means, for people, with the ranks to blame if the last beat has named them."""
        limits, beat, what = self._limits, self._beat, _WHAT[verdict]
        if verdict == "start" or not beat.rank:
            return what
        if verdict == "silent":
            phase = "in a step" if has_work else "between steps"
            return f"{what}: {beat.rank} has sent nothing for {now - self._beat_time:.0f} s, {phase}"
        return (
            f"{what}: {beat.late_ranks or beat.rank}. A step may take {self._allowed_seconds:g} s "
            f"({limits.slow_step_factor:g} times what is predicted, at least {limits.min_step_seconds:g} s), and a "
            f"rank waits {beat.rank_timeout_seconds} s for another one (--distributed-timeout-seconds)"
        )


class RestartPolicy:
    """Exponential back-off, with an end."""

    def __init__(self, limits: RecoveryLimits) -> None:
        self._limits = limits
        self.num_failures = 0  # failures without good_seconds between them

    def on_failure(self, good_seconds: float) -> float | None:
        """Seconds to wait before the next start; None: give up.

        Args:
            good_seconds: the time for which the failed engine had served.
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
    """Starts engine processes, one at a time."""

    def launch(self) -> EngineClient:
        """Start a process. Raises OSError."""
        ...

    def kill(self) -> None:
        """End the process at once, in every state, and wait until it is gone."""
        ...

    def describe_end(self) -> str | None:
        """A text for people about the end of the process, or None."""
        ...


class SupervisedFrontEnd(Protocol):
    """The listener of the supervisor: Replica."""

    @property
    def num_unfinished(self) -> int: ...

    def on_message(self, message: EngineMessage) -> None:
        """Take a message. Raises EngineDeadError if the engine cannot be answered."""
        ...

    def on_lost(self, reason: FailureReason, why: str) -> None:
        """The engine is gone with all its results, and the next one starts. `why` is for people."""
        ...

    def on_gone(self, error: QuireError) -> None:
        """The engine is gone, and no other one will start."""
        ...


_WHAT = {
    "silent": "The engine process gives no sign of life",
    "stuck": "The engine has not finished a step for too long",
    "start": f"The engine did not start in time ({envs.ENGINE_READY_TIMEOUT_S.name}), or gave no sign of life",
}


class Supervisor:
    """Receives from one engine after another.

    Args:
        client: the client of the first engine; the supervisor owns it.
        starter: None: the first engine is the only one, and it is not checked.
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
        self._progress: EngineProgress | None = None  # the progress of the last start

    async def run(self) -> None:
        """Run until no engine is left and no other one will start."""
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
        """Pass messages on until the engine is lost. Returns the reason."""
        failed: QuireError | None = None
        while True:
            try:
                message = await self.client.receive()
                match message:
                    case EngineBeat():
                        self.watch.on_beat(self._clock(), message)
                    case EngineFailed():
                        failed = failed or error_of(message.code, message.message)
                        if self.client.is_alive:
                            return failed
                    case _:
                        if isinstance(message, EngineProgress):
                            self._progress = message
                        elif isinstance(message, EngineReady):
                            self.watch.on_ready(self._clock())
                        self._front_end.on_message(message)
            except EngineDeadError as error:  # all its earlier messages were received
                return failed or error
            await asyncio.sleep(0)  # readers run between two messages, even if messages come fast

    async def _check(self) -> None:
        """Check the engine repeatedly. A failed engine is marked as dead, and `_receive` notices it."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(self._limits.check_seconds)
            now = self._clock()
            if loop.time() - before > self._limits.check_seconds + self._limits.silence_seconds / 5:
                self.watch.forgive(now)
            has_work = self._front_end.num_unfinished > 0
            reason = self.watch.verdict(now, has_work=has_work)
            if reason is not None and self.client.is_alive:
                self._verdict = reason
                what = self.watch.describe(reason, now, has_work=has_work)
                self.client.mark_dead(what + (self._place() if reason == "start" else ""))

    def _place(self) -> str:
        """The phase of the start in the engine's last report, as text for people."""
        if self._progress is None:
            return ", before it sent anything"
        return f", and was at {self._progress.phase}, {self._progress.fraction:.0%} {self._progress.detail}".rstrip()

    async def _replace(self, starter: EngineStarter, error: QuireError) -> QuireError | None:
        """End the engine's process, and start the next one. Returns the reason if there is no next one."""
        if not self.watch.is_ready and self._policy.num_failures == 0:
            return error  # the engine has never served, so the user must see the error at once
        while True:
            reason: FailureReason = (self._verdict or "crash") if self.watch.is_ready else "start"
            delay = self._policy.on_failure(self.watch.good_seconds(self._clock()))
            self._verdict = None
            self.watch.on_start(self._clock())
            self._progress = None
            if delay is not None:
                self._front_end.on_lost(reason, error.message)
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
