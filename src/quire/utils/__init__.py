"""vLLM's path of what its scripts take from there: no place for helpers of ours."""

from __future__ import annotations

import uuid

from quire.cli.script_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """A request id: 32 hexadecimal digits."""
    return uuid.uuid4().hex
