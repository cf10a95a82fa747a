"""Finds the request to blame for a failed step, so that it does not end the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire.request import Request


def culprits(rows: list[Request], known_ids: Collection[str]) -> list[Request]:
    """The rows of a failed batch that must end: those with `known_ids`, or the only row, or the only suspect.

    Otherwise no row ends, and all rows become suspects. They are computed again, with at most one suspect in a batch.
    A suspect that gets its next token is cleared. So the second failure finds the request to blame, unless a cleared
    request fails too.
    """
    known = [request for request in rows if request.request_id in known_ids]
    if known or len(rows) == 1:
        return known or rows
    suspects = [request for request in rows if request.is_suspect]
    if len(suspects) == 1:
        return suspects
    for request in rows:
        request.is_suspect = True
    return []


def may_join(request: Request, running: Iterable[Request]) -> bool:
    """Whether a waiting request may run beside these requests. Two suspects may not run together."""
    return not request.is_suspect or not any(other.is_suspect for other in running)
