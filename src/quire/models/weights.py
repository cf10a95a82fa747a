"""Brings the tensors of a checkpoint to the layers that expect them, and reports tensors that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import WeightsError
from quire.layers.weight_slot import Extent, StackedSlots, WeightSlot, parts_of_all
from quire.logs import get_logger
from quire.model_config import EXPERT

# Old versions of transformers saved these buffers. Their values follow from the config.
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
# Scales of FP8 weights with one scale per tensor: pairs of the suffix that transformers writes and the usual suffix.
_OTHER_SUFFIXES = ((".weight_scale_inv", ".weight_scale"), (".activation_scale", ".input_scale"))
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
    """All weight slots of a model by name. It translates the family's names of tensors to ours.

    Args:
        slots: the slots by our name. The name of a stack of experts has `{}` in place of the expert's number.
        renamed_prefixes: pairs of a prefix in the checkpoint and our prefix.
        ignored_prefixes: tensors with these prefixes are not used.
    """

    def __init__(
        self,
        slots: dict[str, WeightSlot | StackedSlots],
        renamed_prefixes: tuple[tuple[str, str], ...] = (),
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        self._slots = {name: slot for name, slot in slots.items() if isinstance(slot, WeightSlot)}
        self._stacks = {name: slots for name, slots in slots.items() if isinstance(slots, StackedSlots)}
        self._stacked: dict[str, list[str]] = {}  # name of a tensor of all experts: the stacks with parts of it
        for name, stack in self._stacks.items():
            self._stacked[name] = [name]
            for stacked in stack.stacked:
                self._stacked.setdefault(stacked, []).append(name)
        self._renamed_prefixes = renamed_prefixes
        self._ignored_prefixes = ignored_prefixes

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that a checkpoint must hold, by name."""
        return {name: slot.shape for name, slot in self._all() if slot.is_required}

    def missing(self) -> list[str]:
        """The names of tensors that must still be loaded."""
        return [name for name, slot in self._all() if slot.is_required and not slot.is_loaded]

    def mark_loaded(self) -> None:
        """Mark every slot as loaded, because the weights came from a cache."""
        for slot in self._slots.values():
            slot.is_loaded = True
        for stack in self._stacks.values():
            stack.loaded.update(stack.places)

    def check(self, headers: Iterable[tuple[str, Tensor]]) -> None:
        """Raise WeightsError, like `load`, for tensors that would not fit. Nothing is loaded.

        Args:
            headers: the name of each tensor of the checkpoint, and a tensor without values (on torch's device `meta`).
        """
        self._visit((pair for pair in headers if not pair[0].endswith(_KV_SCALE_SUFFIXES)), lambda slot, header: None)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take pairs of (checkpoint name, tensor).

        Raises:
            WeightsError: tensors are missing, unexpected or unfit. The message names them.
        """

        def load_into(slot: WeightSlot, tensor: Tensor) -> None:
            slot.is_loaded = True
            slot.load(tensor)

        self._visit(without_kv_scales(weights), load_into)

    def _visit(self, weights: Iterable[tuple[str, Tensor]], take: Callable[[WeightSlot, Tensor], None]) -> None:
        """Call `take` for each tensor that fits, then raise WeightsError if there are others or some are missing."""
        unexpected: list[str] = []
        unfit: list[str] = []
        seen: set[str] = set()
        for checkpoint_name, tensor in self._of_one_expert(weights, unfit):
            if checkpoint_name.startswith(self._ignored_prefixes) or checkpoint_name.endswith(_IGNORED_SUFFIXES):
                continue
            name = self._known_name(checkpoint_name)
            slot = self._slot(name)
            if slot is None:
                if not _is_void(checkpoint_name, tensor):
                    unexpected.append(checkpoint_name)
            elif (why := " comes twice" if name in seen else _misfit(slot, tensor)) is not None:
                unfit.append(checkpoint_name + why)
            else:
                try:
                    take(slot, tensor)
                except WeightsError as error:
                    unfit.append(f"{checkpoint_name}: {error.what}")
            seen.add(name)
        missing = [] if unfit else [n for n, slot in self._all() if slot.is_required and n not in seen]
        check_fit({"unfit": unfit, "missing": missing, "unexpected": unexpected})  # an unfit tensor is missing too

    def own_name(self, checkpoint_name: str) -> str | None:
        """Our name for a tensor of the checkpoint; None: the model does not use the tensor."""
        name = self._known_name(checkpoint_name)
        is_used = self._slot(name) is not None and not checkpoint_name.startswith(self._ignored_prefixes)
        return name if is_used else None

    def is_of_all_experts(self, checkpoint_name: str) -> bool:
        """Whether a tensor of the checkpoint holds the tensors of all experts of a layer."""
        return renamed(checkpoint_name, self._renamed_prefixes) in self._stacked

    def extent(self, checkpoint_name: str) -> Extent | None:
        """The part of a tensor of the checkpoint that is read; None: all of the tensor is read."""
        name = renamed(checkpoint_name, self._renamed_prefixes)
        if (names := self._stacked.get(name)) is None:
            slot = self._slot(self._known_name(checkpoint_name))
            return None if slot is None else slot.extent
        stacks = [self._stacks[each] for each in names]
        first, num_rows = stacks[0], sum(stack.like.shape[0] for stack in stacks)
        begins = [0] if len(stacks) == 1 else [stack.rows.start for stack in stacks]
        own: list[range] = []
        for begin, stack in zip(begins, stacks, strict=True):
            extent, is_whole = stack.like.extent, stack.is_transposed or stack.rows.step != 1
            if extent is None or is_whole or extent.num_columns > 1:
                return Extent(first.num_experts, tuple(range(expert, expert + 1) for expert in first.places))
            for start in (expert * num_rows + begin for expert in stack.places):
                own += [range(start + rows.start, start + rows.stop) for rows in extent.own]
        return Extent(first.num_experts * num_rows, tuple(own))

    def load_some(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some tensors by our names. Each must fit."""
        for name, tensor in weights:
            slot = self._slot(name)
            assert slot is not None, name
            slot.load(tensor)

    def _all(self) -> Iterator[tuple[str, WeightSlot]]:
        yield from self._slots.items()
        for name, stack in self._stacks.items():
            yield from ((name.format(expert), stack.of_expert(expert)) for expert in stack.places)

    def _slot(self, name: str) -> WeightSlot | None:
        if name in self._slots or not self._stacks:
            return self._slots.get(name)
        match = EXPERT.fullmatch(name)
        if match is None or (stack := self._stacks.get(f"{match[1]}{{}}{match[3]}")) is None:
            return None
        expert = int(match[2])
        return stack.of_expert(expert) if expert in stack.places and str(expert) == match[2] else None

    def _known_name(self, checkpoint_name: str) -> str:
        """Our name for a tensor, whether or not the model has it. Other suffixes of scales become ours."""
        name = renamed(checkpoint_name, self._renamed_prefixes)
        for other, own in _OTHER_SUFFIXES:
            if name.endswith(other) and self._slot(name) is None:
                return name.removesuffix(other) + own
        return name

    def _of_one_expert(self, weights: Iterable[tuple[str, Tensor]], unfit: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors. A tensor that holds all experts is cut into views, one expert after the other."""
        for checkpoint_name, tensor in weights:
            own = renamed(checkpoint_name, self._renamed_prefixes)
            names = self._stacked.get(own)
            if names is None:
                yield checkpoint_name, tensor
                continue
            stacks = [self._stacks[name] for name in names]
            is_transposed = stacks[0].is_transposed and own in stacks[0].stacked
            parts = parts_of_all(tensor, stacks, is_transposed=is_transposed)
            if parts is None:
                shape = [stacks[0].num_experts, sum(stack.like.shape[0] for stack in stacks), *stacks[0].like.shape[1:]]
                expected = [shape[0], *reversed(shape[1:])] if is_transposed else shape
                unfit.append(f"{checkpoint_name} has shape {list(tensor.shape)} instead of {expected}")
                continue
            for expert in stacks[0].places:
                for name, part in zip(names, parts, strict=True):
                    yield name.format(expert), part[expert]


def renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """The name with our prefix. The first pair (prefix in the checkpoint, our prefix) that fits is used."""
    for prefix, ours in prefixes:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def check_fit(names_by_problem: Mapping[str, Sequence[str]], messages: Sequence[str] = ()) -> None:
    """Raise WeightsError if there is any name or message: then the checkpoint and config.json do not fit."""
    problems = [_named(problem, names) for problem, names in names_by_problem.items() if names]
    if problems or messages:
        raise WeightsError(
            "The checkpoint does not fit its config.json: " + "; ".join([*problems, *messages]),
            fix="Check that config.json and all weight files are of one model and completely downloaded",
        )


def _misfit(slot: WeightSlot, tensor: Tensor) -> str | None:
    """The reason why the tensor cannot go to the slot, as the end of a sentence; None: it can."""
    if tuple(tensor.shape) not in (slot.shape, *slot.other_shapes):
        return f" has shape {list(tensor.shape)} instead of {list(slot.shape)}"
    if tensor.dtype not in slot.accepts:
        return f" has dtype {_shown(tensor.dtype)} instead of {' or '.join(map(_shown, slot.accepts))}"
    return None


def _is_void(name: str, tensor: Tensor) -> bool:
    """Whether the tensor is, or may be, a bias of zeros. Old quantizers saved one for layers without bias."""
    return name.endswith(".bias") and (tensor.is_meta or not tensor.any())


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(kind: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{len(names)} {kind} ({shown}{more})"
