"""A line of GET /v1/steps: the work of a step, its predicted time, and its time. No text, no request."""

from __future__ import annotations

import msgspec


class StepPrediction(msgspec.Struct, kw_only=True):
    """What the step was taken to need before it ran, its `draft_seconds` aside. Nine of ten steps take between `low`
    and `high`, and most of the time goes to `bound`: memory, arithmetic, attention or host."""

    seconds: float
    low_seconds: float
    high_seconds: float
    bound: str


class StepLine(msgspec.Struct, kw_only=True):
    """One step of the engine with the index `engine`.

    A row is a request. `kv_tokens` are those whose keys and values are read, and `pairs` those of a new token and one
    that it sees: each over the rows, a number per kind of layer (all tokens seen, a window, ...). Running and waiting
    requests and blocks are as they were after the step. `drafts` are rows with drafts, `draft_tokens` their tokens and
    `accepted_tokens` the tokens that held; `draft_failures` are requests that get no more drafts, because their drafter
    failed. `predicted` is null if the engine did not predict. The forward pass of a step that is `captured` will be
    repeated by later steps of its size, which take less time.
    """

    engine: int
    step_id: int
    prefill_tokens: int
    decode_tokens: int
    sampled_tokens: int
    rows: int
    logits: int
    kv_tokens: list[int]
    pairs: list[int]
    running: int
    waiting: int
    blocks_in_use: int
    blocks_total: int
    preemptions: int
    cached_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    draft_failures: int
    predicted: StepPrediction | None
    seconds: float
    draft_seconds: float
    captured: bool
    schedule_seconds: float
    prepare_seconds: float
    forward_seconds: float
    sample_seconds: float
    output_seconds: float
