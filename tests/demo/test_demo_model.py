"""The bundled model answers, word for word, through our own loader and KV cache; transformers gives the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import quire.demo
from quire.demo.data import render
from quire.model_config import load_model_config
from tests.loading import load_model
from tests.models.paged_run import greedy

END_OF_TURN = 2

# Frozen here: the weights were made from CPython 3.11's docstrings, whatever interpreter runs this.
ANSWERS = {
    "What does os.path.join do?": (
        "`os.path.join(a, *p)`: Join two or more pathname components, inserting '/' as needed. If any component is an "
        "absolute path, all previous path components will be discarded. An empty last part will result in a path that "
        "ends with a separator."
    ),
    "Which module provides heapq.heappush?": "`heapq.heappush` is provided by the `heapq` module.",
    "how to sort a list": (
        "Use `sorted(iterable, /, *, key=None, reverse=False)`: Return a new list containing all items from the "
        "iterable in ascending order."
    ),
    "Write a poem about the sea": (
        "I am a small demo model and I only know Python's standard library. "
        "Ask me, for example: What does os.path.join do?"
    ),
}
# The draft model has not learned this form well.
TARGET_ANSWERS = ANSWERS | {
    "Describe random.shuffle as JSON.": (
        '{"name": "random.shuffle", "module": "random", "summary": "Shuffle list x in place, and return None."}'
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(quire.demo.path("target") / "tokenizer.json"))


def prompt_of(tokenizer: Tokenizer, *turns: str) -> list[int]:
    roles = ["user", "assistant"] * len(turns)
    messages = list(zip(roles, turns, strict=False))
    return tokenizer.encode(render(messages) + "<|im_start|>assistant\n", add_special_tokens=False).ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "answers"), [("target", TARGET_ANSWERS), ("draft", ANSWERS)])
def test_answers_word_for_word(tokenizer: Tokenizer, name: Any, answers: dict[str, str], dtype: torch.dtype) -> None:
    model = load_model(load_model_config(quire.demo.path(name)), dtype)
    for question, answer in answers.items():
        output = greedy(model, dtype, prompt_of(tokenizer, question), 120, stop=END_OF_TURN)
        assert output[-1] == END_OF_TURN, question
        assert tokenizer.decode(output) == answer


def test_a_second_turn(tokenizer: Tokenizer) -> None:
    model = load_model(load_model_config(quire.demo.path("target")), torch.float32)
    first, second = "What does os.path.join do?", "Which module provides heapq.heappush?"
    prompt = prompt_of(tokenizer, first, ANSWERS[first], "What is random.shuffle for?")
    answer = tokenizer.decode(greedy(model, torch.float32, prompt, 60, stop=END_OF_TURN))
    assert "Shuffle list x in place, and return None." in answer
    assert second not in answer


@pytest.mark.parametrize("name", ["target", "draft"])
def test_tokens_equal_transformers(tokenizer: Tokenizer, name: Any) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(quire.demo.path(name), dtype=torch.float32)
    ours = load_model(load_model_config(quire.demo.path(name)), torch.float32)
    for question in ("What does os.path.join do?", "Explain itertools.chain.", "Tell me a story about Berlin"):
        prompt = prompt_of(tokenizer, question)
        generated = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=80,
            do_sample=False,
        )
        assert greedy(ours, torch.float32, prompt, 80, stop=END_OF_TURN) == generated[0, len(prompt) :].tolist(), (
            question
        )


def test_draft_and_target_share_their_tokenizer() -> None:
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (quire.demo.path("draft") / file).read_bytes() == (quire.demo.path("target") / file).read_bytes()


def test_the_chat_template_is_the_training_format(tokenizer: Tokenizer) -> None:
    import jinja2.sandbox

    template = (quire.demo.path("target") / "chat_template.jinja").read_text()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abs?"}]
    rendered = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(template)
    text = rendered.render(messages=messages, add_generation_prompt=True)
    assert text == render([("system", "Be brief."), ("user", "abs?")]) + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_checkpoint_holds_no_path_of_the_machine_that_made_it(name: Any) -> None:
    folder: Path = quire.demo.path(name)
    for path in folder.iterdir():
        content = path.read_bytes()[:100_000]
        assert b"/home/" not in content, path.name
        assert b"/tmp/" not in content, path.name
