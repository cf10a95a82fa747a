"""Flags of other servers, and their counterparts here. `quire explain` answers with these tables, and
docs/coming-from.md has them.

Facts are of llama.cpp b7100 (llama-server), Ollama 0.13 (Modelfile), SGLang 0.5 and TGI 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.compat.foreign import Foreign, Kind, Shape
from quire.compat.pasted import PastedCommand, Program
from quire.errors import ConfigError


@dataclass(frozen=True)
class PeerFlag:
    """One flag of another server.

    Args:
        flags: its spellings. The longest name comes first.
        to: the setting that it becomes, or `setting.key` of a JSON object; "": it becomes none.
        text: the alternative, or the difference, without a full stop.
        instead: the advice for a refused flag.
        convert: makes our value from the value of the flag.
    """

    flags: tuple[str, ...]
    kind: Kind
    text: str
    to: str = ""
    instead: str = ""
    shape: Shape = "value"
    off: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        return self.flags[0].lstrip("-").replace("-", "_")

    def foreign(self) -> Foreign:
        """The flag in the form of the table of vLLM's names."""
        becomes = self._becomes if self.kind == "translated" else None
        off = self.off or ((False,) if self.shape == "switch" else ())
        return Foreign(self.name, self.kind, self.text, self.instead, self.shape, off, becomes)

    def _becomes(self, value: Any) -> dict[str, Any]:
        setting, _, key = self.to.partition(".")
        value = value if self.convert is None else self.convert(value)
        return {setting: {key: value} if key else value}


@dataclass(frozen=True)
class Peer:
    """Another server.

    Args:
        title: its name.
        option: the option of `quire explain`.
        program: the beginning of its command; None: it has a Modelfile.
    """

    title: str
    option: str
    program: Program | None
    flags: tuple[PeerFlag, ...]

    @property
    def foreign(self) -> dict[str, Foreign]:
        return {flag.name: flag.foreign() for flag in self.flags}


def _to(flags: str, to: str, text: str = "the same", **more: Any) -> PeerFlag:
    return PeerFlag(tuple(flags.split()), "translated", text, to, **more)


def _none(text: str, values: str = "", switches: str = "", **more: Any) -> Iterator[PeerFlag]:
    """Flags without effect here. The spellings of one flag are joined with commas."""
    yield from _each("accepted", text, "", values, switches, **more)


def _no(text: str, instead: str, values: str = "", switches: str = "", **more: Any) -> Iterator[PeerFlag]:
    """Flags that are refused. The spellings of one flag are joined with commas."""
    yield from _each("refused", text, instead, values, switches, **more)


def _each(kind: Kind, text: str, instead: str, values: str, switches: str, **more: Any) -> Iterator[PeerFlag]:
    shapes: tuple[tuple[Shape, str], ...] = (("value", values), ("switch", switches))
    for shape, flags in shapes:
        for spellings in flags.split():
            yield PeerFlag(tuple(spellings.split(",")), kind, text, instead=instead, shape=shape, **more)


def _chosen(param: str, values: dict[str, Any], otherwise: str) -> Callable[[Any], Any]:
    """A function that makes our value from another server's value. It raises ConfigError for an unknown value."""

    def convert(value: Any) -> Any:
        name = str(value).lower()
        if name not in values:
            raise ConfigError(
                f"{param} has a value that Quire does not know", value=value, expected=", ".join(values), fix=otherwise
            )
        return values[name]

    return convert


def _listed(value: Any) -> list[str]:
    return [str(value)]


def _ollama_model(value: Any) -> str:
    """The file or the repository of the hub that a value names. Raises ConfigError for a name of Ollama's registry."""
    name = str(value)
    for hub in ("hf.co/", "huggingface.co/"):
        if name.startswith(hub):
            return name.removeprefix(hub)
    if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        return name
    raise ConfigError(
        "FROM names a model of Ollama's registry, which is not read",
        value=name,
        expected="a GGUF file, a folder, or hf.co/ and a hub id",
        fix="Name the same model on the hub: hf.co/repository:Q4_K_M",
        param="from",
    )


_DEFAULTS = "a default of requests: --override-generation-config"
_CACHE_TYPES = _chosen(
    "The type of the KV cache",
    {"f16": "auto", "bf16": "auto", "f32": "auto", "q8_0": "int8"},
    "Use q8_0, which is int8 here",
)
_SEQUENCES = "requests that run at once. Their memory is shared: nothing is divided among them"
_PENALTY = "it looks at the whole text here"
_MIROSTAT = "Mirostat is not in this version"

_LLAMA_CPP = (
    _to("--model -m", "model", "GGUF file, or a folder of safetensors"),
    _to("--hf-repo -hf -hfr", "model", "`repository:Q4_K_M` names one of several GGUF files"),
    _to("--hf-file -hff", "gguf_file"),
    _to("--hf-token -hft", "hf_token"),
    _to("--alias -a", "served_model_name", convert=_listed),
    _to(
        "--ctx-size -c",
        "max_model_len",
        "of one request. There it is divided among the slots of -np; the KV cache takes the memory that is free",
        off=(0,),
    ),
    _to("--predict -n --n-predict", "override_generation_config.max_new_tokens", _DEFAULTS, off=(-1, -2)),
    _to("--batch-size -b", "max_num_batched_tokens", "tokens of a step"),
    _to("--parallel -np", "max_num_seqs", _SEQUENCES, off=(-1,)),
    _to("--threads -t", "num_threads", "without it: the physical cores", off=(-1,)),
    _to("--cache-type-k -ctk", "kv_cache_dtype", "keys and values have one type", convert=_CACHE_TYPES),
    _to("--cache-type-v -ctv", "kv_cache_dtype", "keys and values have one type", convert=_CACHE_TYPES),
    _to("--host", "host"),
    _to("--port", "port", "8000 without it"),
    _to("--api-key", "api_key", convert=lambda value: str(value).split(",")),
    _to("--api-key-file", "api_key_file"),
    _to("--ssl-key-file", "ssl_keyfile"),
    _to("--ssl-cert-file", "ssl_certfile"),
    _to("--api-prefix", "root_path"),
    _to("--chat-template-file", "chat_template"),
    _to("--chat-template", "chat_template", "a file or the template itself; names of built-in templates are none here"),
    _to("--model-draft -md", "speculative_config.model", "draft model"),
    _to("--draft-max --draft --draft-n", "speculative_config.num_speculative_tokens", "drafted tokens of a step"),
    _to("--seed -s", "seed", off=(-1,)),
    _to("--temp", "override_generation_config.temperature", _DEFAULTS),
    _to("--top-k", "override_generation_config.top_k", _DEFAULTS),
    _to("--top-p", "override_generation_config.top_p", _DEFAULTS),
    _to("--min-p", "override_generation_config.min_p", _DEFAULTS),
    _to("--repeat-penalty", "override_generation_config.repetition_penalty", _DEFAULTS),
    *_none("a step is one batch", "--ubatch-size,-ub"),
    *_none("requests join and leave at every step anyway", switches="--cont-batching,-cb"),
    *_none("prompts and answers share the threads", "--threads-batch,-tb --threads-http"),
    *_none(
        "all layers run on the kind of device that --device names", "--n-gpu-layers,-ngl,--gpu-layers --split-mode,-sm"
    ),
    *_none("attention is always fused", "--flash-attn,-fa"),
    *_none("weights are packed into memory of their own", switches="--mmap --mlock --repack"),
    *_none("templates are always read as Jinja's", switches="--jinja"),
    *_none("the model's format is found by its chat template; --reasoning-parser names one", "--reasoning-format"),
    *_none("GET /metrics is always there", switches="--metrics"),
    *_none("GET /v1/steps and GET /load say what runs", switches="--slots --props"),
    *_none("prefixes are shared block by block anyway", "--cache-reuse --slot-prompt-similarity,-sps"),
    *_none("the first token is produced before the server is ready", switches="--warmup"),
    *_none(_PENALTY, "--repeat-last-n"),
    *_none("lines have a level: --log-level", "--verbosity,-lv", "--log-disable --verbose,-v"),
    *_none("clients have --shutdown-timeout seconds at the end, and no limit before", "--timeout,-to"),
    *_no("contexts are not shifted", "Leave it out; set --max-model-len", switches="--context-shift"),
    *_no(
        "only text generation is in this version",
        "Leave it out",
        "--mmproj,-mm",
        "--embedding,--embeddings --reranking,--rerank",
    ),
    *_no("adapters are PEFT's, in safetensors", "Use --enable-lora --lora-modules name=folder", "--lora --lora-scaled"),
    *_no("slots are not stored", "Leave it out", "--slot-save-path"),
    *_no(
        "config values are replaced by --hf-overrides",
        "Use --hf-overrides",
        "--override-kv --rope-scaling --rope-freq-base",
    ),
    *_no(_MIROSTAT, "Leave it out", "--mirostat", off=(0,)),
    *_no("the page of this server is fixed", "Leave it out", "--path"),
)

_OLLAMA = (
    _to("--from", "model", "a GGUF file, a folder, or hf.co/ and a hub id", convert=_ollama_model),
    _to("--num-ctx", "max_model_len", "of one request", off=(0,)),
    _to("--num-predict", "override_generation_config.max_new_tokens", _DEFAULTS, off=(-1, -2)),
    _to("--num-thread", "num_threads", "without it: the physical cores", off=(0,)),
    _to("--num-batch", "max_num_batched_tokens", "tokens of a step"),
    _to("--seed", "seed", off=(0,)),
    _to("--temperature", "override_generation_config.temperature", _DEFAULTS),
    _to("--top-k", "override_generation_config.top_k", _DEFAULTS),
    _to("--top-p", "override_generation_config.top_p", _DEFAULTS),
    _to("--min-p", "override_generation_config.min_p", _DEFAULTS),
    _to("--repeat-penalty", "override_generation_config.repetition_penalty", _DEFAULTS),
    *_none("all layers run on the kind of device that --device names", "--num-gpu --main-gpu"),
    *_none(_PENALTY, "--repeat-last-n"),
    *_none("weights are packed into memory of their own", "--use-mmap --use-mlock --low-vram --numa"),
    *_none("a request ends where its context is full", "--num-keep"),
    *_none("it says something about the file, and nothing to the server", "--license --requires"),
    *_no("requests send their stop strings, and the chat template has its own", "Send `stop` with requests", "--stop"),
    *_no("templates are Jinja's, and the model's own is used", "Leave it out, or give --chat-template", "--template"),
    *_no("requests send their messages", "Send a message with the role system", "--system --message"),
    *_no("adapters are PEFT's, in safetensors", "Use --enable-lora --lora-modules name=folder", "--adapter"),
    *_no(_MIROSTAT, "Leave it out", "--mirostat --mirostat-eta --mirostat-tau", off=(0,)),
    *_no(
        "tail-free and typical sampling are not in this version", "Leave it out", "--tfs-z --typical-p", off=(1, "1.0")
    ),
)

_SGLANG = (
    _to("--model-path --model", "model"),
    _to("--tokenizer-path", "tokenizer"),
    _to("--served-model-name", "served_model_name", convert=_listed),
    _to("--host", "host"),
    _to("--port", "port", "8000 without it"),
    _to("--context-length", "max_model_len"),
    _to("--mem-fraction-static", "gpu_memory_utilization", "weights, KV cache and work memory together"),
    _to("--max-running-requests", "max_num_seqs", "requests that run at once; without it, chosen"),
    _to("--max-queued-requests", "max_num_queued_reqs"),
    _to("--chunked-prefill-size", "max_num_batched_tokens", "tokens of a step, decodes included"),
    _to("--page-size", "block_size"),
    _to("--kv-cache-dtype", "kv_cache_dtype"),
    _to("--dtype", "dtype"),
    _to("--quantization", "quantization"),
    _to("--load-format", "load_format"),
    _to("--revision", "revision"),
    _to("--download-dir", "download_dir"),
    _to("--device", "device"),
    _to("--tp-size --tp --tensor-parallel-size", "tensor_parallel_size"),
    _to("--pp-size --pp --pipeline-parallel-size", "pipeline_parallel_size"),
    _to("--nnodes", "nnodes"),
    _to("--node-rank", "node_rank"),
    _to("--dp-size --dp --data-parallel-size", "data_parallel_size"),
    _to("--api-key", "api_key", convert=_listed),
    _to("--log-level", "log_level", convert=lambda value: str(value).upper()),
    _to("--chat-template", "chat_template"),
    _to("--tool-call-parser", "tool_call_parser"),
    _to("--reasoning-parser", "reasoning_parser"),
    _to("--random-seed", "seed"),
    _to("--json-model-override-args", "hf_overrides"),
    _to("--otlp-traces-endpoint", "otlp_traces_endpoint"),
    _to("--enable-deterministic-inference", "deterministic", shape="switch"),
    _to("--disable-cuda-graph", "enforce_eager", shape="switch"),
    _to(
        "--disable-radix-cache",
        "enable_prefix_caching",
        "prefix caching off",
        shape="switch",
        convert=lambda value: not value,
    ),
    _to("--cuda-graph-max-bs", "max_cudagraph_capture_size"),
    _to(
        "--enable-priority-scheduling",
        "scheduling_policy",
        "priority",
        shape="switch",
        convert=lambda value: "priority",
    ),
    _to("--enable-lora", "enable_lora", shape="switch"),
    _to("--lora-paths", "lora_modules", shape="list"),
    _to("--max-loras-per-batch", "max_loras"),
    _to("--max-lora-rank", "max_lora_rank"),
    _to(
        "--speculative-algorithm",
        "speculative_config.method",
        "EAGLE3 is eagle3, NGRAM ngram, STANDALONE draft_model",
        convert=_chosen(
            "The algorithm",
            {"eagle3": "eagle3", "ngram": "ngram", "standalone": "draft_model"},
            "docs/speculation.md has the methods",
        ),
    ),
    _to("--speculative-draft-model-path", "speculative_config.model"),
    _to("--speculative-num-draft-tokens", "speculative_config.num_speculative_tokens"),
    *_none(
        "drafts are chains, as long as --speculative-num-draft-tokens",
        "--speculative-num-steps --speculative-eagle-topk",
    ),
    *_none("a step holds prompts and answers in one budget", "--max-prefill-tokens --schedule-conservativeness"),
    *_none("requests are taken in their order, and equal prefixes are computed once", "--schedule-policy"),
    *_none(
        "kernels are chosen by the machine: quire explain",
        "--attention-backend --sampling-backend",
        "--enable-torch-compile",
    ),
    *_none("one grammar engine reads every constraint", "--grammar-backend"),
    *_none("GET /metrics is always there", switches="--enable-metrics --enable-trace"),
    *_none("a stuck engine is replaced", "--watchdog-timeout"),
    *_none("tokens are streamed as they come", "--stream-interval --tokenizer-worker-num"),
    *_none("requests are counted in /metrics, not logged", switches="--log-requests"),
    *_no("the KV cache is sized in bytes", "Use --kv-cache-memory-bytes", "--max-total-tokens"),
    *_no(
        "all ranks of a stage share the experts",
        "Use --enable-expert-parallel with --tensor-parallel-size",
        "--ep-size,--ep",
        off=(1,),
    ),
    *_no(
        "weights and KV cache stay in one memory",
        "Leave it out",
        "--cpu-offload-gb",
        "--enable-hierarchical-cache",
        off=(0,),
    ),
    *_no("only text generation is in this version", "Leave it out", switches="--is-embedding --enable-multimodal"),
    *_no("prompts and answers are computed on one server", "Leave it out", "--disaggregation-mode", off=("null",)),
    *_no("code from a model repository is never run", "Leave it out", switches="--trust-remote-code"),
    *_no(
        "a prompt that is too long is refused",
        "Send truncate_prompt_tokens with requests",
        switches="--allow-auto-truncate",
    ),
)

_TGI = (
    _to("--model-id", "model"),
    _to("--revision", "revision"),
    _to("--served-model-name", "served_model_name", convert=_listed),
    _to("--hostname", "host"),
    _to("--port -p", "port", "8000 without it"),
    _to("--dtype", "dtype"),
    _to("--kv-cache-dtype", "kv_cache_dtype"),
    _to(
        "--quantize",
        "quantization",
        "awq, gptq, fp8 and compressed-tensors are checkpoints' own",
        convert=str,
    ),
    _to("--num-shard", "tensor_parallel_size", "1 in this version"),
    _to("--max-total-tokens", "max_model_len", "prompt and answer of one request"),
    _to("--max-batch-size", "max_num_seqs", "requests that run at once"),
    _to("--max-batch-prefill-tokens", "max_num_batched_tokens", "tokens of a step, decodes included"),
    _to("--max-concurrent-requests", "max_num_queued_reqs", "waiting requests; more get 429"),
    _to("--max-top-n-tokens", "max_logprobs"),
    _to("--cuda-memory-fraction", "gpu_memory_utilization"),
    _to("--speculate", "speculative_config.num_speculative_tokens", "n-gram drafts: add --spec-method ngram", off=(0,)),
    _to("--huggingface-hub-cache", "download_dir"),
    _to("--json-output", "log_format", "--log-format json", shape="switch", convert=lambda value: "json"),
    _to("--otlp-endpoint", "otlp_traces_endpoint"),
    _to("--cors-allow-origin", "allowed_origins", convert=_listed),
    _to("--api-key", "api_key", convert=_listed),
    *_none("the room is that of prompt and answer together", "--max-input-tokens,--max-input-length"),
    *_none("prompts join at every step", "--waiting-served-ratio --max-waiting-tokens"),
    *_none(
        "limits of requests are fixed: docs/serving.md",
        "--max-best-of --max-stop-sequences --max-client-batch-size --payload-limit",
    ),
    *_none("OTEL_SERVICE_NAME says it", "--otlp-service-name"),
    *_none("nothing is reported to anybody", "--usage-stats"),
    *_none("there are no shards to connect", "--shard-uds-path --master-addr --master-port --validation-workers"),
    *_none("logprobs of prompts are computed when asked for", switches="--enable-prefill-logprobs"),
    *_none("GET /metrics is on the server's own port", "--prometheus-port"),
    *_no("the KV cache is sized in bytes", "Use --kv-cache-memory-bytes", "--max-batch-total-tokens"),
    *_no("output is not watermarked", "Leave it out", "--watermark-gamma --watermark-delta"),
    *_no("config values are replaced by --hf-overrides", "Use --hf-overrides", "--rope-scaling --rope-factor"),
    *_no("adapters have names", "Use --enable-lora --lora-modules name=folder", "--lora-adapters"),
    *_no("code from a model repository is never run", "Leave it out", switches="--trust-remote-code"),
    *_no("no tunnel is opened", "Leave it out", switches="--ngrok"),
)


def _program(title: str, image: str, *words: tuple[str, ...]) -> Program:
    expected = ", ".join(f"`{' '.join(begin)} [flags]`" for begin in words)
    return Program(title, words, re.compile(rf"\S*{image}\S*"), f"{expected}, or the flags alone")


PEERS = (
    Peer("llama.cpp", "llama_server", _program("llama.cpp", r"llama\.cpp", ("llama-server",)), _LLAMA_CPP),
    Peer("Ollama", "modelfile", None, _OLLAMA),
    Peer(
        "SGLang",
        "sglang",
        _program("SGLang", "sglang", ("sglang", "serve"), ("-m", "sglang.launch_server")),
        _SGLANG,
    ),
    Peer("TGI", "tgi", _program("TGI", "text-generation-inference", ("text-generation-launcher",)), _TGI),
)

_INSTRUCTIONS = ("from", "template", "system", "adapter", "license", "message", "requires")
_INSTRUCTION = re.compile(r"\s*(\w+)[ \t]+(\"{3}.*?\"{3}|[^\n]*)", re.DOTALL)


def read_modelfile(text: str) -> PastedCommand:
    """An Ollama Modelfile as flags: `PARAMETER num_ctx 4096` is --num-ctx 4096. Raises ConfigError for other texts."""
    words: list[str] = []
    at = 0
    while at < len(text):
        end = text.find("\n", at)
        line = text[at : len(text) if end < 0 else end]
        if not line.strip() or line.lstrip().startswith("#"):
            at += len(line) + 1
            continue
        found = _INSTRUCTION.match(text, at)
        if found is None:
            raise _no_modelfile(line)
        name, value = found[1].lower(), found[2].strip().strip('"').strip()
        if name == "parameter":
            name, _, value = value.partition(" ")
        elif name not in _INSTRUCTIONS:
            raise _no_modelfile(line)
        words += [f"--{name.lower().replace('_', '-')}", value.strip().strip('"')]
        at = found.end() + 1
    if "--from" not in words:
        raise _no_modelfile(text.strip().partition("\n")[0])
    return PastedCommand(words)


def _no_modelfile(line: str) -> ConfigError:
    return ConfigError(
        "This is no Modelfile",
        value=line[:80],
        expected="lines such as `FROM model.gguf` and `PARAMETER num_ctx 4096`",
        fix="`ollama show --modelfile NAME` prints one",
        param="modelfile",
    )
