"""Several chats in one body: each gets the same choices as alone."""

from __future__ import annotations

import pytest

from quire.messages import AddRequest
from tests.server.serving import MODEL, TOKENIZER, RunningServer
from tests.server.test_errors import error_of

PATH = "/v1/chat/completions/batch"
CHATS = [[{"role": "user", "content": text}] for text in ("One", "Two and more", "Three")]


def test_the_choices_are_those_of_the_chats(echo: RunningServer) -> None:
    fields = {"max_tokens": 8, "n": 2, "logprobs": True, "ignore_eos": True}
    alone = [echo.chat(messages=messages, **fields).json() for messages in CHATS]
    answer = echo.http.post(PATH, json={"messages": CHATS, **fields}).json()
    expected = [choice for one in alone for choice in one["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [{**choice, "index": 0} for choice in answer["choices"]] == [{**choice, "index": 0} for choice in expected]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)


def test_metrics_are_those_of_all(echo: RunningServer) -> None:
    answer = echo.http.post(PATH, json={"messages": CHATS, "max_tokens": 3, "return_metrics": True}).json()
    assert answer["metrics"].keys() == echo.chat(max_tokens=3, return_metrics=True).json()["metrics"].keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": CHATS[0]}, "messages[0]"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(echo: RunningServer, fields, param) -> None:
    assert error_of(echo.http.post(PATH, json={"messages": CHATS, **fields}), 400)["param"] == param


def test_a_refused_chat_leaves_nothing_running(echo: RunningServer) -> None:
    chats = [*CHATS, [{"role": "user", "content": "word " * 4000}]]
    assert error_of(echo.http.post(PATH, json={"messages": chats}), 400)["code"] == "context_length_exceeded"
    echo.wait_for_idle()


def test_an_unknown_model(echo: RunningServer) -> None:
    error_of(echo.http.post(PATH, json={"messages": CHATS, "model": "gpt"}), 404)


def test_each_prompt_decides_on_its_own_grammar_and_budget() -> None:
    """One chat's template has opened the thinking, one has closed it, and one has done neither."""
    template = "{{ messages[0].content }}"
    settings = {"reasoning_parser": "qwen3", "chat_template": template}
    chats = [[{"role": "user", "content": text}] for text in ("a<think>\n", "b<think></think>", "c")]
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 4}
    with RunningServer(answer=TOKENIZER.encode("{}", add_special_tokens=False), **settings) as server:
        alone = []
        for messages in chats:
            assert server.chat(messages=messages, **fields).status_code == 200
            alone.append(server.last_request().sampling_params.grammar)
        assert len(set(alone)) == 3, "the thinking is before it, behind it, or allowed"
        before = len(server.client.sent)
        answer = server.http.post(PATH, json={"messages": chats, **fields})
        assert answer.status_code == 200, answer.text
        together = [message for message in server.client.sent[before:] if isinstance(message, AddRequest)]
        assert [message.sampling_params.grammar for message in together] == alone
