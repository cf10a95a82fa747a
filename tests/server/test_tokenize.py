"""/tokenize and /detokenize give the engine's own token ids, and are as strict as the other routes."""

from __future__ import annotations

import pytest

from quire.frontend.tokenizer import Tokenizer
from tests.server.serving import MAX_MODEL_LEN, TEXT, TOKENIZER, RunningServer
from tests.server.test_errors import error_of

MESSAGES = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Wörld 😀"}]


def post(server: RunningServer, path: str, **fields):
    return server.http.post(path, json=fields)


def test_prompt(server):
    answer = post(server, "/tokenize", prompt=TEXT, model="alias").json()
    ids = TOKENIZER.encode(TEXT)
    assert answer == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
    plain = post(server, "/tokenize", prompt=TEXT, add_special_tokens=False, return_token_strs=True).json()
    assert plain["tokens"] == TOKENIZER.encode(TEXT, add_special_tokens=False)
    assert plain["token_strs"] == [TOKENIZER.id_to_token(token_id) for token_id in plain["tokens"]]


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"tools": []}])
def test_messages_are_what_the_chat_sends(server, fields):
    answer = post(server, "/tokenize", messages=MESSAGES, **fields).json()
    assert server.chat(messages=MESSAGES, max_tokens=1, **fields).status_code == 200
    assert answer["tokens"] == server.last_request().prompt_token_ids
    assert answer["count"] == len(answer["tokens"])


def test_detokenize_is_the_inverse(server):
    ids = post(server, "/tokenize", prompt=TEXT).json()["tokens"]
    assert TEXT in post(server, "/detokenize", tokens=ids).json()["prompt"]
    assert post(server, "/detokenize", tokens=TOKENIZER.encode(TEXT, False)).json() == {"prompt": TEXT}
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}
    assert post(server, "/detokenize", tokens=TOKENIZER.encode(TEXT, False) * 300).json() == {"prompt": TEXT * 300}


@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "unsupported_field", "tools"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "unsupported_field", "chat_template"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "unsupported_field", "add_special_token"),
        ("/tokenize", {"prompt": 5}, "invalid_value", "prompt"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/detokenize", {}, "invalid_value", None),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "invalid_value", None),
    ],
)
def test_refusals(server, path, fields, code, param):
    error = error_of(post(server, path, **fields), 400)
    assert error["code"] == code
    if param is not None:
        assert error["param"] == param


def test_other_models_and_too_long_texts(server):
    assert error_of(post(server, "/tokenize", prompt="a", model="no"), 404)["code"] == "model_not_found"
    assert error_of(post(server, "/tokenize", prompt="a " * 500_000), 400)["code"] == "context_length_exceeded"


def test_without_a_tokenizer():
    with RunningServer(tokenizer=None) as server:
        assert "without a tokenizer" in error_of(post(server, "/tokenize", prompt="a"), 400)["message"]
        assert "without a tokenizer" in error_of(post(server, "/detokenize", tokens=[1]), 400)["message"]


@pytest.mark.parametrize(("side", "shown"), [("left", " b c d"), ("right", "a b c")])
def test_a_prompt_that_is_cut_is_echoed_as_the_model_gets_it(server, side, shown):
    cut = {"truncate_prompt_tokens": 3, "truncation_side": side}
    (choice,) = server.complete(prompt="a b c d", echo=True, logprobs=0, max_tokens=1, **cut).json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"])
    assert "".join(logprobs["tokens"][:3]) == shown
    places = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(choice["text"][offset:].startswith(token) for offset, token in places)


def test_truncation(server):
    prompt = TOKENIZER.encode(TEXT * 20, add_special_tokens=False)
    for fields, expected in (
        ({"truncate_prompt_tokens": 7}, prompt[-7:]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, prompt[-7:]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, prompt[:7]),
        ({"truncate_prompt_tokens": 10**6}, prompt),
    ):
        answer = server.complete(prompt=prompt, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        assert server.last_request().prompt_token_ids == expected
        assert answer.json()["usage"]["prompt_tokens"] == len(expected)
    long = (prompt * 40)[: MAX_MODEL_LEN + 100]
    assert error_of(server.complete(prompt=long, max_tokens=5), 400)["code"] == "context_length_exceeded"
    assert server.complete(prompt=long, max_tokens=5, truncate_prompt_tokens=-1).status_code == 200
    assert server.last_request().prompt_token_ids == long[-(MAX_MODEL_LEN - 5) :]
    chat = [{"role": "user", "content": "word " * 3000}]
    assert server.chat(messages=chat, truncate_prompt_tokens=-1).status_code == 200
    assert len(server.last_request().prompt_token_ids) == MAX_MODEL_LEN - 1
    for wrong in (0, -2):
        assert error_of(server.complete(truncate_prompt_tokens=wrong), 400)["param"] == "truncate_prompt_tokens"
    assert error_of(server.complete(truncation_side="left"), 400)["param"] == "truncation_side"
    assert error_of(server.complete(truncate_prompt_tokens=4, truncation_side="top"), 400)["param"] == "truncation_side"


def test_ping_and_load(server):
    assert server.http.get("/ping").json() == server.http.post("/ping").json() == {"status": "ok"}
    assert server.http.get("/load").json() == {"server_load": 0}


def test_tokenizer_info_is_served_if_wanted(server):
    """vLLM's route: the content of tokenizer_config.json, and the chat template in use."""
    assert error_of(server.http.get("/tokenizer_info"), 404)["code"] == "unknown_route"
    config = TOKENIZER.config | {"model_max_length": 10**30, "vocab_file": "/home/x/vocab.json"}
    tokenizer = Tokenizer(TOKENIZER.backend, chat_templates={"default": "a", "tools": "b"}, config=config)
    for chosen, template in ((None, "a"), ("tools", "b"), ("{{ own }}", "{{ own }}")):
        with RunningServer(tokenizer=tokenizer, enable_tokenizer_info_endpoint=True, chat_template=chosen) as info:
            answer = info.http.get("/tokenizer_info").json()
            assert answer == TOKENIZER.config | {"model_max_length": 10**30, "chat_template": template}
            assert isinstance(answer["tokenizer_class"], str)
            assert "/tokenizer_info" in info.http.get("/openapi.json").json()["paths"]


def test_tokenizer_info_without_a_tokenizer():
    with RunningServer(tokenizer=None, enable_tokenizer_info_endpoint=True) as server:
        error_of(server.http.get("/tokenizer_info"), 400)
