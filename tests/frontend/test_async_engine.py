"""AsyncEngine over EchoClient: streams, slow readers, leaving, errors, death, health and draining."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import msgspec
import pytest

from quire.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    NotReadyError,
    QueueFullError,
)
from quire.frontend import async_engine, tokenizer
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.echo_client import EchoClient
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.supervisor import RecoveryLimits
from quire.frontend.text.bad_words import WordIndex
from quire.frontend.tokenizer import Tokenizer
from quire.messages import (
    Abort,
    AddRequest,
    Command,
    EngineBeat,
    EngineFailed,
    EngineOutputs,
    EngineProgress,
    ObservedOverhead,
    RequestDelta,
    SetLimits,
    joined,
)
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.text.small_tokenizers import build

TOKENIZER = Tokenizer(build("gemma"), special_tokens={"eos_token": "</s>"})
ANSWER = TOKENIZER.encode("the quick fox")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 50, "output_kind": RequestOutputKind.DELTA} | fields))


class Running:
    """An engine that is ready, and its client."""

    def __init__(self, client: EchoClient, clock=None) -> None:
        self.client = client
        inputs = InputProcessor(TOKENIZER, ModelLimits(10**6, TOKENIZER.vocab_size))
        options = {} if clock is None else {"clock": clock}
        self.engine = AsyncEngine([Replica(client, OutputProcessor(TOKENIZER), **options)], inputs, **options)

    async def __aenter__(self) -> Running:
        self.engine.start()
        await self.engine.wait_ready(10)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.shutdown()

    def sent(self, kind: type) -> list:
        return [message for message in self.client.sent if isinstance(message, kind)]


async def idle(engine: AsyncEngine) -> None:
    while engine.num_unfinished:
        await asyncio.sleep(0)


async def texts(stream) -> str:
    return "".join([output.outputs[0].text async for output in stream])


async def test_a_request_from_prompt_to_text():
    async with Running(EchoClient(ANSWER)) as running:
        outputs = [output async for output in running.engine.generate("ab", params(), "r")]
        assert "".join(output.outputs[0].text for output in outputs) == "the quick fox"
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "stop"
        assert running.engine.num_unfinished == 0
        assert running.engine.replicas[0].records[-1].num_rows == 1
        assert running.engine.input_processor.limits.max_model_len == 2048, "the engine's own limit holds"


async def test_many_requests_at_once_keep_apart():
    async with Running(EchoClient(max_num_seqs=7)) as running:
        prompts = {f"r{index}": "abc"[index % 3] * (index + 1) for index in range(40)}
        streams = [
            texts(running.engine.generate(prompt, params(max_tokens=index + 1), name))
            for index, (name, prompt) in enumerate(prompts.items())
        ]
        assert await asyncio.gather(*streams) == list(prompts.values())


async def test_a_slow_reader_gets_everything_in_few_pieces():
    async with Running(EchoClient()) as running:
        stream = await running.engine.add_request("abc", params(max_tokens=30), "r")
        await idle(running.engine)
        outputs = [output async for output in stream]
        assert len(outputs) == 1, "unread outputs are merged"
        assert outputs[0].outputs[0].text == "abc" * 10
        assert len(outputs[0].outputs[0].token_ids) == 30


async def test_the_engine_is_told_what_a_request_takes_besides_it():
    """From when it came until it was sent, and from its first token until its reader came back for the next."""
    async with Running(EchoClient()) as running:
        stream = await running.engine.add_request("abc", params(), "r", came_time=time.monotonic() - 10)
        assert not running.sent(ObservedOverhead)
        async with asyncio.timeout(10), stream:
            async for output in stream:
                if not output.finished and not running.sent(ObservedOverhead):
                    await asyncio.sleep(0.05)
        (observed,) = running.sent(ObservedOverhead)
        (request,) = running.sent(AddRequest)
        assert observed.num_prompt_tokens == len(request.prompt_token_ids)
        assert 10.05 <= observed.seconds < 15
        final = params(output_kind=RequestOutputKind.FINAL_ONLY)
        assert len([output async for output in running.engine.generate("ab", final, "f")]) == 1
        assert running.sent(ObservedOverhead) == [observed], "nobody sees when an answer as a whole begins"


async def test_continuations_of_one_prompt():
    async with Running(EchoClient(ANSWER)) as running:
        seen = {0: "", 1: "", 2: ""}
        async for output in running.engine.generate("ab", params(n=3), "r"):
            for completion in output.outputs:
                seen[completion.index] += completion.text
        assert seen == dict.fromkeys(range(3), "the quick fox")
        final = params(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = [output async for output in running.engine.generate("ab", final, "f")]
        assert [completion.text for completion in output.outputs] == ["the quick fox"] * 2


async def test_stop_strings_abort_in_the_engine():
    async with Running(EchoClient(ANSWER)) as running:
        assert await texts(running.engine.generate("a", params(stop=["quick"]), "r")) == "the "
        await asyncio.sleep(0)
        assert running.sent(Abort) == [Abort(["r-0"])]
        assert running.client.num_requests == 0


async def test_leaving_a_generator_aborts():
    async with Running(EchoClient()) as running:
        generator = running.engine.generate("ab", params(n=2, max_tokens=1000), "r")
        await anext(generator)
        await generator.aclose()
        assert running.sent(Abort) == [Abort(["r-0", "r-0.1"])]
        assert (running.engine.num_unfinished, running.client.num_requests) == (0, 0)


async def test_a_cancelled_reader_aborts():
    async with Running(EchoClient(step_seconds=0.05)) as running:
        reader = asyncio.ensure_future(texts(running.engine.generate("ab", params(max_tokens=1000), "r")))
        while not running.client.num_requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert running.sent(Abort) == [Abort(["r-0"])]


async def test_a_cancelled_wait_on_a_stream_aborts():
    async with Running(EchoClient(step_seconds=0.05)) as running:
        stream = await running.engine.add_request("ab", params(max_tokens=1000), "r")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.001)
        assert running.sent(Abort) == [Abort(["r-0"])]
        assert running.engine.num_unfinished == 0


async def test_a_generator_that_is_dropped_aborts():
    async with Running(EchoClient()) as running:
        generator = running.engine.generate("ab", params(max_tokens=1000), "r")
        await anext(generator)
        del generator
        gc.collect()
        await idle(running.engine)
        assert running.sent(Abort) == [Abort(["r-0"])]


async def test_leaving_at_the_end_aborts_nothing():
    async with Running(EchoClient()) as running:
        async with await running.engine.add_request("ab", params(max_tokens=2), "r") as stream:
            assert await texts(stream) == "ab"
        assert running.sent(Abort) == []


async def test_abort_by_id_ends_the_stream():
    async with Running(EchoClient(step_seconds=0.001)) as running:
        stream = await running.engine.add_request("ab", params(max_tokens=1000), "r")
        first = await anext(stream)
        reader = asyncio.ensure_future(texts(stream))
        await asyncio.sleep(0)
        running.engine.abort(["r", "unknown"])
        text = first.outputs[0].text + await reader
        assert ("ab" * 499).startswith(text), "a part of the 1,000 tokens"
        assert running.sent(Abort) == [Abort(["r-0"])]


async def test_refusals_come_before_anything_is_sent():
    async with Running(EchoClient(max_model_len=5)) as running:
        with pytest.raises(ContextLengthError):
            await running.engine.add_request("abcdef", params(max_tokens=None), "r")
        with pytest.raises(InvalidRequestError):
            await anext(running.engine.generate("", params(), "r"))
        assert running.sent(AddRequest) == []
        assert running.engine.num_unfinished == 0


async def test_an_id_in_use_is_refused():
    async with Running(EchoClient()) as running:
        async with await running.engine.add_request("ab", params(n=2, max_tokens=1000), "r"):
            with pytest.raises(InvalidRequestError, match="in use"):
                await running.engine.add_request("ab", params(), "r")
        async with await running.engine.add_request("ab", params(), "r"):
            pass


async def test_errors_of_the_engine_reach_one_reader():
    full = QueueFullError("The waiting queue is full")
    client = EchoClient(ANSWER, error_of=lambda request: full if request.request_id.startswith("bad") else None)
    async with Running(client) as running:
        good = asyncio.ensure_future(texts(running.engine.generate("a", params(), "good")))
        with pytest.raises(QueueFullError, match="waiting queue is full") as caught:
            await texts(running.engine.generate("a", params(), "bad"))
        assert caught.value.status == 429
        stream = await running.engine.add_request("a", params(max_tokens=1000), "late")
        await anext(stream)
        client.fail_request("late-2", InvalidRequestError("poison"))
        with pytest.raises(InvalidRequestError, match="poison"):
            await texts(stream)
        assert await good == "the quick fox"
        assert running.engine.is_healthy


@pytest.mark.parametrize("how", ["failed", "garbage", "send"])
async def test_death_ends_every_stream(how):
    async with Running(EchoClient(step_seconds=0.001)) as running:
        engine, client = running.engine, running.client
        streams = [await engine.add_request("ab", params(max_tokens=1000), f"r{index}") for index in range(3)]
        await anext(streams[0])
        if how == "failed":
            client.die("Killed by signal 9")
        elif how == "garbage":
            client.push(EngineOutputs([None]))
        else:
            client.die("gone")
            streams.append(await engine.add_request("ab", params(), "new"))
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await texts(stream)
        assert not engine.is_healthy
        assert not engine.is_ready
        assert isinstance(engine.error, EngineDeadError)
        assert engine.num_unfinished == 0
        with pytest.raises(EngineDeadError):
            await engine.add_request("ab", params(), "newer")
        with pytest.raises(EngineDeadError):
            engine.set_limits(SetLimits(max_num_seqs=1))


async def test_not_ready_yet():
    client = EchoClient(is_ready=False)
    running = Running(client)
    running.engine.start()
    client.push(EngineProgress("load", 0.25))
    with pytest.raises(NotReadyError, match=r"within 0\.01 seconds"):
        await running.engine.wait_ready(0.01)
    assert running.engine.progress.phase == "load"
    assert not running.engine.is_healthy
    with pytest.raises(NotReadyError, match=r"starting \(load, 25%\)"):
        await running.engine.add_request("ab", params(), "r")
    client.make_ready()
    assert (await running.engine.wait_ready(10)).max_model_len == 2048
    assert running.engine.is_healthy
    await running.engine.shutdown()


async def test_a_start_that_fails_says_why():
    client = EchoClient(is_ready=False)
    client.push(EngineFailed("No such model.", ConfigError.code))
    running = Running(client)
    running.engine.start()
    with pytest.raises(ConfigError, match="No such model"):
        await running.engine.wait_ready(10)
    with pytest.raises(EngineDeadError, match="No such model"):
        await running.engine.add_request("ab", params(), "r")
    await running.engine.shutdown()


async def test_a_stuck_engine_is_not_healthy_and_an_idle_one_is():
    clock = Clock()
    async with Running(EchoClient(), clock) as running:
        engine, client = running.engine, running.client
        clock.now += 1000
        assert engine.is_healthy, "idle"
        assert await texts(engine.generate("ab", params(max_tokens=2), "r")) == "ab"
        client.is_paused = True
        clock.now += 1000
        stream = await engine.add_request("ab", params(max_tokens=2), "s")
        clock.now += RecoveryLimits().min_step_seconds - 1
        assert engine.is_healthy, "a step may take this long"
        clock.now += 2
        assert not engine.is_healthy
        client.is_paused = False
        client._wake.set()
        assert await texts(stream) == "ab"
        assert engine.is_healthy


async def test_a_step_that_is_predicted_to_be_long_is_healthy():
    clock = Clock()
    async with Running(EchoClient(), clock) as running:
        running.client.is_paused = True
        async with await running.engine.add_request("ab", params(), "s"):
            for _ in range(11):
                clock.now += 9
                running.client.push(EngineBeat(5.0))
                await asyncio.sleep(0.005)
                assert running.engine.is_healthy, f"a step of 5 s may take 100, and took {clock.now}"
            clock.now += 2
            assert not running.engine.is_healthy


async def test_commands_and_draining():
    async with Running(EchoClient(step_seconds=0.001)) as running:
        running.engine.set_limits(SetLimits(max_num_seqs=3))
        running.engine.reset_prefix_cache()
        assert running.client.sent == [SetLimits(max_num_seqs=3), Command("reset_prefix_cache")]
        stream = await running.engine.add_request("ab", params(max_tokens=5), "r")
        await idle(running.engine)
        assert await texts(stream) == "ababa"
        open_stream = await running.engine.add_request("ab", params(max_tokens=1000), "s")
    assert running.client.sent[-1] == Command("shutdown")
    with pytest.raises(EngineDeadError, match="shutting down"):
        await texts(open_stream)


async def test_long_texts_are_tokenized_off_the_loop():
    async with Running(EchoClient(max_model_len=10**6)) as running:
        text = "the quick " * async_engine.INLINE_PROMPT_CHARS
        ticks = 0
        adding = asyncio.ensure_future(running.engine.add_request(text, params(), "r"))
        while not adding.done():
            ticks += 1
            await asyncio.sleep(0)
        assert ticks > 2, "the event loop stood still"
        stream = await adding
        stream.close()


async def test_bad_words_are_spelled_off_the_loop(monkeypatch):
    """The first list also builds the index of the vocabulary: once, however many requests want it."""
    built = []

    class Index(WordIndex):
        def __init__(self, tokens):
            built.append(threading.current_thread())
            time.sleep(0.05)  # that the other threads ask meanwhile
            super().__init__(tokens)

    monkeypatch.setattr(tokenizer, "WordIndex", Index)
    async with Running(EchoClient()) as running:
        running.engine.input_processor.tokenizer = Tokenizer(build("gemma"))
        adding = (running.engine.add_request("ab", params(bad_words=["the"]), name) for name in "rstu")
        for stream in await asyncio.gather(*adding):
            stream.close()
    assert len(built) == 1
    assert built[0] is not threading.current_thread(), "the event loop stood still"


async def test_continuations_share_one_message():
    """What 128 of them have in common crosses the link once, also for the next engine."""

    def num_bytes(messages) -> int:
        return sum(len(msgspec.msgpack.encode(message)) for message in messages)

    class Counting(EchoClient):
        def __init__(self) -> None:
            super().__init__(ANSWER)
            self.frames: list = []

        def send(self, message) -> None:
            self.frames.append(message)
            super().send(message)

    fields = {"seed": 7, "logprobs": 2, "bad_words": ["the dog"], "stop_token_ids": [1, 2]}
    async with Running(Counting()) as running:
        frames, sent = running.client.frames, running.client.sent
        stream = await running.engine.add_request("ab" * 500, params(n=128, **fields), "r")
        requests = running.sent(AddRequest)
        outputs = running.engine.replicas[0].output_processor
        (state,) = outputs.requests
        assert requests == state.processed.requests
        assert num_bytes(frames) < 2 * num_bytes(requests[:1]) + 128 * 40
        frames.clear()
        sent.clear()
        running.client.send(joined(outputs.send_again(state)))
        assert [request.request_id for request in sent] == [request.request_id for request in requests]
        assert all(request.is_retry and request.prompt_token_ids == requests[0].prompt_token_ids for request in sent)
        assert num_bytes(frames) < 2 * num_bytes(requests[:1]) + 128 * 40
        stream.close()


async def test_late_deltas_are_ignored():
    async with Running(EchoClient()) as running:
        running.client.push(EngineOutputs([RequestDelta("nobody", [1], finish_reason="length")]))
        assert await texts(running.engine.generate("ab", params(max_tokens=2), "r")) == "ab"


@pytest.mark.parametrize("how", ["aborted", "stopped"])
async def test_an_id_used_again_gets_nothing_of_the_request_before(how):
    """Results that the engine computed before it heard of the end arrive after the next request was sent."""
    async with Running(EchoClient(ANSWER)) as running:
        running.client.is_paused = True
        engine_id = "r-0"
        stream = await running.engine.add_request("a", params(stop=["the"]), "r")
        if how == "aborted":
            stream.close()
        else:
            running.client.push(EngineOutputs([RequestDelta(engine_id, TOKENIZER.encode("the"))]))
            assert await texts(stream) == ""
        running.client.push(EngineOutputs([RequestDelta(engine_id, TOKENIZER.encode("late"))]))
        running.client.is_paused = False
        assert await texts(running.engine.generate("a", params(), "r")) == "the quick fox"


async def test_parameters_changed_by_the_caller_change_nothing_on_its_way():
    async with Running(EchoClient(ANSWER)) as running:
        own = params(n=2, stream_interval=1, stop_token_ids=[ANSWER[-1]])
        stream = await running.engine.add_request("a", own, "r")
        own.n, own.stream_interval, own.include_stop_str_in_output = 1, 50, True
        outputs = [output async for output in stream]
        assert len(outputs) > 2
        assert "".join(o.outputs[0].text for o in outputs if o.outputs[0].index == 0) == "the quick fo"


async def test_only_the_first_continuation_is_asked_for_prompt_logprobs():
    async with Running(EchoClient(ANSWER)) as running:
        final = params(n=3, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = [output async for output in running.engine.generate("abc", final, "r")]
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        asked = [message.sampling_params.prompt_logprobs for message in running.sent(AddRequest)]
        assert asked == [1, None, None]


async def test_a_shutdown_that_is_cancelled_says_so():
    running = Running(EchoClient())
    running.engine.start()
    await running.engine.wait_ready(10)
    shutdown = asyncio.ensure_future(running.engine.shutdown())
    await asyncio.sleep(0)
    shutdown.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shutdown
    await running.engine.shutdown()
