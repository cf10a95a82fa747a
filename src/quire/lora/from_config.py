"""The settings of adapters that a config asks for, and the settings that they exclude."""

from __future__ import annotations

from quire import envs
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.lora.modules import parse_module
from quire.model_config import ModelConfig
from quire.option import Source
from quire.settings import LoraSettings, ModelSettings, Record

# Different adapters of a step, if adapters may come later. With vLLM's 1 their requests would take turns.
MOST_LORAS = 8


def lora_settings(config: EngineConfig, model: ModelConfig, form: ModelSettings, record: Record) -> LoraSettings | None:
    """None: no adapters are wanted. Raises ConfigError for a model that takes none.

    Args:
        form: the form of the model.
        record: gets the chosen values.
    """
    if not config.enable_lora:
        return None
    if not model.runs_natively(form.model_impl):
        raise ConfigError(
            "Adapters are not computed by transformers' modelling code, which runs this model",
            value=model.architecture,
            fix="Merge the adapter into the model, or take a model with a native implementation",
            param="enable_lora",
        )
    if config.num_lanes > 1 and any(part.shared is not None for part in model.experts()):
        raise ConfigError(
            "Lanes share the expert for every token, and a rank does not know the adapters of other lanes' rows",
            value=model.architecture,
            expected="a model without a shared expert",
            fix="Leave --enable-lora out, or leave --enable-expert-parallel out: then each replica has all experts",
            param="enable_lora",
        )
    names = tuple(parse_module(word).name for word in config.lora_modules)  # paths of adapters are not for everybody
    record.put("lora_modules", names, config.sources["lora_modules"])
    most, source, why = _max_loras(config)
    record.put("max_loras", most, source, why)
    in_memory = most if config.max_cpu_loras is None else config.max_cpu_loras
    record.put("max_cpu_loras", in_memory, config.sources["max_cpu_loras"], "others are read again when they are asked")
    dtype = form.dtype if config.lora_dtype == "auto" else config.lora_dtype
    record.put("lora_dtype", dtype, config.sources["lora_dtype"], f"the model computes in {form.dtype}")
    return LoraSettings(most, config.max_lora_rank, in_memory, dtype, config.lora_target_modules)


def _max_loras(config: EngineConfig) -> tuple[int, Source, str]:
    """The value, its source, and why."""
    num_modules = len(config.lora_modules)
    is_open = envs.ALLOW_RUNTIME_LORA_UPDATING.get() or envs.LORA_RESOLVER_CACHE_DIR.get() or not num_modules
    most, why = (num_modules, "as many as --lora-modules") if num_modules else (0, "")
    if is_open and most < MOST_LORAS:
        most, why = MOST_LORAS, "adapters may be loaded later"
    if config.max_loras is not None:
        return config.max_loras, config.sources["max_loras"], f"default would be {most}: {why}"
    if config.max_cpu_loras is not None and config.max_cpu_loras < most:
        return config.max_cpu_loras, "formula", "max_cpu_loras: no more are in memory"
    return most, "default", why
