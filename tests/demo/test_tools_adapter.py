"""With the bundled adapter `tools`, the demo model calls tools, answers from their results, and else in text."""

from __future__ import annotations

import sys
from typing import get_args

import pytest

import quire.demo
from quire import LLM, SamplingParams
from quire.demo.data import (
    FALLBACK,
    GET_WEATHER,
    LOOK_UP,
    Kind,
    Turn,
    clean_entries,
    hermes_call,
    questions,
    render,
    tool_questions,
    tools_turn,
)
from quire.lora.request import LoRARequest

ADAPTER = LoRARequest("tools", 1, str(quire.demo.path("tools")))
GREEDY = SamplingParams(temperature=0, max_tokens=150)
OTHERS = ["send_email(to, text)", "count_users()"]
SHUFFLE = ("user", "What does random.shuffle do?")
PARIS = [("user", "Is it raining in Paris?"), ("assistant", hermes_call("get_weather", {"city": "Paris"}))]
# Frozen here: the weights were made from CPython 3.11's docstrings, whatever interpreter runs this.
ANSWERS: list[tuple[list[str], list[Turn], str]] = [
    ([GET_WEATHER, *OTHERS, LOOK_UP], PARIS[:1], PARIS[1][1]),
    ([LOOK_UP, GET_WEATHER], [*PARIS, ("tool", "sunny, 20 degrees")], "It is sunny in Paris."),
    ([*OTHERS, LOOK_UP], PARIS[:1], FALLBACK),
    ([*OTHERS, LOOK_UP], [SHUFFLE], hermes_call("look_up", {"entry": "random.shuffle"})),
    ([GET_WEATHER], [SHUFFLE], "`random.shuffle(x)`: Shuffle list x in place, and return None."),
    ([], [SHUFFLE], "`random.shuffle(x)`: Shuffle list x in place, and return None."),
]
# Of 40 questions that no training had in a chat with tools, and that no choice was based on.
LEAST_EXACT: dict[Kind, int] = {"call": 38, "result": 36, "text": 36}
SEED = 2026
learned = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the demo model has learned Python 3.11's docs")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(enable_lora=True, max_model_len=512, kv_cache_memory_bytes=1 << 26, num_threads=1)


def answers(llm: LLM, prompts: list[list[Turn]], adapter: LoRARequest | None = ADAPTER) -> list[str]:
    texts = [f"{render(turns)}<|im_start|>assistant\n" for turns in prompts]
    outputs = llm.generate(texts, GREEDY, use_tqdm=False, lora_request=adapter)
    return [output.outputs[0].text.strip() for output in outputs]


def test_a_tool_that_fits_is_called(llm: LLM) -> None:
    prompts = [[*tools_turn(tools), *turns] for tools, turns, _ in ANSWERS]
    assert answers(llm, prompts) == [answer for _, _, answer in ANSWERS]


@pytest.mark.slow
@learned
@pytest.mark.parametrize("kind", get_args(Kind))
def test_questions_that_it_has_not_seen(llm: LLM, kind: Kind) -> None:
    asked = tool_questions(clean_entries(), kind, 40, SEED)
    found = answers(llm, [turns for turns, _ in asked])
    wrong = [(each, answer) for each, (_, answer) in zip(found, asked, strict=True) if each != answer]
    assert len(asked) - len(wrong) >= LEAST_EXACT[kind], wrong


@pytest.mark.slow
@learned
@pytest.mark.parametrize(
    ("tools", "adapter"),
    [([], ADAPTER), ([GET_WEATHER, LOOK_UP], None), (OTHERS, None)],
    ids=["without tools", "the base", "the base, other tools"],
)
def test_it_answers_as_before(llm: LLM, tools: list[str], adapter: LoRARequest | None) -> None:
    """With the adapter if there are no tools, and without it in every case."""
    asked = questions(clean_entries(), 100)
    found = answers(llm, [[*tools_turn(tools), ("user", question)] for question, _ in asked], adapter)
    wrong = [each for each, (_, entry) in zip(found, asked, strict=True) if each != entry.answer]
    assert len(wrong) <= 2, wrong
