"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and adapters that are found by their name."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.errors import AdapterNotFoundError, InvalidRequestError, UnsupportedFieldError
from quire.lora.modules import is_name
from quire.lora.paths import allowed_folder
from quire.server.limits import read_json
from quire.server.protocol.adapters import LoadRequest, UnloadRequest
from quire.server.state import ServerState, state_of

B = TypeVar("B")


def routes() -> list[Route]:
    """They are there only if the operator allows it."""
    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


async def load(request: Request) -> Response:
    """Read an adapter below the allowed folders, and serve it under a name."""
    state = state_of(request)
    body = await read_json(request, state.settings.limits, lambda data: _decode(data, LoadRequest))
    if not body.lora_name or not body.lora_path:
        raise InvalidRequestError("Both 'lora_name' and 'lora_path' must be provided", param="lora_name")
    if body.is_3d_lora_weight:
        raise UnsupportedFieldError(
            "Adapters of experts are not read", fix="Leave is_3d_lora_weight out", param="is_3d_lora_weight"
        )
    if body.lora_name in state.settings.served_model_names:
        raise InvalidRequestError("The base model has this name", value=body.lora_name, param="lora_name")
    folder = allowed_folder(body.lora_path, state.settings.lora_dirs)
    await state.engine.adapters.load(body.lora_name, str(folder), load_inplace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(request: Request) -> Response:
    """Serve an adapter no longer; its running requests finish."""
    state = state_of(request)
    body = await read_json(request, state.settings.limits, lambda data: _decode(data, UnloadRequest))
    if not body.lora_name:
        raise InvalidRequestError("'lora_name' needs to be provided to unload a LoRA adapter", param="lora_name")
    await state.engine.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def resolve(state: ServerState, name: str | None) -> None:
    """Look for a model that is not served among the adapters of the resolver's folder. A folder has one name."""
    folder = state.settings.lora_resolver_dir
    if folder is None or name is None or state.is_served(name) or not is_name(name):
        return
    if str(PurePosixPath(name)) != name:
        return
    state.engine.check_running()
    try:
        path = allowed_folder(name, [folder])
        await state.engine.adapters.load(name, str(path), is_awaited=True)
    except AdapterNotFoundError:
        return  # the error is that the model is not served
    except InvalidRequestError:
        if not state.is_served(name):  # otherwise another request was faster
            raise


def _decode(data: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body cannot be read: {error}") from None
