"""Applies sampled tokens to a request: the end of the request, and the delta for the front end."""

from __future__ import annotations

import msgspec

from quire.messages import RequestDelta, pack
from quire.outputs import FinishReason
from quire.request import Request
from quire.schedule import StepResult


def append_tokens(request: Request, token_ids: list[int]) -> tuple[int, FinishReason | None]:
    """Append sampled tokens, up to the first one that ends the request.

    A stop id counts only after min_tokens tokens. If a stop id and the length limit come together, the stop id is the
    reason, as in vLLM. `stop_reason` becomes the stop id if the user has named it, and stays None for EOS.

    Returns:
        The number of appended tokens, and the reason of the end; None: the request goes on.
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
    """The delta with the new tokens `token_ids` and the state of the request after them."""
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
    """Collects prompt logprobs while prompts are computed in chunks. They are sent with the first sampled token."""

    def __init__(self) -> None:
        self._of: dict[Request, list[msgspec.Raw]] = {}

    def collect(self, request: Request, start: int, row: int, result: StepResult) -> None:
        """Keep the logprobs of a step that began at token `start`. A recomputed chunk replaces the older one."""
        if row in result.prompt_logprobs:
            new = [pack(entry) for entry in result.prompt_logprobs[row]]
            self._of.setdefault(request, [])[start : start + len(new)] = new

    def take(self, request: Request) -> list[msgspec.Raw] | None:
        """Take out all prompt logprobs of a request; None: it did not ask for them."""
        return self._of.pop(request, []) if request.sampling_params.prompt_logprobs is not None else None

    def drop(self, request: Request) -> None:
        self._of.pop(request, None)
