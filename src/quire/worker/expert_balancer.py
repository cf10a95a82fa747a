"""Moves experts between the ranks of a stage, so that all of them get about the same number of tokens.

All ranks have the same state and take the same decisions, because all use the counts of the first rank. A round of
moves is one `Group.gather`: either all ranks complete it or none does, and nothing can fail after it. So a void step
changes nothing.

Dimensions: E experts, P places of experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.eplb_config import EplbConfig
from quire.logs import get_logger
from quire.moe.balance import Floats, Ints, balancedness, improved
from quire.moe.layer import MoE

# Bytes that may move before one step. On a small machine they take about as long as a step of one token.
BUDGET_BYTES = 16 << 20

logger = get_logger(__name__)


@dataclass
class _Layer:
    """The experts of a layer and the counts of their tokens. `begins`: see MoE.begins."""

    moe: MoE
    begins: Ints
    firsts: tuple[int, ...]
    experts_P: Ints
    counts_E: Ints

    def expert_bytes(self) -> int:
        return sum(memory.nbytes for stack in self.moe.stacks for memory in stack.memory(0))

    def form(self) -> int:
        """A checksum of the sizes of an expert's parts. It is equal on ranks that hold experts in the same form."""
        return hash(tuple(memory.nbytes for stack in self.moe.stacks for memory in stack.memory(0)))


class ExpertBalancer:
    """The balancer of one rank. All ranks of the stage have one, and call it alike.

    Args:
        layers: the layers with experts, each with the tensor to which it writes Routing.begins of a step.
    """

    def __init__(self, layers: Sequence[tuple[MoE, Tensor]], group: Group, config: EplbConfig) -> None:
        self._group, self._config = group, config
        self._layers: list[_Layer] = []
        for moe, begins in layers:
            placement = moe.placement
            assert placement is not None, "ranks have whole experts"
            experts_P = np.array([*chain(*placement.experts)])
            counts_E = np.zeros(placement.num_experts, dtype=np.int64)
            self._layers.append(_Layer(moe, begins.numpy(), placement.firsts, experts_P, counts_E))
        self._num_steps = 0
        self._uneven: deque[tuple[_Layer, Floats]] = deque()  # layers still to be balanced, with the loads of experts
        self.num_moved = 0  # the number of experts that have moved to another place

    @torch.inference_mode()
    def begin_step(self) -> None:
        """Move some experts, before a forward pass. All ranks of the stage call it. Raises GroupError or StepVoid."""
        self._num_steps += 1
        if self._num_steps % self._config.step_interval == 0:
            self._tell_counts()
        while self._uneven:
            self._move()
            if self._config.use_async:
                return

    def count(self) -> None:
        """Add the counts of the forward pass that has ended."""
        if self._group.rank != 0:
            return
        config = self._config
        left = config.step_interval - self._num_steps % config.step_interval
        if left <= config.window_size:
            for layer in self._layers:
                np.add.at(layer.counts_E, layer.experts_P, np.diff(layer.begins))
        if config.log_balancedness and self._num_steps % config.log_balancedness_interval == 0:
            logger.info("experts: balancedness of ranks %.3f, %d moved so far", self.balancedness(), self.num_moved)

    def experts_at_places(self) -> list[Ints]:
        """For each layer, the experts at the places of all ranks."""
        return [layer.experts_P for layer in self._layers]

    def balancedness(self) -> float:
        """The mean tokens of a rank divided by the tokens of the busiest rank, in the last step. Mean over layers."""
        return float(np.mean([balancedness(np.diff(layer.begins[[*layer.firsts]])) for layer in self._layers]))

    def _tell_counts(self) -> None:
        """Send the counts of the first rank to all ranks, and begin to count anew.

        The packed form of weights may depend on the values of all experts of a rank. Experts of a layer do not move if
        ranks hold them in different forms.
        """
        sizes = [layer.form() for layer in self._layers]
        counts = np.concatenate([layer.counts_E for layer in self._layers])
        own = np.concatenate([sizes, counts])[None, : None if self._group.rank == 0 else len(sizes)]
        widths = [len(sizes) + len(counts)] + [len(sizes)] * (self._group.size - 1)
        told = self._group.gather(torch.from_numpy(own), widths)[0].numpy()
        sizes_RL = np.stack([told[begin : begin + len(sizes)] for begin in accumulate([0, *widths[:-1]])])
        self._uneven.clear()
        end = len(sizes)
        for layer, sizes_R in zip(self._layers, sizes_RL.T, strict=True):
            begin, end = end, end + len(layer.counts_E)
            if (sizes_R == sizes_R[0]).all():
                self._uneven.append((layer, told[begin:end].astype(np.float64)))
            layer.counts_E[:] = 0

    def _move(self) -> None:
        """Make one round of moves in the first layer that is still uneven."""
        layer, loads_E = self._uneven[0]
        most = max(2, BUDGET_BYTES // layer.expert_bytes())
        wanted_P = improved(loads_E, layer.experts_P, layer.firsts, most)
        changed = np.flatnonzero(wanted_P != layer.experts_P).tolist()
        if not changed:
            self._uneven.popleft()
            return
        place_of = {int(expert): place for place, expert in enumerate(layer.experts_P)}
        sources = {place: place_of[int(wanted_P[place])] for place in changed}
        self._exchange(layer, sources)
        layer.experts_P = wanted_P
        layer.moe.place(wanted_P.tolist())
        self.num_moved += len(changed)

    def _exchange(self, layer: _Layer, sources: dict[int, int]) -> None:
        """Move experts between places.

        Args:
            sources: new place -> the place that its expert had before the exchange.
        """
        rank, firsts = self._group.rank, layer.firsts
        sent = sorted(set(sources.values()))
        num_bytes = layer.expert_bytes()
        counts = [sum(first <= place < last for place in sent) for first, last in pairwise(firsts)]
        own = [
            part for place in sent if firsts[rank] <= place < firsts[rank + 1] for part in self._memory(layer, place)
        ]
        part = torch.cat(own)[None] if own else torch.empty((1, 0), dtype=torch.uint8)
        moved = self._group.gather(part, [count * num_bytes for count in counts])[0]
        begins = dict(zip(sent, accumulate([num_bytes] * len(sent), initial=0), strict=False))
        for place, source in sources.items():
            if firsts[rank] <= place < firsts[rank + 1]:
                begin = begins[source]
                for memory in self._memory(layer, place):
                    memory.copy_(moved[begin : begin + memory.nbytes])
                    begin += memory.nbytes

    def _memory(self, layer: _Layer, place: int) -> list[Tensor]:
        """The tensors of an expert of this rank."""
        own = place - layer.firsts[self._group.rank]
        return [memory for stack in layer.moe.stacks for memory in stack.memory(own)]
