"""The effect of sampled tokens on a request: its end, and the delta for the front end."""

from __future__ import annotations

import msgspec

from quire.messages import RequestDelta, pack
from quire.outputs import FinishReason
from quire.request import Request
from quire.schedule import StepResult


def append_tokens(request: Request, token_ids: list[int]) -> tuple[int, FinishReason | None]:
    """Append sampled tokens up to the one that ends the request. Returns their number, and the reason of the end, if
    any.

    A stop id counts once min_tokens are out, and goes before the length, as in vLLM. stop_reason is the stop id if it
    is the user's, and stays None for EOS.
    """
    output = request.output_token_ids
    for num_taken, token_id in enumerate(token_ids, start=1):
        output.append(token_id)
        if token_id in request.stop_token_ids and len(output) >= request.sampling_params.min_tokens:
            if token_id in (request.sampling_params.stop_token_ids or ()):
                request.stop_reason = token_id
            return num_taken, "stop"
        if len(output) >= request.max_tokens:
            return num_taken, "length"
    return len(token_ids), None


def delta_of(request: Request, token_ids: list[int]) -> RequestDelta:
    """`token_ids` new tokens and the state of the request after them."""
    delta = RequestDelta(
        request.request_id,
        token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        error_code=request.error_code,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
    )
    if token_ids and len(token_ids) == len(request.output_token_ids):  # these are the first output tokens
        assert request.first_scheduled_time is not None
        delta.queued_seconds = request.first_scheduled_time - request.received_time
    return delta


class PromptLogprobs:
    """Prompt logprobs of requests whose prompt comes in chunks, until the first sampled token takes them along."""

    def __init__(self) -> None:
        self._of: dict[Request, list[msgspec.Raw]] = {}

    def collect(self, request: Request, start: int, row: int, result: StepResult) -> None:
        """Keep the logprobs of a step that began at token `start`. A recomputed chunk overwrites itself."""
        if row in result.prompt_logprobs:
            new = [pack(entry) for entry in result.prompt_logprobs[row]]
            self._of.setdefault(request, [])[start : start + len(new)] = new

    def take(self, request: Request) -> list[msgspec.Raw] | None:
        """All of a request's prompt logprobs, once; None if it did not ask."""
        return self._of.pop(request, []) if request.sampling_params.prompt_logprobs is not None else None

    def drop(self, request: Request) -> None:
        self._of.pop(request, None)
