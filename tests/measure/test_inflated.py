"""Inflated models give the tokens of the small ones, in every format, and the copy-edit model copies in its order."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import quire.demo
from benchmarks.inflated import (
    NUM_SPECIAL_TOKENS,
    Shape,
    copy_edit,
    edited_text,
    first_layers,
    inflate,
    inflate_head,
    token_order,
    with_mtp,
)
from quire import LLM, SamplingParams
from quire.demo.data import render
from quire.model_config import load_model_config
from tests.examples import IS_FULL
from tests.loading import load_model
from tests.models.paged_run import greedy

SHAPE = Shape(hidden=1024, num_layers=7, intermediate=1024, num_kv_heads=3)
DRAFT_SHAPE = Shape(hidden=512, num_layers=3, intermediate=512, num_kv_heads=2)
QUESTIONS = ("What does os.path.join do?", "Tell me a story about Berlin")


@pytest.fixture(scope="module")
def inflated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inflated")
    inflate(quire.demo.path("target"), folder / "target", SHAPE)
    inflate(quire.demo.path("draft"), folder / "draft", DRAFT_SHAPE)
    return {name: folder / name for name in ("target", "draft")}


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_tokens_of_the_small_model(name: str, quantization: str | None, inflated: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_file(str(inflated[name] / "tokenizer.json"))
    small_folder = quire.demo.path("target" if name == "target" else "draft")
    configs = [load_model_config(folder) for folder in (small_folder, inflated[name])]
    models = [load_model(config, torch.bfloat16, quantization=quantization) for config in configs]
    assert models[1].weight_bytes() > 2 * models[0].weight_bytes()
    # A format changes no question's way through the model, so one of them shows it.
    for question in QUESTIONS if IS_FULL or quantization is None else QUESTIONS[:1]:
        prompt = tokenizer.encode(render([("user", question)]) + "<|im_start|>assistant\n").ids
        small, large = (greedy(model, torch.bfloat16, prompt, 40) for model in models)
        assert large == small


def test_a_layer_for_multi_token_prediction_changes_no_token(tmp_path: Path) -> None:
    """The model becomes a MiMo, and the layer drafts for it."""
    with_mtp(quire.demo.path("target"), tmp_path / "mimo")
    params, answers = SamplingParams(temperature=0.0, max_tokens=12), list[list[int]]()
    for model, drafts in ((quire.demo.path("target"), None), (tmp_path / "mimo", {"method": "mtp", "adaptive": False})):
        engine = LLM(str(model), dtype="bfloat16", max_model_len=256, speculative_config=drafts)
        (found,) = engine.generate([QUESTIONS[0]], params, use_tqdm=False)
        answers.append(list(found.outputs[0].token_ids))
    assert answers[0] == answers[1]


def test_the_drafts_of_the_small_head(inflated: dict[str, Path], tmp_path: Path) -> None:
    """As many of them hold, and the head is larger."""
    inflate_head(quire.demo.path("eagle3"), tmp_path / "head", Shape(1024, 1, 1024, 3))
    found = []
    for target, head in (
        (quire.demo.path("target"), quire.demo.path("eagle3")),
        (inflated["target"], tmp_path / "head"),
    ):
        drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2, "adaptive": False}
        llm = LLM(
            str(target),
            speculative_config=drafting,
            per_request_spec_decode_metrics="detailed",
            kv_cache_memory_bytes="32M",
            num_threads=1,
        )
        (answer,) = llm.chat([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(temperature=0, max_tokens=40))
        metrics = answer.outputs[0].spec_decode_metrics
        assert metrics is not None
        found.append((answer.outputs[0].token_ids, metrics.to_dict()))
    assert found[0] == found[1]
    assert found[0][1]["num_accepted_draft_tokens"] > 10
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (quire.demo.path("eagle3"), tmp_path / "head")]
    assert sizes[1] > 16 * sizes[0]


def test_shapes_that_are_refused(tmp_path: Path) -> None:
    for shape in (Shape(512, 7, 1024, 3), Shape(1024, 5, 1024, 3), Shape(1024, 7, 1024, 1)):
        with pytest.raises(ValueError, match="cannot be brought to"):
            inflate(quire.demo.path("target"), tmp_path / "m", shape)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_copy_edit_model(quantization: str | None, tmp_path: Path) -> None:
    copy_edit(tmp_path / "m", Shape(256, 2, 256, 2), quire.demo.path("target"))
    config = load_model_config(tmp_path / "m")
    model = load_model(config, torch.bfloat16, quantization=quantization)
    make_text = partial(edited_text, config.vocab_size, draw=random.Random(1))
    prompt, text = make_text(60, 0.1)
    assert len(prompt) == 61
    assert 0 < sum(a != b for a, b in zip(prompt, text, strict=False)) < 15
    assert greedy(model, torch.bfloat16, prompt, 60) == text
    order = token_order(config.vocab_size)
    assert sorted(order) == list(range(NUM_SPECIAL_TOKENS, config.vocab_size))


def test_first_layers(tmp_path: Path) -> None:
    first_layers(quire.demo.path("target"), tmp_path / "m", 2)
    model = load_model(load_model_config(tmp_path / "m"), torch.bfloat16)
    assert model.config.num_layers == 2
    assert len(greedy(model, torch.bfloat16, [5, 6, 7], 5)) == 5
