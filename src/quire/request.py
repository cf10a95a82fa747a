"""One request inside the engine: token ids, counters and states. Integers only, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.outputs import FinishReason
from quire.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """WAITING -> RUNNING -> FINISHED, with PREEMPTED (waits again, its blocks are gone) between."""

    WAITING = 0
    PREEMPTED = 1
    RUNNING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its single continuation (`n` > 1 is n requests that share blocks).

    There is no phase: `num_computed_tokens` tokens have KV in the cache, `num_tokens` tokens are known, and a step
    computes some of the difference. `num_in_flight_tokens` counts tokens that a submitted batch will sample. Their ids
    are not known here yet, so they are computable (the worker knows them) but not hashable. The scheduler moves these
    counts in one place: scheduler/progress.py.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # resolved by the front end: never None, prompt + max_tokens <= max_model_len
    stop_token_ids: frozenset[int]  # EOS (unless ignore_eos) and the user's; checked after min_tokens
    arrival_time: float = 0.0
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    adapter: str | None = None  # AdapterFacts.digest: only requests with the same adapter share KV
    rope_offset: int = 0  # see NewRow; only requests with the same offset share KV
    fork_of: str | None = None  # request_id that shares its prompt blocks once they are computed (n > 1)
    is_retry: bool = False  # other engines have lost it, and this one has not begun it
    wants_vector: bool = False  # a vector of the prompt instead of tokens
    lane: int | None = None  # the lane that computes it; None: the lane with the least work
    prepared: object = None  # lives as long as the request: the grammar that was compiled for it
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)  # not empty at the start: another engine gave them
    num_computed_tokens: int = 0  # submitted batches included
    num_reused_tokens: int = 0  # of these, those that were computed before it began to run: a cached prefix
    num_settled_tokens: int = 0  # without submitted batches that have no result yet
    num_in_flight_tokens: int = 0
    num_in_flight_steps: int = 0  # submitted batches with this request that have no result yet
    num_forced_tokens: int = 0  # after the last sampled token: its grammar allowed nothing else
    num_cached_tokens: int = 0  # tokens of the prompt that the prefix cache had at first admission
    num_preemptions: int = 0
    sequence: int = 0  # order of arrival at the scheduler
    received_time: float = 0.0  # when the scheduler received it, on the scheduler's clock
    queued_time: float = 0.0  # when its newest stay in the queue began, on the scheduler's clock
    block_hashes: list[bytes] = field(default_factory=list)  # for each full block; computed when needed
    first_scheduled_time: float | None = None
    first_token_time: float | None = None  # on the scheduler's clock, of the first token since it began to run
    num_untimed_tokens: int = 0  # tokens of the output at this time
    is_suspect: bool = False  # was in a step that failed for an unknown reason, and has sampled nothing since
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: str | None = None  # QuireError.code of `error`

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens with ids that the scheduler knows."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self) -> list[int]:
        """Prompt and output, a new list."""
        return self.prompt_token_ids + self.output_token_ids
