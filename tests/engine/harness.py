"""The demo model under any schedule: one set of weights, a fresh cache, scheduler and core for every run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import quire.demo
from quire.engine.core import EngineCore
from quire.engine.executor import ThreadExecutor
from quire.formats.kv_format import kv_format
from quire.formats.kv_groups import DrafterLayers, kv_groups, num_tables
from quire.formats.weight_format import ON_LOAD
from quire.messages import AddRequest
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import Decoder
from quire.models.head import Head
from quire.models.registry import CausalLM
from quire.sampling_params import SamplingParams
from quire.schedule import Executor, ScheduledBatch
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.kv_cache_manager import KVCacheManager
from quire.scheduler.lanes import Lanes
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.proposer import Proposer
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from quire.worker import kv_cache
from quire.worker.accelerator import Device, Host
from quire.worker.captured_steps import CapturedSteps
from quire.worker.cuda_graphs import StepGraphs, in_order
from quire.worker.device_inputs import DeviceInputBatch
from quire.worker.draft_draws import DraftDraws
from quire.worker.draft_model import DraftModel
from quire.worker.drafter import Drafter
from quire.worker.head_drafter import HeadDrafter
from quire.worker.input_batch import InputBatch, Padding
from quire.worker.kv_cache import PagedCache
from quire.worker.model_runner import ModelRunner
from quire.worker.recorded_steps import RecordedSteps
from quire.worker.target_streams import TargetStreams
from tests.examples import IS_FULL
from tests.loading import load_model
from tests.quantization.checkpoints import Format, write_quantized
from tests.worker.fake_accelerator import FakeAccelerator

EOS = 2
MOST_DRAFTS = 9  # of a request in a step
LAYERS = (0, 4)  # of the demo model, which do without the others
CHECKPOINT = "gptq"  # the demo model as a quantized checkpoint, of the form with the most parts
CHECKPOINT_FORMAT = Format(method="gptq", group_size=32, has_zeros=True, has_order=True)


@cache
def demo_model(precision: str, max_model_len: int | None, is_whole: bool = True) -> tuple[ModelConfig, CausalLM]:
    """The bundled model, loaded once per precision, context length (None: its own) and test process.

    Precision is a dtype, a format that the weights are brought to on load, or CHECKPOINT; with bfloat16 for the rest.
    """
    source = quire.demo.path("target") if is_whole else two_layers()
    if precision == CHECKPOINT:
        with TemporaryDirectory() as folder:
            write_quantized(source, Path(folder), CHECKPOINT_FORMAT)
            return load_with(Path(folder), precision, max_model_len)
    return load_with(source, precision, max_model_len)


@cache
def two_layers() -> Path:
    """A folder with a model of two layers of the demo model, until the process ends. Its answers are as long and as
    different as those of all six.
    """
    source, folder = quire.demo.path("target"), Path(_folder().name)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": len(LAYERS)}
    (folder / "config.json").write_text(json.dumps(config))
    own = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if (match := re.match(r"model[.]layers[.](\d)[.]", name)) is None:
            own[name] = tensor
        elif int(match[1]) in LAYERS:
            own[f"model.layers.{LAYERS.index(int(match[1]))}.{name[match.end() :]}"] = tensor
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def demo_draft() -> tuple[ModelConfig, CausalLM]:
    """The bundled draft model, in bfloat16."""
    return load_with(quire.demo.path("draft"), "bfloat16", None)


def load_with(folder: Path, precision: str, max_model_len: int | None) -> tuple[ModelConfig, CausalLM]:
    """A model in one of the precisions of `demo_model`. `max_model_len`: None: its own."""
    config = load_model_config(folder)
    if max_model_len is not None:
        config = replace(config, max_model_len=max_model_len)
    quantization = precision if precision in ON_LOAD else None
    return config, load_model(config, dtype_of(precision), quantization=quantization)


def dtype_of(precision: str) -> torch.dtype:
    """Of activations and KV cache."""
    return torch.bfloat16 if precision in ON_LOAD or precision == CHECKPOINT else getattr(torch, precision)


@dataclass(frozen=True)
class Prompt:
    """One request of a run."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    fork_of: str | None = None
    adapter: str | None = None  # its digest


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that must not change the tokens."""

    block_size: int = 16
    num_blocks: int = 256
    max_num_seqs: int = 8
    chunk: int = 2048  # token budget of a step
    prefix_caching: bool = False
    depth: int = 1
    max_model_len: int | None = None  # None: the model's
    kv_cache_dtype: str = "auto"  # this one does change them
    accelerator: FakeAccelerator | None = None  # run as on a GPU
    graph_sizes: tuple[int, ...] = ()  # of decode batches, there
    mixed_sizes: tuple[int, ...] = ()  # tokens of mixed steps that are captured
    proposer: Proposer | None = None
    waits: bool = False  # Speculation.waits
    draft: tuple[ModelConfig, CausalLM] | None = None  # a model or head that drafts in the worker
    drafts_greedily: bool = False
    num_kept: int = MOST_DRAFTS + 2  # positions of a row that wait for a head
    adapters: Mapping[str, int] = field(default_factory=dict)  # slots by digest
    is_whole: bool = IS_FULL  # all layers of the demo model, which the bundled drafters need; else two


def build_core(schedule: Schedule, precision: str) -> EngineCore:
    """A core over the demo model with an empty cache."""
    return core_over(*demo_model(precision, schedule.max_model_len, schedule.is_whole), schedule, precision)


def core_over(config: ModelConfig, model: CausalLM, schedule: Schedule, precision: str) -> EngineCore:
    """A core over any model with an empty cache."""
    dtype: torch.dtype = getattr(
        torch, kv_format(schedule.kv_cache_dtype, str(dtype_of(precision)).removeprefix("torch.")).torch_dtype
    )
    drafter = None
    if schedule.draft is not None:
        specs = tuple(schedule.draft[0].kv_specs())
        drafter = DrafterLayers(specs, kv_format("auto", str(schedule.draft[1].dtype).removeprefix("torch.")), 0)
    sizes = (schedule.num_blocks, schedule.block_size, dtype)
    cache = kv_cache.allocate(kv_groups(config), *sizes, torch.device("cpu"), drafter)
    may_read_unwritten = schedule.draft is not None and isinstance(schedule.draft[1], Head) and schedule.prefix_caching
    layers = cache.layers + ([] if may_read_unwritten else cache.drafter_layers)
    for tensor in (tensor for layer in layers for tensor in layer.tensors()):
        if tensor.dtype != torch.int8:
            tensor.copy_(torch.tensor(float("nan")))  # a slot read before it is written must show
    kv = KVCacheManager(
        BlockPool(schedule.num_blocks, schedule.block_size),
        kv_groups(config),
        step_tokens=schedule.chunk,
        depth=schedule.depth,
        enable_prefix_caching=schedule.prefix_caching,
    )
    limits = SchedulerLimits(
        max_num_seqs=schedule.max_num_seqs, max_num_batched_tokens=schedule.chunk, max_model_len=config.max_model_len
    )
    executor = _executor(schedule, config, model, cache)
    scheduler = Scheduler(
        limits,
        kv,
        rope_switches_after=config.rope.switches_after(config.max_model_len),
        speculation=_speculation(schedule, config.vocab_size),
    )
    return EngineCore(scheduler, executor, depth=schedule.depth)


def _speculation(schedule: Schedule, vocab_size: int) -> Speculation | None:
    if schedule.proposer is None:
        return None
    drafts = schedule.proposer, MOST_DRAFTS
    if schedule.draft is None:
        return Speculation(*drafts, waits=schedule.waits, vocab_size=vocab_size)
    return Speculation(*drafts, waits=schedule.waits, max_tokens=schedule.draft[0].max_model_len)


class _Worker(ModelRunner):
    """A runner without the life of a worker around it."""

    def begin(self, batch: ScheduledBatch) -> None:
        """See life_cycle.Worker."""

    def close(self) -> None:
        self.shutdown()


def _executor(schedule: Schedule, config: ModelConfig, model: CausalLM, cache: PagedCache) -> Executor:
    tables = num_tables(kv_groups(config))
    sizes = (schedule.max_num_seqs, config.max_model_len, schedule.block_size, config.vocab_size, tables)
    if (accelerator := schedule.accelerator) is None:
        inputs = InputBatch(*sizes, schedule.adapters)
        recorded = RecordedSteps(model, inputs, cache.layers, schedule.chunk) if isinstance(model, Decoder) else None
        drafter = _drafter(schedule, _streams(schedule, model), cache, inputs, Host())
        runner = _Worker(model, cache, inputs, "raw_logprobs", Host(), recorded, drafter)
        return runner if schedule.depth == 1 else ThreadExecutor([runner])
    max_tokens = max(schedule.chunk, *sizes[:1])
    inputs = DeviceInputBatch(
        *sizes, schedule.adapters, max_tokens=max_tokens, accelerator=accelerator, steps_in_flight=schedule.depth
    )
    graphs, streams = None, _streams(schedule, model)
    if schedule.graph_sizes:
        captured = [Padding(size, size) for size in schedule.graph_sizes]
        captured += [Padding(size, min(sizes[0], size - 1)) for size in schedule.mixed_sizes if size <= max_tokens]
        captured += [replace(size, has_adapters=True) for size in captured if schedule.adapters]
        graphs = StepGraphs(model, cache.layers, inputs, accelerator, in_order(captured))
        graphs.capture()
    drafter = _drafter(schedule, streams, cache, inputs, accelerator)
    return ModelRunner(model, cache, inputs, "raw_logprobs", accelerator, graphs, drafter)


def _streams(schedule: Schedule, model: CausalLM) -> TargetStreams | None:
    if schedule.draft is None or not isinstance(head := schedule.draft[1], Head):
        if isinstance(model, Decoder):
            model.keep_streams((), torch.empty(0))  # tests share models, and one with a head may have been before
        return None
    assert isinstance(model, Decoder)
    return TargetStreams(model, head.head.streams, max(schedule.chunk, schedule.max_num_seqs))


def _drafter(
    schedule: Schedule, streams: TargetStreams | None, cache: PagedCache, inputs: InputBatch, device: Device
) -> Drafter | None:
    if schedule.draft is None:
        return None
    _, model = schedule.draft
    captured: CapturedSteps | None = None
    if isinstance(device, Host) and isinstance(model, Decoder):
        captured = RecordedSteps(model, inputs, cache.drafter_layers, schedule.chunk)
    elif isinstance(inputs, DeviceInputBatch) and schedule.accelerator is not None and schedule.graph_sizes:
        sizes = in_order([Padding(size, size) for size in schedule.graph_sizes])
        captured = graphs = StepGraphs(model, cache.drafter_layers, inputs, schedule.accelerator, sizes)
        graphs.capture()
    given = (cache, inputs, DraftDraws(inputs, device, is_greedy=schedule.drafts_greedily), captured)
    if isinstance(model, Head) and streams is not None:
        sizes = {"max_tokens": schedule.chunk, "num_kept": schedule.num_kept}
        return HeadDrafter(model, streams, *given, **sizes, runs_ahead=device.runs_ahead)
    return DraftModel(model, *given, max_tokens=schedule.chunk, max_drafts=MOST_DRAFTS)


def tokens_and_logprobs(core: EngineCore) -> dict[str, tuple[list[int], list[Any]]]:
    """Of every request of an engine, by its id, in the order of the ids r0, r1 ..."""
    found: dict[str, tuple[list[int], list[Any]]] = {}
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens, logprobs = found.setdefault(delta.request_id, ([], []))
            tokens += delta.token_ids
            for each in (delta.prompt_logprobs, delta.logprobs):
                logprobs += each or []
    return {name: found[name] for name in sorted(found, key=lambda name: (len(name), name))}


def run_despite_errors(core: EngineCore, prompts: Iterable[Prompt]) -> dict[str, list[int | None]]:
    """At most 8 tokens of each prompt, by the ids r0, r1, ..., all added at once; None at the end: it has failed."""
    found: dict[str, list[int | None]] = {}
    for index, prompt in enumerate(prompts):
        core.add(AddRequest(f"r{index}", list(prompt.token_ids), prompt.params, 8, stop_token_ids=[2]))
    while core.has_work():
        for delta in core.step():
            found.setdefault(delta.request_id, []).extend([None] if delta.error else delta.token_ids)
    return found


def run(
    core: EngineCore,
    prompts: Iterable[Prompt],
    *,
    before_step: Callable[[EngineCore, int], None] | None = None,
    prefix: str = "r",
    failing: str | None = None,
) -> list[list[int]]:
    """Tokens of every prompt, all added at once. `before_step(core, step)` may interfere.

    `failing` is the id of the one request that must fail.
    """
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        request_id = f"{prefix}{index}"
        tokens[request_id] = []
        max_tokens = prompt.params.max_tokens
        assert max_tokens is not None
        core.add(
            AddRequest(
                request_id,
                list(prompt.token_ids),
                prompt.params,
                max_tokens,
                stop_token_ids=[EOS],
                fork_of=prompt.fork_of,
                adapter=prompt.adapter,
            )
        )
    step = 0
    while core.has_work():
        if before_step is not None:
            before_step(core, step)
        for delta in core.step():
            if delta.error is not None:
                assert delta.request_id == failing, delta.error
                failing = None
                continue
            tokens[delta.request_id] += delta.token_ids
        step += 1
    assert failing is None, f"{failing} did not fail"
    for scheduler in core.scheduler.lanes if isinstance(core.scheduler, Lanes) else (core.scheduler,):
        scheduler.kv.check()
        assert scheduler.kv.pool.num_used_blocks == 0, "blocks leaked"
    return list(tokens.values())
