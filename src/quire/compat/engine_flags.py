"""vLLM 0.32's engine flags that are no settings here, by their subject."""

from __future__ import annotations

from quire.compat.foreign import Foreign, accepted, refused, translated

NO_CODE = "no code is loaded by name"
OWN_REPLICAS = "a server runs all of its replicas, on other machines by Ray, and spreads requests over them itself"
_OWN_SERVERS = (
    "Use --data-parallel-backend ray, or start a server on each machine and spread requests over them from outside"
)
POOLING = "models here generate text; embedding, scoring and classification are not in this version"
TEXT_ONLY = "models here read text only"
TRANSFER = "KV caches are not moved between servers or tiers in this version"
KERNELS = "kernels are chosen for the device at start; --attention-backend and QUIRE_ISA name others"
NO_GRAPHS = (
    "nothing is compiled; --cudagraph-mode, --cudagraph-capture-sizes and --max-cudagraph-capture-size say what is "
    "captured on a GPU"
)
_GRAPH_SETTINGS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
IN_RAM = "on CPU the weights are in main memory already"
MAMBA = "models with state-space layers are not in this version"

MODEL: tuple[Foreign, ...] = (
    *refused(POOLING, off=("auto", "generate"), values="runner"),
    *refused(POOLING, off=("auto", "none"), values="convert"),
    *refused(POOLING, values="pooler_config"),
    *refused("config.json is read from the model's folder", "Use --hf-overrides", values="hf_config_path"),
    *refused("only Hugging Face's config.json is read", off=("auto", "hf"), values="config_format"),
    *accepted(
        f"{TEXT_ONLY}, so no media file is ever opened",
        values="allowed_local_media_path",
        lists="allowed_media_domains",
    ),
    *accepted("no code from a model repository is ever loaded", values="code_revision"),
    *refused("the checkpoint says how it is quantized", "Use --hf-overrides", values="quantization_config"),
    *accepted("it only permits formats that are not in this version", switches="allow_deprecated_quantization"),
    *refused("the experts of a token are not returned in this version", switches="enable_return_routed_experts"),
    *refused("the mask of the sampler is not returned in this version", switches="return_sampling_mask"),
    *accepted("tokens are drawn with 53-bit random numbers, without Gumbel noise", switches="use_fp64_gumbel"),
    *refused("traces cannot be replayed in this version", switches="enable_trace_replay"),
    *refused(
        "a sliding window belongs to the model",
        "Use --max-model-len with at most the window's length",
        switches="disable_sliding_window",
    ),
    *accepted("attention chooses by itself", switches="disable_cascade_attn"),
    *refused("prompts are text or token ids", switches="enable_prompt_embeds"),
    *refused(NO_CODE, values="model_class_overrides io_processor_plugin"),
    *refused(
        NO_CODE,
        "Requests may use logit_bias, allowed_token_ids, bad_words and min_tokens",
        lists="logits_processors",
    ),
    *refused(
        "weights and cache stay in memory until the end",
        "Stop the server to free them",
        switches="enable_sleep_mode",
    ),
    *accepted(
        "it belongs to the sleep mode, which is not in this version",
        switches="sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend",
        lists="sleep_preserve_parameter_names",
    ),
    *accepted("long prompts are tokenized in threads of the API process", values="renderer_num_workers"),
    *refused("no such setting is known; vLLM's is --seed", "Use --seed", values="guide", off=(0,)),
)

LOAD: tuple[Foreign, ...] = (
    *accepted(
        "weights are mapped and read once, in the order of the file",
        values="""
            safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        """,
    ),
    *refused("loaders have no further settings", values="model_loader_extra_config"),
    *accepted("only safetensors, config and tokenizer files are downloaded", lists="ignore_patterns"),
    *accepted("progress is shown on terminals only", switches="use_tqdm_on_load", off=(True,)),
    *accepted("pickled checkpoints are never read", values="pt_load_map_location"),
)

ATTENTION_AND_KERNELS: tuple[Foreign, ...] = (
    *accepted(
        KERNELS,
        values="""
            attention_config moe_backend linear_backend sparse_indexer_topk_backend
            ir_op_priority kernel_config gdn_prefill_backend kda_prefill_backend kda_decode_backend
        """,
        switches="enable_flashinfer_autotune",
        off=("auto", False),
    ),
    *accepted(
        NO_GRAPHS,
        values="optimization_level jit_monitor_mode",
        switches="cudagraph_metrics enable_layerwise_nvtx_tracing jit_monitor_verbose",
    ),
    translated(
        "compilation_config",
        f"nothing is compiled; {', '.join(_GRAPH_SETTINGS)} are settings of their own",
        lambda value: (
            {name: value[name] for name in _GRAPH_SETTINGS if value.get(name) is not None}
            if isinstance(value, dict)
            else {}
        ),
    ),
    *accepted(
        MAMBA,
        values="""
            mamba_backend mamba_ssu_algorithm mamba_cache_philox_rounds mamba_cache_dtype mamba_ssm_cache_dtype
            mamba_block_size mamba_cache_mode replayssm_buffer_len
        """,
        switches="enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint use_replayssm",
    ),
)

PARALLELISM: tuple[Foreign, ...] = (
    *refused(
        "a prompt is computed in chunks by all ranks together",
        "Use --tensor-parallel-size",
        off=(1,),
        values="prefill_context_parallel_size",
    ),
    *accepted(
        "ranks that divide a KV cache have whole blocks of 256 tokens in turn, because attention sums 256 positions at "
        "a time",
        values="dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
        off=(256,),
    ),
    *accepted(
        "ranks that divide a KV cache exchange queries and partial results through memory that they share, or on GPUs "
        "by NCCL",
        values="dcp_comm_backend",
    ),
    *accepted(
        "a rank reads the queries of its neighbours in memory that they share, which are fewer bytes than the weights "
        "to compute them",
        switches="dcp_q_replicate",
    ),
    *refused(OWN_REPLICAS, _OWN_SERVERS, off=(0,), values="data_parallel_rank"),
    *refused(
        OWN_REPLICAS,
        _OWN_SERVERS,
        switches="data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb",
    ),
    *refused(
        "the number of ranks does not change after the start",
        "Start again with other sizes",
        switches="enable_elastic_ep",
    ),
    *accepted(
        "replicas do not wait for each other, and replicas that Ray places connect to ports that the system chooses; "
        "machines with lanes meet at --master-port",
        values="data_parallel_rpc_port dp_sync_interval",
        switches="disable_nccl_for_dp_synchronization",
    ),
    translated(
        "data_parallel_address",
        "replicas that Ray places, and machines with lanes, find machine 0 where other machines do",
        lambda value: {"master_addr": value},
    ),
    translated(
        "cpu_distributed_timeout_seconds",
        "ranks wait in one way, on a CPU too",
        lambda value: {"distributed_timeout_seconds": value},
    ),
    *accepted(
        "it belongs to --enable-elastic-ep: the number of ranks does not change after the start",
        values="elastic_ep_max_dp_size",
    ),
    *accepted("it is for models with hyper-connections, which are not in this version", switches="enable_hc_sp"),
    *accepted(
        "each rank prepares its own tensors, so messages between processes hold no large ones",
        switches="enable_shm_tensor_arena",
    ),
    *refused("all rows of a step are computed together", switches="enable_dbo"),
    *accepted(
        "all rows of a step are computed together",
        values="ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
    ),
    *accepted(
        "ranks exchange the results of experts through memory that they share, or on GPUs by NCCL",
        values="all2all_backend",
    ),
    *accepted("a rank always reads its own experts only", switches="enable_ep_weight_filter"),
    *accepted(
        "ranks join what they have through memory that they share, or on GPUs by NCCL",
        switches="disable_custom_all_reduce",
    ),
    *accepted("no profiler is started with the processes", switches="ray_workers_use_nsight"),
    *refused(NO_CODE, off=("auto",), values="worker_cls worker_extension_cls"),
    *accepted(
        "a failed step is always computed again and a failed engine always replaced, without orders from outside",
        switches="enable_fault_tolerance",
        values="fault_tolerance_config",
    ),
)

CACHE: tuple[Foreign, ...] = (
    *accepted("cached blocks are always found by SHA-256", values="prefix_caching_hash_algo", off=("sha256",)),
    *accepted("cached blocks stay until their memory is needed", values="prefix_cache_retention_interval"),
    *accepted("prefixes match by whole blocks", values="prefix_match_unit"),
    *accepted("the KV cache has one dtype in all layers", lists="kv_cache_dtype_skip_layers"),
    *accepted("every layer computes its own KV", switches="kv_sharing_fast_prefill swa_bounded_replay"),
    *refused(TRANSFER, "Preempted requests are computed again; nothing to set", off=(0,), values="kv_offloading_size"),
    *accepted(TRANSFER, values="kv_offloading_backend"),
    *accepted(
        IN_RAM,
        values="""
            offload_backend cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step
        """,
        lists="cpu_offload_params offload_params",
        off=(0, 0.0, "auto"),
    ),
)

MULTIMODAL: tuple[Foreign, ...] = (
    *accepted(
        TEXT_ONLY,
        values="""
            limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
            mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
            mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin video_pruning_rate
            video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        """,
        switches="""
            language_model_only interleave_mm_strings skip_mm_profiling mm_device_do_normalize
            disable_chunked_mm_input
        """,
    ),
    *refused(TEXT_ONLY, switches="enable_mm_embeds mm_encoder_only"),
)

ADAPTERS: tuple[Foreign, ...] = (
    *accepted(
        "a rank has its rows of B and all of A, which is small: so no bit depends on the number of ranks",
        switches="fully_sharded_loras",
    ),
    *accepted("each step computes the adapters that it has", switches="specialize_active_lora"),
    *refused(
        "adapters change language models of dense layers here",
        "Merge the adapter into the model",
        values="default_mm_loras max_lora_cls_labels",
        switches="enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    ),
)

OBSERVATION: tuple[Foreign, ...] = (
    *refused("logs have a level and a form", "Use --log-level and --log-format", values="logging_config"),
    *accepted("a trace has the times that the engine measures anyway", lists="collect_detailed_traces"),
    *accepted("no metric is hidden", values="show_hidden_metrics_for_version"),
    *accepted("the buckets are fixed, and begin below 10 ms", values="custom_histogram_buckets"),
    *accepted("these metrics are always there", switches="enable_mfu_metrics"),
    *accepted("steps are counted in /metrics, not logged one by one", switches="enable_logging_iteration_details"),
    *accepted("there is one engine", switches="aggregate_engine_logging"),
    *accepted("requests are counted in /metrics, not logged one by one", switches="enable_log_requests"),
)

SCHEDULER: tuple[Foreign, ...] = (
    translated("max_num_scheduled_tokens", "the budget of a step", lambda value: {"max_num_batched_tokens": value}),
    translated(
        "max_num_active_seqs",
        "buffers grow with the requests here, so it is the same limit",
        lambda value: {"max_num_seqs": value},
    ),
    *refused("the queue is bounded in requests", "Use --max-num-queued-reqs", values="max_num_queued_tokens"),
    *accepted("the threshold stays as given", switches="long_prefill_token_threshold_adaptive"),
    *refused(NO_CODE, "Use --scheduling-policy", values="scheduler_cls"),
    *refused(
        "a prompt is admitted only when all of it fits",
        "Leave it out",
        off=(True,),
        switches="scheduler_reserve_full_isl",
    ),
    *accepted("prompts are scheduled in every step", off=(1,), values="prefill_schedule_interval"),
    *accepted("all layers share one block table", switches="disable_hybrid_kv_cache_manager"),
    *accepted(
        "tokens are streamed as they come; a request may set stream_interval itself",
        off=(1,),
        values="stream_interval",
    ),
)

WHOLE_CONFIGS: tuple[Foreign, ...] = (
    *refused("output is not watermarked in this version", values="watermark_config"),
    *refused("diffusion models are not in this version", values="diffusion_config"),
    *refused(TRANSFER, values="kv_transfer_config ec_transfer_config ec_manager_config"),
    *refused("KV events are not published in this version", values="kv_events_config"),
    *refused("models with n-gram memories are not in this version", values="engram_config"),
    *refused("the reasoning parser knows its tags", "Use --reasoning-parser", values="reasoning_config"),
    *refused(NO_CODE, "Use --reasoning-parser", values="reasoning_parser_plugin"),
    *refused("no plug-in reads it", values="additional_config"),
    *accepted(
        "one grammar engine reads every constraint; requests say what whitespace they allow",
        values="structured_outputs_config",
    ),
    *refused("no further outputs are made in this version", values="aux_output_config"),
    *refused("there is no profiler route", "Use py-spy on the engine process", values="profiler_config"),
    *refused("weights are not changed while serving", values="weight_transfer_config"),
)

ENGINE_FLAGS: tuple[Foreign, ...] = (
    *MODEL,
    *LOAD,
    *ATTENTION_AND_KERNELS,
    *PARALLELISM,
    *CACHE,
    *MULTIMODAL,
    *ADAPTERS,
    *OBSERVATION,
    *SCHEDULER,
    *WHOLE_CONFIGS,
)
