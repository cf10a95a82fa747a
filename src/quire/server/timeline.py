"""The times of requests: the `metrics` of an answer on demand, and GET /v1/requests/{id}/timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.timeline import MAX_TIMELINES, ContinuationTimeline, RequestTimeline
from quire.outputs import RequestMetrics
from quire.server.errors import HttpError
from quire.server.protocol.timeline import (
    ContinuationTimes,
    PromptTimes,
    RequestTimings,
    SpeculativeDecoding,
    TimelineResponse,
    TokenChunk,
)
from quire.server.state import state_of


async def get_timeline(request: Request) -> Response:
    """The times of a request's events; 404 for an unknown or an old request."""
    state = state_of(request)
    entry = state.recent.get(request.path_params["request_id"])
    response_id, parts = entry if entry is not None else ("", [])
    found = [(index, state.engine.timeline(part)) for index, part in enumerate(parts)]
    prompts = [_prompt(index, timeline) for index, timeline in found if timeline is not None]
    if not prompts:
        raise HttpError(
            404,
            "request_not_found",
            "No recent request has this id",
            expected=f"the id of an answer or its x-request-id, of the last {MAX_TIMELINES} prompts",
        )
    answer = TimelineResponse(id=response_id, status=_status(prompts), prompts=prompts)
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _prompt(index: int, timeline: RequestTimeline) -> PromptTimes:
    metrics = timeline.metrics

    def since_arrival(moment: float | None) -> float | None:
        return None if moment is None else round(moment - metrics.arrival_time, 6)

    return PromptTimes(
        index=index,
        arrived_at=round(timeline.arrived_at, 3),
        prompt_tokens=timeline.num_prompt_tokens,
        queued_seconds=round(timeline.queued_seconds, 6),
        scheduled_seconds=since_arrival(metrics.first_scheduled_time),
        first_token_seconds=since_arrival(metrics.first_token_time),
        last_token_seconds=since_arrival(metrics.last_token_time),
        finished_seconds=since_arrival(metrics.finished_time),
        cached_tokens=timeline.continuations[0].num_cached_tokens,
        preemptions=metrics.num_preemptions,
        continuations=[_continuation(number, part) for number, part in enumerate(timeline.continuations)],
    )


def _continuation(index: int, timeline: ContinuationTimeline) -> ContinuationTimes:
    chunks = timeline.chunks.items()
    finished = timeline.finished_seconds
    return ContinuationTimes(
        index=index,
        tokens=sum(count for _, count in chunks),
        cached_tokens=timeline.num_cached_tokens,
        preemptions=timeline.num_preemptions,
        finish_reason=timeline.finish_reason,
        finished_seconds=None if finished is None else round(finished, 6),
        chunks=[TokenChunk(seconds=round(seconds, 6), tokens=count) for seconds, count in chunks],
    )


def _status(prompts: Sequence[PromptTimes]) -> Literal["waiting", "running", "finished"]:
    if all(prompt.finished_seconds is not None for prompt in prompts):
        return "finished"
    has_begun = any(prompt.scheduled_seconds is not None for prompt in prompts)
    return "running" if has_begun else "waiting"


def timings(parts: Iterable[RequestMetrics], num_tokens: int, num_cached_tokens: int) -> RequestTimings:
    """The metrics of an answer: over all its prompts from the first arrival, with the longest wait of any."""
    parts = list(parts)
    arrival = min(part.arrival_time for part in parts)
    waits = [part.first_scheduled_time - part.arrival_time for part in parts if part.first_scheduled_time is not None]
    first = min((part.first_token_time for part in parts if part.first_token_time is not None), default=None)
    last = max((part.last_token_time for part in parts if part.last_token_time is not None), default=None)
    scheduled = min((p.first_scheduled_time for p in parts if p.first_scheduled_time is not None), default=None)
    drafts = parts[0].spec_decode if len(parts) == 1 else None
    generation = None if first is None or last is None else last - first
    inference = None if scheduled is None or last is None else last - scheduled
    return RequestTimings(
        time_to_first_token_ms=_ms(None if first is None else first - arrival),
        queue_time_ms=_ms(max(waits, default=None)),
        generation_time_ms=_ms(generation),
        mean_itl_ms=_ms(generation / (num_tokens - 1)) if generation is not None and num_tokens > 1 else None,
        tokens_per_second=round(num_tokens / inference, 3) if inference else None,
        prefill_time_ms=_ms(None if first is None or scheduled is None else max(first - scheduled, 0.0)),
        cached_tokens=num_cached_tokens,
        preemptions=sum(part.num_preemptions for part in parts),
        speculative_decoding=None if drafts is None else SpeculativeDecoding(**drafts.to_dict()),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
