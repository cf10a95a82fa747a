"""POST /v1/completions with OpenAI's own client and with raw HTTP."""

from __future__ import annotations

import time

import pytest

from quire.frontend.echo_client import EchoClient
from quire.frontend.logprobs import LogprobDecoder
from quire.messages import Abort, ObservedOverhead
from quire.outputs import Logprob
from quire.server.logprobs import LogprobWriter
from tests.server.serving import ANSWER, MAX_MODEL_LEN, MODEL, TEXT, TOKENIZER, RunningServer
from tests.server.test_errors import error_of

COMPLETIONS = "/v1/completions"


def test_openai_client(server):
    answer = server.openai().completions.create(model=MODEL, prompt="Hi", max_tokens=100)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, TEXT, "stop", None)
    assert answer.usage.completion_tokens == len(ANSWER) + 1
    assert answer.usage.prompt_tokens == len(server.last_request().prompt_token_ids)


# Every key of vLLM's answers: its clients read them without asking whether they are there.
ANSWER_KEYS = "id object created model choices service_tier system_fingerprint usage kv_transfer_params metrics"
CHOICE_KEYS = """
    index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts
"""


def test_keys_of_what_was_not_asked_for_are_null(server):
    answer = server.complete().json()
    assert answer.keys() == set(ANSWER_KEYS.split())
    assert answer["choices"][0].keys() == set(CHOICE_KEYS.split())
    (choice,) = server.openai().completions.create(model=MODEL, prompt="Hi").choices
    assert [choice.prompt_logprobs, choice.prompt_token_ids, choice.token_ids, choice.stop_reason] == [None] * 4
    for chunk in server.openai().completions.create(model=MODEL, prompt="Hi", stream=True):
        assert chunk.choices[0].token_ids is chunk.choices[0].prompt_token_ids is None


def test_openai_client_streamed(server):
    chunks = list(server.openai().completions.create(model=MODEL, prompt="Hi", max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_engine_is_told_what_a_streamed_answer_takes_besides_it(server, monkeypatch):
    """From its complete body on; later prompts of a request wait for the ones before."""
    came, add_request, before = [], server.engine.add_request, len(server.client.sent)

    def noting(*arguments, came_time, **options):
        came.append(came_time)
        return add_request(*arguments, came_time=came_time, **options)

    monkeypatch.setattr(server.engine, "add_request", noting)
    start = time.monotonic()
    list(server.openai().completions.create(model=MODEL, prompt=["Hi", "Ho"], max_tokens=100, stream=True))
    server.complete()
    end = time.monotonic()
    assert start < came[0] < came[2] < end
    assert came[1] is None
    found = [message.seconds for message in server.client.sent[before:] if isinstance(message, ObservedOverhead)]
    assert len(found) == 2
    assert all(0 < seconds < end - start for seconds in found)


async def test_async_openai_client(server):
    async with server.async_openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


def test_default_is_16_tokens(echo):
    assert echo.complete().json()["usage"]["completion_tokens"] == 16


HELLO, WORLD = (TOKENIZER.encode(text, add_special_tokens=False) for text in ("hello", "world"))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [HELLO]),
        (["hello", "world"], [HELLO, WORLD]),
        (HELLO, [HELLO]),
        ([HELLO, WORLD], [HELLO, WORLD]),
        (["hello", WORLD], [HELLO, WORLD]),
    ],
)
def test_prompt_shapes(echo, prompt, expected):
    answer = echo.complete(prompt=prompt, max_tokens=3, n=2, return_token_ids=True, add_special_tokens=False).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids for ids in expected for _ in range(2)]
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        (ids * 3)[:3] for ids in expected for _ in range(2)
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 6 * len(expected)


def test_the_first_event_comes_with_the_first_token(server):
    """Though all of its text is held back, as here: the whole answer may be the beginning of a stop string."""
    fields = {"prompt": "Hi", "max_tokens": 100, "stop": [TEXT + "!"]}
    first, *_, last = server.events(
        COMPLETIONS, stream_options={"include_usage": True, "continuous_usage_stats": True}, **fields
    )
    (choice,) = first["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", None)
    assert first["usage"]["completion_tokens"] < last["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 60},
        {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 9},
        {"echo": True, "max_tokens": 5},
        {"echo": True, "logprobs": 2, "max_tokens": 5, "prompt": ["Hello there", "x"], "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"logprobs": 3, "max_tokens": 50},
        {"logprobs": 0, "max_tokens": 3, "return_tokens_as_token_ids": True},
        {"prompt_logprobs": 1, "max_tokens": 2},
        {"return_token_ids": True, "max_tokens": 3},
        {"use_beam_search": True, "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "logprobs": 1},
        {"stop": "naïve", "max_tokens": 60},
    ],
)
def test_streamed_equals_not_streamed(server, fields):
    fields = {"prompt": "Hi", **fields}
    whole = server.complete(**fields).json()
    events = server.events(COMPLETIONS, stream_options={"include_usage": True}, **fields)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [(part["finish_reason"], part["stop_reason"]) for part in parts if part["finish_reason"]] == [
            (choice["finish_reason"], choice["stop_reason"])
        ]
        for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
            pieces = [item for part in parts if part["logprobs"] for item in part["logprobs"][name]]
            assert pieces == (choice["logprobs"][name] if choice["logprobs"] else []), name
        for name in ("prompt_token_ids", "prompt_logprobs"):
            assert [part[name] for part in parts if part.get(name)] == ([choice[name]] if choice[name] else [])


def test_logprobs(server):
    choice = server.openai().completions.create(model=MODEL, prompt="Hi", max_tokens=len(ANSWER), logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == TEXT == choice.text
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert choice.text[offset : offset + len(token)] == token
    assert set(logprobs.token_logprobs) == {-0.25}
    assert all(top[token] == -0.25 for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True))


POSITION = {
    5: Logprob(-3.0, 4, "e"),
    1: Logprob(-0.5, 1, "a"),
    2: Logprob(-1.0, 2, "b"),
    3: Logprob(-2.0, 3, "c"),
}


def test_the_chosen_token_comes_first():
    """As in vLLM: a chat counts it among the tokens asked for, completions do not."""
    for max_top, chat, completion in ((0, "", "e"), (1, "e", "ea"), (2, "ea", "eab"), (-1, "eabc", "eabc")):
        writer = LogprobWriter(TOKENIZER, as_token_ids=False, max_top=max_top)
        (content,) = writer.chat([POSITION]).content
        assert "".join(top.token for top in content.top_logprobs) == chat
        assert "".join(writer.completion([5], [POSITION], 0)[0].top_logprobs[0]) == completion


def test_logprobs_beside_logprob_token_ids(server):
    """These tokens are reported, whatever the number of logprobs, as in vLLM."""
    fields = {"logprob_token_ids": [7, 8], "max_tokens": 1, "return_tokens_as_token_ids": True}
    for logprobs in (None, 0, 1, 20):
        (top,) = server.complete(logprobs=logprobs, **fields).json()["choices"][0]["logprobs"]["top_logprobs"]
        assert next(iter(top)) == f"token_id:{ANSWER[0]}"
        params = server.last_request().sampling_params
        assert (params.logprob_token_ids, params.logprobs) == ([7, 8], None)


def test_all_wrong_keys_of_logit_bias_are_named(server):
    error = error_of(server.complete(logit_bias={"-1": 1, "5": 1, "9999999999": 1, "x": 1, "4096": 1}), 400)
    assert error["param"] == "logit_bias"
    assert "Got ['-1', 9999999999, 'x', 4096]. Expected integers in [0, 4095]." in error["message"]


def test_echo_with_logprobs(server):
    prompt = "Good day"
    choice = server.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=2).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt + TOKENIZER.decode(ANSWER[:2])
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert choice["prompt_logprobs"] is None


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_behind_a_special_token(skips):
    """If it is left out of the text, it takes no place there."""
    answer = [*ANSWER[:2], TOKENIZER.token_to_id("<|im_start|>"), *ANSWER[2:4]]
    with RunningServer(answer=answer) as server:
        choice = server.complete(logprobs=0, max_tokens=5, skip_special_tokens=skips).json()["choices"][0]
    tokens = ["" if skips and token == "<|im_start|>" else token for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == choice["text"]
    lengths = [len(token) for token in tokens[:-1]]
    assert choice["logprobs"]["text_offset"] == [sum(lengths[:index]) for index in range(5)]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_logprobs_of_an_echoed_prompt_are_made_once(server, monkeypatch, is_streamed):
    """Whatever n is: they are seconds of work for a long prompt."""
    made, position = [], LogprobDecoder.position

    def noted(decoder, entry):
        made.append(entry)
        return position(decoder, entry)

    monkeypatch.setattr(LogprobDecoder, "position", noted)
    fields = {"prompt": "Good day " * 20, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 9}
    if is_streamed:
        texts = [
            chunk["choices"][0]["text"] for chunk in server.events("/v1/completions", **fields) if chunk["choices"]
        ]
        assert sum(text.startswith(fields["prompt"]) for text in texts) == 9
    else:
        choices = server.complete(**fields).json()["choices"]
        assert [choice["logprobs"] for choice in choices] == [choices[0]["logprobs"]] * 9
        assert "".join(choices[0]["logprobs"]["tokens"]) == choices[0]["text"]
    assert len(made) == len(TOKENIZER.encode(fields["prompt"])) - 1 + 9 * 2


def test_echo_of_token_ids(server):
    assert server.complete(prompt=HELLO, echo=True, max_tokens=1).json()["choices"][0]["text"].startswith("hello")


def test_echo_only(server):
    answer = server.complete(prompt="Hello there", echo=True, max_tokens=0, logprobs=0).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello there", "length")
    assert "".join(choice["logprobs"]["tokens"]) == "Hello there"
    assert answer["usage"]["completion_tokens"] == 0


def test_without_tokenizer():
    with RunningServer(EchoClient(), tokenizer=None) as server:
        choice = server.complete(prompt=[5, 6], max_tokens=3, return_token_ids=True, logprobs=0).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == ("", [5, 6, 5])
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:5"]
        assert server.complete(prompt="text").status_code == 400
        assert server.chat().status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"prompt": "x"}}, "prompt"),
        ({"prompt": "x " * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": "x" * 200_000}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 513, "n": 2}, "prompt"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 21, "logprob_token_ids": [1]}, "logprobs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_refused(server, fields, param):
    response = server.complete(**fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param, error
    server.wait_for_idle()


def test_one_bad_prompt_refuses_all(echo):
    response = echo.complete(prompt=["good", "x " * MAX_MODEL_LEN], max_tokens=500)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    echo.wait_for_idle()
    assert isinstance(echo.client.sent[-1], Abort), "the good prompt ran to its end"
