"""Safetensors checkpoints: headers are checked first; then tensors are mapped, not copied."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.errors import WeightsError
from quire.kernels.pages import map_file
from quire.loader.object_store import stored_object
from quire.loader.safetensors_headers import TensorEntry, read_headers
from quire.loader.streamed import stream_tensors
from quire.messages import Progress
from quire.resolve import shown_bytes

READ_AHEAD_BYTES = 64 << 20  # the operating system is asked to read these bytes ahead


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

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in file order. Each is a view of the mapped file: read or copy it, never write to it.

        The iteration gives the pages of earlier tensors back to the system, so that mapped and packed weights are not
        in memory together. A view that is kept longer is read from the page cache again.
        """
        total = max(self.num_bytes, 1)
        done = 0
        for path, entries in self.files.items():
            for entry, tensor in map_tensors(path, entries):
                yield entry.name, tensor
                del tensor
                done += entry.end - entry.begin
                if progress:
                    progress("load", done / total, f"{shown_bytes(done)} of {shown_bytes(total)}")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """The validated headers of a folder. Raises WeightsError like read_headers."""
    return Checkpoint(Path(folder), read_headers(Path(folder)))


def map_tensors(
    path: Path, entries: list[TensorEntry], names: Collection[str] | None = None
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Yield (entry, view of the mapped file) in file order: all tensors of one file, or only the `names`.

    Tensors of an object in an object store are read into memory of their own.
    """
    wanted = [entry for entry in entries if names is None or entry.name in names]
    if not wanted:
        return
    if (source := stored_object(path)) is not None:
        yield from stream_tensors(source, wanted)
        return
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < entries[-1].end:
            raise WeightsError(
                f"{path.name} changed while it was being loaded", fix="Start again when the download is complete"
            )
        mapped = map_file(file)
    advice = _PageAdvice(mapped, wanted[-1].end)
    for entry in wanted:
        advice.move(entry.begin, entry.end)
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
    """Tells the operating system which pages of a mapping come next and which are done, if it has madvise."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self.mapped, self.size = mapped, size
        self.requested = self.released = 0  # everything before these offsets
        self.enabled = hasattr(mmap, "MADV_WILLNEED") and hasattr(mmap, "MADV_DONTNEED")

    def move(self, begin: int, end: int) -> None:
        """The bytes begin..end come next, and all bytes before them are done."""
        if not self.enabled:
            return
        wanted = min(end + READ_AHEAD_BYTES, self.size)
        if wanted - self.requested >= READ_AHEAD_BYTES // 4 or (wanted == self.size and self.requested < wanted):
            start = _page_floor(self.requested)
            self.mapped.madvise(mmap.MADV_WILLNEED, start, wanted - start)
            self.requested = wanted
        done = _page_floor(begin)
        if done > self.released:
            self.mapped.madvise(mmap.MADV_DONTNEED, self.released, done - self.released)
            self.released = done


def _page_floor(offset: int) -> int:
    return offset - offset % mmap.PAGESIZE
