"""What the user wants: a field with its help per setting. Flags, LLM(...) arguments and docs come from here.

None means "choose for me"; `resolve.py` chooses and records why. Names and meanings are vLLM's unless the help says
otherwise.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from quire.errors import ConfigError
from quire.vllm_arguments import drop_foreign

KIB_SUFFIXES = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2, "g": 1000**3, "G": 1024**3}


def parse_human_int(text: str | int) -> int:
    """`32k` = 32,000, `32K` = 32,768, `1M` = 1,048,576, `2.5k` = 2,500 (vLLM's suffixes); plain integers too."""
    if isinstance(text, int):
        return text
    number, factor = text.strip(), 1
    if number and number[-1] in KIB_SUFFIXES:
        number, factor = number[:-1], KIB_SUFFIXES[number[-1]]
    try:
        value = float(number) * factor if "." in number else int(number) * factor
    except ValueError:
        raise ConfigError(
            "Not a number", value=text, expected="an integer, or one with a suffix k, K, m, M, g or G"
        ) from None
    if value != int(value):
        raise ConfigError("Not a whole number", value=text, expected="a whole number after applying the suffix")
    return int(value)


def option(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    type: Any = None,
    live: bool = False,
    many: bool = False,
) -> Any:
    """A config field. `flags`: further spellings; `live`: may change while serving; `many`: takes several values."""
    metadata = {"help": help, "flags": flags, "choices": choices, "type": type, "live": live, "many": many}
    return field(default=default, metadata=metadata)


LOAD_FORMATS = ("auto", "safetensors", "dummy")
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything about the model, its memory and its schedule."""

    model: str | None = option(None, "Folder or hub id of the model; none: the bundled demo model.")
    tokenizer: str | None = option(None, "Folder or hub id of the tokenizer, if it is not the model's.")
    tokenizer_mode: str = option(
        "auto", "auto or hf: tokenizer.json; slow: convert through transformers.", choices=("auto", "hf", "slow")
    )
    skip_tokenizer_init: bool = option(False, "No tokenizer: prompts and outputs are token ids only.")
    trust_remote_code: bool = option(False, "Accepted for compatibility; code from a model repository is never run.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of the tokenizer on the hub.")
    hf_token: str | None = option(None, "Token for gated models on the hub; else HF_TOKEN.")
    hf_overrides: dict[str, Any] | None = option(None, "JSON object merged over config.json.", type="json")
    download_dir: str | None = option(None, "Folder for downloaded weights; else the hub's cache.")
    load_format: str = option("auto", "auto or safetensors: read weights; dummy: random weights.", choices=LOAD_FORMATS)
    model_impl: str = option(
        "auto",
        "auto: native, else through transformers' modelling code; native; transformers.",
        choices=("auto", "native", "vllm", "transformers"),
    )
    dtype: str = option(
        "auto",
        "Weights and activations: auto (the checkpoint's), bfloat16, float16 = half, float32 = float.",
        choices=DTYPES,
    )
    quantization: str | None = option(None, "Quantization of the weights; none: as the checkpoint is.", flags=("-q",))
    seed: int | None = option(
        0, "Seed of the seeds drawn for requests that bring none; None in Python: another one at every start."
    )
    served_model_name: tuple[str, ...] = option((), "Names the API answers to; the first is reported.", many=True)
    max_model_len: int | None = option(
        None, "Longest prompt plus output in tokens; -1: the longest that fits; suffixes k, K, M.", type=parse_human_int
    )
    generation_config: str = option(
        "auto", "auto: the model's generation_config.json gives request defaults; vllm: none."
    )
    override_generation_config: dict[str, Any] | None = option(
        None, "JSON object merged over the generation config.", type="json"
    )
    max_logprobs: int = option(20, "Most logprobs a request may ask for; -1: no cap.")
    logprobs_mode: str = option(
        "raw_logprobs",
        "raw_logprobs: before penalties and temperature; processed_logprobs: after.",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    enforce_eager: bool = option(False, "Accepted: no graphs or compilation are used on CPU.")
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's total memory (on CPU: RAM) for weights, KV cache and work.",
        flags=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Exact bytes of the KV cache; overrides the utilization.", type=parse_human_int
    )
    num_gpu_blocks_override: int | None = option(None, "Exact number of KV blocks; overrides everything else.")
    block_size: int | None = option(None, "Tokens per KV block: a power of two from 8 to 128.")
    kv_cache_dtype: str = option("auto", "auto: the model's dtype.", choices=("auto",))
    enable_prefix_caching: bool = option(True, "Keep KV blocks of past prompts and share equal prefixes.")
    max_num_seqs: int | None = option(None, "Most requests running at once.", live=True)
    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step.", live=True, type=parse_human_int
    )
    long_prefill_token_threshold: int = option(
        0, "Most tokens of one prompt in one step; 0: no limit but the budget.", live=True
    )
    max_num_queued_reqs: int | None = option(None, "Most requests waiting; above it new ones get 429.", live=True)
    enable_chunked_prefill: bool = option(True, "Split long prompts over steps.")
    scheduling_policy: str = option("fcfs", "fcfs, or priority: lower numbers first.", choices=("fcfs", "priority"))
    watermark: float = option(0.0, "Share of KV blocks kept free at admission.")
    async_scheduling: bool | None = option(None, "Schedule the next step while one runs (two batches in flight).")
    num_threads: int | None = option(None, "Threads of the CPU kernels; none: physical cores allowed.")
    disable_log_stats: bool = option(False, "No statistics line every 10 seconds.")
    tensor_parallel_size: int = option(1, "Devices per replica; 1 in this version.", flags=("-tp",))

    def __post_init__(self) -> None:
        _normalise(self)
        _check_types(self)
        _check_choices(self)
        _check_engine(self)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """From LLM(...) arguments. An unknown name is an error with the nearest known one; one of vLLM's without a
        meaning here is dropped with a log line, or refused if it was to change something.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        kwargs = drop_foreign(kwargs)
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"Unknown engine argument {name!r}",
                    fix=f"Did you mean {near[0]!r}?" if near else "quire serve --help lists the arguments",
                    param=name,
                )
        return cls(**kwargs)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything about the HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free one.")
    api_key: tuple[str, ...] = option((), "Keys clients must send; else VLLM_API_KEY.", many=True)
    no_auth: bool = option(False, "Allow an address other than loopback without a key.")
    chat_template: str | None = option(None, "File with a Jinja chat template, or the template itself.")
    response_role: str = option("assistant", "Role of the answers.")
    uvicorn_log_level: str = option(
        "warning", "Log level of the HTTP server.", choices=("critical", "error", "warning", "info", "debug", "trace")
    )
    disable_uvicorn_access_log: bool = option(False, "Accepted: the access log is off.")
    shutdown_timeout: float = option(30.0, "Seconds to let running requests finish on SIGTERM.")

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choices(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError("Illegal port", value=self.port, expected="0 to 65535; 0: any free one", param="port")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(
                "Illegal shutdown_timeout",
                value=self.shutdown_timeout,
                expected="seconds, 0 or more",
                param="shutdown_timeout",
            )


def _normalise(config: EngineConfig) -> None:
    """Other spellings of the same value, as users write them in Python: `"32k"`, `torch.bfloat16`, a Path."""
    for f in dataclasses.fields(config):
        value, plain = getattr(config, f.name), None
        if f.metadata["type"] is parse_human_int and isinstance(value, str):
            plain = parse_human_int(value)
        elif f.metadata["many"] and isinstance(value, (str, list)):
            plain = (value,) if isinstance(value, str) else tuple(value)
        elif f.name == "dtype" and str(value).startswith("torch."):
            plain = str(value).removeprefix("torch.")
        elif isinstance(value, os.PathLike):
            plain = os.fspath(value)
        if plain is not None:
            object.__setattr__(config, f.name, plain)  # the config is being made: nobody has seen it yet


def field_type(annotation: Any) -> tuple[type, bool, bool]:
    """What a field holds: (type without None, is it a tuple of that type, may it be None)."""
    is_optional = False
    if get_origin(annotation) in (Union, types.UnionType):
        is_optional = types.NoneType in get_args(annotation)
        annotation = next(a for a in get_args(annotation) if a is not types.NoneType)
    if get_origin(annotation) is tuple:
        return get_args(annotation)[0], True, is_optional
    return get_origin(annotation) or annotation, False, is_optional


def _check_types(config: EngineConfig | ServerConfig) -> None:
    for name, annotation in get_type_hints(type(config)).items():
        kind, is_tuple, is_optional = field_type(annotation)
        value = getattr(config, name)
        if value is None and is_optional:
            continue
        items = value if is_tuple and isinstance(value, (tuple, list)) else [value]
        for item in items:
            is_number = kind is float and isinstance(item, int)
            if (isinstance(item, bool) and kind is not bool) or not (isinstance(item, kind) or is_number):
                raise ConfigError(
                    f"{name} has the wrong type, {type(item).__name__}",
                    value=value,
                    expected=kind.__name__ + (" or several" if is_tuple else "") + (" or None" if is_optional else ""),
                    param=name,
                )


def _check_choices(config: EngineConfig | ServerConfig) -> None:
    for f in dataclasses.fields(config):
        choices, value = f.metadata["choices"], getattr(config, f.name)
        if choices and value not in choices:
            near = difflib.get_close_matches(str(value), choices, 1)
            raise ConfigError(
                f"Illegal value of {f.name}",
                value=value,
                expected="one of " + ", ".join(choices),
                fix=f"Did you mean {near[0]!r}?" if near else None,
                param=f.name,
            )


def _check_engine(config: EngineConfig) -> None:
    if config.trust_remote_code:
        raise ConfigError(
            "trust_remote_code is set, and Quire never runs code from a model repository",
            fix="Leave the flag out; architectures known to transformers run without it",
            param="trust_remote_code",
        )
    if config.quantization is not None:
        raise ConfigError(
            "Quantized weights are not supported in this version",
            value=config.quantization,
            fix="Leave --quantization out",
            param="quantization",
        )
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            "Tensor parallelism is not supported in this version",
            value=config.tensor_parallel_size,
            expected="1",
            fix="Leave --tensor-parallel-size out",
            param="tensor_parallel_size",
        )
    if config.block_size is not None and config.block_size not in (8, 16, 32, 64, 128):
        raise ConfigError(
            "Illegal block size", value=config.block_size, expected="8, 16, 32, 64 or 128", param="block_size"
        )
    if config.gpu_memory_utilization is not None and not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            "Illegal memory utilization",
            value=config.gpu_memory_utilization,
            expected="a share in (0, 1]",
            param="gpu_memory_utilization",
        )
    if config.max_model_len is not None and config.max_model_len != -1 and config.max_model_len < 1:
        raise ConfigError(
            "Illegal max_model_len",
            value=config.max_model_len,
            expected="a positive number, or -1",
            param="max_model_len",
        )
    if not 0 <= config.watermark < 1:
        raise ConfigError("Illegal watermark", value=config.watermark, expected="a share in [0, 1)", param="watermark")
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "num_threads",
        "max_num_queued_reqs",
    ):
        number = getattr(config, name)
        if number is not None and number < 1:
            raise ConfigError(f"Illegal value of {name}", value=number, expected="a positive number", param=name)
    if config.long_prefill_token_threshold < 0:
        raise ConfigError(
            "Illegal long_prefill_token_threshold",
            value=config.long_prefill_token_threshold,
            expected="0 or more",
            param="long_prefill_token_threshold",
        )
