"""GET /v1/steps: the work of the engines' last steps, and their times beside the predictions."""

from __future__ import annotations

from itertools import islice

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidRequestError
from quire.frontend.replica import MAX_RECORDS
from quire.schedule import StepRecord
from quire.server.protocol.steps import StepLine, StepPrediction
from quire.server.state import state_of

DEFAULT_LIMIT = 100
JSON_LINES = "application/x-ndjson"


async def get_steps(request: Request) -> Response:
    """The last steps of each engine as JSON lines, the newest one last. Engines that are gone have theirs too."""
    limit = _limit(request.query_params.get("limit", str(DEFAULT_LIMIT)))
    lines = [
        _line(replica.index, record)
        for replica in state_of(request).engine.replicas
        for record in islice(replica.records, max(len(replica.records) - limit, 0), None)
    ]
    return Response(msgspec.json.Encoder().encode_lines(lines), media_type=JSON_LINES)


def _limit(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_RECORDS)) and 1 <= int(text) <= MAX_RECORDS:
        return int(text)
    raise InvalidRequestError(
        "This is no number of steps", value=text, expected=f"a whole number from 1 to {MAX_RECORDS}", param="limit"
    )


def _line(engine: int, record: StepRecord) -> StepLine:
    predicted = StepPrediction(
        seconds=_rounded(record.predicted_seconds),
        low_seconds=_rounded(record.predicted_low_seconds),
        high_seconds=_rounded(record.predicted_high_seconds),
        bound=record.bound,
    )
    return StepLine(
        engine=engine,
        step_id=record.step_id,
        prefill_tokens=record.num_prefill_tokens,
        decode_tokens=record.num_decode_tokens,
        sampled_tokens=record.num_sampled_tokens,
        rows=record.num_rows,
        logits=record.num_logits,
        kv_tokens=list(record.kv_tokens),
        pairs=list(record.pairs),
        running=record.num_running,
        waiting=record.num_waiting,
        blocks_in_use=record.num_blocks_in_use,
        blocks_total=record.num_blocks_total,
        preemptions=record.num_preemptions,
        cached_tokens=record.prefix_cache_hits,
        drafts=record.num_drafts,
        draft_tokens=record.num_draft_tokens,
        accepted_tokens=record.num_accepted_tokens,
        draft_failures=record.num_draft_failures,
        predicted=predicted if record.predicted_seconds else None,
        seconds=_rounded(record.step_seconds),
        draft_seconds=_rounded(record.draft_seconds),
        captured=record.has_captured,
        schedule_seconds=_rounded(record.schedule_seconds),
        prepare_seconds=_rounded(record.prepare_seconds),
        forward_seconds=_rounded(record.forward_seconds),
        sample_seconds=_rounded(record.sample_seconds),
        output_seconds=_rounded(record.output_seconds),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 7)
