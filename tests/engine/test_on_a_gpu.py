"""The engine on a real GPU: needs one, and Triton. Nothing here has run yet, see docs/architecture.md.

python -m pytest tests/engine/test_on_a_gpu.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.demo
from quire.attention.backend import AttentionSpec
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.reference import ReferenceAttention
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.start import StartedEngine, start_engine
from quire.forward_batch import LayerCache
from quire.kernels import gpu, gpu_facts
from quire.messages import AddRequest
from quire.planning.flashinfer_facts import flashinfer_version
from quire.sampling_params import SamplingParams
from quire.worker.accelerator import Cuda
from quire.worker.model_runner import ModelRunner
from tests.attention.test_backends import make_batch
from tests.attention.test_flashinfer import BLOCK_SIZE, DECODES, MIXED, assert_replays_follow_plans, host_step
from tests.engine.harness import Prompt, Schedule, build_core, run
from tests.engine.test_gpu_path import HISTORY
from tests.engine.test_sameness import prompts

WHY_NOT = gpu_facts.detect()
pytestmark = pytest.mark.skipif(isinstance(WHY_NOT, str), reason=f"needs an NVIDIA GPU: {WHY_NOT}")


def runner_of(started: StartedEngine) -> ModelRunner:
    executor: Any = started.executor
    runner = executor.workers[0].runner
    assert isinstance(runner, ModelRunner)
    return runner


def start(drafter_folder: Path | None = None, **arguments: Any) -> StartedEngine:
    settings = {"device": "cuda", "max_num_seqs": 24, "gpu_memory_utilization": 0.2} | arguments
    config = EngineConfig.from_kwargs(**settings)
    folder = Path(quire.demo.path("target"))
    return start_engine(
        config,
        folder,
        is_server=False,
        progress=lambda phase, share, detail: None,
        drafter_folder=drafter_folder,
    )


@contextmanager
def no_synchronization() -> Iterator[None]:
    """torch raises where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}, {"async_scheduling": False}], ids=str)
def test_tokens_are_those_of_the_cpu(arguments: dict[str, Any]) -> None:
    """float32, so that both round alike: of the demo model's tokens no two are as close as float32 is exact."""
    torch.backends.cuda.matmul.allow_tf32 = False
    core = start(dtype="float32", **arguments).core
    assert run(core, prompts()) == run(build_core(Schedule(), "float32"), prompts())


@pytest.mark.parametrize("arguments", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 32}], ids=str)
def test_a_step_does_not_wait(arguments: dict[str, Any]) -> None:
    core = start(**arguments).core
    history = [Prompt(prompts()[0].token_ids, params) for params in HISTORY.values()]
    with no_synchronization():
        assert all(run(core, [*prompts(), *history]))


def test_graphs_give_what_launches_give() -> None:
    """The tokens, at each padded size. In float32: padding gives cuBLAS other rows, and it may round otherwise."""
    with_graphs, without = start(dtype="float32").core, start(dtype="float32", enforce_eager=True).core
    for num_rows in (1, 2, 3, 5, 9, 17, 24):
        batch = [
            Prompt(tuple(range(5 + row, 20 + row)), SamplingParams(temperature=0.0, max_tokens=9))
            for row in range(num_rows)
        ]
        assert run(with_graphs, batch, prefix=f"{num_rows} ") == run(without, batch, prefix=f"{num_rows} ")


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_deterministic_tokens_and_logprobs(quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, to a bit: alone, in a crowd of 300, in chunks, from the prefix cache, captured or launched."""
    monkeypatch.setattr(gpu, "_is_deterministic", False)  # restored afterwards: an engine only ever sets it
    wish = SamplingParams(temperature=0.0, logprobs=3, max_tokens=20)
    crowd = [
        Prompt(tuple(range(10 + i % 7, 40 + i)), SamplingParams(temperature=0.0, max_tokens=20)) for i in range(300)
    ]

    def outputs(core: EngineCore, prefix: str) -> list[object]:
        core.add(AddRequest(f"{prefix} wanted", list(prompts()[0].token_ids), wish, 20))
        return [
            (delta.token_ids, delta.logprobs)
            for _ in iter(core.has_work, False)
            for delta in core.step()
            if delta.request_id == f"{prefix} wanted"
        ]

    core = start(deterministic=True, quantization=quantization, max_num_seqs=256).core
    alone = outputs(core, "alone")
    assert outputs(core, "cached") == alone
    for index, prompt in enumerate(crowd):
        core.add(AddRequest(f"crowd {index}", list(prompt.token_ids), prompt.params, 20))
    assert outputs(core, "beside others") == alone
    for arguments in ({"max_num_batched_tokens": 24}, {"enforce_eager": True}):
        other = start(deterministic=True, quantization=quantization, max_num_seqs=24, **arguments).core
        assert outputs(other, "other") == alone


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 33, "block_size": 8},
        {"max_num_batched_tokens": 2048, "block_size": 32},
        {"async_scheduling": False, "max_num_batched_tokens": 40},
        {"enforce_eager": True},
        {"enable_prefix_caching": False},
        {"num_gpu_blocks_override": 16, "max_model_len": 256},
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", False), ("bfloat16", True)])
def test_sameness(dtype: str, deterministic: bool, schedule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix of tests/engine/test_sameness.py: alone, in a crowd, in chunks, in blocks of other sizes, from the
    prefix cache, preempted before some steps and by lack of blocks. Without the mode in float32, which rounds too
    little to change a token of this model; with it in bfloat16."""
    monkeypatch.setattr(gpu, "_is_deterministic", False)  # restored afterwards: an engine only ever sets it
    torch.backends.cuda.matmul.allow_tf32 = False
    single = start(dtype=dtype, deterministic=deterministic).core
    alone = [run(single, [prompt], prefix=f"alone {index} ")[0] for index, prompt in enumerate(prompts())]
    core = start(dtype=dtype, deterministic=deterministic, **schedule).core
    for round_ in ("first", "again"):
        assert run(core, prompts(), prefix=round_) == alone
    for at_step in (0, 1, 4, 9):

        def preempt(core: EngineCore, step: int, at_step: int = at_step) -> None:
            while step == at_step and core.scheduler.num_running:
                core.scheduler.preempt_last()

        assert run(core, prompts(), before_step=preempt, prefix=f"preempted before {at_step} ") == alone


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_drafts_change_no_token(method: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 with --deterministic: a verifying step has the bits of single steps."""
    monkeypatch.setattr(gpu, "_is_deterministic", False)  # restored afterwards: an engine only ever sets it
    given: dict[str, Any] = {"dtype": "bfloat16", "deterministic": True, "async_scheduling": depth == 2}
    expected = run(start(**given).core, prompts())
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    folder = None
    if method == "ngram":
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        folder = Path(quire.demo.path("draft" if method == "draft_model" else method))
        speculation["model"] = str(folder)
    core, num_drafts, num_held = start(folder, speculative_config=speculation, **given).core, 0, 0

    def count(core: EngineCore, step: int) -> None:
        nonlocal num_drafts, num_held
        if core.last_record is not None:
            num_drafts += core.last_record.num_draft_tokens
            num_held += core.last_record.num_accepted_tokens

    assert run(core, prompts(), before_step=count) == expected
    assert 0 < num_held < num_drafts


@pytest.mark.skipif(flashinfer_version() is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("rows", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (6, 0.0), (0, 5.0)])
@pytest.mark.parametrize("num_q_heads", [2, 8])
def test_flashinfer_equals_the_reference(
    num_q_heads: int, window: int, soft_cap: float, rows: list[tuple[int, int]]
) -> None:
    """The real counterpart of the fake in tests/attention: FlashInfer itself with tables, windows, caps and scales."""
    spec = AttentionSpec(num_q_heads, 2, 64, 0.11, window, soft_cap, torch.float16)
    batch, _, _, q_THE = make_batch(spec, BLOCK_SIZE, rows)
    want_THE = ReferenceAttention(spec).forward(q_THE, batch.caches[0], batch)
    cache = LayerCache(*(tensor.nan_to_num().cuda() for tensor in batch.caches[0].tensors()))
    backend = FlashInferAttention(spec)
    backend.prepare(host_step(batch, rows), cache)
    q_THE = q_THE.cuda()
    actual_THE = backend.forward(q_THE, cache, batch)
    torch.testing.assert_close(actual_THE.cpu(), want_THE, atol=4e-3, rtol=4e-3)


@pytest.mark.skipif(flashinfer_version() is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (6, 0.0), (0, 5.0)])
@pytest.mark.parametrize("num_q_heads", [2, 8])
def test_flashinfer_s_captured_decodes_follow_plans(num_q_heads: int, window: int, soft_cap: float) -> None:
    """With its kernels for CUDA cores and for tensor cores: a replay computes the step that was planned last."""
    spec = AttentionSpec(num_q_heads, 2, 64, 0.11, window, soft_cap, torch.float16)
    accelerator = Cuda()
    pool = accelerator.graph_pool()
    assert_replays_follow_plans(spec, accelerator.device, lambda run: accelerator.capture(run, pool), 4e-3)


@pytest.mark.skipif(flashinfer_version() is None, reason="FlashInfer is not installed")
def test_flashinfer_serves_with_captured_decodes() -> None:
    """A whole run, prompts in chunks beside decodes. Rounding may change a token, and with it all that follow."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 32}
    own = run(start(**settings).core, prompts())
    started = start(**settings, attention_backend="FLASHINFER")
    runner = runner_of(started)
    assert runner.forward_pass.captured is not None
    tokens = run(started.core, prompts())
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(own, tokens, strict=True)) >= len(own) - 1


def test_memory_is_what_was_planned() -> None:
    """Serving takes the planned memory, within 3 %, and stays within the share of the GPU."""
    accelerator = Cuda()
    accelerator.release()
    before, total = accelerator.memory()
    started = start(gpu_memory_utilization=0.3, max_num_seqs=256, max_num_batched_tokens=8192)
    batch = [Prompt(tuple(range(10, 40)), SamplingParams(temperature=0.9, seed=i, max_tokens=20)) for i in range(300)]
    run(started.core, batch)
    taken = before - accelerator.memory()[0]
    assert taken <= 0.3 * total + (1 << 30), "CUDA's own memory aside"
    facts = started.resolved.settings
    planned = sum(facts[name].value for name in ("weight_bytes", "work_bytes", "kv_cache_bytes"))
    assert abs(planned - taken) <= 0.03 * taken
    runner = runner_of(started)
    assert runner.forward_pass.captured is not None


def test_an_allocation_that_fails_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    started = start()
    runner = runner_of(started)
    compute_logits, calls = runner.model.compute_logits, []

    def fails_once(hidden_RD: torch.Tensor, adapter_slots_R: torch.Tensor | None) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 5:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return compute_logits(hidden_RD, adapter_slots_R)

    monkeypatch.setattr(runner.model, "compute_logits", fails_once)
    tokens = run(started.core, prompts(), failing=f"r{len(prompts()) - 1}")
    assert all(tokens[:-1])
