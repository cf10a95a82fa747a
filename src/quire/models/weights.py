"""Brings the tensors of a checkpoint to the layers that expect them, and says what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.layers.weight_slot import WeightSlot

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Buffers that old versions of transformers saved; they follow from the config.
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "attn.masked_bias",
    "attn.bias",
)
_MAX_NAMES = 5


class WeightTable:
    """All slots of a model by name, and the family's way of naming."""

    def __init__(
        self,
        slots: dict[str, WeightSlot],
        renamed_prefixes: tuple[tuple[str, str], ...] = (),
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        self._slots = slots
        self._renamed_prefixes = renamed_prefixes
        self._ignored_prefixes = ignored_prefixes

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape by name of every tensor a checkpoint must hold."""
        return {name: slot.shape for name, slot in self._slots.items()}

    def missing(self) -> list[str]:
        return [name for name, slot in self._slots.items() if not slot.is_loaded]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Consume (checkpoint name, tensor). Raises WeightsError naming what is missing, unexpected or unfit."""
        unexpected: list[str] = []
        unfit: list[str] = []
        for checkpoint_name, tensor in weights:
            if checkpoint_name.startswith(self._ignored_prefixes) or checkpoint_name.endswith(_IGNORED_SUFFIXES):
                continue
            slot = self._slots.get(self._rename(checkpoint_name))
            if slot is None:
                unexpected.append(checkpoint_name)
            elif slot.is_loaded:
                unfit.append(f"{checkpoint_name} comes twice")
            elif tuple(tensor.shape) != slot.shape:
                unfit.append(f"{checkpoint_name} has shape {list(tensor.shape)} instead of {list(slot.shape)}")
            elif tensor.dtype not in _DTYPES:
                unfit.append(f"{checkpoint_name} has dtype {str(tensor.dtype).removeprefix('torch.')}")
            else:
                slot.load(tensor)
                slot.is_loaded = True
        self._report(unexpected, unfit)

    def _rename(self, name: str) -> str:
        for prefix, ours in self._renamed_prefixes:
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name

    def _report(self, unexpected: list[str], unfit: list[str]) -> None:
        missing = [] if unfit else self.missing()  # what is unfit is missing too
        check_fit({"unfit": unfit, "missing": missing, "unexpected": unexpected})


def check_fit(names_by_problem: Mapping[str, Sequence[str]], messages: Sequence[str] = ()) -> None:
    """Raise WeightsError if there is any name or message: what does not fit between checkpoint and config.json."""
    problems = [_named(problem, names) for problem, names in names_by_problem.items() if names]
    if problems or messages:
        raise WeightsError(
            "The checkpoint does not fit its config.json: " + "; ".join([*problems, *messages]),
            fix="Check that config.json and all weight files are of one model and completely downloaded",
        )


def _named(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)} {kind} ({shown}{more})"
