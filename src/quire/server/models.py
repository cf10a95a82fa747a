"""GET /v1/models and /v1/models/{model}: the served models, with their context length."""

from __future__ import annotations

from pathlib import PurePath

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.server.protocol.common import ModelCard, ModelList
from quire.server.state import ServerState, state_of


async def list_models(request: Request) -> Response:
    """One card per served name of the base model, which are all the same, and one per adapter."""
    state = state_of(request)
    names = [*state.settings.served_model_names, *state.engine.adapters.by_name]
    cards = [_card(state, name) for name in names]
    return Response(msgspec.json.encode(ModelList(data=cards)), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One card; ModelNotFoundError for a name that is not served."""
    state = state_of(request)
    name: str = request.path_params["model"]
    state.adapter(name)
    return Response(msgspec.json.encode(_card(state, name)), media_type="application/json")


def _card(state: ServerState, name: str) -> ModelCard:
    """Of an adapter, the root is the name of its folder, and the parent the base model."""
    max_model_len = state.max_model_len
    card = ModelCard(
        id=name,
        created=state.created,
        root=state.settings.model_root or state.model_name,
        max_model_len=UNSET if max_model_len is None else max_model_len,
    )
    if (adapter := state.engine.adapters.by_name.get(name)) is not None and state.adapter(name):
        card.root = PurePath(adapter.path).name
        card.parent = adapter.base_model_name or state.model_name
    return card
