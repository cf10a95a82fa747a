"""The adapters of one worker. A thread reads and packs them. Between steps, they get slots of the model."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from quire.lora.adapter import open_adapter
from quire.lora.facts import AdapterFacts
from quire.lora.loader import AdapterLoader
from quire.lora.slots import AdapterSlots, PackedAdapter
from quire.models.decoder import Decoder
from quire.settings import LoraSettings


class WorkerAdapters:
    """The adapters that rows of a step may use.

    Args:
        settings: its limits. While a new adapter replaces an old one, memory holds one adapter more than the limit.
    """

    def __init__(self, model: Decoder, settings: LoraSettings) -> None:
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self._slots = AdapterSlots(model, settings.max_cpu_loras + 1, settings.max_rank, dtype, settings.target_modules)
        open_file = partial(
            open_adapter,
            config=model.config,
            max_rank=settings.max_rank,
            target_modules=settings.target_modules or None,
        )
        self._loader: AdapterLoader[PackedAdapter] = AdapterLoader(open_file, self._slots.pack)

    @property
    def slots(self) -> Mapping[str, int]:
        """The slots of the adapters in memory, by digest."""
        return self._slots.slots

    def load(self, path: str, digest: str | None, is_awaited: bool) -> LoadingAdapter:
        """See life_cycle.Worker."""
        return LoadingAdapter(self._loader.load(Path(path), digest, is_awaited), self._slots)

    def beside_step(self) -> AbstractContextManager[None]:
        """The block computes a step on the CPU."""
        return self._loader.beside_step()

    def drop(self, digest: str) -> None:
        """See life_cycle.Worker."""
        self._slots.remove(digest)


class LoadingAdapter:
    """A life_cycle.AdapterLoad."""

    def __init__(self, packed: Future[PackedAdapter], slots: AdapterSlots) -> None:
        self._packed, self._slots = packed, slots

    def done(self) -> bool:
        return self._packed.done()

    def result(self) -> AdapterFacts:
        return self._packed.result().facts

    def add(self) -> None:
        self._slots.add(self._packed.result())
