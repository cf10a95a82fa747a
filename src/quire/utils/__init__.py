"""vLLM's path of names that its scripts import: no place for our own helpers."""

from __future__ import annotations

import uuid

from quire.cli.script_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """A request id: 32 hexadecimal digits."""
    return uuid.uuid4().hex
