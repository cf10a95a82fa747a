"""Granite 3 MoE (1B-A400M, 3B-A800M): Granite with experts, which a checkpoint holds in one tensor."""

from dataclasses import replace

from quire.families import granite
from quire.hf_config.family import GgufForm
from quire.hf_config.feed_forward import ExpertsForm

FAMILY = replace(
    granite.FAMILY,
    model_type="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    defaults={**granite.FAMILY.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
    reads=tuple(name for name in granite.FAMILY.reads if name != "mlp_bias"),
    experts=ExpertsForm(
        count=("num_experts", "num_local_experts"),
        width="intermediate_size",
        prefix="block_sparse_moe.",
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
        scoring="softmax_of_chosen",
    ),
    gguf=GgufForm("granitemoe", is_interleaved=True),
)
