"""An error, an interrupt or a failing request leaves nothing behind in an LLM, and the next call works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.entry.interrupt import interrupts_between_steps
from quire.errors import InvalidRequestError, QuireError
from quire.schedule import Pending, RowsFailedError, ScheduledBatch, StepResult
from tests.e2e import reference
from tests.e2e.conftest import check_is_empty

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = list(reference.prompts())


@pytest.fixture(autouse=True)
def default_interrupts() -> Iterator[None]:
    """A script that runs the tests in its background leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _check_answers(llm: LLM) -> None:
    check_is_empty(llm)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(text, 12) for text in PROMPTS]


class _Runner:
    """The model runner, with something happening at its third step."""

    def __init__(self, runner: Any, event: Any) -> None:
        self._runner, self._event = runner, event
        self._num_begun = self.num_ended = 0

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]:
        self._num_begun += 1
        if self._num_begun == 3:
            self._event(batch)
        pending: Pending[StepResult] = self._runner.submit(batch)
        self.num_ended += 1
        return pending


def _at_third_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, event: Any) -> _Runner:
    executor: Any = llm.llm_engine.core.executor
    worker = executor.workers[0]
    runner = _Runner(worker.runner, event)
    monkeypatch.setattr(worker, "runner", runner)
    return runner


def test_a_refused_prompt_starts_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate([PROMPTS[0], [1, 2, 99_999]], GREEDY)
    _check_answers(llm)


def test_arguments_of_other_types_are_refused_in_words(llm: LLM) -> None:
    """No error of Python's comes out of the middle of Quire."""
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequestError, match="Prompt 0 has the wrong type, ndarray"):
        llm.generate([np.array([1, 2])], GREEDY)  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="sampling_params is a generator"):
        llm.generate(["a", "b"], (GREEDY for _ in range(2)))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="messages contains a value of type generator"):
        llm.chat((chat for _ in range(2)), GREEDY)  # type: ignore[arg-type]
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=2)) == llm.generate([], GREEDY) == []
    _check_answers(llm)


def test_interrupt_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: the step ends first."""
    runner = _at_third_step(llm, monkeypatch, lambda batch: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert runner.num_ended == 3
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _check_answers(llm)


def test_second_interrupt_does_not_wait() -> None:
    reached = []

    def step() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")

    with pytest.raises(KeyboardInterrupt), interrupts_between_steps():
        step()
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_of_enqueued_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.enqueue(PROMPTS, GREEDY)
    _at_third_step(llm, monkeypatch, lambda batch: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    monkeypatch.undo()
    assert llm.wait_for_completion(use_tqdm=False) == []
    _check_answers(llm)


def test_a_hostile_chat_template_spends_nothing_of_this_process(llm: LLM) -> None:
    """It is rendered where the system bounds it, and the next conversation is answered."""
    chat = [{"role": "user", "content": "Hi"}]
    template = "{{ '%*d' % (messages | length * 9000000000, 1) }}"
    with pytest.raises(InvalidRequestError, match="MemoryError"):
        llm.chat(chat, GREEDY, use_tqdm=False, chat_template=template)
    first, second = llm.chat([chat, chat], GREEDY, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match="written as JSON"):
        llm.chat([{"role": "user", "content": "\ud800"}], GREEDY, use_tqdm=False)
    _check_answers(llm)


def test_generate_in_another_thread(llm: LLM) -> None:
    """Signals belong to the main thread; elsewhere generate() leaves them alone."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate(PROMPTS, GREEDY, use_tqdm=False)))
    thread.start()
    thread.join(30)
    assert [output.outputs[0].token_ids for output in results] == [reference.greedy(text, 12) for text in PROMPTS]


def test_one_failing_request_does_not_take_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_one(batch: ScheduledBatch) -> None:
        raise RowsFailedError([batch.request_ids[1]], "this row is broken")

    _at_third_step(llm, monkeypatch, fail_one)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error is not None
    assert "this row is broken" in outputs[1].error
    assert "this row is broken" in caplog.text
    for output, text in zip(outputs, PROMPTS, strict=True):
        if output is not outputs[1]:
            assert output.outputs[0].token_ids == reference.greedy(text, 12)
    _check_answers(llm)


def test_a_step_that_fails_for_all_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: ScheduledBatch) -> None:
        raise RuntimeError("a bug")

    executor: Any = llm.llm_engine.core.executor
    monkeypatch.setattr(executor.workers[0].runner, "submit", fail)
    with pytest.raises(QuireError, match="RuntimeError"):
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    _check_answers(llm)
