"""What an engine knows of an adapter that it has read."""

from __future__ import annotations

import msgspec


class AdapterFacts(msgspec.Struct, frozen=True):
    """A valid adapter. Its identity is its content: other weights have another digest, under any name."""

    digest: str  # SHA-256 over names, factors and tensors, hexadecimal
    rank: int  # the largest rank of its modules
    num_bytes: int  # bytes of memory that it takes
    num_modules: int
