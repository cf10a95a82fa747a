"""The progress of requests: the one place that moves the counts of computed and in-flight tokens, forward and back."""

from __future__ import annotations

from quire.request import Request, RequestStatus


def num_schedulable(request: Request) -> int:
    """Tokens of a running request to compute now; 0 once all it may sample are sampled or in flight."""
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + len(request.output_token_ids) + request.num_in_flight_tokens
    return num_known - request.num_computed_tokens if num_known - num_prompt < request.max_tokens else 0


def num_schedulable_alone(request: Request) -> int:
    """The same where a request waits for its own token."""
    return 0 if request.num_in_flight_tokens else num_schedulable(request)


def num_lacking(request: Request) -> int:
    """Tokens of a running request that are known and not computed."""
    return request.num_tokens - request.num_computed_tokens


def start_at(request: Request, num_tokens: int) -> None:
    """Set how many tokens of the request have KV, because it was admitted or has lost its blocks."""
    request.num_computed_tokens = request.num_settled_tokens = num_tokens


def advance(request: Request, count: int, num_drafts: int = 0) -> int:
    """A batch is made that computes the next `count` tokens. The last `num_drafts` of them are guesses.

    Answers the row's num_logits: see ScheduledBatch. With drafts, the drafts are in flight. The token after them has no
    place yet, so the request has nothing to schedule until the result is here.
    """
    request.num_in_flight_steps += 1
    request.num_computed_tokens += count
    num_known = len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_in_flight_tokens
    if request.num_computed_tokens - num_drafts < num_known:
        return 0
    request.num_in_flight_tokens += num_drafts or 1
    return num_drafts + 1


def force(request: Request, num_forced: int) -> None:
    """The last tokens of the request were forced by its grammar after the last sampled one.

    Steps in flight sample the first of them: these samples are known, so they are in flight no more.
    """
    request.num_forced_tokens = num_forced
    request.num_in_flight_tokens = max(request.num_in_flight_tokens - num_forced, 0)


def settle(request: Request, end: int, num_logits: int, num_sampled: int) -> int:
    """The result of a batch is here, which computed the tokens before `end`. Answers the end of those that are true.

    A row with k drafts (num_logits = k + 1) has sampled one token more than drafts held. The other drafts are taken
    back, and their slots are written again before anybody reads them.
    """
    request.num_in_flight_steps -= 1
    if num_logits == 1:
        request.num_in_flight_tokens -= 1
    elif num_logits:
        request.num_in_flight_tokens -= num_logits - 1
        end -= num_logits - num_sampled
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = end
    if request.status is RequestStatus.RUNNING:
        request.num_settled_tokens = end
    return end


def lose_results(request: Request) -> None:
    """No result of a submitted batch will come: the caller takes the blocks, and the request starts again."""
    request.num_in_flight_steps = request.num_in_flight_tokens = 0
