"""What adapters add to the layers of a model, against its dequantized weights plus the dense product of A and B."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quire.demo
from quire.formats.weight_format import ON_LOAD
from quire.kernels import cpu
from quire.kernels.recording import Arena, record
from quire.layers.linear import Linear
from quire.lora.slots import AdapterSlots
from quire.model_config import load_model_config
from quire.models.decoder import Decoder
from tests.covering import in_turn
from tests.examples import IS_FULL
from tests.gguf.writing import write_gguf
from tests.loading import load_model
from tests.lora.random_adapters import RandomDelta, packed, random_deltas
from tests.models.paged_run import PagedRun
from tests.quantization.checkpoints import Format, save_tensors, write_quantized

FORMATS = {
    "awq": Format(method="awq", group_size=32, has_zeros=True),
    "gptq": Format(method="gptq", group_size=32, has_zeros=True, has_order=True),
    "w4a16": Format(method="pack-quantized", group_size=32, has_order=True),
    "w8a8": Format(method="int-quantized", bits=8, scale_dtype=torch.bfloat16),
}
GGUF = {"blk.1.attn_v": "Q6_K", "blk.2.": "Q4_0", "blk.3.": "Q5_1", "blk.4.ffn_gate": "Q8_0"}  # parts of other types
# The error of the result's norm: rounding, and activations of 8 bits.
TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 6e-3, "fp8": 6e-3}
QUANTIZED_ACTIVATIONS = 0.03


def model_of(precision: str, folder: Path) -> Decoder:
    """The demo model in a dtype, in a format on load, or as a checkpoint."""
    source, dtype = quire.demo.path("target"), torch.bfloat16
    if precision in FORMATS:
        write_quantized(source, folder, FORMATS[precision])
        source = folder
    elif precision == "gguf":
        source = folder / "model.gguf"
        write_gguf(source, quire.demo.path("target"), "Q4_K", overrides=GGUF)
    elif precision not in ON_LOAD:
        dtype = getattr(torch, precision)
    model = load_model(load_model_config(source), dtype, quantization=precision if precision in ON_LOAD else None)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", *ON_LOAD, *FORMATS, "gguf"])
@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
def test_each_layer_is_its_dequantized_weight_plus_the_delta(precision: str, tmp_path: Path) -> None:
    """In every format, fused or in parts, each row with its adapter or none, in short batches and long ones."""
    model = model_of(precision, tmp_path)
    slots = AdapterSlots(model, 2, 16, torch.float16)
    deltas = random_deltas(model, torch.float16, seed=1, rank=16)
    slots.add(packed(slots, "a", deltas))
    random = torch.Generator().manual_seed(3)
    tolerance = TOLERANCES.get(precision, QUANTIZED_ACTIVATIONS)
    for place in list(model.adaptable())[1:9]:  # two layers of the demo model
        layer = place.layer
        assert isinstance(layer, Linear)
        weight_NK = layer.scheme.rows(layer, torch.arange(layer.out_features)).float()
        added_NK = torch.cat([deltas[name].dense() for name, _ in place.parts])
        for T in (5, 250 if IS_FULL else 70):
            x = torch.randn(T, place.in_features, generator=random).to(model.dtype)
            slots_T = torch.arange(T, dtype=torch.int32) % 2 - 1
            got = layer(x, adapter_slots_T=slots_T)
            assert got.dtype == model.dtype
            bias = 0.0 if layer.bias is None else layer.bias.float()
            want = x.float() @ weight_NK.T + bias + torch.where(slots_T[:, None] == 0, x.float() @ added_NK.T, 0.0)
            assert float((got.float() - want).norm() / want.norm()) < tolerance
            plain = layer(x)
            assert torch.equal(got[slots_T < 0], plain[slots_T < 0]), "a row without an adapter has other bits"
            assert (got[slots_T == 0] - plain[slots_T == 0]).float().norm() > 0.1 * want.norm()
            some = slice(3, 4)
            assert torch.equal(layer(x[some], adapter_slots_T=slots_T[some]), got[some])
            _, calls = record(partial(layer, x, adapter_slots_T=slots_T), Arena())
            assert calls is not None, "a decode step with adapters is not repeated without Python"


def merged(folder: Path, deltas: dict[str, RandomDelta], *, untied: bool) -> None:
    """The demo model in float32 with the deltas in its weights."""
    source = quire.demo.path("target")
    shutil.copytree(source, folder)
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    if untied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    for name, delta in deltas.items():
        dense = delta.dense()
        tensors[f"{name}.weight"] += dense.T if name == "model.embed_tokens" else dense
    save_tensors(folder, tensors)


def logits_of(model: Decoder, slots: AdapterSlots | None, digest: str | None) -> Tensor:
    """Of every position of 40 tokens, in two chunks."""
    tokens = torch.randint(3, model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    slot = -1 if slots is None or digest is None else slots.slots[digest]
    run = PagedRun(model, model.dtype, adapter_slot=slot)
    return torch.cat([run.step({0: tokens[:33]})[0], run.step({0: tokens[33:]})[0]])


@pytest.mark.parametrize(
    ("wants", "path"), in_turn([[("linears",), ("everything",)], [("vocabulary",)]], ["kernels", "reference"])
)
def test_logits_are_those_of_merged_weights(
    wants: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "kernels" and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    monkeypatch.setattr(cpu, "_available", path == "kernels")
    is_wanted: dict[str, Callable[[str], bool]] = {
        "linears": lambda name: name.startswith("model.layers."),
        "everything": lambda name: True,
        "vocabulary": lambda name: not name.startswith("model.layers."),
    }
    folders = {name: tmp_path / name for name in ("plain", "merged")}
    untied = wants != "linears"
    merged(folders["plain"], {}, untied=untied)
    model = load_model(load_model_config(folders["plain"]), torch.float32)
    assert isinstance(model, Decoder)
    deltas = random_deltas(model, torch.float32, seed=2, rank=8, wants=is_wanted[wants])
    merged(folders["merged"], deltas, untied=untied)
    twin = load_model(load_model_config(folders["merged"]), torch.float32)
    assert isinstance(twin, Decoder)
    slots = AdapterSlots(model, 3, 8, torch.float32)
    base = logits_of(model, None, None)
    slots.add(packed(slots, "other", random_deltas(model, torch.float32, seed=5, rank=4)))
    slots.add(packed(slots, "wanted", deltas))
    want = logits_of(twin, None, None)
    got = logits_of(model, slots, "wanted")
    assert (want - base).abs().max() > 0.1
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)
    assert torch.equal(logits_of(model, slots, None), base)
    slots.remove("other")
    assert torch.equal(logits_of(model, slots, "wanted"), got)
    slots.remove("wanted")
    assert slots.slots == {}
    slots.add(packed(slots, "again", deltas))
    assert torch.equal(logits_of(model, slots, "again"), got)


def test_memory_of_an_adapter_in_a_slot_is_not_given_to_another_one(tmp_path: Path) -> None:
    merged(tmp_path / "plain", {}, untied=False)
    model = load_model(load_model_config(tmp_path / "plain"), torch.float32)
    assert isinstance(model, Decoder)
    slots = AdapterSlots(model, 2, 8, torch.float32)

    def add(digest: str, seed: int) -> Tensor:
        slots.add(packed(slots, digest, random_deltas(model, torch.float32, seed=seed, rank=8)))
        return logits_of(model, slots, digest)

    first, second = add("first", 1), add("second", 2)
    assert torch.equal(logits_of(model, slots, "first"), first)
    slots.remove("first")
    assert len(slots._memory._spare) == 1, "the memory of the first one waits for the third"
    add("third", 3)
    assert not slots._memory._spare
    assert torch.equal(logits_of(model, slots, "second"), second)
    slots.remove("third")
    assert torch.equal(add("first", 1), first)


def test_only_wanted_modules_have_tables() -> None:
    model = model_of("bfloat16", Path())
    AdapterSlots(model, 1, 16, torch.bfloat16, target_modules=("q_proj", "lm_head"))
    adapted = [names for place in model.adaptable() if place.layer.lora is not None for names in place.parts]
    assert {name.rpartition(".")[2] for name, _ in adapted} == {"q_proj", "k_proj", "v_proj", "lm_head"}
