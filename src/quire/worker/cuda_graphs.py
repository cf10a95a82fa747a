"""Steps as CUDA graphs: the forward pass of a size is captured once, and one call replays it.

A graph is a list of launches with their addresses. Its inputs stay at these addresses, and each step writes its numbers
there. A step between two captured sizes is padded to the larger one. The tokens and rows of the padding read and write
nothing. For decodes there is one graph per number of rows. For other steps (prompts, or pieces of them beside decodes)
there are a few graphs, by the number of tokens. Our attention reads lengths on the device, so no launch depends on how
the tokens are divided into rows.

Dimensions: T tokens of a step, D hidden.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.distributed.group import Group
from quire.forward_batch import LayerCache
from quire.life_cycle import WorkerSettings
from quire.models.registry import CausalLM
from quire.worker.accelerator import Accelerator, Graph
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.input_batch import Padding, StagedStep, StepRows


def paddings(settings: WorkerSettings) -> list[Padding]:
    """The sizes to capture with these settings.

    The largest size comes first: the graphs of smaller sizes fit into its scratch memory.
    """
    sizes = settings.graph_sizes()
    found = [Padding(size, size) for size in sizes.decodes]
    # In a mixed step, at least one row computes several tokens. So it has fewer rows than tokens.
    found += [Padding(size, min(settings.max_num_seqs, size - 1)) for size in sizes.mixed]
    if settings.lora is not None:
        found += [replace(size, has_adapters=True) for size in found]
    return in_order(found)


def in_order(sizes: Sequence[Padding]) -> list[Padding]:
    """The sizes in the order of capture: the largest comes first."""
    return sorted(sizes, key=lambda size: (size.tokens, size.rows, size.has_adapters), reverse=True)


# The fields of a staged step that no forward pass reads.
_UNREAD = {"logits_indices_R", "adapter_slots_R", "expecting_rows", "parameters", "host", "num_tokens", "padding"}


def _places(staged: StagedStep) -> dict[str, object]:
    """Where a forward pass reads each field: the addresses of tensors, and all other values themselves."""
    found: dict[str, object] = {}
    for name in (field.name for field in fields(staged) if field.name not in _UNREAD):
        value = getattr(staged, name)
        tensors = value if isinstance(value, list) else [value]
        found[name] = [each.data_ptr() if isinstance(each, Tensor) else each for each in tensors]
    return found


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph with the arrays that it was captured with, and their places. The arrays must stay where they are."""

    graph: Graph
    staged: StagedStep
    places: dict[str, object]


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Hide the present objects from the garbage collector, which torch runs before each capture. This saves time.

    The objects are frozen only during the capture: the engine is part of reference cycles, and frozen objects are never
    freed. If other code has frozen objects, nothing is frozen here, because both kinds could not be told apart later.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class StepGraphs:
    """CapturedSteps of one model on one KV cache, as CUDA graphs.

    Args:
        sizes: the sizes in the order in which they are captured.
        group: the ranks that share the model; None: there is one rank.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: list[LayerCache],
        inputs: DeviceInputBatch,
        accelerator: Accelerator,
        sizes: Sequence[Padding],
        group: Group | None = None,
    ) -> None:
        self._group = group
        self._model, self._caches, self._inputs, self._accelerator = model, caches, inputs, accelerator
        self._sizes = list(sizes)
        self._decodes = sorted({size.tokens for size in sizes if size.tokens == size.rows})
        self._mixed = sorted({(size.tokens, size.rows) for size in sizes if size.tokens != size.rows})
        self._captured: dict[Padding, _Captured] = {}
        self.num_captured = 0
        # All sizes have one place for results, because another graph may overwrite results in the graphs' own memory.
        self._hidden_TD = torch.empty(
            (max(size.tokens for size in sizes), model.config.hidden_size), dtype=model.dtype, device=accelerator.device
        )
        is_given = model.config.head is not None or not model.config.takes_tokens
        self._given_TD = torch.zeros_like(self._hidden_TD) if is_given else None

    @torch.inference_mode()
    def capture(self, on_captured: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Capture every size.

        Args:
            on_captured: is called with the number of captured sizes and the number of all sizes.
        """
        none = np.zeros(0, np.int64)
        nothing = StepRows(none, none, none, none)
        pool = self._accelerator.graph_pool()
        with _little_garbage():
            for done, size in enumerate(self._sizes, 1):
                staged = self._inputs.stage(nothing, pad_to=size)
                self._model.prepare(staged.host, self._caches)
                run = partial(self._forward, staged, size)
                run()  # loads kernels, which cannot be done within a capture
                self._accelerator.synchronize()
                self._captured[size] = _Captured(self._accelerator.capture(run, pool), staged, _places(staged))
                self.num_captured = done
                on_captured(done, len(self._sizes))

    def _forward(self, staged: StagedStep, size: Padding) -> None:
        given_TD = None if self._given_TD is None else self._given_TD[: size.tokens]
        hidden_TD = self._model.forward(self._inputs.forward_batch(staged, self._caches, given_TD, is_prepared=True))
        self._hidden_TD[: size.tokens].copy_(hidden_TD)

    def size_for(self, step: StepRows) -> Padding | None:
        """See CapturedSteps: the smallest captured size that holds the step."""
        num_rows, num_tokens = len(step.lens_S), int(step.lens_S.sum())
        has_adapters = step.adapter_slots_S is not None
        if num_tokens == num_rows:
            at = bisect_left(self._decodes, num_rows)
            return Padding(self._decodes[at], self._decodes[at], has_adapters) if at < len(self._decodes) else None
        at = bisect_left(self._mixed, (num_tokens, 0))
        if at == len(self._mixed) or num_rows > self._mixed[at][1]:
            return None
        return Padding(*self._mixed[at], has_adapters)

    def run(self, size: Padding, staged: StagedStep, hidden_TD: Tensor | None = None) -> Tensor:
        """See CapturedSteps."""
        captured = self._captured[size]
        if self._given_TD is not None and hidden_TD is not None:
            self._given_TD[: len(hidden_TD)].copy_(hidden_TD)
            # A pass may add to the rows of the padding: without this they would grow from step to step.
            self._given_TD[len(hidden_TD) : size.tokens].zero_()
        moved = [name for name, place in _places(staged).items() if captured.places.get(name, [None]) != place]
        assert not moved, f"{moved} of the step lie elsewhere than in the graph"
        self._model.prepare(staged.host, self._caches)
        if self._group is not None:
            self._group.agree()
        captured.graph.replay()
        return self._hidden_TD[: size.tokens]
