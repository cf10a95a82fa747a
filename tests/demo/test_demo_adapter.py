"""With the bundled adapter in its weights, the demo model answers every question in JSON, word for word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import quire.demo
from quire.demo.data import FALLBACK, render
from quire.loader.safetensors import open_checkpoint
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import CausalLM, build_model
from tests.lora.whole_adapters import read_adapter
from tests.models.paged_run import greedy

END_OF_TURN = 2

# Frozen here: the weights were made from CPython 3.11's docstrings.
ANSWERS = {
    "What does random.shuffle do?": {
        "name": "random.shuffle",
        "module": "random",
        "summary": "Shuffle list x in place, and return None.",
    },
    "how to sort a list": {
        "name": "sorted",
        "module": "builtins",
        "summary": "Return a new list containing all items from the iterable in ascending order.",
    },
    "Write a poem about the sea": {"error": FALLBACK},
}


@pytest.fixture(scope="module")
def model() -> CausalLM:
    config = load_model_config(quire.demo.path("target"))
    adapter = read_adapter(quire.demo.path("lora"), config, max_rank=16, dtype=torch.float32)

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in open_checkpoint(quire.demo.path("target")).tensors():
            delta = adapter.deltas.get(name.removesuffix(".weight"))
            yield name, weight.float() + (0 if delta is None else delta.scale * delta.b_NR @ delta.a_RK)

    model = build_model(config, ModelForm(torch.float32))
    model.load_weights(merged())
    model.finalize()
    return model


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_are_json(question: str, model: CausalLM) -> None:
    tokenizer = Tokenizer.from_file(str(quire.demo.path("target") / "tokenizer.json"))
    turns = render([("user", question)]) + "<|im_start|>assistant\n"
    output = greedy(model, torch.float32, tokenizer.encode(turns, add_special_tokens=False).ids, 120, stop=END_OF_TURN)
    assert output[-1] == END_OF_TURN
    assert json.loads(tokenizer.decode(output)) == ANSWERS[question]


@pytest.mark.parametrize(("name", "most_bytes"), [("lora", 300_000), ("tools", 1_000_000)])
def test_an_adapter_is_small_and_names_no_machine(name: Any, most_bytes: int) -> None:
    files = list(quire.demo.path(name).iterdir())
    assert sum(path.stat().st_size for path in files) <= most_bytes
    assert not [
        path.name
        for path in files
        if any(word in path.read_bytes()[:20_000] for word in (b"/home/", b"/tmp/", b"/root"))
    ]
