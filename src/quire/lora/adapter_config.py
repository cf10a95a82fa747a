"""adapter_config.json of a PEFT adapter: the rank and the scale of each module. No torch.

The tensors of an adapter tell which modules it changes. The fields that chose them for training (target_modules,
exclude_modules, layers_to_transform, layers_pattern) are not read: PEFT itself saves tensors of modules that they do
not name, for example of an lm_head that shares the embeddings' adapter (ensure_weight_tying).
Source: peft.LoraConfig and peft.tuners.lora, version 0.21.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from quire.errors import AdapterError, ModelConfigError
from quire.hf_config.fields import Fields
from quire.lora.patterns import Pattern, Steps

CONFIG_NAME = "adapter_config.json"
MAX_RANK = 1 << 20
_SAVE_AGAIN = "Save the adapter again with PEFT"
_MAX_NAME_CHARS = 64  # characters of a field's name in an error

# Values that leave the base's weights and the formula as they are.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# Fields that are read, that only training reads, or that say who made the adapter. fan_in_fan_out is about the form of
# the base's weight; A and B have one form.
_FIELDS = frozenset(
    """
    r lora_alpha use_rslora rank_pattern alpha_pattern peft_type bias init_lora_weights
    target_modules exclude_modules layers_to_transform layers_pattern fan_in_fan_out ensure_weight_tying
    lora_dropout inference_mode task_type auto_mapping base_model_name_or_path revision peft_version
    loftq_config eva_config corda_config lora_ga_config velora_config megatron_config megatron_core runtime_config
    qalora_group_size
    """.split()  # noqa: SIM905
)
MERGE = "Merge it into its base model with PEFT's merge_and_unload(), and serve the result as a model"


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and factors, by PEFT's names of modules: without `base_model.model.`."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: tuple[tuple[Pattern, int], ...]  # the first that matches counts
    alphas: tuple[tuple[Pattern, float], ...]

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks if pattern.ends(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor s of W + s B A."""
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.ends(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def parse_config(raw: bytes) -> AdapterConfig:
    """Read the content of adapter_config.json. Raises AdapterError for everything but LoRA and rsLoRA."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_NAME} is no JSON: {error}", fix=_SAVE_AGAIN) from None
    if not isinstance(values, dict):
        raise AdapterError(f"{CONFIG_NAME} holds no object", value=values, fix=_SAVE_AGAIN)
    fields = Fields(values, CONFIG_NAME)
    _refuse_other_methods(fields)
    steps = Steps()
    try:
        ranks, alphas = fields.object("rank_pattern"), fields.object("alpha_pattern")
        return AdapterConfig(
            rank=fields.integer("r", 8, maximum=MAX_RANK),
            alpha=fields.number("lora_alpha", 8),
            is_rank_stabilized=fields.flag("use_rslora", False),
            ranks=tuple((Pattern(key, steps), ranks.integer(key, maximum=MAX_RANK)) for key in ranks.values),
            alphas=tuple((Pattern(key, steps), alphas.number(key)) for key in alphas.values),
        )
    except ModelConfigError as error:
        raise AdapterError(error.what, value=error.value, expected=error.expected, fix=_SAVE_AGAIN) from None


def _refuse_other_methods(fields: Fields) -> None:
    if fields.get("peft_type") != "LORA":
        raise AdapterError("The adapter is no LoRA adapter", value=fields.get("peft_type"), expected="LORA", fix=MERGE)
    if fields.get("bias") not in (None, "none"):
        raise AdapterError("The adapter has trained biases", value=fields.get("bias"), expected="bias none", fix=MERGE)
    if (start := fields.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise AdapterError(
            "The adapter belongs to a base model that its initialization has changed",
            value=start,
            expected="an init_lora_weights that leaves the base model as it is",
            fix="Save it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or merge it",
        )
    for name, value in fields.values.items():
        if value and name not in _FIELDS:
            raise AdapterError(
                f"The adapter uses {name[:_MAX_NAME_CHARS]}, which is not in this version",
                value=value,
                expected="plain LoRA or rsLoRA",
                fix=MERGE,
            )
