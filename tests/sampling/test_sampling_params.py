"""The one validator: every field, every kind of poison. A value is accepted as documented or refused by name."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequestError, UnsupportedFieldError
from quire.sampling_params import (
    REMOVED_FIELDS,
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)
from tests.examples import examples

FIELDS = SamplingParams.__struct_fields__


class Strange:
    """A value whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("do not print me")


POISON: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    1,
    -0.0,
    5e-324,
    1.5,
    -(2**63),
    2**31,
    2**63,
    -(2**63) - 1,
    2**64,
    10**5000,
    1e308,
    1e400,
    True,
    False,
    "",
    "1",
    "nan",
    "\ud800",
    "a" * 100_000,
    b"x",
    None,
    [],
    [None],
    [1, 1],
    [-1],
    [2**63],
    [True],
    [1.5],
    ["1"],
    [""],
    ["\ud800"],
    ["a"] * 10_000,
    ["a" * 100_000],
    [str(i) for i in range(10_000)],
    [[1]],
    [[]],
    [[[]]],
    [[-1]],
    [[2**70]],
    list(range(200_000)),
    {},
    {"1": 1},
    {1: math.nan},
    {1: math.inf},
    {1: "x"},
    {1: True},
    {"x": 1},
    {"-1": 1},
    {2**70: 1},
    {None: 1},
    {1.5: 1},
    dict.fromkeys(range(10_000), 1.0),
    {1: 1, "1": 2},
    (1, 2),
    {1, 2},
    range(3),
    1j,
    object(),
    Strange(),
    [Strange()],
    {1: Strange()},
    np.float32(0.5),
    np.int64(1),
    np.bool_(True),
    np.array([1, 2]),
    np.float64("nan"),
    StructuredOutputsParams(regex="(a+)+b"),
    RequestOutputKind.DELTA,
]


@pytest.mark.parametrize("field", FIELDS)
def test_poison_is_accepted_or_refused_by_name(field: str) -> None:
    for value in POISON:
        for build in (SamplingParams, SamplingParams.from_optional):
            error = None
            try:
                params = build(**{field: value})
                params.verify(vocab_size=1000)
            except InvalidRequestError as caught:
                error = caught
            if error is None:
                # Accepted parameters reach the engine process unchanged.
                assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params, field
            else:
                assert error.param in (field, "min_tokens"), f"{field}: {error} names {error.param}"
                assert len(error.message) < 600, f"{field}: message of {len(error.message)} characters"
                assert error.status == 400


def accepted(field: str, value: Any) -> Any:
    return getattr(SamplingParams(**{field: value}), field)


def refused(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields).verify(vocab_size=1000)
    return caught.value


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", [1, 128], [0, -1, 129, 1.0, True, None, "1", 2**63]),
        ("temperature", [0, 0.01, 1, 2.0], [-0.001, 2.001, math.nan, math.inf, True, None, "1"]),
        ("top_p", [1e-9, 0.5, 1], [0, -0.5, 1.0001, math.nan, math.inf, None, True]),
        ("top_k", [0, 1, 50, 2**31 - 1], [-2, 1.5, True, None, "5", 2**63]),
        ("min_p", [0, 0.1, 1], [-0.1, 1.1, math.nan, None]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan, -math.inf, None]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, math.nan, -math.inf, None]),
        ("repetition_penalty", [0.01, 1, 1.3, 100], [0, 1e-40, 1e-38, 0.009, -1, 100.1, math.nan, math.inf, None]),
        ("seed", [None, 0, 1, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True, "1"]),
        ("max_tokens", [None, 1, 2**31 - 1], [0, -1, 2**31, 1.5, True, "1"]),
        ("min_tokens", [0, 16], [-1, 17, 1.5, True, None, "1"]),
        ("logprobs", [None, 0, 20], [-2, 21, -1, 1.5, "1"]),
        ("prompt_logprobs", [None, 0, 20], [-2, 21, -1, 1.5, "1"]),
        ("stream_interval", [None, 1, 100], [0, -1, 1.5, True]),
        ("stop_token_ids", [[], [0], list(range(128))], [[1000], [-1], list(range(129)), [True], ["1"], 1, "1"]),
        ("allowed_token_ids", [None, [0], list(range(1000))], [[], [1000], [-1], [1.5], 1]),
        ("logprob_token_ids", [None, [0], list(range(128))], [[1000], [-1], list(range(129))]),
        (
            "logit_bias",
            [None, {}, {0: 100.0}, {999: -100.0}],
            [{1000: 1}, {-1: 1}, {0: 101}, {0: math.nan}, {0: None}, [1], "x"],
        ),
        ("bad_words", [["a"], ["é" * 128]], [["é" * 129], [""], [1], 1, [str(i) for i in range(129)]]),
        ("bad_words_token_ids", [None, [], [[1], [1, 2]]], [[[]], [[1000]], [1], [[-1]], [[1]] * 257, [[1] * 513]]),
        ("ignore_eos", [True, False], [0, 1, None, "true"]),
        ("detokenize", [True, False], [0, 1, None, "true"]),
        ("skip_special_tokens", [True, False], [0, 1, None, "true"]),
        ("spaces_between_special_tokens", [True, False], [0, 1, None]),
        ("include_stop_str_in_output", [True, False], [0, 1, None]),
        ("skip_clone", [True, False], [0, 1, None]),
        ("skip_reading_prefix_cache", [True, False], [0, 1, "true"]),
        ("output_kind", list(RequestOutputKind), [0, 1, None, "DELTA"]),
    ],
)
def test_legal_range_of_each_field(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        params = SamplingParams(**{field: value})
        params.verify(vocab_size=1000)
        assert getattr(params, field) == value, f"{field}={value!r} was changed"
    for value in bad:
        assert refused(**{field: value}).param == field, f"{field}={value!r}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watermarking", {"key": 1}),
        ("extra_args", {"a": 1}),
        ("repetition_detection", {"min_count": 2}),
        ("routed_experts_prompt_start", 1),
        ("trace_decode_token_ids", [1]),
        ("prompt_logprob_token_ids", [1]),
        ("prompt_logprob_start", 1),
        ("flat_logprobs", True),
    ],
)
def test_what_is_not_implemented_is_refused_not_ignored(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedFieldError, match="not supported yet") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("name", REMOVED_FIELDS)
def test_removed_fields_name_the_replacement(name: str) -> None:
    for build in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(UnsupportedFieldError) as caught:
            build(**{name: 1})
        assert caught.value.param == name
        assert REMOVED_FIELDS[name] in str(caught.value)


def test_unknown_field_suggests_the_close_one() -> None:
    with pytest.raises(UnsupportedFieldError, match="The nearest name is temperature") as caught:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert caught.value.param == "temprature"


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    expected = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "watermarking": None,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "prompt_logprob_token_ids": None,
        "prompt_logprob_start": None,
        "logprob_token_ids": None,
        "flat_logprobs": False,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "stream_interval": None,
        "skip_clone": False,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "extra_args": None,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
        "thinking_token_budget": None,
        "thinking_token_ids": None,
        "repetition_detection": None,
        "routed_experts_prompt_start": 0,
        "trace_decode_token_ids": None,
        "bad_words_token_ids": None,
        "bad_words_spelled": None,
        "grammar": None,
    }
    assert {name: getattr(params, name) for name in FIELDS} == expected


def test_normalisation() -> None:
    assert accepted("stop", "x") == ["x"]
    assert accepted("stop", ("x", "y", "x")) == ["x", "y"]
    assert accepted("stop_token_ids", (3, 3, 1)) == [3, 1]
    assert accepted("allowed_token_ids", range(3)) == [0, 1, 2]
    assert accepted("temperature", 1e-9) == accepted("temperature", 0.005) == 0.01
    assert accepted("temperature", np.float32(0.5)) == 0.5
    assert accepted("top_k", -1) == 0
    assert accepted("seed", -1) is None
    assert accepted("seed", np.int64(7)) == 7
    assert accepted("logit_bias", {"5": 1}) == {5: 1.0}
    assert accepted("prompt_logprobs", True) == 1
    assert accepted("prompt_logprobs", False) is None
    assert accepted("thinking_token_budget", -1) is None
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.5)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert type(greedy.temperature) is float
    assert [SamplingParams(temperature=t, seed=s).sampling_type for t, s in ((0, 1), (1, None), (1, 0))] == list(
        SamplingType
    )


def test_from_optional_drops_nulls() -> None:
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_k=None, stop=None, max_tokens=None, logit_bias=None
    )
    assert (params.n, params.temperature, params.top_k, params.max_tokens) == (1, 1.0, 0, None)


def test_combinations() -> None:
    assert refused(min_tokens=5, max_tokens=4).param == "min_tokens"
    SamplingParams(min_tokens=10**6, max_tokens=None)
    assert refused(stop=["x"], detokenize=False).param == "stop"
    assert refused(logprobs=3, logprob_token_ids=[1]).param == "logprob_token_ids"
    assert SamplingParams(logprob_token_ids=[1, 2]).num_logprobs == 2
    assert SamplingParams(logprobs=2, logprob_token_ids=[1, 2]).num_logprobs == 2


def test_stop_limits_count_bytes() -> None:
    SamplingParams(stop=[str(i) for i in range(16)])
    assert refused(stop=[str(i) for i in range(17)]).param == "stop"
    SamplingParams(stop="é" * 128)
    assert refused(stop="é" * 129).param == "stop"
    assert refused(stop=["ok", ""]).param == "stop"


def test_logprobs_limit_belongs_to_the_server() -> None:
    for field in ("logprobs", "prompt_logprobs"):
        params = SamplingParams(**{field: 50})
        with pytest.raises(InvalidRequestError, match="--max-logprobs"):
            params.verify(vocab_size=1000)
        params.verify(vocab_size=1000, max_logprobs=50)
        everything = SamplingParams(**{field: -1})
        everything.verify(vocab_size=1000, max_logprobs=-1)
        everything.verify(vocab_size=10, max_logprobs=20)
        with pytest.raises(InvalidRequestError):
            everything.verify(vocab_size=1000, max_logprobs=20)


def test_verify_sees_what_was_changed_after_construction() -> None:
    params = SamplingParams()
    params.temperature = math.nan
    with pytest.raises(InvalidRequestError):
        params.verify()


def test_clone_and_continuations() -> None:
    params = SamplingParams(n=3, seed=5, stop=["x"], logit_bias={1: 2.0})
    copied = params.clone()
    assert copied == params
    assert copied is not params
    copied.stop.append("y")  # type: ignore[union-attr]
    assert params.stop == ["x"]
    reused = SamplingParams(skip_clone=True)
    assert reused.clone() is reused
    children = [params.continuation(i) for i in range(3)]
    assert [child.n for child in children] == [1, 1, 1]
    assert len({child.seed for child in children}) == 3
    assert SamplingParams(n=2).continuation(1).seed is None
    for seed in (-3, -2, 2**63 - 1):
        assert SamplingParams(n=9, seed=seed).continuation(1).seed not in (None, -1)


def test_params_survive_pickle_and_are_not_shared() -> None:
    params = SamplingParams(stop="x", temperature=0.5)
    assert pickle.loads(pickle.dumps(params)) == params  # user code with multiprocessing; Quire itself never unpickles
    assert SamplingParams().stop is not SamplingParams().stop


def test_guided_decoding_is_taken_as_structured_outputs(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(guided_decoding=GuidedDecodingParams(json={"type": "object"}, backend="outlines"))
    assert params.structured_outputs is not None
    assert params.structured_outputs.kind == "json"
    assert "backend has no effect" in caplog.text
    assert SamplingParams(guided_decoding=None).structured_outputs is None
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(
            guided_decoding=GuidedDecodingParams(regex="a"), structured_outputs=StructuredOutputsParams(regex="b")
        )
    assert caught.value.param == "guided_decoding"
    with pytest.raises(InvalidRequestError, match="exactly one"):
        GuidedDecodingParams(regex="a", choice=["b"])


def test_beam_search_params() -> None:
    assert BeamSearchParams(beam_width=4, max_tokens=8).length_penalty == 1.0
    for fields in (
        {"beam_width": 0},
        {"beam_width": True},
        {"max_tokens": 0},
        {"temperature": math.nan},
        {"length_penalty": math.inf},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **fields})  # type: ignore[arg-type]
        assert caught.value.param in fields
    with pytest.raises(UnsupportedFieldError):
        BeamSearchParams(beam_width=2, max_tokens=2, structured_outputs=StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * 1_000_000),
        ("stop_token_ids", range(1_000_000)),
        ("logit_bias", dict.fromkeys(range(1_000_000), 1)),
        ("bad_words", ["a" * 1000] * 100_000),
        ("bad_words_token_ids", [[1]] * 1_000_000),
        ("allowed_token_ids", [0] * 2_000_000),
    ],
)
def test_what_is_too_long_is_refused_by_its_count(field: str, value: Any) -> None:
    error = refused(**{field: value})
    assert "too many entries" in error.message
    assert str(len(value)) in error.message


def test_no_torch_and_no_numpy() -> None:
    code = "import sys, quire.sampling_params; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=20)
    ),
    max_leaves=30,
)


@settings(max_examples=examples(120))
@given(fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=6))
def test_any_json_is_accepted_or_refused(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_optional(**fields)
        params.verify(vocab_size=1000)
    except InvalidRequestError:
        return
    assert 0.0 <= params.temperature <= 2.0
    assert 0.0 < params.top_p <= 1.0
    assert 0 <= params.top_k < 2**31
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    assert isinstance(params.stop, list)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
