"""The feed-forward part of a layer from config.json: a gated MLP, or experts. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire.hf_config.fields import Fields
from quire.hf_config.gguf_metadata import GgufMetadata
from quire.layer_spec.cuts import Cut
from quire.layer_spec.feed_forward import Dense, Experts, Router, Scoring
from quire.layer_spec.shapes import LinearShape, StackedForm

_MAX_EXPERTS = 4096
SIGMOID_OF_GGUF = 2  # llama.cpp's number of the scoring function
_SCORINGS_OF_GGUF: dict[int, Scoring] = {1: "softmax", SIGMOID_OF_GGUF: "sigmoid", 3: "softmax_of_chosen"}


def gated_mlp(
    prefix: str,
    hidden: int,
    inner: int,
    activation: str,
    *,
    bias: bool = False,
    is_fused: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Dense:
    """A gated MLP.

    Args:
        inner: its width.
        is_fused: the checkpoint holds gate_up_proj.
        names: the names of gate, up and down.
    """
    gate, up, down = names
    shards: tuple[tuple[str, int], ...] = ((gate, inner), (up, inner))
    if is_fused:
        shards = (("gate_up_proj", 2 * inner),)
    rows = Cut("rows", sections=(inner, inner) if len(shards) == 1 else ())
    return Dense(
        gate_up=LinearShape(prefix=prefix, shards=shards, in_features=hidden, bias=bias, cut=rows),
        down=LinearShape(prefix=prefix, shards=((down, hidden),), in_features=inner, bias=bias, cut=Cut("joined")),
        activation=activation,
    )


def _every_layer(fields: Fields, layer: int) -> bool:
    return True


def _nothing(fields: Fields) -> dict[str, Any]:
    return {}


def _no_width(fields: Fields) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class ExpertsForm:
    """The experts of a family: their fields in config.json, and the names of their modules in a layer.

    Attributes:
        count: fields with the number of experts; the first that the file has is used. The last one has the default.
        width: the field with the width of one.
        has_experts: whether a layer has experts; else it has a gated MLP.
        prefix: the prefix of all names.
        router: its module.
        names: the names of an expert's gate, up and down, behind `experts.<number>.`
        stacked: tensors that hold gate and up, and down, of all experts, in another form of the checkpoint.
        stacked_form: the form of these tensors, see LinearShape.
        has_bias: router and experts have one.
        scoring: the scoring function of the router. A file that names another one is refused.
        routing: other arguments of Router, from the file.
        shared: the module of the expert for every token.
        shared_width: its width; 0: there is none.
        shared_gate: the module whose sigmoid multiplies its result; empty: there is none.
    """

    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    width: str = "moe_intermediate_size"
    has_experts: Callable[[Fields, int], bool] = _every_layer
    prefix: str = "mlp."
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    stacked_form: StackedForm = "rows"
    has_bias: bool = False
    scoring: Scoring = "softmax"
    routing: Callable[[Fields], dict[str, Any]] = _nothing
    shared: str = ""
    shared_width: Callable[[Fields], int] = _no_width
    shared_gate: str = ""

    def num_experts(self, fields: Fields) -> int:
        """The number of experts of a layer; 0: no layer has experts."""
        name = next((name for name in self.count if fields.has(name)), self.count[-1])
        return fields.integer(name, minimum=0, maximum=_MAX_EXPERTS)

    def experts(self, fields: Fields, prefix: str, hidden: int, activation: str) -> Experts:
        """The experts of one layer. Raises ModelConfigError for numbers that do not fit together.

        Args:
            prefix: the prefix of the layer.
        """
        prefix += self.prefix
        num_experts, stacked = self.num_experts(fields), [prefix + name for name in self.stacked]
        inner, bias = fields.integer(self.width), self.has_bias
        expert = gated_mlp(f"{prefix}experts.{{}}.", hidden, inner, activation, bias=bias, names=self.names)
        num_active = fields.integer("num_experts_per_tok", maximum=num_experts)
        shared_width = self.shared_width(fields)
        gate = LinearShape(prefix=prefix, shards=((self.shared_gate, 1),), in_features=hidden, is_gate=True)
        if fields.has("scoring_func"):
            fields.text("scoring_func", (self.scoring,))
        return Experts(
            router=self._router(fields, prefix, hidden, num_experts, num_active),
            expert=Dense(
                gate_up=_stack(expert.gate_up, num_experts, stacked[0], self.stacked_form),
                down=_stack(expert.down, num_experts, stacked[1], self.stacked_form),
                activation=activation,
            ),
            num_active=num_active,
            shared=gated_mlp(f"{prefix}{self.shared}.", hidden, shared_width, activation) if shared_width else None,
            shared_gate=gate if shared_width and self.shared_gate else None,
        )

    def gguf_names(self) -> dict[str, str]:
        """The names of modules in a layer, by llama.cpp's. A tensor of all experts has `{}` for the expert."""
        own = {"ffn_gate_inp": self.router}
        parts = ("gate", "up", "down")
        own |= {f"ffn_{part}_exps": f"experts.{{}}.{name}" for part, name in zip(parts, self.names, strict=True)}
        if self.shared:
            own |= {f"ffn_{part}_shexp": f"{self.shared}.{part}_proj" for part in parts}
        if self.shared_gate:
            own["ffn_gate_inp_shexp"] = self.shared_gate
        return {key: self.prefix + name for key, name in own.items()}

    def gguf_fields(self, metadata: GgufMetadata) -> dict[str, Any]:
        """Fields of config.json from llama.cpp's keys."""
        keys = {
            self.count[-1]: "expert_count",
            "num_experts_per_tok": "expert_used_count",
            self.width: "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        }
        fields = {field: value for field, key in keys.items() if (value := metadata.get(key)) is not None}
        number = metadata.get("expert_gating_func")
        return fields if number is None else fields | {"scoring_func": _SCORINGS_OF_GGUF.get(number, f"{number}")}

    def _router(self, fields: Fields, prefix: str, hidden: int, num_experts: int, num_active: int) -> Router:
        shards = ((self.router, num_experts),)
        linear = LinearShape(prefix=prefix, shards=shards, in_features=hidden, bias=self.has_bias, is_gate=True)
        router = Router(linear=linear, scoring=self.scoring, **self.routing(fields))
        if num_experts % router.num_groups:
            raise fields.illegal("n_group", f"a divisor of the {num_experts} experts")
        if router.num_groups > 1 and router.group_score == "top2" and num_experts < 2 * router.num_groups:
            raise fields.illegal("n_group", f"groups of 2 or more of the {num_experts} experts")
        in_groups = num_experts // router.num_groups * router.num_active_groups
        if num_active > in_groups:
            raise fields.illegal("num_experts_per_tok", f"at most the {in_groups} experts of the active groups")
        return router


def group_routing(fields: Fields) -> dict[str, Any]:
    """Arguments of Router for the fields of DeepSeek's groups."""
    num_groups = fields.integer("n_group", 1)
    return {"num_groups": num_groups, "num_active_groups": fields.integer("topk_group", 1, maximum=num_groups)}


def group_routing_of_gguf(metadata: GgufMetadata) -> dict[str, Any]:
    """Fields of DeepSeek's routing and layers from llama.cpp's keys."""
    keys = {
        "first_k_dense_replace": "leading_dense_block_count",
        "n_shared_experts": "expert_shared_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
    }
    return {field: value for field, key in keys.items() if (value := metadata.get(key)) is not None}


def _stack(linear: LinearShape, num_experts: int, stacked: str, form: StackedForm) -> LinearShape:
    return replace(linear, num_experts=num_experts, stacked=stacked, stacked_form=form)
