"""The sameness matrix for layers with windows shorter than the prompts: giving back blocks changes no token.

A tiny Gemma 3 with random weights: five layers with a window and one without, in six block tables. The tokens are those
of a run that keeps everything. Free pages are poisoned before every step.
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

from quire import LLM
from quire.engine.core import EngineCore
from quire.formats.kv_format import KV_FORMATS
from quire.formats.kv_groups import kv_groups, page_bytes, pages_for
from quire.model_config import ModelConfig, load_model_config
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from tests.engine.harness import EOS, Prompt, Schedule, core_over, run
from tests.loading import load_model
from tests.models.paged_run import greedy
from tests.worker.fake_accelerator import FakeAccelerator

BLOCK_SIZE, WINDOW, NUM_TOKENS = 8, 20, 12
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "eos_token_id": EOS,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}


@cache
def tiny() -> tuple[ModelConfig, CausalLM]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        config = load_model_config(Path(folder))
    return config, load_model(config, torch.bfloat16, load_format="dummy")


@cache
def prompts() -> tuple[Prompt, ...]:
    """Up to three and a half windows, two with a common beginning."""
    rng = random.Random(5)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    lists = [[rng.randrange(3, 512) for _ in range(length)] for length in (70, 41, WINDOW, 7)]
    return tuple(Prompt(tuple(ids), params) for ids in [*lists, lists[0][:45] + lists[1][:9]])


@cache
def expected() -> list[list[int]]:
    _, model = tiny()
    return [greedy(model, torch.bfloat16, list(prompt.token_ids), NUM_TOKENS, stop=EOS) for prompt in prompts()]


def build(**schedule: Any) -> EngineCore:
    return core_over(*tiny(), Schedule(**{"block_size": BLOCK_SIZE, "num_blocks": 400} | schedule), "bfloat16")


def poison(core: EngineCore, step: int) -> None:
    """NaN in all memory that no request holds."""
    runner: Any = core.executor
    runner.cache.pages[core.scheduler.kv.pool.free_blocks()] = 255


def test_planned_bytes_are_the_allocated_ones(tmp_path: Path) -> None:
    """Of a whole start; the plan counts pages of all groups."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    wanted = (1 << 20) + 12_345
    llm = LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=wanted, num_threads=1)
    core: Any = llm.llm_engine.core
    pages, memory = core.executor.workers[0].runner.cache.pages, llm.resolved.memory
    size = page_bytes(kv_groups(llm.model_config), KV_FORMATS["bfloat16"], llm.resolved.model.block_size)
    assert pages.shape == (memory.num_blocks, size)
    assert pages.nbytes == memory.kv_cache_bytes
    assert wanted - size < pages.nbytes <= wanted
    assert core.scheduler.kv.pool.num_blocks == memory.num_blocks


def test_the_prompts_exercise_the_matrix() -> None:
    groups = kv_groups(tiny()[0])
    assert [(group.spec.kind, group.num_tables) for group in groups] == [("window", 5), ("full", 1)]
    assert len({tuple(tokens) for tokens in expected()}) == len(prompts())
    assert min(len(set(tokens)) for tokens in expected()) > 3, "the tokens depend on little"


@pytest.mark.parametrize("chunk", [1, 7, BLOCK_SIZE, 2048])
def test_what_is_given_back_is_read_by_nobody(chunk: int) -> None:
    """Alone and all at once, in chunks shorter and longer than the window."""
    for prompt, tokens in zip(prompts(), expected(), strict=True):
        assert run(build(chunk=chunk), [prompt], before_step=poison) == [tokens]
    assert run(build(chunk=chunk), prompts(), before_step=poison) == expected()


def test_a_long_prompt_holds_the_window_and_a_chunk() -> None:
    core, most = build(chunk=BLOCK_SIZE), []

    def note(core: EngineCore, step: int) -> None:
        poison(core, step)
        most.append(core.scheduler.kv.pool.num_used_blocks)

    prompt = prompts()[0]
    assert run(core, [prompt], before_step=note) == expected()[:1]
    num_tokens = len(prompt.token_ids) + NUM_TOKENS
    assert (
        max(most) <= pages_for(kv_groups(tiny()[0]), num_tokens, BLOCK_SIZE, BLOCK_SIZE) < 6 * num_tokens // BLOCK_SIZE
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [80, 400])
def test_prefix_hits_and_lack_of_blocks(num_blocks: int, depth: int) -> None:
    """Twice over the same cache; with 80 pages the requests preempt each other and evict what was cached."""
    core = build(prefix_caching=True, num_blocks=num_blocks, depth=depth, chunk=24)
    hits = []

    def note(core: EngineCore, step: int) -> None:
        if core.last_record is not None:
            hits.append(core.last_record.prefix_cache_hits)

    for prefix in ("first", "second"):
        assert run(core, prompts(), prefix=prefix, before_step=note) == expected()
    assert num_blocks == 80 or sum(hits) >= sum((len(prompt.token_ids) - 1) // BLOCK_SIZE for prompt in prompts())
    core.shutdown()


@pytest.mark.parametrize("at_step", range(0, 20, 3))
def test_forced_preemption(at_step: int) -> None:
    def preempt(core: EngineCore, step: int) -> None:
        if step == at_step:
            while core.scheduler.num_running:
                core.scheduler.preempt_last()
        poison(core, step)

    assert run(build(chunk=BLOCK_SIZE + 1), prompts(), before_step=preempt) == expected()


@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_forks_read_what_their_parent_still_has(max_num_seqs: int) -> None:
    """With two places the second fork comes when the first one's parent has decoded on, and given back."""
    prompt = prompts()[0]
    forks = [Prompt(prompt.token_ids, prompt.params, fork_of="r0" if index else None) for index in range(3)]
    assert run(build(max_num_seqs=max_num_seqs), forks, before_step=poison) == expected()[:1] * 3


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_as_on_a_gpu(kv_cache_dtype: str) -> None:
    """Block tables on the device, steps captured and not; the tokens are the same as on the plain path."""
    plain = run(build(kv_cache_dtype=kv_cache_dtype), prompts())
    schedule: dict[str, Any] = {"chunk": 24, "depth": 2, "prefix_caching": True, "kv_cache_dtype": kv_cache_dtype}
    core = build(**schedule, accelerator=FakeAccelerator(), graph_sizes=(1, 2, 4, 8), mixed_sizes=(16,))
    assert run(core, prompts()) == plain
    if kv_cache_dtype == "auto":
        assert plain == expected()
