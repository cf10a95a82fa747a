"""Turns what the user wants, what the model is and what the machine has into settings that know where they came from.

Two steps, because memory is only known after the weights are loaded: `resolve` gives everything but the number of KV
blocks, `plan_kv_cache` gives that. The bytes planned here are the bytes the allocator takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire import envs
from quire.config import EngineConfig, ServerConfig
from quire.errors import ConfigError, MemoryPlanError
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.option import Source, options
from quire.weight_format import ON_LOAD

GIB = 1 << 30

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
# Tokens of context per running request that the default KV cache is cut to: more could only hold evictable prefixes.
MAX_USEFUL_CONTEXTS = 2
RESERVE_SHARE = 0.05  # of total memory, left to the operating system and to allocator slack
FREE_MEMORY_MARGIN = 0.95  # of measured free memory in advice: it will not be the same at the next start
MIN_SUGGESTED_BUDGET = 256  # tokens per step; below it prompts become slow
LOGITS_COPIES = 2  # float32 rows of logits held at once: the model's, and the sampler's scratch
# vLLM's table for CPU, `max_num_seqs / max_num_batched_tokens`: for the server, and for LLM(...).
SERVER_LIMITS, OFFLINE_LIMITS = (128, 2048), (256, 4096)
THROUGHPUT_FACTOR = 2  # on both limits, as vLLM's performance mode
# On the token budget: a long prompt then holds up the others' next token for a quarter of the time.
INTERACTIVITY_DIVISOR = 4

# What the settings limit that are no fields of EngineConfig.
_FURTHER_LIMITS = {
    "isa": "which kernels run",
    "weight_bytes": "memory left for the KV cache",
    "work_bytes": "memory left for the KV cache",
    "kv_cache_bytes": "context held for all requests together",
    "unplanned_bytes": "what other programs may take",
    "num_blocks": "context held for all requests together",
}
_FIELDS = {f.name: f for config in (EngineConfig, ServerConfig) for f in options(config)}
# Memory is planned for their first values, so they may only be moved below these.
_PLANNED_FOR = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class DeviceFacts:
    """What the machine has. Memory in bytes."""

    kind: Literal["cpu"]
    name: str
    isa: str
    num_cores: int
    total_memory_bytes: int
    free_memory_bytes: int


@dataclass(frozen=True)
class Setting:
    """A value, where it came from, and for a formula its numbers."""

    value: Any
    source: Source
    detail: str = ""
    limits: str = ""  # what it bounds
    is_live: bool = False  # may change while serving
    maximum: int | None = None  # of a live one: what memory was planned for

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        shown: dict[str, object] = {
            "value": self.value,
            "source": self.source,
            "detail": self.detail,
            "limits": self.limits,
            "live": self.is_live,
        }
        return shown | ({"max": self.maximum} if self.maximum is not None else {})


@dataclass
class Resolved:
    """All settings by name; attribute access gives the value."""

    settings: dict[str, Setting] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.settings[name].value
        except KeyError:
            raise AttributeError(name) from None

    def put(self, name: str, value: Any, source: Source, detail: str = "") -> None:
        """Record a value, with what its field says of it."""
        f = _FIELDS.get(name)
        is_live = f is not None and f.metadata["live"]
        limits = _FURTHER_LIMITS[name] if f is None else f.metadata["limits"]
        maximum = value if name in _PLANNED_FOR else None
        self.settings[name] = Setting(value, source, detail, limits, is_live, maximum)

    def as_dict(self) -> dict[str, object]:
        """For JSON: {name: Setting.as_dict()}."""
        return {name: setting.as_dict() for name, setting in self.settings.items()}


def resolve(config: EngineConfig, model: ModelConfig, device: DeviceFacts, *, is_server: bool) -> Resolved:
    """Every setting except those of memory. Raises ConfigError when a value does not fit the model."""
    resolved = Resolved()
    put = resolved.put

    def put_or(name: str, default: Any, source: Source, detail: str) -> None:
        """The user's value if given, else the default with its reason."""
        chosen = getattr(config, name)
        if chosen is None:
            put(name, default, source, detail)
        else:
            put(name, chosen, config.sources[name], f"default would be {default}: {detail}")

    put("isa", device.isa, "environment" if envs.ISA.get() else "device", device.name)
    if config.dtype == "auto":
        put("dtype", *_auto_dtype(model))
    else:
        given = DTYPE_ALIASES.get(config.dtype, config.dtype)
        put("dtype", given, config.sources["dtype"], f"checkpoint is {model.dtype}")
    put_or("block_size", 16, "default", "tokens per KV block; waste is under one block per sequence")
    if envs.NUM_THREADS.get():
        put_or("num_threads", envs.NUM_THREADS.get(), "environment", envs.NUM_THREADS.name)
    else:
        put_or("num_threads", device.num_cores, "device", "physical cores allowed by affinity and cgroup quota")
    put("max_model_len", *_max_model_len(config, model))

    seqs, tokens, source, why = _batch_limits(config, is_server)
    put_or("max_num_seqs", seqs, source, why)
    most = resolved.max_num_seqs * resolved.max_model_len
    if tokens > most:
        tokens, source, why = most, "formula", f"max_num_seqs {resolved.max_num_seqs} x {resolved.max_model_len} tokens"
    budget_floor = 0 if config.enable_chunked_prefill else resolved.max_model_len
    tokens = max(tokens, resolved.max_num_seqs, budget_floor)
    put_or("max_num_batched_tokens", tokens, source, f"{why}; at least one token per running request")
    if resolved.max_num_batched_tokens < resolved.max_num_seqs:
        raise ConfigError(
            "The token budget is smaller than the number of running requests",
            value=resolved.max_num_batched_tokens,
            expected=f"max_num_batched_tokens of at least max_num_seqs = {resolved.max_num_seqs}",
            fix="Raise --max-num-batched-tokens or lower --max-num-seqs",
            param="max_num_batched_tokens",
        )
    if not config.enable_chunked_prefill and resolved.max_num_batched_tokens < resolved.max_model_len:
        raise ConfigError(
            "Without chunked prefill the longest prompt must fit into one step",
            value=resolved.max_num_batched_tokens,
            expected=f"max_num_batched_tokens of at least max_model_len = {resolved.max_model_len}",
            fix="Leave --no-enable-chunked-prefill out, or lower --max-model-len",
            param="max_num_batched_tokens",
        )
    put_or("max_num_queued_reqs", 1024 if is_server else None, "default", "bounded in the server, unbounded offline")
    put_or(
        "async_scheduling", False, "default", "on CPU the kernels use every core, so there is nothing to hide behind"
    )
    _put_rest(resolved, config)
    return resolved


def resolve_server(config: ServerConfig) -> Resolved:
    """Every setting of the HTTP side."""
    resolved = Resolved()
    if not config.api_key and envs.API_KEY.get():
        resolved.put("api_key", "set", "environment", envs.API_KEY.name)
    for name, variable in (("log_level", envs.LOGGING_LEVEL), ("log_format", envs.LOG_FORMAT)):
        if getattr(config, name) is None:
            value = variable.get()
            source: Source = "default" if value == variable.default else "environment"
            resolved.put(name, value.lower(), source, variable.name)
    _put_rest(resolved, config)
    return resolved


def _put_rest(resolved: Resolved, config: EngineConfig | ServerConfig) -> None:
    """The settings that are what the user said, or their default."""
    for f in options(config):
        if f.name not in resolved.settings:
            value = getattr(config, f.name)
            shown = ("set" if value else None) if f.metadata["secret"] else value
            detail = _UNSET.get(f.name, "") if value is None else ""
            if f.name == "quantization" and value is not None:
                detail = ON_LOAD[value].description
            resolved.put(f.name, shown, config.sources[f.name], detail)


# Why nothing needs to be said for a setting that is None.
_UNSET = {
    "model": "the bundled demo model",
    "tokenizer": "the model's",
    "gpu_memory_utilization": "what is free decides",
    "kv_cache_memory_bytes": "what is free decides",
    "num_gpu_blocks_override": "what is free decides",
    "quantization": "as the checkpoint is",
    "download_dir": "the hub library's cache",
    "seed": "another one at every start",
}


def _batch_limits(config: EngineConfig, is_server: bool) -> tuple[int, int, Source, str]:
    """Default max_num_seqs and max_num_batched_tokens, their source, and why."""
    seqs, tokens = SERVER_LIMITS if is_server else OFFLINE_LIMITS
    why = f"as vLLM on CPU: {seqs} requests, {tokens} tokens"
    if config.performance_mode == "interactivity":
        tokens //= INTERACTIVITY_DIVISOR
        return seqs, tokens, "formula", f"{why}; tokens / {INTERACTIVITY_DIVISOR} for interactivity"
    if config.performance_mode == "throughput":
        if config.max_num_seqs is None and config.max_num_batched_tokens is None:
            seqs, tokens = seqs * THROUGHPUT_FACTOR, tokens * THROUGHPUT_FACTOR
            return seqs, tokens, "formula", f"{why}; x {THROUGHPUT_FACTOR} for throughput"
        why += "; not doubled for throughput, because one of them is set"
    return seqs, tokens, "default", why


def _auto_dtype(model: ModelConfig) -> tuple[str, Source, str]:
    if model.dtype in DTYPE_BYTES:
        return model.dtype, "model", "the checkpoint's dtype"
    return "bfloat16", "default", f"the checkpoint's dtype is {model.dtype}"


def _max_model_len(config: EngineConfig, model: ModelConfig) -> tuple[int, Source, str]:
    """-1 is replaced by the longest that fits once memory is known."""
    wanted = config.max_model_len
    if wanted is None or wanted == -1:
        return model.max_model_len, "model", "from config.json" + ("; may be cut to what fits" if wanted == -1 else "")
    if wanted > model.max_model_len and not envs.ALLOW_LONG_MAX_MODEL_LEN.get():
        raise ConfigError(
            "max_model_len is longer than the model was trained for",
            value=wanted,
            expected=f"at most {model.max_model_len}",
            fix="Lower --max-model-len, or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 to accept wrong output beyond it",
            param="max_model_len",
        )
    return wanted, config.sources["max_model_len"], f"the model allows {model.max_model_len}"


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes at the moment the KV cache is planned: after the weights are loaded, or as if they were."""

    total_bytes: int
    free_bytes: int  # what can still be taken; the weights are already gone from it
    weight_bytes: int
    work_bytes: int  # of a step at the full token budget, logits included
    logits_bytes: int = 0  # the part of work_bytes that does not shrink with the token budget
    is_predicted: bool = False  # weights and work are from config.json, not measured


def logits_bytes(model: ModelConfig, max_num_seqs: int) -> int:
    """Bytes of the logits of a full batch."""
    return max_num_seqs * model.vocab_size * 4 * LOGITS_COPIES


def least_work_bytes(model: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Bytes of a step's activations at least: input, output and residual of the widest layer."""
    widest = 2 * model.intermediate_size + 4 * model.hidden_size
    return num_tokens * widest * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class _Offer:
    """What may be spent on the KV cache, and why."""

    num_bytes: int  # negative if weights and work take more than is allowed
    source: Source
    detail: str
    is_measured: bool  # moves with what else runs on the machine


def plan_kv_cache(config: EngineConfig, model: ModelConfig, resolved: Resolved, memory: MemoryFacts) -> None:
    """Adds num_blocks and kv_cache_bytes; with max_model_len -1 cuts it to what fits.

    Raises MemoryPlanError naming the missing bytes and the changes that would fit.
    """
    _put_memory(resolved, model, memory)
    block_bytes = resolved.block_size * model.kv_bytes_per_token(DTYPE_BYTES[resolved.dtype])
    offer = _offer(config, resolved, memory, block_bytes)
    num_blocks = max(offer.num_bytes, 0) // block_bytes
    blocks_needed = -(-resolved.max_model_len // resolved.block_size)
    if config.max_model_len == -1 and 0 < num_blocks < blocks_needed:
        detail = f"{num_blocks} blocks x {resolved.block_size} tokens fit; the model allows {model.max_model_len}"
        resolved.put("max_model_len", num_blocks * resolved.block_size, "formula", detail)
        blocks_needed = num_blocks
    if num_blocks < blocks_needed:
        raise _does_not_fit(config, resolved, memory, offer, block_bytes, blocks_needed)
    resolved.put("num_blocks", num_blocks, offer.source, offer.detail)
    kv_bytes = num_blocks * block_bytes
    resolved.put("kv_cache_bytes", kv_bytes, "formula", f"{num_blocks} blocks x {block_bytes:,} bytes")
    detail = f"{memory.free_bytes:,} free after the weights - {kv_bytes:,} KV cache - {memory.work_bytes:,} work"
    resolved.put("unplanned_bytes", memory.free_bytes - kv_bytes - memory.work_bytes, "measured", detail)


def _put_memory(resolved: Resolved, model: ModelConfig, memory: MemoryFacts) -> None:
    weights = f"{model.num_parameters():,} parameters x {DTYPE_BYTES[resolved.dtype]} bytes"
    logits = f"{memory.logits_bytes:,} for the logits of {resolved.max_num_seqs} requests"
    if memory.is_predicted:
        resolved.put("weight_bytes", memory.weight_bytes, "formula", weights)
        detail = f"at least: the widest layer of {resolved.max_num_batched_tokens} tokens, and {logits}"
        resolved.put("work_bytes", memory.work_bytes, "formula", detail)
    else:
        resolved.put("weight_bytes", memory.weight_bytes, "measured", weights)
        detail = f"a short step, scaled to {resolved.max_num_batched_tokens} tokens, and {logits}"
        resolved.put("work_bytes", memory.work_bytes, "measured", detail)


def _offer(config: EngineConfig, resolved: Resolved, memory: MemoryFacts, block_bytes: int) -> _Offer:
    """In vLLM's order: the number of blocks, the bytes, the environment variable, the share of memory, what is free."""
    if config.num_gpu_blocks_override is not None:
        source = config.sources["num_gpu_blocks_override"]
        return _Offer(config.num_gpu_blocks_override * block_bytes, source, "num_gpu_blocks_override", False)
    per_block = f"{block_bytes:,} bytes per block"
    if config.kv_cache_memory_bytes is not None:
        source = config.sources["kv_cache_memory_bytes"]
        return _Offer(config.kv_cache_memory_bytes, source, f"kv_cache_memory_bytes / {per_block}", False)
    if (gib := envs.CPU_KVCACHE_SPACE.get()) > 0:
        detail = f"VLLM_CPU_KVCACHE_SPACE = {gib} GiB / {per_block}"
        return _Offer(int(gib * GIB), "environment", detail, False)
    reserve = memory.work_bytes + int(memory.total_bytes * RESERVE_SHARE)
    free = memory.free_bytes - reserve
    free_detail = (
        f"{memory.free_bytes:,} free after the weights - {reserve:,} reserve "
        f"(work {memory.work_bytes:,} + {RESERVE_SHARE:.0%} of {memory.total_bytes:,}), / {per_block}"
    )
    if config.gpu_memory_utilization is not None:
        share = config.gpu_memory_utilization
        allowed = int(memory.total_bytes * share) - memory.weight_bytes - memory.work_bytes
        detail = (
            f"{share} x {memory.total_bytes:,} total - {memory.weight_bytes:,} weights - {memory.work_bytes:,} work, "
            f"/ {per_block}"
        )
        if allowed <= free:
            return _Offer(allowed, "formula", detail, True)
        return _Offer(free, "measured", f"less than --gpu-memory-utilization allows ({detail}): {free_detail}", True)
    useful = -(-resolved.max_model_len // resolved.block_size) * resolved.max_num_seqs * MAX_USEFUL_CONTEXTS
    if useful * block_bytes < free:
        detail = f"{MAX_USEFUL_CONTEXTS} full contexts per running request are enough; more would fit: {free_detail}"
        return _Offer(useful * block_bytes, "formula", detail, False)
    return _Offer(free, "measured", free_detail, True)


def _does_not_fit(
    config: EngineConfig, resolved: Resolved, memory: MemoryFacts, offer: _Offer, block_bytes: int, blocks_needed: int
) -> MemoryPlanError:
    needed = blocks_needed * block_bytes
    fixes = _fixes(config, resolved, memory, offer, block_bytes, blocks_needed)
    return MemoryPlanError(
        f"The KV cache for one request of {resolved.max_model_len} tokens does not fit: {shown_bytes(needed)} needed, "
        f"{shown_bytes(max(offer.num_bytes, 0))} available, {shown_bytes(needed - offer.num_bytes)} missing "
        f"(weights {shown_bytes(memory.weight_bytes)}, work {shown_bytes(memory.work_bytes)}, "
        f"free {shown_bytes(memory.free_bytes)} of {shown_bytes(memory.total_bytes)})",
        fix="Use one of: " + "; ".join(fixes) if fixes else "Free memory, or use a smaller model",
        param="max_model_len",
    )


def _fixes(
    config: EngineConfig, resolved: Resolved, memory: MemoryFacts, offer: _Offer, block_bytes: int, blocks_needed: int
) -> list[str]:
    """Single changes, each of which makes the same start succeed."""
    needed = blocks_needed * block_bytes
    missing = needed - offer.num_bytes
    fixes = []
    fitting = int(offer.num_bytes * (FREE_MEMORY_MARGIN if offer.is_measured else 1)) // block_bytes
    if fitting > 0:
        fixes.append(f"--max-model-len {fitting * resolved.block_size}")
    if config.num_gpu_blocks_override is not None:
        fixes.append(f"--num-gpu-blocks-override {blocks_needed}")
    elif needed <= memory.free_bytes - memory.work_bytes:
        fixes.append(f"--kv-cache-memory-bytes {needed}")
    halved = offer.num_bytes + (memory.weight_bytes // 2 if offer.is_measured else 0)
    if resolved.dtype == "float32" and config.num_gpu_blocks_override is None and halved >= needed // 2:
        fixes.append("--dtype bfloat16 (halves weights and KV cache)")
    budget, lowest = resolved.max_num_batched_tokens, max(resolved.max_num_seqs, MIN_SUGGESTED_BUDGET)
    if offer.is_measured and config.enable_chunked_prefill and budget > lowest:
        saved = (memory.work_bytes - memory.logits_bytes) * (budget - lowest) // budget
        if saved >= missing:
            fixes.append(f"--max-num-batched-tokens {lowest} (less work memory, slower prompts)")
    return fixes


def weights_do_not_fit(resolved: Resolved, weight_bytes: int, total_bytes: int) -> MemoryPlanError:
    """The error for a model whose weights alone are more than the machine has."""
    fix = "Use a smaller model, or a machine with more memory"
    if resolved.quantization is None and weight_bytes // 4 < total_bytes:
        fix = "Use --quantization int8 or int4 (a half or a quarter of bfloat16), or a smaller model"
    if resolved.dtype == "float32" and weight_bytes // 2 < total_bytes:
        fix = "Use --dtype bfloat16 (halves the weights), or a smaller model"
    return MemoryPlanError(
        f"The weights do not fit into memory: they take {shown_bytes(weight_bytes)} in {resolved.dtype}, "
        f"and there are {shown_bytes(total_bytes)}",
        fix=fix,
        param="model",
    )


def shown_bytes(count: int) -> str:
    """`1.50 GiB`, `11.0 MiB`: bytes for people."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"
