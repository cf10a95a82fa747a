"""The progress of requests. Only this module changes their counts of computed and in-flight tokens."""

from __future__ import annotations

from quire.request import Request, RequestStatus


def num_schedulable(request: Request) -> int:
    """The number of tokens of a running request that may be computed now.

    It is 0 when all tokens that the request may sample are sampled or in flight.
    """
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + len(request.output_token_ids) + request.num_in_flight_tokens
    return num_known - request.num_computed_tokens if num_known - num_prompt < request.max_tokens else 0


def num_schedulable_alone(request: Request) -> int:
    """Like `num_schedulable`, but for a pipeline of stages, where a request waits until its last token is known."""
    return 0 if request.num_in_flight_tokens else num_schedulable(request)


def num_lacking(request: Request) -> int:
    """The number of tokens of a running request that are known and not computed."""
    return request.num_tokens - request.num_computed_tokens


def start_at(request: Request, num_tokens: int) -> None:
    """Set the number of tokens that are computed, when a request is admitted or has lost its blocks."""
    request.num_computed_tokens = request.num_settled_tokens = request.num_reused_tokens = num_tokens


def advance(request: Request, count: int, num_drafts: int = 0) -> int:
    """Count the next `count` tokens as computed, because a batch computes them. The last `num_drafts` are drafts.

    Drafts count as tokens in flight. The place of the token after them is not known yet. So a request with drafts has
    nothing to schedule until its result is here.

    Returns:
        The row's num_logits: see ScheduledBatch.
    """
    request.num_in_flight_steps += 1
    request.num_computed_tokens += count
    num_known = len(request.prompt_token_ids) + len(request.output_token_ids) + request.num_in_flight_tokens
    if request.num_computed_tokens - num_drafts < num_known:
        return 0
    request.num_in_flight_tokens += num_drafts or 1
    return num_drafts + 1


def force(request: Request, num_forced: int) -> None:
    """Take in the last `num_forced` tokens of the request, which its grammar has forced.

    Steps in flight sample the first of these tokens. Their results are known now, so they are no longer in flight.
    """
    request.num_forced_tokens = num_forced
    request.num_in_flight_tokens = max(request.num_in_flight_tokens - num_forced, 0)


def settle(request: Request, end: int, num_logits: int, num_sampled: int) -> int:
    """Take in the result of a batch that has computed the tokens before `end`.

    A row with k drafts (num_logits = k + 1) has sampled one token more than the number of drafts that held. The other
    drafts no longer count as computed. Their slots are written again before anybody reads them.

    Returns:
        The end of the tokens whose computation is valid.
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
    """Forget the tokens in flight, because their results will not come. The caller frees the request's blocks."""
    request.num_in_flight_steps = request.num_in_flight_tokens = 0
