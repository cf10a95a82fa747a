"""The adapters that a model holds: each has a slot, which is a row of pointers in a table of every layer.

An adapter is added or removed by writing these rows between steps. On a CPU it copies no weights, and on a GPU the
weights were brought there when the adapter was packed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from quire.kernels.lora import DeltaMemory, DeltaShape, LoraTable, SlotRow, empty_deltas, pack_factors
from quire.lora.adapter import AdapterFile
from quire.lora.facts import AdapterFacts
from quire.models.decoder import Decoder

_Part = tuple[str, int]  # the name of a weight that adapters may change, and the first of its rows that are here


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in the form of the kernels, on the device of its model: a row for each table of AdapterSlots."""

    facts: AdapterFacts
    rows: list[SlotRow]


class AdapterSlots:
    """The adapters in memory of one model. It gives the model's layers their tables.

    Args:
        num_slots: adapters that are in memory at the same time.
        max_rank: the largest rank of a weight's delta.
        dtype: the dtype of the adapters' weights.
        target_modules: last parts of the names of weights that adapters may change; none: all.
    """

    def __init__(
        self,
        model: Decoder,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        target_modules: Collection[str] = (),
    ) -> None:
        self._device, self._dtype = model.device, dtype
        self._tables: list[tuple[LoraTable, list[_Part]]] = []
        self._looks_up: dict[str, bool] = {}  # by the name of a weight that adapters may change
        self._rows: dict[str, list[range]] = {}  # the adapters of that weight that are here
        for place in model.adaptable():
            names = tuple(name for name, _ in place.parts)
            if target_modules and not any(name.rpartition(".")[2] in target_modules for name in names):
                continue
            columns = [num_columns for _, num_columns in place.parts]
            rows = place.rows or [range(num_columns) for num_columns in columns]
            sizes = (num_slots, max_rank, place.in_features, columns)
            table = LoraTable(*sizes, dtype, model.device, looks_up=place.looks_up)
            place.layer.lora = table
            self._tables.append((table, [(name, own.start) for name, own in zip(names, rows, strict=True)]))
            self._looks_up |= dict.fromkeys(names, place.looks_up)
            for name, own in zip(names, rows, strict=True):
                self._rows.setdefault(name, []).append(own)
        self._memory = DeltaMemory()
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def slots(self) -> Mapping[str, int]:
        """The slots of the adapters in memory, by digest. It follows their changes."""
        return MappingProxyType(self._slots)

    def pack(self, file: AdapterFile) -> PackedAdapter:
        """Read an adapter into the form of the kernels. Any thread may do it.

        Args:
            file: a file of weights that the model has here or in another stage.
        """
        parts = [(module, rows) for module in file.modules for rows in self._rows.get(module.name, ())]
        shapes = [
            DeltaShape(module.rank, module.in_features, len(rows), module.scale, self._looks_up[module.name])
            for module, rows in parts
        ]
        keys = [(module.name, rows.start) for module, rows in parts]
        deltas = dict(zip(keys, empty_deltas(shapes, self._dtype, self._memory), strict=True))
        for piece in file.pieces(self._dtype):
            factors = []
            for entry, module in piece.entries:
                begin, dtype = entry.begin - piece.begin, getattr(torch, entry.dtype)
                for rows in self._rows.get(module.name, ()):
                    delta = deltas[module.name, rows.start]
                    if entry is module.entries[0]:
                        factors.append(delta.a_from(begin, dtype))
                    else:
                        factors.append(delta.b_from(begin + rows.start * module.rank * dtype.itemsize, dtype))
            if factors:
                pack_factors(piece.raw, factors, next(iter(deltas.values())).memory)
        if self._device.type != "cpu" and deltas:
            memory = next(iter(deltas.values())).memory.to(self._device)
            deltas = {part: replace(delta, memory=memory) for part, delta in deltas.items()}
        rows_of_tables = [table.row([deltas.get(part) for part in parts]) for table, parts in self._tables]
        return PackedAdapter(file.facts(self._dtype), rows_of_tables)

    def add(self, adapter: PackedAdapter) -> None:
        """Give an adapter a slot, between steps. An adapter that has a slot keeps it."""
        digest = adapter.facts.digest
        if digest in self._slots:
            return
        assert self._free, f"{digest} is one adapter too many for {len(self._slots)} slots"
        slot = self._free.pop()
        for (table, _), row in zip(self._tables, adapter.rows, strict=True):
            table.put(slot, row)
        self._slots[digest] = slot

    def remove(self, digest: str) -> None:
        """Give its slot back, between steps. No row has the adapter; an unknown digest is fine."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            return
        for table, _ in self._tables:
            table.clear(slot)
        self._free.append(slot)
