"""Brings the tensors of a checkpoint to the layers that expect them, and reports tensors that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.layers.weight_slot import WeightSlot
from quire.logs import get_logger

# Buffers that old versions of transformers saved. They follow from the config.
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "attn.masked_bias",
    "attn.bias",
)
# Calibrated scales of a float8 KV cache, in the names of vLLM, ModelOpt and older tools.
_KV_SCALE_SUFFIXES = (
    *(".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    *(".k_proj.output_scale", ".v_proj.output_scale"),
)
_MAX_NAMES = 5

logger = get_logger(__name__)


def without_kv_scales(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Leave out calibrated scales of the KV cache, with a log line. Our caches need none (docs/quantization.md)."""
    left_out = []
    for name, tensor in weights:
        if name.endswith(_KV_SCALE_SUFFIXES):
            left_out.append(name)
        else:
            yield name, tensor
    if left_out:
        logger.info(
            "The checkpoint's calibrated scales of the KV cache are not used (%d, as %s): fp8 needs none here, int8 "
            "measures its own",
            len(left_out),
            left_out[0],
        )


class WeightTable:
    """All slots of a model by name, and the family's names of tensors."""

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
        """Shapes of all tensors that a checkpoint must hold, by name."""
        return {name: slot.shape for name, slot in self._slots.items() if slot.is_required}

    def missing(self) -> list[str]:
        return [name for name, slot in self._slots.items() if slot.is_required and not slot.is_loaded]

    def mark_loaded(self) -> None:
        """Mark every slot as loaded: the weights came from a cache."""
        for slot in self._slots.values():
            slot.is_loaded = True

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take (checkpoint name, tensor) pairs. Raises WeightsError with missing, unexpected and unfit names."""
        unexpected: list[str] = []
        unfit: list[str] = []
        for checkpoint_name, tensor in without_kv_scales(weights):
            if checkpoint_name.startswith(self._ignored_prefixes) or checkpoint_name.endswith(_IGNORED_SUFFIXES):
                continue
            slot = self._slots.get(renamed(checkpoint_name, self._renamed_prefixes))
            if slot is None:
                if not _is_void(checkpoint_name, tensor):
                    unexpected.append(checkpoint_name)
            elif slot.is_loaded:
                unfit.append(f"{checkpoint_name} comes twice")
            elif tuple(tensor.shape) not in (slot.shape, *slot.other_shapes):
                unfit.append(f"{checkpoint_name} has shape {list(tensor.shape)} instead of {list(slot.shape)}")
            elif tensor.dtype not in slot.accepts:
                expected = " or ".join(_shown(dtype) for dtype in slot.accepts)
                unfit.append(f"{checkpoint_name} has dtype {_shown(tensor.dtype)} instead of {expected}")
            else:
                try:
                    slot.load(tensor)
                except WeightsError as error:
                    unfit.append(f"{checkpoint_name}: {error.what}")
                slot.is_loaded = True
        missing = [] if unfit else self.missing()  # an unfit tensor is missing too
        check_fit({"unfit": unfit, "missing": missing, "unexpected": unexpected})

    def own_name(self, checkpoint_name: str) -> str | None:
        """Our name of a tensor of the checkpoint; None: the model does not use it."""
        name = renamed(checkpoint_name, self._renamed_prefixes)
        return name if name in self._slots and not checkpoint_name.startswith(self._ignored_prefixes) else None

    def load_some(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some tensors by our names. Each must fit."""
        for name, tensor in weights:
            self._slots[name].load(tensor)


def renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """The name with our prefix: the first pair (prefix in the checkpoint, ours) that fits is used."""
    for prefix, ours in prefixes:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def check_fit(names_by_problem: Mapping[str, Sequence[str]], messages: Sequence[str] = ()) -> None:
    """Raise WeightsError if there is any name or message. The checkpoint and config.json do not fit then."""
    problems = [_named(problem, names) for problem, names in names_by_problem.items() if names]
    if problems or messages:
        raise WeightsError(
            "The checkpoint does not fit its config.json: " + "; ".join([*problems, *messages]),
            fix="Check that config.json and all weight files are of one model and completely downloaded",
        )


def _is_void(name: str, tensor: Tensor) -> bool:
    """Whether it is a bias of zeros. Old quantizers saved one for layers without bias."""
    return name.endswith(".bias") and not tensor.any()


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)} {kind} ({shown}{more})"
