"""Failed engines, and the start of the next one; and AsyncEngine over one EchoClient after another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire.errors import ConfigError, EngineDeadError, EngineRestartedError, NotReadyError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.echo_client import EchoClient
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.live_limits import move_limits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.request_state import MOST_LOSSES
from quire.frontend.stats import FinishedRequest, NoMetrics
from quire.frontend.supervisor import RecoveryLimits, RestartPolicy, Watch
from quire.messages import Abort, AddRequest, EngineBeat, EngineFailed, EngineProgress, EngineReady, SetLimits
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.frontend.test_async_engine import ANSWER, TOKENIZER

LIMITS = RecoveryLimits()
# Failed engines are replaced at once; a busy machine makes no engine count as stuck or silent.
PATIENT = RecoveryLimits(check_seconds=0.01, max_failures=4, max_delay_seconds=0.01)
# For tests of what is stuck or silent.
QUICK = replace(PATIENT, min_step_seconds=0.2, silence_seconds=0.2)


# The watch


def ready_watch() -> Watch:
    watch = Watch(LIMITS, 0.0)
    watch.on_beat(0.0, EngineBeat(0.0))
    watch.on_ready(0.0)
    return watch


@pytest.mark.parametrize("predicted", [0.0, 0.4, 0.5, 3.0, 60.0])
def test_a_step_may_take_ten_seconds_or_twenty_times_its_predicted_time(predicted: float) -> None:
    watch = ready_watch()
    allowed = max(10.0, 20 * predicted)
    now = 0.0
    while now < allowed:
        watch.on_beat(now, EngineBeat(predicted))
        assert watch.verdict(now, has_work=True) is None, f"a step of {predicted} s after {now} s"
        now += 1.0
    watch.on_beat(allowed, EngineBeat(predicted))
    assert watch.verdict(allowed + 0.01, has_work=True) == "stuck"
    assert watch.verdict(allowed + 0.01, has_work=False) is None, "an idle engine ends no steps"
    watch.on_step(allowed + 0.01)
    assert watch.verdict(allowed + 0.01, has_work=True) is None


@pytest.mark.parametrize("has_work", [False, True])
@pytest.mark.parametrize("predicted", [0.0, 100.0])
def test_silence_is_noticed_whatever_the_engine_does(has_work: bool, predicted: float) -> None:
    watch = ready_watch()
    watch.on_beat(5.0, EngineBeat(predicted))
    watch.on_step(5.5)
    assert watch.verdict(14.9, has_work=has_work) is None
    assert watch.verdict(15.1, has_work=has_work) == "silent"


def test_a_process_stopped_in_a_step_is_called_silent() -> None:
    watch = ready_watch()
    watch.on_beat(0.9, EngineBeat(0.1))
    assert watch.verdict(10.5, has_work=True) == "silent"


def test_ranks_that_are_late_are_named() -> None:
    watch = ready_watch()
    watch.on_beat(
        1.0, EngineBeat(2.0, rank="Rank 0 of 2 (here)", late_ranks="Rank 1 of 2 (there) hangs", rank_timeout_seconds=9)
    )
    assert watch.describe("stuck", 11.2, has_work=True) == (
        "The engine has not finished a step for too long: Rank 1 of 2 (there) hangs. A step may take 40 s (20 times "
        "what is predicted, at least 10 s), and a rank waits 9 s for another one (--distributed-timeout-seconds)"
    )
    silent = "The engine process gives no sign of life: Rank 0 of 2 (here) has sent nothing for 10 s, "
    assert watch.describe("silent", 11.2, has_work=True) == silent + "in a step"
    assert watch.describe("silent", 11.2, has_work=False) == silent + "between steps"
    watch.on_beat(2.0, EngineBeat(2.0))
    of_one_rank = watch.describe("stuck", 11.2, has_work=True)
    assert of_one_rank == "The engine has not finished a step for too long"


def test_the_limits_notice_within_fifteen_seconds() -> None:
    """trust.md: noticed in under 15 s; beats come every second."""
    assert max(LIMITS.min_step_seconds, LIMITS.silence_seconds) + 1.0 + LIMITS.check_seconds < 15


def test_an_engine_without_beats_is_not_silent() -> None:
    watch = Watch(LIMITS, 0.0)
    watch.on_ready(0.0)
    assert watch.verdict(1000.0, has_work=False) is None


def test_a_start_may_be_long_but_not_silent() -> None:
    watch = Watch(LIMITS, 0.0)
    assert watch.verdict(59.0, has_work=True) is None
    assert watch.verdict(61.0, has_work=True) == "start"
    for now in range(0, 600, 30):
        watch.on_beat(float(now), EngineBeat(0.0))
        assert watch.verdict(float(now), has_work=True) is None
    watch.on_beat(600.5, EngineBeat(0.0))
    assert watch.verdict(600.5, has_work=True) == "start"


def test_what_this_process_slept_through_does_not_count() -> None:
    watch = ready_watch()
    watch.forgive(1000.0)
    assert watch.verdict(1009.0, has_work=True) is None
    assert watch.verdict(1011.0, has_work=True) == "silent"


# The policy


def test_back_off_and_the_end() -> None:
    policy = RestartPolicy(LIMITS)
    assert [policy.on_failure(0.0) for _ in range(8)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, None]


def test_good_time_makes_up_for_failures() -> None:
    policy = RestartPolicy(LIMITS)
    for _ in range(5):
        policy.on_failure(599.0)
    assert policy.on_failure(599.0) == 16.0
    assert policy.on_failure(600.0) == 0.0
    assert policy.on_failure(1.0) == 1.0


# AsyncEngine


class Recorder(NoMetrics):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_first_token(self, seconds: float, num_tokens: int, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.counts["tokens"] += num_tokens
        self.counts["first tokens"] += 1

    def on_tokens(self, num_tokens: int, seconds: float) -> None:
        assert num_tokens > 0
        self.counts["tokens"] += num_tokens

    def on_finished(self, finished: FinishedRequest) -> None:
        self.counts[finished.finish_reason] += 1

    def on_restart(self, reason: str) -> None:
        self.counts[f"restart {reason}"] += 1

    def on_retry(self) -> None:
        self.counts["retry"] += 1

    def on_unsaved(self, reason: str) -> None:
        self.counts[f"unsaved {reason}"] += 1


class Recovering:
    """`async with Recovering() as running`: an engine, ready, with a starter of further EchoClients."""

    def __init__(self, *, limits: RecoveryLimits = PATIENT, is_ready: bool = True, **options: Any) -> None:
        self.options: dict[str, Any] = {"answer": ANSWER} | options
        self.clients: list[EchoClient] = []
        self.next_is_ready = True
        self.next_is_paused = False
        self.failing_launches = 0
        self.num_kills = 0
        self.metrics = Recorder()
        first = EchoClient(**self.options, is_ready=is_ready)
        self.clients.append(first)
        inputs = InputProcessor(TOKENIZER, ModelLimits(10**6, TOKENIZER.vocab_size))
        outputs = OutputProcessor(TOKENIZER, self.metrics)
        self.engine = AsyncEngine([Replica(first, outputs, starter=self, recovery=limits)], inputs)

    def launch(self) -> EchoClient:
        if self.failing_launches:
            self.failing_launches -= 1
            raise OSError(12, "Cannot allocate memory")
        client = EchoClient(**self.options, is_ready=self.next_is_ready)
        client.is_paused = self.next_is_paused
        self.clients.append(client)
        return client

    def kill(self) -> None:
        self.num_kills += 1

    def describe_end(self) -> str | None:
        return "Ended by SIGTEST."

    @property
    def client(self) -> EchoClient:
        return self.clients[-1]

    async def __aenter__(self) -> Recovering:
        self.engine.start()
        await self.engine.wait_ready(10)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.shutdown()

    async def wait_for_client(self, number: int) -> None:
        await until(lambda: len(self.clients) >= number and self.engine.is_ready)

    async def wait_until_sent(self, number: int) -> None:
        """Requests, to the engine that runs now."""
        await until(lambda: len(sent(self.client, AddRequest)) == number)

    async def read(self, request_id: str, kind: RequestOutputKind = RequestOutputKind.DELTA, **fields: Any) -> str:
        params = SamplingParams(**{"max_tokens": 50, "output_kind": kind} | fields)
        texts = {}
        async for output in self.engine.generate("ab", params, request_id):
            for part in output.outputs:
                texts[part.index] = texts.get(part.index, "") * (kind is RequestOutputKind.DELTA) + part.text
        return " | ".join(texts.values())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def sent(client: EchoClient, kind: type) -> list[Any]:
    return [message for message in client.sent if isinstance(message, kind)]


async def test_every_request_goes_on() -> None:
    """Streams after the tokens that were given, and requests that had none from the beginning."""
    async with Recovering() as running:
        running.client.step_seconds = 0.002
        long = {"max_tokens": 300, "min_tokens": 300}
        expected = await running.read("undisturbed", **long)
        streaming = asyncio.ensure_future(running.read("streaming", **long))
        await until(lambda: running.metrics.counts["tokens"] >= 310)
        running.client.is_paused = True
        waiting = [asyncio.ensure_future(running.read(f"waiting-{index}")) for index in range(3)]
        await running.wait_until_sent(5)
        running.client.die("killed")
        assert await asyncio.gather(*waiting) == ["the quick fox"] * 3
        assert await streaming == expected
        first, second = (sent(client, AddRequest) for client in running.clients)
        assert [message.request_id for message in second] == [message.request_id for message in first[1:]]
        assert [message.sampling_params for message in second] == [message.sampling_params for message in first[1:]]
        assert all(message.is_retry for message in second)
        known = [len(message.output_token_ids) for message in second]
        assert 10 <= known[0] < 300
        assert known[1:] == [0] * 3
        assert all(message.prompt_token_ids == first[0].prompt_token_ids for message in second)
        assert running.num_kills == 1, "what is left of an engine is ended before the next one starts"
        counts = running.metrics.counts
        assert (counts["restart crash"], counts["retry"], counts["error"]) == (1, 4, 0)
        assert counts["tokens"] == 2 * 300 + 3 * (len(ANSWER) + 1), "no token is given or counted twice"
        assert counts["first tokens"] == 5
        assert await running.read("later") == "the quick fox"


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_an_answer_in_any_form_goes_on(kind: RequestOutputKind) -> None:
    """Also its logprobs and its several continuations; what was given whole is counted once."""
    fields = {"n": 2, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 200, "min_tokens": 200}
    params = SamplingParams(output_kind=kind, **fields)

    async def outputs(running: Recovering, request_id: str) -> list[RequestOutput]:
        return [output async for output in running.engine.generate("ab", params, request_id)]

    def joined(outputs: list[RequestOutput]) -> dict[int, tuple[str, list[int], int, float | None]]:
        parts: dict[int, CompletionOutput] = {}
        for output in outputs:
            for part in output.outputs:
                earlier = parts.get(part.index)
                if kind is RequestOutputKind.DELTA and earlier is not None:
                    earlier.text += part.text
                    earlier.token_ids += part.token_ids
                    earlier.logprobs = [*(earlier.logprobs or []), *(part.logprobs or [])]
                    earlier.cumulative_logprob = part.cumulative_logprob
                else:
                    parts[part.index] = part
        return {
            index: (part.text, part.token_ids, len(part.logprobs or ()), part.cumulative_logprob)
            for index, part in parts.items()
        }

    async with Recovering() as running:
        running.client.step_seconds = 0.001
        expected = await outputs(running, "undisturbed")
        disturbed = asyncio.ensure_future(outputs(running, "disturbed"))
        await until(lambda: running.metrics.counts["tokens"] >= 2 * 230)
        running.client.die("killed")
        found = await disturbed
        whole = joined(found)
        assert whole == joined(expected)
        assert [len(token_ids) for _, token_ids, _, _ in whole.values()] == [200, 200]
        assert [output.prompt_logprobs is not None for output in found[:1]] == [True]
        assert {output.num_cached_tokens for output in found} == {0}
        assert running.metrics.counts["tokens"] == 4 * 200
        assert running.metrics.counts["first tokens"] == 4
        assert [len(message.output_token_ids) > 0 for message in sent(running.client, AddRequest)] == [True, True]


async def test_a_continuation_that_was_complete_is_not_computed_again() -> None:
    async with Recovering() as running:
        running.client.is_paused = True
        whole = asyncio.ensure_future(running.read("whole", RequestOutputKind.FINAL_ONLY, n=2, stop=["quick"]))
        await running.wait_until_sent(2)
        running.clients[0]._running.pop("whole-0")  # the other one ends first
        running.client.is_paused = False
        running.clients[0]._wake.set()
        await until(lambda: running.metrics.counts["stop"] >= 1)
        running.client.die("killed")
        assert await whole == "the  | the "
        (again,) = sent(running.client, AddRequest)
        assert again.request_id == sent(running.clients[0], AddRequest)[0].request_id
        assert running.metrics.counts["stop"] == 2


async def test_a_request_that_kills_engines_ends_alone() -> None:
    """It kills the engine that computes its fifth token. So it has got tokens when it kills the first engine."""
    async with Recovering(step_seconds=0.001) as running:
        poison = asyncio.ensure_future(running.read("poison", max_tokens=400, min_tokens=400))
        others = [
            asyncio.ensure_future(running.read(f"other-{index}", max_tokens=200, min_tokens=200)) for index in range(3)
        ]

        async def kill() -> None:
            while True:
                rows = running.client._running.values()
                if running.client.is_alive and any(
                    row.request.request_id.startswith("poison") and row.num_output >= 5 for row in rows
                ):
                    running.client.is_paused = True
                    running.client.die("killed")
                await asyncio.sleep(0)

        killing = asyncio.ensure_future(kill())
        with pytest.raises(EngineRestartedError, match="may be the reason") as caught:
            await poison
        killing.cancel()
        assert (caught.value.status, caught.value.code) == (503, "engine_restarted")
        assert {len(text) for text in await asyncio.gather(*others)} == {
            len(await running.read("x", max_tokens=200, min_tokens=200))
        }
        assert 3 <= len(running.clients) <= 4
        assert running.metrics.counts["unsaved retried"] == 1
        assert running.metrics.counts["error"] == 1


async def test_suspects_are_sent_one_after_the_other() -> None:
    async with Recovering(limits=replace(PATIENT, max_failures=20)) as running:
        running.client.is_paused = True
        reading = [asyncio.ensure_future(running.read(f"r{index}")) for index in range(4)]
        await running.wait_until_sent(4)
        leaving = await running.engine.add_request("ab", SamplingParams(max_tokens=9), "leaves")
        await running.wait_until_sent(5)
        for number in (2, 3):
            running.next_is_paused = True
            running.client.die("killed")
            await running.wait_for_client(number)
        await running.wait_until_sent(1)
        assert running.engine.num_unfinished == 5
        leaving.close()
        assert len(sent(running.client, AddRequest)) == 1, "the others wait until the first one has a token"
        running.client.die("killed")
        await running.wait_for_client(4)
        with pytest.raises(EngineRestartedError):
            await reading[0]
        await running.wait_until_sent(1)
        running.next_is_paused = running.client.is_paused = False
        running.client._wake.set()
        assert await asyncio.gather(*reading[1:]) == ["the quick fox"] * 3
        assert [message.request_id[:2] for message in sent(running.client, AddRequest)] == ["r1", "r2", "r3"]
        assert running.metrics.counts["unsaved retried"] == 1


async def test_a_request_outlives_few_engines_even_if_it_gets_tokens() -> None:
    async with Recovering(limits=replace(PATIENT, max_failures=20), step_seconds=0.001) as running:
        reading = asyncio.ensure_future(running.read("long", max_tokens=2000, min_tokens=2000))
        for number in range(1, MOST_LOSSES + 1):
            await running.wait_for_client(number)
            before = running.metrics.counts["tokens"]
            await until(lambda before=before: running.metrics.counts["tokens"] > before)  # type: ignore[misc]
            assert not reading.done()
            running.client.die("killed")
        with pytest.raises(EngineRestartedError):
            await reading


async def test_a_request_that_only_waits_is_not_to_blame() -> None:
    """However many engines it sees, as long as none of them has begun it."""
    limits = replace(PATIENT, max_failures=20)
    async with Recovering(limits=limits, step_seconds=0.001, max_num_seqs=1) as running:
        reading = asyncio.ensure_future(running.read("long", max_tokens=2000, min_tokens=2000))
        waiting = asyncio.ensure_future(running.read("waiting"))
        for number in range(1, MOST_LOSSES + 1):
            await running.wait_for_client(number)
            await running.wait_until_sent(2)
            before = running.metrics.counts["tokens"]
            await until(lambda before=before: running.metrics.counts["tokens"] > before)  # type: ignore[misc]
            running.client.die("killed")
        with pytest.raises(EngineRestartedError):
            await reading
        assert await waiting == "the quick fox"
        assert running.metrics.counts["unsaved retried"] == 1


async def test_failed_starts_do_not_use_up_the_retry() -> None:
    async with Recovering() as running:
        running.client.is_paused = True
        reading = asyncio.ensure_future(running.read("patient"))
        await running.wait_until_sent(1)
        running.failing_launches = 1
        running.next_is_ready = False
        running.client.die("killed")
        await until(lambda: len(running.clients) == 2)
        running.next_is_ready = True
        running.client.push(EngineFailed("No memory", ConfigError.code))
        assert await reading == "the quick fox"
        assert running.metrics.counts["restart start"] == 2
        assert running.metrics.counts["restart crash"] == 1


async def test_it_gives_up() -> None:
    async with Recovering() as running:
        running.client.is_paused = True
        reading = asyncio.ensure_future(running.read("hopeless"))
        await running.wait_until_sent(1)
        running.failing_launches = 100
        running.client.die("killed")
        with pytest.raises(EngineDeadError, match=r"failed 4 times.*Cannot allocate memory.*SIGTEST"):
            await reading
        assert isinstance(running.engine.error, EngineDeadError)
        assert running.metrics.counts["unsaved gave_up"] == 1
        assert running.metrics.counts["restart start"] + running.metrics.counts["restart crash"] == 3


async def test_the_first_start_is_not_repeated() -> None:
    running = Recovering(is_ready=False)
    running.engine.start()
    running.client.push(EngineFailed("No such model.", ConfigError.code))
    with pytest.raises(ConfigError, match="No such model"):
        await running.engine.wait_ready(10)
    assert len(running.clients) == 1
    await running.engine.shutdown()


async def test_an_engine_that_fails_as_soon_as_it_is_ready_is_waited_for_again() -> None:
    running = Recovering(is_ready=False)
    running.engine.start()
    waiting = asyncio.ensure_future(running.engine.wait_ready(10))
    await asyncio.sleep(0.01)
    (replica,) = running.engine.replicas
    replica.on_message(EngineReady(2048, 64, 16, 8, 2048, resolved={"max_num_queued_reqs": {"value": None}}))
    replica.on_lost("crash", "killed")  # in the same turn of the event loop, so before any waiting task
    await asyncio.sleep(0.01)
    assert not waiting.done()
    running.client.make_ready()
    assert await waiting is running.engine.ready
    await running.engine.shutdown()


@pytest.mark.parametrize(
    ("told", "where"),
    [([EngineProgress("load", 0.25, "shard 3")], "and was at load, 25% shard 3"), ([], "before it sent anything")],
)
async def test_a_start_that_is_late_tells_where_it_was(told: list[EngineProgress], where: str) -> None:
    running = Recovering(limits=replace(PATIENT, start_seconds=0.2), is_ready=False)
    for progress in told:
        running.client.push(progress)
    running.engine.start()
    with pytest.raises(EngineDeadError, match=rf"not start in time \(VLLM_ENGINE_READY_TIMEOUT_S\).*, {where}"):
        await running.engine.wait_ready(10)
    await running.engine.shutdown()


async def test_a_stuck_engine_is_replaced() -> None:
    async with Recovering(limits=QUICK) as running:
        running.client.is_paused = True
        assert await running.read("stuck") == "the quick fox"
        assert running.metrics.counts["restart stuck"] == 1
        assert len(running.clients) == 2


async def test_a_long_step_is_not_replaced() -> None:
    async with Recovering(limits=QUICK) as running:
        running.client.is_paused = True
        reading = asyncio.ensure_future(running.read("long"))
        for _ in range(50):  # a second in all: five times the limit of a step that is predicted to be short
            running.client.push(EngineBeat(0.3))
            await asyncio.sleep(0.02)
            assert running.engine.is_healthy
        running.client.is_paused = False
        running.client._wake.set()
        assert await reading == "the quick fox"
        assert len(running.clients) == 1


async def test_an_idle_engine_that_falls_silent_is_replaced() -> None:
    async with Recovering(limits=QUICK) as running:
        running.client.push(EngineBeat(0.0))
        await running.wait_for_client(2)
        assert running.metrics.counts["restart silent"] == 1


async def test_requests_while_it_starts_again() -> None:
    async with Recovering() as running:
        running.next_is_ready = False
        running.client.is_paused = True
        stream = await running.engine.add_request("ab", SamplingParams(max_tokens=9), "leaves")
        running.client.die("killed")
        await until(lambda: len(running.clients) == 2)
        assert running.engine.is_restarting
        assert not running.engine.is_healthy
        assert running.engine.progress is not None
        assert running.engine.progress.phase == "restart"
        assert running.engine.failure == "killed."
        with pytest.raises(NotReadyError, match="again, after a failure"):
            await running.read("new")
        stream.close()  # its caller leaves meanwhile
        running.client.make_ready()
        await running.wait_for_client(2)
        assert sent(running.client, AddRequest) == []
        assert sent(running.client, Abort) == [Abort(["leaves-0"])]
        assert running.engine.num_unfinished == 0
        assert running.engine.failure is None


async def test_moved_limits_stay_moved() -> None:
    resolved = {
        "max_num_seqs": {"value": 256, "source": "default", "detail": "", "max": 256},
        "max_num_batched_tokens": {"value": 2048, "source": "default", "detail": "", "max": 2048},
        "max_num_queued_reqs": {"value": 100, "source": "default", "detail": ""},
        "enable_chunked_prefill": {"value": True, "source": "default", "detail": ""},
    }

    def ready() -> EngineReady:
        return EngineReady(2048, 64, 16, 256, 2048, {name: dict(setting) for name, setting in resolved.items()})

    async with Recovering() as running:
        running.client.push(ready())
        await until(
            lambda: running.engine.ready is not None and bool(running.engine.ready.resolved.get("max_num_seqs"))
        )
        move_limits(running.engine, {"max_num_seqs": 3})
        move_limits(running.engine, {"max_num_queued_reqs": 5})
        running.next_is_ready = False
        running.client.die("killed")
        await until(lambda: len(running.clients) == 2)
        running.client.push(ready())
        await running.wait_for_client(2)
        assert running.client.sent == [SetLimits(max_num_seqs=3, max_num_queued_reqs=5)]
        assert running.engine.ready is not None
        assert running.engine.ready.max_num_seqs == 3
        shown = running.engine.ready.resolved
        assert [shown[name]["source"] for name in resolved] == ["live", "default", "live", "default"]
        assert running.engine.replicas[0].admission.limits["max_num_queued_reqs"] == 5


async def test_shutdown_while_it_starts_again() -> None:
    async with Recovering() as running:
        running.next_is_ready = False
        running.client.is_paused = True
        reading = asyncio.ensure_future(running.read("waits"))
        await running.wait_until_sent(1)
        running.client.die("killed")
        await until(lambda: running.engine.is_restarting)
        await running.engine.shutdown()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await reading
