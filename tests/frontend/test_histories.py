"""AsyncEngine over a real engine core: random requests, readers that leave, ids used again, failing steps. No model.

In every history, each reader gets exactly its own tokens, and in the end no block is held.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from quire.engine.core import EngineCore
from quire.engine.deterministic import DeterministicExecutor, expected_tokens
from quire.errors import InvalidRequestError, QuireError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.input_processor import InputProcessor, ModelLimits
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.replica import Replica
from quire.frontend.tokenizer import Tokenizer
from quire.messages import Abort, AddRequest, EngineInput, EngineMessage, EngineOutputs, EngineReady
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.schedule import RowsFailedError, ScheduledBatch
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from tests.text.small_tokenizers import build

TOKENIZER = Tokenizer(build("gemma"), special_tokens={"eos_token": "</s>"})
VOCAB_SIZE = TOKENIZER.vocab_size + 7  # a model may have more tokens than its tokenizer
MAX_MODEL_LEN, BLOCK_SIZE = 120, 4


async def pause(rng: random.Random, rounds: int) -> None:
    for _ in range(rng.randrange(rounds)):
        await asyncio.sleep(0)


class SlowLine:
    """A client whose messages take their time in both directions, over a core that steps as it likes."""

    is_alive = True

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        pool = BlockPool(rng.randrange(31, 70), BLOCK_SIZE)
        self.kv = KVCacheManager(pool, enable_prefix_caching=rng.random() < 0.7)
        limits = SchedulerLimits(
            max_num_seqs=rng.randrange(1, 6),
            max_num_batched_tokens=rng.randrange(8, 64),
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=rng.choice([0, 3, 9]),
            max_shared_prefill_tokens=rng.choice([0, 2, 8]),
        )
        self.scheduler = Scheduler(limits, self.kv, policy=rng.choice(["fcfs", "priority"]))
        depth = rng.choice([1, 2, 3])
        self.failure_rate = rng.choice([0, 0.02])
        executor = DeterministicExecutor(
            pool.num_blocks, BLOCK_SIZE, vocab_size=VOCAB_SIZE, is_delayed=depth > 1, failure=self._failure
        )
        self.core = EngineCore(self.scheduler, executor, depth)
        self._sent: list[bytes] = []
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    def _failure(self, batch: ScheduledBatch, is_computed: bool) -> Exception | None:
        if self.rng.random() >= self.failure_rate:
            return None
        return self.rng.choice([RowsFailedError(batch.request_ids[:1], "known"), RuntimeError("unknown")])

    def send(self, message: EngineInput) -> None:
        self._sent.append(msgspec.msgpack.encode(message))

    async def receive(self) -> EngineMessage:
        await pause(self.rng, 6)
        return msgspec.msgpack.decode(await self._answers.get(), type=EngineMessage)

    def close(self) -> None:
        pass

    def is_quiet(self) -> bool:
        return not (self._sent or self.core.has_work() or self._answers.qsize())

    async def run(self) -> None:
        self._answers.put_nowait(msgspec.msgpack.encode(EngineReady(MAX_MODEL_LEN, 64, BLOCK_SIZE, 8, 64)))
        while True:
            await pause(self.rng, 3)
            await asyncio.sleep(0)
            sent, self._sent = self._sent, []
            for frame in sent:
                match msgspec.msgpack.decode(frame, type=EngineInput):
                    case AddRequest() as message:
                        self.core.add(message)
                    case Abort(request_ids):
                        self.core.abort(request_ids)
            if self.core.has_work():
                deltas = self.core.step()
                self._answers.put_nowait(msgspec.msgpack.encode(EngineOutputs(deltas, self.core.last_record)))


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.choice([1, 1, 2, 4]),
        seed=rng.choice([rng.randrange(100), -5]),
        max_tokens=rng.randrange(1, 20),
        stop=rng.choice([[], ["ab"], ["a"], ["q", "th"]]),
        stop_token_ids=rng.choice([[], [5, 9]]),
        ignore_eos=rng.random() < 0.5,
        output_kind=rng.choice(list(RequestOutputKind)),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
        skip_reading_prefix_cache=rng.choice([None, True]),
        stream_interval=rng.choice([None, 3]),
    )


def expected(prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    """Tokens of one continuation, stop strings aside."""
    assert params.max_tokens is not None
    eos = [] if params.ignore_eos else [TOKENIZER.eos_token_id]
    stop_ids = frozenset([*eos, *(params.stop_token_ids or ())])
    own = params.continuation(index)
    tokens = expected_tokens(prompt, own, params.max_tokens, stop_token_ids=stop_ids, vocab_size=VOCAB_SIZE)
    end = next((count for count, token in enumerate(tokens, start=1) if token in stop_ids), len(tokens))
    return tokens[:end]


async def one_reader(rng: random.Random, engine: AsyncEngine) -> str:
    """Ask, read and perhaps leave; answers how it went."""
    await pause(rng, 300)
    params = random_params(rng)
    prompt = [rng.randrange(3, 5) for _ in range(rng.randrange(1, 40))]
    num_wanted = rng.choice([rng.randrange(5), 10**6, 10**6])  # outputs before the reader leaves
    try:
        stream = await engine.add_request({"prompt_token_ids": prompt}, params, f"r{rng.randrange(25)}")
    except InvalidRequestError:  # the id is in use
        return "refused"
    tokens: dict[int, list[int]] = {index: [] for index in range(params.n)}
    stop_reasons: dict[int, object] = {}
    num_prompt_logprobs = 0
    try:
        async with stream:
            async for output in stream:
                num_prompt_logprobs = len(output.prompt_logprobs or ()) or num_prompt_logprobs
                for completion in output.outputs:
                    before = tokens[completion.index] if params.output_kind is RequestOutputKind.DELTA else []
                    tokens[completion.index] = before + completion.token_ids
                    if completion.finish_reason is not None:
                        stop_reasons[completion.index] = completion.stop_reason
                await pause(rng, 8)
                num_wanted -= 1
                if num_wanted <= 0:
                    return "left"
        how = "done"
    except QuireError:
        how = "failed"
    for index, got in tokens.items():
        wanted = expected(prompt, params, index)
        is_whole = how == "done" and not isinstance(stop_reasons[index], str)
        assert got == (wanted if is_whole else wanted[: len(got)]), f"continuation {index} got wrong tokens"
    if how == "done":
        assert num_prompt_logprobs == (0 if params.prompt_logprobs is None else len(prompt))
    return how


@pytest.mark.parametrize("seed", range(40))
async def test_any_history_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    client = SlowLine(rng)
    replica = Replica(client, OutputProcessor(TOKENIZER))
    engine = AsyncEngine([replica], InputProcessor(TOKENIZER, ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE, -1)))
    engine.start()
    stepping = asyncio.ensure_future(client.run())
    await engine.wait_ready(10)
    readers = [asyncio.ensure_future(one_reader(rng, engine)) for _ in range(40)]
    for reader in readers[:6]:
        await pause(rng, 100)
        reader.cancel()
    ends = await asyncio.gather(*readers, return_exceptions=True)
    for end in ends:
        assert isinstance(end, (str, asyncio.CancelledError)), end
    assert "done" in ends, "nobody got an answer: the test proves little"
    while not client.is_quiet():
        await asyncio.sleep(0)
    assert engine.num_unfinished == 0
    assert not replica._streams
    assert not replica.output_processor._continuations
    assert not client.scheduler.has_requests()
    assert client.kv.pool.num_used_blocks == 0, "blocks leaked"
    client.kv.check()
    await engine.shutdown()
    stepping.cancel()
