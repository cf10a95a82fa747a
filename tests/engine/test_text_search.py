"""Drafts from text on the demo model: they hold where it repeats the text, and no token changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

import quire.demo
from quire.engine.core import EngineCore
from quire.sampling_params import SamplingParams
from quire.scheduler.from_settings import proposer_of
from quire.scheduler.proposer import Proposer
from quire.speculative_config import SpeculativeConfig, SpeculativeMethod
from tests.engine.harness import EOS, Prompt, Schedule, build_core, run
from tests.examples import IS_FULL

QUESTIONS = (
    "What does os.path.join do?",
    "What does itertools.chain do?",
    "Explain functools.lru_cache in Python.",
    "What does random.shuffle do?",
)
METHODS: tuple[SpeculativeMethod, ...] = ("ngram", "suffix")
MOST = 40  # tokens of an answer


def _encode(text: str) -> list[int]:
    return list(Tokenizer.from_file(str(quire.demo.path("target") / "tokenizer.json")).encode(text).ids)


def _params(temperature: float, seed: int = 5) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=MOST)


@cache
def questions() -> tuple[Prompt, ...]:
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    return tuple(Prompt(tuple(_encode(text)), _params(0.0)) for text in texts)


@cache
def answers() -> list[list[int]]:
    """Without the token that ends them."""
    found = run(build_core(Schedule(is_whole=True), "bfloat16"), questions())
    return [[token for token in answer if token != EOS] for answer in found]


def asked_again(temperature: float) -> list[Prompt]:
    """The answer stands in the prompt, and the same question behind it."""
    between = (EOS, *_encode("\n"))
    return [
        Prompt((*question.token_ids, *answer, *between, *question.token_ids), _params(temperature))
        for question, answer in zip(questions(), answers(), strict=True)
    ]


class Counted:
    """What a run gave, and in how many steps."""

    def __init__(self, core: EngineCore, prompts: Iterable[Prompt], preempt_every: int = 1000) -> None:
        self.num_steps, self._preempt_every = 0, preempt_every
        self.tokens = run(core, prompts, before_step=self._before_step)

    def _before_step(self, core: EngineCore, step: int) -> None:
        self.num_steps = step + 1
        if step % self._preempt_every == self._preempt_every - 1 and step < 60:
            while core.scheduler.num_running:
                core.scheduler.preempt_last()


def core_with(proposer: Proposer | None, **schedule: Any) -> EngineCore:
    return build_core(Schedule(is_whole=True, proposer=proposer, max_num_seqs=32, **schedule), "bfloat16")


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("method", METHODS)
def test_what_stands_in_the_prompt_is_said_again_in_fewer_steps(method: SpeculativeMethod, temperature: float) -> None:
    prompts = asked_again(temperature)
    plain, drafted = (
        Counted(core_with(None), prompts),
        Counted(core_with(proposer_of(SpeculativeConfig(method=method))), prompts),
    )
    assert drafted.tokens == plain.tokens
    assert drafted.num_steps < 0.5 * plain.num_steps, "the drafts do not hold"


def test_what_others_were_told_is_told_in_fewer_steps() -> None:
    """Also after a restart, when nothing is known yet."""
    core = core_with(proposer_of(SpeculativeConfig(method="suffix")))
    first, second = Counted(core, questions()), Counted(core, questions())
    assert first.tokens == second.tokens == run(core_with(None), questions())
    assert second.num_steps < 0.5 * first.num_steps, "the drafts do not hold"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_no_schedule_changes_a_token(method: SpeculativeMethod, temperature: float) -> None:
    """Siblings (n > 1), preemption, and little memory."""
    prompts = asked_again(temperature)
    siblings = [
        replace(prompt, params=_params(temperature, 6), fork_of=f"r{index}") for index, prompt in enumerate(prompts)
    ]
    prompts += siblings
    expected = Counted(core_with(None), prompts).tokens
    schedules: list[dict[str, Any]] = [
        *[{"num_blocks": 24}, {"depth": 2}, {"block_size": 8, "chunk": 17, "prefix_caching": True}]
    ]
    is_even = (method == "ngram") == (temperature == 0.0)
    for schedule in schedules if IS_FULL else schedules[:1] if is_even else schedules[1:]:
        core = core_with(proposer_of(SpeculativeConfig(method=method)), **schedule)
        assert Counted(core, prompts, preempt_every=7).tokens == expected
        core.shutdown()
