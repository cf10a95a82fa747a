"""POST /v1/chat/completions with OpenAI's own client and with raw HTTP."""

from __future__ import annotations

import re

import pytest

from quire.sampling_params import RequestOutputKind
from tests.server.serving import ANSWER, MAX_MODEL_LEN, MODEL, TEXT, TOKENIZER, RunningServer
from tests.server.test_errors import COMPLETIONS, error_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
# Shows all that reaches a template.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if tools %}tools={{ tools | length }}{% endif %}"
    "{% if documents %}docs={{ documents | length }}{% endif %}{{ style | default('') }}"
    "{{ reasoning_effort | default('') }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def templated():
    with RunningServer(chat_template=TEMPLATE) as server:
        yield server


def joined(events, index=0):
    """Content of one choice over all events."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_openai_client(server):
    answer = server.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.system_fingerprint.startswith("quire-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.content == TEXT
    assert choice.message.refusal is None
    assert answer.usage.completion_tokens == len(ANSWER) + 1  # with EOS
    assert answer.usage.prompt_tokens == len(server.last_request().prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


# Every key of vLLM's answers: its clients read them without asking whether they are there.
ANSWER_KEYS = """
    id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids prompt_text
    kv_transfer_params metrics
"""
CHOICE_KEYS = "index message logprobs finish_reason stop_reason token_ids routed_experts"
MESSAGE_KEYS = "role content refusal annotations audio function_call reasoning"


def test_keys_of_what_was_not_asked_for_are_null(server):
    answer = server.chat().json()
    assert answer.keys() == set(ANSWER_KEYS.split())
    assert answer["choices"][0].keys() == set(CHOICE_KEYS.split())
    assert answer["choices"][0]["message"].keys() == set(MESSAGE_KEYS.split())
    parsed = server.openai().chat.completions.create(model=MODEL, messages=MESSAGES)
    nulls = [parsed.prompt_logprobs, parsed.prompt_token_ids, parsed.kv_transfer_params, parsed.metrics]
    nulls += [parsed.choices[0].token_ids, parsed.choices[0].stop_reason, parsed.choices[0].message.reasoning]
    assert nulls == [None] * 7
    first, *others = server.openai().chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert first.prompt_token_ids is first.prompt_text is None
    assert all(chunk.choices[0].token_ids is None for chunk in others)


def test_openai_client_streamed(server):
    stream = server.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == len(ANSWER) + 1


async def test_async_openai_client(server):
    async with server.async_openai() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert "".join(pieces) == TEXT == answer.choices[0].message.content


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["42"]},
        {"stop": "42", "include_stop_str_in_output": True},
        {"stop_token_ids": [ANSWER[5]]},
        {"max_tokens": 7},
        {"min_tokens": 3, "stop": "H"},
        {"logprobs": True, "top_logprobs": 2, "max_tokens": 12},
        {"logprobs": True, "n": 2, "return_token_ids": True, "return_tokens_as_token_ids": True},
        {"prompt_logprobs": 1, "max_tokens": 2, "return_token_ids": True},
        {"use_beam_search": True, "n": 2, "max_tokens": 4, "logprobs": True, "return_token_ids": True},
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 20},
    ],
)
def test_streamed_equals_not_streamed(server, fields):
    whole = server.chat(**fields).json()
    events = server.events(CHAT, messages=MESSAGES, stream_options={"include_usage": True}, **fields)
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        index = choice["index"]
        parts = [part for event in events for part in event["choices"] if part["index"] == index]
        assert joined(events, index) == choice["message"]["content"]
        assert parts[0]["delta"]["role"] == "assistant"
        assert [(part["finish_reason"], part["stop_reason"]) for part in parts if part["finish_reason"]] == [
            (choice["finish_reason"], choice["stop_reason"])
        ]
        if fields.get("logprobs"):
            content = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
            assert content == choice["logprobs"]["content"]
        if fields.get("return_token_ids"):
            assert [token for part in parts for token in part["token_ids"] or []] == choice["token_ids"]
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [event[name] for event in events if event.get(name)] == ([whole[name]] if whole[name] else [])


def test_stop_string_is_left_out(server):
    choice = server.chat(stop=["answer is", "42"]).json()["choices"][0]
    assert choice["message"]["content"] == TEXT[: TEXT.index("answer is")]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "answer is")


def test_logprobs(server):
    answer = server.openai().chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=len(ANSWER)
    )
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == TEXT
    for entry in content:
        assert [top.logprob for top in entry.top_logprobs] == [-0.25, -0.5, -0.75]
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)


def test_logprobs_without_alternatives(server):
    content = server.chat(logprobs=True, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_tokens_as_token_ids(server):
    fields = {"logprobs": True, "max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    answer = server.chat(**fields).json()
    names = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in ANSWER[:2]]
    assert answer["choices"][0]["token_ids"] == ANSWER[:2]
    assert answer["prompt_token_ids"] == server.last_request().prompt_token_ids


def test_prompt_logprobs(server):
    answer = server.chat(prompt_logprobs=0, max_tokens=1, return_token_ids=True).json()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [list(position) for position in others] == [[str(token)] for token in answer["prompt_token_ids"][1:]]


def test_continuous_usage(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(CHAT, messages=MESSAGES, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(ANSWER) + 1


@pytest.mark.parametrize("is_wanted", [True, False, None])
def test_padding_is_accepted_without_effect(server, is_wanted):
    """OpenAI's clients may send it. It does not change the text."""
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_obfuscation": is_wanted}}
    response = server.http.post(CHAT, json=body)
    assert response.status_code == 200
    assert b"obfuscation" not in response.content
    named = response.headers.get("x-quire-ignored-fields")
    assert named == ("stream_options.include_obfuscation" if is_wanted else None)


def test_no_usage_unless_asked(server):
    assert all("usage" not in event for event in server.events(CHAT, messages=MESSAGES))


def test_max_tokens_names(echo):
    both = echo.chat(max_completion_tokens=5, max_tokens=9, ignore_eos=True).json()
    assert both["usage"]["completion_tokens"] == 5
    assert echo.chat(max_tokens=9, ignore_eos=True).json()["usage"]["completion_tokens"] == 9


def test_default_max_tokens_is_the_context_length(echo):
    answer = echo.chat(ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


def test_generation_config_gives_defaults():
    defaults = {"temperature": 0.7, "top_k": 20, "max_tokens": 9999}
    with RunningServer(answer=None, default_sampling_params=defaults) as server:
        assert server.chat(ignore_eos=True).json()["usage"]["total_tokens"] == MAX_MODEL_LEN, (
            "a default above the context was not cut"
        )
        params = server.last_request().sampling_params
        assert (params.temperature, params.top_k) == (0.7, 20)
        server.chat(temperature=0.2, max_tokens=3)
        params = server.last_request().sampling_params
        assert (params.temperature, params.top_k) == (0.2, 20)
        assert server.last_request().max_tokens == 3


def test_a_cap_on_new_tokens():
    """The operator's max_new_tokens: more is never generated, and a request that is cut to it is not refused for its
    length.
    """
    with RunningServer(answer=None, default_sampling_params={"max_tokens": 5}, max_tokens_cap=5) as server:
        for post in (server.chat, server.complete):
            for asked, given in ((None, 5), (3, 3), (6, 5), (10 * MAX_MODEL_LEN, 5)):
                answer = post(max_tokens=asked, ignore_eos=True).json()
                assert answer["usage"]["completion_tokens"] == given
        assert server.chat(max_completion_tokens=9, ignore_eos=True).json()["usage"]["completion_tokens"] == 5
        assert server.complete(echo=True, max_tokens=0).json()["usage"]["completion_tokens"] == 0
        assert error_of(server.chat(min_tokens=6), 400)["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("temperature", 0.3),
        ("top_p", 0.9),
        ("top_k", 7),
        ("min_p", 0.1),
        ("seed", 11),
        ("stop_token_ids", [5, 6]),
        ("ignore_eos", True),
        ("min_tokens", 2),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
        ("allowed_token_ids", [1, 2, 3]),
        ("bad_words", ["foo"]),
        ("stream_interval", 3),
        ("prompt_logprobs", 2),
    ],
)
def test_sampling_fields_reach_the_engine(server, field, value):
    assert server.chat(max_tokens=4, **{field: value}).status_code == 200
    assert getattr(server.last_request().sampling_params, field) == value


def test_other_fields_reach_the_engine(server):
    response = server.chat(
        logit_bias={"5": -2}, cache_salt="tenant", logprobs=True, logprob_token_ids=[4, 8], max_tokens=1
    )
    assert response.status_code == 200
    request = server.last_request()
    assert request.sampling_params.logit_bias == {5: -2.0}
    assert request.sampling_params.logprob_token_ids == [4, 8]
    assert request.cache_salt == "tenant"
    assert request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, 10**6])
def test_errors_name_the_field_that_was_given(server, name, value):
    error = error_of(server.chat(**{name: value}), 400)
    assert error["param"] == name
    assert re.findall(r"\bmax_\w*tokens\b", error["message"]), error
    assert set(re.findall(r"\bmax_\w*tokens\b", error["message"])) == {name}


def test_priority_is_named_as_ignored_unless_the_scheduler_looks(server):
    assert server.chat(priority=3, max_tokens=1).headers["x-quire-ignored-fields"] == "priority"
    assert server.last_request().priority == 3
    with RunningServer(has_priorities=True) as other:
        assert "x-quire-ignored-fields" not in other.chat(priority=3, max_tokens=1).headers
        assert other.last_request().priority == 3


def prompt_of(server):
    return TOKENIZER.decode(server.last_request().prompt_token_ids, skip_special_tokens=False)


def test_template_gets_everything(templated):
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {
        "tools": tools,
        "tool_choice": "none",
        "documents": [{"text": "d"}],
        "chat_template_kwargs": {"style": "terse"},
    }
    assert templated.chat(**fields, max_tokens=1).status_code == 200
    assert prompt_of(templated) == "<user>Hi</>tools=1docs=1terse<assistant>"


def test_content_parts(templated):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    templated.chat(messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert prompt_of(templated) == "<user>a\nb</><assistant>"


def test_continue_final_message(templated):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    answer = templated.chat(messages=messages, continue_final_message=True, max_tokens=1, echo=True).json()
    assert prompt_of(templated) == "<user>Hi</><assistant>I am"
    assert answer["choices"][0]["message"]["content"].startswith("I am")
    events = templated.events(CHAT, messages=messages, continue_final_message=True, max_tokens=1, echo=True)
    assert joined(events) == answer["choices"][0]["message"]["content"]
    refused = templated.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning_effort": "low"}, "lowTrue"),
        ({"reasoning_effort": "none"}, "noneFalse"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "highFalse"),
        ({"reasoning_effort": None}, ""),
    ],
)
def test_reasoning_effort_is_the_templates(templated, fields, shown):
    response = templated.chat(**fields, max_tokens=1)
    assert response.status_code == 200, response.text
    assert prompt_of(templated) == f"<user>Hi</>{shown}<assistant>"
    assert "x-quire-ignored-fields" not in response.headers


def test_reasoning_effort_is_named_as_ignored_where_the_template_reads_none(server):
    assert server.chat(reasoning_effort="low", max_tokens=1).headers["x-quire-ignored-fields"] == "reasoning_effort"


def test_best_of_names_the_way_out(server):
    for post in (server.chat, server.complete):
        error = error_of(post(best_of=2), 400)
        assert (error["code"], error["param"]) == ("unsupported_field", "best_of")
        assert "Use n" in error["message"]
        assert post(best_of=1, max_tokens=1).status_code == 200


def test_no_generation_prompt(templated):
    templated.chat(add_generation_prompt=False, max_tokens=1)
    assert prompt_of(templated) == "<user>Hi</>"


def test_long_conversation_is_rendered(templated):
    messages = [{"role": "user", "content": "x"}] * 100
    assert templated.chat(messages=messages, max_tokens=1).status_code == 200
    assert prompt_of(templated).count("<user>x</>") == 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21, "logprob_token_ids": [1]}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 5, "use_beam_search": True, "n": 2}, "top_logprobs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"best_of": 2}, "best_of"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"request_id": "a b"}, "request_id"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_refused(server, fields, param):
    response = server.chat(**fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error


def test_text_response_format_and_empty_tools_are_accepted(server):
    fields = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "user": "me",
    }
    response = server.chat(max_tokens=1, **fields)
    assert response.status_code == 200
    assert set(response.headers["x-quire-ignored-fields"].split(", ")) == {"user", "tool_choice"}


def test_models_by_name(server):
    assert server.chat(max_tokens=1, model="alias").json()["model"] == MODEL
    assert server.chat(max_tokens=1).json()["model"] == MODEL
    response = server.chat(model="echo/model-2")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert f"Did you mean {MODEL}?" in response.json()["error"]["message"]


def test_request_ids(server):
    body = {"messages": MESSAGES, "max_tokens": 1}
    response = server.http.post(CHAT, json=body, headers={"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "chatcmpl-mine-1"
    assert server.chat(max_tokens=1, request_id="body-1").json()["id"] == "chatcmpl-body-1"
    for bad in ("a b", "x" * 200, "a;b", "\xff"):
        response = server.http.post(CHAT, json=body, headers={b"x-request-id": bad.encode("latin-1")})
        assert response.headers["x-request-id"] != bad
        assert len(response.headers["x-request-id"]) == 32


def test_beam_search(server):
    answer = server.chat(use_beam_search=True, n=3, max_tokens=5, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(len(choice["token_ids"]) == 5 for choice in answer["choices"])
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    # EchoClient gives its own token the best logprob; each step is a fresh request, answered with its first token.
    assert answer["choices"][0]["token_ids"] == [ANSWER[0]] * 5
    assert answer["usage"]["completion_tokens"] == 15


REFUSED_WITH_BEAMS = {
    "stop": "x",
    "stop_token_ids": [5],
    "prompt_logprobs": 0,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "min_tokens": 1,
    "return_metrics": True,
    "structured_outputs": {"choice": ["a"]},
    "response_format": {"type": "json_object"},
}


def test_what_beam_search_cannot_do(server):
    """Each is refused by its name; values that ask for nothing are not, as some clients always send them."""
    for name, value in REFUSED_WITH_BEAMS.items():
        error = error_of(server.chat(use_beam_search=True, **{name: value}), 400)
        assert error["param"] == name
        assert "eam search" in error["message"]
    assert error_of(server.chat(use_beam_search=True, n=11), 400)["param"] == "n"
    too_many = error_of(server.chat(use_beam_search=True, n=2, logprobs=True, top_logprobs=5), 400)
    assert "at most 4" in too_many["message"]
    neutral = {"top_p": 1, "top_k": -1, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "stop": []}
    neutral |= {"response_format": {"type": "text"}, "structured_outputs": None}
    assert server.chat(use_beam_search=True, max_tokens=2, **neutral).status_code == 200


def test_beam_search_logprobs(server):
    """Every token of a beam with its logprob and the likeliest beside it, in both APIs."""
    fields = {"use_beam_search": True, "n": 2, "max_tokens": 4, "return_token_ids": True}
    for choice in server.chat(logprobs=True, top_logprobs=3, **fields).json()["choices"]:
        content = choice["logprobs"]["content"]
        texts = [TOKENIZER.token_text(token_id) for token_id in choice["token_ids"]]
        assert [entry["token"] for entry in content] == texts
        for entry in content:
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] in [top["logprob"] for top in entry["top_logprobs"]]
    for choice in server.complete(logprobs=0, **fields).json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 4
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert error_of(server.complete(logprobs=1, echo=True, **fields), 400)["param"] == "prompt_logprobs"


def test_defaults_of_the_operator():
    """They hold for requests without these fields, in both APIs; a request's own fields come first."""
    settings = {
        "chat_template": TEMPLATE,
        "default_chat_template_kwargs": {"style": "wordy"},
        "return_tokens_as_token_ids": True,
        "enable_force_include_usage": True,
    }
    with RunningServer(**settings) as server:
        answer = server.chat(max_tokens=1, logprobs=True).json()
        assert prompt_of(server) == "<user>Hi</>wordy<assistant>"
        assert answer["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ANSWER[0]}"
        answer = server.chat(
            max_tokens=1, logprobs=True, chat_template_kwargs={"style": "terse"}, return_tokens_as_token_ids=False
        ).json()
        assert prompt_of(server) == "<user>Hi</>terse<assistant>"
        assert answer["choices"][0]["logprobs"]["content"][0]["token"] == TOKENIZER.token_text(ANSWER[0])
        for path, fields in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})):
            for options in (None, {"include_usage": False}, {"include_usage": True, "continuous_usage_stats": False}):
                events = server.events(path, max_tokens=2, stream_options=options, **fields)
                assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 2)
                assert all(event["usage"] for event in events), "usage is not in every chunk"
