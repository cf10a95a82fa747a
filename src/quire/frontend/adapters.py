"""The adapters that requests may name, on all replicas, and the operations on them."""

from __future__ import annotations

import asyncio
import difflib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakValueDictionary

from quire.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    ModelNotFoundError,
    NotReadyError,
    UnsupportedFieldError,
)
from quire.lora.facts import AdapterFacts
from quire.lora.modules import check_name
from quire.lora.request import LoRARequest, Registration


class AdapterHolder(Protocol):
    """A replica, as far as adapters are concerned."""

    is_ready: bool

    async def read_adapter(self, path: str, *, is_awaited: bool = False) -> AdapterFacts: ...

    def register_adapter(self, path: str, digest: str) -> None: ...

    def unregister_adapter(self, path: str, digest: str) -> None: ...


def absolute(path: str) -> str:
    """The absolute path, for an engine that runs in another folder. Raises AdapterNotFoundError for an unknown home."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise AdapterNotFoundError("There is no adapter at this path", value=path, fix="Write it without ~") from None


def _check_enabled(is_enabled: bool) -> None:
    if not is_enabled:
        raise UnsupportedFieldError(
            "Adapters cannot be used, because LoRA was not enabled at the start",
            fix="Start with enable_lora (--enable-lora)",
            param="lora_request",
        )


def check_request(request: Any, *, is_enabled: bool) -> None:
    """Raise UnsupportedFieldError if adapters are not computed, InvalidRequestError if it is no LoRARequest."""
    _check_enabled(is_enabled)
    if not isinstance(request, LoRARequest):
        raise InvalidRequestError(
            f"lora_request is a {type(request).__name__}", expected="LoRARequest", param="lora_request"
        )


class Adapters:
    """Names of adapters. Operations on one name come one after another; requests never see half of one.

    Args:
        is_enabled: the engines compute adapters.
    """

    def __init__(self, replicas: Sequence[AdapterHolder], *, is_enabled: bool = True) -> None:
        self._replicas, self._is_enabled = replicas, is_enabled
        self._by_name: dict[str, Registration] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._numbers = itertools.count(1)

    @property
    def by_name(self) -> Mapping[str, Registration]:
        """The adapters that requests may name, in the order of their first registration."""
        return MappingProxyType(self._by_name)

    def find(self, name: str) -> Registration:
        """The adapter with this name. Raises ModelNotFoundError, which suggests the most similar name."""
        if (registration := self._by_name.get(name)) is None:
            near = difflib.get_close_matches(name[:256], self._by_name, n=1, cutoff=0.5)
            raise ModelNotFoundError(
                "There is no adapter of this name",
                value=name,
                fix=f"Did you mean {near[0]}?" if near else "Load it first",
                param="model",
            )
        return registration

    async def load(
        self,
        name: str,
        path: str,
        *,
        base_model_name: str | None = None,
        load_inplace: bool = False,
        reuses: bool = False,
        is_awaited: bool = False,
        lora_int_id: int | None = None,
    ) -> Registration:
        """Read an adapter, and then give it this name. Running requests finish on the version before.

        Args:
            path: absolute, of its folder.
            load_inplace: the name may have been given before.
            reuses: if the name has this path already, its adapter is the answer.
            is_awaited: a request waits for it.

        Raises InvalidRequestError for the name, AdapterError for the files, NotReadyError, EngineDeadError.
        """
        check_name(name, "lora_name")
        _check_enabled(self._is_enabled)
        async with self._lock(name):
            before = self._by_name.get(name)
            if before is not None and not load_inplace:
                if reuses and before.path == path:
                    return before
                raise InvalidRequestError(
                    f"The lora adapter '{name}' has already been loaded",
                    fix="If you want to load the adapter in place, set 'load_inplace' to True",
                    param="lora_name",
                )
            reader = next((replica for replica in self._replicas if replica.is_ready), None)
            if reader is None:
                raise NotReadyError("No engine is ready to read the adapter", fix="Retry in a few seconds")
            digest = (await reader.read_adapter(path, is_awaited=is_awaited)).digest
            for replica in self._replicas:
                if replica is not reader:
                    replica.register_adapter(path, digest)
            number = lora_int_id or (next(self._numbers) if before is None else before.lora_int_id)
            registration = self._by_name[name] = Registration(name, path, digest, number, base_model_name)
            if before is not None:
                self._unregister(before)
            return registration

    async def ensure(self, request: LoRARequest) -> Registration:
        """The adapter of a LoRARequest, which is read if its name is new. Raises as `load` does."""
        check_request(request, is_enabled=self._is_enabled)
        return await self.load(
            request.lora_name,
            absolute(request.lora_path),
            base_model_name=request.base_model_name,
            load_inplace=request.load_inplace,
            reuses=True,
            is_awaited=True,
            lora_int_id=request.lora_int_id,
        )

    async def unload(self, name: str) -> None:
        """Remove a name: no new request finds the adapter. Raises ModelNotFoundError."""
        async with self._lock(name):
            registration = self._by_name.pop(name, None)
            if registration is None:
                raise ModelNotFoundError(f"The lora adapter '{name}' cannot be found", param="lora_name")
            self._unregister(registration)

    def _unregister(self, registration: Registration) -> None:
        for replica in self._replicas:
            replica.unregister_adapter(registration.path, registration.digest)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock
