"""The user's settings: a field with its help for each. Flags, LLM(...) arguments and docs come from here.

None means "choose for me"; `resolve.py` chooses and records why. Names and meanings are vLLM's unless the help says
otherwise.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from quire.compat.names import nearest
from quire.compat.speculation import speculative_config_of
from quire.compat.table import FOREIGN, settle
from quire.config_rules import check_engine
from quire.distributed.layout import MOST_RANKS
from quire.eplb_config import EplbConfig
from quire.errors import ConfigError
from quire.formats.answer_formats import NO_PARSER, REASONING_PARSERS, TOOL_PARSERS
from quire.formats.kv_format import KV_CACHE_DTYPES, RANGE_POSITIONS
from quire.logs import get_logger
from quire.lora.modules import RANKS
from quire.option import (
    ATTAINMENTS,
    DURATION,
    LEAST_SECONDS,
    MOST_SECONDS,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Bounds,
    Source,
    check_types,
    check_values,
    complete_sources,
    normalise,
    option,
    options,
    parse_duration,
    parse_human_int,
    parse_length,
)
from quire.speculative_config import SpeculativeConfig

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
ATTENTION_BACKENDS = ("auto", "FLASHINFER", "TRITON_ATTN", "CPU_ATTN")

logger = get_logger(__name__)


def _parse_backend(text: str) -> str:
    """The name of a backend in upper case, or `auto`. Any case is accepted, as in vLLM."""
    return "auto" if text.lower() == "auto" else text.upper()


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything about the model, its memory and its schedule."""

    model: str | None = option(
        None,
        "Folder, hub id, URL (`s3://bucket/folder`, gs, az) or GGUF file of the model, `folder:Q4_K_M` for one of "
        "several; none: the bundled demo model.",
    )
    gguf_file: str | None = option(None, "GGUF file: a path, or a name in the model's folder or repository.")
    tokenizer: str | None = option(None, "Folder, hub id, URL or GGUF file of the tokenizer, if it is not the model's.")
    tokenizer_mode: str = option(
        "auto", "auto or hf: tokenizer.json; slow: convert through transformers.", choices=("auto", "hf", "slow")
    )
    skip_tokenizer_init: bool = option(False, "No tokenizer: prompts and outputs are token ids only.")
    trust_remote_code: bool = option(False, "Refused: code from a model repository is never run.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the hub.")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of the tokenizer on the hub.")
    hf_token: str | None = option(None, "Token for gated models on the hub; else HF_TOKEN.", secret=True)
    hf_overrides: dict[str, Any] | None = option(None, "JSON object merged over config.json.", type="json")
    download_dir: str | None = option(
        None, "Folder for downloaded weights; else the hub's cache, and weights of object stores only in memory."
    )
    load_format: str = option(
        "auto", "auto, safetensors or gguf: read weights; dummy: random weights.", choices=LOAD_FORMATS
    )
    packed_weights_cache: bool = option(
        False,
        "Keep the packed weights in a file of their size under QUIRE_CACHE_DIR, else ~/.cache/quire, for later starts.",
    )
    model_impl: str = option(
        "auto",
        "auto: native, else through transformers' modelling code; native; transformers.",
        choices=("auto", "native", "vllm", "transformers"),  # vllm: what vLLM's users call native
    )
    device: str = option(
        "auto",
        "Where the model runs: auto: cuda where torch and Triton can use an NVIDIA GPU, else cpu; cpu; cuda.",
        choices=DEVICES,
        limits="which memory holds weights and KV cache, and which kernels run",
    )
    dtype: str = option(
        "auto",
        "Weights and activations: auto (the checkpoint's; on GPUs bfloat16 for float32), bfloat16, float16 = half, "
        "float32 = float.",
        choices=DTYPES,
        limits="bytes of weights and KV cache, and the precision of every product",
    )
    quantization: str | None = option(
        None,
        "int8, int4 or fp8: quantize the weights while they load; none: as the checkpoint is. awq, gptq, "
        "compressed-tensors, fp8 and gguf, also by vLLM's other names, must be what the checkpoint is.",
        flags=("-q",),
    )
    seed: int | None = option(
        0, "Seed of the seeds drawn for requests that bring none; None in Python: another one at every start."
    )
    served_model_name: tuple[str, ...] = option((), "Names the API answers to; the first is reported.", many=True)
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output in tokens; -1 or auto: the longest that fits; suffixes k, K, M.",
        type=parse_length,
        limits="tokens of one request; on a CPU where nothing gives the KV cache a size, also the KV cache: at most 2 "
        "such contexts per running request",
    )
    generation_config: str = option(
        "auto", "Request defaults: auto: the model's generation_config.json; vllm: none; or a folder that has the file."
    )
    override_generation_config: dict[str, Any] | None = option(
        None,
        "JSON object merged over the generation config; a server lets no request exceed its max_new_tokens.",
        type="json",
    )
    max_logprobs: int = option(
        20, "Most logprobs a request may ask for; -1: no cap.", limits="the logprobs fields of requests"
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "raw_logprobs: before penalties and temperature; processed_logprobs: after.",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    deterministic: bool = option(
        False,
        "Tokens and logprobs that do not depend on the batch, on GPUs too, at a cost; on CPU it is always so.",
        limits="which kernels run on a GPU",
    )
    attention_backend: str = option(
        "auto",
        "auto: our own; FLASHINFER: where it is installed and takes the model; TRITON_ATTN: our own on GPUs; "
        "CPU_ATTN: on CPU.",
        choices=ATTENTION_BACKENDS,
        type=_parse_backend,
        limits="which attention kernels run",
    )
    enforce_eager: bool = option(False, "No CUDA graphs: every kernel is launched by itself. On CPU there are none.")
    cudagraph_mode: str = option(
        "FULL",
        "CUDA graphs: FULL: of decodes and of small mixed steps (also for FULL_AND_PIECEWISE and PIECEWISE); "
        "FULL_DECODE_ONLY; NONE.",
        choices=("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"),
        type=str.upper,
        limits="which steps are launched kernel by kernel",
    )
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (),
        "Rows of decodes and tokens of mixed steps to capture, up to 256 each; none: chosen.",
        many=True,
        bounds=POSITIVE,
    )
    max_cudagraph_capture_size: int | None = option(
        None,
        "The largest size that is captured, at most 256; beside --cudagraph-capture-sizes, the largest of them.",
        limits="which steps are launched kernel by kernel",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's total memory (on CPU: RAM) for weights, KV cache and work; on GPUs 0.9 unless given.",
        flags=("--device-memory-utilization",),
        limits="bytes of the KV cache",
        bounds=SHARE,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Exact bytes of the KV cache; overrides the utilization.",
        type=parse_human_int,
        limits="bytes of the KV cache",
        bounds=POSITIVE,
    )
    num_gpu_blocks_override: int | None = option(
        None, "Exact number of KV blocks; overrides everything else.", limits="blocks of the KV cache", bounds=POSITIVE
    )
    block_size: int | None = option(
        None,
        "Tokens per KV block: a power of two from 8 to 128.",
        limits="waste at the end of a request, and the grain of prefix sharing",
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto: the model's dtype; fp8 (fp8_e4m3), fp8_e5m2 and int8: a byte per element, int8 with scales.",
        choices=KV_CACHE_DTYPES,
        limits="bytes of a token in the KV cache: how many tokens it holds, and how fast they are read",
    )
    enable_prefix_caching: bool = option(True, "Keep KV blocks of past prompts and share equal prefixes.")
    performance_mode: str = option(
        "balanced",
        "balanced; throughput: twice the two limits below, if neither is set; interactivity: a quarter of the tokens.",
        choices=("balanced", "interactivity", "throughput"),
        limits="the defaults of max_num_seqs and max_num_batched_tokens",
    )
    max_num_seqs: int | None = option(
        None, "Most requests running at once.", live=True, limits="running requests; the others wait", bounds=POSITIVE
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens computed in one step.",
        live=True,
        type=parse_human_int,
        limits="tokens of a step: how long a long prompt holds up everybody's next token, and work memory",
        bounds=POSITIVE,
    )
    long_prefill_token_threshold: int = option(
        0,
        "Most tokens of one prompt in one step; 0: no limit but the budget.",
        live=True,
        limits="tokens of one prompt in a step",
        bounds=NOT_NEGATIVE,
    )
    max_shared_prefill_tokens: int | None = option(
        None,
        "Most prompt tokens of a step while several requests are there: the oldest prompt gets half, the prompts that "
        "lack fewest tokens get the rest; 0: prompts go in order, as in vLLM; none: chosen, more if prompts wait.",
        live=True,
        type=parse_human_int,
        limits="prompt tokens of a shared step: how long a short prompt waits beside long ones",
        bounds=NOT_NEGATIVE,
    )
    slo_ttft: float | None = option(
        None,
        "Target for the time to first token, 500ms, 1.5s or seconds: requests that would miss it get 429.",
        live=True,
        type=parse_duration,
        limits="requests that are taken",
        bounds=Bounds(LEAST_SECONDS, MOST_SECONDS, DURATION),
    )
    slo_itl: float | None = option(
        None,
        "Target for the time between two tokens, 50ms, 0.1s or seconds: beside answers, a step takes as many prompt "
        "tokens as fit.",
        live=True,
        type=parse_duration,
        limits="prompt tokens of a step beside answers, and requests that run at once",
        bounds=Bounds(LEAST_SECONDS, MOST_SECONDS, DURATION),
    )
    slo_attainment: float = option(
        0.99,
        "Share of the times that have to reach these targets, from 0.5 to 0.9999.",
        live=True,
        limits="how far below the targets predictions have to stay",
        bounds=Bounds(*ATTAINMENTS, "a share from {} to {}".format(*ATTAINMENTS)),
    )
    slo: str | None = option(None, "The targets in one flag: ttft=500ms,itl=50ms.")
    max_num_queued_reqs: int | None = option(
        None, "Most requests waiting; above it new ones get 429.", live=True, limits="waiting requests", bounds=POSITIVE
    )
    enable_chunked_prefill: bool = option(True, "Split long prompts over steps.")
    scheduling_policy: str = option("fcfs", "fcfs, or priority: lower numbers first.", choices=("fcfs", "priority"))
    watermark: float = option(
        0.0,
        "Share of KV blocks kept free at admission.",
        limits="admission: less of it means more preemptions",
        bounds=Bounds(0, math.nextafter(1, 0), "a share in [0, 1)"),
    )
    async_scheduling: bool | None = option(
        None, "Schedule the next step while one runs (two batches in flight); none: on GPUs only."
    )
    num_threads: int | None = option(
        None, "Threads of the CPU kernels; none: physical cores allowed.", limits="cores that compute", bounds=POSITIVE
    )
    disable_log_stats: bool = option(False, "No statistics line every 10 seconds.")
    kv_cache_metrics: bool = option(False, "Histograms of how long KV blocks keep their content, in /metrics.")
    kv_cache_metrics_sample: float = option(
        0.01, "Share of the KV blocks that these histograms follow, in (0, 1].", bounds=SHARE
    )
    expert_metrics: bool = option(False, "Metrics of the experts that tokens go to, in /metrics; on a CPU.")
    otlp_traces_endpoint: str | None = option(
        None, "Collector that gets a trace of each request: http://host:4317; needs quire[otel]."
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that share one copy of the model: processes of this machine, with its cores divided.",
        flags=("-tp",),
        bounds=Bounds(1, MOST_RANKS),
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages of consecutive layers, each of --tensor-parallel-size ranks. As many batches are computed at once.",
        flags=("-pp",),
        bounds=Bounds(1, MOST_RANKS),
    )
    decode_context_parallel_size: int = option(
        1,
        "Ranks that hold the same keys and values divide them: each has every N-th block of 256 tokens.",
        flags=("-dcp",),
        limits="tokens that the KV cache holds: N times as many in the same memory of each rank",
        bounds=Bounds(1, MOST_RANKS),
    )
    enable_batch_sharded_sampling: bool = option(
        False, "With --tensor-parallel-size, each rank samples some requests; else the first one samples all."
    )
    enable_expert_parallel: bool = option(
        False,
        "Ranks have whole experts, instead of rows of all. With --data-parallel-size, all ranks share them.",
        flags=("-ep",),
    )
    expert_placement_strategy: str = option(
        "linear",
        "Which experts a rank has: linear: neighbours; round_robin: expert 0 on the first rank, expert 1 on the "
        "second, and so on.",
        choices=("linear", "round_robin"),
    )
    enable_eplb: bool = option(
        False, "Ranks that have whole experts exchange some between steps, to balance their tokens."
    )
    eplb_config: dict[str, Any] | None = option(
        None,
        "JSON object of --enable-eplb: window_size, step_interval, num_redundant_experts, ...; docs/parallel.md has "
        "the keys.",
        type="json",
    )
    distributed_executor_backend: str | None = option(
        None,
        "mp: each rank but the first is a process of its own; ray: Ray starts the processes of the other machines; "
        "uni: one process, for one rank; external_launcher: LLM(...) in processes that torchrun has started. none: as "
        "ranks need it.",
        choices=("mp", "ray", "uni", "external_launcher"),
    )
    nnodes: int = option(
        1,
        "Machines that share one copy of the model: its stages, the ranks of a stage, or lanes; with Ray: a machine "
        "for each stage.",
        flags=("-n",),
    )
    distributed_timeout_seconds: int = option(
        600,
        "Seconds that a rank waits in a step for another one that makes no progress; then the engine ends.",
        bounds=POSITIVE,
    )
    max_parallel_loading_workers: int | None = option(
        None, "Ranks of a machine that read weights at the same time; none: all of them.", bounds=POSITIVE
    )
    node_rank: int = option(
        0, "Number of this machine. 0 has the engine; the others run quire serve --headless.", flags=("-r",)
    )
    master_addr: str = option(
        "127.0.0.1", "Address of machine 0 in the network of --nnodes and of Ray's replicas; it listens there."
    )
    master_port: int = option(29501, "Port of --master-addr.", bounds=Bounds(1, 65535))
    headless: bool = option(False, "Compute for machine 0, and serve nothing.")
    device_ids: tuple[str, ...] = option(
        (),
        "GPUs of this machine, by number or UUID (2,3 or 2 3): each rank of each replica takes the next one; else "
        "CUDA_VISIBLE_DEVICES.",
        many=True,
    )
    numa_bind: bool = option(False, "Each rank computes on the cores of one NUMA node; ranks share the nodes evenly.")
    numa_bind_nodes: tuple[int, ...] = option((), "The same with the node of each rank on this machine.", many=True)
    numa_bind_cpus: tuple[str, ...] = option(
        (), "CPUs of each rank on this machine: 0-3 4-7; else VLLM_CPU_OMP_THREADS_BIND.", many=True
    )
    data_parallel_size: int = option(
        1,
        "Replicas of the model behind one API. Each has an equal share of the cores and of the memory, or a GPU. With "
        "--enable-expert-parallel: lanes of one engine, which share experts.",
        flags=("-dp",),
        limits="threads and memory of each replica, and requests that run at once",
        bounds=POSITIVE,
    )
    data_parallel_size_local: int | None = option(
        None,
        "Replicas on this machine, and with Ray the most on each other one; with mp: all. With "
        "--enable-expert-parallel: lanes on each machine, in place of --nnodes.",
        flags=("-dpl",),
    )
    data_parallel_start_rank: int = option(
        0,
        "First lane of this machine, in place of --node-rank, where lanes are on several machines.",
        flags=("-dpr",),
    )
    data_parallel_backend: str = option(
        "mp",
        "What starts the replicas: mp: processes on this machine; ray: Ray, on the machines of its cluster.",
        choices=("mp", "ray"),
        flags=("-dpb",),
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        "JSON object of speculative decoding: method (ngram, suffix, draft_model, eagle3, mtp), model, "
        "num_speculative_tokens, ...; docs/speculation.md has the keys.",
        flags=("-sc",),
        type="json",
    )
    spec_method: str | None = option(None, "The key method of --speculative-config.")
    spec_model: str | None = option(None, "Its key model: folder or hub id of the drafter; or ngram.")
    spec_tokens: int | None = option(
        None,
        "Its key num_speculative_tokens: most drafts of a request in a step.",
        live=True,
        limits="tokens that are drafted for a request in a step",
    )
    per_request_spec_decode_metrics: str = option(
        "none",
        "Answers count their drafts in metrics.speculative_decoding: none, summary, or detailed with "
        "a number per step.",
        choices=("none", "summary", "detailed"),
    )
    enable_lora: bool = option(False, "Serve LoRA adapters: each request names one of them, or the base model.")
    lora_modules: tuple[str, ...] = option(
        (),
        "Adapters of the start: name=path, or JSON objects with name, path and base_model_name.",
        many=True,
    )
    max_loras: int | None = option(
        None,
        "Most different adapters in a step; none: as many as --lora-modules, 8 or more where others may be loaded.",
        limits="adapters that run at once; requests for others wait",
        bounds=POSITIVE,
    )
    max_lora_rank: int = option(
        16,
        f"Largest rank of an adapter: {', '.join(map(str, RANKS))}. Memory is planned for it; each runs at its own.",
        limits="which adapters are taken, and memory left for the KV cache",
    )
    max_cpu_loras: int | None = option(
        None,
        "Most adapters in memory, at least --max-loras; the others are read again when requests come; none: "
        "--max-loras.",
        limits="memory left for the KV cache, and how often adapters are read again",
        bounds=POSITIVE,
    )
    lora_dtype: str = option(
        "auto",
        "Weights of adapters in memory: auto (the model's dtype), bfloat16, float16, float32.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    lora_target_modules: tuple[str, ...] = option(
        (), "Only these modules may be changed by adapters, such as q_proj; none: all that can be.", many=True
    )
    lora_dir: tuple[str, ...] = option(
        (), "Folders that adapters may be loaded from while serving; none: nothing is loaded from a path.", many=True
    )
    sources: dict[str, Source] = field(default_factory=dict, compare=False, repr=False)  # where values come from

    def __post_init__(self) -> None:
        normalise(self)
        _take_speculation(self)
        check_types(self)
        check_values(self)
        _take_slo(self)
        if self.distributed_executor_backend == "ray" and self.nnodes == 1:
            object.__setattr__(self, "nnodes", self.pipeline_parallel_size)
        _take_lanes_of_machines(self)
        check_engine(self)
        complete_sources(self)

    @property
    def num_ranks(self) -> int:
        """The number of processes of an engine. They share a copy of the model, or its experts."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.num_lanes

    @property
    def num_lanes(self) -> int:
        """The number of lanes of an engine.

        Each has its own requests and its own copy of the model, but lanes share the experts.
        """
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_replicas(self) -> int:
        """The number of engines behind one API. Each has a copy of the model."""
        return self.data_parallel_size // self.num_lanes

    @property
    def has_ray_replicas(self) -> bool:
        """Whether Ray places the replicas on machines of its cluster."""
        return self.data_parallel_backend == "ray"

    @property
    def num_local_replicas(self) -> int:
        """The number of replicas that share this machine. A replica that Ray has placed is told this number."""
        return self.data_parallel_size_local or 1 if self.has_ray_replicas else self.num_replicas

    @property
    def balancing(self) -> EplbConfig | None:
        """The rules by which ranks exchange experts; None: they do not exchange any."""
        return EplbConfig.of(self.eplb_config or {}) if self.enable_eplb else None

    @property
    def gpu_ids(self) -> list[str]:
        """The GPUs that `device_ids` names, in its order."""
        return [name for word in self.device_ids for each in word.split(",") if (name := each.strip())]

    @property
    def num_local_ranks(self) -> int:
        """The number of ranks on each machine."""
        return self.num_ranks // self.nnodes

    def undivided(self) -> EngineConfig:
        """The same config, but the KV cache is not divided: every rank has all keys and values that it reads."""
        block_size = None if self.block_size == RANGE_POSITIONS else self.block_size
        return replace(self, decode_context_parallel_size=1, block_size=block_size)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """The config from arguments of LLM(...). Foreign arguments are translated.

        An unknown argument raises an error that suggests the most similar name.
        """
        known = {f.name for f in options(cls)} | {"sources"}
        settled = settle(kwargs)
        for name in settled:
            if name not in known:
                raise _unknown_argument(name, known)
        return cls(**settled)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything about the HTTP side."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(
        8000, "Port to listen on; 0: any free one.", bounds=Bounds(0, 65535, "0 to 65535; 0: any free one")
    )
    uds: str | None = option(
        None, "Path of a Unix socket to listen on, in place of host and port; only its owner may connect."
    )
    root_path: str = option("", "Prefix under which a proxy shows the server; paths may come with it or without.")
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's key, if --ssl-certfile does not hold it.")
    ssl_certfile: str | None = option(None, "PEM file of the certificate chain: the server speaks HTTPS only.")
    ssl_ca_certs: str | None = option(None, "PEM file of the authorities that sign clients' certificates.")
    ssl_cert_reqs: int = option(
        0,
        "Clients' certificates; 0: not asked for; 1: checked if sent; 2: required.",
        bounds=Bounds(0, 2, "0 (no certificates), 1 (optional) or 2 (required)"),
    )
    ssl_ciphers: str | None = option(
        None, "Ciphers of TLS 1.2 as an OpenSSL list; none: OpenSSL's choice. The ciphers of TLS 1.3 are fixed."
    )
    enable_ssl_refresh: bool = option(False, "Read certificates, key and authorities again when their files change.")
    api_key: tuple[str, ...] = option((), "Keys clients must send; else VLLM_API_KEY.", many=True, secret=True)
    api_key_file: str | None = option(
        None, "File with further keys, one a line; empty lines and lines that begin with # are skipped."
    )
    no_auth: bool = option(False, "Allow an address other than loopback without a key.")
    chat_template: str | None = option(None, "File with a Jinja chat template, or the template itself.")
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "JSON object of variables for the chat template; a request's own variables come first.", type="json"
    )
    response_role: str = option("assistant", "Role of the answers.")
    enable_auto_tool_choice: bool = option(
        True, "The model may call tools where tool_choice is auto; this needs a tool call parser."
    )
    tool_call_parser: str | None = option(
        None,
        "How the model writes tool calls; otherwise the chat template says it.",
        choices=(*TOOL_PARSERS, NO_PARSER),
    )
    reasoning_parser: str | None = option(
        None,
        "How the model writes its reasoning; otherwise the chat template says it.",
        choices=(*REASONING_PARSERS, NO_PARSER),
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "The chat template does not see the tools of a request with tool_choice none."
    )
    return_tokens_as_token_ids: bool = option(
        False, "Logprobs name tokens token_id:<id>, unless a request says otherwise."
    )
    prometheus_public: bool = option(False, "GET /metrics needs no key, for scrapers that have none.")
    enable_tokenizer_info_endpoint: bool = option(
        False, "GET /tokenizer_info answers with the tokenizer's configuration and the chat template."
    )
    enable_force_include_usage: bool = option(
        False, "Every chunk of a streamed answer has its usage, whatever the request says."
    )
    enable_per_request_metrics: bool = option(
        False, "Answers say in metrics where their time went; a stream says it beside its usage."
    )
    uvicorn_log_level: str = option(
        "warning", "Log level of the HTTP server.", choices=("critical", "error", "warning", "info", "debug", "trace")
    )
    log_level: str | None = option(
        None,
        "Log level of Quire; else VLLM_LOGGING_LEVEL.",
        choices=("debug", "info", "warning", "error"),
        type=str.lower,
    )
    log_format: str | None = option(
        None,
        "text, or json: one object per line, the first screen too; else QUIRE_LOG_FORMAT.",
        choices=("text", "json"),
    )
    disable_uvicorn_access_log: bool = option(False, "Accepted: the access log is off.")
    shutdown_timeout: float = option(
        30.0,
        "Seconds to let running requests finish on SIGTERM.",
        limits="the time of a drain",
        bounds=Bounds(0, sys.float_info.max, "a number of seconds, 0 or more, and not infinite"),
    )
    legacy_metric_names: bool = option(False, "Show metrics under the names of old guides and dashboards as well.")
    allowed_origins: tuple[str, ...] = option(
        (), "Origins whose web pages may call the server (CORS), * for any; words or a JSON list.", many=True
    )
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that these pages may use.", many=True)
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that these pages may send.", many=True)
    allow_credentials: bool = option(False, "These pages may send cookies; not where any origin is allowed.")
    fail_on_environ_validation: bool = option(False, "Refuse to start with an unknown VLLM_* or QUIRE_* variable.")
    sources: dict[str, Source] = field(default_factory=dict, compare=False, repr=False)  # where values come from

    def __post_init__(self) -> None:
        normalise(self)
        check_types(self)
        check_values(self)
        complete_sources(self)
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _listed(getattr(self, name), name))
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "Any web page could act in the name of a user who is logged in",
                fix="Name the origins in --allowed-origins, or leave out --allow-credentials",
                param="allow_credentials",
            )
        _check_listening(self)


def _check_listening(config: ServerConfig) -> None:
    object.__setattr__(config, "root_path", config.root_path.rstrip("/"))
    if config.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", config.root_path, re.ASCII):
        raise ConfigError(
            "Illegal root_path", value=config.root_path, expected="a path such as /llm", param="root_path"
        )
    if config.uds == "":
        raise ConfigError("The path of the Unix socket is empty", fix="Give --uds a path", param="uds")
    for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"):
        if getattr(config, name) and config.ssl_certfile is None:
            raise ConfigError(f"{name} needs a certificate of the server", fix="Give --ssl-certfile too", param=name)
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError(
            "Clients need certificates, but no authority is named that may sign them",
            fix="Give --ssl-ca-certs too, or leave out --ssl-cert-reqs",
            param="ssl_cert_reqs",
        )


def _listed(words: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The words; a word that is a JSON list, as vLLM takes it, stands for its items."""
    result: list[str] = []
    for word in words:
        items = [word]
        if word.startswith("["):
            try:
                items = json.loads(word)
            except (ValueError, RecursionError):
                items = []
            if not items or not all(isinstance(item, str) for item in items):
                raise ConfigError(
                    f"Illegal {name}", value=word, expected='words, or a JSON list such as ["*"]', param=name
                )
        result += items
    return tuple(result)


def _unknown_argument(name: str, known: set[str]) -> ConfigError:
    if name in {f.name for f in options(ServerConfig)}:
        fix = "It is a setting of `quire serve`"
    else:
        near = nearest(name, known, FOREIGN)
        fix = f"Did you mean {near!r}?" if near else "quire serve --help lists the arguments"
    return ConfigError(f"Unknown engine argument {name!r}", fix=fix, param=name)


def _take_slo(config: EngineConfig) -> None:
    """Replace `slo` by the settings that it stands for."""
    if config.slo is None:
        return
    source = config.sources.get("slo", "argument")
    for part in config.slo.split(","):
        name, _, text = part.strip().partition("=")
        if name == "tpot":
            logger.warning("tpot in --slo is taken as itl: a mean over an answer would hide pauses in the answer")
            name = "itl"
        if name not in ("ttft", "itl"):
            raise ConfigError(
                "Illegal target", value=config.slo, expected="ttft=500ms, itl=50ms, or both with a comma", param="slo"
            )
        seconds, setting = parse_duration(text), f"slo_{name}"
        if getattr(config, setting) not in (None, seconds):
            raise ConfigError(
                f"slo and {setting} say different things",
                value=[seconds, getattr(config, setting)],
                fix="Leave one of the two out",
                param="slo",
            )
        object.__setattr__(config, setting, seconds)
        config.sources[setting] = source
    object.__setattr__(config, "slo", None)
    config.sources.pop("slo", None)


def max_draft(config: EngineConfig) -> int:
    """The number of tokens of the longest draft; 0: nothing drafts."""
    return 0 if config.speculative_config is None else config.speculative_config.num_speculative_tokens


_KEYS_OF_SPECULATION = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def _take_lanes_of_machines(config: EngineConfig) -> None:
    """Take vLLM's settings for lanes on several machines as nnodes and node_rank."""
    num_lanes, local = config.num_lanes, config.data_parallel_size_local
    if num_lanes == 1 or config.has_ray_replicas:
        return
    if local is not None:
        if local < 1 or num_lanes % local:
            raise ConfigError(
                "Machines cannot have so many lanes each",
                value=local,
                expected=f"a divisor of data_parallel_size = {num_lanes}: all machines have the same number of lanes",
                param="data_parallel_size_local",
            )
        _take_as(config, "data_parallel_size_local", "nnodes", num_lanes // local)
    first, count = config.data_parallel_start_rank, config.nnodes
    if first and count > 0 and num_lanes % count == 0:  # another number of machines is refused later
        starts = range(0, num_lanes, num_lanes // count)
        if first not in starts:
            raise ConfigError(
                "No machine begins with this lane",
                value=first,
                expected=", ".join(map(str, starts)),
                fix="Give --data-parallel-size-local, the number of lanes of each machine, or --nnodes",
                param="data_parallel_start_rank",
            )
        _take_as(config, "data_parallel_start_rank", "node_rank", starts.index(first))


def _take_as(config: EngineConfig, name: str, setting: str, value: int) -> None:
    """Set a setting that another one stands for. Raises ConfigError if both are given, with different meanings."""
    default, given = getattr(EngineConfig, setting), getattr(config, setting)
    if given not in (default, value):
        raise ConfigError(
            f"{setting} and {name} say different things",
            value=f"{setting} = {given}, and {name} = {getattr(config, name)}, which is {setting} = {value}",
            fix="Leave one of the two out",
            param=name,
        )
    object.__setattr__(config, setting, value)


def _take_speculation(config: EngineConfig) -> None:
    """Make one SpeculativeConfig from an object of keys and from the settings that stand for one key each."""
    given = config.speculative_config
    parts = {name: value for name in _KEYS_OF_SPECULATION if (value := getattr(config, name)) is not None}
    if isinstance(given, SpeculativeConfig) and not parts:
        return
    names = ["speculative_config"] * (given is not None) + [*parts]
    if not names:
        return
    if given is not None and not isinstance(given, dict):
        whole = isinstance(given, SpeculativeConfig)
        raise ConfigError(
            "speculative_config is given both as a whole and in parts"
            if whole
            else "speculative_config has the wrong type",
            value=[*parts] if whole else given,
            expected=None if whole else 'an object such as {"method": "ngram"}',
            fix=f"Leave {', '.join(parts)} out" if whole else None,
            param="speculative_config",
        )
    keys: dict[str, Any] = dict(given or {})
    for name, value in parts.items():
        if keys.setdefault(_KEYS_OF_SPECULATION[name], value) != value:
            raise ConfigError(
                f"{name} and speculative_config say different things",
                value=[value, keys[_KEYS_OF_SPECULATION[name]]],
                fix="Leave one of the two out",
                param=name,
            )
    try:
        made = speculative_config_of(keys) if keys else None
    except ConfigError as error:
        error.param = names[0]
        raise
    object.__setattr__(config, "speculative_config", made)
    config.sources["speculative_config"] = config.sources.get(names[0], "argument") if keys else "default"
    for name in parts:
        object.__setattr__(config, name, None)
        config.sources.pop(name, None)
