"""`quire serve`: the HTTP server in this process, the engine in another, from start to drained end."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import uvloop

from quire import envs, extension, logs
from quire.config import EngineConfig, ServerConfig
from quire.demo import DEMO_MODEL_NAME
from quire.entry import systemd
from quire.entry.interrupt import end_at_once, interrupts_between_steps
from quire.entry.launch import (
    FrontEndParts,
    default_template_kwargs,
    open_model,
    read_chat_template,
    start_async_engine,
)
from quire.entry.listen import BACKLOG, Listener, allowed_hosts, at_socket, check_guarded
from quire.entry.spawn import EngineInterpreter
from quire.errors import AdapterError, ConfigError, QuireError
from quire.frontend.supervisor import ready_seconds
from quire.frontend.tokenizer_files import chat_template_text
from quire.lora.modules import parse_module
from quire.messages import EngineProgress
from quire.metrics.prometheus import PrometheusMetrics
from quire.planning import devices
from quire.resolve import resolve_server
from quire.screen.first_screen import show_header, show_ready
from quire.screen.start_display import StartDisplay
from quire.screen.terminal import clear_line
from quire.server.app import create_app
from quire.server.http_server import HttpServer, http_config
from quire.server.state import AppSettings

logger = logs.get_logger(__name__)

MIN_OPEN_FILES = 64
POLL_SECONDS = 0.1
TLS_POLL_SECONDS = 1.0  # seconds between two checks of the certificates' files
# When the time for the drain is over, every stream gets an error as its last event. It has this time to end.
LAST_WORDS_SECONDS = 2.0


def serve(engine_config: EngineConfig, server_config: ServerConfig, interpreters: Sequence[EngineInterpreter]) -> int:
    """Serve until a signal stops the server. The engines run in `interpreters`; the caller ends them.

    Returns the exit code. 0: the server was stopped. 1: the engine failed. 2: the server could not start for a reason
    that the user can mend. Raises ConfigErrors before it serves.
    """
    _check_open_files()
    passed = systemd.take_socket()
    if passed is not None:
        server_config = at_socket(server_config, passed)
    api_keys = _api_keys(server_config)
    check_guarded(server_config, api_keys)
    default_template_kwargs(server_config)  # their errors come before the download
    device = devices.detect(extension.chosen_isa())
    name = engine_config.model or DEMO_MODEL_NAME
    display = StartDisplay(on_first=partial(show_header, name, device, has_gpu=devices.has_gpu()))
    listener = _bind(server_config, display, passed)
    try:
        parts = open_model(engine_config, display.update)
        settings = server_settings(engine_config, server_config, parts, api_keys)
        listener.listen()
        process = ServingProcess(engine_config, server_config, settings, parts, listener, display, interpreters)
        code: int = uvloop.run(process.run())
        return code
    finally:
        display.close()
        listener.close()


def server_settings(
    engine_config: EngineConfig, server_config: ServerConfig, parts: FrontEndParts, api_keys: tuple[str, ...] = ()
) -> AppSettings:
    """The settings of a server, from its configs and the facts of the model. Raises ConfigErrors."""
    names = engine_config.served_model_name or (parts.model_name,)
    _check_module_names(engine_config, names)
    is_hub_id = "/" in parts.model_name and not Path(parts.model_name).exists()
    template = read_chat_template(server_config.chat_template)
    sources = {} if parts.tokenizer is None else parts.tokenizer.chat_templates
    return AppSettings(
        served_model_names=names,
        server=resolve_server(server_config, chat_template_text(sources, template)),
        model_root=parts.model_name if is_hub_id else names[0],
        api_keys=api_keys,
        allowed_hosts=allowed_hosts(server_config),
        max_model_len=parts.model_config.max_model_len,
        default_sampling_params=parts.input_processor.defaults,
        chat_template=template,
        default_chat_template_kwargs=default_template_kwargs(server_config),
        reports_metrics=server_config.enable_per_request_metrics
        or engine_config.per_request_spec_decode_metrics != "none",
        max_tokens_cap=_max_tokens_cap(engine_config, parts),
        has_priorities=engine_config.scheduling_policy == "priority",
        owns_engine=False,
        lora_dirs=tuple(map(Path, engine_config.lora_dir)),
        changes_adapters=engine_config.enable_lora and envs.ALLOW_RUNTIME_LORA_UPDATING.get(),
        lora_resolver_dir=_resolver_dir(engine_config),
        log_stats_interval=0 if engine_config.disable_log_stats else envs.LOG_STATS_INTERVAL.get(),
        stores_responses=envs.ENABLE_RESPONSES_API_STORE.get(),
        is_development=envs.SERVER_DEV_MODE.get(),
    )


def _bind(config: ServerConfig, display: StartDisplay, passed: socket.socket | None) -> Listener:
    """Take the address. From here on Ctrl-C ends the process at once, and does not wait for threads of a download."""
    listener: Listener | None = None

    def leave(number: int, frame: FrameType | None) -> None:
        def clean_up() -> None:
            if listener is not None:
                listener.close()
            display.close()

        end_at_once(number, clean_up)

    signal.signal(signal.SIGINT, leave)
    with interrupts_between_steps():  # a Unix socket whose listener is not known yet would stay
        listener = Listener(config, passed)
    return listener


def _check_open_files() -> None:
    """Raise ConfigError if the process may open too few files for a start. Connections need further ones."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        raise ConfigError(
            "This process may open too few files",
            value=limit,
            expected=f"{MIN_OPEN_FILES} to start, and one for each connection",
            fix="Raise the limit, as `ulimit -n 4096` does",
        )


def _resolver_dir(config: EngineConfig) -> Path | None:
    """The folder of the adapters that requests may name; None: there is none. Raises ConfigError if it is no folder."""
    if not config.enable_lora or not (given := envs.LORA_RESOLVER_CACHE_DIR.get()):
        return None
    name = envs.LORA_RESOLVER_CACHE_DIR.name
    if not Path(given).is_dir():
        raise ConfigError("The folder of adapters does not exist", value=given, fix=f"Correct {name}", param=name)
    return Path(given)


def _check_module_names(config: EngineConfig, names: tuple[str, ...]) -> None:
    """Raise ConfigError for an adapter with the name of the base model."""
    for module in map(parse_module, config.lora_modules):
        if module.name in names:
            raise ConfigError(
                "The base model has this name",
                value=module.name,
                fix="Give the adapter another name, or the model with --served-model-name",
                param="lora_modules",
            )


def _max_tokens_cap(config: EngineConfig, parts: FrontEndParts) -> int | None:
    """The operator's max_new_tokens, as in vLLM. The one in the model's generation_config.json is only a default."""
    if config.generation_config not in ("auto", "vllm"):
        return parts.input_processor.defaults.get("max_tokens")
    return (config.override_generation_config or {}).get("max_new_tokens")


def _api_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of the flag and of the file, or else the key of the environment. Raises ConfigError."""
    given = config.api_key
    if config.api_key_file is not None:
        given += _read_keys(Path(config.api_key_file))
    return given or tuple(key for key in [envs.API_KEY.get()] if key)


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"The file of keys cannot be read: {why}",
            value=str(path),
            fix="Check --api-key-file",
            param="api_key_file",
        ) from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise ConfigError(
            "The file of keys has no key", value=str(path), expected="one key a line", param="api_key_file"
        )
    if mode & stat.S_IROTH:
        logger.warning("everybody on this machine can read the keys in %s: chmod 600 keeps them yours", path)
    return keys


class ServingProcess:
    """One HTTP server in front of the processes of its engines."""

    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        settings: AppSettings,
        parts: FrontEndParts,
        listener: Listener,
        display: StartDisplay,
        interpreters: Sequence[EngineInterpreter],
    ) -> None:
        self._parts, self._listener, self._display = parts, listener, display
        self._drain_seconds = server_config.shutdown_timeout
        metrics = PrometheusMetrics.of_config(
            engine_config,
            settings.served_model_names[0],
            parts.model_config.max_model_len,
            engine_config.num_replicas,
            parts.model_config,
            legacy_names=server_config.legacy_metric_names,
        )
        self._refreshes_tls = server_config.enable_ssl_refresh
        self._needs_key = bool(settings.api_keys)
        display.update("start", 0.0, "the engine's process" if len(interpreters) == 1 else "the engines' processes")
        self._engine, self._processes = start_async_engine(
            engine_config, parts, metrics.engines, interpreters=interpreters
        )
        self._engine.on_progress = self._show_progress
        if engine_config.enable_lora:
            metrics.show_adapters(self._engine.adapter_names)
        try:
            self._app = create_app(self._engine, parts.tokenizer, settings, metrics)
        except BaseException:
            self._processes.stop()
            raise
        tls = listener.server_tls()
        self._server = HttpServer(
            http_config(
                self._app,
                log_level=server_config.uvicorn_log_level,
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            ),
            drain_seconds=self._drain_seconds + LAST_WORDS_SECONDS,
            turn_away=listener.turn_away,
            hands_over=listener.is_passed,
        )
        self._error: QuireError | None = None
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serve until a signal comes, or until the engine is gone. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self._engine.start()
        watcher = asyncio.create_task(self._watch(), name="engine watch")
        tls_watcher = asyncio.create_task(self._watch_tls(), name="certificates") if self._refreshes_tls else None
        try:
            await self._server.serve(sockets=[self._listener.socket])
        finally:
            watcher.cancel()
            if tls_watcher is not None:
                tls_watcher.cancel()
            await self._engine.shutdown()
            self._processes.stop()
        if self._error is not None:
            return 2 if isinstance(self._error, (ConfigError, AdapterError)) else 1
        logs.say("stopped")
        return 0

    def _on_signal(self) -> None:
        """The first signal starts the drain, and the second one ends everything at once."""
        loop = asyncio.get_running_loop()
        if self._server.should_exit:
            self._end_streams()
            loop.call_later(LAST_WORDS_SECONDS, self._force_exit)
            return
        systemd.notify("STOPPING=1")
        self._app.state.quire.is_draining = True
        self._server.should_exit = True
        self._display.close()
        clear_line()
        if count := self._engine.num_unfinished:
            requests = "1 request" if count == 1 else f"{count} requests"
            logs.say(
                f"finishing {requests}, for at most {self._drain_seconds:g} s (once more to stop now)",
                num_requests=count,
                seconds=self._drain_seconds,
            )
        loop.call_later(self._drain_seconds, self._end_streams)

    def _end_streams(self) -> None:
        """End running requests with an error event, and not with a broken connection."""
        if self._ending is None:
            if count := self._engine.num_unfinished:
                logs.say(f"ending {count} unfinished", num_requests=count)
            self._ending = asyncio.create_task(self._engine.shutdown())

    def _force_exit(self) -> None:
        self._server.force_exit = True

    async def _watch(self) -> None:
        """Show the start and announce readiness. Stop the server if the engine ends for good."""
        try:
            await self._show_start()
            while self._engine.error is None:
                await asyncio.sleep(POLL_SECONDS)
            raise self._engine.error
        except QuireError as error:
            if self._server.should_exit:
                return
            self._display.close()
            self._error = error
            logs.say(error.message, logging.ERROR, code=error.code)
            end = await self._how_it_ended()
            if end is not None and end not in error.message:
                logs.say(end, logging.ERROR)
            self._app.state.quire.is_draining = True
            self._server.should_exit = True

    async def _watch_tls(self) -> None:
        while True:
            await asyncio.sleep(TLS_POLL_SECONDS)
            self._listener.refresh_tls()

    async def _show_start(self) -> None:
        gc.collect()  # before requests come, so that the collection after the start finds little
        ticker = asyncio.create_task(self._tick(), name="start display")
        try:
            ready = await self._engine.wait_ready(ready_seconds())
        finally:
            ticker.cancel()
            self._engine.on_progress = None  # the log and /readyz report a start after a failure
        gc.collect()
        gc.freeze()  # else every full collection looks at all modules, and all streams wait for tens of milliseconds
        self._display.finish()
        tokenizer = self._parts.tokenizer
        has_chat = tokenizer is not None and bool(tokenizer.chat_templates)
        show_ready(
            ready,
            self._parts.model_name,
            self._listener.address,
            has_chat=has_chat,
            needs_key=self._needs_key,
            seconds=self._display.seconds,
        )
        systemd.notify("READY=1")

    async def _tick(self) -> None:
        while True:
            self._display.tick()
            await asyncio.sleep(POLL_SECONDS)

    def _show_progress(self, progress: EngineProgress) -> None:
        self._display.update(progress.phase, progress.fraction, progress.detail, progress.seconds)

    async def _how_it_ended(self) -> str | None:
        """A text about the engine's end, if a signal ended it. The engine may end shortly after its last message."""
        await asyncio.sleep(POLL_SECONDS)
        return self._processes.describe_ends()
