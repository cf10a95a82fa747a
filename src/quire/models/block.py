"""One decoder layer: its parts, and the pre-norm block that most families are made of.

Dimensions: T tokens, D hidden, H query heads, G kv heads, E head dim, I intermediate, R rotary dims, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.layer import Attention
from quire.forward_batch import ForwardBatch
from quire.kernels.fp8 import Rows
from quire.layers.activation import gated_activation
from quire.layers.linear import Projection, make_linear
from quire.layers.norm import RMSNorm
from quire.layers.weight_slot import WeightSlots
from quire.model_config import ModelConfig
from quire.stored_linear import LinearShape


class Weighted(Protocol):
    """A part that receives tensors of the checkpoint."""

    @property
    def held(self) -> tuple[str, ...]:
        """The attributes that hold what it has made of them."""
        ...

    def slots(self) -> WeightSlots: ...

    def weight_bytes(self) -> int: ...


class Block(Protocol):
    """One layer. It changes the residual stream in place and returns the input of the next block's attention.

    `next_norm` makes that input: it is the next block's `input_norm`, or the model's final norm after the last block.
    So the addition to the residual and the norm behind it are one kernel, also across blocks.
    """

    input_norm: RMSNorm | None
    next_norm: RMSNorm | None

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows: ...


class SelfAttention:
    """Projections around attention. Input [T, D], output [T, D]."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        qkv: Projection,
        output: Projection,
        wide_norms: tuple[RMSNorm, RMSNorm] | None,
    ) -> None:
        self._heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        self._num_heads, self._head_dim = sum(self._heads), config.head_dim
        self._q_width, self._kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._attention, self.qkv, self._output = attention, qkv, output
        self._wide_norms = wide_norms

    def __call__(self, x_TD: Rows, batch: ForwardBatch) -> Tensor:
        qkv = self.qkv(x_TD)
        if self._wide_norms is not None:
            self._normalise_width(qkv)
        num_tokens = qkv.shape[0]
        q_THE, k_TGE, v_TGE = qkv.view(num_tokens, self._num_heads, self._head_dim).split_with_sizes(self._heads, 1)
        out_THE = self._attention(q_THE, k_TGE, v_TGE, batch)
        return self._output(out_THE.view(num_tokens, self._q_width))

    def _normalise_width(self, qkv: Tensor) -> None:
        """OLMo 2: one norm over all q heads and one over all k heads, in place."""
        assert self._wide_norms is not None
        q_norm, k_norm = self._wide_norms
        q, k, _ = qkv.split_with_sizes((self._q_width, self._kv_width, self._kv_width), 1)
        q_norm(q, out=q)
        k_norm(k, out=k)


class MLP:
    """Gated MLP. Input [T, D], output [T, D]."""

    def __init__(self, gate_up: Projection, activation: Callable[[Tensor], Rows], down: Projection) -> None:
        self.gate_up, self._activation, self._down = gate_up, activation, down

    def __call__(self, x_TD: Rows) -> Tensor:
        return self._down(self._activation(self.gate_up(x_TD)))


@dataclass
class LayerBuilder:
    """Makes the parts of one layer and remembers under which name the checkpoint has them."""

    config: ModelConfig
    layer: int
    dtype: torch.dtype
    quantization: str | None
    norm_offset: float
    rope_table: Tensor | None  # cos_sin_LR
    backend: Callable[[AttentionSpec], AttentionBackend]
    parts: list[tuple[str, Weighted]] = field(default_factory=list)  # (name prefix inside the layer, part)

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """An RMS norm, of the hidden size unless told otherwise."""
        config = self.config
        norm = RMSNorm(size or config.hidden_size, config.rms_norm_eps, self.norm_offset, self.dtype)
        self.parts.append((f"{name}.", norm))
        return norm

    def linear(self, shape: LinearShape, bias: bool) -> Projection:
        """A linear layer, stored as the config and `quantization` say."""
        linear = make_linear(self.config.stored(shape, self.quantization), bias=bias, dtype=self.dtype)
        prefix = shape.prefix.removeprefix(f"model.layers.{self.layer}.")
        self.parts += [(prefix, part) for part in linear.parts]
        return linear

    def attention(self) -> SelfAttention:
        """Self-attention as the config describes it."""
        config = self.config
        q_width, kv_width = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linears = config.block_linears(self.layer)
        qkv = self.linear(linears.qkv, config.qkv_bias)
        output = self.linear(linears.attention_output, config.attention_output_bias)
        spec = AttentionSpec(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            sliding_window=config.layer_windows[self.layer],
            soft_cap=config.attention_soft_cap,
            dtype=self.dtype,
        )
        head_norms = wide_norms = None
        if config.qk_norm == "head":
            head_norms = (
                self.norm("self_attn.q_norm", config.head_dim),
                self.norm("self_attn.k_norm", config.head_dim),
            )
        elif config.qk_norm == "full":
            wide_norms = (self.norm("self_attn.q_norm", q_width), self.norm("self_attn.k_norm", kv_width))
        attention = Attention(self.layer, self.backend(spec), self.rope_table, *(head_norms or ()))
        return SelfAttention(config, attention, qkv, output, wide_norms)

    def mlp(self) -> MLP:
        """The gated MLP as the config describes it."""
        config = self.config
        linears = config.block_linears(self.layer)
        gate_up, down = self.linear(linears.gate_up, config.mlp_bias), self.linear(linears.down, config.mlp_bias)
        return MLP(gate_up, gated_activation(config.hidden_act, feeds=down), down)


class PreNormBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama and most others."""

    def __init__(self, build: LayerBuilder) -> None:
        input_norm = build.norm("input_layernorm")
        self.input_norm: RMSNorm | None = input_norm
        self.next_norm: RMSNorm | None = None
        self.attention = build.attention()
        self.mlp_norm = build.norm("post_attention_layernorm")
        self.mlp = build.mlp()
        input_norm.feeds, self.mlp_norm.feeds = self.attention.qkv, self.mlp.gate_up

    def __call__(self, x_TD: Rows, residual_TD: Tensor, batch: ForwardBatch) -> Rows:
        assert self.next_norm is not None
        x_TD = self.mlp_norm.add(self.attention(x_TD, batch), residual_TD)
        return self.next_norm.add(self.mlp(x_TD), residual_TD)
