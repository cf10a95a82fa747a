"""The adapters that a model holds: each has a slot, which is a row of pointers in a table of every layer.

To add or remove an adapter writes these rows between steps. On a CPU it copies no weights, and on a GPU the weights
were brought there when the adapter was packed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from quire.kernels.lora import LoraTable, PackedDelta, pack_delta
from quire.lora.adapter import Delta
from quire.lora.facts import AdapterFacts
from quire.models.decoder import Decoder

_Part = tuple[str, int]  # the name of a weight that adapters may change, and the first of its rows that are here


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in the form of the kernels, on the device of its model."""

    facts: AdapterFacts
    deltas: dict[_Part, PackedDelta]


class AdapterSlots:
    """The adapters in memory of one model. It gives the model's layers their tables.

    Args:
        num_slots: adapters that are in memory at the same time.
        max_rank: of a weight's delta.
        dtype: of the adapters' weights.
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
        self._device = model.device
        self._tables: list[tuple[LoraTable, list[_Part]]] = []
        self._looks_up: dict[str, bool] = {}  # by the name of a weight that adapters may change
        self._rows: dict[str, list[range]] = {}  # of that weight: those that are here
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
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def slots(self) -> Mapping[str, int]:
        """The slots of the adapters in memory, by digest. It follows their changes."""
        return MappingProxyType(self._slots)

    def pack(self, facts: AdapterFacts, deltas: Iterable[tuple[str, Delta]]) -> PackedAdapter:
        """Bring an adapter into the form of the kernels. Any thread may do it.

        Args:
            deltas: with the name of the weight that they change; AdapterSlots knows each of them.
        """
        packed: dict[_Part, PackedDelta] = {}
        for name, delta in deltas:
            for rows in self._rows[name]:
                b_NR = delta.b_NR[rows.start : rows.stop]
                part = pack_delta(delta.a_RK, b_NR, delta.scale, looks_up=self._looks_up[name])
                packed[name, rows.start] = part.to(self._device)
        return PackedAdapter(facts, packed)

    def add(self, adapter: PackedAdapter) -> None:
        """Give an adapter a slot, between steps. One that has a slot keeps it."""
        digest = adapter.facts.digest
        if digest in self._slots:
            return
        assert self._free, f"{digest} is one adapter too many for {len(self._slots)} slots"
        slot = self._free.pop()
        for table, parts in self._tables:
            table.set(slot, [adapter.deltas.get(part) for part in parts])
        self._slots[digest] = slot

    def remove(self, digest: str) -> None:
        """Give its slot back, between steps. No row has the adapter; an unknown digest is fine."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            return
        for table, _ in self._tables:
            table.clear(slot)
        self._free.append(slot)
