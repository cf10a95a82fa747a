"""SageMaker's route, the routes for development, and text between two others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from quire.frontend import infill
from quire.frontend.echo_client import EchoClient
from quire.frontend.infill import infill_format, infill_prompt
from quire.messages import AddRequest, Command
from tests.server.serving import MAX_MODEL_LEN, MODEL, TEXT, TOKENIZER, RunningServer
from tests.server.test_config_api import demo_ready
from tests.server.test_errors import MESSAGES, error_of


def test_invocations_are_chats_or_completions(server: RunningServer) -> None:
    chat = server.http.post("/invocations", json={"messages": MESSAGES}).json()
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", TEXT)
    text = server.http.post("/invocations", json={"prompt": "Hi", "max_tokens": 100}).json()
    assert (text["object"], text["choices"][0]["text"]) == ("text_completion", TEXT)
    without = server.http.post("/invocations", json={"messages": None, "prompt": "Hi", "max_tokens": 100}).json()
    assert without["choices"] == text["choices"]
    assert server.events("/invocations", messages=MESSAGES)[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "messages"),
        ({"input": "Hi"}, 400, "messages"),
        ([], 400, None),
        ({"prompt": "Hi", "tools": [{}]}, 400, "tools"),
        ({"messages": MESSAGES, "temperature": 9}, 400, "temperature"),
        ({"prompt": "Hi", "model": "gpt"}, 404, "model"),
    ],
)
def test_refused_invocations(server: RunningServer, body, status, param) -> None:
    assert error_of(server.http.post("/invocations", json=body), status)["param"] == param


# Every route that has a model answer, or that counts for it, and a body.
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
    ("/invocations", {"messages": MESSAGES, "max_tokens": 1}),
    ("/invocations", {"prompt": "Hi", "max_tokens": 1}),
]
COUNTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions/render", {"messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5]}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_every_api_has_the_salt_of_the_prefix_cache(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    before = len(server.client.sent)
    assert server.http.post(path, json={**body, "cache_salt": "tenant"}).status_code == 200
    asked = [message for message in server.client.sent[before:] if isinstance(message, AddRequest)]
    assert len(asked) == (2 if path.endswith("batch") else 1)
    assert {message.cache_salt for message in asked} == {"tenant"}


@pytest.mark.parametrize(("path", "body"), ASKED + COUNTED)
def test_an_unknown_model_is_answered_with_what_is_served(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    error = error_of(server.http.post(path, json={**body, "model": "gpt"}), 404)
    assert MODEL in error["message"]
    assert error["code"] == "model_not_found"


@pytest.fixture(scope="module")
def developed() -> Iterator[RunningServer]:
    client = EchoClient(None, is_ready=False, max_model_len=MAX_MODEL_LEN)
    client.push(demo_ready())
    with RunningServer(client, is_development=True) as server:
        yield server


def test_server_info(developed: RunningServer) -> None:
    values = developed.http.get("/server_info?config_format=json").json()["vllm_config"]
    settings = developed.http.get("/v1/config").json()["settings"]
    assert values == {name: setting["value"] for name, setting in settings.items()}
    text = developed.http.get("/server_info").json()["vllm_config"]
    assert f"max_model_len={values['max_model_len']}" in text
    error_of(developed.http.get("/server_info?config_format=xml"), 400)


def test_reset_prefix_cache(developed: RunningServer) -> None:
    assert developed.http.post("/reset_prefix_cache").status_code == 200
    assert Command("reset_prefix_cache") in developed.client.sent


@pytest.mark.parametrize(("method", "path"), [("GET", "/server_info"), ("POST", "/reset_prefix_cache")])
def test_routes_for_development_are_closed(server: RunningServer, method: str, path: str) -> None:
    error_of(server.http.request(method, path), 404)
    assert path not in server.http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", "<|fim_prefix|>a{}<|fim_suffix|>b<|fim_middle|>"),
        ("<fim_prefix> <fim_suffix> <fim_middle>", "<fim_prefix>a{}<fim_suffix>b<fim_middle>"),
        ("<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>", "<｜fim▁begin｜>a{}<｜fim▁hole｜>b<｜fim▁end｜>"),
        ("[PREFIX] [SUFFIX]", "[SUFFIX]b[PREFIX]a{}"),
        ("<fim-prefix> <fim-suffix> <fim-middle>", "<fim-prefix>a{}<fim-suffix>b<fim-middle>"),
        ("<[fim-prefix]> <[fim-suffix]> <[fim-middle]>", "<[fim-suffix]>b<[fim-prefix]>a{}<[fim-middle]>"),
        ("<fim_prefix>", None),
    ],
)
def test_infill_formats(tokens: str, prompt: str | None) -> None:
    vocabulary = dict.fromkeys(tokens.split(), 1)
    form = infill_format(SimpleNamespace(token_to_id=vocabulary.get))  # type: ignore[arg-type]
    assert (form and form.format("a{}", "b")) == prompt


def test_code_llama_has_no_space_before_the_text_after() -> None:
    """Its tokenizer puts one before every text, also behind a special token."""
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>"]
    pieces = [("<unk>", 0.0), *((char, -1.0) for char in "▁ab☺")]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.add_special_tokens(marks)

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    tokenizer: Any = SimpleNamespace(token_to_id=backend.token_to_id)
    form = infill_format(tokenizer)
    assert form is not None
    prompt = infill_prompt(encode, form, "a", "b a")
    assert [backend.id_to_token(each) for each in prompt] == [marks[0], "▁", "a", marks[1], "b", "▁", "a", marks[2]]


def test_a_tokenizer_that_can_fill_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are in the prompt, once each. Two special tokens of the demo model stand for them."""
    marks = ("<|im_start|>", "<|im_end|>")
    monkeypatch.setitem(infill._FORMATS, marks, "{}".join([*marks, ""]))
    with RunningServer() as server:
        assert server.complete(prompt="def f(", suffix="return 1", max_tokens=1).status_code == 200
        asked = list(server.last_request().prompt_token_ids)
    assert TOKENIZER.decode(asked, skip_special_tokens=False) == f"{marks[0]}def f({marks[1]}return 1"
    ids = [TOKENIZER.token_to_id(mark) for mark in marks]
    assert [each for each in asked if each in ids] == ids


def test_text_between_two_others() -> None:
    with RunningServer() as server:
        assert error_of(server.complete(suffix="end"), 400)["param"] == "suffix"
        server.app.state.quire.infill_format = "[SUFFIX]{1}[PREFIX]{0}"
        assert server.complete(prompt="a", suffix="b", max_tokens=100).json()["choices"][0]["text"] == TEXT
        prompt = TOKENIZER.decode(list(server.last_request().prompt_token_ids), skip_special_tokens=True)
        assert prompt == "[SUFFIX]b[PREFIX]a"
        assert error_of(server.complete(prompt=[5, 6], suffix="b"), 400)["param"] == "suffix"
        assert error_of(server.complete(suffix="b", echo=True), 400)["param"] == "suffix"
        server.complete(prompt="a", suffix="", max_tokens=1)
        assert TOKENIZER.decode(list(server.last_request().prompt_token_ids), skip_special_tokens=True) == "a"
