"""GET and POST /v1/config: every resolved setting with its source, and the limits that move while serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.errors import InvalidRequestError
from quire.frontend.live_limits import live_limits, move_limits
from quire.messages import EngineReady
from quire.server.limits import read_json
from quire.server.protocol.fields import with_integers
from quire.server.state import ServerState, state_of
from quire.settings import as_dict


async def config(request: Request) -> Response:
    """Serve GET and POST. Both are one route, so that the answer to a wrong method names both."""
    return await (_post_config if request.method == "POST" else _get_config)(request)


async def _get_config(request: Request) -> Response:
    """The settings of the engine and the server; 503 until the engine has resolved them."""
    return _answer(state_of(request))


async def _post_config(request: Request) -> Response:
    """Change limits from the engine's next step on. The answer is the new record, as from GET."""
    state = state_of(request)
    move_limits(state.engine, await read_json(request, state.settings.limits, _decode))
    return _answer(state)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        limits: dict[str, Any] = with_integers(msgspec.json.decode(body, type=dict[str, Any]))
        return limits
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise InvalidRequestError(
            "The body is not a JSON object", expected='an object of limits, such as {"max_num_seqs": 8}'
        ) from None


def settings_of(state: ServerState) -> dict[str, Any]:
    """Every setting as a record with its value and source. Raises NotReadyError, EngineDeadError."""
    settings = {**_ready(state).resolved, **as_dict(state.settings.server.settings)}
    return {name: _without_paths(setting) for name, setting in settings.items()}


def _ready(state: ServerState) -> EngineReady:
    state.engine.check_running()
    ready = state.engine.ready
    assert ready is not None, "a running engine has said that it is ready"
    return ready


def _answer(state: ServerState) -> Response:
    body = {
        "version": __version__,
        "model": state.model_name,
        "settings": settings_of(state),
        "live": {
            name: {"value": limit.value, "min": limit.minimum, "max": limit.maximum}
            for name, limit in live_limits(_ready(state)).items()
        },
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


def _without_paths(value: Any) -> Any:
    """The settings without folders of this machine: only the last part of a path is shown."""
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(inner) for inner in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return f".../{PurePath(value).name}"
    return value
