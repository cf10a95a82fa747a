"""Who is to blame for a step that failed, so that one failing request does not take the others along."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from quire.request import Request


def culprits(rows: list[Request], known_ids: Collection[str]) -> list[Request]:
    """Those of a failed batch's rows that have to end: the known ones, or the only row, or the only suspect.

    If that leaves it open, nobody ends and all rows become suspects. They are computed again with at most one suspect
    in a batch, which is cleared by its next token: so the second failure finds who it was, unless somebody who was
    cleared fails from then on too.
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
    """Whether a waiting request may run beside these: two suspects may not."""
    return not request.is_suspect or not any(other.is_suspect for other in running)
