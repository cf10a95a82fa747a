"""The limits of the scheduler, and the check of a request against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.errors import ContextLengthError, InvalidRequestError, QueueFullError
from quire.request import Request

LEAST_PROMPT_TOKENS = 16  # the oldest prompt gets at least this number of tokens in a step, even if decodes take long


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a step and of the queue. All but max_model_len may change while serving.

    Raises ValueError for a limit that is out of its range.
    """

    max_num_seqs: int  # running requests
    max_num_batched_tokens: int  # tokens of one step
    max_model_len: int  # prompt and output of one request
    long_prefill_token_threshold: int = 0  # the most tokens of one request in one step; 0: no limit
    max_num_queued_reqs: int | None = None  # waiting requests; None: no limit
    max_shared_prefill_tokens: int = 0  # prompt tokens of a step that several prompts share; 0: prompts go in order
    # max_shared_prefill_tokens is only the least number while answers take less than this many times as long as one
    # alone (scheduler/pace.py); 0: it holds in every shared step.
    most_answer_times: float = 0.0
    slo_itl: float = 0.0  # the target for the seconds of a step with decodes; 0: there is no target
    slo_attainment: float = 0.99  # the share of these steps that must reach the target

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_queued_reqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("long_prefill_token_threshold", "max_shared_prefill_tokens"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be positive, or 0 for no limit, got {value}.")


class StepRoom(Protocol):
    """The remaining time of a step that is being filled."""

    def fitting(self, start: int, most: int, /) -> int:
        """The number of prompt tokens that the time allows: at most `most`, after the first `start` tokens."""
        ...

    def take(self, start: int, count: int, /) -> None:
        """Put `count` tokens of a prompt into the step."""
        ...

    def beside(self, others: Sequence[Any], num_later: int, /) -> None:
        """Share the step with other lanes, which have rooms of the same kind: see cost.model.StepRoom."""
        ...


class Predicts(Protocol):
    """Predicts steps: see CostModel."""

    def room_within(
        self, seconds: float, attainment: float, starts: Sequence[int], counts: Sequence[int], num_logits: int, /
    ) -> StepRoom:
        """The room for prompts beside the rows of a step that takes `seconds`."""
        ...

    def seconds_alone(self, start: int, count: int, /) -> float:
        """The seconds of a step with `count` new tokens of one request after `start` computed ones."""
        ...

    def tokens_beside(self, num_answers: int, context: int, times: float, most: int, /) -> int:
        """The tokens of a new prompt with which a step of answers takes at most `times` as long."""
        ...


def check_queue(num_waiting: int, limits: SchedulerLimits) -> None:
    """Raise QueueFullError if no further request may wait."""
    if limits.max_num_queued_reqs is not None and num_waiting >= limits.max_num_queued_reqs:
        raise QueueFullError(
            "The waiting queue is full",
            value=num_waiting,
            expected=f"fewer than {limits.max_num_queued_reqs} waiting requests (max_num_queued_reqs)",
            fix="Retry later, or raise --max-num-queued-reqs",
        )


def check_request(request: Request, limits: SchedulerLimits, longest_request: int) -> None:
    """Refuse a request that could never finish. Raises InvalidRequestError or ContextLengthError.

    Args:
        longest_request: the most tokens of one request that the KV cache holds.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise InvalidRequestError("The prompt has no tokens", expected="at least one token", param="prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(
            "max_tokens is too small", value=request.max_tokens, expected="at least 1", param="max_tokens"
        )
    if len(request.output_token_ids) >= request.max_tokens:
        raise InvalidRequestError(
            "The request has all its tokens already",
            value=len(request.output_token_ids),
            expected=f"fewer than max_tokens, {request.max_tokens}",
            param="output_token_ids",
        )
    if num_prompt + request.max_tokens > limits.max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens and up to {request.max_tokens} more are wanted",
            expected=f"at most {limits.max_model_len} tokens together",
            fix="Shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
    num_computed = num_prompt + request.max_tokens - 1  # the last token is never computed
    if num_computed > longest_request:
        raise ContextLengthError(
            f"Prompt and output need room for {num_computed} tokens in the KV cache",
            expected=f"at most {longest_request}, the whole cache",
            fix="Lower max_tokens, or give the KV cache more memory",
            param="max_tokens",
        )
