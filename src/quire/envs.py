"""Every environment variable of Quire: type, default, meaning. They are read at each call, so tests can set them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.errors import ConfigError

T = TypeVar("T")


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(text)


def _log_format(text: str) -> str:
    if text not in ("text", "json"):
        raise ValueError(text)
    return text


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def _protocol(text: str) -> str:
    if text not in ("grpc", "http/protobuf"):
        raise ValueError(text)
    return text


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: `get()` parses the present value or returns the default."""

    name: str
    default: T
    parse: Callable[[str], T]
    help: str

    def get(self) -> T:
        text = os.environ.get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ConfigError(
                f"Environment variable {self.name} has an illegal value",
                value=text,
                expected=f"{self.help} (default {self.default!r})",
                param=self.name,
            ) from None


def for_children() -> dict[str, str]:
    """The environment for engine and render processes: this environment without the API key, which they do not need."""
    return {name: value for name, value in os.environ.items() if name != API_KEY.name}


CPU_KVCACHE_SPACE = Variable(
    "VLLM_CPU_KVCACHE_SPACE", 0.0, float, "KV cache memory on CPU in GiB; 0 = the free memory minus the reserve"
)
API_KEY = Variable("VLLM_API_KEY", "", str, "API key of the server; --api-key wins")
LOGGING_LEVEL = Variable("VLLM_LOGGING_LEVEL", "INFO", str.upper, "DEBUG, INFO, WARNING or ERROR")
LOG_FORMAT = Variable("QUIRE_LOG_FORMAT", "text", _log_format, "text, or json: one object per line; --log-format wins")
LOG_STATS_INTERVAL = Variable("VLLM_LOG_STATS_INTERVAL", 10.0, float, "seconds between two statistics lines")
ENGINE_READY_TIMEOUT_S = Variable("VLLM_ENGINE_READY_TIMEOUT_S", 600, int, "seconds to wait for the engine at start")
ALLOW_LONG_MAX_MODEL_LEN = Variable(
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN", False, _boolean, "1 allows --max-model-len above what the model was trained for"
)
ALLOW_RUNTIME_LORA_UPDATING = Variable(
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING", False, _boolean, "1: adapters are loaded and unloaded over HTTP"
)
LORA_RESOLVER_CACHE_DIR = Variable(
    "VLLM_LORA_RESOLVER_CACHE_DIR", "", str, "folder in which adapters of unknown model names are looked for"
)
ENABLE_RESPONSES_API_STORE = Variable(
    "VLLM_ENABLE_RESPONSES_API_STORE", True, _boolean, "0: no response of /v1/responses is kept for later requests"
)
SERVER_DEV_MODE = Variable("VLLM_SERVER_DEV_MODE", False, _boolean, "1: there are /server_info and /reset_prefix_cache")
BATCH_INVARIANT = Variable("VLLM_BATCH_INVARIANT", False, _boolean, "1 is --deterministic")
FORCE_REFERENCE = Variable(
    "QUIRE_FORCE_REFERENCE", False, _boolean, "1 runs the plain-torch path instead of the compiled kernels"
)
ATTENTION_BACKEND = Variable(
    "QUIRE_ATTENTION_BACKEND", "", str, "name of the attention backend; empty = chosen by device"
)
ISA = Variable(
    "QUIRE_ISA",
    "",
    str,
    "instruction set of the CPU kernels: scalar, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx, or on ARM64 "
    "scalar, neon, neon_dotprod, neon_i8mm; empty = best present",
)
NUM_THREADS = Variable(
    "QUIRE_NUM_THREADS", 0, int, "threads of the CPU kernels; 0 = physical cores allowed by affinity and cgroup"
)
CPU_OMP_THREADS_BIND = Variable(
    "VLLM_CPU_OMP_THREADS_BIND", "", str, "CPUs of each rank, as 0-3|4-7; auto, nobind or empty = all that are allowed"
)
PP_LAYER_PARTITION = Variable[tuple[int, ...]](
    "VLLM_PP_LAYER_PARTITION",
    (),
    _sizes,
    "layers of each stage of --pipeline-parallel-size, as 10,9,9; empty = by bytes and predicted time",
)
CLUSTER_KEY = Variable(
    "QUIRE_CLUSTER_KEY", "", str, "what the machines of a server share: at least 16 characters; others are not let in"
)
RANK = Variable("RANK", 0, int, "set by torchrun: the number of the process (external_launcher)")
WORLD_SIZE = Variable("WORLD_SIZE", 1, int, "set by torchrun: how many processes there are (external_launcher)")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", 0, int, "set by torchrun: the same on this machine; 0 = all")
MASTER_ADDR = Variable("MASTER_ADDR", "", str, "set by torchrun: with MASTER_PORT, where its processes meet")
MASTER_PORT = Variable("MASTER_PORT", 0, int, "set by torchrun: see MASTER_ADDR")
NO_COLOR = Variable("NO_COLOR", "", str, "anything: no colours (no-color.org)")
FORCE_COLOR = Variable("FORCE_COLOR", "", str, "anything: colours also where there is no terminal; NO_COLOR wins")
OTLP_TRACES_PROTOCOL = Variable(
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "grpc",
    _protocol,
    "how --otlp-traces-endpoint is spoken to: grpc, http/protobuf",
)
CACHE_DIR = Variable(
    "QUIRE_CACHE_DIR", "", str, "folder for packed weights (--packed-weights-cache); empty = quire in the user's cache"
)
XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", "", str, "the user's cache; empty = ~/.cache (XDG Base Directory)")
XDG_STATE_HOME = Variable(
    "XDG_STATE_HOME", "", str, "where the lines of `quire chat` are kept; empty = ~/.local/state (XDG Base Directory)"
)
TERM = Variable("TERM", "", str, "dumb: no progress bars, no colours")
LISTEN_PID = Variable("LISTEN_PID", 0, int, "set by systemd: which process a socket is for")
LISTEN_FDS = Variable("LISTEN_FDS", 0, int, "set by systemd: how many sockets; `quire serve` takes one, for --host")
JOURNAL_STREAM = Variable(
    "JOURNAL_STREAM", "", str, "set by systemd: the journal's stream; log lines there have levels"
)
NOTIFY_SOCKET = Variable("NOTIFY_SOCKET", "", str, "set by systemd: where `quire serve` says READY=1 and STOPPING=1")

VARIABLES: tuple[Variable[float] | Variable[str] | Variable[int] | Variable[bool] | Variable[tuple[int, ...]], ...] = (
    CPU_KVCACHE_SPACE,
    API_KEY,
    LOGGING_LEVEL,
    LOG_FORMAT,
    LOG_STATS_INTERVAL,
    ENGINE_READY_TIMEOUT_S,
    ALLOW_LONG_MAX_MODEL_LEN,
    ALLOW_RUNTIME_LORA_UPDATING,
    LORA_RESOLVER_CACHE_DIR,
    ENABLE_RESPONSES_API_STORE,
    SERVER_DEV_MODE,
    BATCH_INVARIANT,
    FORCE_REFERENCE,
    ATTENTION_BACKEND,
    ISA,
    NUM_THREADS,
    CPU_OMP_THREADS_BIND,
    PP_LAYER_PARTITION,
    CLUSTER_KEY,
    RANK,
    WORLD_SIZE,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    OTLP_TRACES_PROTOCOL,
    NO_COLOR,
    FORCE_COLOR,
    CACHE_DIR,
    XDG_CACHE_HOME,
    XDG_STATE_HOME,
    TERM,
    LISTEN_PID,
    LISTEN_FDS,
    JOURNAL_STREAM,
    NOTIFY_SOCKET,
)
