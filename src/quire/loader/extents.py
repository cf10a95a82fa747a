"""The bytes of a checkpoint that a rank reads: it needs only some rows of a tensor."""

from __future__ import annotations

from quire.layers.weight_slot import Extent
from quire.loader.safetensors_headers import TensorEntry

LEAST_CUT_BYTES = 256 << 10  # smaller tensors are read whole: pages, and requests, are not much finer


def all_of(name: str) -> Extent | None:
    """The extent of every tensor if all of it is read."""
    return None


def ranges_read(entry: TensorEntry, extent: Extent | None, grain: int) -> list[range]:
    """The places in the file of the read parts of a tensor, in order. `grain`: see Extent.byte_ranges."""
    if extent is None or entry.end - entry.begin < LEAST_CUT_BYTES:
        return [range(entry.begin, entry.end)] if entry.end > entry.begin else []
    return extent.byte_ranges(entry.begin, entry.end, grain)
