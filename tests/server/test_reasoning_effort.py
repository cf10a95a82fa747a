"""What `reasoning_effort` changes, in a chat and in Responses, for each format of reasoning: the variables of the chat
template, and by them how the prompt ends and where the answer's reasoning ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from quire.formats.answer_formats import REASONING_PARSERS
from tests.server.serving import TOKENIZER, RunningServer

QUESTION = "Will it rain?"
THINKS = "Hm.</think>Yes."


@dataclass(frozen=True)
class Case:
    """How templates of a format's models end a prompt, an answer, and what becomes of both.

    Args:
        by_effort: effort -> the end of the prompt, the reasoning and the content. None: the field is left out.
        has_effect: the template reads the effort.
    """

    template: str
    answer: str
    by_effort: dict[str | None, tuple[str, str | None, str]]
    has_effect: bool = True


NOT_THINKING = "{% if enable_thinking is defined and not enable_thinking %}"
OF_CHANNELS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
CASES = {
    # It opens its reasoning itself, unless the prompt has closed it.
    "qwen3": Case(
        NOT_THINKING + "<think>\n\n</think>\n\n{% endif %}",
        "<think>Hm.</think>Yes.",
        {
            None: ("", "Hm.", "Yes."),
            "high": ("", "Hm.", "Yes."),
            "none": ("<think>\n\n</think>\n\n", "Hm.", "Yes."),
        },
    ),
    # The prompt opens it, or opens and closes it.
    "glm45": Case(
        NOT_THINKING + "<think></think>{% else %}<think>{% endif %}",
        THINKS,
        {
            None: ("<think>", "Hm.", "Yes."),
            "minimal": ("<think>", "Hm.", "Yes."),
            "none": ("<think></think>", None, THINKS),
        },
    ),
    # The prompt says how much.
    "mistral": Case(
        "[MODEL_SETTINGS]{{ reasoning_effort | default('none') }}[/MODEL_SETTINGS]",
        "[THINK]Hm.[/THINK]Yes.",
        {
            None: ("[MODEL_SETTINGS]none[/MODEL_SETTINGS]", "Hm.", "Yes."),
            "high": ("[MODEL_SETTINGS]high[/MODEL_SETTINGS]", "Hm.", "Yes."),
        },
    ),
    "openai_gptoss": Case(
        "Reasoning: {{ reasoning_effort | default('medium') }}<|start|>assistant",
        OF_CHANNELS,
        {
            None: ("Reasoning: medium<|start|>assistant", "Hm.", "Yes."),
            "low": ("Reasoning: low<|start|>assistant", "Hm.", "Yes."),
            "xhigh": ("Reasoning: xhigh<|start|>assistant", "Hm.", "Yes."),
        },
    ),
    # Their templates read none of it: the first always thinks, the second has a variable of its own.
    "deepseek_r1": Case(
        "<think>",
        THINKS,
        {None: ("<think>", "Hm.", "Yes."), "none": ("<think>", "Hm.", "Yes.")},
        has_effect=False,
    ),
    "granite": Case(
        "{% if thinking %}Think.{% endif %}",
        "Here is my thought process:Hm.Here is my response:Yes.",
        {None: ("", "Hm.", "Yes."), "high": ("", "Hm.", "Yes.")},
        has_effect=False,
    ),
}


def test_every_format_has_a_case() -> None:
    assert {*CASES} == {*REASONING_PARSERS}


def chat(server: RunningServer, effort: str | None) -> tuple[Any, str | None, str]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
    answer = server.http.post(
        "/v1/chat/completions", json=body if effort is None else body | {"reasoning_effort": effort}
    )
    message = answer.json()["choices"][0]["message"]
    return answer, message["reasoning"], message["content"]


def respond(server: RunningServer, effort: str | None) -> tuple[Any, str | None, str]:
    body: dict[str, Any] = {"input": QUESTION}
    answer = server.http.post(
        "/v1/responses", json=body if effort is None else body | {"reasoning": {"effort": effort}}
    )
    texts = {item["type"]: item["content"][0]["text"] for item in answer.json()["output"]}
    assert answer.json()["reasoning"]["effort"] == effort
    return answer, texts.get("reasoning"), texts["message"]


@pytest.mark.parametrize("name", CASES)
def test_effort(name: str) -> None:
    case = CASES[name]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>" + case.template
    answer = TOKENIZER.encode(case.answer, add_special_tokens=False)
    with RunningServer(answer=answer, chat_template=template, reasoning_parser=name) as server:
        for effort, (end, reasoning, content) in case.by_effort.items():
            for ask in (chat, respond):
                response, *parts = ask(server, effort)
                prompt = TOKENIZER.decode(server.last_request().prompt_token_ids, skip_special_tokens=False)
                assert prompt == f"<user>{QUESTION}<assistant>{end}"
                assert parts == [reasoning, content], (effort, ask.__name__)
                ignored = None if effort is None or case.has_effect else "reasoning_effort"
                assert response.headers.get("x-quire-ignored-fields") == ignored
