"""The costs of models with every kind of layer, against published counts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import quire.demo
from quire.cost.arithmetic import StepArithmetic
from quire.formats.kv_format import KV_FORMATS
from quire.layer_spec.attention import Chunked, Full, Latent, State, Window
from quire.layer_spec.feed_forward import Dense, Experts, Router, distinct_experts
from quire.layer_spec.kv_spec import KvSpec
from quire.layer_spec.layer import LayerSpec, Norms
from quire.layer_spec.rope_config import RopeConfig
from quire.layer_spec.shapes import HeadMatrices, LinearShape, NormShape
from quire.model_config import ModelConfig, load_model_config

BF16, INT8 = KV_FORMATS["bfloat16"], KV_FORMATS["int8"]


def model(layers: list[LayerSpec], hidden: int, vocab: int) -> ModelConfig:
    """A model in bfloat16 whose embeddings are not shared."""
    own = load_model_config(quire.demo.path())
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "final_norm": NormShape("norm", hidden)}
    return replace(own, layers=tuple(layers), tie_word_embeddings=False, **sizes)


def linear(name: str, in_features: int, out_features: int) -> LinearShape:
    return LinearShape(prefix="", shards=((name, out_features),), in_features=in_features)


def mlp(name: str, hidden: int, inner: int) -> Dense:
    return Dense(
        gate_up=linear(f"{name}.gate_up", hidden, 2 * inner),
        down=linear(f"{name}.down", inner, hidden),
        activation="silu",
    )


def experts(hidden: int, inner: int, count: int, num_active: int, shared: Dense | None = None) -> Experts:
    def stack(name: str, in_features: int, out_features: int) -> LinearShape:
        return replace(linear(name, in_features, out_features), prefix="experts.{}.", num_experts=count)

    return Experts(
        router=Router(linear=replace(linear("gate", hidden, count), is_gate=True), scoring="softmax"),
        expert=Dense(gate_up=stack("gate_up", hidden, 2 * inner), down=stack("down", inner, hidden), activation="silu"),
        num_active=num_active,
        shared=shared,
    )


def norms(hidden: int) -> Norms:
    return Norms(before=NormShape("norm", hidden))


def heads(hidden: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> Full:
    q_width, kv_width = num_q_heads * head_dim, num_kv_heads * head_dim
    return Full(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        soft_cap=0.0,
        rope=RopeConfig(head_dim),
        qk_norm="none",
        qkv=linear("qkv", hidden, q_width + 2 * kv_width),
        output=linear("o", q_width, hidden),
    )


def test_experts_are_all_held_and_some_read() -> None:
    """Mixtral 8x7B."""
    hidden, inner = 4096, 14_336
    layer = LayerSpec(
        attention=heads(hidden, 32, 8, 128),
        feed_forward=experts(hidden, inner, 8, 2),
        attention_norms=norms(hidden),
        feed_forward_norms=norms(hidden),
    )
    mixtral = model([layer] * 32, hidden, 32_000)
    assert mixtral.num_parameters() == 46_702_792_704
    idle = 32 * 6 * 3 * hidden * inner
    assert mixtral.num_block_parameters() == 46_702_792_704 - idle - 2 * 32_000 * hidden
    assert mixtral.num_active_parameters() == 46_702_792_704 - idle
    assert mixtral.weight_bytes("bfloat16", is_packed=False) == 2 * 46_702_792_704
    held = mixtral.weight_bytes_by_kind("bfloat16")
    assert mixtral.read_bytes_per_step("bfloat16") == sum(held) - held.embeddings - 2 * idle
    assert {num_bytes for _, num_bytes in mixtral.expert_bytes("bfloat16")} == {2 * 3 * hidden * inner}


def test_steps_read_the_experts_that_their_tokens_are_expected_to_hit() -> None:
    """One token hits its own; many hit all. Between them, 8 tokens with 2 of 8 each leave (3/4)^8 of an expert."""
    hidden, inner = 64, 128
    layer = LayerSpec(attention=None, feed_forward=experts(hidden, inner, 8, 2))
    few = model([layer] * 3, hidden, 32)
    arithmetic = StepArithmetic(few, "bfloat16", None, "auto")
    expert = 2 * 3 * hidden * inner
    rest = few.read_bytes_per_step("bfloat16") - 3 * 2 * expert
    read = {count: arithmetic.demand(arithmetic.load([0], [count], 1)).weight_bytes for count in (1, 8, 1000)}
    assert read[1] == pytest.approx(rest + 3 * 2 * expert)
    assert read[8] == pytest.approx(rest + 3 * 8 * (1 - 0.75**8) * expert)
    assert read[1000] == pytest.approx(rest + 3 * 8 * expert)
    assert distinct_experts(8, 8, 1) == 8


def test_latent_attention_keeps_one_row() -> None:
    """DeepSeek-V2-Lite: one dense layer, then 64 experts, 6 of them active, and two shared ones."""
    hidden, num_heads, rank, rope_dim = 2048, 16, 512, 64
    latent = Latent(
        num_heads=num_heads,
        rank=rank,
        rope_dim=rope_dim,
        nope_dim=128,
        value_dim=128,
        scale=1.0,
        rope=RopeConfig(rope_dim),
        is_interleaved=True,
        input=linear("q_and_kv_a", hidden, num_heads * (128 + rope_dim) + rank + rope_dim),
        query=None,
        up=replace(
            linear("kv_b", rank, num_heads * (128 + 128)),
            matrices=(
                HeadMatrices("k", num_heads, rank, 128, num_rows=128),
                HeadMatrices("v", num_heads, 128, rank, num_rows=128),
            ),
        ),
        output=linear("o", num_heads * 128, hidden),
        query_norm=None,
        row_norm=NormShape("kv_a_norm", rank),
        norm_eps=1e-6,
    )
    dense = LayerSpec(
        attention=latent,
        feed_forward=mlp("mlp", hidden, 10_944),
        attention_norms=norms(hidden),
        feed_forward_norms=norms(hidden),
    )
    sparse = experts(hidden, 1408, 64, 6, mlp("shared", hidden, 2 * 1408))
    deepseek = model([dense, *[replace(dense, feed_forward=sparse)] * 26], hidden, 102_400)
    assert deepseek.num_parameters() == 15_706_484_224
    assert deepseek.kv_bytes_per_token(BF16) == 27 * 576 * 2
    assert deepseek.kv_bytes_per_token(INT8) == 27 * (576 + 4), "one row, one scale"
    of_heads = heads(hidden, num_heads, num_heads, 128 + rope_dim).kv_spec  # values padded to the size of keys
    assert 10 * deepseek.kv_bytes_per_token(BF16) < 27 * of_heads.bytes_per_token(BF16)
    int4 = replace(deepseek, layers=(dense,))
    (up,) = int4.stored(latent.up, "int4")
    assert up.num_bytes("bfloat16") == 2 * rank * num_heads * (128 + 128), "in the model's dtype"
    assert sparse.width == 2 * (6 + 2) * 1408


def test_a_state_costs_nothing_per_token() -> None:
    """A hybrid: layers with a state, layers without attention, and one with heads."""
    state = LayerSpec(attention=State(num_bytes=1000, linears=(linear("in", 8, 16),)), feed_forward=None)
    empty = LayerSpec(attention=None, feed_forward=mlp("mlp", 8, 16))
    full = LayerSpec(attention=heads(8, 2, 1, 4), feed_forward=None)
    hybrid = model([state, empty, state, full], 8, 10)
    assert hybrid.kv_bytes_per_token(BF16) == 2 * 4 * 2
    assert [spec.state_bytes for spec in hybrid.kv_specs()] == [1000, 1000, 0]
    assert empty.kv_spec is None
    assert hybrid.num_parameters() == 2 * 8 * 10 + 8 + 2 * 128 + 3 * 128 + (8 * 16 + 8 * 8)
    assert hybrid.attention_flops() == 4 * 2 * 4


def test_layers_of_one_kind_share_a_group() -> None:
    """Whatever else differs: rotation, scale, number of query heads."""
    full = heads(64, 8, 2, 8)
    bounded = {field: getattr(full, field) for field in full.__dataclass_fields__}
    window, chunked = Window(size=16, **bounded), Chunked(size=16, **bounded)
    assert full.kv_spec == replace(full, rope=None, num_q_heads=4).kv_spec
    assert window.kv_spec == KvSpec(kind="window", num_kv_heads=2, head_dim_k=8, head_dim_v=8, window=16)
    assert len({full.kv_spec, window.kv_spec, chunked.kv_spec, replace(window, size=8).kv_spec}) == 4


def test_the_configuration_of_deepseek_v2_lite(tmp_path: Path) -> None:
    """Published fields give the published count; the scale has YaRN's factor for all dimensions."""
    raw = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163_840,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 102_400,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    assert config.num_parameters() == 15_706_484_224
    assert config.kv_bytes_per_token(BF16) == 27 * 576 * 2
    assert config.max_model_len == 163_840
    attention = config.layers[0].attention
    assert isinstance(attention, Latent)
    assert attention.scale == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert attention.rope.attention_factor == 1.0, "mscale / mscale_all_dim"
