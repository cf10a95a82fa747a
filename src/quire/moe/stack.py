"""The same linear layer of all experts. It takes the tensors of the experts in any order, and packs each expert when
all its tensors are here.

Dimensions: T tokens, E experts, P pairs of a token and an expert, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.errors import WeightsError
from quire.formats.stored_linear import StoredLinear, row_unit
from quire.kernels.expert_stack import PackedStack, StackBuilder
from quire.kernels.experts import expert_linear
from quire.kernels.routing import Routing
from quire.layer_spec.cuts import Placement, Share
from quire.layers.linear import Linear
from quire.layers.weight_slot import StackedSlots, WeightSlot
from quire.quantization.select import select_scheme

# Its names for FP8 with a scale per tensor.
_OF_TRANSFORMERS = {"weight_scale": ("_scale_inv",), "input_scale": ("_activation_scale",)}


class ExpertStack:
    """y = x W_e^T + b_e, with the expert e of each row.

    The layer of one expert exists only while its tensors come. The packed weight lies in the stack from the start.

    Args:
        stored: the stored form of all experts.
        dtype: the dtype of weight, input and output.
    """

    held = ("stack", "bias_EN")

    def __init__(self, stored: StoredLinear, dtype: torch.dtype) -> None:
        shape = stored.shape
        self.out_features, self._num_experts = shape.out_features, shape.num_experts
        self._shape, self._dtype, self._scheme = shape, dtype, select_scheme(stored)
        self._row_unit = row_unit(stored)
        placement = shape.placement
        numbers = range(shape.num_experts) if placement is None else placement.own
        self._places = {number: place for place, number in enumerate(numbers)}
        self._first_place = None if placement is None else placement.firsts[placement.rank]
        self._builder = StackBuilder(shape.num_experts, shape.out_features)
        self._arriving: dict[int, Linear] = {}
        self.stack: PackedStack | None = None
        self.bias_EN: Tensor | None = None

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, out: Tensor | None = None) -> Tensor:
        """[P, N] in the order of the routing. x: [T, K] if `of_tokens`, else [P, K] in that order.

        A rank fills the rows of its own experts.
        """
        assert self.stack is not None
        bias_EN, first = self.bias_EN, self._first_place
        return expert_linear(x, self.stack, routing, of_tokens=of_tokens, bias_EN=bias_EN, out=out, first_place=first)

    def slots(self) -> Iterator[tuple[str, StackedSlots]]:
        """The slots of all experts under one name each, with `{}` for the expert in the prefix."""
        shape = self._shape
        for name, like in self._layer(0).slots():
            shard, _, tensor = name.rpartition(".")
            rows, num_rows = self._rows[shard], like.shape[0]
            has_stack = bool(shape.stacked)
            if num_rows != len(rows):  # a row belongs to a block of outputs, or is the only row
                has_stack = has_stack and (like.takes_number or self._has_whole_blocks)
                begin = rows.start * num_rows // len(rows)
                rows = range(begin, begin + num_rows)
            yield (
                name,
                StackedSlots(
                    shape.num_stored_experts,
                    self._places,
                    like,
                    self._loader(name, like),
                    tuple(shape.stacked + suffix for suffix in _suffixes(tensor)) if has_stack else (),
                    rows,
                    is_transposed=tensor == "weight" and shape.stacked_form != "rows",
                ),
            )

    @cached_property
    def _rows(self) -> dict[str, range]:
        """The outputs of each shard in a tensor of all experts."""
        whole = self._shape.whole()
        shards, end = whole.shards, whole.out_features
        if self._shape.stacked_form == "turns":
            return {name: range(first, end, len(shards)) for first, (name, _) in enumerate(shards)}
        begins = accumulate((size for _, size in shards), initial=0)
        return {name: range(begin, begin + size) for (name, size), begin in zip(shards, begins, strict=False)}

    @cached_property
    def _has_whole_blocks(self) -> bool:
        """Whether rows of blocks can be in a tensor of all experts: no block has outputs of two shards."""
        sizes = [size for _, size in self._shape.whole().shards[:-1]]
        return self._shape.stacked_form == "rows" and all(size % self._row_unit == 0 for size in sizes)

    def _layer(self, expert: int) -> Linear:
        return Linear(self._shape.of_expert(expert), dtype=self._dtype, scheme=self._scheme)

    def _loader(self, name: str, like: WeightSlot) -> Callable[[int, Tensor], None]:
        def load(expert: int, tensor: Tensor) -> None:
            if not like.is_required:  # the tensor is only checked, and may come when the expert is complete
                like.load(tensor)
                return
            if expert not in self._arriving:
                self._arriving[expert] = layer = self._layer(expert)
                layer.weight_memory = self._builder.memory(expert)
            layer = self._arriving[expert]
            dict(layer.slots())[name].load(tensor)
            if layer.weight is not None:
                self._take(expert, self._arriving.pop(expert))

        return load

    def _take(self, expert: int, layer: Linear) -> None:
        try:
            self._builder.put(expert, layer.weight)
        except ValueError as error:
            raise WeightsError(str(error)) from None
        if layer.bias is not None:
            if self.bias_EN is None:
                self.bias_EN = layer.bias.new_empty((self._num_experts, self.out_features))
            self.bias_EN[expert] = layer.bias
        if self._builder.is_complete:
            self.stack = self._builder.finished()

    @property
    def parts(self) -> tuple[ExpertStack, ...]:
        """Only this stack; SplitStack has several."""
        return (self,)

    def memory(self, expert: int) -> list[Tensor]:
        """All data of one expert, as bytes: views that may be written to."""
        assert self.stack is not None
        own = [*self.stack.tensors(expert), *([] if self.bias_EN is None else [self.bias_EN[expert]])]
        return [each.view(-1).view(torch.uint8) for each in own]

    def weight_bytes(self) -> int:
        """Bytes held after loading."""
        assert self.stack is not None
        return self.stack.nbytes + (0 if self.bias_EN is None else self.bias_EN.nbytes)


def _suffixes(tensor: str) -> tuple[str, ...]:
    """The suffix after the name of the weights of all experts, for another tensor of all experts."""
    if tensor == "weight":
        return ("",)
    suffixes = (f"_{tensor.removeprefix('weight_')}", f"_{tensor}", f".{tensor}", *_OF_TRANSFORMERS.get(tensor, ()))
    return tuple(dict.fromkeys(suffixes))


class SplitStack:
    """A stack of several parts that are stored differently. Their outputs lie side by side."""

    def __init__(self, parts: Sequence[ExpertStack]) -> None:
        self.parts = tuple(parts)

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool) -> Tensor:
        # Only kernels run here, so a decode step can be recorded.
        sizes = [part.out_features for part in self.parts]
        shape = (routing.num_tokens * routing.num_slots, sum(sizes))
        out_PN = torch.empty(shape, dtype=x.dtype, device=x.device)
        for part, columns_PN in zip(self.parts, out_PN.split_with_sizes(sizes, 1), strict=True):
            part(x, routing, of_tokens=of_tokens, out=columns_PN)
        return out_PN


class JoinedStack:
    """The stack of one of several ranks. Each rank brings some in-features and gives some out-features."""

    def __init__(self, stack: ExpertStack | SplitStack, share: Share, group: Group) -> None:
        self.parts = stack.parts
        self._stack, self._inputs, self._group = stack, share.inputs, group

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool) -> Tensor:
        return self._stack(self._group.gather(x, self._inputs), routing, of_tokens=of_tokens)


class ExchangedStack:
    """The stack of one of several ranks that have whole experts. It gives some columns of the rows of all experts."""

    def __init__(self, stack: ExpertStack | SplitStack, placement: Placement, group: Group) -> None:
        self.parts = stack.parts
        self._stack, self._group = stack, group
        self._firsts, self._columns = placement.firsts, placement.columns

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool) -> Tensor:
        y_PN = self._stack(x, routing, of_tokens=of_tokens)
        return self._group.exchange(y_PN, routing.begins, self._firsts, self._columns)


def make_stack(stored: Sequence[StoredLinear], dtype: torch.dtype) -> ExpertStack | SplitStack:
    """A stack from ModelConfig.stored's answer, which has one entry or one per shard.

    Shards that are stored apart have a tensor for each expert: one tensor of all experts and shards cannot have their
    different forms. So its name is not expected, and a checkpoint with it is refused.
    """
    if len(stored) == 1:
        return ExpertStack(stored[0], dtype)
    return SplitStack([ExpertStack(replace(part, shape=replace(part.shape, stacked="")), dtype) for part in stored])
