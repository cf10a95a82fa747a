"""A request goes on in another engine after the tokens that its first engine gave: the same tokens and logprobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from quire.engine.core import EngineCore
from quire.messages import AddRequest
from quire.spec_decode.ngram import NgramProposer
from tests.engine import test_jump_forward as forced
from tests.engine.harness import EOS, Schedule, build_core, demo_draft
from tests.engine.test_draft_model import ByWorker
from tests.engine.test_drafts import KINDS, MOST, params
from tests.engine.test_drafts import expected as expected_kind
from tests.engine.test_sameness import prompts

CUTS = (1, 2, 7, 19)  # steps of the first engine
DRAFTING: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "ngram": lambda: {"proposer": NgramProposer(1, 3)},
    "draft model": lambda: {"proposer": ByWorker(), "draft": demo_draft()},
}


@dataclass
class Given:
    """What a request got from both engines."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None


def run_over_two(
    new_core: Callable[[], EngineCore], messages: Sequence[AddRequest], num_steps: int
) -> dict[str, Given]:
    """The first engine is lost after `num_steps` steps. The second one gets what the front end knows then."""
    given = {message.request_id: Given() for message in messages}

    def step(core: EngineCore) -> None:
        for delta in core.step():
            assert delta.error is None, delta.error
            answer = given[delta.request_id]
            assert answer.finish_reason is None
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs or []
            assert delta.prompt_logprobs is None or answer.prompt_logprobs is None, "given twice"
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
            answer.finish_reason = delta.finish_reason

    first = new_core()
    for message in messages:
        first.add(message)
    for _ in range(num_steps):
        step(first)
    first.shutdown()

    second = new_core()
    for message in messages:
        answer = given[message.request_id]
        if answer.finish_reason is None:
            second.add(structs.replace(message, output_token_ids=list(answer.tokens), is_retry=True))
    while second.has_work():
        step(second)
    assert not hasattr(second.scheduler, "kv") or second.scheduler.kv.pool.num_used_blocks == 0
    second.shutdown()
    return given


@pytest.mark.parametrize(("drafting", "cut", "depth"), [
    ("none", 1, 1), ("none", 2, 2), ("none", 7, 1), ("none", 19, 2),
    ("ngram", 2, 1), ("ngram", 7, 2), ("draft model", 2, 1), ("draft model", 7, 1),
])  # fmt: skip
def test_every_kind_of_sampling(drafting: str, cut: int, depth: int) -> None:
    messages = [
        AddRequest(
            name,
            list(prompts()[4].token_ids),
            params()[name],
            MOST,
            stop_token_ids=[EOS, *(params()[name].stop_token_ids or [])],
            fork_of="random" if name == "sibling" else None,
        )
        for name in KINDS
    ]
    schedule = Schedule(max_num_seqs=len(KINDS), prefix_caching=True, depth=depth, **DRAFTING[drafting]())
    given = run_over_two(lambda: build_core(schedule, "bfloat16"), messages, cut)
    for name, answer in given.items():
        found = answer.tokens, answer.logprobs, answer.prompt_logprobs, answer.finish_reason
        assert found == expected_kind(name), name


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("cut", CUTS)
def test_grammars(cut: int, drafter: str) -> None:
    """Also where the grammar has forced tokens."""
    messages = [
        AddRequest(
            f"r{index}", list(each.token_ids), each.params, each.params.max_tokens or 0, [EOS], fork_of=each.fork_of
        )
        for index, each in enumerate(forced.prompts())
    ]
    schedule = forced.schedule_for(drafter, depth=2 if cut % 2 else 1)
    given = run_over_two(lambda: forced.core_of(schedule), messages, cut)
    assert [answer.tokens for answer in given.values()] == forced.expected(drafter)
