"""vLLM's environment variables. A start names those that Quire does not read, and the nearest name of unknown ones."""

from __future__ import annotations

import difflib
import os

from quire import envs
from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)

PREFIXES = ("VLLM_", "QUIRE_")

_KERNELS = "kernels are chosen for the device at start; --attention-backend and QUIRE_ISA name others"
_THREADS = "use --num-threads or QUIRE_NUM_THREADS; threads run on the cores the process is allowed"
_PROCESSES = "the server starts its engine process in one way"
_REPLICAS = "--data-parallel-size N runs N replicas in one server; otherwise an engine knows of no other one"
_LOGGING = "VLLM_LOGGING_LEVEL sets the level, --log-format json the form"

# vLLM 0.32's variables, and older ones of guides, that change nothing here. name -> why
NOT_READ: dict[str, str] = {
    "VLLM_ATTENTION_BACKEND": "use --attention-backend",
    "VLLM_USE_TRITON_FLASH_ATTN": _KERNELS,
    "VLLM_FLASH_ATTN_VERSION": _KERNELS,
    "VLLM_USE_FLASHINFER_SAMPLER": _KERNELS,
    "VLLM_USE_DEEP_GEMM": f"it is about block-FP8 weights on GPUs, and never about the KV cache's dtype; {_KERNELS}",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "a request whose logits are not numbers always fails alone",
    "VLLM_CACHE_ROOT": "HF_HOME moves the hub's files, QUIRE_CACHE_DIR what --packed-weights-cache keeps",
    "VLLM_CONFIGURE_LOGGING": _LOGGING,
    "VLLM_LOGGING_CONFIG_PATH": _LOGGING,
    "VLLM_LOGGING_COLOR": "colours are for terminals; NO_COLOR and FORCE_COLOR decide otherwise",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": _THREADS,
    "VLLM_ENABLE_STARTUP_PLAN": "memory is measured at every start",
    "VLLM_ENABLE_V1_MULTIPROCESSING": _PROCESSES,
    "VLLM_WORKER_MULTIPROC_METHOD": _PROCESSES,
    "VLLM_DP_SIZE": _REPLICAS,
    "VLLM_DP_RANK": _REPLICAS,
    "VLLM_DP_RANK_LOCAL": _REPLICAS,
    "VLLM_DP_MASTER_IP": _REPLICAS,
    "VLLM_DP_MASTER_PORT": _REPLICAS,
    "VLLM_HOST_IP": "--master-addr names the address of node 0",
    "VLLM_PORT": "--port is the server's, and --master-port is for ranks on other machines",
    "VLLM_RPC_TIMEOUT": "/health says whether steps end in time",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "/health says whether steps end in time",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "idle connections are closed after 5 s",
    "VLLM_MAX_N_SEQUENCES": "a request may ask for 1,024 sequences",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "nothing is captured on CPU",
    "VLLM_NO_USAGE_STATS": "nothing is ever sent",
    "VLLM_DO_NOT_TRACK": "nothing is ever sent",
    "VLLM_PLUGINS": "no plug-ins are loaded",
    "VLLM_SKIP_P2P_CHECK": "ranks share main memory, and no GPU reads the memory of another one",
    "VLLM_TARGET_DEVICE": "there is one build",
    "VLLM_TORCH_PROFILER_DIR": "use py-spy on the engine process",
    "VLLM_USE_RAY_SPMD_WORKER": "Ray starts the processes of nodes, which talk to each other without it",
    "VLLM_USE_RUST_BENCH": _PROCESSES,
    "VLLM_USE_RUST_FRONTEND": _PROCESSES,
    "VLLM_USE_V1": "there is one engine",
}

# Variables that would change the server, and that Quire cannot obey. name -> (why, fix)
REFUSED: dict[str, tuple[str, str]] = {
    "QUIRE_API_KEY": (
        "no such variable is read: the server would be open",
        "Name it VLLM_API_KEY, or use --api-key-file",
    ),
    "VLLM_USE_MODELSCOPE": (
        "models come from the Hugging Face hub or from a folder",
        "Unset it, and name a hub id or the folder of a downloaded model",
    ),
}

_OFF = ("", "0", "false", "no", "off")


def check_environment(*, is_strict: bool = False) -> None:
    """Log every variable of vLLM or Quire that is set and not read.

    Args:
        is_strict: whether unknown variables are errors.

    Raises:
        ConfigError: a variable would change the server, or, if `is_strict`, is unknown.
    """
    known = {variable.name for variable in envs.VARIABLES}
    for name in sorted(os.environ):
        if not name.startswith(PREFIXES) or name in known:
            continue
        if is_refused(name, os.environ[name]):
            why, fix = REFUSED[name]
            raise ConfigError(f"{name} is set, and {why}", fix=fix, param=name)
        if name in NOT_READ:
            logger.warning("%s has no effect: %s", name, NOT_READ[name])
        elif name not in REFUSED:
            _on_unknown(name, is_strict)


def is_refused(name: str, value: str) -> bool:
    """Whether a server does not start while the variable has this value."""
    return name in REFUSED and value.strip().lower() not in _OFF


def nearest_variable(name: str) -> str | None:
    """The known variable that an unknown one is likely to mean."""
    known = {variable.name for variable in envs.VARIABLES}
    return next(iter(difflib.get_close_matches(name, sorted(known | NOT_READ.keys()), 1, 0.8)), None)


def _on_unknown(name: str, is_strict: bool) -> None:
    near = nearest_variable(name)
    hint = f"Did you mean {near}?" if near else "Unset it"
    if is_strict:
        raise ConfigError(f"The environment variable {name} is not known", fix=hint, param=name)
    logger.warning("%s is not read by Quire. %s", name, hint)
