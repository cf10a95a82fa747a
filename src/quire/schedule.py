"""One step between scheduler and workers: the batch and the result. They are plain integers, so each side can be tested
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from quire.sampling_params import SamplingParams

T_co = TypeVar("T_co", covariant=True)

UNDRAFTED = -1  # the place of a draft that the worker makes in the same step that verifies it
MAX_FORCED_TOKENS = 32  # most tokens that a worker adds to a sampled token, where the grammar allows no other token


@dataclass(slots=True)
class NewRow:
    """A request that the worker does not hold yet: it is new, or it resumes after a preemption."""

    request_id: str
    token_ids: list[int]  # prompt and the output sampled so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[int]  # the pages of its blocks in order: each block has a page for each block table of the model
    stop_token_ids: frozenset[int] = frozenset()  # masked while fewer than min_tokens are out
    adapter: str | None = None  # AdapterFacts.digest
    wants_vector: bool = False  # a vector instead of logits
    rope_offset: int = 0  # row of the rotary table for position 0: not 0 for long sequences under longrope


@dataclass(slots=True)
class ScheduledBatch:
    """One step of all lanes, with at least one row. Lists are aligned: row i is request_ids[i].

    The worker computes the logits of the last num_logits tokens of a row. num_logits is 0 if known tokens are left for
    later steps, 1 if the next token is sampled, and k + 1 if the last k tokens are drafts (guesses at the next tokens).
    Each token is sampled as if the drafts before it were right. A draft holds if it equals the token that is sampled in
    its place. A row that wants a vector gets it with its last token, in place of logits. A row samples nothing if an
    earlier result has shown that a grammar forces its token (StepResult.forced).

    The worker applies removed_request_ids, new_rows, new_block_ids, forced_tokens and block_copies, in this order. Then
    it computes. The KV of drafts that do not hold stays in the cache until a later step writes the same slots.
    """

    step_id: int
    request_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)  # before this step
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_logits: list[int] = field(default_factory=list)
    # The last of the row's scheduled tokens, or (). The worker first drafts tokens that are UNDRAFTED.
    draft_token_ids: list[Sequence[int]] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)  # appended to the row's block ids; [] for new rows
    new_rows: list[NewRow] = field(default_factory=list)
    removed_request_ids: list[str] = field(default_factory=list)  # finished, aborted or preempted since the last batch
    block_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination): copy-on-write
    # Of rows that compute forced tokens after the last sampled one: request id, position of the first forced token,
    # and the tokens. The worker that sampled knows them already.
    forced_tokens: list[tuple[str, int, list[int]]] = field(default_factory=list)
    # Of steps before, for workers that have not sampled them. Empty: all workers know them.
    tokens_before: list[StepTokens] = field(default_factory=list)
    # Of the batch of all lanes: the batch of each lane. The fields above join them, one lane after the other. Workers
    # get the batch of their lane, which may have no rows.
    lanes: list[ScheduledBatch] = field(default_factory=list)
    lane_tokens: list[int] = field(default_factory=list)  # the tokens of each lane; set in the batch of a lane

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)


class StepTokens(msgspec.Struct, array_like=True):
    """StepResult.token_ids, for workers that have not sampled them."""

    step_id: int
    token_ids: list[list[int]]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of one position: the chosen token first, then the most likely ones (natural log)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class ExpertUse(msgspec.Struct, array_like=True):
    """The experts that the tokens of a step went to."""

    distinct: float  # experts of a layer that were hit: the mean over layers
    balancedness: float  # tokens of an expert, relative to the busiest expert of its layer: the mean over all
    tokens: list[int]  # the tokens of each expert that was used, in one layer; layers take turns
    of_ranks: float = 1.0  # tokens of a rank by the busiest rank's: the mean over all; 1: ranks share each expert
    num_moved: int = 0  # experts that have got another place


# Steps of at most this number of tokens are recorded on a CPU. Python takes about a quarter of a longer one of 28 small
# layers: benchmarks/NOTES.md, 2026-11-28.
MAX_RECORDED_TOKENS = 64

# A step with the whole token budget is recorded too, because most steps of long prompts have it. On Zen 5, Python takes
# 4 ms of it with 28 layers: 4 % of 128 tokens of a model with 0.6B parameters on two cores, and 1 % of these. A longer
# step would hold more memory: benchmarks/NOTES.md, 2026-11-29.
MAX_RECORDED_BUDGET = 512


@dataclass(slots=True)
class StepResult:
    """The workers' answer, aligned with ScheduledBatch.request_ids."""

    step_id: int
    # Per row: no token if it wants no logits; the sampled token; or the drafts that held and the token after them.
    token_ids: list[list[int]]
    forced: dict[int, list[int]] = field(default_factory=dict)  # row -> tokens that a grammar forces after its tokens
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row -> one per sampled token
    # row -> one per prompt position that this step computed and that predicts the next: entry j of the list describes
    # the prompt token at position num_computed_tokens[row] + j + 1. Not for a request resumed with output.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    vectors: dict[int, list[float]] = field(default_factory=dict)  # row -> the vector for NewRow.wants_vector
    errors: dict[int, str] = field(default_factory=dict)  # row -> why it failed; its token list is empty
    error_codes: dict[int, str] = field(default_factory=dict)  # row -> QuireError.code, if the request is to blame
    # row -> the reason why UNDRAFTED tokens got no drafts that are worth verifying, now and later. The row has its
    # tokens as usual.
    draft_failures: dict[int, str] = field(default_factory=dict)
    draft_error: str = ""  # the reason why no row got drafts in this step; later steps may have some
    # row -> how many of its tokens the drafter has yet to read. UNDRAFTED tokens got no drafts, as with draft_failures.
    unread: dict[int, int] = field(default_factory=dict)
    draft_seconds: float = 0.0  # the time of the worker's drafter
    draft_read_seconds: float = 0.0  # the part of it that is no cost of drafts: see Drafted.read_seconds
    experts: ExpertUse | None = None  # None: without --expert-metrics
    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    has_captured: bool = False  # its forward pass was captured: it took longer than the next one of its size
    # For each of several ranks: seconds of the step, and seconds in which it waited for others. Those of other ranks
    # than the first may be of the step before; then the first step has none of them.
    ranks: tuple[tuple[float, float], ...] = ()
    lanes: list[StepResult] = field(default_factory=list)  # like ScheduledBatch.lanes; only tokens and times are joined

    @classmethod
    def of_lanes(cls, step_id: int, lanes: list[StepResult]) -> StepResult:
        """Join the results of all lanes. Lanes compute side by side, so a step takes as long as the slowest lane."""
        return cls(
            step_id,
            [token_ids for lane in lanes for token_ids in lane.token_ids],
            forced=lanes[0].forced,  # all requests with a grammar are in the first lane
            experts=lanes[0].experts,
            prepare_seconds=max(lane.prepare_seconds for lane in lanes),
            forward_seconds=max(lane.forward_seconds for lane in lanes),
            sample_seconds=max(lane.sample_seconds for lane in lanes),
            draft_seconds=max(lane.draft_seconds for lane in lanes),
            has_captured=any(lane.has_captured for lane in lanes),
            lanes=lanes,
        )


class LaneUse(msgspec.Struct, array_like=True):
    """The state of a lane after a step."""

    num_tokens: int
    num_running: int
    num_waiting: int
    num_blocks_in_use: int


class RowsFailedError(Exception):
    """Raised by an executor for a batch if it knows the requests at fault. The other requests are computed again.

    The message is fit for the user, because it becomes the error of the requests.
    """

    def __init__(self, request_ids: list[str], message: str) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class Pending(Protocol[T_co]):
    """A result that may not be ready yet."""

    def result(self) -> T_co:
        """Wait for the result. Raises the worker's error."""
        ...


class Polled(Pending[T_co], Protocol):
    """A pending result that can be asked whether it is ready."""

    def done(self) -> bool:
        """Whether `result` would not wait."""
        ...


class Executor(Protocol):
    """Runs batches in the order submitted."""

    def submit(self, batch: ScheduledBatch) -> Pending[StepResult]: ...

    def shutdown(self) -> None: ...


class EvictedBlock(msgspec.Struct, array_like=True):
    """A sampled KV block that is allocated again, with times in seconds."""

    lifetime_seconds: float  # since its last allocation
    idle_seconds: float  # since a request last reused it from the cache, or since its allocation if none did
    reuse_gaps_seconds: list[float]  # between the last reuses


class StepRecord(msgspec.Struct, omit_defaults=True):
    """The work and time of one step: the only source for metrics, the log line and calibration. Times in seconds."""

    step_id: int
    num_prefill_tokens: int  # scheduled tokens except each row's newest sampled token and the drafts after it
    num_decode_tokens: int
    num_sampled_tokens: int
    num_rows: int
    num_kv_tokens_read: int  # sum over rows of KV length after the step
    num_running: int
    num_waiting: int
    num_blocks_in_use: int
    num_blocks_total: int
    num_preemptions: int  # the preemptions in this step
    prefix_cache_queries: int  # tokens looked up in this step
    prefix_cache_hits: int  # tokens found
    num_deferred: int = 0  # part of num_waiting: requests that wait for another request or a resource, not for room
    schedule_seconds: float = 0.0
    prepare_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    output_seconds: float = 0.0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0  # the part of step_seconds that a drafter in the worker took
    has_captured: bool = False  # see StepResult
    # The prediction, without draft_seconds: see cost.step_time.StepTime; 0: there was none.
    predicted_seconds: float = 0.0
    predicted_low_seconds: float = 0.0
    predicted_high_seconds: float = 0.0
    timed_seconds: float = 0.0  # the time that was predicted; 0: no prediction, or a captured step, which takes longer
    bound: str = ""
    # See cost.arithmetic.Load; tuples have one entry per kind of layer.
    num_logits: int = 0
    kv_tokens: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    evicted_blocks: list[EvictedBlock] | None = None  # None: without --kv-cache-metrics
    # The fate of drafts, see scheduler.speculation.DraftCounts.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    num_draft_failures: int = 0
    num_adapters: int = 0  # the number of adapters that requests may name
    num_adapters_in_memory: int = 0
    ranks: tuple[tuple[float, float], ...] = ()  # see StepResult
    lanes: tuple[LaneUse, ...] = ()  # the use of each lane, if there are several
    experts: ExpertUse | None = None  # None: without --expert-metrics
