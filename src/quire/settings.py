"""The settled values of a start: a frozen dataclass for each owner, and the source of every setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from quire.config import EngineConfig, ServerConfig
from quire.eplb_config import EplbConfig
from quire.formats.kv_format import kv_format
from quire.formats.kv_groups import DrafterLayers, full_table, kv_groups, num_tables
from quire.formats.weight_format import LORA_PANEL, packs_floats
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.option import Source, options
from quire.speculative_config import LEAST_LOGITS_ROWS, SpeculativeConfig

# The bytes of an adapter's file that are read at a time; at least one tensor is read. The thread that loads takes 2 to
# 3 ms for one MiB. Then it may rest beside steps. Smaller pieces wait more often for the disk.
ADAPTER_READ_BYTES = 1 << 20
_OBJECT_BYTES = 300  # the bytes of Python's objects for the part of an adapter that belongs to one weight
LEAST_KEPT = 16  # hidden states that are kept of a request for a head: 16 are read in 0.75 of the time of twice 8
SchedulingPolicy = Literal["fcfs", "priority"]

T = TypeVar("T")
Choice = tuple[T, Source, str]  # a value, its source, and why
R = TypeVar("R", bound="Resolved")

# The quantities that settings limit without being fields of EngineConfig.
_FURTHER_LIMITS = {
    "isa": "which kernels run",
    "weight_bytes": "memory left for the KV cache",
    "work_bytes": "memory left for the KV cache",
    "drafter_weight_bytes": "memory left for the KV cache",
    "drafter_logits_bytes": "memory left for the KV cache",
    "drafter_hidden_bytes": "memory left for the KV cache",
    "drafter_kv_bytes_per_token": "how many tokens the KV cache holds",
    "draft_text_bytes": "memory left for the KV cache",
    "lora_bytes": "memory left for the KV cache",
    "kv_cache_bytes": "context held for all requests together",
    "unplanned_bytes": "what other programs may take",
    "most_answer_times": "how much slower answers get when prompts wait",
    "num_blocks": "context held for all requests together",
    "kv_cache_tokens": "context held for all requests together",
    "kv_cache_chats": "chats that need not wait for each other",
    "expected_tokens_per_second": "what one request can get",
    "expected_total_tokens_per_second": "what max_num_seqs requests can get together",
    "expected_ttft": "how soon an answer can begin",
    "expected_exchange_seconds": "how much of a step ranks exchange, and do not compute",
    "peak_flops": "arithmetic per second; the model's share of it is in /metrics",
    "peak_read_bandwidth": "bytes read per second; the model's share of it is in /metrics",
    "expectation_waited_share": "how much the expectations are worth",
}
_FIELDS = {f.name: f for config in (EngineConfig, ServerConfig) for f in options(config)}
# Memory is planned for their first values, so they may only be moved below these.
_PLANNED_FOR = ("max_num_seqs", "max_num_batched_tokens", "spec_tokens")


@dataclass(frozen=True)
class Interval:
    """Nine of ten measurements of a predicted value should lie between `low` and `high`.

    Attributes:
        bound: the resource that takes most of the time.
    """

    low: float
    high: float
    bound: str


@dataclass(frozen=True)
class Setting:
    """A value, its source, and for a formula its numbers."""

    value: Any  # this is only shown; code uses the field of a dataclass below
    source: Source
    detail: str = ""
    limits: str = ""  # what the setting limits
    is_live: bool = False  # may change while serving
    maximum: int | None = None  # for a setting that can change in a running server: what memory was planned for
    interval: Interval | None = None  # of a value that is predicted

    def as_dict(self) -> dict[str, object]:
        """The fields as JSON shows them."""
        shown: dict[str, object] = {
            "value": self.value,
            "source": self.source,
            "detail": self.detail,
            "limits": self.limits,
            "live": self.is_live,
        }
        shown |= {"max": self.maximum} if self.maximum is not None else {}
        return shown | (asdict(self.interval) if self.interval is not None else {})


class Record(dict[str, Setting]):
    """Settings by name while they are being settled."""

    def put(self, name: str, value: T, source: Source, detail: str = "", interval: Interval | None = None) -> T:
        """Note a value, with the facts of its field, and return it."""
        f = _FIELDS.get(name)
        is_live = f is not None and f.metadata["live"]
        limits = _FURTHER_LIMITS[name] if f is None else f.metadata["limits"]
        maximum = value if name in _PLANNED_FOR and isinstance(value, int) else None
        self[name] = Setting(value, source, detail, limits, is_live, maximum, interval)
        return value


@dataclass(frozen=True)
class ModelSettings:
    """How the model is loaded, and the form of its KV cache."""

    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    load_format: str
    model_impl: str
    packed_weights_cache: bool
    logprobs_mode: str
    expert_metrics: bool = False
    balancing: EplbConfig | None = None
    enable_batch_sharded_sampling: bool = False
    decode_context_parallel_size: int = 1  # ranks that have the KV cache together: see PageShare

    @property
    def cache_dtype(self) -> str:
        """torch's name of the elements of K and V."""
        return kv_format(self.kv_cache_dtype, self.dtype).torch_dtype


@dataclass(frozen=True)
class DeviceSettings:
    """The device and the kernels of the model."""

    device: str
    isa: str
    num_threads: int
    deterministic: bool
    attention_backend: str
    cudagraph_mode: str
    cudagraph_capture_sizes: tuple[int, ...]
    max_cudagraph_capture_size: int | None
    gpu_memory_utilization: float | None


@dataclass(frozen=True)
class SchedulerSettings:
    """The limits of a step, the order of requests, and the prefix cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_shared_prefill_tokens: int
    most_answer_times: float  # see SchedulerLimits
    max_num_queued_reqs: int | None
    slo_ttft: float | None  # seconds, as slo_itl
    slo_itl: float | None
    slo_attainment: float
    long_prefill_token_threshold: int
    enable_chunked_prefill: bool
    scheduling_policy: SchedulingPolicy
    async_scheduling: bool
    enable_prefix_caching: bool
    watermark: float
    kv_cache_metrics: bool
    kv_cache_metrics_sample: float
    speculation: SpeculativeConfig | None
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False

    @property
    def num_lanes(self) -> int:
        """Lanes of an engine: see EngineConfig. The bounds of a step hold for each lane."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_logits_rows(self) -> int:
        """The most rows of logits in a step."""
        return self.max_num_seqs if self.speculation is None else max(self.max_num_seqs, LEAST_LOGITS_ROWS)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step, with its padding."""
        return max(self.max_num_batched_tokens, self.max_num_seqs)

    @property
    def depth(self) -> int:
        """Batches in flight: one in each stage, or one that is scheduled while the other is computed."""
        return self.pipeline_parallel_size if self.pipeline_parallel_size > 1 else 1 + self.async_scheduling


@dataclass(frozen=True)
class DrafterSettings:
    """How a model that drafts is loaded, and how it drafts.

    Attributes:
        max_drafts: the most drafts of one request in one step.
        is_greedy: whether it drafts its likeliest token even if the request samples.
    """

    form: ModelSettings
    max_drafts: int
    is_greedy: bool

    def layers(self, target: ModelConfig) -> DrafterLayers:
        """The layers that the drafter has in the KV cache of its target. Stages before the last one have none."""
        table = full_table(kv_groups(target))
        assert table is not None
        kv = kv_format(self.form.kv_cache_dtype, self.form.dtype)
        return DrafterLayers(() if target.drafter is None else tuple(target.drafter.kv_specs()), kv, table)

    def kv_bytes_per_token(self, target: ModelConfig) -> int:
        """The bytes of a token that the drafter adds: pages of all block tables have room for it, and it uses one."""
        return num_tables(kv_groups(target)) * self.layers(target).bytes_per_token()

    @property
    def positions_kept(self) -> int:
        """The hidden states that are kept of each request for a head: at least of a step's positions and one before."""
        return max(self.max_drafts + 2, LEAST_KEPT)

    def hidden_bytes(self, target: ModelConfig, max_num_seqs: int, max_tokens: int) -> int:
        """The bytes of the hidden states that are kept for a head: twice for the largest step, and for its rows.

        A stage before the last one keeps its streams of the largest step.
        """
        if (stage := target.stage) is not None and not stage.is_last:
            num_elements = max_tokens * len(stage.streams) * target.hidden_size
        elif target.drafter is None or (head := target.drafter.head) is None:
            return 0
        else:
            num_elements = (2 * max_tokens + max_num_seqs * self.positions_kept) * head.hidden_width
        return num_elements * DTYPE_BYTES[self.form.dtype]

    def weight_bytes(self, target: ModelConfig, isa: str) -> int:
        """The bytes of the drafter's weights in memory, once they are loaded. Another stage may have them."""
        if target.drafter is None:
            return 0
        is_packed = packs_floats(isa)
        return target.drafter.weight_bytes(self.form.dtype, self.form.quantization, is_packed=is_packed)


@dataclass(frozen=True)
class LoraSettings:
    """Which adapters are served.

    Attributes:
        max_loras: the most different adapters of a step.
        max_rank: the largest rank of an adapter; memory is planned for it.
        max_cpu_loras: the most adapters in memory, at least max_loras.
        dtype: the dtype of the adapters' weights in memory, as torch's name.
        target_modules: last names of modules that adapters may change; none: all that can be.
    """

    max_loras: int
    max_rank: int
    max_cpu_loras: int
    dtype: str
    target_modules: tuple[str, ...] = ()

    def num_bytes(self, model: ModelConfig) -> int:
        """The most bytes that adapters take: one adapter more than `max_cpu_loras` while two change places, and the
        adapters that are being read.
        """
        largest = max((max(weight[1:]) for weight in self._weights(model)), default=0) * self.max_rank * 4
        return (self.max_cpu_loras + 1) * self.adapter_bytes(model) + max(largest, ADAPTER_READ_BYTES)

    def adapter_bytes(self, model: ModelConfig) -> int:
        """The bytes of an adapter that has the largest rank and changes every weight."""
        weights = self._weights(model)
        elements = sum(in_features + -(-size // LORA_PANEL) * LORA_PANEL for _, in_features, size in weights)
        return self.max_rank * elements * DTYPE_BYTES[self.dtype] + len(weights) * _OBJECT_BYTES

    def _weights(self, model: ModelConfig) -> list[tuple[str, int, int]]:
        """The last name, the in-features and the out-features of each weight that adapters may change."""
        linears = [linear for linear in model.linears() if linear.is_adaptable]
        shards = [(name, linear.in_features, size) for linear in linears for name, size in linear.shards]
        if model.takes_tokens:
            shards.append(("embed_tokens", model.vocab_size, model.hidden_size))
        return [shard for shard in shards if not self.target_modules or shard[0] in self.target_modules]


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ServerConfig):
    """The HTTP side: its config, whose open values are settled by the model and the environment."""

    settings: Mapping[str, Setting] = field(default_factory=dict)  # every setting by name, with where it came from


@dataclass(frozen=True)
class MemorySettings:
    """The use of memory. In bytes, except for the number of blocks."""

    weight_bytes: int
    work_bytes: int
    num_blocks: int
    kv_cache_bytes: int
    unplanned_bytes: int


@dataclass(frozen=True)
class Resolved:
    """All settings except the settings of memory."""

    model: ModelSettings
    device: DeviceSettings
    scheduler: SchedulerSettings
    settings: Mapping[str, Setting]  # every setting by name, with where it came from
    drafter: DrafterSettings | None = field(default=None, kw_only=True)
    lora: LoraSettings | None = field(default=None, kw_only=True)

    def noting(self: R, more: Mapping[str, Setting]) -> R:
        """These settings, with the sources of more of them."""
        return replace(self, settings={**self.settings, **more})


@dataclass(frozen=True)
class Planned(Resolved):
    """All settings, once memory is known: max_model_len may be shorter than before."""

    memory: MemorySettings


def as_dict(settings: Mapping[str, Setting]) -> dict[str, object]:
    """The settings as JSON shows them: {name: Setting.as_dict()}."""
    return {name: setting.as_dict() for name, setting in settings.items()}
