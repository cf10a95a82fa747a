"""The proposer of methods whose drafter is a model: the worker drafts within the step that verifies."""

from __future__ import annotations

from collections.abc import Sequence

from quire.request import Request
from quire.schedule import UNDRAFTED


class DraftedByWorker:
    """Leaves every draft to the worker."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Places of drafts, for any request."""
        return [UNDRAFTED] * most

    def forget(self, request_id: str) -> None:
        """Nothing is kept here: the worker learns of ends by itself."""
