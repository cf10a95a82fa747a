"""The adapters that an LLM has read: LoRARequests become registrations."""

from __future__ import annotations

from typing import Any

from quire.entry.offline import OfflineRunner
from quire.errors import InvalidRequestError
from quire.frontend.adapters import absolute, check_request
from quire.frontend.input_processor import ProcessedRequest
from quire.lora.request import Registration


class OfflineAdapters:
    """The adapters by name.

    Args:
        is_enabled: whether the engine computes adapters.
    """

    def __init__(self, runner: OfflineRunner, *, is_enabled: bool) -> None:
        self._runner, self._is_enabled = runner, is_enabled
        self._by_name: dict[str, Registration] = {}

    def give(self, processed: list[ProcessedRequest], requests: list[Any]) -> list[ProcessedRequest]:
        """The requests with their adapters; None stands for the base model. New adapters are read.

        If one adapter cannot be read, no request gets its adapter. Raises AdapterError.
        """
        found: dict[int, Registration] = {}
        for request in requests:
            if request is not None and id(request) not in found:
                found[id(request)] = self.find(request)
        return [
            each if request is None else each.with_adapter(found[id(request)])
            for each, request in zip(processed, requests, strict=True)
        ]

    def find(self, request: Any) -> Registration:
        """The adapter of a LoRARequest, which is read if it is new or if the request asks to read it again.

        Raises:
            AdapterError: the adapter cannot be read.
            InvalidRequestError: another folder has the name already.
        """
        check_request(request, is_enabled=self._is_enabled)
        name, path = request.lora_name, absolute(request.lora_path)
        before = self._by_name.get(name)
        if before is not None and not request.load_inplace:
            if before.path == path:
                return before
            raise InvalidRequestError(
                f"The lora adapter '{name}' has already been loaded from another path",
                value=request.lora_path,
                fix="If you want to load the adapter in place, set 'load_inplace' to True",
                param="lora_request",
            )
        digest = self._runner.load_adapter(path).digest
        new = self._by_name[name] = Registration(name, path, digest, request.lora_int_id, request.base_model_name)
        if before is not None:
            self._runner.unload_adapter(before)
        return new
