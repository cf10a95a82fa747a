"""Slots: the places of a layer for the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from quire.quantization.scheme import FLOATS

LARGEST_SHARE = 0.75  # of a row, with the cost of its pieces; above it the row is read whole


@dataclass(frozen=True)
class Extent:
    """The part of a tensor that a rank reads: some columns of some rows.

    Attributes:
        num_rows: the tensor is cut into this number of parts of equal size, one after the other.
        own: the numbers of the parts that are read.
        num_columns: each row is cut into this number of parts of equal size.
        columns: the numbers of the parts of each row that are read.
    """

    num_rows: int
    own: tuple[range, ...]
    num_columns: int = 1
    columns: tuple[range, ...] = (range(1),)

    def byte_ranges(self, begin: int, end: int, grain: int) -> list[range]:
        """The byte ranges of the read parts, in order, if the tensor is at `begin` to `end` of a file. Neighbouring
        ranges are joined.

        Args:
            grain: reading a piece costs as much as reading this many bytes more. Rows are read whole if their pieces
                would save less than a quarter.
        """
        row_bytes, found = (end - begin) // self.num_rows, list[range]()
        pieces = [_scaled(columns, row_bytes, self.num_columns) for columns in self.columns]
        is_whole = sum(len(piece) + grain for piece in pieces) > LARGEST_SHARE * row_bytes
        for rows in sorted(self.own, key=lambda each: each.start):
            if is_whole:
                _join(found, range(begin + rows.start * row_bytes, begin + rows.stop * row_bytes))
                continue
            for start in range(begin + rows.start * row_bytes, begin + rows.stop * row_bytes, row_bytes):
                for piece in pieces:
                    _join(found, range(start + piece.start, start + piece.stop))
        return [each for each in found if each]


def _scaled(columns: range, row_bytes: int, num_columns: int) -> range:
    return range(columns.start * row_bytes // num_columns, columns.stop * row_bytes // num_columns)


def _join(found: list[range], part: range) -> None:
    """Append a part, or join it with the last one."""
    if found and found[-1].stop >= part.start:
        part = range(found.pop().start, part.stop)
    found.append(part)


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

    @property
    def takes_number(self) -> bool:
        """Whether one number may stand for the whole tensor: a scale."""
        return () in self.other_shapes


@dataclass(slots=True)
class StackedSlots:
    """The slots for one tensor of each expert of a layer. The slot of an expert is made when it is asked for.

    Attributes:
        num_experts: the number of experts in the checkpoint.
        places: expert -> its place, for the experts that are taken.
        like: a slot of one expert. It gives shape and dtypes; its `load` is not used.
        load: takes the tensor of the expert at a place.
        loaded: the experts that have their tensor.
        stacked: a single tensor may hold the rows of all experts, and other rows too. These are its possible names.
        rows: the place of this layer's rows in such a tensor.
        is_transposed: whether such a tensor is [num_experts, columns, rows].
    """

    num_experts: int
    places: Mapping[int, int]
    like: WeightSlot
    load: Callable[[int, Tensor], None]
    stacked: tuple[str, ...] = ()
    rows: range = range(0)
    is_transposed: bool = False
    loaded: set[int] = field(default_factory=set)

    def of_expert(self, expert: int) -> WeightSlot:
        """The slot of one expert, with the layer's present state."""
        like, is_loaded = self.like, expert in self.loaded
        load = partial(self._load, expert)
        return WeightSlot(like.shape, load, like.accepts, like.is_required, like.other_shapes, like.extent, is_loaded)

    def _load(self, expert: int, tensor: Tensor) -> None:
        self.loaded.add(expert)
        self.load(self.places[expert], tensor)


def parts_of_all(tensor: Tensor, slots: Sequence[StackedSlots], *, is_transposed: bool) -> list[Tensor] | None:
    """The part of each slot in a tensor of all E experts: views [E, ...]. None: the tensor has another shape.

    If one number may stand for a whole tensor, there may be one number for all experts, one for each expert, or one for
    each expert and slot. If there is a scale for each row, the dimension of its one column may be missing, or come
    before the dimension of the rows.
    """
    E, num_slots = slots[0].num_experts, len(slots)
    shape = tuple(tensor.shape)
    if all(each.like.takes_number for each in slots):
        if shape in ((), (1,), (E,), (E, 1), (E, 1, 1)):
            numbers_E = tensor.reshape(-1).expand(E)
            return [numbers_E] * num_slots
        if shape in ((E, num_slots), (E, num_slots, 1)):
            return list(tensor.view(E, num_slots).unbind(1))
    whole = (E, sum(each.like.shape[0] for each in slots), *slots[0].like.shape[1:])
    if whole[2:] == (1,) and shape in (whole[:2], (E, 1, whole[1])):
        tensor = tensor.reshape(whole)
    elif is_transposed:
        tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    if tuple(tensor.shape) != whole:
        return None
    if num_slots == 1:
        return [tensor]
    return [tensor[:, each.rows.start : each.rows.stop : each.rows.step] for each in slots]


ExtentOf = Callable[[str], Extent | None]  # the argument is the name of a tensor of the checkpoint
WeightSlots = Iterable[tuple[str, WeightSlot]]  # (name relative to the layer, slot)
AnySlots = Iterable[tuple[str, WeightSlot | StackedSlots]]
