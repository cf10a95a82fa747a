"""The last HTTP requests by name, so that GET /v1/requests/{id}/timeline finds their records in the front end."""

from __future__ import annotations

from collections import OrderedDict

from quire.frontend.timeline import MAX_TIMELINES


class RecentRequests:
    """Which of the front end's requests belong to which HTTP request: by the answer's id and by its x-request-id."""

    def __init__(self, capacity: int = MAX_TIMELINES) -> None:
        self._capacity = 2 * capacity  # two names each
        self._parts: OrderedDict[str, tuple[str, list[str]]] = OrderedDict()

    def add(self, response_id: str, request_id: str) -> list[str]:
        """A new HTTP request; append the ids of its parts to the list."""
        entry: tuple[str, list[str]] = (response_id, [])
        for name in (response_id, request_id):
            self._parts[name] = entry
            self._parts.move_to_end(name)
        while len(self._parts) > self._capacity:
            self._parts.popitem(last=False)
        return entry[1]

    def get(self, name: str) -> tuple[str, list[str]] | None:
        """(response id, ids of its parts)."""
        return self._parts.get(name)
