"""The decoder of every native family: embed, layers, final norm, logits.

Dimensions: T tokens, R rows with logits, D hidden, V vocabulary, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quire.attention.select import SharedBackends
from quire.formats.kv_groups import kv_groups, table_of_layer
from quire.forward_batch import ForwardBatch, HostStep, LaneRows, LayerCache
from quire.hf_config.quantization import OUTPUT
from quire.kernels.fp8 import Rows
from quire.layer_spec.rope_config import RopeConfig
from quire.layers.embedding import Embedding, Lookup, OutputProjection, PackedEmbedding
from quire.layers.joined import JoinedLookup
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm, make_norm
from quire.layers.rope import cos_sin_table
from quire.layers.weight_slot import Extent, StackedSlots, WeightSlot
from quire.model_config import ModelConfig
from quire.models.block import LayerBuilder, Sublayer, Weighted
from quire.models.form import ALONE, CPU, ModelForm, Sharing
from quire.models.weights import WeightTable
from quire.moe.layer import MoE

EMBEDDINGS = "model.embed_tokens"

# A part takes its input, the residual stream and the batch. It returns the input of the next part. It may change the
# residual stream.
_PartOfPass = Callable[[Rows, Tensor, ForwardBatch], Rows]


@dataclass(frozen=True)
class Adaptable:
    """A layer that LoRA adapters may change: they add to its results.

    Attributes:
        parts: the name of each of its weights in Llama's style, without suffix, and its number of out-features.
        rows: for each part, the rows of the whole weight that this rank has; None: it has all rows.
        looks_up: the layer is an embedding, so its in-features are tokens.
    """

    layer: Linear | Lookup
    parts: tuple[tuple[str, int], ...]
    in_features: int
    rows: tuple[range, ...] | None = None
    looks_up: bool = False


class Decoder:
    """A causal language model. It holds no weights before `load_weights`.

    Args:
        config: its `max_model_len` limits the positions, which are the rows of the rotary tables.

    Raises:
        ConfigError: the attention backend cannot serve a layer.
    """

    def __init__(self, config: ModelConfig, form: ModelForm, sharing: Sharing = ALONE) -> None:
        self.config, self._form, self._sharing = config, form, sharing
        self.dtype, self.device = form.dtype, form.device
        self.mapped_bytes = 0
        self._parts: list[tuple[str, Weighted]] = []
        self._mixtures: list[MoE] = []
        tables = table_of_layer(kv_groups(config))
        self._backends = SharedBackends(tables, form.device, form.attention_backend, form.cache_dtype)
        self._output: OutputProjection
        self._embed: Lookup
        if config.has_embeddings:
            self._embed = self._make_embeddings()
            if sharing.group is not None:
                assert config.vocab_share is not None, "a rank has a part of the model"
                self._embed = JoinedLookup(self._embed, config.vocab_share, sharing.group, form.device)
        elif config.has_output:
            self._output = self._make_output()
        self._layers = list(self._make_layers())
        if config.has_output:
            final_norm = make_norm(config.final_norm, config.rms_norm_eps, config.norm_offset, form.dtype)
            self._parts.append((f"{config.final_norm.name}.", final_norm))
        else:  # this norm only adds to the residual stream: nothing reads its result
            final_norm = RMSNorm.without_weights(config.hidden_size, config.rms_norm_eps, form.dtype, form.device)
        self._sublayers = [sublayer for layer in self._layers for sublayer in layer]
        for sublayer, successor in pairwise(self._sublayers):
            sublayer.next_norm = successor.input_norm
        self._sublayers[-1].next_norm = self._final_norm = final_norm
        self._parts_of_pass: list[_PartOfPass] = list(self._sublayers)
        # transformers rounds Gemma's factor to the dtype; Granite's factors are exact in every dtype.
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=form.dtype).item()
        ignored = config.ignored_prefixes + (("lm_head.",) if config.tie_word_embeddings else ())
        self._weights = WeightTable(self._slots(), config.renamed_prefixes, ignored)

    def _make_output(self) -> OutputProjection:
        (stored,) = self.config.stored(self.config.output_linear(), self._form.quantization)
        output = OutputProjection(stored, self.dtype)
        self._parts.append((stored.shape.prefix, output))
        return output

    def _make_embeddings(self) -> Lookup:
        config = self.config
        if config.has_output or config.tie_word_embeddings:
            self._output = self._make_output()
        if config.tie_word_embeddings:
            return PackedEmbedding(self._output)
        if (own := config.stored_embeddings()) is not None:
            packed = OutputProjection(own, self.dtype)
            self._parts.append((own.shape.prefix, packed))
            return PackedEmbedding(packed)
        return self._make_own_embeddings()

    def _make_own_embeddings(self) -> Embedding:
        table = Embedding(self.config.embeddings(), self.dtype)
        self._parts.append((f"{EMBEDDINGS}.", table))
        return table

    def _make_layers(self) -> Iterable[list[Sublayer]]:
        tables: dict[RopeConfig, Tensor] = {}

        def rope_table(rope: RopeConfig) -> Tensor:
            if rope not in tables:
                tables[rope] = cos_sin_table(rope, self.config.max_model_len).to(self.device)
            return tables[rope]

        num_caches = 0
        for spec in self.config.layers:
            build = LayerBuilder(
                config=self.config,
                spec=spec,
                cache=num_caches,
                form=self._form,
                sharing=self._sharing,
                rope_table=rope_table,
                backend=partial(self._backends.get, num_caches),
            )
            yield build.sublayers()
            self._parts += build.parts
            self._mixtures += build.mixtures
            num_caches += spec.kv_spec is not None

    def _slots(self) -> dict[str, WeightSlot | StackedSlots]:
        return {prefix + name: slot for prefix, part in self._parts for name, slot in part.slots()}

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that `load_weights` needs, by their names in the checkpoint."""
        return self._weights.expected()

    def check_weights(self, headers: Iterable[tuple[str, Tensor]]) -> None:
        """Raise WeightsError like `load_weights`, before any values are read.

        Args:
            headers: the name of each tensor of the checkpoint, and a tensor without values (on torch's device `meta`).
        """
        self._weights.check(headers)

    def extent(self, checkpoint_name: str) -> Extent | None:
        """The part of a tensor that `load_weights` reads; None: it reads all of the tensor."""
        return self._weights.extent(checkpoint_name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the tensors of a checkpoint by their Hugging Face names, in any order.

        A layer packs its weights as soon as it has all of them. The tensors may be views of mapped files: the model
        keeps copies only.

        Raises:
            WeightsError: tensors are missing or unexpected, or have another shape or dtype. The message names them.
        """
        self._weights.load((name, tensor.to(self.device)) for name, tensor in weights)

    def held(self) -> dict[str, dict[str, Any]]:
        """The loaded weights by part and attribute. `restore` needs nothing else."""
        return {prefix: {name: getattr(part, name) for name in part.held} for prefix, part in self._named_parts()}

    def restore(self, held: Mapping[str, Mapping[str, Any]], mapped_bytes: int) -> None:
        """Take the weights from the `held()` of a model of the same config and format, instead of `load_weights`.

        Args:
            mapped_bytes: see CausalLM.
        """
        for prefix, part in self._named_parts():
            for name in part.held:
                setattr(part, name, held[prefix][name])
        self._weights.mark_loaded()
        self.mapped_bytes = mapped_bytes

    def _named_parts(self) -> Iterable[tuple[str, Weighted]]:
        """The parts with unique names: several parts share a prefix, so each gets a number."""
        return ((f"{number} {prefix}", part) for number, (prefix, part) in enumerate(self._parts))

    def finalize(self) -> None:
        """Assert that no weight is missing. Every layer has packed its weights already."""
        assert not self._weights.missing(), f"finalize before load_weights: {self._weights.missing()[:3]}"

    @property
    def computes_with_torch(self) -> bool:
        """Whether large operations of a pass on a CPU are torch's: sums without a norm, or factors of logits."""
        is_scaled = self.config.logits_scaling != 1.0 or bool(self.config.logits_soft_cap)
        return is_scaled or any(sublayer.next_norm is None for sublayer in self._sublayers)

    def weight_bytes(self) -> int:
        """Bytes of the loaded weights. They include the padding of packed forms, and not the rotary tables."""
        return sum(part.weight_bytes() for _, part in self._parts)

    def prepare(self, step: HostStep, caches: list[LayerCache]) -> None:
        """Do the host's work for a step on a GPU. A CUDA graph cannot capture it."""
        self._backends.prepare(step, caches)

    def keep_streams(self, layers: Sequence[int], kept_TAD: Tensor) -> None:
        """From now on, each forward pass copies the residual streams before these layers to `kept_TAD`.

        Args:
            layers: A indices of layers of the whole model, in any order. The number of all layers means the stream
                after the last layer. Streams of other stages are left out.
            kept_TAD: memory for the A streams of the tokens of the largest pass, in the model's dtype.
        """
        parts: list[_PartOfPass] = []
        first = 0 if self.config.stage is None else self.config.stage.layers.start
        for layer, sublayers in enumerate([*self._layers, []], first):
            parts += [_KeptStream(kept_TAD[:, at]) for at, kept in enumerate(layers) if kept == layer]
            parts += sublayers
        self._parts_of_pass = parts

    def watch_experts(self) -> list[tuple[MoE, Tensor]]:
        """Every part with experts, each with a tensor, int32. From now on, each pass writes Routing.begins to it."""
        watched = []
        for mixture in self._mixtures:
            mixture.begins = torch.zeros(mixture.num_places + 1, dtype=torch.int32, device=self.device)
            watched.append((mixture, mixture.begins))
        return watched

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute hidden_TD of the step's tokens, after the final norm, in the model's dtype.

        The keys and values of the tokens are written to `batch.caches`. A pipeline stage before the last one gives the
        residual stream instead, which is the `hidden_TD` of the next stage's batch.
        """
        if batch.host is not None:
            self.prepare(batch.host, batch.caches)
        return self.run_blocks(self.embed_step(batch), batch)

    def run_blocks(self, residual_TD: Tensor, batch: ForwardBatch) -> Tensor:
        """Run all layers and, on the last stage, the final norm. The layers change the residual stream in place."""
        x_TD = _run(self._sublayers[0].input_norm, self._parts_of_pass, residual_TD, batch)
        assert isinstance(x_TD, Tensor), "the final norm feeds no layer"
        return x_TD if self.config.has_output else residual_TD

    def normed(self, stream_TD: Tensor) -> Tensor:
        """The result of the final norm, from the residual stream after the last layer."""
        return self._final_norm(stream_TD)

    def join_lanes(self, lanes: LaneRows) -> None:
        """Run the experts of this rank for the rows of other lanes, in a pass in which this lane has no rows."""
        batch = ForwardBatch.without_rows(lanes)
        for mixture in self._mixtures:
            mixture(torch.empty((0, self.config.hidden_size), dtype=self.dtype), batch)

    def embed(self, token_ids_T: Tensor, adapter_slots_T: Tensor | None = None) -> Tensor:
        """The residual stream before the first layer, [T, D] in the model's dtype.

        Args:
            token_ids_T: int64.
            adapter_slots_T: as in ForwardBatch.
        """
        residual_TD = self._embed(token_ids_T, adapter_slots_T)
        if self._embedding_multiplier != 1.0:
            residual_TD *= self._embedding_multiplier
        return residual_TD

    def embed_step(self, batch: ForwardBatch) -> Tensor:
        """The residual stream that `run_blocks` begins with. A stage behind the first one gets it with the batch."""
        if self.config.takes_tokens:
            return self.embed(batch.token_ids_T, batch.adapter_slots_T)
        assert batch.hidden_TD is not None, "the stage before sends it"
        return batch.hidden_TD

    def adaptable(self) -> Iterator[Adaptable]:
        """Every layer here that adapters may change: the embeddings come first and the output projection last."""
        hidden_size, vocab_size = self.config.hidden_size, self.config.vocab_size
        if self.config.takes_tokens:
            yield Adaptable(self._embed, ((EMBEDDINGS, hidden_size),), vocab_size, looks_up=True)
        for prefix, part in self._parts:
            if isinstance(part, Linear) and part.is_adaptable and not isinstance(part, OutputProjection):
                parts = tuple((prefix + name, size) for name, size in part.shards)
                yield Adaptable(part, parts, part.in_features, part.own_rows)
        if self.config.has_output:
            output = self._output
            yield Adaptable(output, ((OUTPUT, output.out_features),), hidden_size, output.own_rows)

    def own_name(self, checkpoint_name: str) -> str | None:
        """Our name for a tensor of the checkpoint, in Llama's style; None: the model does not use the tensor."""
        return self._weights.own_name(checkpoint_name)

    def is_of_all_experts(self, checkpoint_name: str) -> bool:
        """Whether a tensor of the checkpoint holds the tensors of all experts of a layer."""
        return self._weights.is_of_all_experts(checkpoint_name)

    def load_some(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take some tensors by our names. Each must come once and have the right shape. Complete layers can run."""
        self._weights.load_some((name, tensor.to(self.device)) for name, tensor in weights)

    def layer_parts(self, layer: int) -> list[tuple[str, Weighted]]:
        """The parts of one layer, each with the prefix of its names in the layer, for example `self_attn.`."""
        prefix = f"model.layers.{layer}."
        return [(name.removeprefix(prefix), part) for name, part in self._parts if name.startswith(prefix)]

    def run_layer(self, layer: int, residual_TD: Tensor, batch: ForwardBatch) -> None:
        """Run one layer alone, for calibration. The layer changes the residual stream in place.

        Only the weights of this layer must be loaded: the result of the next layer's norm is not used.
        """
        _run(self._layers[layer][0].input_norm, self._layers[layer], residual_TD, batch)

    def keep_logits_memory(self) -> None:
        """See OutputProjection.keep_memory."""
        if self.config.has_output:
            self._output.keep_memory()

    def compute_logits(
        self, hidden_RD: Tensor, adapter_slots_R: Tensor | None = None, owners_R: Tensor | None = None
    ) -> Tensor:
        """Compute logits_RV in float32, with the family's scale and soft cap.

        Args:
            hidden_RD: rows of the result of `forward`.
            adapter_slots_R: the adapter of each row, as in ForwardBatch.
            owners_R: the rank that gets each row, int32; None: the first rank gets all rows.
        """
        joined_RV = self._room_for_logits(len(hidden_RD), owners_R)
        own_RV = None if joined_RV is None else joined_RV[:, : self._output.out_features]
        return self.join_logits(self.own_logits(hidden_RD, adapter_slots_R, own_RV), owners_R, joined_RV)

    def own_logits(
        self, hidden_RD: Tensor, adapter_slots_R: Tensor | None = None, out_RV: Tensor | None = None
    ) -> Tensor:
        """Like `compute_logits`, but only for the part of the vocabulary that this rank has.

        Args:
            out_RV: memory for the result, float32, on a CPU; None: new memory.
        """
        config = self.config
        logits_RV = self._output.logits(hidden_RD, adapter_slots_R, out_RV)
        if config.logits_scaling != 1.0:
            logits_RV /= config.logits_scaling
        if config.logits_soft_cap:
            cap = config.logits_soft_cap
            logits_RV = logits_RV.div_(cap).tanh_().mul_(cap)
        return logits_RV

    def _room_for_logits(self, num_rows: int, owners_R: Tensor | None) -> Tensor | None:
        """Memory [R, V] in which the first rank computes its own logits in their place; None: it is not used here."""
        share, group = self.config.vocab_share, self._sharing.group
        if group is None or share is None or owners_R is not None or group.rank != 0 or self.device != CPU:
            return None
        return self._output.memory(num_rows, sum(share.widths(0)))

    def join_logits(self, logits_RV: Tensor, owners_R: Tensor | None = None, joined_RV: Tensor | None = None) -> Tensor:
        """Join the logits of all ranks: from each rank's part of the vocabulary to the whole vocabulary.

        Args:
            owners_R: see `compute_logits`.
            joined_RV: see Group.gather_to_first.
        """
        share, group = self.config.vocab_share, self._sharing.group
        if group is None or share is None:
            return logits_RV
        if owners_R is not None:
            return group.gather_rows(logits_RV, share.widths(0), owners_R)
        return group.gather_to_first(logits_RV, share.widths(0), joined_RV)


def _run(first_norm: RMSNorm | None, parts: Sequence[_PartOfPass], residual_TD: Tensor, batch: ForwardBatch) -> Rows:
    x_TD: Rows = residual_TD if first_norm is None else first_norm.feed(residual_TD)
    for part in parts:
        x_TD = part(x_TD, residual_TD, batch)
    return x_TD


class _KeptStream:
    """Copies the residual stream to memory where a drafter reads it: see Decoder.keep_streams."""

    def __init__(self, kept_TD: Tensor) -> None:
        self._kept_TD = kept_TD

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows:
        self._kept_TD.narrow(0, 0, residual_TD.shape[0]).copy_(residual_TD)
        return x_TD
