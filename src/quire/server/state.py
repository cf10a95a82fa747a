"""The state that routes share: the settings of the server, the engine, the tokenizer, the chat template."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Scope

from quire import __version__
from quire.errors import ConfigError, ModelNotFoundError, ShuttingDownError
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.bounded_pool import MAX_SECONDS
from quire.frontend.infill import infill_format
from quire.frontend.render_pool import RenderPool
from quire.frontend.tokenizer import Tokenizer
from quire.frontend.tokenizer_files import chat_template_text
from quire.metrics.prometheus import PrometheusMetrics
from quire.sampling_params import SamplingParams
from quire.server.limits import Limits
from quire.server.recent import RecentRequests
from quire.server.response_store import ResponseStore
from quire.server.text.parser import marks
from quire.settings import ServerSettings

SYSTEM_FINGERPRINT = f"quire-{__version__}"
# Where the middleware leaves the request's id in the ASGI scope.
REQUEST_ID_KEY = "quire.request_id"

# The headers of the HTTP request that is served, by lower-case name.
trace_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)

MOST_NAMES = 20  # the most names of models in an error

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class AppSettings:
    """What the app is told: the settings of the server, and the facts of the model that are known before the engine is
    ready.

    Args:
        served_model_names: names of the one model; the first is reported.
        server: the limits of requests and the form of answers: values of flags.
        model_root: hub id the model card shows as root; never a path of this machine.
        api_keys: any of them is accepted; none leaves the server open.
        allowed_hosts: host names (without port) requests may be addressed to; none allows all.
        max_model_len: context length, until the engine says its own.
        default_sampling_params: SamplingParams fields from the model's generation_config.json.
        chat_template: Jinja source, or the name of one of the model's templates, in place of the model's default.
        default_chat_template_kwargs: variables of the template; a request's own variables come first.
        max_render_seconds: after which a chat template that has not ended is killed.
        reports_metrics: the default of return_metrics; in a stream, only beside its usage.
        max_tokens_cap: no request generates more tokens; None: up to the context length.
        has_priorities: the scheduler looks at priorities; if not, a priority is named among the ignored fields.
        owns_engine: the app starts the engine's receiving with itself and shuts it down with itself.
        log_stats_interval: seconds between two statistics lines; 0: none.
        lora_dirs: folders from which clients may load adapters.
        changes_adapters: clients may load and unload adapters.
        lora_resolver_dir: the folder where adapters of unknown model names are looked for.
        stores_responses: responses of /v1/responses are kept for later requests.
        is_development: there are routes for developers.
    """

    served_model_names: tuple[str, ...]
    server: ServerSettings = field(default_factory=ServerSettings)
    model_root: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_model_len: int | None = None
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_render_seconds: float = MAX_SECONDS
    reports_metrics: bool = False
    max_tokens_cap: int | None = None
    has_priorities: bool = False
    owns_engine: bool = True
    log_stats_interval: float = 10.0
    limits: Limits = field(default_factory=Limits)
    lora_dirs: tuple[Path, ...] = ()
    changes_adapters: bool = False
    lora_resolver_dir: Path | None = None
    stores_responses: bool = True
    is_development: bool = False

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ConfigError("The model has no name", fix="Give --served-model-name", param="served_model_name")


class ServerState:
    """One per app. `is_draining` is set when the server stops: new requests are refused, running ones go on."""

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer | None,
        settings: AppSettings,
        metrics: PrometheusMetrics | None,
    ) -> None:
        self.engine, self.tokenizer, self.settings, self.metrics = engine, tokenizer, settings, metrics
        self.created = int(time.time())
        self.is_draining = False
        self.recent = RecentRequests()
        self.responses = ResponseStore()
        self._renderer: RenderPool | None = None
        # Whether some tags of the answers' formats are special tokens, which are left out of the text by default.
        self.has_special_tags = False
        # Whether a chat template may read the variable that the request field of this name sets.
        self.has_reasoning_effort = False
        self.infill_format = None if tokenizer is None else infill_format(tokenizer)
        if tokenizer is not None:
            source = chat_template_text(tokenizer.chat_templates, settings.chat_template)
            self.has_reasoning_effort = any(name in source for name in ("reasoning_effort", "enable_thinking"))
            tags = marks(settings.server.reasoning_parser, settings.server.tool_call_parser)
            self.has_special_tags = not tags.isdisjoint(tokenizer.special_ids)
            self._renderer = RenderPool(
                tokenizer.chat_templates,
                tokenizer.special_tokens,
                override=settings.chat_template,
                max_seconds=settings.max_render_seconds,
            )
        self._numbers = count()

    @property
    def model_name(self) -> str:
        """The name answers report."""
        return self.settings.served_model_names[0]

    def left_out(self, params: SamplingParams) -> Collection[int]:
        """Tokens that are no part of the text of an answer with these parameters."""
        return self.tokenizer.special_token_ids if params.skip_special_tokens and self.tokenizer is not None else ()

    def template_kwargs(self, asked: Mapping[str, Any] | None) -> dict[str, Any]:
        """Variables of the chat template for a request."""
        return {**self.settings.default_chat_template_kwargs, **(asked or {})}

    @property
    def max_model_len(self) -> int | None:
        ready = self.engine.ready
        return self.settings.max_model_len if ready is None else ready.max_model_len

    @property
    def renderer(self) -> RenderPool:
        """Raises ConfigError if the model runs without a tokenizer."""
        if self._renderer is None:
            raise ConfigError(
                "This model runs without a tokenizer, so it cannot read messages",
                fix="Use /v1/completions with token ids, or start without --skip-tokenizer-init",
            )
        return self._renderer

    async def close(self) -> None:
        """End responses in the background, and the processes that render chats."""
        await self.responses.close()
        if self._renderer is not None:
            self._renderer.close()

    def is_served(self, name: str) -> bool:
        """Whether the base model or an adapter has this name."""
        return name in self.settings.served_model_names or name in self.engine.adapters.by_name

    def adapter(self, name: str | None) -> str | None:
        """The name if it is an adapter's; None for the base model, which leaving the name out means too.

        Raises ModelNotFoundError.
        """
        if name is None or name in self.settings.served_model_names:
            return None
        if name in self.engine.adapters.by_name:
            return name
        names = [*self.settings.served_model_names, *self.engine.adapters.by_name]
        near = difflib.get_close_matches(name[:256], names, n=1, cutoff=0.5)
        raise ModelNotFoundError(
            "This model is not served",
            value=name,
            expected="one of " + ", ".join(names[:MOST_NAMES]) + ", ..." * (len(names) > MOST_NAMES),
            fix=f"Did you mean {near[0]}?" if near else "Leave model out to use the one served",
            param="model",
        )

    def check_accepting(self) -> None:
        """Raise EngineDeadError (ShuttingDownError) while no request is taken any more."""
        if self.engine.error is not None:
            self.engine.check_running()
        if self.is_draining:
            raise ShuttingDownError("The server is shutting down", fix="Ask another server")

    def engine_request_id(self, response_id: str) -> str:
        """An id no other request has, even if a client uses its own twice."""
        return f"{response_id}-{next(self._numbers):x}"


def state_of(request: Request) -> ServerState:
    """The app's state."""
    state: ServerState = request.app.state.quire
    return state


def request_id_of(scope: Scope) -> str:
    """The id in the answer's x-request-id."""
    request_id: str = scope[REQUEST_ID_KEY]
    return request_id


def sane_request_id(given: str | None) -> str | None:
    """The client's id if it may be repeated in headers, logs and the engine; else None."""
    return given if given is not None and SANE_ID.fullmatch(given) else None


def new_request_id() -> str:
    return uuid4().hex
