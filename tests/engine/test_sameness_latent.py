"""The sameness matrix for latent attention: no schedule may change a token of a tiny DeepSeek model.

The model has random weights. Free pages are poisoned before every step.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from quire.engine.core import EngineCore
from quire.kernels import cpu, recording
from quire.model_config import ModelConfig, load_model_config
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from quire.worker import recorded_steps
from tests.covering import covering
from tests.engine.harness import EOS, Prompt, Schedule, core_over, run
from tests.loading import load_model
from tests.worker.fake_accelerator import FakeAccelerator

BLOCK_SIZE, NUM_TOKENS = 8, 10
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "eos_token_id": EOS,
    "first_k_dense_replace": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "max_position_embeddings": 512,
    "model_type": "deepseek_v3",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "torch_dtype": "bfloat16",
    "v_head_dim": 16,
    "vocab_size": 512,
}
PRECISIONS = ("bfloat16", "float32", "int4")


@cache
def tiny(precision: str) -> tuple[ModelConfig, CausalLM]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = load_model_config(Path(folder))
    quantization = "int4" if precision == "int4" else None
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return config, load_model(config, dtype, load_format="dummy", quantization=quantization)


@cache
def prompts() -> tuple[Prompt, ...]:
    """Longer than a range of attention's sums, two with a common beginning."""
    rng = random.Random(5)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    lists = [[rng.randrange(3, 512) for _ in range(length)] for length in (270, 41, 7)]
    return tuple(Prompt(tuple(ids), params) for ids in [*lists, lists[0][:45] + lists[1][:9]])


@cache
def expected(precision: str, isa: str, kv_cache_dtype: str = "auto") -> list[list[int]]:
    """Each request alone, its prompt in one step."""
    return [run(build(precision, kv_cache_dtype=kv_cache_dtype), [prompt])[0] for prompt in prompts()]


def build(precision: str, **schedule: Any) -> EngineCore:
    return core_over(*tiny(precision), Schedule(**{"block_size": BLOCK_SIZE, "num_blocks": 200} | schedule), precision)


def poison(core: EngineCore, step: int) -> None:
    """NaN in all memory that no request holds."""
    runner: Any = core.executor
    if hasattr(runner, "cache"):
        runner.cache.pages[core.scheduler.kv.pool.free_blocks()] = 255


def test_the_prompts_exercise_the_matrix() -> None:
    tokens = expected("bfloat16", cpu.isa())
    assert len({tuple(each) for each in tokens}) == len(prompts())
    assert min(len(set(each)) for each in tokens) > 3, "the tokens depend on little"


@pytest.mark.parametrize(
    ("isa", "precision", "chunk", "depth"),
    covering(cpu.isas(), PRECISIONS, [1, 7, 256], [1, 2], apart=[(0, 1), (0, 2)]),
)
def test_chunks_and_batch_mates(isa: str, precision: str, chunk: int, depth: int) -> None:
    best = cpu.isa()
    cpu.set_isa(isa)
    try:
        core = build(precision, chunk=chunk, depth=depth)
        assert run(core, prompts(), before_step=poison) == expected(precision, isa)
        core.shutdown()
    finally:
        cpu.set_isa(best)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_caches_of_codes(kv_cache_dtype: str) -> None:
    core = build("bfloat16", chunk=7, kv_cache_dtype=kv_cache_dtype)
    assert run(core, prompts()) == expected("bfloat16", cpu.isa(), kv_cache_dtype)


@pytest.mark.parametrize("num_blocks", [60, 200])
def test_prefix_hits_and_lack_of_blocks(num_blocks: int) -> None:
    """Twice over the same cache; with few pages the requests preempt each other."""
    core = build("bfloat16", prefix_caching=True, num_blocks=num_blocks, chunk=24)
    for prefix in ("first", "second"):
        assert run(core, prompts(), prefix=prefix) == expected("bfloat16", cpu.isa())


@pytest.mark.parametrize("at_step", [1, 12, 15])
def test_forced_preemption(at_step: int) -> None:
    def preempt(core: EngineCore, step: int) -> None:
        if step == at_step:
            while core.scheduler.num_running:
                core.scheduler.preempt_last()
        poison(core, step)

    assert run(build("bfloat16", chunk=31), prompts(), before_step=preempt) == expected("bfloat16", cpu.isa())


def test_as_on_a_gpu() -> None:
    """Steps captured and not; the tokens are the same as on the plain path."""
    core = build("bfloat16", chunk=24, depth=2, accelerator=FakeAccelerator(), graph_sizes=(1, 2, 4), mixed_sizes=(16,))
    assert run(core, prompts()) == expected("bfloat16", cpu.isa())


def test_a_decode_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a layer but kernels."""
    if not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    seen = []

    def watched(*arguments: Any) -> Any:
        result, calls = recording.record(*arguments)
        seen.append(calls is not None)
        return result, calls

    monkeypatch.setattr(recorded_steps, "record", watched)
    run(build("bfloat16"), prompts()[2:3])
    assert seen, "no step was recorded"
    assert all(seen)
