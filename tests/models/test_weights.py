"""Loading: unfit tensors are named, borrowed memory is not kept, and a layer is packed as soon as it is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ModelConfigError, WeightsError
from quire.kernels import cpu
from quire.model_config import load_model_config
from quire.models.decoder import Decoder
from quire.models.form import ModelForm
from quire.models.registry import build_model

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(params=["torch", "kernels"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "kernels" and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    monkeypatch.setattr(cpu, "_available", request.param == "kernels")


@pytest.fixture
def build(tmp_path: Path):
    def build_tiny(**changes: Any) -> Decoder:
        (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
        model = build_model(load_model_config(tmp_path), ModelForm(torch.float32))
        assert isinstance(model, Decoder)
        return model

    return build_tiny


def random_weights(model: Decoder) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape) for name, shape in model.expected_weights().items()}


def test_expected_names_are_those_of_the_checkpoint(build):
    names = build().expected_weights()
    assert names["model.embed_tokens.weight"] == (70, 32)
    assert names["model.layers.0.self_attn.k_proj.weight"] == (16, 32)
    assert names["model.layers.1.mlp.gate_proj.weight"] == (48, 32)
    assert names["model.norm.weight"] == (32,)
    assert "lm_head.weight" not in names
    assert len(names) == 2 + 2 * 9


def test_untied_model_expects_both_matrices(build):
    names = build(tie_word_embeddings=False).expected_weights()
    assert names["lm_head.weight"] == names["model.embed_tokens.weight"] == (70, 32)


def test_missing_weights_are_named(build):
    model = build()
    weights = random_weights(model)
    del weights[Q_PROJ], weights["model.norm.weight"]
    with pytest.raises(WeightsError, match=rf"2 missing \({Q_PROJ}, model.norm.weight\).*completely downloaded"):
        model.load_weights(weights.items())


def test_unexpected_weights_are_named(build):
    model = build()
    weights = {**random_weights(model), "model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}
    with pytest.raises(WeightsError, match=r"1 unexpected \(model.layers.2.mlp.up_proj.weight\)"):
        model.load_weights(weights.items())


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.attn.v_scale", "self_attn.v_proj.output_scale"])
def test_calibrated_kv_scales_are_left_out_with_a_notice(name, build, caplog):
    model = build()
    scales = {f"model.layers.{layer}.{name}": torch.tensor(0.5) for layer in (0, 1)}
    with caplog.at_level("INFO"):
        model.load_weights({**random_weights(model), **scales}.items())
    notices = [record.getMessage() for record in caplog.records if "scales of the KV cache" in record.getMessage()]
    assert len(notices) == 1
    assert f"2, as model.layers.0.{name}" in notices[0]


def test_misshapen_weight_is_named_with_both_shapes(build):
    model = build()
    weights = {**random_weights(model), Q_PROJ: torch.zeros(31, 32)}
    with pytest.raises(WeightsError, match=rf"{Q_PROJ} has shape \[31, 32\] instead of \[32, 32\]"):
        model.load_weights(weights.items())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_foreign_dtype_is_named(dtype, build):
    """Without its scales, a quantized weight would load as noise."""
    model = build()
    weights = {**random_weights(model), Q_PROJ: torch.zeros(32, 32).to(dtype)}
    with pytest.raises(WeightsError, match=rf"{Q_PROJ} has dtype {str(dtype).removeprefix('torch.')}"):
        model.load_weights(weights.items())


def test_weight_that_comes_twice_is_named(build):
    model = build()
    weights = random_weights(model)
    with pytest.raises(WeightsError, match=rf"{Q_PROJ} comes twice"):
        model.load_weights([*weights.items(), (Q_PROJ, weights[Q_PROJ])])


def test_many_problems_are_counted(build):
    with pytest.raises(WeightsError, match=r"20 missing \(.* and 15 more\)"):
        build().load_weights([])


def test_rotary_buffers_and_the_copy_of_a_tied_matrix_are_skipped(build):
    model = build()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(70, 32)}
    model.load_weights({**random_weights(model), **extra}.items())
    model.finalize()


def test_finalize_refuses_an_unloaded_model(build):
    with pytest.raises(AssertionError, match="finalize before load_weights"):
        build().finalize()


def test_nothing_borrowed_is_kept(build):
    """The loader may unmap its files: overwriting its tensors must not change the model."""
    model = build(tie_word_embeddings=False, attention_bias=True)
    weights = random_weights(model)
    model.load_weights(weights.items())
    hidden = torch.randn(3, 32)
    layer = model._layers[0][0]._mixer
    before = [model.compute_logits(hidden), layer._output(hidden), layer.reader(hidden), model._embed(torch.arange(5))]
    norm = model._sublayers[0].input_norm.weight_D.clone()
    for tensor in weights.values():
        tensor.fill_(torch.nan)
    after = [model.compute_logits(hidden), layer._output(hidden), layer.reader(hidden), model._embed(torch.arange(5))]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(norm, model._sublayers[0].input_norm.weight_D)


def test_a_layer_packs_itself_when_its_last_tensor_has_come(build):
    """Peak memory: no layer holds weights both unpacked and packed."""
    model = build()
    weights = random_weights(model)
    qkv = model._layers[1][0]._mixer.reader
    prefix = "model.layers.1.self_attn."
    seen: list[tuple[bool, bool]] = []

    def stream():
        for shard in ("v_proj", "q_proj", "k_proj"):
            tensor = qkv.tensors["weight"]
            seen.append((tensor.is_complete, qkv.weight is not None))
            yield f"{prefix}{shard}.weight", weights[f"{prefix}{shard}.weight"]
        seen.append((bool(qkv.tensors), qkv.weight is not None))

    with pytest.raises(WeightsError):  # the rest is missing
        model.load_weights(stream())
    assert seen == [(False, False), (False, False), (False, False), (False, True)]


def test_unknown_architecture_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**TINY, "architectures": ["FalconForCausalLM"], "model_type": "falcon"})
    )
    config = load_model_config(tmp_path, any_architecture=True)
    with pytest.raises(ModelConfigError, match=r"FalconForCausalLM.*--model-impl transformers"):
        build_model(config, ModelForm(torch.float32))
