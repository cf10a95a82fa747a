"""The settings of a drafter (a model or a head) beside its target, and the settings that it cannot have.

Other settings are the same as the target's.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config import LOAD_FORMATS
from quire.errors import ConfigError
from quire.formats.kv_format import KV_CACHE_DTYPES, kv_format
from quire.formats.kv_groups import full_table, kv_groups
from quire.formats.weight_format import ON_LOAD
from quire.hf_config.quantization import QUANTIZATION_NAMES
from quire.model_config import DTYPE_BYTES, ModelConfig
from quire.settings import DrafterSettings, ModelSettings
from quire.speculative_config import BY_WORKER, SpeculativeConfig


def drafter_settings(
    speculation: SpeculativeConfig | None, model: ModelConfig, form: ModelSettings
) -> DrafterSettings | None:
    """The settings of a model's drafter; None: there is no drafter.

    Args:
        form: the settings of the model.

    Raises ConfigError for a drafter that cannot draft for the model.
    """
    if speculation is None or speculation.method not in BY_WORKER:
        return None
    if (drafter := model.drafter) is None:
        raise _error("There is no drafter of this kind", speculation.method)
    if drafter.head is not None and not model.runs_natively(form.model_impl):
        raise _error("The hidden states of a model in transformers' code are not there for a head", model.architecture)
    max_model_len = min(speculation.max_model_len or drafter.max_model_len, drafter.max_model_len)
    _check(model, form.max_model_len)
    _check(drafter, max_model_len)
    if full_table(kv_groups(model)) is None:
        raise _error(
            "The model keeps all tokens in no layer, so layers of a draft model have no place", "no full attention"
        )
    load_format = dict(speculation.draft_load_config or {}).get("load_format", "auto")
    if load_format not in LOAD_FORMATS:
        raise _error("The draft model has no such load_format", load_format, "one of " + ", ".join(LOAD_FORMATS))
    drafter_form = replace(
        form,
        quantization=_quantization(speculation.quantization, drafter, form.quantization),
        kv_cache_dtype=_kv_cache_dtype(speculation.kv_cache_dtype, form),
        max_model_len=max_model_len,
        load_format="dummy" if form.load_format == "dummy" else load_format,
        model_impl="auto",
    )
    is_greedy = speculation.draft_sample_method == "greedy"
    return DrafterSettings(drafter_form, speculation.num_speculative_tokens, is_greedy)


def _check(model: ModelConfig, max_model_len: int) -> None:
    if model.rope.switches_after(max_model_len) is not None:
        raise _error(
            f"Speculation with a draft model does not know longrope, whose long factors {model.model} may take",
            max_model_len,
            f"a context of at most {model.rope.original_max_position} tokens",
        )


def _quantization(given: str | None, drafter: ModelConfig, of_target: str | None) -> str | None:
    """The format of the drafter's checkpoint, or the format that its weights get on load."""
    if (found := drafter.quantized) is not None:
        if given is not None and QUANTIZATION_NAMES.get(given) != found.method:
            raise _error("The draft model's checkpoint is not quantized in this way", given, found.method)
        return found.method
    if given is not None and given not in ON_LOAD:
        raise _error("The draft model's checkpoint is in floating point", given, "one of " + ", ".join(ON_LOAD))
    return of_target if given is None and of_target in ON_LOAD else given


def _kv_cache_dtype(given: str | None, form: ModelSettings) -> str:
    if given is None:
        return form.kv_cache_dtype
    if given not in KV_CACHE_DTYPES or kv_format(given, form.dtype).name in set(DTYPE_BYTES) - {form.dtype}:
        names = [name for name in KV_CACHE_DTYPES if name not in DTYPE_BYTES or name == form.dtype]
        raise _error("The draft model has no KV cache of this kind", given, "one of " + ", ".join(names))
    return given


def _error(what: str, value: object, expected: str | None = None) -> ConfigError:
    fix = "Correct --speculative-config, or leave it out"
    return ConfigError(what, value=value, expected=expected, fix=fix, param="speculative_config")
