"""Chooses how a step runs on its device: the attention backend, deterministic kernels or not, and CUDA graphs."""

from __future__ import annotations

from quire import envs
from quire.config import ATTENTION_BACKENDS, EngineConfig
from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.layer_spec.attention import Full
from quire.model_config import ModelConfig
from quire.planning.flashinfer_facts import flashinfer_version, why_not_flashinfer
from quire.planning.graph_sizes import graph_sizes
from quire.settings import Choice, Record

# The values of QUIRE_ATTENTION_BACKEND beside vLLM's names.
_SHORT_ATTENTION_BACKENDS = {
    "triton": "TRITON_ATTN",
    "cpu": "CPU_ATTN",
    "reference": "reference",
}


def enforce_eager(config: EngineConfig, model: ModelConfig) -> Choice[bool]:
    """Whether steps are not captured. A captured step may only launch kernels, and never read a result on the host."""
    if config.enforce_eager:
        return True, config.sources["enforce_eager"], "no CUDA graphs"
    if not model.is_native or config.model_impl == "transformers":
        return True, "model", "transformers' modelling code is not captured in CUDA graphs"
    return False, config.sources["enforce_eager"], "decoding is captured in CUDA graphs"


def cudagraph_mode(config: EngineConfig, eager: Choice[bool], backend: Choice[str]) -> Choice[str]:
    """The mode of CUDA graphs: NONE, FULL_DECODE_ONLY or FULL. Graphs hold whole forward passes, with attention."""
    chosen, source = config.cudagraph_mode, config.sources["cudagraph_mode"]
    if eager[0]:
        return "NONE", *eager[1:]
    if backend[0] == "reference":
        return "NONE", backend[1], "the reference attention waits for the device, which a graph cannot hold"
    if chosen in ("NONE", "FULL_DECODE_ONLY"):
        return chosen, source, ""
    if backend[0] == "FLASHINFER":
        return "FULL_DECODE_ONLY", "device", "FlashInfer's kernels for mixed steps are not captured"
    return "FULL", source, "decodes by number of rows; mixed steps of few tokens, whose launches take longest"


def put_graph_sizes(record: Record, config: EngineConfig, mode: str, max_num_seqs: int, num_tokens: int) -> int:
    """Settle the sizes and their upper limit. As in vLLM, the settled limit is the largest size that is captured.

    Raises ConfigError if no size is within the limit, or if the limit contradicts the sizes.
    """
    wished, bound = config.cudagraph_capture_sizes, config.max_cudagraph_capture_size
    if mode != "NONE" and bound is not None:
        if bound < 1:
            raise ConfigError(
                "No CUDA graph is that small",
                value=bound,
                expected="a positive number",
                fix="Use --enforce-eager to capture nothing",
                param="max_cudagraph_capture_size",
            )
        largest = max((size for size in wished if size <= num_tokens), default=0)
        if wished and bound != largest:
            raise ConfigError(
                "--max-cudagraph-capture-size is not the largest of --cudagraph-capture-sizes",
                value=bound,
                expected=f"{largest}, the largest of {', '.join(map(str, wished))} that --max-num-batched-tokens "
                f"{num_tokens} holds",
                fix="Leave one of the two out",
                param="max_cudagraph_capture_size",
            )
    sizes = graph_sizes(mode, max_num_seqs, num_tokens, wished, bound)
    record.put("cudagraph_capture_sizes", wished, config.sources["cudagraph_capture_sizes"], sizes.describe())
    detail = "" if bound in (None, sizes.largest) else f"{bound} was asked for; {sizes.describe()}"
    source = config.sources["max_cudagraph_capture_size"]
    return record.put("max_cudagraph_capture_size", sizes.largest, source, detail)


def deterministic(config: EngineConfig, model: ModelConfig, device: str) -> Choice[bool]:
    """Whether the chosen kernels give a row the same bits in every batch."""
    chosen, source = config.deterministic, config.sources["deterministic"]
    if not chosen and envs.BATCH_INVARIANT.get():
        chosen, source = True, "environment"
    if device == "cpu":
        return chosen, source, "on CPU every path is, so it changes nothing"
    if not chosen:
        return False, source, "cuBLAS, _scaled_mm and the splitting of long sequences follow the number of rows"
    if not model.is_native or config.model_impl == "transformers":
        raise ConfigError(
            "transformers' modelling code is not deterministic on a GPU: its norms and products follow the batch",
            fix="Leave --deterministic out, or take a model with a native implementation",
            param="deterministic",
        )
    return True, source, "products in Triton instead of cuBLAS and _scaled_mm, attention in ranges of fixed keys"


def attention_backend(
    config: EngineConfig, model: ModelConfig, device: str, dtype: str, is_deterministic: bool
) -> Choice[str]:
    """The attention backend, by vLLM's name or "reference". Raises ConfigError for one that cannot be used."""
    chosen, source = config.attention_backend, config.sources["attention_backend"]
    fix = "Leave --attention-backend out"
    variable = envs.ATTENTION_BACKEND
    if chosen == "auto" and (named := variable.get()):
        known = {backend.lower(): backend for backend in ATTENTION_BACKENDS} | _SHORT_ATTENTION_BACKENDS
        if named.lower() not in known:
            raise ConfigError(
                "Unknown attention backend", value=named, expected="one of " + ", ".join(known), param=variable.name
            )
        chosen, source, fix = known[named.lower()], "environment", f"Unset {variable.name}"
    cache_dtype = kv_format(config.kv_cache_dtype, dtype).torch_dtype
    if device == "cpu":
        problem: str | None = "it runs on CUDA, and the model on the CPU"
    elif not model.is_native or config.model_impl == "transformers":
        problem = "transformers' modelling code runs"
    else:
        specs = model.kv_specs()
        head_dims, kinds = {spec.head_dim_k for spec in specs}, {"chunked": "chunks", "latent": "latent rows"}
        others = {kinds[spec.kind] for spec in specs if spec.kind in kinds}
        others |= {"sinks" for layer in model.layers if isinstance(layer.attention, Full) and layer.attention.sinks}
        problem = why_not_flashinfer(head_dims, dtype, cache_dtype, is_deterministic, others)
    if chosen == "FLASHINFER" and problem is not None:
        raise ConfigError(
            f"FlashInfer cannot be used: {problem}",
            value=chosen,
            fix=fix,
            param="attention_backend",
        )
    if chosen in ("TRITON_ATTN", "CPU_ATTN") and (chosen == "CPU_ATTN") != (device == "cpu"):
        raise ConfigError(
            f"{chosen} does not run on {'cpu' if device == 'cpu' else 'cuda'}",
            value=chosen,
            fix=fix,
            param="attention_backend",
        )
    if chosen == "FLASHINFER":
        return chosen, source, f"{flashinfer_version()} is installed, and takes this model"
    if chosen != "auto":
        return chosen, source, variable.name if source == "environment" else ""
    if device == "cpu":
        return chosen, source, "the CPU's kernels, or plain torch where they are not built"
    if problem is not None:
        return "TRITON_ATTN", "device", f"our own kernels; not FlashInfer: {problem}"
    why = f"FlashInfer {flashinfer_version()} takes this model too, but no GPU has shown which is faster"
    return "TRITON_ATTN", "device", f"our own kernels; {why}: --attention-backend FLASHINFER"
