"""Which body fields are known, refused, ignored; how JSON is decoded and bounded. No server."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.server.limits import (
    MAX_EXTREME_NUMBERS,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    check_nesting,
    check_numbers,
)
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import SAMPLING_FIELDS, GenerationRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.fields import IGNORED_FIELDS, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, BodyDecoder

CHAT = (BodyDecoder(ChatRequest, REFUSED_IN_CHAT), {"messages": [{"role": "user", "content": "x"}]}, REFUSED_IN_CHAT)
COMPLETION = (BodyDecoder(CompletionRequest, REFUSED_IN_COMPLETIONS), {"prompt": "x"}, REFUSED_IN_COMPLETIONS)
VLLM_FIELDS = """
    top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
    add_special_tokens documents chat_template chat_template_kwargs mm_processor_kwargs structured_outputs
    response_format priority request_id session_id return_token_ids return_tokens_as_token_ids return_prompt_text
    cache_salt kv_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget
    reasoning_effort include_reasoning guided_json guided_regex guided_choice guided_grammar logits_processors
    best_of
"""
BOTH = [pytest.param(CHAT, id="chat"), pytest.param(COMPLETION, id="completion")]


@pytest.mark.parametrize("api", BOTH)
def test_every_refused_field_is_refused_with_a_way_out(api):
    decoder, body, refused = api
    for name, refusal in refused.items():
        for value in ("something", 17, {"a": 1}, ["x" * 100]):
            with pytest.raises(UnsupportedFieldError) as error:
                decoder.decode(json.dumps({**body, name: value}).encode())
            assert error.value.param == name
            assert refusal.fix in error.value.message
        for value in (None, *refusal.neutral):
            _, ignored = decoder.decode(json.dumps({**body, name: value}).encode())
            assert ignored == [name]


def test_neutral_values_have_a_type():
    decoder, body, _ = CHAT
    with pytest.raises(UnsupportedFieldError):
        decoder.decode(json.dumps({**body, "best_of": True}).encode())


@pytest.mark.parametrize("api", BOTH)
def test_ignored_fields_are_named(api):
    decoder, body, _ = api
    extra = {name: {"any": ["thing"]} for name in IGNORED_FIELDS}
    _, ignored = decoder.decode(json.dumps({**body, **extra}).encode())
    assert set(ignored) == IGNORED_FIELDS


@pytest.mark.parametrize("api", BOTH)
def test_the_three_kinds_do_not_overlap(api):
    decoder, _, refused = api
    assert not decoder._known & set(refused)
    assert not decoder._known & IGNORED_FIELDS
    assert not IGNORED_FIELDS & set(refused)


@pytest.mark.parametrize("api", BOTH)
@pytest.mark.parametrize(("name", "near"), [("temprature", "temperature"), ("maxtokens", "max_tokens"), ("zzz", None)])
def test_unknown_fields_are_refused_with_the_nearest(api, name, near):
    decoder, body, _ = api
    with pytest.raises(UnsupportedFieldError, match=f"Did you mean {near}" if near else "Remove it"):
        decoder.decode(json.dumps({**body, name: 1}).encode())


def test_every_field_of_vllm_is_known_refused_or_ignored():
    """The request fields of vLLM 0.32 beyond OpenAI's: none is answered with "unknown"."""
    known = set(ChatRequest.__struct_fields__) | set(REFUSED_IN_CHAT) | IGNORED_FIELDS
    assert not set(VLLM_FIELDS.split()) - known


def test_sampling_fields_exist_in_both():
    assert set(SAMPLING_FIELDS) <= set(GenerationRequest.__struct_fields__)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"x"', None),
        (b'{"prompt": "x"} {}', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "x", "temperature": NaN}', None),
        (b'{"prompt": "x", "temperature": 1e400}', "temperature"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": 1.0, "n": true}', "n"),
        (b'{"prompt": [1.0, 1.5]}', "prompt[1]"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens"),
        (b'{"prompt": "x", "max_tokens": "1"}', "max_tokens"),
        (b'{"prompt": "x", "stop": ["a", 1]}', "stop[1]"),
        (b'{"prompt": [[1, true]]}', "prompt[0][1]"),
        (b'{"max_tokens": 1}', None),
    ],
)
def test_malformed_bodies(body, param):
    decoder, _, _ = COMPLETION
    with pytest.raises(InvalidRequestError) as error:
        decoder.decode(body)
    assert error.value.param == param


@pytest.mark.parametrize(
    "text",
    [
        r"\ud800",
        r"\udfff",
        r"x\ud83d y",
        r"\uD83D\ud83d\ude00",
        r"\ud83d\u0041",
        r"\\\ude00",
        r"\ud83d\\ude00",
        r"\ud83d\\\ude00",
    ],
)
def test_half_a_character_is_named(text):
    """It is what a client sends that cuts its texts by UTF-16 units."""
    decoder, _, _ = COMPLETION
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        decoder.decode(b'{"prompt": "%s"}' % text.encode())


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud83d", r"\uD83D\uDE00\\ude00", r"\ud7ff\ue000"])
def test_whole_characters_and_escaped_backslashes_are_not(text):
    decoder, _, _ = COMPLETION
    body, _ = decoder.decode(b'{"prompt": "%s"}' % text.encode())
    assert body.prompt == json.loads(f'"{text}"')
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        decoder.decode(b'{"prompt": "%s"' % text.encode())


def test_a_number_without_a_fraction_is_an_integer():
    """As in JSON Schema; what is no integer by its type stays as it was written."""
    decoder, _, _ = COMPLETION
    body, _ = decoder.decode(b'{"prompt": [[1.0, 2], [3e0]], "max_tokens": 1e2, "temperature": 1.0}')
    assert repr((body.prompt, body.max_tokens, body.temperature)) == "([[1, 2], [3]], 100, 1.0)"
    decoder, _, _ = CHAT
    body, _ = decoder.decode(b'{"messages": [{"role": "user", "content": "x", "a": 1.0}], "top_k": 5.0}')
    assert repr((body.messages[0]["a"], body.top_k)) == "(1.0, 5)"


def depth(value: object) -> int:
    """Of JSON data, counted directly."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


texts = st.text(st.sampled_from('[]{}"\\a😀'), max_size=6)
trees = st.recursive(
    texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=20
)


@given(trees, st.integers(MAX_JSON_DEPTH - 8, MAX_JSON_DEPTH + 4), st.booleans())
def test_nesting_is_counted_outside_strings(tree, levels, ascii_only):
    wrapped: object = tree
    for level in range(levels):
        wrapped = [wrapped] if level % 2 else {"k": wrapped, "s": ']}\\"'}
    body = json.dumps(wrapped, ensure_ascii=ascii_only).encode()
    if depth(wrapped) <= MAX_JSON_DEPTH:
        check_nesting(body)
    else:
        with pytest.raises(InvalidRequestError, match="nested too deeply"):
            check_nesting(body)


def test_too_many_containers():
    with pytest.raises(InvalidRequestError, match="too many"):
        check_nesting(b"[" + b"[]," * MAX_JSON_CONTAINERS + b"[]]")


def test_many_numbers_near_the_limits_of_a_double_are_refused():
    extreme = b",".join([b"1e308"] * MAX_EXTREME_NUMBERS)
    check_numbers(b'{"stop_token_ids": [' + extreme + b"]}")
    for more in (b"1E+308", b"-1.5e-308", b"1e0300", b"0.1e99999"):
        with pytest.raises(InvalidRequestError, match="too many numbers"):
            check_numbers(b'{"stop_token_ids": [' + extreme + b", " + more + b"]}")
    for usual in (b"1e30", b"2e-27", b"12"):
        check_numbers(b"[" + extreme + b", " + usual + b"]")
    check_numbers(json.dumps({"prompt": "e308, 1e3081e308 " * 5000}).encode())


def test_a_long_value_is_not_told_back():
    decoder, body, _ = CHAT
    with pytest.raises(InvalidRequestError, match="reasoning_effort") as error:
        decoder.decode(json.dumps({**body, "reasoning_effort": "x" * 100_000}).encode())
    assert len(error.value.message) < 300
