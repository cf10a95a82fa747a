"""Safetensors checkpoints: headers are checked first; then tensors are mapped, not copied."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.errors import WeightsError
from quire.kernels.pages import map_file, page_floor
from quire.layers.weight_slot import ExtentOf
from quire.loader.extents import all_of, ranges_read
from quire.loader.object_store import stored_object
from quire.loader.safetensors_headers import TensorEntry, read_headers
from quire.loader.streamed import stream_tensors
from quire.messages import Progress
from quire.resolve import shown_bytes

READ_AHEAD_BYTES = 64 << 20  # the operating system is asked to read these bytes ahead
ASK_BYTES = 128 << 10  # bytes of one call: Linux reads at most its own read-ahead for a call


@dataclass(frozen=True)
class Checkpoint:
    """The validated headers of a folder's weights. Files are in name order, and tensors in file order."""

    folder: Path
    files: dict[Path, list[TensorEntry]]

    @property
    def num_bytes(self) -> int:
        return sum(entry.end - entry.begin for entries in self.files.values() for entry in entries)

    @property
    def names(self) -> list[str]:
        return [entry.name for entries in self.files.values() for entry in entries]

    def only(self, is_wanted: Callable[[str], bool]) -> Checkpoint:
        """The tensors whose names are wanted."""
        wanted = {path: [entry for entry in entries if is_wanted(entry.name)] for path, entries in self.files.items()}
        return Checkpoint(self.folder, wanted)

    def headers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor without values)."""
        for entries in self.files.values():
            for entry in entries:
                yield entry.name, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")

    def some(self, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors with these names, like `tensors`."""
        for path, entries in self.files.items():
            for entry, tensor in map_tensors(path, entries, names):
                yield entry.name, tensor

    def tensors(
        self, progress: Progress | None = None, extent_of: ExtentOf = all_of
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in file order. Each is a view of the mapped file: read or copy it, never write to it.

        Only the parts of a tensor in `extent_of` may be read. The other bytes are not defined.

        The iteration gives the pages of earlier tensors back to the system, so that mapped and packed weights are not
        in memory together. A view that is kept longer is read from the page cache again.
        """
        total = max(self.num_bytes, 1)
        done = 0
        for path, entries in self.files.items():
            for entry, tensor in map_tensors(path, entries, extent_of=extent_of):
                yield entry.name, tensor
                del tensor
                done += entry.end - entry.begin
                if progress:
                    progress("load", done / total, f"{shown_bytes(done)} of {shown_bytes(total)}")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The validated headers of a folder. Raises WeightsError like read_headers."""
    return Checkpoint(Path(folder), read_headers(Path(folder)))


def map_tensors(
    path: Path, entries: list[TensorEntry], names: Collection[str] | None = None, extent_of: ExtentOf = all_of
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Yield (entry, view of the mapped file) in file order: all tensors of one file, or only the `names`.

    Tensors of an object in an object store are read into memory of their own. `extent_of`: see Checkpoint.tensors.
    """
    wanted = [entry for entry in entries if names is None or entry.name in names]
    if not wanted:
        return
    if (source := stored_object(path)) is not None:
        yield from stream_tensors(source, wanted, extent_of)
        return
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < entries[-1].end:
            raise WeightsError(
                f"{path.name} changed while it was being loaded", fix="Start again when the download is complete"
            )
        mapped = map_file(file)
    parts = [ranges_read(entry, extent_of(entry.name), mmap.PAGESIZE) for entry in wanted]
    advice = _PageAdvice(mapped, parts)
    for entry, ranges in zip(wanted, parts, strict=True):
        advice.move(entry.begin, sum(map(len, ranges)))
        count, dtype = math.prod(entry.shape), getattr(torch, entry.dtype)
        if not count:
            tensor = torch.empty(entry.shape, dtype=dtype)
        elif entry.begin % dtype.itemsize:  # some writers do not pad the header, so data is unaligned
            tensor = torch.frombuffer(bytearray(mapped[entry.begin : entry.end]), dtype=dtype).view(entry.shape)
        else:
            tensor = torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)
        yield entry, tensor
        del tensor


class _PageAdvice:
    """Tells the operating system which pages of a mapping come next and which are done, if it has madvise.

    Args:
        parts: the bytes of each tensor that will be read, in file order.
    """

    def __init__(self, mapped: mmap.mmap, parts: Sequence[Sequence[range]]) -> None:
        self.mapped = mapped
        self.ahead = _in_pieces(parts)
        self.num_ahead = 0  # bytes that were asked for, and are of later tensors
        self.released = 0  # everything before this offset
        self.enabled = hasattr(mmap, "MADV_WILLNEED") and hasattr(mmap, "MADV_DONTNEED")

    def move(self, begin: int, num_bytes: int) -> None:
        """A tensor comes next, this many of its bytes are read, and all bytes before it are done."""
        if not self.enabled:
            return
        self.num_ahead -= num_bytes
        if self.num_ahead <= READ_AHEAD_BYTES * 3 // 4:
            while self.num_ahead < READ_AHEAD_BYTES and (part := next(self.ahead, None)) is not None:
                start = page_floor(part.start)
                self.mapped.madvise(mmap.MADV_WILLNEED, start, part.stop - start)
                self.num_ahead += len(part)
        done = page_floor(begin)
        if done > self.released:
            self.mapped.madvise(mmap.MADV_DONTNEED, self.released, done - self.released)
            self.released = done


def _in_pieces(parts: Sequence[Sequence[range]]) -> Iterator[range]:
    """The same bytes, at most ASK_BYTES at once."""
    begin = end = 0
    for part in (part for ranges in parts for part in ranges):
        if part.start != end:
            if begin < end:
                yield range(begin, end)
            begin = part.start
        end = part.stop
        while end - begin >= ASK_BYTES:
            yield range(begin, begin + ASK_BYTES)
            begin += ASK_BYTES
    if begin < end:
        yield range(begin, end)
