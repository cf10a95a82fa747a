"""Prompts of all shapes and SamplingParams become complete engine requests, or an error that names the way out."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from quire.errors import ConfigError, ContextLengthError, InvalidRequestError, UnsupportedFieldError
from quire.frontend.choices import check_choices
from quire.frontend.input_processor import InputProcessor, ModelLimits, sampling_defaults
from quire.frontend.prompts import TextPrompt, TokensPrompt, split_prompts
from quire.frontend.tokenizer import Tokenizer
from quire.sampling_params import SamplingParams, SpelledWord, SpelledWords
from tests.text.small_tokenizers import build

TOKENIZER = Tokenizer(build("byte_level"), special_tokens={"eos_token": "</s>"})
EOS = TOKENIZER.eos_token_id
LIMITS = ModelLimits(max_model_len=20, vocab_size=TOKENIZER.vocab_size, max_logprobs=5)


def processor(**options) -> InputProcessor:
    return InputProcessor(TOKENIZER, LIMITS, **options)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt_token_ids": [1]}, "a", [1]], [{"prompt_token_ids": [1]}, "a", [1]]),
    ],
)
def test_prompts_of_every_shape(prompts, expected):
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize(
    "prompts", [[], (), 5, None, 1.5, b"ab", ["a", 5], ["a", None], [1, "a"], [True, False], {"a"}]
)
def test_what_is_no_prompt(prompts):
    with pytest.raises(InvalidRequestError):
        split_prompts(prompts)


@pytest.mark.parametrize(
    "prompt",
    [
        "the quick",
        TextPrompt(prompt="the quick"),
        TOKENIZER.encode("the quick"),
        TokensPrompt(prompt_token_ids=TOKENIZER.encode("the quick"), prompt="the quick"),
    ],
)
def test_every_shape_gives_the_same_tokens(prompt):
    processed = processor().process("r", prompt)
    assert processed.requests[0].prompt_token_ids == processed.prompt_token_ids == TOKENIZER.encode("the quick")
    assert processed.prompt == (None if isinstance(prompt, list) else "the quick")


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", InvalidRequestError, "no tokens"),
        ([], InvalidRequestError, "no tokens"),
        ({"prompt_token_ids": []}, InvalidRequestError, "no tokens"),
        ({}, InvalidRequestError, "no prompt and no"),
        ({"prompt": 5}, InvalidRequestError, "wrong type, int"),
        ({"prompt_token_ids": "ab"}, InvalidRequestError, "not a list of integers"),
        ({"prompt_token_ids": [1.0]}, InvalidRequestError, "not a list of integers"),
        ({"prompt_token_ids": [True]}, InvalidRequestError, "not a list of integers"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, UnsupportedFieldError, "multi_modal_data"),
        ({"prompt": "a", "cache_salt": ""}, InvalidRequestError, "cache_salt"),
        ({"prompt": "a", "cache_salt": 5}, InvalidRequestError, "cache_salt"),
        ("a\ud800", InvalidRequestError, "Unicode"),
        ([-1], InvalidRequestError, r"Got -1. Expected integers in \[0, "),
        ([LIMITS.vocab_size], InvalidRequestError, "outside the vocabulary"),
        ([2**70], InvalidRequestError, "more than 64 bits"),
        ([1] * 20, ContextLengthError, "maximum context length is 20 tokens, but the prompt has 20"),
        ("x" * 10_000, ContextLengthError, "10000 characters"),
    ],
)
def test_bad_prompts_are_refused(prompt, error, message):
    with pytest.raises(error, match=message):
        processor().process("r", prompt)


def test_text_with_tokens_beyond_the_models_vocabulary():
    small = InputProcessor(TOKENIZER, ModelLimits(20, EOS))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        small.process("r", "a</s>")


def test_max_tokens_is_resolved():
    prompt = [1] * 15
    resolve = processor().process
    assert resolve("r", prompt, SamplingParams(max_tokens=None)).requests[0].max_tokens == 5
    assert resolve("r", prompt, SamplingParams(max_tokens=5)).requests[0].max_tokens == 5
    with pytest.raises(ContextLengthError, match=r"max_tokens asks for 6 more\. Lower max_tokens to 5"):
        resolve("r", prompt, SamplingParams(max_tokens=6))
    assert resolve("r", prompt, SamplingParams(max_tokens=6), clamp_max_tokens=True).requests[0].max_tokens == 5
    with pytest.raises(ContextLengthError, match="Lower min_tokens to 5"):
        resolve("r", prompt, SamplingParams(max_tokens=None, min_tokens=6))
    longer = processor().with_max_model_len(100)
    assert longer.process("r", prompt, SamplingParams(max_tokens=None)).requests[0].max_tokens == 85


def test_stop_tokens():
    resolve = processor(eos_token_ids=(EOS, 7)).process
    assert resolve("r", "a").requests[0].stop_token_ids == [EOS, 7]
    assert resolve("r", "a", SamplingParams(stop_token_ids=[9, 7])).requests[0].stop_token_ids == [EOS, 7, 9]
    own = SamplingParams(stop_token_ids=[9], ignore_eos=True)
    assert resolve("r", "a", own).requests[0].stop_token_ids == [9]
    assert processor().process("r", "a").requests[0].stop_token_ids == [EOS]


def test_seeds():
    params = SamplingParams(seed=2**63 - 1, n=3)
    requests = processor().process("r", "a", params).requests
    assert [request.sampling_params.seed for request in requests] == [2**63 - 1, 0, 1]
    one, other = processor(seed=1), processor(seed=1)
    drawn = [one.process("r", "a").requests[0].sampling_params.seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert drawn == [other.process("r", "a").requests[0].sampling_params.seed for _ in range(3)]
    assert processor(seed=2).process("r", "a").requests[0].sampling_params.seed != drawn[0]
    assert params.n == 3, "the caller's parameters were changed"


def test_n_continuations():
    processed = processor().process("r", "ab", SamplingParams(n=3, max_tokens=4), priority=-5, cache_salt="x")
    requests = processed.requests
    assert [request.request_id for request in requests] == ["r-0", "r-0.1", "r-0.2"]
    assert [request.fork_of for request in requests] == [None, "r-0", "r-0"]
    assert len({request.sampling_params.seed for request in requests}) == 3
    assert {request.sampling_params.n for request in requests} == {1}
    assert {(request.priority, request.cache_salt, request.max_tokens) for request in requests} == {(-5, "x", 4)}
    assert processed.sampling_params.n == 3


def test_the_engines_ids_are_never_given_twice():
    """Not even where one request's id looks like the engine's id of another."""
    first = processor()
    seen = []
    for name in ("r", "r", "r-0", "r-0.1", "r-1", "r-2.1"):
        seen += [request.request_id for request in first.process(name, "a", SamplingParams(n=3)).requests]
    seen += [request.request_id for request in first.with_max_model_len(30).process("r", "a").requests]
    assert len(set(seen)) == len(seen)


def test_bad_words_are_spelled_for_the_engine():
    params = SamplingParams(bad_words=["the", " quick"])
    own = processor().process("r", "a", params).requests[0].sampling_params
    the, quick = own.bad_words_spelled.words
    assert [the.anywhere[token] for token in TOKENIZER.encode(" the")] == [[3]], "the whole word in one token"
    assert (len(the.steps), len(quick.steps)) == (3, 5)
    assert params.bad_words_spelled is None, "the caller's parameters were changed"
    with pytest.raises(InvalidRequestError, match="only spaces"):
        processor().process("r", "a", SamplingParams(bad_words=["  "]))


def test_bad_words_of_a_tokenizer_whose_tokens_have_no_text_of_their_own():
    unusual = Tokenizer(build("word_piece"))
    limits = ModelLimits(max_model_len=20, vocab_size=unusual.vocab_size)
    params = SamplingParams(bad_words=["quick fox"])
    own = InputProcessor(unusual, limits).process("r", "the", params).requests[0].sampling_params
    assert own.bad_words_spelled is None
    assert own.bad_words_token_ids == [unusual.encode("quick fox")] * 2


SMALL_VOCAB = 20
END = 2  # the EOS of the cases below


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, END], "bad_words_token_ids": [[5]], "min_tokens": 1}, "allowed_token_ids"),
        # After 5 5, and after 5 6, nothing is left.
        ({"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5, 5]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5, 6, 5], [6, 6]]}, "allowed_token_ids"),
        ({"bad_words_token_ids": [[token_id] for token_id in range(SMALL_VOCAB)]}, "bad_words"),
        ({"stop_token_ids": list(range(SMALL_VOCAB)), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_constraints_that_leave_nothing_are_refused(fields, param):
    params = SamplingParams(**fields, bad_words=["x"] if "bad_words_token_ids" in fields else [], max_tokens=4)
    with pytest.raises(InvalidRequestError, match="no token is left") as caught:
        check_choices(params, [END, *params.stop_token_ids], 4, SMALL_VOCAB)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [END]},
        {"allowed_token_ids": [5], "stop_token_ids": [5]},
        {"allowed_token_ids": [5, END], "min_tokens": 1},
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5, 5], [6, 6]]},
        {"allowed_token_ids": [5, END], "bad_words_token_ids": [[5, 5]]},
        {"allowed_token_ids": [5], "bad_words_token_ids": [[5, 5]], "max_tokens": 1},
        {"allowed_token_ids": [5], "bad_words_token_ids": [[7, 5]]},  # 7 is never there
        {"allowed_token_ids": [5], "bad_words_token_ids": [[END, 5]]},  # nothing comes after the end
        {"allowed_token_ids": [5, END], "bad_words_token_ids": [[5, 5, 5]], "min_tokens": 2},
        {"bad_words_token_ids": [[token_id] for token_id in range(1, SMALL_VOCAB)]},
        {"stop_token_ids": list(range(1, SMALL_VOCAB)), "min_tokens": 1},
    ],
)
def test_constraints_that_leave_something_are_not(fields):
    params = SamplingParams(**{"max_tokens": 4, **fields})
    check_choices(params, [END, *params.stop_token_ids], params.max_tokens, SMALL_VOCAB)


def test_what_the_tokenizer_makes_of_bad_words_counts():
    the = TOKENIZER.encode("the")
    with pytest.raises(InvalidRequestError, match="no token is left"):
        processor().process("r", "a", SamplingParams(allowed_token_ids=the, bad_words=["the"], max_tokens=4))


@pytest.mark.parametrize(
    ("allowed", "word", "is_refused"), [("o", "foo", False), ("fo", "foo", False), ("o", "o", True), ("o", "oo", True)]
)
def test_only_words_that_allowed_tokens_can_spell_count(allowed, word, is_refused):
    ids = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(TOKENIZER.vocab_size)}
    tokens = [ids[char.encode()] for char in allowed]
    params = SamplingParams(allowed_token_ids=tokens, bad_words=[word], max_tokens=9)
    with pytest.raises(InvalidRequestError, match="no token is left") if is_refused else nullcontext():
        processor().process("r", "a", params)


def test_spellings_are_not_for_callers():
    params = SamplingParams(bad_words_spelled=SpelledWords([SpelledWord({}, [])], b""))
    with pytest.raises(InvalidRequestError, match="Use bad_words") as caught:
        processor().process("r", "a", params)
    assert caught.value.param == "bad_words_spelled"


def test_params_meet_the_servers_limits():
    with pytest.raises(InvalidRequestError, match="logprobs is above"):
        processor().process("r", "a", SamplingParams(logprobs=6))
    with pytest.raises(InvalidRequestError) as caught:
        processor().process("r", "a", SamplingParams(logit_bias={LIMITS.vocab_size: 1.0}))
    assert caught.value.param == "logit_bias"
    with pytest.raises(InvalidRequestError, match="sampling_params is a dict"):
        processor().process("r", "a", {"n": 1})


@pytest.mark.parametrize(
    ("priority", "request_id"), [(2**64, "r"), (True, "r"), (1.5, "r"), (0, ""), (0, "x\ud800"), (0, 5)]
)
def test_ids_and_priorities_the_engine_can_read(priority, request_id):
    with pytest.raises(InvalidRequestError):
        processor().process(request_id, "a", priority=priority)


def test_without_a_tokenizer():
    bare = InputProcessor(None, LIMITS, eos_token_ids=(3,))
    assert bare.process("r", [1, 2]).requests[0].stop_token_ids == [3]
    for prompt, params, param in (
        ("a", None, "prompt"),
        ([1], SamplingParams(stop=["a"]), "stop"),
        ([1], SamplingParams(bad_words=["a"]), "bad_words"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            bare.process("r", prompt, params)
        assert caught.value.param == param


def test_generation_config_gives_defaults():
    config = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "eos_token_id": 5, "do_sample": True, "min_p": None}
    defaults = sampling_defaults(config, {"top_p": 0.9})
    assert defaults == {"temperature": 0.6, "top_k": 20, "max_tokens": 7, "top_p": 0.9}
    params = processor(defaults=defaults).process("r", "a").sampling_params
    assert (params.temperature, params.max_tokens) == (0.6, 7)
    with pytest.raises(ConfigError, match=r"generation_config\.json has an illegal default"):
        sampling_defaults({"temperature": -1})
