"""Ranks as processes: the tokens of one rank, and the end when a process is killed, stopped or left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

import quire.demo
from quire import envs
from quire.config import EngineConfig
from quire.engine import bring_up, executor, rank_spawn, ranks
from quire.engine.bring_up import plan_least
from quire.engine.core import EngineCore
from quire.engine.rank_messages import Report
from quire.engine.ranks import RankProcess
from quire.engine.start import StartedEngine, start_engine
from quire.errors import EngineDeadError, MemoryPlanError, WeightsError
from quire.kernels import cpu
from quire.messages import AddRequest, UseTokenizer
from quire.planning.memory_plan import plan_kv_cache, with_later_bytes
from quire.sampling_params import SamplingParams
from tests.e2e.serving import INTERPRETER
from tests.engine import queued_gpus
from tests.engine.harness import EOS, Prompt, run, two_layers
from tests.engine.ranks import LIMITS, ignore, started
from tests.engine.test_sameness import brief
from tests.engine.test_sameness_ranks import answers
from tests.nursery import words_of

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "vocab_size": 5000,
}
ENDLESS = Prompt((5, 7, 9), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))


def in_processes(folder: Path | None = None, drafter_folder: Path | None = None, **arguments: Any) -> StartedEngine:
    config = EngineConfig.from_kwargs(**LIMITS | arguments)
    folder = folder or quire.demo.path("target")
    return start_engine(config, folder, is_server=False, progress=ignore, drafter_folder=drafter_folder)


def process_of(engine: StartedEngine) -> subprocess.Popen[bytes]:
    (_, second) = engine.executor.workers  # type: ignore[attr-defined]
    assert isinstance(second, RankProcess)
    return second._process


def is_there(pid: int) -> bool:
    """A process that has ended and was not waited for is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Any, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(condition())


BRIEF_STEPS = 6  # of an answer with as many tokens


SHARES = ["tensor_parallel_size", "pipeline_parallel_size"]


@pytest.fixture(scope="module", params=SHARES)
def engine(request: pytest.FixtureRequest) -> Iterator[StartedEngine]:
    """Until its last test ends it. The clean end is shown in test_sameness_ranks_lora.py and test_nodes.py.

    One is started as users start it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensor_parallel_size":
            patch.setattr(subprocess, "Popen", INTERPRETER.popen)
        engine = in_processes(**{request.param: 2}, numa_bind_cpus=(str(cpus[0]), str(cpus[-1])))
    bound = [os.sched_getaffinity(pid) for pid in (0, process_of(engine).pid)]
    assert bound == [{cpus[0]}, {cpus[-1]}], "each is bound"
    os.sched_setaffinity(0, cpus)
    yield engine
    engine.core.shutdown()
    assert process_of(engine).returncode is not None, "the process is left behind"


def with_a_constraint(core: EngineCore) -> list[list[int]]:
    """The tokens of the brief prompts, and of one whose answer is four letters."""
    core.use_tokenizer(UseTokenizer((quire.demo.path("target") / "tokenizer.json").read_text(), [EOS]))
    letters = SamplingParams(temperature=1.0, seed=1, max_tokens=8, grammar=LLMatcher.grammar_from_regex("[ab]{4}"))
    return run(core, [*brief(), Prompt((5, 7, 9), letters)])


@cache
def expected() -> list[list[int]]:
    return with_a_constraint(started(1).core)


@pytest.mark.parametrize(
    "engine", [pytest.param("tensor_parallel_size", marks=pytest.mark.slow), "pipeline_parallel_size"], indirect=True
)
def test_a_process_per_rank_gives_the_tokens_of_one(engine: StartedEngine) -> None:
    assert with_a_constraint(engine.core) == expected()
    times: list[tuple[float, float]] = []

    def note(core: EngineCore, step: int) -> None:
        times.extend(() if core.last_record is None else core.last_record.ranks)

    run(engine.core, brief(), before_step=note)
    assert len(times) > 2
    assert all(0.0 <= waited < seconds for seconds, waited in times)
    assert any(waited for _, waited in times)


def test_processes_with_whole_experts_that_move(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    form = {"max_model_len": 128, "load_format": "dummy"}
    asked = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"step_interval": 2}}
    engine = in_processes(tmp_path, tensor_parallel_size=2, **form, **asked)
    assert run(engine.core, brief()) == run(started(1, tmp_path, **form).core, brief())
    assert engine.executor.workers[0].runner.balancer.num_moved > 0  # type: ignore[attr-defined]
    process = process_of(engine)
    engine.core.shutdown()
    assert process.returncode == 0


def test_processes_of_two_lanes(tmp_path: Path) -> None:
    """The lane of another process answers too, with logprobs. If its process is lost, the engine ends."""
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    form = {"max_model_len": 128, "load_format": "dummy"}
    engine, one = (
        in_processes(tmp_path, data_parallel_size=2, enable_expert_parallel=True, **form),
        started(1, tmp_path, **form),
    )
    assert answers(engine.core) == answers(one.core)
    record = engine.core.last_record
    assert len(record.lanes) == len(record.ranks) == 2
    check_that_it_is_named(engine, signal.SIGKILL)
    engine.core.shutdown()


def test_a_request_that_cannot_be_prepared_ends_alone(engine: StartedEngine) -> None:
    """Each process refuses it, and says why."""
    vector = AddRequest("vector", [5, 7, 9], SamplingParams(temperature=0.0), 8, wants_vector=True)
    engine.core.add(vector)
    deltas = []
    while engine.core.has_work():
        deltas += engine.core.step()
    (delta,) = deltas
    assert delta.error == "The model gives tokens, and no vector of a prompt."
    assert run(engine.core, [brief()[0]]) == expected()[:1]


def test_a_rank_that_is_lost_is_named(engine: StartedEngine) -> None:
    check_that_it_is_named(engine, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_a_rank_that_is_stopped_is_named(share: str) -> None:
    engine = in_processes(**{share: 2})
    check_that_it_is_named(engine, signal.SIGSTOP)
    engine.core.shutdown()


def check_that_it_is_named(engine: StartedEngine, number: signal.Signals) -> None:
    """In the middle of steps: the first rank stops waiting."""
    pid = process_of(engine).pid

    def hit(core: Any, step: int) -> None:
        if step == 20:
            os.kill(pid, number)

    with pytest.raises(
        EngineDeadError,
        match=rf"Rank 1 of 2(, in stage 0 of 2)? \(process {pid} on .*\) (was killed|was stopped|rank 1)",
    ):
        run(engine.core, [ENDLESS], before_step=hit)


def test_an_error_of_another_rank_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its type and its words; no process is left."""
    for file in quire.demo.path("target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[:-100])
    with pytest.raises(WeightsError):
        in_processes(tmp_path, tensor_parallel_size=2)
    assert wait_for(lambda: not _children())


def _children() -> list[str]:
    """Of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid() and name.endswith("rank_process"):
                found.append(folder.name)
    return found


STUCK = """
import threading
from quire.engine import rank_process
from quire.worker.worker import DeviceWorker
def load(worker, settings):
    for share in (0.25, 0.5):
        worker._progress("load", share, "of a file that is far away")
    threading.Event().wait()
DeviceWorker.load = load
rank_process.main()
"""


def test_a_rank_that_is_stuck_in_the_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its process, its work and progress, and the variable; no process is left."""
    monkeypatch.setattr(rank_spawn, "PROGRAM", ("-c", STUCK))
    is_stuck, decode, wait = threading.Event(), ranks.decode_from_rank, executor.wait

    def noting(frame: bytes) -> Any:
        answer = decode(frame)
        if isinstance(answer, Report) and answer.share == 0.5:
            is_stuck.set()
        return answer

    def until_stuck(pending: Sequence[Future[Any]], seconds: float) -> Any:
        """The time is over then, and not before."""
        while not is_stuck.is_set() and not all(each.done() for each in pending):
            is_stuck.wait(0.05)
        pending[0].result()
        return wait(pending, 0.0)

    monkeypatch.setattr(ranks, "decode_from_rank", noting)
    monkeypatch.setattr(executor, "wait", until_stuck)
    with pytest.raises(
        EngineDeadError,
        match=r"^Rank 1 of 2 \(process \d+ on .*, load (25|50)% of a file that is far away\) did not end reading its "
        r"weights in time: a start may take 600 s \(VLLM_ENGINE_READY_TIMEOUT_S\)\.$",
    ):
        in_processes(tensor_parallel_size=2)
    assert wait_for(lambda: not _children())


CONFINED = """
from pathlib import Path
from quire.engine import rank_process
from quire.planning import devices
devices._CGROUP = Path({folder!r})
rank_process.main()
"""


def test_the_plan_is_that_of_the_rank_with_the_least_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the second process has a limit, as in a container of its own. All ranks keep as many blocks as it can."""
    limit, noted = 160 << 20, list[Any]()
    (tmp_path / "memory.max").write_text(str(limit))
    (tmp_path / "memory.current").write_text("0")
    monkeypatch.setattr(rank_spawn, "PROGRAM", ("-c", CONFINED.format(folder=str(tmp_path))))

    def note(*arguments: Any) -> Any:
        noted.append(arguments)
        return plan_least(*arguments)

    monkeypatch.setattr(bring_up, "plan_least", note)
    engine = in_processes(tensor_parallel_size=2, num_gpu_blocks_override=None, max_num_seqs=64)
    ((config, parts, resolved, memories),) = noted
    first, second = (
        plan_kv_cache(config, part, resolved, with_later_bytes(resolved, part, memory)).memory
        for part, memory in zip(parts, memories, strict=True)
    )
    planned = engine.resolved.memory
    assert planned.num_blocks == second.num_blocks < first.num_blocks
    assert 0 < planned.kv_cache_bytes + planned.work_bytes < limit // 2
    assert all(run(engine.core, brief()))
    engine.core.shutdown()
    (tmp_path / "memory.max").write_text(str(4 << 20))
    with pytest.raises(MemoryPlanError, match="The weights do not fit"):
        in_processes(tensor_parallel_size=2, num_gpu_blocks_override=None)
    assert wait_for(lambda: not _children())


RAISING = """
import os
from quire.distributed.shared_memory import SharedMemoryGroup
from quire.engine import rank_process
from quire.worker.worker import DeviceWorker
execute, join, steps = DeviceWorker.execute, SharedMemoryGroup.gather_to, []
def count(worker, batch):
    ids = batch.request_ids
    steps.append(len(ids) >= int(os.environ["LEAST_ROWS"]) and ids[0][0] == "r")  # not a probe, nor the warm-up
    return execute(worker, batch)
def join_or_raise(group, *arguments):
    if steps and steps[-1] and sum(steps) == 3:
        steps.append(False)
        raise OSError("no memory today")
    return join(group, *arguments)
DeviceWorker.execute, SharedMemoryGroup.gather_to = count, join_or_raise
rank_process.main()
"""


@pytest.mark.parametrize("share", SHARES)
def test_a_rank_that_raises_where_others_wait_for_it(
    share: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for the limit of 600 s. Ranks of one stage compute a step of several requests again: a request that
    fails alone would end. With stages, the engine ends and says why.
    """
    monkeypatch.setattr(rank_spawn, "PROGRAM", ("-c", RAISING))
    monkeypatch.setenv("LEAST_ROWS", "2" if share == "tensor_parallel_size" else "1")
    engine = in_processes(**{share: 2})
    if share == "tensor_parallel_size":
        assert run(engine.core, brief()) == expected()[: len(brief())]
        assert "OSError: no memory today" in capfd.readouterr().err
    else:
        with pytest.raises(EngineDeadError, match=r"Rank 1 of 2 failed in a step: OSError: no memory today"):
            run(engine.core, [ENDLESS])
    process = process_of(engine)
    engine.core.shutdown()
    assert process.returncode is not None


@pytest.mark.parametrize(
    ("where", "number", "share"),
    [
        pytest.param("before", 3, SHARES[0], marks=pytest.mark.slow),
        pytest.param("behind", 3, SHARES[0], marks=pytest.mark.slow),
        ("behind", BRIEF_STEPS, SHARES[0]),
        ("before", 3, SHARES[1]),
    ],
)
def test_a_device_that_fails_behind_its_host_is_told(
    where: str, number: int, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the answers of a rank that does not sample, so the rank says it without being asked: while the
    device of the first rank waits for its device, between steps, or after the last step.
    """
    program = (*words_of("tests.engine.queued_gpus"), where, str(number))
    monkeypatch.setattr(rank_spawn, "PROGRAM", program)
    queued_gpus.use_them(monkeypatch.setattr)
    limits = {"cudagraph_capture_sizes": (1, 2), "distributed_timeout_seconds": 120}
    engine = in_processes(two_layers(), **LIMITS | limits | {"device": "cuda", share: 2})
    short = Prompt((5, 7, 9), SamplingParams(temperature=0.0, max_tokens=BRIEF_STEPS, ignore_eos=True))
    try:
        with pytest.raises(EngineDeadError, match="The GPU reports an error: it is gone"):
            _run_and_look(engine, [short])
    finally:
        engine.core.shutdown()


def _run_and_look(engine: StartedEngine, prompts: list[Prompt]) -> None:
    """As an engine process does, which looks at its ranks while there are no requests."""
    run(engine.core, prompts)
    wait_for(engine.check_alive)


PARENT = """
import sys, time
from quire import LLM
llm = LLM(tensor_parallel_size=2, max_model_len=256, max_num_seqs=4, num_gpu_blocks_override=50, device="cpu")
print(llm.llm_engine.core.executor.workers[1]._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_end_with_their_parent() -> None:
    """Killed, so that it cannot report. Its memory has no name that could stay."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=envs.for_children()) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()
    assert wait_for(lambda: not is_there(pid), 5.0)
