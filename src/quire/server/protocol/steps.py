"""A line of GET /v1/steps: the work of a step, its predicted time, and its time. No text, no request."""

from __future__ import annotations

import msgspec


class StepPrediction(msgspec.Struct, kw_only=True):
    """The predicted time of a step, in seconds, without `draft_seconds`. Nine of ten steps take between `low` and
    `high`. `bound` says what most of the time is for: memory, arithmetic, attention or host."""

    seconds: float
    low_seconds: float
    high_seconds: float
    bound: str


class StepLine(msgspec.Struct, kw_only=True):
    """One step of the engine with the index `engine`.

    A row is a request. `kv_tokens` counts the tokens whose keys and values are read. `pairs` counts pairs of a new
    token and a token that it sees. Both are sums over rows, with one number per kind of layer (full, window, ...).
    Numbers of running and waiting requests and of blocks are from the end of the step. `drafts` counts rows with
    drafts, `draft_tokens` their draft tokens, and `accepted_tokens` the accepted ones. `draft_failures` counts requests
    that get no more drafts, because their drafter failed. `predicted` is null if the engine has made no prediction. If
    a step is `captured`, later steps of its size repeat its forward pass, and take less time.
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
