"""Ranks that divide the KV cache among them give the tokens and logprobs of one rank, to the bit.

Ranks are threads here; a slow test has processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.distributed import shared_memory
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine, start_engine
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.messages import AddRequest
from quire.sampling_params import SamplingParams
from quire.worker.worker import DeviceWorker
from tests.covering import covering
from tests.engine.harness import EOS
from tests.engine.ranks import ignore, started, watch_recordings
from tests.models.test_families import CASES, Case, random_hf_model

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

RANGE, VOCABULARY = 256, 500
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
WIDE = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "num_attention_heads": 8, **ROPE}
MODELS: dict[str, Case] = {
    "one head": Case("LlamaConfig", {**WIDE, "num_key_value_heads": 1}),
    "two heads": Case("LlamaConfig", {**WIDE, "num_key_value_heads": 2}),
    "latent": replace(CASES["deepseek_v2"], settings=CASES["deepseek_v2"].settings | WIDE | {"num_key_value_heads": 8}),
    "sinks and windows": replace(
        CASES["gpt_oss"], settings=CASES["gpt_oss"].settings | WIDE | {"num_key_value_heads": 1, "sliding_window": 300}
    ),
}
LIMITS: dict[str, Any] = {"max_model_len": 1100, "max_num_batched_tokens": 400, "num_gpu_blocks_override": 200}
FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "fp8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
}
Answer = list[tuple[list[int], list[Any]]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint, as transformers writes it."""

    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        random_hf_model(MODELS[name]).save_pretrained(folder)
        return folder

    return cache(write)


def asked() -> list[tuple[list[int], SamplingParams, str | None]]:
    """Prompts of several ranges and of a part of one; two that begin alike, and forks in the middle of a range."""
    draw = random.Random(3)
    long, short, other = ([draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (700, 20, 300))
    greedy = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    drawn = [SamplingParams(temperature=1.2, seed=seed, max_tokens=6, logprobs=2) for seed in (5, 6)]
    return [
        (long, greedy, None),
        (short, greedy, None),
        (other, drawn[0], None),
        (other, drawn[1], "first2"),
        (long[: 2 * RANGE + 3] + short, greedy, None),
    ]


def answers(core: EngineCore, prefix: str = "first", preempt_at: range = range(0)) -> Answer:
    """`preempt_at`: steps before which the newest running request loses its blocks."""
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for index, (token_ids, params, fork_of) in enumerate(asked()):
        fork_of = fork_of and fork_of.replace("first", prefix)
        request_id = f"{prefix}{index}"
        core.add(AddRequest(request_id, token_ids, params, 6, stop_token_ids=[EOS], fork_of=fork_of))
        found[request_id] = ([], [])
    step = 0
    while core.has_work():
        if step in preempt_at and core.scheduler.num_running:
            core.scheduler.preempt_last()
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens, logprobs = found[delta.request_id]
            tokens += delta.token_ids
            logprobs += delta.logprobs or []
        step += 1
    return list(found.values())


def of(num_ranks: int, folder: Path, **arguments: Any) -> Answer:
    engine = started(num_ranks, folder, **LIMITS | arguments)
    try:
        return answers(engine.core)
    finally:
        engine.core.shutdown()


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str, str, str], Answer]:
    """Of one rank."""
    return cache(lambda model, form, isa: of(1, folder_of(model), **FORMS[form]))


@pytest.mark.parametrize(
    ("model", "form", "num_ranks", "num_owners"),
    [
        *[("one head", "bfloat16", 2, 2), ("one head", "int8", 4, 4), ("one head", "float32", 4, 2)],
        *[("latent", "bfloat16", 2, 2), ("latent", "float32", 3, 3), ("latent", "fp8", 2, 2)],
        *[("two heads", "bfloat16", 4, 2), ("sinks and windows", "bfloat16", 2, 2)],
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("one head", "fp8", 2, 2), ("one head", "float32", 2, 2), ("one head", "bfloat16", 3, 3)),
                *(("latent", "int8", 4, 4), ("latent", "bfloat16", 4, 2), ("latent", "float32", 2, 2)),
                *(("sinks and windows", "float32", 4, 4), ("two heads", "int8", 4, 2)),
            )
        ],
    ],
)
def test_models(
    model: str,
    form: str,
    num_ranks: int,
    num_owners: int,
    folder_of: Callable[[str], Path],
    expected: Callable[[str, str, str], Answer],
) -> None:
    """Prompts in chunks, decodes, forks and shared beginnings, in one batch."""
    one = expected(model, form, cpu.isa())
    assert len({tuple(tokens) for tokens, _ in one}) > 3
    found = of(num_ranks, folder_of(model), decode_context_parallel_size=num_owners, **FORMS[form])
    assert found == one


@pytest.mark.parametrize(("isa", "model", "form"), covering(cpu.isas(), ["one head", "latent"], ["bfloat16", "int8"]))
def test_every_instruction_set(
    isa: str,
    model: str,
    form: str,
    folder_of: Callable[[str], Path],
    expected: Callable[[str, str, str], Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks that are no whole ranges, two batches in flight, and slots of a range or two: turns cut items."""
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 64 << 10)
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        schedule = {"max_num_batched_tokens": 123, "async_scheduling": True}
        found = of(2, folder_of(model), decode_context_parallel_size=2, **schedule, **FORMS[form])
        assert found == expected(model, form, isa)
    finally:
        cpu.set_isa(best)


@pytest.mark.parametrize("num_blocks", [6, 200])
def test_prefix_hits_preemption_and_lack_of_blocks(
    num_blocks: int, folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]
) -> None:
    """Twice over the same cache. With few pages the requests wait for each other."""
    engine = started(
        2,
        folder_of("one head"),
        decode_context_parallel_size=2,
        dtype="bfloat16",
        **LIMITS | {"num_gpu_blocks_override": num_blocks},
    )
    try:
        for prefix, preempt_at in (("first", range(1, 12, 3)), ("second", range(0))):
            assert answers(engine.core, prefix, preempt_at) == expected("one head", "bfloat16", cpu.isa())
        pool = engine.core.scheduler.kv.pool
        assert pool.num_blocks == num_blocks
        assert pool.num_cached_blocks > 0
    finally:
        engine.core.shutdown()


def workers_of(engine: StartedEngine) -> list[DeviceWorker]:
    return list(engine.executor.workers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", ["one head", "latent"])
def test_each_rank_has_its_part_of_the_bytes(model: str, folder_of: Callable[[str], Path]) -> None:
    """Planned bytes equal allocated bytes. Twice the context fits into the same bytes of each rank."""
    folder, tokens = folder_of(model), dict[int, int]()
    for num_owners in (1, 2):
        engine = started(
            2,
            folder,
            decode_context_parallel_size=num_owners,
            **LIMITS | {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 3_000_000},
        )
        try:
            memory, block_size = engine.resolved.memory, engine.resolved.model.block_size  # type: ignore[attr-defined]
            assert memory.num_blocks % num_owners == 0
            for worker in workers_of(engine):
                assert worker.cache.pages.nbytes == memory.kv_cache_bytes
                assert len(worker.cache.pages) == memory.num_blocks // num_owners
            tokens[num_owners] = memory.num_blocks * block_size
        finally:
            engine.core.shutdown()
    page = RANGE * 2  # no whole pages
    assert 2 * tokens[1] - 2 * page <= tokens[2] <= 2 * tokens[1]


def test_a_rank_writes_to_its_own_pages_alone(folder_of: Callable[[str], Path]) -> None:
    """Both have some, and nothing that another rank has."""
    engine = started(2, folder_of("one head"), decode_context_parallel_size=2, **LIMITS)
    try:
        for worker in workers_of(engine):
            worker.cache.pages.zero_()
        core, prompt = engine.core, list(range(3, 3 + 3 * RANGE))
        core.add(AddRequest("r", prompt, SamplingParams(temperature=0.0, max_tokens=1), 1))
        while core.has_work():
            core.step()
        written = [int((worker.cache.pages != 0).any(dim=1).sum()) for worker in workers_of(engine)]
        assert sum(written) == 3
        assert max(written) == 2
    finally:
        engine.core.shutdown()


def test_decode_steps_are_recorded(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = watch_recordings(monkeypatch)
    of(2, folder_of("latent"), decode_context_parallel_size=2)
    assert recorded, "no step was recorded"
    assert all(recorded)


def test_stages(folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]) -> None:
    found = of(2, folder_of("latent"), num_stages=2, decode_context_parallel_size=2, dtype="bfloat16")
    assert found == expected("latent", "bfloat16", cpu.isa())


def test_machines(folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]) -> None:
    """Two of the owners are on each of two machines."""
    found = of(4, folder_of("one head"), nnodes=2, decode_context_parallel_size=4, **FORMS["int8"])
    assert found == expected("one head", "int8", cpu.isa())


@pytest.mark.slow
def test_processes(folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]) -> None:
    sizes = {"num_threads": 2, "device": "cpu", "max_num_seqs": 4, "dtype": "bfloat16"}
    config = EngineConfig.from_kwargs(**LIMITS, **sizes, tensor_parallel_size=2, decode_context_parallel_size=2)
    engine = start_engine(config, folder_of("one head"), is_server=False, progress=ignore)
    try:
        assert answers(engine.core) == expected("one head", "bfloat16", cpu.isa())
    finally:
        engine.core.shutdown()


@pytest.mark.parametrize(
    ("model", "num_ranks", "num_owners", "why", "legal"),
    [
        ("one head", 2, 4, "4 does not divide the number of ranks, 2", "one of 1, 2 with --tensor-parallel-size 2"),
        ("one head", 1, 2, "2 does not divide the number of ranks, 1", "1 with --tensor-parallel-size 1"),
        ("two heads", 2, 2, "ranks hold different heads of k and v", "1 with --tensor-parallel-size 2"),
        ("two heads", 4, 4, "ranks hold different heads of k and v", "one of 1, 2 with --tensor-parallel-size 4"),
        ("latent", 6, 2, "not every 2 neighbours have as many heads of q", "one of 1, 6 with --tensor-parallel-size 6"),
    ],
)
def test_illegal_degrees_are_refused(
    model: str, num_ranks: int, num_owners: int, why: str, legal: str, folder_of: Callable[[str], Path]
) -> None:
    """Before a weight is read."""
    with pytest.raises(ConfigError, match=why) as caught:
        started(num_ranks, folder_of(model), decode_context_parallel_size=num_owners, **LIMITS)
    assert legal in str(caught.value)
    assert caught.value.param == "decode_context_parallel_size"


def test_what_does_not_go_together(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LIMITS | {"decode_context_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"Illegal block size. Got 16. Expected 256 with --decode-context-parallel"):
        started(2, folder_of("one head"), **asked, block_size=16)
    monkeypatch.setenv("QUIRE_ATTENTION_BACKEND", "reference")
    with pytest.raises(ConfigError, match="together with the reference attention"):
        started(2, folder_of("one head"), **asked)
