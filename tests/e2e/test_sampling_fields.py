"""All sampling fields together, at their bounds and beyond, against a real engine: an answer or a 400, never a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.errors import InvalidRequestError
from quire.server.protocol.common import SAMPLING_FIELDS
from tests.e2e import reference
from tests.e2e.serving import SMALL, Serve
from tests.examples import examples

EOS = reference.tokenizer().eos_token_id
# Few, so that lists overlap: allowed, forbidden, ending and reported tokens are often the same.
TOKENS = [EOS, 67, 71, 292]
WORDS = ["a", "e", "the", "aa", "ea", "the a"]
token_ids = st.lists(st.sampled_from(TOKENS), max_size=3)
tiny_and_large = st.sampled_from([5e-324, 1e-46, 1e-40, 1e-38, 1e-30, 1e-9, 1e-3, 0.01, 0.5, 1.0, 1.5, 2.0, 100.0])
numbers = tiny_and_large | tiny_and_large.map(lambda number: -number) | st.just(0)
counts = st.integers(-1, 6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 2),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), numbers),
    **dict.fromkeys(("temperature", "top_p", "min_p"), numbers),
    "top_k": st.sampled_from([-1, 0, 1, 2, 2**31 - 1]),
    "seed": st.sampled_from([-(2**63), -1, 0, 2**63 - 1]),
    "stop": st.lists(st.sampled_from(WORDS), max_size=2),
    "stop_token_ids": token_ids,
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 6),
    "prompt_logprobs": counts,
    "logprob_token_ids": token_ids,
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "stream_interval": st.integers(0, 3),
    "logit_bias": st.dictionaries(st.sampled_from([str(token) for token in TOKENS]), numbers, max_size=3),
    "allowed_token_ids": token_ids,
    "bad_words": st.lists(st.sampled_from(WORDS), max_size=4),
}
bodies = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["a", "the a e"]), "max_tokens": st.integers(1, 6)},
    optional={**VALUES, "logprobs": counts, "echo": st.booleans(), "stream": st.booleans()},
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve(*SMALL) as server:
        yield server


def test_no_sampling_field_is_forgotten() -> None:
    assert set(VALUES) == set(SAMPLING_FIELDS)


def test_what_leaves_no_token_is_refused_by_the_python_api_too(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no token is left"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(allowed_token_ids=[EOS], min_tokens=2)])


@settings(max_examples=examples(120), derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@example({"prompt": "a", "repetition_penalty": 1e-40})
@example({"prompt": "a", "repetition_penalty": 1e-38, "temperature": 0})
@example({"prompt": "a", "allowed_token_ids": [EOS], "min_tokens": 2})
@example({"prompt": "a", "allowed_token_ids": [67], "stop_token_ids": [67], "min_tokens": 2})
@example({"prompt": "a", "allowed_token_ids": [67], "bad_words": ["a"]})
@example({"prompt": "a", "allowed_token_ids": [67], "bad_words": ["aa"], "ignore_eos": True})
@example({"prompt": "a", "top_p": 5e-324, "temperature": 1})
@given(bodies)
def test_no_sampling_fields_fail_together(server: Serve, body: dict[str, Any]) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 5, **body}, timeout=60)
    if response.status_code != 200:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] in body, response.text
    assert "internal_error" not in response.text
