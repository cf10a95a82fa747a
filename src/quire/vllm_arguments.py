"""vLLM's engine arguments without a setting here: those that would change nothing, and those that must be neutral.

They are accepted in LLM(...) and on the command line, so that scripts and command lines written for vLLM run.
"""

from __future__ import annotations

from typing import Any

from quire.errors import ConfigError
from quire.logs import get_logger

logger = get_logger(__name__)

_NO_GRAPHS = "nothing is compiled or captured on CPU"
_ONE_DEVICE = "there is one device"

# Only about speed or about machinery that does not exist here: any value is accepted, and a log line says why it is
# without effect. name -> (type of its flag, reason)
NO_EFFECT: dict[str, tuple[type, str]] = {
    "compilation_config": (str, _NO_GRAPHS),
    "optimization_level": (str, _NO_GRAPHS),
    "max_seq_len_to_capture": (str, _NO_GRAPHS),
    "max_cudagraph_capture_size": (str, _NO_GRAPHS),
    "disable_custom_all_reduce": (bool, _ONE_DEVICE),
    "distributed_executor_backend": (str, _ONE_DEVICE),
    "max_parallel_loading_workers": (str, _ONE_DEVICE),
    "disable_async_output_proc": (bool, "output is always processed beside the engine"),
    "disable_cascade_attn": (bool, "attention chooses by itself"),
    "disable_log_requests": (bool, "requests are not logged"),
    "limit_mm_per_prompt": (str, "models read text only"),
    "mm_processor_cache_gb": (str, "models read text only"),
    "prefix_caching_hash_algo": (str, "cached blocks are always found by a cryptographic hash"),
    "swap_space": (str, "preempted requests are recomputed; nothing is swapped"),
    "use_tqdm_on_load": (bool, "progress is shown on terminals only"),
    "use_v2_block_manager": (bool, "there is one block manager"),
}

# Would change what happens: accepted where the value is the one that means "off" or "as always", refused otherwise.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("", None),
    "api_server_count": (1, None),
    "attention_backend": ("auto", None),
    "code_revision": (None,),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0, None),
    "data_parallel_size": (1, None),
    "decode_context_parallel_size": (1, None),
    "disable_sliding_window": (False,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_sleep_mode": (False,),
    "guide": (0, None),
    "hf_config_path": (None,),
    "kv_offloading_size": (0, None),
    "kv_transfer_config": (None,),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "nnodes": (1, None),
    "num_speculative_tokens": (None,),
    "performance_mode": ("balanced", None),
    "pipeline_parallel_size": (1, None),
    "pooler_config": (None,),
    "prefill_context_parallel_size": (1, None),
    "reasoning_parser": ("", None),
    "runner": ("auto", "generate"),
    "scheduler_reserve_full_isl": (True,),
    "spec_method": (None,),
    "spec_model": (None,),
    "spec_tokens": (None,),
    "speculative_config": (None,),
    "speculative_model": (None,),
    "stream_interval": (1, None),
    "structured_outputs_config": (None, {}),
    "task": ("auto", "generate"),
}


def drop_foreign(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those above. Raises ConfigError for a value that Quire cannot honour."""
    for name in arguments.keys() & NEUTRAL.keys():
        value, accepted = arguments[name], NEUTRAL[name]
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted):
            raise ConfigError(
                f"vLLM's {name} is not supported in this version",
                value=value,
                expected="its neutral value, " + " or ".join(map(repr, accepted)),
                fix=f"Leave {name} out",
                param=name,
            )
    for name in sorted(arguments.keys() & NO_EFFECT.keys()):
        if arguments[name] is not None:
            logger.warning("%s has no effect: %s", name, NO_EFFECT[name][1])
    return {name: value for name, value in arguments.items() if name not in NEUTRAL and name not in NO_EFFECT}


def flag_type(name: str) -> type:
    """What the flag of a foreign argument takes: bool for one without a value, else the type of the value."""
    if name in NO_EFFECT:
        return NO_EFFECT[name][0]
    return type(next((value for value in NEUTRAL[name] if value is not None and value not in ([], {})), ""))
