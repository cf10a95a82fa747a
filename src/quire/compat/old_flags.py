"""Flags of vLLM 0.1 to 0.31 that 0.32 no longer has, and flags of guides that no version had."""

from __future__ import annotations

from typing import Any

from quire.compat.engine_flags import KERNELS, NO_GRAPHS, POOLING, TEXT_ONLY
from quire.compat.foreign import Foreign, Shape, accepted, refused, translated
from quire.errors import ConfigError


def _key_of_speculation(name: str, key: str) -> Foreign:
    return translated(name, "speculation has one setting", lambda value: {"speculative_config": {key: value}})


def _key_of_balancing(name: str, key: str, shape: Shape = "value") -> Foreign:
    return translated(name, "experts are balanced by one setting", lambda value: {"eplb_config": {key: value}}, shape)


def _rope_parameters(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            "rope_scaling is not a JSON object", value=value, expected='{"rope_type": ...}', param="rope_scaling"
        )
    return {"hf_overrides": {"rope_parameters": value}}


OLD_FLAGS: tuple[Foreign, ...] = (
    # Speculative decoding before --speculative-config.
    _key_of_speculation("speculative_model", "model"),
    _key_of_speculation("num_speculative_tokens", "num_speculative_tokens"),
    _key_of_speculation("speculative_model_quantization", "quantization"),
    _key_of_speculation("speculative_draft_tensor_parallel_size", "draft_tensor_parallel_size"),
    _key_of_speculation("speculative_max_model_len", "max_model_len"),
    _key_of_speculation("speculative_disable_by_batch_size", "disable_by_batch_size"),
    _key_of_speculation("ngram_prompt_lookup_max", "prompt_lookup_max"),
    _key_of_speculation("ngram_prompt_lookup_min", "prompt_lookup_min"),
    *accepted("drafts are verified in the one way there is", values="speculative_disable_mqa_scorer"),
    *accepted("room for drafts is made where there are drafts", values="num_lookahead_slots", off=(0,)),
    *accepted(
        "logprobs always come from the model",
        switches="disable_logprobs_during_spec_decoding",
        off=(True, False),
    ),
    *refused(
        "a draft is accepted only if the model samples it, so that no token changes",
        values="spec_decoding_acceptance_method",
        off=("rejection_sampler",),
    ),
    *refused(
        "it belongs to typical acceptance, which changes the tokens",
        values="typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha",
    ),
    # Memory.
    *accepted(
        "preempted requests are computed again; nothing is swapped, and nothing to set",
        values="swap_space preemption_mode",
    ),
    *accepted("there is one block manager", switches="use_v2_block_manager"),
    *accepted("prompts are packed without padding", values="max_paddings"),
    *accepted(
        "fp8 KV caches need no scales here, and int8 measures one for each token and head",
        switches="calculate_kv_scales",
        values="quantization_param_path",
    ),
    # Formats.
    *refused(
        "an adapter is named by requests, whatever the base's format",
        "Use --lora-modules",
        values="qlora_adapter_name_or_path",
    ),
    *refused("tensorizer checkpoints are not read", "Use safetensors", values="tensorizer_uri"),
    # Model.
    *refused(POOLING, off=("auto", "generate"), values="task"),
    *refused(POOLING, values="override_pooler_config"),
    translated("rope_scaling", "an override of config.json", _rope_parameters),
    *refused("it is part of config.json", """Use --hf-overrides '{"rope_theta": ...}'""", values="rope_theta"),
    *accepted(KERNELS, values="override_attention_dtype"),
    *accepted("other devices are not in this version", values="override_neuron_config"),
    # Graphs.
    *accepted(
        NO_GRAPHS,
        values="max_context_len_to_capture max_seq_len_to_capture",
        lists="cuda_graph_sizes",
        switches="full_cuda_graph",
    ),
    # Steps and schedule.
    *accepted("output is always processed beside the engine", switches="disable_async_output_proc"),
    *accepted("a step is one pass; --async-scheduling hides the scheduling", off=(1,), values="num_scheduler_steps"),
    *accepted("tokens are streamed as they come", switches="multi_step_stream_outputs", off=(True,)),
    *accepted("prompts are admitted as soon as they fit", off=(0, 0.0), values="scheduler_delay_factor"),
    *accepted(
        "one token budget bounds all prompts of a step; --long-prefill-token-threshold bounds each",
        off=(1,),
        values="max_num_partial_prefills max_long_partial_prefills",
    ),
    # Processes.
    translated(
        "worker_use_ray",
        "Ray is one of the ways to start ranks",
        lambda value: {"distributed_executor_backend": "ray"} if value else {},
        "switch",
    ),
    *accepted("the engine has a process of its own", switches="engine_use_ray disable_frontend_multiprocessing"),
    *accepted(
        "long prompts are tokenized in threads of the API process",
        values="tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config",
        off=(0,),
    ),
    *accepted(TEXT_ONLY, switches="enable_multimodal_encoder_data_parallel"),
    _key_of_balancing("num_redundant_experts", "num_redundant_experts"),
    _key_of_balancing("eplb_window_size", "window_size"),
    _key_of_balancing("eplb_step_interval", "step_interval"),
    _key_of_balancing("eplb_log_balancedness", "log_balancedness", "switch"),
    # Adapters.
    *accepted("a vocabulary never grows here", values="lora_extra_vocab_size"),
    *refused("adapters with biases are not read", "Merge the adapter into the model", switches="enable_lora_bias"),
    *refused("an adapter has the scale of its adapter_config.json", "Leave it out", values="long_lora_scaling_factors"),
    *refused(
        "prompt adapters are gone from vLLM too",
        "Put the text into the prompt",
        switches="enable_prompt_adapter",
        lists="prompt_adapters",
    ),
    *accepted("prompt adapters are gone from vLLM too", values="max_prompt_adapters max_prompt_adapter_token"),
    # Structured output and reasoning.
    *accepted(
        "one grammar engine reads every constraint; requests say what whitespace they allow",
        values="guided_decoding_backend",
        switches="""
            guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
            guided_decoding_disable_additional_properties
        """,
    ),
    *refused("requests bring no logits processors", values="logits_processor_pattern"),
    *accepted("a reasoning parser is enough", switches="enable_reasoning"),
    # Images.
    *accepted(
        TEXT_ONLY,
        values="""
            image_input_type image_token_id image_input_shape image_feature_size image_processor
            image_processor_revision chat_template_text_format
        """,
        switches="disable_image_processor disable_mm_preprocessor_cache",
    ),
    # Logs.
    *accepted("requests are not logged", switches="disable_log_requests"),
    *accepted(
        "every step leaves a record in /metrics",
        switches="collect_model_forward_time collect_model_execute_time",
    ),
)

# Names that guides made up.
INVENTED_FLAGS: tuple[Foreign, ...] = (
    *refused(
        "no version of vLLM had it; the number of drafts is --spec-tokens",
        "Use --spec-tokens, with --spec-method or --spec-model",
        off=(0,),
        values="num_speculative_decoder_samples",
    ),
)
