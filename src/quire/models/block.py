"""One decoder layer, made from its LayerSpec.

Dimensions: T tokens, D hidden, H query heads, G kv heads, E head dim, I intermediate, R rotary dims, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.divided import DividedAttention
from quire.attention.layer import Attention, Sinks
from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.kernels.layer_rules import LatentRotation
from quire.layer_spec.attention import Chunked, Full, Latent, Window
from quire.layer_spec.cuts import Share
from quire.layer_spec.feed_forward import Dense, Experts
from quire.layer_spec.layer import LayerSpec
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import LinearShape, NormShape
from quire.layers.activation import gated_activation
from quire.layers.joined import JoinedLinear, JoinedNorm
from quire.layers.linear import Linear, Projection, SplitLinear, make_linear
from quire.layers.norm import RMSNorm, make_norm
from quire.layers.up_projection import UpProjection
from quire.layers.weight_slot import AnySlots
from quire.model_config import ModelConfig
from quire.models.form import ModelForm, Sharing
from quire.models.latent import LatentAttention
from quire.moe.layer import ChoiceBias, MoE
from quire.moe.stack import ExchangedStack, ExpertStack, JoinedStack, SplitStack, make_stack


class Weighted(Protocol):
    """A part of a layer that has weights."""

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the attributes that hold the loaded weights."""
        ...

    def slots(self) -> AnySlots:
        """Name and WeightSlot of each tensor of the checkpoint that the part takes."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of the loaded weights."""
        ...


class Mixer(Protocol):
    """The computation of a layer between two norms: attention or feed-forward. Input [T, D], output [T, D]."""

    @property
    def reader(self) -> Projection | None:
        """The only linear layer that reads the input; None: several layers read it."""
        ...

    def __call__(self, x_TD: Rows, batch: ForwardBatch) -> Tensor: ...


class Sublayer:
    """Computes residual += c * norm(mixer(norm(residual))). Both norms may be missing.

    It changes the residual stream in place and returns the input of the next sublayer. `next_norm` makes that input.
    It is the next sublayer's `input_norm`; after the last sublayer it is the model's final norm. So one kernel adds to
    the residual and computes the norm, also across layers.

    Args:
        input_norm: the norm before the mixer; None: there is none.
        output_norm: the norm after the mixer; None: there is none.
        multiplier: c.
    """

    def __init__(
        self, mixer: Mixer, input_norm: RMSNorm | None, output_norm: RMSNorm | None, multiplier: float
    ) -> None:
        self._mixer, self._output_norm, self._multiplier = mixer, output_norm, multiplier
        self.input_norm = input_norm
        self.next_norm: RMSNorm | None = None
        if input_norm is not None:
            input_norm.feeds = mixer.reader

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows:
        y_TD = self._mixer(x_TD, batch)
        if self._output_norm is not None:
            y_TD = self._output_norm(y_TD, out=y_TD)
        if self.next_norm is None:
            # The product is rounded before the sum, as in RMSNorm.add.
            return residual_TD.add_(y_TD if self._multiplier == 1.0 else y_TD.mul_(self._multiplier))
        return self.next_norm.add(y_TD, residual_TD, self._multiplier)

    def write(self, x_TD: Rows, batch: ForwardBatch) -> None:
        """Write the keys and values of attention. Nothing attends to them, and the residual stream does not change."""
        assert isinstance(self._mixer, (SelfAttention, LatentAttention)), "only attention has keys and values"
        self._mixer.write(x_TD, batch)


class SelfAttention:
    """Attention with its projections. Input [T, D], output [T, D].

    Args:
        qkv: gives q, k and v of a token side by side.
        wide_norms: OLMo 2's norms, one over all query heads and one over all key heads; empty: there are none.
    """

    def __init__(
        self,
        spec: Full,
        attention: Attention,
        qkv: Projection,
        output: Projection | JoinedLinear,
        wide_norms: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> None:
        self._heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        self._num_heads, self._head_dim = sum(self._heads), spec.head_dim
        self._q_width, self._kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._attention, self.reader, self._output = attention, qkv, output
        self._without_q = qkv.without_first if isinstance(qkv, SplitLinear) and spec.qkv.is_first_apart else None
        self._wide_norms = wide_norms
        self._clip = spec.clip

    def __call__(self, x_TD: Rows, batch: ForwardBatch) -> Tensor:
        # No variable holds q, k and v, so they are freed before the output is projected.
        out_THE = self._attention(*self._parts_of(self.reader(x_TD, adapter_slots_T=batch.adapter_slots_T)), batch)
        out_TW = out_THE.view(out_THE.shape[0], self._q_width)
        return self._output(out_TW, adapter_slots_T=batch.adapter_slots_T)

    def write(self, x_TD: Rows, batch: ForwardBatch) -> None:
        """Write the keys and values, and do not attend. If q is stored apart, it is not computed."""
        qkv = self.reader(x_TD) if self._without_q is None else self._without_q(x_TD)
        self._attention.write(*self._parts_of(qkv), batch)

    def _parts_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q_THE, k_TGE and v_TGE before the norms of heads and the rotation, from the projection of T tokens."""
        num_tokens = qkv.shape[0]
        q_THE, k_TGE, v_TGE = qkv.view(num_tokens, self._num_heads, self._head_dim).split_with_sizes(self._heads, 1)
        if self._wide_norms:
            q, k, _ = qkv.split_with_sizes((self._q_width, self._kv_width, self._kv_width), 1)
            normed = (norm(x) for norm, x in zip(self._wide_norms, (q, k), strict=True))
            q_THE, k_TGE = (
                x.view(num_tokens, heads, self._head_dim) for x, heads in zip(normed, self._heads, strict=False)
            )
        if self._clip:
            for x in (q_THE, k_TGE, v_TGE):
                x.clamp_(-self._clip, self._clip)
        return q_THE, k_TGE, v_TGE


class MLP:
    """Gated MLP. Input [T, D], output [T, D]."""

    def __init__(
        self, gate_up: Projection, activation: Callable[[Tensor], Rows], down: Projection | JoinedLinear
    ) -> None:
        self.reader, self._activation, self._down = gate_up, activation, down

    def __call__(self, x_TD: Rows, batch: ForwardBatch) -> Tensor:
        slots_T = batch.adapter_slots_T
        # No variable holds the wide results, so each of them is freed when the next layer has read it.
        return self._down(self._activation(self.reader(x_TD, adapter_slots_T=slots_T)), adapter_slots_T=slots_T)


@dataclass
class LayerBuilder:
    """Makes the parts of one layer and collects them with their names in the checkpoint."""

    config: ModelConfig
    spec: LayerSpec
    cache: int  # index of the layer's cache in ForwardBatch.caches
    form: ModelForm
    sharing: Sharing
    rope_table: Callable[[RopeConfig], Tensor]  # cos_sin_LR
    backend: Callable[[AttentionSpec], AttentionBackend]
    parts: list[tuple[str, Weighted]] = field(default_factory=list)  # (prefix of its tensors' names, part)
    mixtures: list[MoE] = field(default_factory=list)

    def sublayers(self) -> list[Sublayer]:
        """All sublayers of the layer."""
        sublayers = []
        for part, norms in self.spec.parts:
            before = self.norm(norms.before) if norms.before else None
            mixer = _MIXERS[type(part)](self, part)
            after = self.norm(norms.after) if norms.after else None
            sublayers.append(Sublayer(mixer, before, after, self.spec.residual_multiplier))
        return sublayers

    def norm(self, shape: NormShape, eps: float | None = None) -> RMSNorm:
        """A norm of the layer. `eps`: its epsilon; None: the epsilon of the model."""
        eps = self.config.rms_norm_eps if eps is None else eps
        norm = make_norm(shape, eps, self.config.norm_offset, self.form.dtype)
        self.parts.append((f"{shape.name}.", norm))
        return norm

    def linear(self, shape: LinearShape) -> Projection:
        """A linear layer in the form that the config and `quantization` choose."""
        linear = make_linear(self.config.stored(shape, self.form.quantization), self.form.dtype)
        self.parts += [(shape.prefix, part) for part in linear.parts]
        return linear

    def joined(self, shape: LinearShape, *, keeps_part: bool = False) -> Projection | JoinedLinear:
        """A linear layer that reads the outputs of a layer that is cut over ranks. `keeps_part`: see JoinedLinear."""
        linear = self.linear(shape)
        if self.sharing.group is None:
            return linear
        assert shape.share is not None, "a rank of a group has a part of the layer"
        return JoinedLinear(linear, shape.share, self.sharing.group, keeps_part=keeps_part)

    def wide_norms(self, spec: Full, norms: Sequence[RMSNorm]) -> list[Callable[[Tensor], Tensor]]:
        """The norms over all query heads and over all key heads, which change their input in place."""
        share, group = spec.qkv.share, self.sharing.group
        if group is None or share is None:
            return [partial(_in_place, norm) for norm in norms]
        return [JoinedNorm(norm, share, shard, group) for shard, norm in enumerate(norms)]

    def gate(self, shape: LinearShape) -> Linear:
        """A linear layer that decides about others, a router for example. The checkpoint has one tensor for it."""
        linear = self.linear(shape)
        assert isinstance(linear, Linear)
        return linear

    def attention_backend(self, spec: AttentionSpec, share: Share | None, head_rows: int) -> AttentionBackend:
        """The backend of this layer.

        Args:
            share: the rank's share of the linear layer that gives the queries.
            head_rows: the rows of that layer for one query head.
        """
        group, num_owners = self.sharing.group, self.sharing.num_kv_owners
        if num_owners == 1:
            return self.backend(spec)
        assert group is not None and share is not None, "one rank has all of the cache"
        return DividedAttention(spec, group, [rows // head_rows for rows in share.widths(0)], num_owners)

    def attention(self, spec: Full) -> SelfAttention:
        """Attention to all earlier tokens, or to the earlier tokens of a window or a chunk."""
        qkv, output = self.linear(spec.qkv), self.joined(spec.output)
        kind, size = spec.kv_spec.kind, spec.kv_spec.window
        backend = self.attention_backend(
            AttentionSpec(
                num_q_heads=spec.num_q_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=spec.scale,
                sliding_window=size if kind == "window" else 0,
                soft_cap=spec.soft_cap,
                dtype=self.form.dtype,
                chunk=size if kind == "chunked" else 0,
                has_sinks=spec.sinks,
            ),
            spec.qkv.share,
            spec.head_dim,
        )
        sinks = None
        if spec.sinks:
            sinks = Sinks(spec.num_q_heads, self.form.dtype, spec.sink_share)
            self.parts.append((spec.qkv.prefix, sinks))
        norms = [self.norm(shape) for shape in spec.norms]
        head_norms, wide_norms = ([], norms) if spec.qk_norm == "full" else (norms, [])
        table = None if spec.rope is None else self.rope_table(spec.rope)
        if spec.qk_norm == "unit":
            eps = self.config.rms_norm_eps
            head_norms = [RMSNorm.without_weights(spec.head_dim, eps, self.form.dtype, self.form.device)] * 2
        q_norm, k_norm = head_norms or (None, None)
        attention = Attention(
            self.cache,
            backend,
            table,
            q_norm,
            k_norm,
            sinks=sinks,
            temperature=spec.temperature,
            temperature_floor=spec.temperature_floor,
        )
        return SelfAttention(spec, attention, qkv, output, self.wide_norms(spec, wide_norms))

    def latent(self, spec: Latent) -> LatentAttention:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
        up = UpProjection(self.config.stored(spec.up, self.form.quantization), self.form.dtype)
        self.parts.append((spec.up.prefix, up))
        backend = self.attention_backend(
            AttentionSpec(
                num_q_heads=spec.num_heads,
                num_kv_heads=1,
                head_dim=spec.rank + spec.rope_dim,
                value_dim=spec.rank,
                scale=spec.scale,
                sliding_window=0,
                soft_cap=0.0,
                dtype=self.form.dtype,
            ),
            spec.up.share,
            spec.nope_dim + spec.value_dim,
        )
        return LatentAttention(
            spec,
            self.cache,
            backend,
            LatentRotation(self.rope_table(spec.rope), spec.is_interleaved),
            reader=self.linear(spec.input),
            row_norm=self.norm(spec.row_norm, spec.norm_eps),
            up=up,
            output=self.joined(spec.output),
            query=None if spec.query is None else self.linear(spec.query),
            query_norm=None if spec.query_norm is None else self.norm(spec.query_norm, spec.norm_eps),
        )

    def mlp(self, spec: Dense, *, keeps_part: bool = False) -> MLP:
        """A gated MLP. `keeps_part`: see JoinedLinear."""
        gate_up, down = self.linear(spec.gate_up), self.joined(spec.down, keeps_part=keeps_part)
        return MLP(gate_up, gated_activation(spec.activation, feeds=down), down)

    def stack(self, shape: LinearShape) -> ExpertStack | SplitStack:
        """The linear layers of all experts."""
        stack = make_stack(self.config.stored(shape, self.form.quantization), self.form.dtype)
        self.parts += [(shape.prefix, part) for part in stack.parts]
        return stack

    def experts(self, spec: Experts) -> MoE:
        """The experts of the layer and their router. With lanes, the ranks of `dispatch` share the experts."""
        group, dispatch = self.sharing.group, self.sharing.dispatch
        if dispatch is not None and group is not dispatch.group:
            return replace(self, sharing=replace(self.sharing, group=dispatch.group)).experts(spec)
        router, choice_bias = self.gate(spec.router.linear), None
        if spec.router.has_bias_for_choice:
            choice_bias = ChoiceBias(spec.num_routed)
            self.parts.append((f"{spec.router.linear.names[0]}.", choice_bias))
        gate_up, stack, join = self.stack(spec.expert.gate_up), self.stack(spec.expert.down), None
        down: ExpertStack | SplitStack | JoinedStack | ExchangedStack = stack
        if group is not None and (placement := spec.placement) is not None:
            down = ExchangedStack(stack, placement, group)
            join = partial(group.gather, widths=[len(columns) for columns in placement.columns])
        elif group is not None and (share := spec.expert.down.share) is not None:
            down, join = JoinedStack(stack, share, group), partial(group.gather, widths=share.widths(0))
        mixture = MoE(
            spec,
            router,
            choice_bias,
            gate_up=gate_up,
            down=down,
            shared=None if spec.shared is None else self.mlp(spec.shared, keeps_part=True),
            shared_gate=None if spec.shared_gate is None else self.gate(spec.shared_gate),
            device=self.form.device,
            join=join,
            dispatch=dispatch,
        )
        self.mixtures.append(mixture)
        return mixture


def _in_place(norm: RMSNorm, x_TN: Tensor) -> Tensor:
    return norm(x_TN, out=x_TN)


_MIXERS: dict[type, Callable[[LayerBuilder, Any], Mixer]] = {
    Full: LayerBuilder.attention,
    Window: LayerBuilder.attention,
    Chunked: LayerBuilder.attention,
    Latent: LayerBuilder.latent,
    Dense: LayerBuilder.mlp,
    Experts: LayerBuilder.experts,
}
