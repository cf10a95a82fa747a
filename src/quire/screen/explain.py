"""`quire explain`: every setting of a start, with its source, its effect, and the cost of a larger value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from quire import __version__
from quire.config import EngineConfig, ServerConfig
from quire.cost.model import CostModel
from quire.errors import MemoryPlanError
from quire.formats.kv_format import KvFormat, kv_format
from quire.formats.weight_format import packs_floats
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.planning import devices
from quire.planning.binding import bound_facts, cpus_of_processes
from quire.planning.cut_stages import check_cuts, cut_of, exchanges_of, grid_of, part_of_rank
from quire.planning.expectation import FullStep, expectation, full_steps
from quire.planning.layouts import RankShare, rank_shares
from quire.planning.memory_plan import (
    KvPages,
    MemoryFacts,
    logits_bytes,
    memory_settings,
    plan_kv_cache,
    predict_memory,
)
from quire.planning.replicas import share_of_machine
from quire.planning.step_costs import known_cost, peaks
from quire.resolve import GIB, DeviceFacts, resolve, resolve_server, shown_bytes
from quire.screen.layer_kernels import LayerKernel, layer_kernels
from quire.screen.memory_lines import MemorySummary
from quire.settings import Planned, Resolved, SchedulerSettings, Setting

NAME_COLUMN = 35  # the longest name of a setting fits


@dataclass(frozen=True)
class Explanation:
    """The result of a start that does not happen.

    Args:
        settings: the settings of the engine, then of the server.
        layers: the formats of the weights and their kernels.
        pages: the KV cache that requests take.
        steps: the predicted time of a full step, by the setting that limits it: see `full_steps`.
        next_costs: the cost of the next larger value, for settings where it is known.
        error: the reason why a start would fail; None: it would not.
        ranks: the part that each of several ranks holds; none: one rank has the whole model.
    """

    model_name: str
    model: ModelConfig
    device: DeviceFacts
    settings: dict[str, Setting]
    layers: list[LayerKernel]
    pages: KvPages
    steps: dict[str, FullStep]
    next_costs: dict[str, str]
    error: MemoryPlanError | None = None
    ranks: tuple[RankShare, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The object for JSON. Sizes are in bytes and tokens."""
        return {
            "version": __version__,
            "model": {
                "name": self.model_name,
                "architecture": self.model.architecture,
                "num_parameters": self.model.num_parameters(),
                "num_active_parameters": self.model.num_active_parameters(),
                "weight_bytes": self.settings["weight_bytes"].value,
                "kv_bytes_per_token": self._kv_bytes_per_token(),
                "max_model_len": self.model.max_model_len,
                "ignored_fields": list(self.model.ignored_fields),
            },
            "machine": {
                "name": self.device.name,
                "isa": self.device.isa,
                "num_cores": self.device.num_cores,
                "total_memory_bytes": self.device.total_memory_bytes,
                "free_memory_bytes": self.device.free_memory_bytes,
                "gpu": None if self.device.gpu is None else asdict(self.device.gpu),
            },
            "ranks": [entry for share in self.ranks for entry in share.as_dicts()],
            "layers": [layer.as_dict() for layer in self.layers],
            "settings": {
                name: setting.as_dict()
                | ({"step_seconds": self.steps[name].as_dict()} if name in self.steps else {})
                | ({"next": self.next_costs[name]} if name in self.next_costs else {})
                for name, setting in self.settings.items()
            },
            "error": None if self.error is None else {"code": self.error.code, "message": self.error.message},
        }

    def text(self) -> str:
        """The text for people: first the settings that were decided, then the ones with their default."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        dtype = self.settings["dtype"].value
        parameters = f"{self.model.num_parameters() / 1e6:,.1f} M parameters"
        if self.model.experts():
            parameters += f" ({self.model.num_active_parameters() / 1e6:,.1f} M active)"
        kv = self._kv_bytes_per_token()
        yield f"model    {self.model_name}: {self.model.architecture}, {parameters}, {dtype}, KV {kv:,} bytes per token"
        if ignored := self.model.ignored_fields:
            yield f"         not applied, because {self.model.architecture} does not read it: {', '.join(ignored)}"
        memory = f"{shown_bytes(self.device.total_memory_bytes)} RAM, {shown_bytes(self.device.free_memory_bytes)} free"
        yield f"machine  {self.device.name}, {self.device.num_cores} cores, {self.device.isa}, {memory} now"
        if (gpu := self.device.gpu) is not None:
            memory = f"{shown_bytes(gpu.total_memory_bytes)}, {shown_bytes(gpu.free_memory_bytes)} free now"
            yield f"gpu      {gpu.name}, {gpu.isa}, {memory}"
        if (count := self.settings["data_parallel_size"].value) > 1:
            if self.settings["enable_expert_parallel"].value:
                yield f"lanes    {count} in one engine, which share experts; the lines below are of one of them"
            else:
                yield f"replicas {count}, and the lines below are of one of them"
        if (stage := self.model.stage) is not None:
            layers = f"layers {stage.layers[0]} to {stage.layers[-1]}"
            yield f"stage    {stage.index} of {stage.num_stages}, with {layers}: it has the fewest KV blocks"
        for share in self.ranks:
            yield f"{'ranks' if share is self.ranks[0] else '':<8} {share.text()}"
        yield from self._kv_groups()
        if "num_blocks" in self.settings:
            yield from self._memory()
        yield from self._layers()
        yield ""
        plain = []
        for name, setting in self.settings.items():
            if setting.source == "default" and (setting.value is None or not (setting.detail or setting.limits)):
                why = f"  ({setting.detail})" if setting.detail else ""
                plain.append(f"  {name:<{NAME_COLUMN}} {shown_setting(name, setting.value)}{why}")
                continue
            yield f"{name:<{NAME_COLUMN}}   {shown_setting(name, setting.value)}   [{setting.source}]"
            if setting.detail:
                yield f"    why     {setting.detail}"
            if setting.limits:
                yield f"    limits  {setting.limits}"
            if name in self.steps:
                yield f"    step    {self.steps[name].text()}"
            if name in self.next_costs:
                yield f"    next    {self.next_costs[name]}"
            if setting.is_live:
                yield "    live    POST /v1/config moves it" + (
                    f", up to {setting.maximum}" if setting.maximum is not None else ""
                )
        yield ""
        yield "As they are by default:"
        yield from plain

    def _layers(self) -> Iterator[str]:
        """Layers with the same format and kernel share a line; names of fused layers are joined by +."""
        alike: dict[tuple[str, str, str, str], list[str]] = {}
        for layer in self.layers:
            key = (layer.weight, layer.why, layer.kernel, layer.kernel_why)
            experts = f" of {layer.num_experts} experts" if layer.num_experts else ""
            alike.setdefault(key, []).append(f"{layer.count} x {'+'.join(layer.names)}{experts}")
        label = "layers"
        for (weight, why, kernel, kernel_why), names in alike.items():
            yield f"{label:<8} {', '.join(names)}"
            yield f"         weight  {weight}   ({why})"
            yield f"         kernel  {kernel}   ({kernel_why})"
            label = ""

    def _kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token(self._kv_format())

    def _kv_format(self) -> KvFormat:
        return kv_format(self.settings["kv_cache_dtype"].value, self.settings["dtype"].value)

    def _kv_groups(self) -> Iterator[str]:
        """A line for each group of layers that keep keys and values in the same way."""
        label = "kv"
        for line in self.pages.lines(self.settings["max_model_len"].value, self._kv_format()):
            yield f"{label:<8} {line}"
            label = ""

    def _memory(self) -> Iterator[str]:
        """The plan in the words of the first screen. Work memory is from config.json: a start counts real buffers."""
        memory = MemorySummary.of({name: setting.value for name, setting in self.settings.items()})
        yield f"memory   {memory.plan()}   (work: predicted)"
        for label, line in zip(("fits", ""), memory.capacity(), strict=True):
            yield f"{label:<8} {line}"


def explain(
    model_name: str,
    engine: EngineConfig,
    server: ServerConfig,
    model: ModelConfig,
    device: DeviceFacts,
    read_bandwidth: float | None = None,
    waited: float = 0.0,
    chat_template: str = "",
) -> Explanation:
    """The settings of a server that would start now. No weights are loaded: their bytes come from config.json.

    With several ranks, it explains the rank that has the most, in the stage with the smallest KV cache.

    Args:
        read_bandwidth: measured bytes per second that all cores together read from memory; None: not measured.
        waited: the share of that time in which the measurement had no core.
        chat_template: the source.

    Raises ConfigError for settings that contradict each other. Too little memory is part of the answer.
    """
    check_cuts(model, engine)
    grid = grid_of(engine)
    parts = [part_of_rank(model, engine, rank) for rank in range(0, grid.size, grid.width)]
    whole, model = model, cut_of(model, engine).part()
    machine = device
    if places := cpus_of_processes(engine):
        device = bound_facts(device, engine, min(map(devices.physical_cores, places)))
    device = share_of_machine(device, engine)
    own, device = device.shared_by(grid.num_local), device.shared_by(grid.num_local, grid.num_stages)
    if read_bandwidth is not None:
        read_bandwidth /= engine.num_local_replicas * grid.num_local
    settled = resolve(engine, model, device, is_server=True)
    known = known_cost(settled, model, device, read_bandwidth, exchanges_of(whole, engine, settled.model.dtype))
    plans = [_planned(engine, settled, part, own) for part in parts]
    model, memory, resolved, error = min(plans, key=lambda plan: plan.num_blocks)
    waited = 0.0 if known.is_measured else waited
    expected = expectation(resolved, known.cost, known.origin, waited)
    resolved = resolved.noting({**expected, **peaks(resolved, known.cost.arithmetic, device, grid.size)})
    settings = {**resolved.settings, **resolve_server(server, chat_template).settings}
    form, device_settings = resolved.model, resolved.device
    layers = layer_kernels(model, form.dtype, form.quantization, device_settings.isa, device_settings.deterministic)
    pages, ranks = KvPages.of(resolved, model), rank_shares(whole, engine, resolved) if grid.size > 1 else ()
    steps = {step.setting: step for step in full_steps(resolved, known.cost)}
    next_costs = _next_costs(resolved, known.cost, model, pages, memory)
    return Explanation(model_name, model, machine, settings, layers, pages, steps, next_costs, error, ranks)


class _Plan(NamedTuple):
    """The memory plan of a stage; with the error, if memory is too little."""

    model: ModelConfig
    memory: MemoryFacts
    resolved: Resolved
    error: MemoryPlanError | None

    @property
    def num_blocks(self) -> int:
        return self.resolved.memory.num_blocks if isinstance(self.resolved, Planned) else 0


def _planned(engine: EngineConfig, resolved: Resolved, part: ModelConfig, device: DeviceFacts) -> _Plan:
    memory = predict_memory(resolved, part, device)
    try:
        return _Plan(part, memory, plan_kv_cache(engine, part, resolved, memory), None)
    except MemoryPlanError as failure:
        return _Plan(part, memory, resolved.noting(memory_settings(part, resolved, memory)), failure)


def _next_costs(
    resolved: Resolved, cost: CostModel, model: ModelConfig, pages: KvPages, memory: MemoryFacts
) -> dict[str, str]:
    form, schedule = resolved.model, resolved.scheduler

    def shown_request(num_tokens: int) -> str:
        return shown_bytes(pages.for_request(num_tokens) * pages.page_bytes)

    def kv_in(dtype: str) -> int:
        own = form.kv_cache_dtype in DTYPE_BYTES
        return model.kv_bytes_per_token(kv_format("auto" if own else form.kv_cache_dtype, dtype))

    def weights_in(dtype: str, quantization: str | None) -> str:
        return shown_bytes(model.weight_bytes(dtype, quantization, is_packed=packs_floats(resolved.device.isa)))

    def full_step(name: str, changed: SchedulerSettings) -> str:
        """The full step of a setting with other settings."""
        steps = full_steps(replace(resolved, scheduler=changed), cost)
        return next(step.text() for step in steps if step.setting == name)

    seqs, budget, length = schedule.max_num_seqs, schedule.max_num_batched_tokens, form.max_model_len
    block = form.block_size
    logits = shown_bytes(logits_bytes(model, seqs, resolved.device.device))
    work = shown_bytes(memory.work_bytes - memory.logits_bytes)
    costs = {
        "max_num_seqs": f"{2 * seqs}: {logits} more work memory, and longer steps: "
        f"{full_step('max_num_seqs', replace(schedule, max_num_seqs=2 * seqs))}",
        "max_num_batched_tokens": f"{2 * budget}: {work} more work memory, and longer steps: "
        f"{full_step('max_num_batched_tokens', replace(schedule, max_num_batched_tokens=2 * budget))}",
        "block_size": f"{2 * block}: up to {2 * block - 1} tokens of cache wasted per request, now {block - 1}",
        "max_model_len": f"{2 * length}: one full request takes {shown_request(2 * length)} of KV cache, "
        f"now {shown_request(length)}"
        + ("; beyond what the model was trained for" if 2 * length > model.max_model_len else ""),
    }
    if form.decode_context_parallel_size > 1:
        del costs["block_size"]  # there is no other
    if "num_blocks" in resolved.settings:
        more = pages.num_tokens(GIB // pages.page_bytes, length)
        costs["num_blocks"] = f"each GiB more holds {more:,} tokens"
    if model.quantized is None and form.quantization is not None:
        costs["quantization"] = f"none: weights of {weights_in(form.dtype, None)}"
    elif form.dtype == "float32":
        weights = weights_in("bfloat16", form.quantization)
        costs["dtype"] = f"bfloat16: weights of {weights}, KV of {kv_in('bfloat16'):,} bytes"
    else:
        weights = weights_in("float32", form.quantization)
        costs["dtype"] = f"float32: weights of {weights}, KV of {kv_in('float32'):,} bytes"
    return costs


def shown_setting(name: str, value: Any) -> str:
    """A value for people: bytes with their size in GiB, counts with commas."""
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value:,} ({shown_bytes(value)})"
    if isinstance(value, dict):
        return json.dumps(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and name != "port"
    return f"{value:,}" if is_count else str(value)
