"""`quire serve`: the HTTP server in this process, the engine in another, from start to drained end."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from pathlib import Path

import uvicorn
import uvloop

from quire import __version__, envs, logs
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError, QuireError
from quire.launch import FrontEndParts, open_model, start_async_engine
from quire.messages import EngineReady
from quire.metrics.prometheus import PrometheusMetrics
from quire.server.app import create_app
from quire.server.state import ServerSettings

logger = logs.get_logger(__name__)

LIFE_CHECK_SECONDS = 0.5
GIB = 1 << 30


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until told to stop. Answers with the exit code: 0 stopped, 1 the engine failed. Raises ConfigErrors before it serves."""
    logs.configure()
    api_keys = server_config.api_key or tuple(key for key in [envs.API_KEY.get()] if key)
    _check_guarded(server_config, api_keys)
    parts = open_model(engine_config, _print_progress)
    names = engine_config.served_model_name or (parts.model_name,)
    settings = ServerSettings(
        served_model_names=names,
        model_root=parts.model_name if "/" in parts.model_name and not Path(parts.model_name).exists() else names[0],
        api_keys=api_keys,
        allowed_hosts=_loopback_names(server_config.host),
        max_model_len=parts.model_config.max_model_len,
        default_sampling_params=parts.input_processor.defaults,
        chat_template=_read_template(server_config.chat_template),
        response_role=server_config.response_role,
        has_priorities=engine_config.scheduling_policy == "priority",
        log_stats_interval=0 if engine_config.disable_log_stats else envs.LOG_STATS_INTERVAL.get(),
    )
    code: int = uvloop.run(ServingProcess(engine_config, server_config, settings, parts).run())
    return code


def _check_guarded(config: ServerConfig, api_keys: tuple[str, ...]) -> None:
    if not _is_loopback(config.host) and not api_keys and not config.no_auth:
        raise ConfigError(
            "The server would be open to everybody who reaches this machine",
            value=config.host,
            expected="an address of this machine alone, such as 127.0.0.1, or a key",
            fix="Set --api-key (or VLLM_API_KEY), or say --no-auth if that is meant",
            param="host",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _loopback_names(host: str) -> tuple[str, ...]:
    """Names a loopback server may be addressed by: anything else is a page that rebinds its name to this address."""
    return ("127.0.0.1", "localhost", "::1", host) if _is_loopback(host) else ()


def _read_template(given: str | None) -> str | None:
    """A file's text, or the argument itself if it is a template or the name of one."""
    if given is None or "{" in given or "\n" in given:
        return given
    path = Path(given)
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if path.suffix in (".jinja", ".jinja2", ".txt") or "/" in given:
        raise ConfigError(
            "The chat template file does not exist", value=given, fix="Check the path", param="chat_template"
        )
    return given


class ServingProcess:
    """One HTTP server over one engine process."""

    def __init__(
        self, engine_config: EngineConfig, server_config: ServerConfig, settings: ServerSettings, parts: FrontEndParts
    ) -> None:
        self._parts = parts
        self._host = server_config.host
        metrics = PrometheusMetrics(settings.served_model_names[0], parts.model_config.max_model_len)
        self._engine, self._process = start_async_engine(engine_config, parts, metrics)
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(self._engine, parts.tokenizer, settings, metrics),
                host=server_config.host,
                port=server_config.port,
                log_level=server_config.uvicorn_log_level,
                access_log=False,
                http="httptools",
                timeout_graceful_shutdown=int(server_config.shutdown_timeout),
            )
        )
        self._has_failed = False

    async def run(self) -> int:
        """Serve until a signal, or until the engine is gone. Answers with the exit code."""
        watcher = asyncio.create_task(self._watch(), name="engine watch")
        try:
            await self._server.serve()
        finally:
            watcher.cancel()
            self._process.stop()
        return 1 if self._has_failed or not self._server.started else 0

    async def _watch(self) -> None:
        """Announce readiness; without an engine there is nothing to serve, so stop for a supervisor to start anew."""
        try:
            ready = await self._engine.wait_ready(envs.ENGINE_READY_TIMEOUT_S.get())
            while not self._server.started:
                await asyncio.sleep(LIFE_CHECK_SECONDS / 10)
            print(_first_screen(ready, self._parts, self._url()), file=sys.stderr, flush=True)
            while self._engine.error is None:
                await asyncio.sleep(LIFE_CHECK_SECONDS)
            raise self._engine.error
        except QuireError as error:
            if not self._server.should_exit:
                print(f"quire: {error.message}", file=sys.stderr, flush=True)
                self._has_failed = True
                self._server.should_exit = True

    def _url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}"


def _print_progress(phase: str, fraction: float, detail: str) -> None:
    if fraction >= 1 or not sys.stderr.isatty():
        return
    print(f"\r  {phase} {fraction:4.0%} {detail}", end="", file=sys.stderr, flush=True)


def _first_screen(ready: EngineReady, parts: FrontEndParts, url: str) -> str:
    """What a person needs to know once the server answers."""
    tokens = ready.num_blocks * ready.block_size

    def value(name: str) -> object:
        setting = ready.resolved[name]
        assert isinstance(setting, dict)
        return setting["value"]

    kv_bytes = value("kv_cache_bytes")
    assert isinstance(kv_bytes, int)
    dtype = value("dtype")
    weights = parts.model_config.weight_bytes(str(dtype))
    return "\n".join(
        [
            f"  quire {__version__}  {parts.model_name}  {dtype}, {value('num_threads')} threads",
            f"  memory    weights {weights / GIB:.2f} GiB, KV cache up to {kv_bytes / GIB:.2f} GiB",
            f"  KV cache size: {tokens:,} tokens",
            f"  Maximum concurrency for {ready.max_model_len:,} tokens per request: {tokens / ready.max_model_len:.2f}x",
            f"  chosen    max_num_seqs {ready.max_num_seqs}, max_num_batched_tokens {ready.max_num_batched_tokens}, "
            f"block_size {ready.block_size}",
            f"  ready     {url}   chat in the browser: /   metrics: /metrics   (Ctrl-C stops)",
            f"  try       curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
            """-d '{"messages": [{"role": "user", "content": "What does os.path.join do?"}]}'""",
        ]
    )
