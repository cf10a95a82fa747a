"""Turns the user's config, the model's config and the machine's facts into settings with their sources.

The number of KV blocks comes later: memory is known only after the weights are loaded (`memory_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, cast

from quire import envs
from quire.config import EngineConfig, ServerConfig
from quire.cost.arithmetic import StepArithmetic
from quire.cost.devices import cpu_ceilings
from quire.drafter_settings import drafter_settings
from quire.errors import ConfigError
from quire.execution_choices import (
    attention_backend,
    cudagraph_mode,
    deterministic,
    enforce_eager,
    put_graph_sizes,
)
from quire.formats.answer_formats import AnswerFormats
from quire.formats.kv_format import KV_CACHE_DTYPES, RANGE_POSITIONS, kv_format
from quire.formats.kv_groups import kv_groups, page_bytes, pages_for
from quire.formats.weight_format import ON_LOAD, packs_floats
from quire.hf_config.quantization import QUANTIZATION_NAMES
from quire.lora.from_config import lora_settings
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.option import Source, options
from quire.planning.knee import Knee, described_constants
from quire.planning.step_sizes import INTEGER_TIMES, SHORT_REQUEST, StepSizes
from quire.settings import (
    Choice,
    DeviceSettings,
    ModelSettings,
    Record,
    Resolved,
    SchedulerSettings,
    SchedulingPolicy,
    ServerSettings,
)

T = TypeVar("T")

GIB = 1 << 30
NO_DRIVER = "no driver of a GPU is loaded"
NEVER_RUN = "nothing of Quire has run on a GPU yet"

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
GPU_MEMORY_UTILIZATION = 0.9  # the value if none is given


@dataclass(frozen=True)
class GpuFacts:
    """Facts of the GPU that a model would run on. Memory in bytes."""

    name: str
    capability: int  # 90 is sm_90
    total_memory_bytes: int
    free_memory_bytes: int
    num_visible: int = 1  # the GPUs that the ranks of this engine may use, with this one
    uuid: str = ""  # the same for all processes that use this GPU; empty: not known

    @property
    def isa(self) -> str:
        return f"sm_{self.capability}"


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of the machine. Memory is in bytes."""

    kind: Literal["cpu"]
    name: str
    isa: str
    num_cores: int
    total_memory_bytes: int
    free_memory_bytes: int
    gpu: GpuFacts | None = None
    no_gpu: str = NO_DRIVER  # why there is none that can be used
    num_efficient_cores: int = 0  # slower cores of the machine, which num_cores does not count

    def memory_of(self, device: str) -> tuple[int, int]:
        """Total and free bytes of the memory for weights and KV cache on this device, `cpu` or `cuda`."""
        facts = self.gpu if device == "cuda" else self
        assert facts is not None, "a device that was not found"
        return facts.total_memory_bytes, facts.free_memory_bytes

    def shared_by(self, num_ranks: int, num_stages: int = 1) -> DeviceFacts:
        """The share of one of several ranks on this machine.

        Args:
            num_stages: the number of stages on this machine. Together they have a whole model, and share this memory.
        """
        return replace(
            self,
            num_cores=max(self.num_cores // num_ranks, 1),
            total_memory_bytes=self.total_memory_bytes * num_stages // num_ranks,
            free_memory_bytes=self.free_memory_bytes * num_stages // num_ranks,
        )


@dataclass(frozen=True)
class _Form:
    """The settings that are settled before the sizes of steps."""

    device: str
    isa: str
    num_threads: int
    dtype: str
    quantization: str | None
    block_size: int
    num_kv_owners: int
    max_model_len: int


def resolve(config: EngineConfig, model: ModelConfig, device: DeviceFacts, *, is_server: bool) -> Resolved:
    """Every setting except the settings of memory. Raises ConfigError when a value does not fit the model."""
    settling = _Settling(config, model, device)
    form = settling.form()
    scheduler = settling.scheduler(form, is_server)
    execution = settling.execution(form, scheduler)
    settling.speculation()
    model_settings = settling.model_settings(form)
    lora = lora_settings(config, model, model_settings, settling.record)
    _put_rest(settling.record, config)
    drafter = drafter_settings(config.speculative_config, model, model_settings)
    return Resolved(model_settings, execution, scheduler, settling.record, drafter=drafter, lora=lora)


class _Settling:
    """The settings of an engine while they are being settled. People see them in the order of the record."""

    def __init__(self, config: EngineConfig, model: ModelConfig, device: DeviceFacts) -> None:
        self._config, self._model, self._device = config, model, device
        self.record = Record()

    def _put_or(self, name: str, chosen: T | None, default: T, source: Source, detail: str) -> T:
        """The user's value if given, else the default with its reason."""
        if chosen is None:
            return self.record.put(name, default, source, detail)
        return self.record.put(name, chosen, self._config.sources[name], f"default would be {default}: {detail}")

    def form(self) -> _Form:
        """The device, the dtypes and the block size."""
        config, model, put = self._config, self._model, self.record.put
        device = put("device", *_device(config, self._device))
        if config.num_ranks > 1:
            gpu = self._device.gpu if device == "cuda" else None
            _check_ranks(config, gpu)
            is_native = model.runs_natively(config.model_impl)
            why = "processes of this machine, each with a GPU; rows and columns are exchanged, and nothing is added up"
            if gpu is None:
                why = "processes of this machine, with its cores divided"
                why += "; tokens and logprobs are as with one rank, to the bit" if is_native else ""
            name = "pipeline_parallel_size"
            put(name, config.pipeline_parallel_size, config.sources[name], why)
            if not is_native:
                why += (
                    "; each rank has some heads with their KV cache, some rows of the embeddings and of large linear "
                )
                why += "layers; it has everything else whole, and transformers' modelling code runs it"
            name = "tensor_parallel_size"
            put(name, config.tensor_parallel_size, config.sources[name], why)
        if config.enable_expert_parallel:
            put("enable_expert_parallel", True, config.sources["enable_expert_parallel"], _experts_of_ranks(model))
        gpu = self._device.gpu if device == "cuda" else None
        if gpu is not None:
            isa = put("isa", gpu.isa, "device", gpu.name)
        else:
            isa = put("isa", self._device.isa, "environment" if envs.ISA.get() else "device", self._device.name)
        if config.dtype == "auto":
            dtype = put("dtype", *_auto_dtype(model, gpu))
        else:
            given = DTYPE_ALIASES.get(config.dtype, config.dtype)
            dtype = put("dtype", given, config.sources["dtype"], f"checkpoint is {model.dtype}")
        quantization = put("quantization", *_quantization(config, model))
        put("kv_cache_dtype", config.kv_cache_dtype, config.sources["kv_cache_dtype"], _kv_detail(config, dtype, model))
        block_size, num_threads = self._block_size(), self._num_threads()
        if (num_kv_owners := config.decode_context_parallel_size) > 1:
            bits = "tokens and logprobs are as without it, to the bit" if gpu is None else "sums differ in last bits"
            why = f"each rank has one of {num_kv_owners} blocks; {bits}"
            source = config.sources["decode_context_parallel_size"]
            put("decode_context_parallel_size", num_kv_owners, source, why)
        max_model_len = put("max_model_len", *_max_model_len(config, model))
        return _Form(device, isa, num_threads, dtype, quantization, block_size, num_kv_owners, max_model_len)

    def _block_size(self) -> int:
        default, why = 16, "tokens per KV block; waste is under one block per sequence"
        source: Source = "default"
        if (num_owners := self._config.decode_context_parallel_size) > 1:
            default, source = RANGE_POSITIONS, "formula"
            why = f"the positions of one partial result of attention; each of {num_owners} ranks has blocks of its own"
        return self._put_or("block_size", self._config.block_size, default, source, why)

    def _num_threads(self) -> int:
        config, device = self._config, self._device
        if threads := envs.NUM_THREADS.get():
            return self._put_or("num_threads", config.num_threads, threads, "environment", envs.NUM_THREADS.name)
        why = "physical cores allowed by affinity and cgroup quota"
        if device.num_efficient_cores:
            why = f"performance {why.removeprefix('physical ')}, without {device.num_efficient_cores} efficient cores"
        if config.num_local_replicas > 1:
            why += f", for each of {config.num_local_replicas} replicas"
        if config.num_ranks > 1:
            why += f", divided by {config.num_ranks} ranks"
        return self._put_or("num_threads", config.num_threads, device.num_cores, "device", why)

    def scheduler(self, form: _Form, is_server: bool) -> SchedulerSettings:
        """The sizes of steps and of the queue, and whether steps are scheduled ahead."""
        config, max_model_len = self._config, form.max_model_len
        sizes = _step_sizes(config, self._model, self._device, form, is_server)
        max_num_seqs = self._put_or("max_num_seqs", config.max_num_seqs, *sizes.max_num_seqs())
        budget, source, why = sizes.max_num_batched_tokens(max_num_seqs)
        if budget > (most := max_num_seqs * max_model_len):
            budget, source, why = most, "formula", f"max_num_seqs {max_num_seqs} x {max_model_len} tokens"
        budget = max(budget, max_num_seqs, 0 if config.enable_chunked_prefill else max_model_len)
        why = f"{why}; at least one token per running request"
        budget = self._put_or("max_num_batched_tokens", config.max_num_batched_tokens, budget, source, why)
        _check_budget(config, budget, max_num_seqs, max_model_len)
        shared = self._put_or(
            "max_shared_prefill_tokens", config.max_shared_prefill_tokens, *sizes.max_shared_prefill_tokens(budget)
        )
        why, most_queued = "bounded in the server, unbounded offline", 1024 if is_server else None
        queued = self._put_or("max_num_queued_reqs", config.max_num_queued_reqs, most_queued, "default", why)
        if config.pipeline_parallel_size > 1:
            is_async, why = False, "as many batches as stages are in flight"
        elif form.device == "cuda":
            is_async, why = True, "the GPU computes a step while the next one is scheduled"
        else:
            is_async, why = False, "on CPU the kernels use every core, so there is nothing to hide behind"
        is_async = self._put_or("async_scheduling", config.async_scheduling, is_async, "default", why)
        origin = self.record["max_shared_prefill_tokens"].source
        paced = self.record.put("most_answer_times", *sizes.most_answer_times(shared, origin, is_async))
        return SchedulerSettings(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_shared_prefill_tokens=shared,
            most_answer_times=paced,
            max_num_queued_reqs=queued,
            slo_ttft=config.slo_ttft,
            slo_itl=config.slo_itl,
            slo_attainment=config.slo_attainment,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            enable_chunked_prefill=config.enable_chunked_prefill,
            scheduling_policy=cast(SchedulingPolicy, config.scheduling_policy),  # one of its choices
            async_scheduling=is_async,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark=config.watermark,
            kv_cache_metrics=config.kv_cache_metrics,
            kv_cache_metrics_sample=config.kv_cache_metrics_sample,
            speculation=config.speculative_config,
            pipeline_parallel_size=config.pipeline_parallel_size,
            data_parallel_size=config.data_parallel_size,
            enable_expert_parallel=config.enable_expert_parallel,
        )

    def execution(self, form: _Form, scheduler: SchedulerSettings) -> DeviceSettings:
        """The kernels, and on a GPU the share of its memory and CUDA graphs."""
        config, model, put = self._config, self._model, self.record.put
        memory_share = config.gpu_memory_utilization
        if form.device == "cuda":
            why = "of all memory: weights, work, graphs and KV cache together; vLLM's default"
            share = GPU_MEMORY_UTILIZATION
            memory_share = self._put_or("gpu_memory_utilization", memory_share, share, "default", why)
            put("enforce_eager", *enforce_eager(config, model))
        is_deterministic = put("deterministic", *deterministic(config, model, form.device))
        backend = attention_backend(config, model, form.device, form.dtype, is_deterministic)
        put("attention_backend", *backend)
        if config.decode_context_parallel_size > 1:
            _check_context(config, model, form.device, backend[0])
        mode, largest = config.cudagraph_mode, config.max_cudagraph_capture_size
        if form.device == "cuda":
            mode = put("cudagraph_mode", *cudagraph_mode(config, enforce_eager(config, model), backend))
            limits = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
            largest = put_graph_sizes(self.record, config, mode, *limits)
        return DeviceSettings(
            device=form.device,
            isa=form.isa,
            num_threads=form.num_threads,
            deterministic=is_deterministic,
            attention_backend=backend[0],
            cudagraph_mode=mode,
            cudagraph_capture_sizes=config.cudagraph_capture_sizes,
            max_cudagraph_capture_size=largest,
            gpu_memory_utilization=memory_share,
        )

    def speculation(self) -> None:
        if (speculation := self._config.speculative_config) is not None:
            source = self._config.sources["speculative_config"]
            self.record.put("speculative_config", speculation.effective(), source, speculation.describe())
            num_tokens = speculation.num_speculative_tokens
            self.record.put("spec_tokens", num_tokens, source, "num_speculative_tokens of speculative_config")

    def model_settings(self, form: _Form) -> ModelSettings:
        config = self._config
        return ModelSettings(
            dtype=form.dtype,
            quantization=form.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=form.block_size,
            max_model_len=form.max_model_len,
            load_format=config.load_format,
            model_impl=config.model_impl,
            packed_weights_cache=config.packed_weights_cache,
            logprobs_mode=config.logprobs_mode,
            expert_metrics=config.expert_metrics,
            balancing=config.balancing,
            enable_batch_sharded_sampling=self.record.put(
                "enable_batch_sharded_sampling", *_shards_sampling(config, form.device)
            ),
            decode_context_parallel_size=form.num_kv_owners,
        )


def resolve_server(config: ServerConfig, chat_template: str = "") -> ServerSettings:
    """The settings of the HTTP side. Raises ConfigError for parsers that exclude each other.

    Args:
        chat_template: the source, which decides how answers are parsed.
    """
    record, settled = Record(), {f.name: getattr(config, f.name) for f in options(config)}
    formats = AnswerFormats.choose(config.tool_call_parser, config.reasoning_parser, chat_template)
    for name, chosen, why in (
        ("tool_call_parser", formats.tools, formats.why_tools),
        ("reasoning_parser", formats.reasoning, formats.why_reasoning),
    ):
        settled[name] = chosen
        if why:
            record.put(name, chosen, "default" if chosen is None else "model", why)
    if not config.api_key and envs.API_KEY.get():
        record.put("api_key", "set", "environment", envs.API_KEY.name)
    for name, variable in (("log_level", envs.LOGGING_LEVEL), ("log_format", envs.LOG_FORMAT)):
        if getattr(config, name) is None:
            value = variable.get()
            source: Source = "default" if value == variable.default else "environment"
            settled[name] = record.put(name, value.lower(), source, variable.name)
    _put_rest(record, config)
    return ServerSettings(**settled, sources=config.sources, settings=record)


def _shards_sampling(config: EngineConfig, device: str) -> tuple[bool, Source, str]:
    """Whether each rank samples some rows, with the source and the reason."""
    source = config.sources["enable_batch_sharded_sampling"]
    if not config.enable_batch_sharded_sampling:
        return False, source, ""
    if config.distributed_executor_backend == "external_launcher":
        return False, "formula", "the first rank samples all rows: ranks of torchrun draw seeds of their own"
    if config.tensor_parallel_size == 1:
        return False, "formula", "there is one rank in a stage"
    if device == "cuda":
        return False, "formula", "the first rank samples all rows: its GPU has their logits, and nothing waits for them"
    return True, source, "the first rank samples rows with a grammar and computes logprobs of prompts"


def _put_rest(record: Record, config: EngineConfig | ServerConfig) -> None:
    """The settings that have the user's value or their default."""
    for f in options(config):
        if f.name not in record:
            value = getattr(config, f.name)
            shown = ("set" if value else None) if f.metadata["secret"] else value
            detail = _UNSET.get(f.name, "") if value is None else ""
            record.put(f.name, shown, config.sources[f.name], detail)


# The reason for settings that may stay None.
_UNSET = {
    "model": "the bundled demo model",
    "tokenizer": "the model's",
    "max_cudagraph_capture_size": "nothing is captured on a CPU",
    "gpu_memory_utilization": "the free memory decides",
    "kv_cache_memory_bytes": "the free memory decides",
    "num_gpu_blocks_override": "the free memory decides",
    "download_dir": "the hub library's cache",
    "seed": "another one at every start",
    "slo_ttft": "no target",
    "slo_itl": "no target",
    "speculative_config": "no drafts",
    "spec_method": "part of speculative_config",
    "spec_model": "part of speculative_config",
    "spec_tokens": "part of speculative_config",
    "max_loras": "no adapters",
    "max_cpu_loras": "no adapters",
    "slo": "taken apart into slo_ttft and slo_itl",
}


def _check_budget(config: EngineConfig, budget: int, max_num_seqs: int, max_model_len: int) -> None:
    """Raise ConfigError for a step that is too short for the tokens that it must hold."""
    if budget < max_num_seqs:
        raise ConfigError(
            "The token budget is smaller than the number of running requests",
            value=budget,
            expected=f"max_num_batched_tokens of at least max_num_seqs = {max_num_seqs}",
            fix="Raise --max-num-batched-tokens or lower --max-num-seqs",
            param="max_num_batched_tokens",
        )
    if not config.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            "Without chunked prefill the longest prompt must fit into one step",
            value=budget,
            expected=f"max_num_batched_tokens of at least max_model_len = {max_model_len}",
            fix="Leave --no-enable-chunked-prefill out, or lower --max-model-len",
            param="max_num_batched_tokens",
        )


def _device(config: EngineConfig, device: DeviceFacts) -> Choice[str]:
    if config.device == "auto":
        if device.gpu is None:
            return "cpu", "device", device.no_gpu
        return "cuda", "device", f"{device.gpu.name}; {NEVER_RUN}"
    if config.device == "cuda" and device.gpu is None:
        raise ConfigError(
            f"There is no GPU that can be used: {device.no_gpu}",
            value=config.device,
            fix="Leave --device out to run on the CPU",
            param="device",
        )
    detail = "" if device.gpu is None else f"there is {device.gpu.name}"
    return config.device, config.sources["device"], f"{detail}; {NEVER_RUN}" if config.device == "cuda" else detail


def _check_ranks(config: EngineConfig, gpu: GpuFacts | None) -> None:
    """Raise ConfigError for settings that ranks of one model do not support in this version.

    Args:
        gpu: the GPU that the first rank would use; None: ranks compute on the CPU.
    """
    backend = config.distributed_executor_backend
    has_stages = config.pipeline_parallel_size > 1
    name = "pipeline_parallel_size" if has_stages else "tensor_parallel_size"
    if config.num_lanes > 1:
        name = "data_parallel_size"
    refused = (
        (gpu is not None and config.num_lanes > 1, "a GPU", "Use --device cpu"),
        (gpu is not None and config.nnodes > 1, "GPUs of several machines", "Use --device cpu, or one machine"),
        (
            gpu is not None and config.max_parallel_loading_workers is not None,
            "a GPU and --max-parallel-loading-workers",
            "Leave --max-parallel-loading-workers out: ranks connect their GPUs before they read",
        ),
        (gpu is not None and config.enable_eplb, "a GPU and --enable-eplb", "Leave --enable-eplb out"),
        (backend == "uni", "--distributed-executor-backend uni, which is one process", "Leave it out, or give mp"),
    )
    kinds = {"pipeline_parallel_size": "Pipeline parallelism", "tensor_parallel_size": "Tensor parallelism"}
    kind = kinds.get(name, "Sharing experts by --enable-expert-parallel and --data-parallel-size")
    _refuse(config, name, f"{kind} does not go together with {{}} in this version", refused)
    if gpu is not None and gpu.num_visible < config.num_local_ranks:
        raise ConfigError(
            f"There are {config.num_local_ranks} ranks, and each needs a GPU of its own",
            value=gpu.num_visible,
            expected=f"{config.num_local_ranks} GPUs",
            fix="Lower --tensor-parallel-size or --pipeline-parallel-size, or use --device cpu",
            param=name,
        )


def _check_context(config: EngineConfig, model: ModelConfig, device: str, backend: str) -> None:
    """Raise ConfigError for settings that a divided KV cache does not support in this version."""
    own_backend = "Leave --attention-backend out, or unset QUIRE_ATTENTION_BACKEND"
    refused = (
        (
            device == "cuda" and config.deterministic,
            "a GPU and --deterministic, because bits depend on the rank that has a block",
            "Leave --deterministic out",
        ),
        (backend == "FLASHINFER", "FlashInfer, which reads all of the KV cache", own_backend),
        (
            model.drafter is not None,
            "a model that drafts, whose keys and values every rank holds",
            "Use ngram or suffix in --speculative-config",
        ),
        (
            backend == "reference",
            "the reference attention, which reads all of the KV cache",
            own_backend,
        ),
    )
    name = "decode_context_parallel_size"
    _refuse(config, name, "Ranks do not divide the KV cache together with {}, in this version", refused)


def _refuse(config: EngineConfig, name: str, message: str, refused: Sequence[tuple[bool, str, str]]) -> None:
    """Raise ConfigError for the first pair of (what, fix) that is refused beside the option `name`."""
    for is_refused, what, fix in refused:
        if is_refused:
            raise ConfigError(
                message.format(what),
                value=getattr(config, name),
                expected=f"{name} 1",
                fix=f"{fix}, or leave --{name.replace('_', '-')} out",
                param=name,
            )


def _experts_of_ranks(model: ModelConfig) -> str:
    """The number of experts of each rank."""
    placements = {part.placement for part in model.experts()}
    counts = (" + ".join(str(len(own)) for own in placement.experts) for placement in placements if placement)
    return "; ".join(f"{count} experts of a layer, by ranks" for count in counts) or "one rank has all experts"


def _step_sizes(
    config: EngineConfig, model: ModelConfig, device: DeviceFacts, form: _Form, is_server: bool
) -> StepSizes:
    """The facts that decide the sizes of steps: the same at every start, whatever else runs on the machine."""
    if form.device == "cuda":
        assert device.gpu is not None, "a device that was not found"
        return StepSizes(config, None, 0, device.gpu.total_memory_bytes, is_server)
    arithmetic = StepArithmetic(model, form.dtype, form.quantization, config.kv_cache_dtype)
    reached = cpu_ceilings(form.isa, form.num_threads)
    if arithmetic.is_integer:
        reached = replace(reached, flops=INTEGER_TIMES * reached.flops)
    groups, kv = kv_groups(model), kv_format(config.kv_cache_dtype, form.dtype)
    of_page = page_bytes(groups, kv, form.block_size, form.num_kv_owners) // form.num_kv_owners
    if (num_pages := config.num_gpu_blocks_override) is None:
        weights = model.weight_bytes(form.dtype, form.quantization, is_packed=packs_floats(form.isa))
        given = config.kv_cache_memory_bytes or int(envs.CPU_KVCACHE_SPACE.get() * GIB)
        num_pages = (given or device.total_memory_bytes - weights) // of_page
    knee = Knee(arithmetic, described_constants(arithmetic, reached, is_gpu=False))
    fitting = num_pages // pages_for(groups, SHORT_REQUEST, form.block_size, 1)
    return StepSizes(config, knee, fitting, None, is_server)


def _auto_dtype(model: ModelConfig, gpu: GpuFacts | None) -> Choice[str]:
    if gpu is not None and model.dtype == "float32":
        return "bfloat16", "device", "the checkpoint is float32, which a GPU multiplies at a fraction of its rate"
    if model.dtype in DTYPE_BYTES:
        return model.dtype, "model", "the checkpoint's dtype"
    return "bfloat16", "default", f"the checkpoint's dtype is {model.dtype}"


def _quantization(config: EngineConfig, model: ModelConfig) -> Choice[str | None]:
    """The method of a quantized checkpoint, or the user's method for a floating-point one."""
    given, found = config.quantization, model.quantized
    if found is None and (given is None or given in ON_LOAD):
        detail = "as the checkpoint is" if given is None else ON_LOAD[given].description
        return given, config.sources["quantization"], detail
    if found is not None and (given is None or QUANTIZATION_NAMES.get(given) == found.method):
        source = "model" if given is None else config.sources["quantization"]
        return found.method, source, found.describe()
    is_on_load = given in ON_LOAD
    raise ConfigError(
        "The checkpoint is not quantized in this way",
        value=given,
        expected="a checkpoint in floating point" if is_on_load else f"a checkpoint quantized with {given}",
        fix=f"The checkpoint is {'in floating point' if found is None else found.method}: leave --quantization out",
        param="quantization",
    )


def _kv_detail(config: EngineConfig, dtype: str, model: ModelConfig) -> str:
    """The dtype of the KV cache. Raises ConfigError for a dtype that is not the model's and not a dtype of codes."""
    kv = kv_format(config.kv_cache_dtype, dtype)
    if kv.name in DTYPE_BYTES and kv.name != dtype:
        raise ConfigError(
            f"A model that runs in {dtype} has no KV cache in {kv.name}",
            value=config.kv_cache_dtype,
            expected="one of " + ", ".join(each for each in KV_CACHE_DTYPES if each not in DTYPE_BYTES),
            fix=f"Use --dtype {kv.name} for the model too, or one of these",
            param="kv_cache_dtype",
        )
    own = kv_format("auto", dtype)
    detail = f"{kv.name}: {model.kv_bytes_per_token(kv):,} bytes per token"
    if kv == own:
        return detail
    times = model.kv_bytes_per_token(own) / model.kv_bytes_per_token(kv)
    return f"{detail}, {times:.2f}x the tokens of {own.name} in the same bytes"


def _max_model_len(config: EngineConfig, model: ModelConfig) -> Choice[int]:
    """The longest request. -1 is replaced by the longest that fits when memory is known."""
    wanted = config.max_model_len
    border = model.rope.switches_after(model.max_model_len if wanted in (None, -1) else wanted)
    longrope = "" if border is None else f"; a sequence of more than {border} tokens takes longrope's long factors"
    if wanted is None or wanted == -1:
        cut = "; may be cut to what fits" if wanted == -1 else ""
        return model.max_model_len, "model", f"from config.json{cut}{longrope}"
    if wanted > model.max_model_len and not envs.ALLOW_LONG_MAX_MODEL_LEN.get():
        raise ConfigError(
            "max_model_len is longer than the model was trained for",
            value=wanted,
            expected=f"at most {model.max_model_len}",
            fix="Lower --max-model-len, or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 to accept wrong output beyond it",
            param="max_model_len",
        )
    return wanted, config.sources["max_model_len"], f"the model allows {model.max_model_len}{longrope}"


def shown_bytes(count: int) -> str:
    """`1.50 GiB`, `11.0 MiB`: bytes for people."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"
