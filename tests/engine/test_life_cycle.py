"""The life of workers: their calls and the order of these, for one worker and for several."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from quire import demo
from quire.config import EngineConfig
from quire.cost.devices import Ceilings
from quire.distributed.group import StepVoid
from quire.engine import executor
from quire.engine.bring_up import _loads, bring_up, least_facts
from quire.engine.executor import InlineExecutor, ThreadExecutor
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError, EngineDeadError, PeerLostError, WeightsError
from quire.life_cycle import AdapterLoad, CacheSize, Measured, Worker, WorkerSettings
from quire.lora.facts import AdapterFacts
from quire.messages import Progress
from quire.metrics.stopwatch import Lap
from quire.model_config import ModelConfig, load_model_config
from quire.planning.memory_plan import MemoryFacts
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.sampling_params import SamplingParams
from quire.schedule import NewRow, Pending, RowsFailedError, ScheduledBatch, StepResult
from quire.worker.worker import DeviceWorker
from tests.engine.harness import Prompt, run

MIB, GIB = 1 << 20, 1 << 30
MODEL = load_model_config(demo.path())
BLOCK = 16 * 2 * 6 * 2 * 64 * 2  # bytes: 16 tokens, K and V, 6 layers, 2 heads of 64, bfloat16
FACTS = DeviceFacts("cpu", "test", "avx2", 4, 8 * GIB, 6 * GIB)
WITH_GPU = replace(FACTS, gpu=GpuFacts("H100", 90, 80 * GIB, 79 * GIB), no_gpu="")
PROMPTS = [
    Prompt((5 + i, 7, 9, 11 + i), SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=6)) for i in range(5)
]
SETTINGS = WorkerSettings.of(resolve(EngineConfig(), MODEL, FACTS, is_server=True))
_ONE_POOL = threading.Lock()  # the CPU kernels of a process compute for one caller at a time


def ignore(phase: str, share: float, detail: str) -> None: ...


def memory_for(num_blocks: int) -> MemoryFacts:
    """The memory that leaves room for this number of blocks."""
    return MemoryFacts(GIB, GIB // 20 + 20 * MIB + num_blocks * BLOCK, 10 * MIB, 20 * MIB)


class NotedWorker:
    """Notes its calls; has memory for `num_blocks`."""

    def __init__(self, num_blocks: int = 300, failing: str = "", error: Exception | None = None) -> None:
        self.num_blocks, self.failing, self.error = num_blocks, failing, error
        self.told: list[tuple[str, Any]] = []
        self.ceilings: Ceilings | None = None
        self.threads: set[int] = set()
        self.adapter: Future[AdapterFacts] = Future()

    def facts(self, wants_gpu: bool) -> DeviceFacts:
        self._note("facts", wants_gpu)
        return FACTS

    def load(self, settings: WorkerSettings) -> None:
        self._note("load", settings)

    def measure(self) -> Measured:
        self._note("measure")
        return Measured(memory_for(self.num_blocks), 64, Lap(0.01), self.ceilings)

    def allocate(self, size: CacheSize) -> None:
        self._note("allocate", size)

    def capture(self) -> None:
        self._note("capture")

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        raise AssertionError("several workers execute, each on its thread")

    def begin(self, batch: ScheduledBatch) -> Pending[StepResult] | None:
        return None

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._note("execute", batch)
        return StepResult(batch.step_id, [[self.num_blocks]])

    def use_idle_time(self, num_blocks_ever_used: int) -> bool:
        return False

    def load_adapter(self, path: str, digest: str | None, is_awaited: bool) -> AdapterLoad:
        self._note("load_adapter", (path, digest))
        return NotedLoad(self)

    def drop_adapter(self, digest: str) -> None:
        self._note("drop_adapter", digest)

    def describe(self) -> str:
        return f"A worker with {self.num_blocks} blocks"

    def give_up(self) -> None:
        self._note("give_up")

    def whereabouts(self) -> tuple[object, ...]:
        return ()

    def late(self, pending: Sequence[int]) -> dict[int, str]:
        return dict.fromkeys(pending, "is somewhere")

    def close(self) -> None: ...

    def _note(self, step: str, what: Any = None) -> None:
        self.told.append((step, what))
        self.threads.add(threading.get_ident())
        if step == self.failing and self.error is not None:
            raise self.error


class NotedLoad:
    """Of the worker's adapter."""

    def __init__(self, worker: NotedWorker) -> None:
        self._worker = worker

    def done(self) -> bool:
        return self._worker.adapter.done()

    def result(self) -> AdapterFacts:
        return self._worker.adapter.result()

    def add(self) -> None:
        self._worker._note("add")


def brought_up(workers: Sequence[NotedWorker], **arguments: Any) -> Any:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "device": "cpu"}
    config = EngineConfig.from_kwargs(**limits | arguments)
    return bring_up(config, MODEL, workers, is_server=True, progress=ignore)


def test_the_engine_decides_and_workers_obey() -> None:
    """In this order; the plan is made for the rank with the least memory, and told to all of them."""
    workers = [NotedWorker(300), NotedWorker(200)]
    running = brought_up(workers)
    for worker in workers:
        assert [step for step, _ in worker.told] == ["facts", "load", "measure", "allocate", "capture"]
    assert workers[0].told == workers[1].told
    told = dict(workers[0].told)
    assert told["facts"] is False, "a GPU is looked for beside --device cpu"
    assert told["load"].max_num_seqs == 4
    assert told["allocate"] == CacheSize(200, 200 * BLOCK, 2048)
    assert running.resolved.memory.num_blocks == 200
    workers = [NotedWorker(30), NotedWorker(20)]
    assert brought_up(workers, max_model_len=-1).resolved.model.max_model_len == 20 * 16
    assert dict(workers[0].told)["allocate"].max_model_len == 20 * 16


def test_ceilings_are_those_of_all_ranks_together() -> None:
    """They are not known if one rank did not measure."""
    workers = [NotedWorker(), NotedWorker()]
    workers[0].ceilings = Ceilings(1e9, 2e12)
    assert brought_up(workers).ceilings is None
    workers[1].ceilings = Ceilings(3e9, 4e12)
    assert brought_up(workers).ceilings == Ceilings(4e9, 6e12)


def test_what_is_said_is_plain_data() -> None:
    """It survives a pipe."""
    config = EngineConfig.from_kwargs(cudagraph_capture_sizes=[1, 4], quantization="int8")
    said = (
        WITH_GPU,
        WorkerSettings.of(resolve(config, MODEL, WITH_GPU, is_server=True)),
        Measured(memory_for(7), 64, Lap(0.25, 0.5), Ceilings(1e9, 2e12)),
        CacheSize(7, 7 * BLOCK, 112),
        ScheduledBatch(
            step_id=3,
            request_ids=["a"],
            num_computed_tokens=[0],
            num_scheduled_tokens=[2],
            num_logits=[1],
            draft_token_ids=[[]],
            new_block_ids=[[]],
            new_rows=[NewRow("a", [1, 2], 2, SamplingParams(seed=4, stop=["x"]), [9])],
        ),
        StepResult(3, [[17]], errors={1: "why"}),
    )
    for message in said:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


@pytest.mark.parametrize("failing", ["load", "measure", "allocate", "capture"])
def test_an_error_of_one_rank_is_one_clear_error(failing: str) -> None:
    """The user's own errors as they are, others with the rank; the other ranks have done the step."""
    workers = [NotedWorker(), NotedWorker(failing=failing, error=WeightsError("The shard is truncated"))]
    with pytest.raises(WeightsError, match="The shard is truncated"):
        brought_up(workers)
    assert workers[0].told[-1][0] == failing
    workers = [NotedWorker(), NotedWorker(failing=failing, error=OSError("the link is down"))]
    with pytest.raises(RuntimeError, match="Worker 2 of 2 failed: OSError: the link is down"):
        brought_up(workers)
    workers = [
        NotedWorker(failing=failing, error=OSError("another")),
        NotedWorker(failing=failing, error=WeightsError("The shard is truncated")),
    ]
    with pytest.raises(WeightsError, match="The shard is truncated"):
        brought_up(workers)


class LateWorker(NotedWorker):
    """Reads weights until somebody gives it up."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.is_given_up = threading.Event()

    def load(self, settings: WorkerSettings) -> None:
        assert self.is_given_up.wait(60.0)

    def give_up(self) -> None:
        self.is_given_up.set()


def test_a_rank_that_is_late_at_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its work and its limit; and no rank waits for it any more."""
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "7")
    workers = [NotedWorker(1), LateWorker(2), NotedWorker(3)]
    limits: list[float] = []

    def wait(pending: Sequence[Future[Any]], seconds: float) -> Any:
        """The seconds are over when all others are done."""
        limits.append(seconds)
        for each, worker in zip(pending, workers, strict=True):
            if not (isinstance(worker, LateWorker) and len(limits) == 2):
                each.result()
        return real_wait(pending, 0.0)

    real_wait = executor.wait
    monkeypatch.setattr(executor, "wait", wait)
    what = (
        "A worker with 2 blocks did not end reading its weights in time: a start may take 7 s "
        r"\(VLLM_ENGINE_READY_TIMEOUT_S\)"
    )
    config = EngineConfig(tensor_parallel_size=3, device="cpu")
    start_time = time.monotonic() - 5.0
    with pytest.raises(EngineDeadError, match=what):
        bring_up(config, MODEL, workers, is_server=True, progress=ignore, start_time=start_time)
    assert [workers[0].told[-1][0], workers[2].told[-1][0]] == ["load", "load"], "the others are not to blame"
    facts_limit, load_limit = limits
    assert load_limit <= facts_limit <= 2.0, "the limit is of the whole start"


class LoadingWorker(NotedWorker):
    """Reads weights together with one other worker. `loading` has those that read, of all workers."""

    def __init__(self, rank: int, loading: set[int], pairs: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.loading, self.pairs = rank, loading, pairs
        self.together: set[int] = set()

    def load(self, settings: WorkerSettings) -> None:
        self.loading.add(self.rank)
        self.pairs.wait(20.0)
        self.together = set(self.loading)
        self.pairs.wait(20.0)
        self.loading.remove(self.rank)
        self.pairs.wait(20.0)


def test_ranks_read_weights_in_turns() -> None:
    """With --max-parallel-loading-workers 2, two of four read at once, and no more."""
    loading, pairs = set[int](), threading.Barrier(2)
    workers = [LoadingWorker(rank, loading, pairs) for rank in range(4)]
    brought_up(workers, tensor_parallel_size=4, max_parallel_loading_workers=2)
    assert [len(worker.together) for worker in workers] == [2] * 4
    assert all(worker.told[-1][0] == "capture" for worker in workers)


def test_each_machine_has_its_own_turns() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "nnodes": 2}
    first, second, third, fourth = _loads(EngineConfig.from_kwargs(**sizes, max_parallel_loading_workers=1))
    assert first is second is not third is fourth
    assert not _loads(EngineConfig.from_kwargs(**sizes))


def test_a_rank_that_waits_for_its_turn_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the one that reads weights is named."""
    workers, begun = [LateWorker(1), LateWorker(2)], threading.Event()

    @contextmanager
    def second() -> Iterator[None]:
        """Its turn comes when the first one has ended."""
        assert workers[0].is_given_up.wait(60.0)
        yield

    def load(settings: WorkerSettings) -> None:
        begun.set()
        assert workers[0].is_given_up.wait(60.0)

    def wait(pending: Sequence[Future[Any]], seconds: float) -> Any:
        assert begun.wait(60.0)
        return real_wait(pending, 0.0)

    monkeypatch.setattr(workers[0], "load", load)
    real_wait = executor.wait
    monkeypatch.setattr(executor, "wait", wait)
    running, settings = ThreadExecutor(workers, loads=[nullcontext(), second()]), SETTINGS
    with pytest.raises(EngineDeadError, match=r"^A worker with 1 blocks did not end reading its weights in time"):
        running.load(settings)
    running.shutdown()


def test_no_rank_reads_weights_after_one_has_failed() -> None:
    """It takes its turn, because others wait for it, but the start ends with the error."""
    workers = [NotedWorker(failing="load", error=WeightsError("a broken file")), NotedWorker()]
    has_failed = threading.Event()

    @contextmanager
    def second() -> Iterator[None]:
        """Its turn comes when the first one has ended."""
        assert has_failed.wait(60.0)
        yield

    @contextmanager
    def first() -> Iterator[None]:
        try:
            yield
        finally:
            has_failed.set()

    running = ThreadExecutor(workers, loads=[first(), second()])
    with pytest.raises(WeightsError, match="a broken file"):
        running.load(SETTINGS)
    running.shutdown()
    assert workers[0].told
    assert not workers[1].told


def test_one_rank_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it."""
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0")
    brought_up([NotedWorker()], async_scheduling=True)


def test_every_rank_computes_a_step_on_its_thread() -> None:
    workers = [NotedWorker(300), NotedWorker(200)]
    executor = ThreadExecutor(workers)
    result = executor.submit(ScheduledBatch(1, ["a"])).result()
    executor.shutdown()
    assert result.token_ids == [[300]], "the first rank answers"
    assert [len(worker.threads) for worker in workers] == [1, 1]
    assert len(workers[0].threads | workers[1].threads | {threading.get_ident()}) == 3


class Beside(NotedWorker):
    """In another process: its steps are begun from any thread, and it answers as `answers` says, in their order."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__()
        self.answers, self.heard = list(answers), list[int]()

    def begin(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self._note("begin", batch.step_id)
        return Answering(self, batch.step_id)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.begin(batch).result()


class Answering:
    """A step of Beside."""

    def __init__(self, worker: Beside, step_id: int) -> None:
        self.worker, self.step_id = worker, step_id

    def result(self) -> StepResult:
        self.worker.heard.append(self.step_id)
        if (error := self.worker.answers.pop(0)) is not None:
            raise error
        return StepResult(self.step_id, [], ranks=((float(self.step_id), 0.0),))


def test_a_rank_beside_the_first_is_told_at_once_and_heard_with_the_next_step() -> None:
    """Its answer is not waited for: it may come later. No thread of its own is needed."""
    first, other = NotedWorker(), Beside(None, None, None)
    executor = ThreadExecutor([first, other])
    for step in range(3):
        assert executor.submit(ScheduledBatch(step, ["a"])).result().ranks == ((step - 1.0, 0.0),) * (step > 0)
        assert other.heard == list(range(step))
    assert other.told == [("begin", step) for step in range(3)]
    assert other.threads == {threading.get_ident()}
    executor.shutdown()


def test_an_error_behind_a_step_ends_no_request_of_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    """All ranks have computed both steps, and answers are not taken for those of later steps."""
    first, other = NotedWorker(), Beside(None, OSError("no room"), None, None)
    executor = ThreadExecutor([first, other])
    for step in range(4):
        assert executor.submit(ScheduledBatch(step, ["a"])).result().token_ids
        assert other.heard == list(range(step))
        assert ("worker 2 of 2 failed behind a step: no room" in caplog.text) == (step > 1)
    executor.shutdown()


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_is_lost_behind_a_step_says_why_with_the_next_one(fails: bool) -> None:
    lost, is_gone = EngineDeadError("The GPU reports an error: it is gone"), EngineDeadError("Rank 1 has ended")
    first, other = NotedWorker(), Beside(None, lost, is_gone)
    executor = ThreadExecutor([first, other])
    for step in (0, 1):
        executor.submit(ScheduledBatch(step, ["a"])).result()
    if fails:
        first.failing, first.error = "execute", PeerLostError("rank 1 has failed")
    with pytest.raises(EngineDeadError, match="it is gone"):
        executor.submit(ScheduledBatch(2, ["a"])).result()
    executor.shutdown()


def test_if_the_first_rank_fails_the_others_say_why(caplog: pytest.LogCaptureFixture) -> None:
    first, other = NotedWorker(), Beside(None, OSError("no room"), RowsFailedError(["a"], "bad row"), None)
    executor = ThreadExecutor([first, other])
    for step in (0, 1):
        executor.submit(ScheduledBatch(step, ["a"])).result()
    first.failing, first.error = "execute", StepVoid("another rank has left the step")
    with pytest.raises(RowsFailedError, match="bad row"):
        executor.submit(ScheduledBatch(2, ["a"])).result()
    assert other.heard == [0, 1, 2]
    assert "worker 2 of 2 failed behind a step: no room" in caplog.text
    executor.shutdown()


def test_a_rank_is_told_of_a_step_behind_what_its_thread_has_to_tell_it() -> None:
    first, other = NotedWorker(), Beside(None, None, None)
    executor, goes_on = ThreadExecutor([first, other]), threading.Event()
    executor.submit(ScheduledBatch(0, ["a"])).result()
    executor._threads[1].submit(goes_on.wait)
    executor.drop_adapter("digest")
    step = executor.submit(ScheduledBatch(1, ["a"]))
    goes_on.set()
    assert step.result().ranks == ((0.0, 0.0),)
    executor.submit(ScheduledBatch(2, ["a"])).result()
    executor.shutdown()
    assert other.told == [("begin", 0), ("drop_adapter", "digest"), ("begin", 1), ("begin", 2)]


def test_an_adapter_is_read_when_all_ranks_have_read_it() -> None:
    """It is added and dropped behind the steps that were submitted before."""
    workers = [NotedWorker(), NotedWorker()]
    executor = ThreadExecutor(workers)
    load = executor.load_adapter("/a", "digest", True)
    facts = AdapterFacts("digest", 8, 100, 7)
    workers[0].adapter.set_result(facts)
    assert not load.done()
    workers[1].adapter.set_result(facts)
    assert load.done()
    assert load.result() == facts
    executor.submit(ScheduledBatch(1, ["a"]))
    executor.drop_adapter("digest")
    executor.shutdown()
    assert [step for step, _ in workers[1].told] == ["load_adapter", "add", "execute", "drop_adapter"]
    assert len(workers[1].threads - {threading.get_ident()}) == 1
    assert InlineExecutor(workers[:1]).load_adapter("/b", None, False).result() == facts
    assert workers[0].told[-1] == ("add", None)


class Looked(NotedWorker):
    """Says what `check_alive` finds. Its `drop_adapter` hangs until `goes_on` is set."""

    def __init__(self, error: EngineDeadError | None = None) -> None:
        super().__init__()
        self.found, self.goes_on, self.looks = error, threading.Event(), 0

    def drop_adapter(self, digest: str) -> None:
        self.goes_on.wait(20.0)

    def check_alive(self) -> None:
        self.looks += 1
        if self.found is not None:
            raise self.found


def test_a_rank_that_hangs_is_not_waited_for_where_ranks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.executor.LEAVE_SECONDS", 0.05)
    busy, other = Looked(), Looked()
    executor = ThreadExecutor([busy, other])
    executor.drop_adapter("digest")
    other.goes_on.set()
    executor.check_alive()
    executor.check_alive()
    assert (busy.looks, other.looks) == (0, 1)
    other.found = EngineDeadError("Rank 1 has failed")
    busy.goes_on.set()
    with pytest.raises(EngineDeadError, match="Rank 1 has failed"):  # noqa: PT012
        for _ in range(400):
            executor.check_alive()
    assert busy.looks
    executor.shutdown()


def test_devices_must_be_alike() -> None:
    small = replace(FACTS, total_memory_bytes=4 * GIB, num_cores=2)
    names = ["Rank 0 of 2 (process 4 on host-a)", "Rank 1 of 2 (process 5 on host-b)"]
    least = least_facts([replace(FACTS, free_memory_bytes=GIB), small], names)
    assert (least.total_memory_bytes, least.free_memory_bytes, least.num_cores) == (4 * GIB, GIB, 2)
    assert WITH_GPU.gpu is not None
    narrow = replace(WITH_GPU, gpu=replace(WITH_GPU.gpu, free_memory_bytes=GIB))
    assert least_facts([WITH_GPU, narrow], names).memory_of("cuda") == (80 * GIB, GIB)
    old = replace(WITH_GPU, gpu=replace(WITH_GPU.gpu, capability=80))
    for first, other, kinds in (
        (FACTS, replace(FACTS, isa="amx"), r"on host-a\): avx2; Rank 1 of 2 \(process 5 on host-b\): amx"),
        (WITH_GPU, old, r"on host-a\): avx2 and sm_90; Rank 1 of 2 \(process 5 on host-b\): avx2 and sm_80"),
    ):
        with pytest.raises(ConfigError, match=f"not alike.*{kinds}"):
            least_facts([first, other], names)


def test_ranks_that_see_one_gpu_each_have_them_all() -> None:
    """As a program that starts ranks may give them out. If it gives one GPU to two ranks, both are named."""
    names, gpu = ["Rank 0 of 2", "Rank 1 of 2"], WITH_GPU.gpu
    assert gpu is not None
    first, second = (replace(WITH_GPU, gpu=replace(gpu, uuid=uuid)) for uuid in ("12ab", "34cd"))
    least = least_facts([first, second], names)
    config = EngineConfig(tensor_parallel_size=2, device="cuda")
    assert resolve(config, MODEL, least, is_server=False).device.device == "cuda"
    shared = r"same GPU. Got 'Rank 0 of 2; Rank 1 of 2: 12ab'.*in CUDA_VISIBLE_DEVICES.* or lower --tensor"
    with pytest.raises(ConfigError, match=shared):
        least_facts([first, first], names)


def test_a_rank_without_a_gpu_is_named() -> None:
    """With its host, and why it has none."""
    lacks = replace(FACTS, no_gpu="torch finds no GPU of NVIDIA")
    workers = [NotedWorker(1), NotedWorker(2)]
    workers[0].facts, workers[1].facts = lambda wants_gpu: WITH_GPU, lambda wants_gpu: lacks  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"Got 'A worker with 2 blocks: torch finds no GPU of NVIDIA.*--device cpu"):
        brought_up(workers, device="auto")
    assert not workers[0].told, "nothing is read"


class Rank(DeviceWorker):
    """One of several that hold the whole model and compute the same; the second one has less memory."""

    def __init__(self, rank: int, model_config: ModelConfig, progress: Progress) -> None:
        super().__init__(model_config, progress)
        self.rank, self.num_steps, self.fails_at = rank, 0, -1

    def load(self, settings: WorkerSettings) -> None:
        with _ONE_POOL:
            super().load(settings)

    def measure(self) -> Measured:
        with _ONE_POOL:
            return replace(super().measure(), memory=memory_for(100 - 60 * self.rank))

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self.num_steps += 1
        with _ONE_POOL:
            result = super().execute(batch)
        if self.num_steps == self.fails_at:
            raise OSError("the link is down")
        return result


def started(num_ranks: int, **arguments: Any) -> StartedEngine:
    def make(model_config: ModelConfig, progress: Progress) -> Sequence[Worker]:
        return [Rank(rank, model_config, progress) for rank in range(num_ranks)]

    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_threads": 1, "device": "cpu"}
    config = EngineConfig.from_kwargs(**limits | {"max_model_len": 256} | arguments)
    return start_engine(config, demo.path(), is_server=True, progress=ignore, make_workers=make)


@pytest.mark.parametrize("is_async", [False, True])
def test_two_ranks_give_the_tokens_of_one(is_async: bool) -> None:
    one, two = started(1, async_scheduling=is_async), started(2, async_scheduling=is_async)
    assert (one.resolved.memory.num_blocks, two.resolved.memory.num_blocks) == (100, 40)
    executor = two.executor
    assert isinstance(executor, ThreadExecutor)
    assert isinstance(one.executor, ThreadExecutor if is_async else InlineExecutor)
    assert run(one.core, PROMPTS) == run(two.core, PROMPTS)
    first, second = executor.workers
    assert isinstance(first, Rank)
    assert isinstance(second, Rank)
    two.core.shutdown()
    one.core.shutdown()
    assert first.num_steps == second.num_steps > 10


def test_a_start_that_fails_late_closes_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the workers were brought up: its threads have ended too."""
    closed: list[Rank] = []

    def note(rank: Rank) -> None:
        closed.append(rank)

    def fail(core: object, *, has_time_limit: bool) -> None:
        raise ConfigError("no token came")

    monkeypatch.setattr(Rank, "close", note)
    monkeypatch.setattr("quire.engine.start.produce_tokens", fail)
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="no token came"):
        started(2)
    assert len(closed) == 2
    new = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in new if name.startswith("quire-worker")]


def test_a_rank_that_fails_behind_its_part_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """All ranks have computed the step, so its tokens count, and the failure is logged."""
    engine = started(2)
    executor = engine.executor
    assert isinstance(executor, ThreadExecutor)
    second = executor.workers[1]
    assert isinstance(second, Rank)
    second.fails_at = second.num_steps + 4
    assert run(engine.core, PROMPTS) == run(started(1).core, PROMPTS)
    assert "worker 2 of 2 failed behind a step: the link is down" in caplog.text
    assert run(engine.core, PROMPTS, prefix="again") == run(started(1).core, PROMPTS)
