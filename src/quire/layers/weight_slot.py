"""Where one tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class WeightSlot:
    """The shape a layer expects under one name, and what takes the tensor."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    is_loaded: bool = False


WeightSlots = Iterable[tuple[str, WeightSlot]]  # (name relative to the layer, slot)
