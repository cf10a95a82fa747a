"""Without a target, a shared step takes more prompt tokens while prompts are slowed down more than answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.messages import SetLimits
from quire.request import Request
from quire.sampling_params import SamplingParams
from quire.scheduler.limits import StepRoom
from quire.scheduler.pace import seconds_to_spare
from tests.guesser import Guesser
from tests.scheduler.driver import TimedDriver, request
from tests.scheduler.test_sameness import mixed
from tests.scheduler.test_slo import TOKEN_SECONDS, Timed, cost, rows

TOKEN, PROMPT_TOKEN = 0.1, 0.01  # seconds alone
MOST_TIMES = 8.0
SHARED, LENGTH = 16, 3000


class Linear:
    """Time in proportion to tokens."""

    def room_within(
        self, seconds: float, attainment: float, starts: Sequence[int], counts: Sequence[int], num_logits: int
    ) -> StepRoom:
        raise AssertionError("no question of these tests")

    def seconds_alone(self, start: int, count: int) -> float:
        return TOKEN if count == 1 else PROMPT_TOKEN * count

    def tokens_beside(self, num_answers: int, context: int, times: float, most: int) -> int:
        raise AssertionError("no question of these tests")


def made(num_prompt: int, num_output: int = 0, computed: int = 0, first_token_time: float | None = None) -> Request:
    made = Request("", [0] * num_prompt, SamplingParams(), 1000, frozenset())
    made.output_token_ids, made.num_computed_tokens = [0] * num_output, computed
    made.first_token_time, made.num_untimed_tokens = first_token_time, 1
    return made


def spare(answers: list[Request], prompts: list[Request], waited: float, queued: tuple[int, int] = (0, 0)) -> float:
    return seconds_to_spare(100.0, answers, prompts, *queued, 100.0 - waited, MOST_TIMES, Linear())


def test_a_new_answer_is_slowed_down_as_much_as_the_prompt() -> None:
    """A prompt that lacks a half after twice its time alone takes 2.5 times that in all."""
    new = made(10, 1, 10, first_token_time=100.0)
    assert spare([new], [made(200, computed=100)], waited=4.0) == pytest.approx(2.5 * TOKEN)


def test_waiting_prompts_count() -> None:
    new = made(10, 1, 10, first_token_time=100.0)
    assert spare([new], [], 0.0, (600, 3)) == pytest.approx(3 * TOKEN)
    assert spare([new], [made(200, computed=200)], 0.0, (600, 3)) == pytest.approx(3 * TOKEN)


def test_a_cached_prefix_is_no_part_of_a_prompt() -> None:
    """A chat lacks 50 of 10,000 tokens. After twice their time alone it is slowed down three times, wherever it is."""
    new, chat = made(10, 1, 10, first_token_time=100.0), made(10_000, computed=9950)
    chat.num_reused_tokens = 9950
    assert spare([new], [], 1.0, (50, 1)) == pytest.approx(3 * TOKEN)
    assert spare([new], [chat], 1.0) == pytest.approx(3 * TOKEN)


def test_answers_that_were_fast_have_time_and_slow_ones_have_none() -> None:
    """After 19 further tokens the 20th one may come when 20 tokens at twice the time alone are over."""
    fast, slow = (made(10, 20, 30, first_token_time=100.0 - seconds) for seconds in (1.9, 5.0))
    prompts = [made(200)]
    assert spare([fast], prompts, 2.0) == pytest.approx(20 * 2 * TOKEN - 1.9)
    assert spare([slow], prompts, 2.0) == pytest.approx(20 * 2 * TOKEN - 5.0)
    assert spare([fast, slow], prompts, 2.0) == pytest.approx(20 * 2 * TOKEN - 3.45), "on average"


def test_tokens_of_another_engine_have_no_time() -> None:
    answer = made(10, 50, 60, first_token_time=100.0)
    answer.num_untimed_tokens = 50
    assert spare([answer], [made(200)], 2.0) == pytest.approx(2 * TOKEN)


def test_no_wait_of_prompts_slows_answers_down_without_end() -> None:
    new = made(10, 1, 10, first_token_time=100.0)
    assert spare([new], [made(200)], 1000.0) == pytest.approx(MOST_TIMES * TOKEN)
    assert spare([new], [], 0.0, (200_000, 1000)) == pytest.approx(MOST_TIMES * TOKEN)


def beside_an_answer(**arguments: Any) -> Timed:
    """An answer that has had 20 tokens alone, and a long prompt that has just come."""
    plain: dict[str, Any] = {"max_shared_prefill_tokens": SHARED, "most_answer_times": MOST_TIMES}
    run = Timed(**(plain | arguments))
    run.add(request("answer", range(20), max_tokens=2000))
    for _ in range(20):
        run.step()
    run.add(request("long", range(LENGTH), max_tokens=1))
    return run


def test_prompt_and_answer_are_slowed_down_alike() -> None:
    run, known = beside_an_answer(), cost()
    came, counts = run.now, []
    while not run.tokens("long"):
        run.step()
        counts.append(rows(run)["long"])
    assert counts[0] == SHARED, "nobody has waited yet"
    assert max(counts) > 4 * SHARED
    of_prompt = (run.now - came) / known.seconds_alone(0, LENGTH)
    of_answer = run.now / len(run.tokens("answer")) / known.seconds_alone(50, 1)
    assert of_prompt == pytest.approx(of_answer, rel=0.1)


@pytest.mark.parametrize("arguments", [{"most_answer_times": 0.0}, {"slo_itl": 1e-3}])
def test_a_number_or_a_target_that_is_given_holds(arguments: dict[str, float]) -> None:
    run = beside_an_answer(**arguments)
    for _ in range(3):
        run.step()
        assert rows(run) == {"answer": 1, "long": SHARED}


def test_a_number_that_is_given_while_serving_holds() -> None:
    run = beside_an_answer()
    run.core.set_limits(SetLimits(max_shared_prefill_tokens=5))
    run.step()
    assert rows(run) == {"answer": 1, "long": 5}


def test_prompts_without_answers_have_the_whole_step() -> None:
    run = Timed(max_shared_prefill_tokens=SHARED, most_answer_times=MOST_TIMES, max_num_batched_tokens=256)
    for name in ("one", "other"):
        run.add(request(name, range(600), max_tokens=2))
    run.step()
    assert sum(rows(run).values()) == 256


def test_a_slow_machine_has_fewer_tokens_in_any_case() -> None:
    """The least number makes a step twice as long as a few answers, by predicted times."""
    run, known = beside_an_answer(max_shared_prefill_tokens=512, max_num_batched_tokens=1024), cost()
    run.step()
    count = rows(run)["long"]
    assert count == known.tokens_beside(8, 1024, 2, 512)
    answers = known.arithmetic.load([1023] * 8, [1] * 8, 8)
    times = [
        known.predict(known.arithmetic.with_row(answers, 0, each, 1)).seconds / known.predict(answers).seconds
        for each in (count, count + 1)
    ]
    assert 16 < count < 512
    assert times[0] <= 2 < times[1]


def test_a_flood_of_long_prompts_starves_nobody() -> None:
    """Prompts come three times as fast as they can be computed. Beside them an answer is never slowed down more than
    it may be, and prompts progress.
    """
    run, known = beside_an_answer(max_num_batched_tokens=512), cost()
    num_sent, worst = 0, 0.0
    while len(run.live()) > 1:
        if num_sent < 60 and run.now > num_sent * known.seconds_alone(0, LENGTH) / 3:
            run.add(request(f"long{num_sent}", [num_sent % 50] * LENGTH, max_tokens=1))
            num_sent += 1
        run.step()
        assert len(rows(run)) > 1, "no prompt had a token"
        assert "answer" in rows(run)
        worst = max(worst, run.now / len(run.tokens("answer")))
    assert num_sent == 60
    assert MOST_TIMES / 2 < worst / known.seconds_alone(320, 1) < 1.1 * MOST_TIMES


def test_a_chat_that_goes_on_reuses_its_prefix() -> None:
    run = beside_an_answer(enable_prefix_caching=True)
    while run.tokens("long") == []:
        run.step()
    run.add(request("chat", [*range(LENGTH), *range(500)], max_tokens=1))
    run.step()
    chat = run.live()[-1]
    assert 0 < LENGTH - chat.num_reused_tokens < 32, "all of its whole blocks"
    assert chat.num_computed_tokens - chat.num_reused_tokens == rows(run)["chat"] > 0


def test_what_a_preempted_answer_had_is_no_wait() -> None:
    """It has been answered for long when it comes back into the queue, where its wait begins."""
    run = beside_an_answer()
    while len(run.tokens("answer")) < 300:
        run.step()
    run.add(request("other", range(400), max_tokens=2000))
    while len(run.tokens("other")) < 300:
        run.step()
    other, preempted = run.live()[-1], run.now
    run.scheduler.preempt_last()
    run.step()
    assert rows(run) == {"answer": 1, "other": SHARED}
    assert other.queued_time == preempted
    while len(run.tokens("other")) < 301:
        run.step()
    assert other.first_token_time is not None
    assert other.first_token_time > preempted


def test_a_step_with_a_drafter_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = beside_an_answer()
    while (count := rows(run).get("long", 0)) < 4 * SHARED:
        run.step()
    seconds = 2 * SHARED * TOKEN_SECONDS
    monkeypatch.setattr(run.scheduler.speculation, "drafter_seconds", lambda batch: seconds)
    run.step()
    assert SHARED < rows(run)["long"] < count - SHARED
    monkeypatch.setattr(run.scheduler.speculation, "drafter_seconds", lambda batch: 1.0)
    run.step()
    assert rows(run)["long"] == SHARED


def test_a_step_that_can_have_no_prompt_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = beside_an_answer(max_num_seqs=1)
    asked: list[Any] = []
    monkeypatch.setattr("quire.scheduler.scheduler.seconds_to_spare", lambda *given: asked.append(given))
    run.step()
    assert rows(run) == {"answer": 1}
    assert not asked


@pytest.mark.parametrize(
    "arguments", [{}, {"depth": 2}, {"num_blocks": 12}, {"proposer": Guesser(0.6)}], ids=["", "depth", "few", "drafts"]
)
def test_every_request_has_its_tokens(arguments: dict[str, Any]) -> None:
    """With common beginnings, forks, and where blocks are few, preemption."""
    TimedDriver(cost(), max_shared_prefill_tokens=5, most_answer_times=MOST_TIMES, **arguments).run_all(*mixed())
