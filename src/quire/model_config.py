"""config.json in our names, read once, and the costs of the model: parameters, bytes, KV bytes per token. No torch.

hf_config/ translates Hugging Face's names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from quire.families import FAMILIES
from quire.formats.kv_format import KvFormat
from quire.formats.stored_linear import TAKEN_APART, StoredLinear, stored_from
from quire.formats.weight_format import DTYPE_BYTES, ON_LOAD
from quire.gguf.file import is_gguf, open_gguf
from quire.hf_config import head as head_config
from quire.hf_config.fields import Fields
from quire.hf_config.from_gguf import family_of, to_hf_config
from quire.hf_config.gguf_types import GgufWeights, gguf_weights
from quire.hf_config.json_file import read_object
from quire.hf_config.layer_format import QuantizedCheckpoint
from quire.hf_config.quantization import OUTPUT, SEPARATE_FILES, parse_description
from quire.hf_config.translate import merge, translate
from quire.layer_spec.cuts import Cut, Placement, Share, Stage
from quire.layer_spec.draft_head import DraftHead
from quire.layer_spec.feed_forward import Experts
from quire.layer_spec.kv_spec import KvSpec
from quire.layer_spec.layer import LayerSpec
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import LinearShape, NormShape

__all__ = ["DTYPE_BYTES", "ModelConfig", "RopeConfig", "load_model_config"]


LAYER_NUMBER = re.compile(r"\.\d+\.")  # the layer's number in the names of its tensors
EXPERT = re.compile(r"(.*\.)(\d{1,6})(\.[^.]+\.[^.]+)")  # the number of an expert, before module and tensor
TOKEN_ID_BYTES = 8
ROUTER_BIAS_BYTES = 4  # they stay in float32


class WeightBytes(NamedTuple):
    """Bytes of weights in memory by kind, with scales and padding. Tied embeddings count in the output."""

    blocks: int  # linear layers
    output: int
    embeddings: int
    norms_and_biases: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts about one model. Sizes count elements, windows and lengths count tokens."""

    model: str  # the folder or the GGUF file of the model
    model_type: str
    architecture: str
    is_native: bool  # quire.models has its family and activation; otherwise it needs the transformers backend
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_model_len: int
    dtype: str  # the dtype of the checkpoint: bfloat16, float16 or float32
    quantized: QuantizedCheckpoint | GgufWeights | None  # the format of its linear layers; None: dtype
    tie_word_embeddings: bool
    rms_norm_eps: float  # also the epsilon of layer norms
    norm_offset: float  # added to every norm weight
    final_norm: NormShape
    output_bias: bool  # whether the logits have a bias
    rope: RopeConfig  # the rope of layers with full attention; layers with a window may have their own rope
    logits_soft_cap: float  # 0 = none
    embedding_multiplier: float  # on the embeddings
    logits_scaling: float  # logits are divided by it
    eos_token_ids: tuple[int, ...]
    renamed_prefixes: tuple[tuple[str, str], ...]  # (prefix of tensors in the checkpoint, ours)
    ignored_prefixes: tuple[str, ...]  # parts of the checkpoint that we do not run
    ignored_fields: tuple[str, ...]  # fields of config.json that the architecture's modelling code does not read
    hf_overrides: dict[str, Any] = field(default_factory=dict, hash=False)  # merged over config.json
    drafter: ModelConfig | None = field(default=None, repr=False)  # a model or a head that drafts for it
    head: DraftHead | None = None  # it is not a whole model, but a head that drafts for a model
    is_shared: bool = True  # ranks share it where they can; else each of them has all of it
    vocab_share: Share | None = None  # the share of the rank that has a part of the model; None: the model is whole
    stage: Stage | None = None  # the stage of a pipeline that has these layers; None: it has all layers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def drafter_folder(self) -> Path | None:
        """The folder, or the GGUF file, of the drafter; None: there is none."""
        return None if self.drafter is None else Path(self.drafter.model)

    @property
    def takes_tokens(self) -> bool:
        """Whether it begins with the embeddings of tokens. If not, another stage gives it the residual stream."""
        return self.stage is None or self.stage.is_first

    @property
    def has_embeddings(self) -> bool:
        """Whether it holds the embeddings."""
        return self.stage is None or self.stage.has_embeddings

    @property
    def has_output(self) -> bool:
        """Whether it has the output projection; then it has the final norm too."""
        return self.stage is None or self.stage.is_last

    def runs_natively(self, model_impl: str) -> bool:
        """Whether our own code runs the model, and not transformers' modelling code."""
        return self.is_native and model_impl != "transformers"

    def holds(self, name: str) -> bool:
        """Whether a tensor, by its name in the checkpoint, belongs to this stage and to this rank's experts."""
        if self.stage is None and not self._placements:
            return True
        for prefix, ours in self.renamed_prefixes:
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
        if self._placements and (match := EXPERT.fullmatch(name)) is not None:
            placement = self._placements.get(match[1])
            if placement is not None and int(match[2]) not in placement.own:
                return int(match[2]) >= placement.num_experts  # there is no expert with such a number
        if self.stage is None:
            return True
        match name.split(".", 3):
            case ["model", "layers", number, _] if number.isdecimal():
                return int(number) in self.stage.layers or (
                    self.stage.is_last and int(number) >= self.stage.layers.stop
                )
            case ["model", "embed_tokens", *_]:
                return self.has_embeddings or (self.has_output and self.tie_word_embeddings)
        return self.has_output

    @cached_property
    def _placements(self) -> dict[str, Placement]:
        """The placements of shared experts, by the part of their tensors' names before the number."""
        linears = (linear for part in self.experts() for linear in part.expert.linears)
        return {each.prefix.partition("{}")[0]: each.placement for each in linears if each.placement is not None}

    def describe_checkpoint(self) -> str:
        """The format of the weights, for people."""
        return self.dtype if self.quantized is None else self.quantized.describe()

    @cached_property
    def layer_kinds(self) -> tuple[tuple[LayerSpec, int], ...]:
        """One layer of each kind, with the number of such layers. Layers of a kind differ only in the number in names.

        In a quantized checkpoint, each layer is a kind of its own, because its format depends on names.
        """
        if self.quantized is not None:
            return tuple((layer, 1) for layer in self.layers)
        names = [LAYER_NUMBER.sub(".", repr(layer)) for layer in self.layers]
        first = dict(zip(reversed(names), reversed(self.layers), strict=True))
        return tuple((first[name], count) for name, count in Counter(names).items())

    def kv_specs(self) -> list[KvSpec]:
        """The cache's content of every layer that has some."""
        return list(self._kv_specs)

    @cached_property
    def _kv_specs(self) -> tuple[KvSpec, ...]:
        return tuple(spec for layer in self.layers if (spec := layer.kv_spec) is not None)

    def kv_bytes_per_token(self, kv: KvFormat) -> int:
        """Bytes of one token in the cache over all layers."""
        kinds = [(spec, count) for layer, count in self.layer_kinds if (spec := layer.kv_spec) is not None]
        return sum(count * spec.bytes_per_token(kv) for spec, count in kinds)

    def experts(self) -> list[Experts]:
        """The feed-forward parts that are experts."""
        return [part for layer in self.layers if isinstance(part := layer.feed_forward, Experts)]

    def num_parameters(self) -> int:
        """Elements of all weights; tied embeddings count once. Exact for native models, an estimate for others."""
        linears = sum(count * (linear.num_weights + linear.num_biases) for linear, count in self._counted_linears())
        return linears + self._num_other_elements() + self._num_looked_up_parameters()

    def num_active_parameters(self) -> int:
        """Elements of the weights that one token uses, with the rows of all tokens in embeddings and output."""
        output = self.output_linear()
        num_output = output.num_weights + output.num_biases if self.has_output else 0
        return self.num_block_parameters() + num_output + self._num_looked_up_parameters()

    def num_block_parameters(self) -> int:
        """Elements of the weights that one token uses in the layers and the final norm, without idle experts."""
        counted = self.counted_active_linears()
        linears = sum(count * (linear.num_weights + linear.num_biases) for linear, count in counted)
        return linears + self._num_other_elements()

    def attention_flops(self) -> int:
        """Floating point operations of one new token and one before it that all layers see."""
        return sum(count * layer.attention.flops_per_pair for layer, count in self.layer_kinds if layer.attention)

    def weight_bytes(self, dtype: str, quantization: str | None = None, *, is_packed: bool = True) -> int:
        """Bytes of all weights in `dtype` (a key of DTYPE_BYTES), with linear layers in their form in memory.

        `is_packed`: the compiled kernels hold weights in `dtype` with padding; else they have no padding.
        """
        return sum(self.weight_bytes_by_kind(dtype, quantization, is_packed=is_packed))

    def weight_bytes_by_kind(
        self, dtype: str, quantization: str | None = None, *, is_packed: bool = True
    ) -> WeightBytes:
        """The parts of `weight_bytes`."""
        if not self.is_native:
            is_packed = False  # transformers' code multiplies by them
        counted = self._counted_linears()
        held = [(linear, n * self._held_bytes(linear, dtype, quantization, is_packed)) for linear, n in counted]
        output_linear = self.output_linear()
        output = sum(num_bytes for linear, num_bytes in held if linear == output_linear)
        blocks = sum(num_bytes for _, num_bytes in held) - output
        others = sum(n * linear.num_biases for linear, n in counted) + self._num_norm_elements()
        looked_up = self._looked_up_bytes(dtype)
        if self.head is not None and self.head.maps_tokens:
            looked_up += self.head.num_tokens * TOKEN_ID_BYTES
        others = others * DTYPE_BYTES[dtype] + self._num_router_biases() * ROUTER_BIAS_BYTES
        return WeightBytes(blocks, output, looked_up, others)

    def read_bytes_per_step(self, dtype: str, quantization: str | None = None) -> int:
        """Bytes of the weights that a step of one token reads, without idle experts.

        Embeddings do not count, because a step reads only a row per token.
        """
        linears = self.counted_active_linears()
        if self.has_output:
            linears.append((self.output_linear(), 1))
        weights = sum(n * self._held_bytes(linear, dtype, quantization, self.is_native) for linear, n in linears)
        others = sum(n * linear.num_biases for linear, n in linears) + self._num_norm_elements()
        return weights + others * DTYPE_BYTES[dtype] + self._num_router_biases() * ROUTER_BIAS_BYTES

    def expert_counts(self) -> Counter[tuple[int, int]]:
        """How many layers there are for each (number of experts, number of active ones)."""
        return Counter((part.num_experts, part.num_active_here) for part in self.experts())

    def expert_bytes(self, dtype: str, quantization: str | None = None) -> Iterator[tuple[Experts, int]]:
        """The experts of each layer that has some, and the bytes in memory of one of them."""
        for part in self.experts():
            linears = (replace(linear, num_experts=1) for linear in part.expert.linears)
            biases = part.expert.gate_up.num_biases + part.expert.down.num_biases
            weights = sum(self._held_bytes(linear, dtype, quantization, self.is_native) for linear in linears)
            yield part, weights + biases // part.num_experts * DTYPE_BYTES[dtype]

    def stored_linears(self, quantization: str | None = None) -> Iterator[StoredLinear]:
        """The `stored` entries of all linear layers."""
        return (stored for linear in self.linears() for stored in self.stored(linear, quantization))

    def stored(self, linear: LinearShape, quantization: str | None = None) -> tuple[StoredLinear, ...]:
        """The stored form of a layer, in parts if its shards are not fused.

        `quantization`, a key of ON_LOAD, quantizes a floating-point checkpoint. A quantized one has its own format.
        """
        if linear.is_first_apart:
            parts = linear.only([0]), linear.only(range(1, len(linear.shards)))
            return tuple(each for part in parts for each in self.stored(part, quantization))
        if isinstance(self.quantized, GgufWeights):
            return stored_from(linear, self.quantized)
        if linear.is_gate:
            return (StoredLinear(shape=linear, source=None, held=None, reason="it decides about other layers"),)
        is_output = len(linear.shards) == 1 and linear == self.output_linear()
        if self.quantized is not None and not (is_output and self.tie_word_embeddings):
            return stored_from(linear, self.quantized)
        held, reason = None, f"the checkpoint is in {self.dtype}"
        if self.quantized is not None:
            reason = "shared with the embeddings, which are not quantized"
        elif linear.matrices:
            reason = f"{reason}; {TAKEN_APART}"
        elif quantization is not None:
            on_load = ON_LOAD[quantization]
            held = on_load.output if is_output else on_load.linear
            reason = f"--quantization {quantization}"
        return (StoredLinear(shape=linear, source=None, held=held, reason=reason),)

    def stored_embeddings(self) -> StoredLinear | None:
        """The embeddings, if they are their own table of integers; None: they are shared, or in the model's dtype."""
        if self.tie_word_embeddings or not isinstance(self.quantized, GgufWeights):
            return None
        (table,) = stored_from(self.embeddings(), self.quantized)
        return table if table.held is not None else None

    def embeddings(self) -> LinearShape:
        """The table of embeddings, as if it were a linear layer with the tokens as outputs."""
        return self._over_vocabulary("model.", "embed_tokens", self.vocab_size)

    def linears(self) -> Iterator[LinearShape]:
        """All linear layers; layers with the same input are fused."""
        for layer in self.layers:
            yield from layer.linears()
        yield from self._linears_around()

    def _linears_around(self) -> Iterator[LinearShape]:
        """The linear layers before and behind `layers`."""
        if self.head is not None:
            yield self.head.input
        is_own = self.has_output or (self.has_embeddings and self.tie_word_embeddings)
        if is_own if self.head is None else self.head.owns_output:
            yield self.output_linear()

    def _counted_linears(self) -> list[tuple[LinearShape, int]]:
        """`linears` of each kind of layer, and how many there are."""
        of_layers = [(linear, count) for layer, count in self.layer_kinds for linear in layer.linears()]
        return of_layers + [(linear, 1) for linear in self._linears_around()]

    def counted_active_linears(self) -> list[tuple[LinearShape, int]]:
        """The linear layers that one token uses in each kind of layer, and how many there are; without the output."""
        return [(linear, count) for layer, count in self.layer_kinds for linear in layer.active_linears()]

    def output_linear(self) -> LinearShape:
        """The output projection, from hidden states to logits."""
        prefix, name = ("model.", "embed_tokens") if self.tie_word_embeddings else ("", OUTPUT)
        num_tokens = self.vocab_size if self.head is None else self.head.num_tokens
        return self._over_vocabulary(prefix, name, num_tokens, bias=self.output_bias)

    def _over_vocabulary(self, prefix: str, name: str, num_tokens: int, *, bias: bool = False) -> LinearShape:
        share = self.vocab_share
        shards = ((name, num_tokens if share is None else len(share.own_rows(0))),)
        return LinearShape(
            prefix=prefix, shards=shards, in_features=self.hidden_size, bias=bias, cut=Cut("rows"), share=share
        )

    def _num_looked_up_parameters(self) -> int:
        """Elements of the embeddings; 0 if they are the output projection too, or the target's."""
        is_shared = self.tie_word_embeddings if self.head is None else not self.head.owns_embeddings
        return 0 if is_shared or not self.has_embeddings else self.embeddings().num_weights

    def _looked_up_bytes(self, dtype: str) -> int:
        """Bytes in memory of `_num_looked_up_parameters`."""
        table = self.stored_embeddings()
        if table is None or not self.has_embeddings:
            return self._num_looked_up_parameters() * DTYPE_BYTES[dtype]
        return table.num_bytes(dtype)

    def _num_other_elements(self) -> int:
        """Elements of norms, and of what routers add."""
        return self._num_norm_elements() + self._num_router_biases()

    def _num_router_biases(self) -> int:
        return sum(count * layer.num_router_biases() for layer, count in self.layer_kinds)

    def _num_norm_elements(self) -> int:
        around = () if self.head is None else self.head.norms
        final = self.final_norm.num_elements if self.has_output else 0
        of_layers = sum(count * layer.num_norm_elements() for layer, count in self.layer_kinds)
        return of_layers + final + sum(n.size for n in around)

    def _held_bytes(self, linear: LinearShape, dtype: str, quantization: str | None, is_packed: bool) -> int:
        return sum(part.num_bytes(dtype, is_packed=is_packed) for part in self.stored(linear, quantization))


def load_model_config(
    folder: Path, overrides: dict[str, Any] | None = None, *, any_architecture: bool = False
) -> ModelConfig:
    """Read config.json of a checkpoint folder, and the end-of-sequence ids of its generation_config.json, if any.

    Args:
        folder: the checkpoint folder, or a GGUF file: its metadata replaces config.json.
        overrides: merged over config.json first, in Hugging Face's names (`--hf-overrides`); nested objects merge too.
        any_architecture: also accept an architecture or activation that is not native (for the transformers backend).

    Raises:
        ModelConfigError: a file is missing or no JSON object, a field is missing or illegal, unknown architecture.
        WeightsError: a malformed GGUF file.
    """
    folder = Path(folder)
    if is_gguf(folder):
        file = open_gguf(folder)
        family, form = family_of(file, FAMILIES.values())
        raw = merge(to_hf_config(file, family, form), overrides or {})
        facts = translate(raw, str(folder), FAMILIES, any_architecture=False)
        facts["quantized"] = gguf_weights(file, family, form)
        return ModelConfig(model=str(folder), hf_overrides=dict(overrides or {}), **facts)
    raw = merge(read_object(folder / "config.json", required=True), overrides or {})
    facts = translate(raw, str(folder / "config.json"), FAMILIES, any_architecture)
    if facts["quantized"] is None and "quantization_config" not in raw:  # null in raw is an override
        for name, method in SEPARATE_FILES.items():
            if description := read_object(folder / name, required=False):
                facts["quantized"] = parse_description(Fields(description, str(folder / name)), method)
                break
    path = folder / "generation_config.json"
    generation = read_object(path, required=False)
    if generation.get("eos_token_id") is not None:  # it replaces the value of config.json, as in transformers
        facts["eos_token_ids"] = Fields(generation, str(path)).token_ids("eos_token_id")
    return ModelConfig(model=str(folder), hf_overrides=dict(overrides or {}), **facts)


def load_head_config(folder: Path, method: str, target: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Read config.json of a head that drafts for `target`. If the head is a layer of the target, it is the target's.

    Args:
        method: eagle3 or mtp.
        names: the names of the tensors in the folder; empty: nobody has looked.

    Raises ModelConfigError like load_model_config, and if the head does not fit the target.
    """
    path = folder / "config.json"
    raw = merge(read_object(path, required=True), target.hf_overrides if method == "mtp" else {})
    facts = head_config.Target(target.num_layers, target.hidden_size, target.vocab_size)
    if method == "mtp":
        return ModelConfig(model=str(folder), **head_config.mtp(raw, str(path), FAMILIES, facts, names))
    return ModelConfig(model=str(folder), **head_config.eagle3(raw, str(path), facts, names))
