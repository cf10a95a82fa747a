"""The weights of all experts of a layer in one packed weight. It is filled expert by expert, in any order.

Dimensions: E experts, N out-features and K in-features of each expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.dense import PackedLinear
from quire.kernels.fp8 import PackedFp8
from quire.kernels.grouped import PackedGrouped, pack_grouped, unpack_grouped
from quire.kernels.weight_memory import WEIGHTS, Memory

Packed = PackedLinear | PackedFp8 | PackedGrouped


@dataclass(frozen=True)
class PackedStack:
    """Weights of E experts in the form that `expert_linear` reads.

    Attributes:
        weight: one packed weight with the rows of all experts. In the panel layout, each expert begins with a new
            panel. If it has an order of columns, the order is int32 [E, K].
        E: the number of experts.
        N, K: the out-features and in-features of one expert.
    """

    weight: Packed
    E: int
    N: int
    K: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def is_packed(self) -> bool:
        return self.weight.is_packed

    @property
    def tensor(self) -> Tensor:
        """Any tensor of the weight. It shows the device."""
        return self.weight.data if isinstance(self.weight, PackedLinear) else self.weight.tensor

    @cached_property
    def panels(self) -> cpu._C.ExpertStack:
        """The stack as the CPU kernels take it: see cpu.expert_stack."""
        return cpu.expert_stack(replace(self.weight, N=self.N).panels, self.E)

    def tensors(self, e: int) -> list[Tensor]:
        """All tensors of one expert, without a copy. Whoever writes to them changes the expert."""
        order_EK = _order(self.weight)
        return [*_tensors(self.expert(e)).values(), *([] if order_EK is None else [order_EK[e]])]

    def expert(self, e: int) -> Packed:
        """The weight of one expert, without a copy."""
        parts = {name: x.view(self.E, len(x) // self.E, *x.shape[1:])[e] for name, x in _tensors(self.weight).items()}
        order_EK = _order(self.weight)
        return _with_tensors(self.weight, parts, self.N, None if order_EK is None else order_EK[e])


class StackBuilder:
    """Takes the packed weights of E experts [N, K], in any order. All of them must have one form.

    If a CPU weight was packed in the memory of its place (see `memory`), it is not copied. Other weights are copied, so
    the caller may drop them after `put`.
    """

    def __init__(self, E: int, N: int) -> None:
        self._E, self._N = E, N
        self._missing = set(range(E))
        self._panels: Tensor | None = None  # panels of all experts
        self._stack: PackedStack | None = None  # set with the first expert

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def memory(self, e: int) -> Memory:
        """The memory for the panels of expert `e`. Give it to the function that packs them."""
        return partial(self._place, e)

    def _place(self, e: int, num_bytes: int) -> Tensor:
        if self._panels is None:
            self._panels = WEIGHTS(self._E * num_bytes)
        if len(self._panels) != self._E * num_bytes:  # these panels have another form, and `put` will refuse or widen
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._panels[e * num_bytes : (e + 1) * num_bytes]

    def put(self, e: int, packed: Packed) -> None:
        """Take the weight of expert `e`.

        If some experts have scales in float16 and others in float32, all of them get float32 scales.

        Raises ValueError if the weight has another form than earlier ones, or if the expert has its weight already.
        """
        if e not in self._missing:
            raise ValueError(f"expert {e} came already, or is not in [0, {self._E})")
        if packed.N != self._N:
            raise ValueError(f"expert {e} has {packed.N} out-features, expected {self._N}")
        if self._stack is not None and _form(packed) != _form(like := self._stack.expert(e)):
            if _form(packed, "float32") != _form(like, "float32"):
                expected = f"{_form(like)} like the experts before it"
                raise ValueError(f"expert {e} has {_form(packed)}, expected {expected}")
            if _form(like) != _form(like, "float32"):
                self._widen(self._stack)
            packed = _widened(packed, self.memory(e))
        self._copy(e, packed)
        self._missing.remove(e)

    def _widen(self, stack: PackedStack) -> None:
        """Pack the experts that have come again, with scales in float32."""
        self._stack = self._panels = None
        for e in set(range(self._E)) - self._missing:
            self._copy(e, _widened(stack.expert(e), self.memory(e)))

    def _copy(self, e: int, packed: Packed) -> None:
        if self._stack is None:
            self._stack = self._empty_like(packed)
        tensors = _tensors(packed)
        for name, to in _tensors(self._stack.expert(e)).items():
            if to.data_ptr() != tensors[name].data_ptr():
                to.view(-1).view(torch.uint8).copy_(tensors[name].reshape(-1).view(torch.uint8))
        order_EK, order_K = _order(self._stack.weight), _order(packed)
        if order_EK is not None and order_K is not None:
            order_EK[e] = order_K

    def _empty_like(self, packed: Packed) -> PackedStack:
        tensors, order_K = _tensors(packed), _order(packed)
        if packed.is_packed and tensors["data"].is_cpu:
            self._place(0, packed.nbytes if order_K is None else packed.nbytes - order_K.nbytes)
            stacked = {"data": self._panels}
        else:
            stacked = {name: x.new_empty((self._E * len(x), *x.shape[1:])) for name, x in tensors.items()}
        order_EK = None if order_K is None else order_K.new_empty((self._E, packed.K), dtype=torch.int32)
        return PackedStack(_with_tensors(packed, stacked, self._E * self._N, order_EK), self._E, self._N, packed.K)

    def finished(self) -> PackedStack:
        """The complete stack. All experts must have come."""
        assert self._stack is not None and self.is_complete
        return self._stack


def _tensors(packed: Packed) -> dict[str, Tensor]:
    """The tensors that hold rows or panels of the weight, one after the other."""
    if packed.data is not None:
        return {"data": packed.data}
    assert not isinstance(packed, PackedLinear)
    return {name: x for name, x in vars(packed.weight).items() if isinstance(x, Tensor) and name != "order_K"}


def _order(packed: Packed) -> Tensor | None:
    """The order of columns, of one expert or of all experts; None: there is none."""
    if not isinstance(packed, PackedGrouped):
        return None
    return packed.order_K if packed.weight is None or packed.order_K is not None else packed.weight.order_K


def _with_tensors(packed: Packed, tensors: dict[str, Any], N: int, order: Tensor | None) -> Packed:
    """A weight of the same form with other tensors."""
    match packed:
        case PackedLinear():
            return replace(packed, data=tensors["data"], N=N)
        case PackedFp8(data=None):
            assert packed.weight is not None
            return replace(packed, weight=replace(packed.weight, **tensors), N=N)
        case PackedFp8():
            return replace(packed, data=tensors["data"], N=N)
        case PackedGrouped(data=None):
            # A GroupedWeight has only one order. So the orders of many experts are kept beside it.
            assert packed.weight is not None
            order_K = order.long() if order is not None and order.dim() == 1 else None
            weight = replace(packed.weight, **tensors, order_K=order_K)
            return replace(packed, weight=weight, N=N, order_K=order if order_K is None else None)
        case _:
            return replace(packed, data=tensors["data"], N=N, order_K=order)


def _form(packed: Packed, scales: str | None = None) -> str:
    """The form of a weight, as text. `scales`: a text in place of the scales' dtype float16 or float32."""
    match packed:
        case PackedLinear():
            form = str(packed.dtype)
        case PackedFp8():
            form = f"FP8 in groups of {packed.group_size}"
        case PackedGrouped():
            held = packed.format
            form = str(held if held.scales == "int8" else replace(held, scales=scales or held.scales))
    return f"{packed.K} in-features in {form}"


def _widened(packed: Packed, memory: Memory) -> Packed:
    """The same weight with scales in float32, packed in `memory` by the CPU kernels."""
    assert isinstance(packed, PackedGrouped)
    weight = unpack_grouped(packed)
    return pack_grouped(replace(weight, scales_NG=weight.scales_NG.float()), memory)
