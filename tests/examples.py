"""How many examples Hypothesis draws: `make test` draws a third of what `make test-full` does."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("TEST_FULL") == "1"


def examples(count: int) -> int:
    """For settings(max_examples=...), by the number of a full run."""
    return count if IS_FULL else -(-count // 3)
