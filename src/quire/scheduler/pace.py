"""How long a step may take where no target is given: prompts and answers are slowed down alike."""

from __future__ import annotations

from collections.abc import Sequence

from quire.planning.step_sizes import SHARED_ANSWERS, SHARED_CONTEXT, SHARED_TIMES
from quire.request import Request
from quire.scheduler.limits import LEAST_PROMPT_TOKENS, Predicts
from quire.scheduler.progress import num_lacking as lacking


def least_tokens(chosen: int, predicts: Predicts) -> int:
    """The least number: the prompt tokens that a step has beside answers in any case.

    It is the number that was chosen at the start, which believes the data sheet of the machine. Where products are
    slower, it is what makes a step of some answers as long as was wanted, but at least LEAST_PROMPT_TOKENS.

    Args:
        chosen: no more than this.
    """
    fitting = predicts.tokens_beside(SHARED_ANSWERS, SHARED_CONTEXT, SHARED_TIMES, chosen)
    return max(fitting, min(chosen, LEAST_PROMPT_TOKENS))


def seconds_to_spare(
    now: float,
    answers: Sequence[Request],
    prompts: Sequence[Request],
    queued_tokens: int,
    num_queued: int,
    queued: float,
    most_times: float,
    predicts: Predicts,
) -> float:
    """The seconds of the next step after which the answers have taken as many times their time alone as prompts do.

    Prompts take what the oldest of them has waited, and what all of them still lack, in times of a mean prompt alone.
    A cached prefix is no part of a prompt here. Answers take the time since their first tokens, in times of a token of
    one of them alone. So answers that were fast have time to spare for prompts. All answers are taken together: a long
    fast one has time to spare for others.

    Args:
        now: on the scheduler's clock.
        answers: requests with a `first_token_time`, one or more.
        prompts: the running requests that lack more than one token.
        queued_tokens, num_queued: the tokens that waiting requests lack, and their number. There is at least one
            prompt or one waiting request.
        queued: when the oldest of these requests began to wait.
        most_times: answers take no more times their time alone than this, however long prompts wait.
    """
    num_prompts = len(prompts) + num_queued
    num_tokens = queued_tokens + sum(request.num_tokens - request.num_reused_tokens for request in prompts)
    num_lacking = queued_tokens + sum(map(lacking, prompts))
    mean_prompt = max(num_tokens // num_prompts, 1)
    times = min((now - queued) / predicts.seconds_alone(0, mean_prompt) + num_lacking / mean_prompt, most_times)
    mean_context = sum(request.num_tokens for request in answers) // len(answers)
    lasted = num_next = 0.0
    for request in answers:
        assert request.first_token_time is not None
        lasted += now - request.first_token_time
        num_next += len(request.output_token_ids) - request.num_untimed_tokens + 1
    return (times * predicts.seconds_alone(mean_context, 1) * num_next - lasted) / len(answers)
