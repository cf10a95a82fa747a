"""The header of a GGUF file: metadata and the places of tensors. Every declaration is checked before use.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian:
magic, version, number of tensors, number of key-value pairs, the pairs, the tensors' descriptions, padding, data.

A count or a length is compared with the bytes left in the file before a loop runs or memory is taken for it.
"""

from __future__ import annotations

import array
import math
import mmap
import os
import re
import struct
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.errors import WeightsError
from quire.gguf.types import OTHER_TYPES, TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Limits for untrusted files. The largest published files stay well under them.
MAX_HEADER_BYTES = 256 << 20
MAX_PAIRS = 65_536
MAX_TENSORS = 65_536
MAX_ITEMS = 1 << 22  # strings and arrays in all arrays of a header; each becomes an object
MAX_NESTING = 2  # arrays in an array
MAX_DIMS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}  # struct's codes
_BOOL, _STRING, _ARRAY = 7, 8, 9
_AGAIN = "Download the file again or compare its checksum with the publisher's"
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of one tensor; begin and end are bytes from the start of its file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]  # rows first, as in torch; the file has the reverse order
    begin: int
    end: int


@dataclass(frozen=True)
class GgufFile:
    """The headers of a model. A split model has several files and the metadata of the first.

    Attributes:
        metadata: the values by key. An array of numbers is an array.array, an array of strings or arrays is a list.
        parts: the tensors of each file in the order of their places.
    """

    path: Path
    metadata: dict[str, Any]
    parts: dict[Path, list[TensorInfo]]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {info.name: info for infos in self.parts.values() for info in infos}

    def read(self, info: TensorInfo) -> bytes:
        """The bytes of a small tensor, as they are stored. Raises OSError."""
        path = next(path for path, infos in self.parts.items() if info in infos)
        with path.open("rb") as file:
            file.seek(info.begin)
            return file.read(info.end - info.begin)


def is_gguf(path: Path) -> bool:
    """Whether the file begins with GGUF's magic, whatever its name is. Raises WeightsError if it cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"The file cannot be read: {error.strerror}", value=str(path), expected="a file of this user", param="model"
    )


def open_gguf(path: str | Path) -> GgufFile:
    """Read and check the headers of a model. `path` is its file, or any part of a split model.

    Raises:
        WeightsError: a file is missing, cannot be read, is malformed, or is shorter than it declares.
    """
    path = Path(path)
    try:
        paths = _split_paths(path)
        headers = [_read_header(part) for part in paths]
    except OSError as error:
        raise _unreadable(path, error) from error
    metadata = headers[0][0]
    count = metadata.get("split.count", 1) or 1
    if count != len(paths):
        raise WeightsError(
            f"{paths[0].name} is one of {count} files of a model",
            value=len(paths),
            expected="all of them side by side, with their names as published (-00001-of-0000N.gguf)",
            param="model",
        )
    for number, (part, (own, _)) in enumerate(zip(paths, headers, strict=True)):
        if len(paths) > 1 and (own.get("split.no"), own.get("split.count")) != (number, count):
            raise WeightsError(
                f"{part.name} says it is part {own.get('split.no')} of {own.get('split.count')}, counted from 0",
                expected=f"part {number} of {count}",
                fix="Download all parts of one model again",
            )
    parts = {part: infos for part, (_, infos) in zip(paths, headers, strict=True)}
    names = Counter(info.name for infos in parts.values() for info in infos)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise WeightsError(f"{path.name} names a tensor twice", value=twice[0], fix=_AGAIN)
    expected = metadata.get("split.tensors.count", len(names))
    if len(paths) > 1 and expected != len(names):
        raise WeightsError(
            f"The parts of {path.name} hold {len(names)} tensors",
            expected=f"{expected}",
            fix="Download all parts again",
        )
    return GgufFile(paths[0], metadata, parts)


def _split_paths(path: Path) -> list[Path]:
    """All parts of the file's model, in order."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    found = {}
    for sibling in path.parent.iterdir():
        other = SPLIT_NAME.fullmatch(sibling.name)
        if other is not None and (other["stem"], other["count"]) == (match["stem"], match["count"]):
            found[int(other["number"])] = sibling
    missing = [number for number in range(1, min(count, len(found) + 1) + 1) if number not in found]
    if missing or not count:
        raise WeightsError(
            f"Part {missing[0] if missing else 1} of {match['stem']} is missing",
            value=sorted(sibling.name for sibling in found.values())[:20],
            expected=f"{count} files in {path.parent}",
            fix="Download the missing parts into the same folder",
        )
    return [found[number] for number in range(1, count + 1)]


def _read_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Metadata and tensors of one file."""
    size = path.stat().st_size if path.is_file() else 0
    if size < 24:
        raise WeightsError(
            f"{path.name} is not a GGUF file, or it is truncated",
            value=f"{size} bytes",
            expected="at least 24",
            fix=_AGAIN,
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        if os.fstat(file.fileno()).st_size != len(mapped):
            raise WeightsError(f"{path.name} changed while it was read", fix="Start again when it is complete")
        return _Header(mapped, len(mapped), path.name).read()


class MoreNeededError(Exception):
    """The header is longer than the part that was read. At least the first `num_bytes` of the file are needed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def parse_start(start: bytes, size: int, name: str) -> list[TensorInfo]:
    """The tensors of a file of `size` bytes, from its first bytes.

    Raises MoreNeededError if `start` is too short, and WeightsError like `open_gguf`.
    """
    return _Header(start, size, name).read()[1]


class _Header:
    """A cursor over the header. Every read first checks that its bytes are there.

    Args:
        data: the file, or its start.
        size: bytes of the whole file.
    """

    def __init__(self, data: mmap.mmap | bytes, size: int, name: str) -> None:
        self._data, self._size, self._name = data, size, name
        self._limit = min(size, MAX_HEADER_BYTES)
        self._at = 0
        self._items_left = MAX_ITEMS

    def read(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        magic = self._data[:4]
        if magic != MAGIC:
            raise WeightsError(f"{self._name} is not a GGUF file", value=magic, expected="GGUF at its start")
        self._at = 4
        version = self._scalar("I")
        if version not in VERSIONS:
            what = "is big endian" if version == int.from_bytes((3).to_bytes(4, "big"), "little") else "is of a version"
            raise WeightsError(
                f"{self._name} {what} that is not read here",
                value=version,
                expected="GGUF 2 or 3, little endian",
                fix="Convert the model again with a current converter",
            )
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        # The smallest pair: an empty key, a type and one byte. The smallest tensor: an empty name, a type, an offset.
        self._check_count(num_pairs, 13, MAX_PAIRS, "key-value pairs")
        self._check_count(num_tensors, 24, MAX_TENSORS, "tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a key", MAX_NAME_BYTES)
            if key in metadata:
                raise self._wrong("names a key twice", key, "every key once")
            metadata[key] = self._value(self._scalar("I"), key)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not (isinstance(alignment, int) and 8 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0):
            raise self._wrong("has an illegal alignment", alignment, f"a power of two from 8 to {MAX_ALIGNMENT}")
        described = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        return metadata, self._placed(described, start, alignment)

    def _wrong(self, what: str, value: object, expected: str) -> WeightsError:
        return WeightsError(f"{self._name} {what}", value=value, expected=expected, fix=_AGAIN)

    def _need(self, count: int, what: str) -> None:
        """Check that the header has `count` more bytes."""
        if count > self._limit - self._at:
            left = self._limit - self._at
            problem = "declares a header larger than" if self._limit < self._size else "is truncated: its header needs"
            raise self._wrong(f"{problem} what is there ({what})", count, f"at most the {left} bytes left")
        if self._at + count > len(self._data):
            raise MoreNeededError(self._at + count)

    def _check_count(self, count: int, least_bytes: int, most: int, what: str) -> None:
        """Check that `count` items of at least `least_bytes` bytes each fit into the rest of the header."""
        if count > most:
            raise self._wrong(f"declares too many {what}", count, f"at most {most}")
        self._need(count * least_bytes, what)

    def _take_items(self, count: int, least_bytes: int, what: str) -> None:
        self._check_count(count, least_bytes, self._items_left, what)
        self._items_left -= count

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        self._need(size, "a number")
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += size
        return value

    def _string(self, what: str, most: int | None = None) -> str:
        length = self._scalar("Q")
        if most is not None and length > most:
            raise self._wrong(f"declares {what} that is too long", length, f"at most {most} bytes")
        self._need(length, what)
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"has {what} that is no UTF-8", raw[:40], "UTF-8") from None

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(f"the text {key}")
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise self._wrong(f"has a value of unknown type ({key})", kind, "a type from 0 to 12")
        value = self._scalar(_SCALARS[kind])
        if kind != _BOOL:
            return value
        if value > 1:
            raise self._wrong(f"has a boolean that is not 0 or 1 ({key})", value, "0 or 1")
        return bool(value)

    def _array(self, key: str, depth: int) -> Any:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            item_bytes = struct.calcsize(f"<{_SCALARS[kind]}")
            self._need(count * item_bytes, f"the array {key}")
            numbers = array.array(_SCALARS[kind])
            numbers.frombytes(self._data[self._at : self._at + count * item_bytes])
            if sys.byteorder == "big":
                numbers.byteswap()
            self._at += count * item_bytes
            return numbers
        if kind == _STRING:
            self._take_items(count, 8, f"strings in {key}")
            return self._strings(count, key)
        if kind != _ARRAY:
            raise self._wrong(f"has an array of unknown type ({key})", kind, "a type from 0 to 12")
        if depth == MAX_NESTING:
            raise self._wrong(f"nests arrays too deeply ({key})", depth + 1, f"at most {MAX_NESTING}")
        self._take_items(count, 12, f"arrays in {key}")
        return [self._array(key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[str]:
        """Read `count` strings, faster than with `_string`: vocabularies have hundreds of thousands of them."""
        data, at, limit = self._data, self._at, min(self._limit, len(self._data))
        unpack = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            if limit - at < 8:
                self._at = at
                self._need(8, f"a string of {key}")
            (length,) = unpack(data, at)
            at += 8
            if length > limit - at:
                self._at = at
                self._need(length, f"a string of {key}")
            raw = data[at : at + length]
            try:
                result.append(raw.decode())
            except UnicodeDecodeError:
                raise self._wrong(f"has a string in {key} that is no UTF-8", raw[:40], "UTF-8") from None
            at += length
        self._at = at
        return result

    def _tensor(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        """(name, type, shape, offset); the offset is not checked yet."""
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._wrong(
                f"has a tensor with an illegal number of dimensions ({name})", num_dims, f"1 to {MAX_DIMS}"
            )
        sizes = [self._scalar("Q") for _ in range(num_dims)]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in TYPES:
            shown = OTHER_TYPES.get(kind, kind)
            raise WeightsError(
                f"{self._name} has a tensor of a type that is not read here ({name})",
                value=shown,
                expected="one of " + ", ".join(known.name for known in TYPES.values()),
                fix="Take the file of another quantization, such as Q4_K_M or Q8_0" if kind in OTHER_TYPES else _AGAIN,
            )
        tensor_type = TYPES[kind]
        if min(sizes) < 1 or sizes[0] % tensor_type.block_size:
            expected = f"sizes of at least 1, rows of a multiple of {tensor_type.block_size} elements"
            raise self._wrong(f"has a tensor of an illegal shape ({name})", sizes, expected)
        return name, tensor_type, tuple(reversed(sizes)), offset

    def _placed(
        self, described: list[tuple[str, TensorType, tuple[int, ...], int]], start: int, alignment: int
    ) -> list[TensorInfo]:
        """The tensors in the order of their places. They are inside the file, aligned, and do not overlap."""
        infos = []
        for name, tensor_type, shape, offset in described:
            num_bytes = math.prod(shape) // tensor_type.block_size * tensor_type.block_bytes
            if offset % alignment:
                raise self._wrong(f"has a misaligned tensor ({name})", offset, f"a multiple of {alignment}")
            if num_bytes > self._size - start - offset:
                left = max(self._size - start - offset, 0)
                raise self._wrong(f"is truncated: tensor {name} needs more than is there", num_bytes, f"at most {left}")
            infos.append(TensorInfo(name, tensor_type, shape, start + offset, start + offset + num_bytes))
        infos.sort(key=lambda info: info.begin)
        for before, info in pairwise(infos):
            if info.begin < before.end:
                raise self._wrong(f"has tensors that overlap ({before.name}, {info.name})", info.begin, f"{before.end}")
        return infos
