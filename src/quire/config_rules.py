"""Rules between the settings of an engine. Each raises a ConfigError that names the settings and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.distributed.layout import MOST_RANKS
from quire.eplb_config import EplbConfig
from quire.errors import ConfigError
from quire.formats.kv_format import RANGE_POSITIONS
from quire.formats.weight_format import ON_LOAD
from quire.hf_config.quantization import QUANTIZATION_NAMES
from quire.logs import get_logger
from quire.lora.modules import RANKS, parse_module
from quire.option import check_foreign

if TYPE_CHECKING:
    from quire.config import EngineConfig

logger = get_logger(__name__)


def check_engine(config: EngineConfig) -> None:
    """ConfigError for settings that contradict each other, or that no model of this version supports."""
    if config.per_request_spec_decode_metrics != "none" and config.speculative_config is None:
        raise ConfigError(
            "There are no drafts whose metrics could be reported",
            value=config.per_request_spec_decode_metrics,
            fix="Give --speculative-config too, or leave --per-request-spec-decode-metrics out",
            param="per_request_spec_decode_metrics",
        )
    if config.trust_remote_code:
        raise ConfigError(
            "trust_remote_code is set, but Quire never runs code from a model repository",
            fix="Leave the flag out; architectures known to transformers run without it",
            param="trust_remote_code",
        )
    if config.quantization is not None and config.quantization not in (*ON_LOAD, *QUANTIZATION_NAMES):
        check_foreign("quantization", config.quantization)
        raise ConfigError(
            "Quire does not read quantized weights of this kind",
            value=config.quantization,
            expected=f"{', '.join(ON_LOAD)}, which quantize a checkpoint in floating point while it loads, or the "
            f"checkpoint's own method: {', '.join(QUANTIZATION_NAMES)}",
            fix="Leave --quantization out: a quantized checkpoint names its own method",
            param="quantization",
        )
    drafts = config.speculative_config
    if drafts is not None and drafts.draft_tensor_parallel_size not in (None, 1, config.tensor_parallel_size):
        raise ConfigError(
            "Illegal number of ranks for the drafter",
            value=drafts.draft_tensor_parallel_size,
            expected=f"1, or tensor_parallel_size = {config.tensor_parallel_size}",
            fix="Leave draft_tensor_parallel_size out of --speculative-config",
            param="speculative_config",
        )
    _check_experts(config)
    _check_lanes(config)
    _check_nodes(config)
    _check_replicas(config)
    shares_context = config.decode_context_parallel_size > 1
    block_sizes = (RANGE_POSITIONS,) if shares_context else (8, 16, 32, 64, 128)
    if config.block_size is not None and config.block_size not in block_sizes:
        legal = f"{RANGE_POSITIONS} with --decode-context-parallel-size" if shares_context else "8, 16, 32, 64 or 128"
        raise ConfigError("Illegal block size", value=config.block_size, expected=legal, param="block_size")
    if config.max_model_len is not None and config.max_model_len != -1 and config.max_model_len < 1:
        raise ConfigError(
            "Illegal max_model_len",
            value=config.max_model_len,
            expected="a positive number, or -1",
            param="max_model_len",
        )
    if config.slo_itl is not None and not config.enable_chunked_prefill:
        raise ConfigError(
            "A target for the time between tokens needs prompts that may be split",
            fix="Leave out --no-enable-chunked-prefill or --slo-itl",
            param="slo_itl",
        )
    _check_lora(config)
    _check_gpu_ids(config)


def _check_gpu_ids(config: EngineConfig) -> None:
    """ConfigError for names of GPUs that do not fit the device or the replicas."""
    names = config.gpu_ids
    if names and config.device == "cpu":
        raise ConfigError(
            "--device-ids names GPUs, but --device cpu uses none", fix="Leave one of them out", param="device_ids"
        )
    if names and (len(names) < config.num_replicas or len(set(names)) < len(names)):
        raise ConfigError(
            "--device-ids names a GPU twice, or fewer GPUs than there are replicas",
            value=",".join(names),
            expected=f"{config.num_replicas} different ones, or more",
            fix="Name one for each replica, or leave it out",
            param="device_ids",
        )


def _check_lora(config: EngineConfig) -> None:
    """ConfigError for adapters that cannot be used, or that do not fit the limits."""
    names = [parse_module(word).name for word in config.lora_modules]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            "Two adapters have one name", value=repeated[0], fix="Give each another name", param="lora_modules"
        )
    if not config.enable_lora:
        if names:
            raise ConfigError(
                "There are adapters, but LoRA is not enabled", fix="Give --enable-lora too", param="lora_modules"
            )
        for name in ("max_loras", "max_cpu_loras", "lora_target_modules", "lora_dir"):
            if getattr(config, name):
                logger.warning("%s has no effect without enable_lora", name)
    elif config.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "Adapters cannot be used if another program has started the ranks",
            fix="Leave --enable-lora out, or let Quire start the ranks",
            param="enable_lora",
        )
    if config.max_lora_rank not in RANKS:
        raise ConfigError(
            "Illegal max_lora_rank",
            value=config.max_lora_rank,
            expected=f"one of {', '.join(map(str, RANKS))}",
            fix="Use the next larger value",
            param="max_lora_rank",
        )
    most, in_memory = config.max_loras, config.max_cpu_loras
    if most is not None and in_memory is not None and in_memory < most:
        raise ConfigError(
            "Fewer adapters fit into memory than a step may use",
            value=in_memory,
            expected=f"max_cpu_loras of at least max_loras = {most}",
            fix="Raise --max-cpu-loras or lower --max-loras",
            param="max_cpu_loras",
        )


def _check_experts(config: EngineConfig) -> None:
    """ConfigError for experts that ranks cannot share, or exchange."""
    given = EplbConfig.of(config.eplb_config or {})
    if given.num_redundant_experts and not config.enable_eplb:
        raise ConfigError(
            "Redundant experts need --enable-eplb",
            value=given.num_redundant_experts,
            fix="Give --enable-eplb too, or leave num_redundant_experts out of --eplb-config",
            param="eplb_config",
        )
    has_partners = config.tensor_parallel_size * config.num_lanes > 1
    if config.enable_eplb and not (config.enable_expert_parallel and has_partners):
        raise ConfigError(
            "Only ranks that have whole experts can exchange them",
            value=config.enable_eplb,
            fix="Give --enable-expert-parallel, and --tensor-parallel-size or --data-parallel-size 2 or more; or leave "
            "--enable-eplb out",
            param="enable_eplb",
        )


def _check_lanes(config: EngineConfig) -> None:
    """ConfigError for settings that do not work with experts shared by lanes."""
    if config.num_lanes == 1:
        return
    if config.num_ranks > MOST_RANKS:
        raise ConfigError(
            f"{config.data_parallel_size} x {config.tensor_parallel_size} ranks would share the experts",
            value=config.num_ranks,
            expected=f"at most {MOST_RANKS}",
            fix="Lower --data-parallel-size or --tensor-parallel-size",
            param="data_parallel_size",
        )
    others = {
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "decode_context_parallel_size": config.decode_context_parallel_size > 1,
        "distributed_executor_backend": config.distributed_executor_backend in ("ray", "external_launcher"),
    }
    for name in (name for name, is_given in others.items() if is_given):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{flag} does not go together with experts that --data-parallel-size ranks share, in this version",
            value=getattr(config, name),
            fix=f"Leave {flag} out; or leave --enable-expert-parallel out: then there are replicas with all experts",
            param=name,
        )


def _check_nodes(config: EngineConfig) -> None:
    """ConfigError for machines that cannot share a copy of the model."""
    most, stages, width, lanes = (
        config.nnodes,
        config.pipeline_parallel_size,
        config.tensor_parallel_size,
        config.num_lanes,
    )
    if most > 1 and config.num_replicas > 1:
        raise ConfigError(
            "Each of several replicas is on one machine in this version",
            value=config.data_parallel_size,
            fix="Leave --data-parallel-size out; or give --enable-expert-parallel: then there are lanes, which may be "
            "on several machines; or leave --nnodes and --distributed-executor-backend out, and let "
            "--data-parallel-backend ray place replicas on several machines",
            param="data_parallel_size",
        )
    if lanes > 1:
        count, what, how = lanes, "lane", "each machine has the same number of whole lanes"
    else:
        count, what = stages, "stage"
        how = "each machine has whole stages, or each stage has the same number of ranks on each of its machines"
    legal = {each for each in range(1, count + 1) if count % each == 0}
    if lanes == 1:
        legal |= {stages * each for each in range(1, width + 1) if width % each == 0}
    if most not in legal:
        raise ConfigError(
            f"{most} machines cannot share {count} {what}{'s' * (count > 1)} of {width} rank{'s' * (width > 1)}",
            value=most,
            expected=f"one of {', '.join(map(str, sorted(legal)))}: {how}",
            param="nnodes",
        )
    if not 0 <= config.node_rank < most:
        raise ConfigError(
            "There is no such machine", value=config.node_rank, expected=f"0 to {most - 1}", param="node_rank"
        )
    if config.headless != (config.node_rank > 0):
        raise ConfigError(
            "Only machine 0 runs the server; the other machines compute for it",
            value=config.node_rank,
            fix="Run `quire serve --headless` with --node-rank 1 and above, and leave --headless out for machine 0",
            param="headless",
        )


def _check_replicas(config: EngineConfig) -> None:
    """ConfigError for illegal places of replicas."""
    local, count = config.data_parallel_size_local, config.data_parallel_size
    if config.data_parallel_start_rank and (config.num_lanes == 1 or config.has_ray_replicas):
        raise ConfigError(
            "A server runs all of its replicas, on other machines by Ray. Only lanes have a place on each machine",
            value=config.data_parallel_start_rank,
            expected="0",
            fix="Give --enable-expert-parallel, if the replicas shall share experts; or use --data-parallel-backend "
            "ray, or start a server on each machine and spread requests over them from outside",
            param="data_parallel_start_rank",
        )
    if not config.has_ray_replicas:
        if local not in (None, count) and config.num_lanes == 1:
            raise ConfigError(
                "Some replicas would be on other machines, and only Ray can start them there",
                value=local,
                expected=f"data_parallel_size = {count}",
                fix="Leave --data-parallel-size-local out, or give --data-parallel-backend ray; or give "
                "--enable-expert-parallel, if they shall be lanes that share experts",
                param="data_parallel_size_local",
            )
        return
    if local is not None and not 1 <= local <= count:
        raise ConfigError(
            "Illegal number of replicas on this machine",
            value=local,
            expected=f"1 to data_parallel_size = {count}",
            fix="Leave --data-parallel-size-local out: then Ray spreads the replicas over its machines",
            param="data_parallel_size_local",
        )
    is_external = config.distributed_executor_backend == "external_launcher"
    others = (
        ("enable_expert_parallel", config.num_lanes > 1, "lanes are one engine, whose ranks --nnodes places"),
        ("nnodes", config.nnodes > 1, "each replica is on one machine"),
        ("distributed_executor_backend", is_external, "torchrun starts its processes itself"),
        ("master_port", config.master_port != type(config).master_port, "the system chooses their ports"),
        ("device_ids", bool(config.device_ids), "Ray chooses their GPUs"),
        ("numa_bind", config.numa_bind, "Ray chooses their machines"),
        ("numa_bind_nodes", bool(config.numa_bind_nodes), "Ray chooses their machines"),
        ("numa_bind_cpus", bool(config.numa_bind_cpus), "Ray chooses their machines"),
    )
    for name, is_given, why in others:
        if is_given:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} does not go together with replicas that Ray places: {why}",
                value=getattr(config, name),
                fix=f"Leave {flag} out, or --data-parallel-backend",
                param=name,
            )
