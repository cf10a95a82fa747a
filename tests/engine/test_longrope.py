"""Longrope: each sequence takes the factors of its own length, as in transformers without a cache, in any schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers

from quire.model_config import ModelConfig, load_model_config
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from tests.engine.harness import EOS, Prompt, Schedule, core_over, run
from tests.loading import load_model
from tests.models.tiny_models import SIZES, hf_logits
from tests.worker.fake_accelerator import FakeAccelerator

BORDER, NUM_TOKENS = 32, 12
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
    "partial_rotary_factor": 0.75,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
# Under the border from beginning to end, across it (a prompt that ends at it too), beyond it.
PROMPT_LENS = (11, 19, 20, 25, BORDER, 33, 50)


@cache
def models() -> tuple[Any, ModelConfig, CausalLM]:
    """Of transformers and ours. Random weights wide enough that the factors change the tokens."""
    torch.manual_seed(3)
    settings = {**SIZES, "hidden_size": 96, "rope_parameters": ROPE, "original_max_position_embeddings": BORDER}
    config = transformers.Phi3Config(**settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in theirs.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_model_config(Path(folder))
        return theirs, ours, load_model(ours, torch.float32)


@cache
def prompts() -> list[Prompt]:
    """They begin alike, so that each could take over the cache of another of its kind, and of the wrong kind."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, SIZES["vocab_size"], (max(PROMPT_LENS),), generator=generator).tolist()
    return [Prompt(tuple(tokens[:length]), GREEDY) for length in PROMPT_LENS]


@cache
def expected() -> list[list[int]]:
    """The whole sequence is computed anew for every token."""
    theirs, _, _ = models()
    result = []
    for prompt in prompts():
        tokens = list(prompt.token_ids)
        while len(tokens) < len(prompt.token_ids) + NUM_TOKENS and tokens[-1] != EOS:
            tokens.append(int(hf_logits(theirs, tokens)[-1].argmax()))
        result.append(tokens[len(prompt.token_ids) :])
    return result


SCHEDULES = {
    "together": Schedule(),
    "one by one": Schedule(max_num_seqs=1),
    "chunks": Schedule(chunk=8),
    "prefix cache": Schedule(prefix_caching=True, block_size=8, max_num_seqs=2),
    "short of blocks": Schedule(num_blocks=16, block_size=8, chunk=16, prefix_caching=True),
    "two in flight": Schedule(depth=2, prefix_caching=True, block_size=8),
    "on a GPU": Schedule(
        depth=2, accelerator=FakeAccelerator(is_late=True), graph_sizes=(8, 4, 2, 1), prefix_caching=True
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_are_those_of_transformers(name: str) -> None:
    _, config, model = models()
    core = core_over(config, model, SCHEDULES[name], "float32")
    assert run(core, prompts()) == expected()
    assert run(core, reversed(prompts()), prefix="again") == expected()[::-1], "after others have left their cache"


def test_the_factors_decide_the_tokens() -> None:
    """Else the tests above show nothing: with the short or long factors for all, tokens differ."""
    theirs, config, _ = models()
    for change in ({"short_factor": config.rope.long_factor}, {"long_factor": config.rope.short_factor}):
        other = replace(config, rope=replace(config.rope, **change))
        with TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            model = load_model(replace(other, model=folder), torch.float32)
        tokens = run(core_over(other, model, Schedule(), "float32"), prompts())
        assert tokens != expected()


def test_continuations_that_share_a_prompt_cross_the_border_on_their_own() -> None:
    _, config, model = models()
    index = PROMPT_LENS.index(25)
    prompt = prompts()[index]
    forks = [prompt, replace(prompt, fork_of="r0"), replace(prompt, fork_of="r0")]
    for schedule in (SCHEDULES["together"], Schedule(block_size=8, max_num_seqs=2)):
        assert run(core_over(config, model, schedule, "float32"), forks) == [expected()[index]] * 3
