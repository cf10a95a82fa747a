"""Ranks that each sample some rows give the tokens and logprobs of one rank, to the bit.

Ranks are threads here, and processes in one test.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import quire.demo
from quire.engine.start import StartedEngine
from quire.grammar.text import grammar_text
from quire.kernels import cpu
from quire.messages import AddRequest, UseTokenizer
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.speculative_config import SpeculativeConfig
from tests.engine.harness import EOS, run, tokens_and_logprobs, two_layers
from tests.engine.ranks import fail_at, started
from tests.engine.test_rank_processes import in_processes
from tests.engine.test_sameness import brief

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
GRAMMAR = grammar_text(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
PROMPT = [5, 7, 9, 5, 7, 9, 5, 7]
FREE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 5, "top_k": 9, "min_p": 0.01, "presence_penalty": 0.4, "logprob_token_ids": [5, 7]},
    {"temperature": 1.0, "seed": 6, "logit_bias": {40: 5.0}, "min_tokens": 6, "logprobs": -1},
    {"temperature": 0.0, "allowed_token_ids": [5, 7], "frequency_penalty": 2.0, "presence_penalty": 2.0},  # drafts hold
    {"temperature": 0.0},
)
CONSTRAINED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "grammar": GRAMMAR, "presence_penalty": 0.5}
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_logprobs": -1}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)

Answer = dict[str, tuple[list[int], list[Any]]]


def answers(engine: StartedEngine, kinds: tuple[dict[str, Any], ...]) -> Answer:
    """Tokens and logprobs of requests of these kinds, which run together."""
    core = engine.core
    core.use_tokenizer(UseTokenizer((quire.demo.path("target") / "tokenizer.json").read_text(), [EOS]))
    for index, kind in enumerate(kinds):
        core.add(AddRequest(f"r{index}", PROMPT[index % 3 :], SamplingParams(**kind), 12, stop_token_ids=[EOS]))
    found = tokens_and_logprobs(core)
    core.shutdown()
    return found


KINDS = {"free": FREE, "constrained": (CONSTRAINED, *FREE[:3], CONSTRAINED | {"seed": 8}), "one": FREE[1:2]}


@cache
def expected(kinds: str) -> Answer:
    return answers(started(1, two_layers(), **LIMITS), KINDS[kinds])


@pytest.mark.parametrize(
    ("kinds", "num_ranks", "more"),
    [
        ("free", 2, {}),
        ("free", 3, {"async_scheduling": True}),
        ("free", 2, {"speculative_config": NGRAM}),
        ("free", 2, {"num_stages": 2}),
        ("constrained", 2, {}),
        ("constrained", 3, {"speculative_config": NGRAM}),
        ("one", 3, {}),
    ],
)
def test_sameness(kinds: str, num_ranks: int, more: dict[str, Any]) -> None:
    """With every option of a row; with drafts to verify; with stages; with fewer rows than ranks."""
    engine = started(num_ranks, two_layers(), **LIMITS | more, enable_batch_sharded_sampling=True)
    shares = [_note_rows(engine, rank) for rank in range(num_ranks)]
    assert answers(engine, KINDS[kinds]) == expected(kinds)
    counts = [sum(share) for share in shares]
    if kinds == "free":
        assert min(counts) > 0.6 * max(counts), "each samples its share"
    if kinds == "one":
        assert counts[1:] == [0, 0]


@cache
def of_one() -> list[list[int]]:
    return run(started(1, two_layers(), **LIMITS).core, brief())


def _note_rows(engine: StartedEngine, rank: int) -> list[int]:
    """The numbers of rows that this rank samples, in calls to come."""
    sampler, noted = engine.executor.workers[rank].runner.sampler, list[int]()  # type: ignore[attr-defined]
    choose = sampler.choose

    def note(logits_RV: torch.Tensor, *others: Any) -> Any:
        noted.append(len(logits_RV))
        return choose(logits_RV, *others)

    sampler.choose = note
    return noted


def test_processes() -> None:
    engine = in_processes(two_layers(), tensor_parallel_size=2, **LIMITS, enable_batch_sharded_sampling=True)
    assert answers(engine, KINDS["constrained"]) == expected("constrained")


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_sample_voids_the_step(rank: int, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of all stages compute it again: the tokens are the same as without a failure."""
    engine = started(2, two_layers(), num_stages=num_stages, **LIMITS, enable_batch_sharded_sampling=True)
    sampler = engine.executor.workers[rank].runner.sampler  # type: ignore[attr-defined]
    calls = fail_at(monkeypatch, sampler, "choose", 3, OSError("no numbers today"))
    assert run(engine.core, brief()) == of_one()
    assert len(calls) > 3
    engine.core.shutdown()


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_fails_is_known_to_all_ranks(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are not numbers end one request, with the reason, whichever rank samples it."""
    engine = started(2, two_layers(), **LIMITS, enable_batch_sharded_sampling=True)
    core, runner = engine.core, engine.executor.workers[row].runner  # type: ignore[attr-defined]
    choose, calls = runner.sampler.choose, list[int]()

    def spoil(logits_RV: torch.Tensor, *others: Any) -> Any:
        calls.append(len(logits_RV))
        if len(calls) == 6:
            logits_RV[0] = torch.nan
        return choose(logits_RV, *others)

    monkeypatch.setattr(runner.sampler, "choose", spoil)
    errors, tokens = {}, dict[str, list[int]]()
    for index in range(4):
        core.add(AddRequest(f"r{index}", PROMPT, SamplingParams(temperature=1.0, seed=index), 12, stop_token_ids=[]))
    while core.has_work():
        for delta in core.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.error is not None:
                errors[delta.request_id] = str(delta.error)
    assert list(errors) == [f"r{row}"]
    assert "not numbers (NaN)" in errors[f"r{row}"]
    assert {name: len(found) for name, found in tokens.items()} == {
        f"r{index}": 5 if index == row else 12 for index in range(4)
    }
    core.shutdown()
