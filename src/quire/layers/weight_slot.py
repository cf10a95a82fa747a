"""The places in a layer for tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quire.quantization.scheme import FLOATS


@dataclass(frozen=True)
class Extent:
    """What a rank reads of a tensor.

    Attributes:
        num_rows: the tensor has as many parts of equal size, one after the other.
        own: those that are read.
    """

    num_rows: int
    own: tuple[range, ...]

    def byte_ranges(self, begin: int, end: int) -> list[range]:
        """The places in a file of what is read of a tensor from `begin` to `end`, in order and without neighbours."""
        row_bytes, found = (end - begin) // self.num_rows, list[range]()
        for rows in sorted(self.own, key=lambda each: each.start):
            first, last = begin + rows.start * row_bytes, begin + rows.stop * row_bytes
            if found and found[-1].stop >= first:
                first = found.pop().start
            found.append(range(first, last))
        return [each for each in found if each]


@dataclass(slots=True)
class WeightSlot:
    """The shape and dtypes that a layer expects under one name, and the function that takes the tensor."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]  # may raise WeightsError about the values
    accepts: tuple[torch.dtype, ...] = FLOATS
    is_required: bool = True
    other_shapes: tuple[tuple[int, ...], ...] = ()  # shapes that are accepted too
    extent: Extent | None = None  # None: all of the tensor
    is_loaded: bool = False


@dataclass(slots=True)
class StackedSlots:
    """The slots of one tensor of each expert of a layer. A slot is made when it is asked for.

    Attributes:
        num_experts: in the checkpoint.
        places: of the experts that are taken, by their numbers.
        like: a slot of one expert, whose `load` is not used.
        load: takes the tensor of the expert at a place.
        loaded: the experts whose tensor came.
        stacked: the name of a tensor that holds the rows of all experts, and other rows; empty: there is none.
        rows: the place of these rows in it.
        is_transposed: it is [num_experts, columns, rows].
    """

    num_experts: int
    places: Mapping[int, int]
    like: WeightSlot
    load: Callable[[int, Tensor], None]
    stacked: str = ""
    rows: range = range(0)
    is_transposed: bool = False
    loaded: set[int] = field(default_factory=set)

    def of_expert(self, expert: int) -> WeightSlot:
        """The slot of one expert, as it is now."""
        like, is_loaded = self.like, expert in self.loaded
        load = partial(self._load, expert)
        return WeightSlot(like.shape, load, like.accepts, like.is_required, like.other_shapes, like.extent, is_loaded)

    def _load(self, expert: int, tensor: Tensor) -> None:
        self.loaded.add(expert)
        self.load(self.places[expert], tensor)


ExtentOf = Callable[[str], Extent | None]  # by the name of a tensor of the checkpoint
WeightSlots = Iterable[tuple[str, WeightSlot]]  # (name relative to the layer, slot)
AnySlots = Iterable[tuple[str, WeightSlot | StackedSlots]]
