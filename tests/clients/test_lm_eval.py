"""lm-eval's local-completions: log-likelihoods and continuations equal transformers' for the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

import quire.demo
from tests.e2e import reference
from tests.e2e.serving import Serve

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# Sums of float32 logits that two programs computed, in nats.
TOLERANCE = 1e-3
PAIRS = [
    ("The function `os.path.", "join` joins path components."),
    ("`json.dumps(obj)`:", " serialize obj"),
    ("Hello", " world, hello"),
    ("how to sort", " a list of numbers in Python"),
]


@pytest.fixture(params=["huggingface", "remote"])
def lm(request: pytest.FixtureRequest, server: Serve) -> Any:
    module = pytest.importorskip("lm_eval.models.openai_completions", reason="make test-full installs it")
    is_remote = request.param == "remote"
    return module.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="quire-demo",
        tokenizer=None if is_remote else str(quire.demo.path()),
        tokenizer_backend=request.param,
        num_concurrent=1 if is_remote else 2,
        batch_size=1 if is_remote else 2,
    )


def _instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def _reference(context: str, continuation: str) -> tuple[float, bool]:
    """The sum over the continuation's tokens, and whether each is the most likely one."""
    encode = reference.tokenizer().encode
    start = len(encode(context))
    ids = encode(context) + encode(context + continuation)[start:]  # where lm-eval cuts, a token may span both
    logprobs = reference.logprobs(ids)
    total = sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids)))
    return total, all(int(logprobs[at - 1].argmax()) == ids[at] for at in range(start, len(ids)))


def test_loglikelihood(lm: Any) -> None:
    found = lm.loglikelihood(_instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (total, is_greedy), pair in zip(found, PAIRS, strict=True):
        expected, expected_greedy = _reference(*pair)
        assert total == pytest.approx(expected, abs=TOLERANCE), pair
        assert is_greedy == expected_greedy, pair


def test_generate_until(lm: Any) -> None:
    text = reference.TEXTS[0]
    options = {"max_gen_toks": 12, "until": ["\n"], "temperature": 0.0}
    (found,) = lm.generate_until(_instances("generate_until", [(text, options)]), disable_tqdm=True)
    expected = reference.tokenizer().decode(reference.greedy(text, 12), skip_special_tokens=True)
    assert found == expected.split("\n")[0]
