"""GGUF files byte by byte, so that a test can declare tensors that are missing."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 2, 4, 6, 7, 8, 9, 10
F32_TENSOR, Q4_0_TENSOR, Q4_K_TENSOR = 0, 2, 12


def number(code: str, value: float) -> bytes:
    return struct.pack("<" + code, value)


def text(value: bytes | str, length: int | None = None) -> bytes:
    """A string; `length` is what it declares, if not the truth."""
    raw = value.encode() if isinstance(value, str) else value
    return number("Q", len(raw) if length is None else length) + raw


def pair(key: bytes | str, kind: int, payload: bytes) -> bytes:
    return text(key) + number("I", kind) + payload


def array(kind: int, payload: bytes, count: int) -> bytes:
    """The payload of an array."""
    return number("I", kind) + number("Q", count) + payload


def tensor(name: bytes | str, sizes: tuple[int, ...], kind: int, offset: int, num_dims: int | None = None) -> bytes:
    """The description of a tensor; sizes in the file's order, columns first."""
    dims = len(sizes) if num_dims is None else num_dims
    described = text(name) + number("I", dims) + b"".join(number("Q", size) for size in sizes)
    return described + number("I", kind) + number("Q", offset)


@dataclass
class Raw:
    """A file in pieces. Counts are the truth unless they are set."""

    pairs: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    alignment: int = 32
    version: int = 3
    num_pairs: int | None = None
    num_tensors: int | None = None
    magic: bytes = b"GGUF"

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_pairs = len(self.pairs) if self.num_pairs is None else self.num_pairs
        header = self.magic + number("I", self.version) + number("Q", num_tensors) + number("Q", num_pairs)
        header += b"".join(self.pairs) + b"".join(self.tensors)
        return header + b"\0" * (-len(header) % self.alignment) + self.data
