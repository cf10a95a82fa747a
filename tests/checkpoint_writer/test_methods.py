"""The mathematics of GPTQ and AWQ against slow twins, and the tensors against an independent writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire.checkpoint_writer.awq import output_error
from quire.checkpoint_writer.gptq import DAMPING, gptq
from quire.checkpoint_writer.layerwise import Layerwise
from quire.checkpoint_writer.methods import AWQ, Layer
from quire.checkpoint_writer.rounding import Grid, choose_grid, round_to_nearest
from quire.kernels.grouped_weight import GroupedWeight
from quire.kernels.reference import dequantize_grouped
from quire.model_config import load_model_config
from quire.quantization.awq import awq_tensors
from quire.quantization.compressed_tensors import int8_tensors, pack_quantized_tensors
from quire.quantization.gptq import gptq_tensors
from tests.models.tiny_models import SIZES
from tests.quantization.checkpoints import Format, draw, tensors_of


def correlated(K: int, seed: int) -> Tensor:
    """X^T X of inputs whose features move together, as a model's do."""
    generator = torch.Generator().manual_seed(seed)
    x_TK = torch.randn(4 * K, K // 4, generator=generator) @ torch.randn(K // 4, K, generator=generator)
    x_TK += 0.3 * torch.randn(4 * K, K, generator=generator)
    return x_TK.T @ x_TK


@pytest.mark.parametrize(
    ("group_size", "act_order"),
    [
        *[(32, False), (64, True), (256, False)],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in ((32, True), (64, False), (256, True))],
    ],
)
def test_gptq_follows_the_update_it_is_named_after(group_size: int, act_order: bool) -> None:
    """A twin that eliminates one row and column of the inverse after another, in float64 (equations 2 and 3).

    With an order, groups have the columns as they lie, and their grids come from the weights as they were.
    """
    K, N = 256, 9
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    gram_KK = correlated(K, 2)
    grouped = gptq(weight_NK, gram_KK, group_size, act_order=act_order)
    assert grouped.order_K is None
    found = dequantize_grouped(grouped)

    order = gram_KK.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(K)
    w, h = weight_NK[:, order].double(), gram_KK[order][:, order].double()
    inverse = torch.linalg.inv(h + DAMPING * h.diagonal().mean() * torch.eye(K))
    expected = torch.empty_like(w)
    grids: dict[int, Grid] = {}
    for k in range(K):
        index = int(order[k]) // group_size
        if index not in grids:
            group = slice(index * group_size, (index + 1) * group_size)
            columns = weight_NK[:, group] if act_order else w[:, group].float()
            grids[index] = choose_grid(columns, 4, symmetric=True, scale_dtype=torch.float16,
                                       importance=gram_KK.diagonal()[group])  # fmt: skip
        grid = grids[index]
        expected[:, k] = grid.nearest(w[:, k : k + 1].float())[:, 0]
        error = (w[:, k] - expected[:, k]) / inverse[k, k]
        w -= error[:, None] * inverse[k]
        inverse -= inverse[:, k : k + 1] * inverse[k] / inverse[k, k]
    back = torch.empty_like(expected)
    back[:, order] = expected
    same = (back.float() - found).abs() < 1e-3
    # where float32 and float64 fall to different sides of the middle between two codes, later columns differ too
    assert same.float().mean() > 0.97, same.float().mean()
    error = output_error(weight_NK - found, gram_KK)
    assert error == pytest.approx(output_error(weight_NK - back.float(), gram_KK), rel=0.05)
    nearest = round_to_nearest(weight_NK, 4, group_size, symmetric=True, scale_dtype=torch.float16)
    assert error < 0.5 * output_error(weight_NK - dequantize_grouped(nearest), gram_KK)


def test_gptq_with_inputs_that_are_never_used_or_all_alike() -> None:
    weight_NK = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    for gram_KK in (
        torch.zeros(64, 64),
        torch.ones(64, 64),
        correlated(64, 0) * torch.eye(64)[:1] * torch.eye(64)[:, :1],
    ):
        values = dequantize_grouped(gptq(weight_NK, gram_KK, 32))
        assert values.isfinite().all()
        assert (values - weight_NK).abs().max() < 4.0


@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_is_to_the_nearest_value(symmetric: bool) -> None:
    weight_NK = torch.randn(7, 128, generator=torch.Generator().manual_seed(4))
    weight_NK[0], weight_NK[1, :32], weight_NK[2] = 0.0, 3.0, 1e-9
    weight_NK[3] = weight_NK[3].abs()
    found = round_to_nearest(weight_NK, 4, 32, symmetric=symmetric, scale_dtype=torch.float16)
    values, scales_NK = dequantize_grouped(found), found.scales_NG.repeat_interleave(32, 1)
    assert torch.equal(found.scales_NG, found.scales_NG.half().float())
    assert ((values - weight_NK).abs() <= 0.505 * scales_NK + 1e-7).all()
    assert (values[0] == 0).all()
    clipped = choose_grid(weight_NK[3:], 4, symmetric=symmetric, scale_dtype=torch.float16, importance=torch.ones(1))
    plain = choose_grid(weight_NK[3:], 4, symmetric=symmetric, scale_dtype=torch.float16)
    errors = [(grid.nearest(weight_NK[3:]) - weight_NK[3:]).square().sum() for grid in (clipped, plain)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    "form",
    [
        Format(method="awq", group_size=32, has_zeros=True),
        Format(method="gptq", group_size=32),
        Format(method="pack-quantized", group_size=32, scale_dtype=torch.bfloat16),
        Format(method="int-quantized", bits=8, scale_dtype=torch.bfloat16),
    ],
    ids=lambda form: form.method,
)
def test_tensors_are_those_of_an_independent_writer(form: Format) -> None:
    numbers = draw(np.random.default_rng(0), 24, 128, form)
    weight = GroupedWeight(
        codes_NK=torch.from_numpy(numbers.codes_NK.astype(np.uint8)),
        bits=form.bits,
        group_size=form.group_size if form.group_size > 0 else 128,
        scales_NG=numbers.scales_NG.float(),
        zeros_NG=torch.from_numpy(numbers.zeros_NG.astype(np.uint8)) if form.has_zeros else None,
    )
    write: dict[str, Any] = {
        "awq": awq_tensors,
        "gptq": gptq_tensors,
        "pack-quantized": lambda weight: pack_quantized_tensors(weight, form.scale_dtype),
        "int-quantized": lambda weight: int8_tensors(weight, form.scale_dtype),
    }
    found, expected = write[form.method](weight), tensors_of(numbers, form)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"sliding_window": 9, "query_pre_attn_scalar": 20}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.4}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_awq_scales_in_one_place_what_it_scales_back_in_another(family: str, tmp_path: Path) -> None:
    """Before rounding to codes, a scaled layer computes the same as the original."""
    name, settings = FAMILIES[family]
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | sizes | settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    config = replace(load_model_config(tmp_path), dtype="float32")
    layerwise = Layerwise(config, torch.float32, 24)
    weights = {
        n.removeprefix("model.layers.0."): t.detach()
        for n, t in model.state_dict().items()
        if n.startswith("model.layers.0.")
    }
    windows = torch.randint(0, 131, (3, 24), generator=torch.Generator().manual_seed(1)).tolist()
    residuals = layerwise.embed(model.get_input_embeddings().weight.detach(), windows)
    linears = layerwise.linears(0)
    inputs = layerwise.observe(0, weights, residuals, lambda count: None)
    layer = Layer(weights, linears, layerwise.norms(0), inputs, config.kv_specs()[0].head_dim_v)
    scaled = {n: t.clone() for n, t in weights.items()}
    factors = {linear.names[0]: AWQ(32)._scale(layer, linear, scaled) for linear in linears}
    changed = {n for n, f in factors.items() if (f != 1).any()}
    assert changed == ({"self_attn.o_proj", "mlp.down_proj"} if family == "olmo2" else set(factors))

    before, after = [r.clone() for r in residuals], [r.clone() for r in residuals]
    layerwise.run(0, weights, before, lambda count: None)
    layerwise.run(0, scaled, after, lambda count: None)
    for residual, expected in zip(after, before, strict=True):
        assert not torch.equal(expected, residuals[0])
        torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    with torch.inference_mode():
        theirs = model.model(torch.tensor(windows[:1]), output_hidden_states=True).hidden_states[1][0]
    torch.testing.assert_close(before[0], theirs, rtol=1e-3, atol=1e-3)
