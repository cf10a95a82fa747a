"""`quire explain`: every setting a server would start with, its source, what it limits, and what more would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire import __version__
from quire.config import EngineConfig, ServerConfig
from quire.errors import MemoryPlanError
from quire.memory_summary import MemorySummary
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.resolve import (
    GIB,
    DeviceFacts,
    MemoryFacts,
    Resolved,
    Setting,
    least_work_bytes,
    logits_bytes,
    plan_kv_cache,
    resolve,
    resolve_server,
    shown_bytes,
)

NAME_COLUMN = 34  # the longest name of a setting fits


@dataclass(frozen=True)
class Explanation:
    """What would happen at a start.

    Args:
        settings: of the engine, then of the server.
        next_costs: what the next larger value costs, where that can be said.
        error: why a start would fail, if it would.
    """

    model_name: str
    model: ModelConfig
    device: DeviceFacts
    settings: dict[str, Setting]
    next_costs: dict[str, str]
    error: MemoryPlanError | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Sizes in bytes and tokens."""
        dtype = self.settings["dtype"].value
        return {
            "version": __version__,
            "model": {
                "name": self.model_name,
                "architecture": self.model.architecture,
                "num_parameters": self.model.num_parameters(),
                "weight_bytes": self.model.weight_bytes(dtype, self.settings["quantization"].value),
                "kv_bytes_per_token": self.model.kv_bytes_per_token(DTYPE_BYTES[dtype]),
                "max_model_len": self.model.max_model_len,
            },
            "machine": {
                "name": self.device.name,
                "isa": self.device.isa,
                "num_cores": self.device.num_cores,
                "total_memory_bytes": self.device.total_memory_bytes,
                "free_memory_bytes": self.device.free_memory_bytes,
            },
            "settings": {
                name: setting.as_dict() | ({"next": self.next_costs[name]} if name in self.next_costs else {})
                for name, setting in self.settings.items()
            },
            "error": None if self.error is None else {"code": self.error.code, "message": self.error.message},
        }

    def text(self) -> str:
        """For people: what was decided first, then what is as it is by default."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        dtype = self.settings["dtype"].value
        parameters = f"{self.model.num_parameters() / 1e6:,.1f} M parameters"
        kv = self.model.kv_bytes_per_token(DTYPE_BYTES[dtype])
        yield f"model    {self.model_name}: {self.model.architecture}, {parameters}, {dtype}, KV {kv:,} bytes per token"
        memory = f"{shown_bytes(self.device.total_memory_bytes)} RAM, {shown_bytes(self.device.free_memory_bytes)} free"
        yield f"machine  {self.device.name}, {self.device.num_cores} cores, {self.device.isa}, {memory} now"
        if "num_blocks" in self.settings:
            yield from self._memory()
        yield ""
        plain = []
        for name, setting in self.settings.items():
            if setting.source == "default" and (setting.value is None or not (setting.detail or setting.limits)):
                why = f"  ({setting.detail})" if setting.detail else ""
                plain.append(f"  {name:<{NAME_COLUMN}} {_shown(name, setting.value)}{why}")
                continue
            yield f"{name:<{NAME_COLUMN}}   {_shown(name, setting.value)}   [{setting.source}]"
            if setting.detail:
                yield f"    why     {setting.detail}"
            if setting.limits:
                yield f"    limits  {setting.limits}"
            if name in self.next_costs:
                yield f"    next    {self.next_costs[name]}"
            if setting.is_live:
                yield "    live    POST /v1/config moves it" + (
                    f", up to {setting.maximum}" if setting.maximum is not None else ""
                )
        yield ""
        yield "As they are by default:"
        yield from plain

    def _memory(self) -> Iterator[str]:
        """The plan, in the words of the first screen. Only the work is not what a start finds: that measures it."""
        memory = MemorySummary.of({name: setting.value for name, setting in self.settings.items()})
        yield f"memory   {memory.plan()}   (work: at least)"
        for label, line in zip(("fits", ""), memory.capacity(), strict=True):
            yield f"{label:<8} {line}"


def explain(
    model_name: str, engine: EngineConfig, server: ServerConfig, model: ModelConfig, device: DeviceFacts
) -> Explanation:
    """The settings of a server started now, without loading weights: their bytes come from config.json.

    Raises ConfigError for settings that contradict each other; too little memory is part of the answer.
    """
    resolved = resolve(engine, model, device, is_server=True)
    memory = predict_memory(resolved, model, device)
    error = None
    try:
        plan_kv_cache(engine, model, resolved, memory)
    except MemoryPlanError as failure:
        error = failure
    settings = resolved.settings | resolve_server(server).settings
    return Explanation(model_name, model, device, settings, _next_costs(resolved, model), error)


def predict_memory(resolved: Resolved, model: ModelConfig, device: DeviceFacts) -> MemoryFacts:
    """Memory as it will be after loading: weights from config.json, and the least a step can take."""
    weights = model.weight_bytes(resolved.dtype, resolved.quantization)
    logits = logits_bytes(model, resolved.max_num_seqs)
    return MemoryFacts(
        total_bytes=device.total_memory_bytes,
        free_bytes=device.free_memory_bytes - weights,
        weight_bytes=weights,
        work_bytes=least_work_bytes(model, resolved.max_num_batched_tokens, resolved.dtype) + logits,
        logits_bytes=logits,
        is_predicted=True,
    )


def _next_costs(resolved: Resolved, model: ModelConfig) -> dict[str, str]:
    kv = model.kv_bytes_per_token(DTYPE_BYTES[resolved.dtype])
    seqs, budget, length = resolved.max_num_seqs, resolved.max_num_batched_tokens, resolved.max_model_len
    block = resolved.block_size
    logits = shown_bytes(logits_bytes(model, seqs))
    work = shown_bytes(least_work_bytes(model, budget, resolved.dtype))
    costs = {
        "max_num_seqs": f"{2 * seqs}: {logits} more work memory, and each of more running requests gets fewer tokens/s",
        "max_num_batched_tokens": f"{2 * budget}: at least {work} more work memory, and steps up to twice as long",
        "block_size": f"{2 * block}: up to {2 * block - 1} tokens of cache wasted per request, now {block - 1}",
        "max_model_len": f"{2 * length}: one full request takes {shown_bytes(2 * length * kv)} of KV cache, "
        f"now {shown_bytes(length * kv)}"
        + ("; beyond what the model was trained for" if 2 * length > model.max_model_len else ""),
    }
    if "num_blocks" in resolved.settings:
        costs["num_blocks"] = f"each GiB more holds {GIB // kv:,} tokens"
    if resolved.quantization is not None:
        costs["quantization"] = f"none: weights of {shown_bytes(model.weight_bytes(resolved.dtype))}"
    elif resolved.dtype == "float32":
        costs["dtype"] = f"bfloat16: weights of {shown_bytes(model.weight_bytes('bfloat16'))}, KV of {kv // 2:,} bytes"
    else:
        costs["dtype"] = f"float32: weights of {shown_bytes(model.weight_bytes('float32'))}, KV of {2 * kv:,} bytes"
    return costs


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value:,} ({shown_bytes(value)})"
    is_count = isinstance(value, int) and not isinstance(value, bool) and name != "port"
    return f"{value:,}" if is_count else str(value)
