"""AsyncEngine over two replicas: requests go to both, and a failure of one does not concern the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from quire.errors import (
    ConfigError,
    EngineDeadError,
    EngineRestartedError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
)
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.echo_client import EchoClient
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.stream import RequestStream
from quire.lora.modules import LoraModule
from quire.messages import WARM_UP, Abort, AddRequest, Command, EngineFailed, EngineProgress, SetLimits
from quire.metrics.prometheus import PrometheusMetrics
from quire.metrics.reader import Counter, Gauge, read
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.frontend.test_async_engine import ANSWER, TOKENIZER
from tests.frontend.test_supervisor import PATIENT, sent, until

NUM_LONG = 300  # tokens of a request that runs while others come and go


class Launcher:
    """Starts EchoClients for one replica, and keeps them in `clients`."""

    def __init__(self, index: int, **options: Any) -> None:
        self._options = {"answer": ANSWER, "engine_index": index} | options
        self.clients: list[EchoClient] = []
        self.next_is_ready = True
        self.next_is_paused = False
        self.failing_launches = 0

    def launch(self) -> EchoClient:
        if self.failing_launches:
            self.failing_launches -= 1
            raise OSError(12, "Cannot allocate memory")
        self.clients.append(EchoClient(**self._options, is_ready=self.next_is_ready))
        self.client.is_paused = self.next_is_paused
        return self.client

    def kill(self) -> None:
        return None

    def describe_end(self) -> str | None:
        return None

    @property
    def client(self) -> EchoClient:
        return self.clients[-1]

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that the last client was sent, without the numbers that make them the engine's."""
        return [re.sub("-[0-9a-f]+", "", message.request_id) for message in sent(self.client, AddRequest)]


class Two:
    """`async with Two() as two`: an engine of two replicas, both ready."""

    def __init__(self, *, is_ready: bool = True, modules: Sequence[LoraModule] = (), **options: Any) -> None:
        self.launchers = [Launcher(index, **options) for index in range(2)]
        for launcher in self.launchers:
            launcher.next_is_ready = is_ready
        self.metrics = PrometheusMetrics("m", 2048, num_engines=2, has_adapters=True)
        self.replicas = [
            Replica(
                launcher.launch(),
                OutputProcessor(TOKENIZER, self.metrics.engines[index]),
                index=index,
                starter=launcher,
                recovery=PATIENT,
            )
            for index, launcher in enumerate(self.launchers)
        ]
        inputs = InputProcessor(TOKENIZER, ModelLimits(10**6, TOKENIZER.vocab_size))
        self.engine = AsyncEngine(self.replicas, inputs, modules=modules)

    async def __aenter__(self) -> Two:
        self.engine.start()
        await self.engine.wait_ready(10)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.shutdown()

    def pause(self) -> None:
        for launcher in self.launchers:
            launcher.client.is_paused = True

    async def add(self, *request_ids: str, **fields: Any) -> list[RequestStream]:
        params = SamplingParams(**{"max_tokens": 50, "output_kind": RequestOutputKind.DELTA} | fields)
        return [await self.engine.add_request("ab", params, request_id) for request_id in request_ids]

    def value(self, name: str, engine: int, **labels: str) -> float:
        wanted = {"model_name": "m", "engine": str(engine), **labels}
        (found,) = (each for each in read(self.metrics.registry) if (each.name, each.labels) == (name, wanted))
        assert isinstance(found, (Counter, Gauge))
        return found.value


def go_on(client: EchoClient) -> None:
    client.is_paused = False
    client._wake.set()


async def text_of(stream: RequestStream) -> str:
    return "".join([output.outputs[0].text async for output in stream])


async def test_requests_go_to_the_replica_that_has_fewer() -> None:
    async with Two() as two:
        two.pause()
        streams = await two.add("a", "b", "c", "d")
        assert [launcher.request_ids for launcher in two.launchers] == [["a", "c"], ["b", "d"]]
        assert two.engine.num_unfinished == 4
        streams[1].close()
        streams[3].close()
        await two.add("e", "f", "g", n=2)  # a request counts once, however many continuations it has
        assert [replica.num_unfinished for replica in two.replicas] == [3, 2]
        assert two.launchers[1].request_ids[2:4] == ["e", "e.1"]
        two.engine.abort(["a", "e"])
        assert [replica.num_unfinished for replica in two.replicas] == [2, 1]
        assert two.value("vllm:request_success", 0, finished_reason="abort") == 1
        assert two.value("vllm:request_success", 1, finished_reason="abort") == 4
        assert two.engine.timeline("a") is not None
        assert two.engine.timeline("b") is not None


async def test_one_is_killed_and_the_requests_of_the_other_are_untouched() -> None:
    async with Two(step_seconds=0.001) as two:
        long = {"max_tokens": NUM_LONG, "min_tokens": NUM_LONG}
        (lost, kept) = await two.add("lost", "kept", **long)
        first_of_lost = await anext(lost)
        first_piece = await anext(kept)
        two.pause()
        (saved, other) = await two.add("saved", "other")
        two.launchers[0].next_is_ready = False
        two.launchers[0].client.die("killed")
        await until(lambda: len(two.launchers[0].clients) == 2)
        assert two.engine.is_healthy, "one replica serves"
        assert not two.engine.is_restarting
        assert two.engine.progress is None
        assert not two.replicas[0].is_ready
        assert two.replicas[0].num_unfinished == 0
        go_on(two.launchers[1].client)
        assert first_of_lost.outputs[0].text + await text_of(lost) == "the quick fox" * (NUM_LONG // len(ANSWER))
        assert await text_of(other) == "the quick fox"
        assert await text_of(saved) == "the quick fox", "it need not wait for the next engine"
        (new,) = await two.add("new")
        assert await text_of(new) == "the quick fox"
        assert two.launchers[1].request_ids == ["kept", "other", "lost", "saved", "new"], "each of them once"

        two.launchers[0].client.make_ready()
        await until(lambda: two.replicas[0].is_ready)
        assert two.launchers[0].request_ids == []
        (again,) = await two.add("again")  # "kept" still runs on the other
        assert await text_of(again) == "the quick fox"
        assert two.launchers[0].request_ids == ["again"]

        whole = first_piece.outputs[0].text + await text_of(kept)
        assert whole.count("the quick fox") == NUM_LONG // len(ANSWER)
        assert len(two.launchers[1].clients) == 1
        assert [two.value("quire_engine_restarts", index, reason="crash") for index in (0, 1)] == [1, 0]
        assert [two.value("quire_requests_retried", index) for index in (0, 1)] == [0, 2]
        assert [two.value("vllm:num_requests_running", index) for index in (0, 1)] == [0, 0]


async def test_all_wait_for_whoever_is_ready_first() -> None:
    """Also a request with several continuations, and one whose reader leaves after the move."""
    async with Two() as two:
        two.pause()
        streams = await two.add("a", "b") + await two.add("c", "d", n=2, output_kind=RequestOutputKind.FINAL_ONLY)
        for launcher in two.launchers:
            launcher.next_is_ready = False
            launcher.client.die("killed")
        await until(lambda: all(len(launcher.clients) == 2 for launcher in two.launchers))
        assert [replica.num_unfinished for replica in two.replicas] == [2, 2]
        two.launchers[1].client.is_paused = True
        two.launchers[1].client.make_ready()
        await until(lambda: two.replicas[1].num_unfinished == 4)
        streams[2].close()
        assert two.replicas[1].num_unfinished == 3
        assert len(sent(two.launchers[1].client, Abort)[0].request_ids) == 2
        go_on(two.launchers[1].client)
        assert [await text_of(streams[index]) for index in (0, 1)] == ["the quick fox"] * 2
        (final,) = [output async for output in streams[3]]
        assert [completion.text for completion in final.outputs] == ["the quick fox"] * 2
        two.launchers[0].client.make_ready()
        await until(lambda: two.replicas[0].is_ready)
        assert two.launchers[0].request_ids == []
        assert [two.value("vllm:request_success", 1, finished_reason=reason) for reason in ("stop", "abort")] == [4, 2]


async def test_a_request_that_kills_both_ends_alone() -> None:
    async with Two() as two:
        two.pause()
        (poison, other) = await two.add("poison", "other")
        for launcher in two.launchers:
            launcher.next_is_paused = True

        async def kill(number: int) -> None:
            """Kill the engine that has the request, which is one of the first `number` engines of its replica."""
            await until(lambda: any("poison" in each.request_ids and each.client.is_alive for each in two.launchers))
            (launcher,) = (each for each in two.launchers if "poison" in each.request_ids and each.client.is_alive)
            assert len(launcher.clients) <= number
            launcher.client.die("killed")

        for number in (1, 1, 2):
            await kill(number)
        with pytest.raises(EngineRestartedError, match="may be the reason"):
            await text_of(poison)
        for launcher in two.launchers:
            launcher.next_is_paused = False
            go_on(launcher.client)
        assert await text_of(other) == "the quick fox"
        assert two.engine.num_unfinished == 0
        assert sum(two.value("quire_requests_lost", index, reason="retried") for index in (0, 1)) == 1


async def test_the_rank_of_a_request() -> None:
    async with Two() as two:
        two.pause()
        params = SamplingParams(max_tokens=50)
        for index in range(3):
            await two.engine.add_request("ab", params, f"r{index}", data_parallel_rank=1)
        assert [replica.num_unfinished for replica in two.replicas] == [0, 3]
        with pytest.raises(InvalidRequestError, match=r"no replica of this rank.*Got 2. Expected 0 to 1"):
            await two.engine.add_request("ab", params, "r3", data_parallel_rank=2)
        two.launchers[1].next_is_ready = False
        two.launchers[1].client.die("killed")
        await until(lambda: not two.replicas[1].is_ready)
        with pytest.raises(NotReadyError, match="Replica 1 has no engine now"):
            await two.engine.add_request("ab", params, "r4", data_parallel_rank=1)


async def test_the_rank_of_a_request_is_a_lane_where_an_engine_has_several() -> None:
    async with Two() as two:
        two.pause()
        for replica in two.replicas:
            assert replica.facts is not None
            replica.facts.num_lanes = 3
        params = SamplingParams(max_tokens=50, n=2)
        for rank in (0, 4):
            await two.engine.add_request("ab", params, f"r{rank}", data_parallel_rank=rank)
        assert [[each.lane for each in sent(one.client, AddRequest)] for one in two.launchers] == [[0, 0], [1, 1]]
        with pytest.raises(InvalidRequestError, match=r"no replica of this rank.*Got 6. Expected 0 to 5"):
            await two.engine.add_request("ab", params, "r6", data_parallel_rank=6)


async def test_a_full_queue_is_passed_by() -> None:
    """Whatever the work of the other one is."""
    async with Two(max_num_seqs=1, max_num_queued_reqs=2) as two:
        two.pause()
        params = SamplingParams(max_tokens=50)
        for index in range(2):
            await two.engine.add_request("ab", params, f"r{index}", data_parallel_rank=0)
        two.replicas[1].admission.on_sent("a long prompt", 10**6, 1)
        await two.add("a")
        assert two.launchers[1].request_ids == ["a"]


async def test_the_first_start_is_of_both() -> None:
    two = Two(is_ready=False)
    heard: list[EngineProgress] = []
    two.engine.on_progress = heard.append
    two.engine.start()
    first, second = (launcher.client for launcher in two.launchers)
    first.push(EngineProgress("load", 0.7))
    second.push(EngineProgress("load", 0.2))
    first.push(EngineProgress(WARM_UP, 0.0))
    second.push(EngineProgress("load", 0.5))
    await until(lambda: len(heard) == 3)
    assert {report.engine_index for report in heard} == {1}, "the one that is furthest from ready"
    assert [report.fraction for report in heard] == sorted(report.fraction for report in heard)
    first.make_ready()
    await until(lambda: two.replicas[0].is_ready)
    assert two.replicas[0].is_ready
    assert not two.engine.is_healthy
    with pytest.raises(NotReadyError, match=r"starting \(load, 50%\)"):
        await two.add("early")
    two.launchers[1].client.make_ready()
    await two.engine.wait_ready(10)
    await two.engine.shutdown()


async def test_one_that_cannot_start_ends_both() -> None:
    two = Two(is_ready=False)
    two.engine.start()
    two.launchers[0].client.make_ready()
    two.launchers[1].client.push(EngineFailed("No such model.", ConfigError.code))
    with pytest.raises(ConfigError, match="No such model"):
        await two.engine.wait_ready(10)
    assert sent(two.launchers[0].client, Command) == [Command("shutdown")]
    assert [len(launcher.clients) for launcher in two.launchers] == [1, 1]
    await two.engine.shutdown()


async def test_one_gives_up_and_then_the_other() -> None:
    async with Two() as two:
        two.pause()
        (first, second) = await two.add("first", "second")
        two.launchers[0].failing_launches = 100
        two.launchers[0].client.die("killed")
        await until(lambda: two.replicas[0].error is not None)
        assert two.engine.is_healthy, "the other one serves"
        (third,) = await two.add("third")
        go_on(two.launchers[1].client)
        assert [await text_of(stream) for stream in (first, second, third)] == ["the quick fox"] * 3
        two.launchers[1].client.is_paused = True
        (last,) = await two.add("last")
        two.launchers[1].failing_launches = 100
        two.launchers[1].client.die("killed too")
        with pytest.raises(EngineDeadError, match="failed 4 times"):
            await text_of(last)
        assert [two.value("quire_requests_lost", index, reason="gave_up") for index in (0, 1)] == [0, 1]
        await until(lambda: two.engine.error is not None)
        with pytest.raises(EngineDeadError):
            await two.add("late")


async def test_both_start_again() -> None:
    async with Two() as two:
        for launcher in two.launchers:
            launcher.next_is_ready = False
            launcher.client.die("killed")
        await until(lambda: all(len(launcher.clients) == 2 for launcher in two.launchers))
        assert two.engine.is_restarting
        with pytest.raises(NotReadyError, match="again, after a failure"):
            await two.add("early")
        two.launchers[1].client.make_ready()
        await two.engine.wait_ready(10)
        assert two.engine.is_healthy, "from now on one is enough"
        (stream,) = await two.add("new")
        assert await text_of(stream) == "the quick fox"


async def test_limits_reach_both_and_the_one_that_starts_again_later() -> None:
    async with Two() as two:
        two.launchers[0].next_is_ready = False
        two.launchers[0].client.die("killed")
        await until(lambda: len(two.launchers[0].clients) == 2)
        limits = SetLimits(max_num_seqs=3)
        two.engine.set_limits(limits)
        two.engine.reset_prefix_cache()
        assert two.launchers[1].client.sent == [limits, Command("reset_prefix_cache")]
        assert two.launchers[0].client.sent == []
        two.launchers[0].client.make_ready()
        await until(lambda: two.replicas[0].is_ready)
        assert two.launchers[0].client.sent == [limits]


async def test_a_request_is_refused_when_both_queues_are_full() -> None:
    async with Two(max_num_seqs=1, max_num_queued_reqs=1) as two:
        two.pause()
        await two.add("a", "b")
        with pytest.raises(QueueFullError):
            await two.add("c")
        with pytest.raises(QueueFullError):
            two.engine.check_room()
