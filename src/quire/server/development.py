"""GET /server_info and POST /reset_prefix_cache: vLLM's development routes, which VLLM_SERVER_DEV_MODE=1 opens."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import InvalidRequestError
from quire.server.config_api import settings_of
from quire.server.state import state_of


def routes() -> list[Route]:
    """The routes exist only if the operator allows them."""
    return [
        Route("/server_info", server_info, methods=["GET"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    ]


async def server_info(request: Request) -> Response:
    """Every setting by its name, as one text or as JSON; GET /v1/config has their sources."""
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise InvalidRequestError("Unknown format", value=form, expected="text or json", param="config_format")
    values = {name: setting["value"] for name, setting in settings_of(state_of(request)).items()}
    text = ", ".join(f"{name}={value!r}" for name, value in values.items())
    body = {"vllm_config": values if form == "json" else text}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prompts from the next step on, except the prompts that running requests use."""
    state_of(request).engine.reset_prefix_cache()
    return Response(b'{"status":"ok"}', media_type="application/json")
