"""A GGUF file under the sameness matrix's schedules: a mixture of types, no schedule may change a token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import quire.demo
from quire.model_config import ModelConfig, load_model_config
from quire.models.registry import CausalLM
from tests.engine import harness
from tests.engine.harness import Schedule, build_core, run
from tests.engine.test_sameness import BLOCK_SIZE, prompts
from tests.gguf.writing import write_gguf
from tests.loading import load_model

# Every form of the kernels: 2 to 6 and 8 bits, groups of 16 and 32, minima, factors, and a layer of parts.
MIXTURE = {
    "token_embd": "Q6_K",
    "blk.0.attn_v": "Q6_K",
    "blk.1.ffn_down": "Q3_K",
    "blk.2.": "Q4_0",
    "blk.3.": "Q5_1",
    "blk.4.": "Q2_K",
    "blk.5.": "Q8_0",
}


@pytest.fixture(scope="module", autouse=True)
def mixture(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The harness' model, in bfloat16, is the mixture here."""
    path: Path = tmp_path_factory.mktemp("gguf") / "mixture.gguf"
    write_gguf(path, quire.demo.path("target"), "Q4_K", overrides=MIXTURE)
    config = load_model_config(path)
    model = load_model(config, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:

        def demo_model(precision: str, max_model_len: int | None, is_whole: bool) -> tuple[ModelConfig, CausalLM]:
            return config, model

        patch.setattr(harness, "demo_model", demo_model)
        expected.cache_clear()
        yield


@cache
def expected() -> list[list[int]]:
    """Each request alone, its prompt in one step."""
    return [run(build_core(Schedule(), "bfloat16"), [prompt])[0] for prompt in prompts()]


def test_the_requests_differ() -> None:
    assert len({tuple(tokens) for tokens in expected()}) == len(prompts())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, BLOCK_SIZE + 1, 2048])
def test_batch_mates_and_chunks(chunk: int, depth: int) -> None:
    core = build_core(Schedule(chunk=chunk, depth=depth), "bfloat16")
    assert run(core, prompts()) == expected()
    core.shutdown()


def test_prefix_hits() -> None:
    core = build_core(Schedule(prefix_caching=True), "bfloat16")
    assert run(core, prompts(), prefix="first") == expected()
    assert run(core, prompts(), prefix="second") == expected()
