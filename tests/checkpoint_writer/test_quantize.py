"""`quire quantize`: the checkpoints it writes lose less than rounding, load elsewhere, and survive interruptions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quire.demo
from quire.checkpoint_writer.output import Output
from quire.cli.main import main
from quire.config import EngineConfig
from quire.loader import safetensors_writer
from quire.model_config import load_model_config
from quire.quality import measure
from quire.quality.summary import Quality, summarize
from quire.worker.model_runner import ModelRunner
from tests.checkpoint_writer.folders import OPTIONS, plain_weights, quantize, tensors, write_plain
from tests.examples import IS_FULL
from tests.loading import load_model
from tests.models.paged_run import PagedRun
from tests.models.test_families import Case, random_hf_model
from tests.models.tiny_models import QUANTIZED_ACTIVATIONS_TOLERANCE
from tests.quality.remembering import remembering

COMMON: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 256, "num_threads": 1}
BASE = EngineConfig(dtype="float32", **COMMON)


@cache
def base_runner() -> ModelRunner:
    """The demo model in float32."""
    return remembering(measure.load(BASE, lambda *_: None).runner)


def quality(folder: Path, text: str, **options: Any) -> Quality:
    """Against the demo model in float32."""
    model = EngineConfig(model=str(folder), **COMMON | options)
    windows = measure.read_text(text, BASE, [model], 256, 1024 if IS_FULL else 256)
    runner = measure.load(model, lambda *_: None).runner
    return summarize(measure.compare_runners(windows, base_runner(), runner))


@pytest.fixture(scope="module")
def losses(
    folders: dict[str, Path], texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, float]:
    """By format: the distance of the weights it stands for from the original, with activations in float32."""
    plain = tmp_path_factory.mktemp("plain")
    return {
        name: quality(write_plain(folder, plain / name), texts["measured"]).kl_mean.value
        for name, folder in folders.items()
    }


def test_calibrated_formats_lose_less_than_rounding(losses: dict[str, float]) -> None:
    """At the same group size."""
    kl = losses
    assert kl["gptq"] < 0.85 * kl["int4"], kl
    assert kl["gptq-act-order"] < 0.85 * kl["int4"], kl
    assert kl["awq"] < 0.85 * kl["int4"], kl
    assert kl["int8"] < kl["fp8"] < kl["gptq"], kl


@pytest.mark.parametrize("name", ["int4", "int8", "fp8", "gptq", "gptq-act-order", "awq"])
def test_quire_reads_it(folders: dict[str, Path], texts: dict[str, str], losses: dict[str, float], name: str) -> None:
    """Nearly the distance of its plain weights from the original: activations in 8 bits add the rest."""
    read, plain = quality(folders[name], texts["measured"], dtype="float32").kl_mean.value, losses[name]
    assert read == pytest.approx(plain, rel=0.25, abs=0.002), (read, plain)


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_transformers_reads_it(folders: dict[str, Path], name: str) -> None:
    """The weights, to the rounding of bfloat16; GPTQ and AWQ are in test_readers.py."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))  # it unpacks weights when they are first used
    expected = plain_weights(folders[name])
    compared = 0
    for module_name, module in model.named_modules():
        if f"{module_name}.weight" not in expected or "_proj" not in module_name:
            continue
        assert module.weight.dtype in (torch.float32, torch.bfloat16), "not unpacked"
        torch.testing.assert_close(module.weight.float(), expected[f"{module_name}.weight"], rtol=2**-8, atol=0)
        compared += 1
    assert compared == 7 * 6


def test_what_is_not_quantized_is_as_it_was(folders: dict[str, Path]) -> None:
    original = load_file(quire.demo.path() / "model.safetensors")
    for name, folder in folders.items():
        found = tensors(folder)
        for tensor_name, tensor in original.items():
            is_scaled = name == "awq" and "layernorm" in tensor_name
            if "_proj" not in tensor_name and not is_scaled:
                assert torch.equal(found[tensor_name], tensor), (name, tensor_name)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            assert (folder / file).read_bytes() == (quire.demo.path() / file).read_bytes()
        assert not [path.name for path in folder.iterdir() if path.suffix in (".tmp", ".partial")]
        assert not (folder / "quantize-state.json").exists()


def test_a_quantized_checkpoint_is_measured_against_a_named_original(
    folders: dict[str, Path], texts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quality", str(folders["awq"]), "--text", texts["measured"], "--num-threads", "1", "--max-tokens", "300"]
    assert main([*words, "--kv-cache-dtype", "int8"]) == 2
    assert "--against BASE" in capsys.readouterr().err
    assert main([*words, "--against", str(quire.demo.path())]) == 0
    assert "awq" in capsys.readouterr().out


@pytest.mark.slow
def test_generated_calibration_is_seeded(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> dict[str, Tensor]:
        words = ["quantize", str(tmp_path / name), "--to", "gptq", *OPTIONS, "--calibration-length", "32"]
        assert main([*words, "--seed", str(seed)]) == 0
        return tensors(tmp_path / name)

    first, second, other = run("first", 0), run("second", 0), run("other", 1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("to", "kills"),
    [
        # the first shards with their records, and the files at the end; between them every other one
        ("int4", (1, 2, 3, 8, 11, *range(14, 22))),
        pytest.param("int4", range(1, 22), marks=pytest.mark.slow),
        pytest.param("awq", (4, 7, 14, 20), marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_is_continued(
    folders: dict[str, Path],
    texts: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    kills: range | tuple[int, ...],
) -> None:
    """Killed at any file it writes, with half of it on the disk: no model is there, and the next run ends the same."""
    from quire.checkpoint_writer import output

    expected = {path.name: path.read_bytes() for path in folders[to].iterdir()}
    write_whole = safetensors_writer.write_whole
    for kill in kills:
        left = kill

        def killed(path: Path, write: Callable[[Any], object]) -> None:
            nonlocal left
            left -= 1
            if not left:
                path.with_name(path.name + ".partial").write_bytes(b"half a fi")
                raise KeyboardInterrupt
            write_whole(path, write)

        for module in (safetensors_writer, output):
            monkeypatch.setattr(module, "write_whole", killed)
        out = tmp_path / str(kill)
        finished = quantize(to, out, texts["calibration"]) == 0
        for module in (safetensors_writer, output):
            monkeypatch.setattr(module, "write_whole", write_whole)
        if finished:
            assert kill > 10, "nothing was interrupted"
            break
        assert not (out / "config.json").exists(), f"write {kill}: an unfinished folder looks like a model"
        assert quantize(to, out, texts["calibration"]) == 0
        assert {path.name: path.read_bytes() for path in out.iterdir()} == expected, f"killed at write {kill}"


def test_a_bar_counts_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal; a run that is continued begins where the other stopped."""
    finish_shard = Output.finish_shard

    def interrupted(self: Output, index: int, *rest: Any) -> None:
        finish_shard(self, index, *rest)
        if index == 2:
            raise KeyboardInterrupt

    words = ["quantize", str(tmp_path / "out"), "--to", "int4", "--num-threads", "1"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish_shard", interrupted)
        assert main(words) == 130
    capsys.readouterr()
    assert main(words) == 0
    shown = capsys.readouterr().err
    assert "continues after 3 of 7 shards" in shown
    assert "| 7/7 [" in shown


def test_other_settings_do_not_continue_a_run(
    texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_shard = Output.finish_shard

    def interrupted(self: Output, index: int, *rest: Any) -> None:
        finish_shard(self, index, *rest)
        if index == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Output, "finish_shard", interrupted)
    assert quantize("int4", tmp_path / "out", "") == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert quantize("int4", tmp_path / "out", "", "--group-size", "64") == 2
    shown = capsys.readouterr().err
    assert "other settings" in shown
    assert "group_size" in shown
    assert quantize("int4", tmp_path / "out", "") == 0


@pytest.mark.parametrize("content", ["config.json", "notes.txt"])
def test_a_folder_with_something_else_is_left_alone(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / content).write_text("{}")
    assert quantize("int4", tmp_path, "") == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [content]


def test_what_it_refuses(
    folders: dict[str, Path], texts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short"
    short.write_text("too short")
    refused: list[tuple[str, str, tuple[str, ...], Path | None, str]] = [
        ("int4", "", (), folders["awq"], "quantized already"),
        ("int4", "", ("--group-size", "100"), None, "Illegal group size"),
        ("gptq", str(short), (), None, "too short"),
        ("awq", str(tmp_path / "none"), (), None, "cannot be read"),
        ("gptq", texts["calibration"], ("--calibration-windows", "0"), None, "Too little"),
    ]
    for to, calibration, more, model, part in refused:
        assert quantize(to, tmp_path / "out", calibration, *more, model=model) == 2, part
        assert part in capsys.readouterr().err
    odd = tmp_path / "odd"
    write_plain(folders["int8"], odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"intermediate_size": 600}))
    assert quantize("int4", tmp_path / "out", "", model=odd) == 2
    assert "down_proj" in capsys.readouterr().err


SIZES_IN_GROUPS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 4, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("config_class", "settings", "to", "kept"),
    [
        ("Qwen3MoeConfig", {"num_experts": 4}, "int4", "layers.1.mlp.gate"),
        ("MixtralConfig", {"num_local_experts": 4}, "fp8", "layers.1.block_sparse_moe.gate"),
        (
            "DeepseekV2Config",
            LATENT | {"n_routed_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 4},
            "int8",
            "layers.1.self_attn.kv_b_proj",
        ),
    ],
)
def test_experts_and_latent_attention(
    config_class: str, settings: dict[str, Any], to: str, kept: str, tmp_path: Path
) -> None:
    """Quire reads the weights that were written; routers, gates and weights that are taken apart stay."""
    model = random_hf_model(Case(config_class, SIZES_IN_GROUPS | EXPERTS | settings))
    model.save_pretrained(tmp_path / "model")
    assert quantize(to, tmp_path / "out", "", "--group-size", "32", model=tmp_path / "model") == 0
    original, found = load_file(tmp_path / "model" / "model.safetensors"), tensors(tmp_path / "out")
    assert torch.equal(found[f"model.{kept}.weight"], original[f"model.{kept}.weight"])
    plain = write_plain(tmp_path / "out", tmp_path / "plain")
    quantized, rounded, exact = (
        PagedRun(load_model(load_model_config(folder), torch.float32), torch.float32).step({0: list(range(3, 23))})[0]
        for folder in (tmp_path / "out", plain, tmp_path / "model")
    )
    assert (quantized - rounded).norm() < QUANTIZED_ACTIVATIONS_TOLERANCE * rounded.norm()
    assert 0 < (rounded - exact).norm() < 0.5 * exact.norm()


@pytest.mark.parametrize(
    ("config_class", "to", "message"),
    [
        ("GraniteMoeConfig", "int4", "all experts of a layer in one tensor.*input_linear"),
        ("MixtralConfig", "gptq", "has experts, which cannot be calibrated"),
    ],
)
def test_experts_that_it_refuses(
    config_class: str, to: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_hf_model(Case(config_class, SIZES_IN_GROUPS | {"num_local_experts": 4}))
    model.save_pretrained(tmp_path / "model")
    assert quantize(to, tmp_path / "out", "", "--group-size", "32", model=tmp_path / "model") == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


def test_what_is_copied_beside_the_weights(tmp_path: Path) -> None:
    """Not the index of weight files that are not written: readers would look for them."""
    source = tmp_path / "source"
    source.mkdir()
    names = ("tokenizer.json", "LICENSE", "pytorch_model.bin.index.json", "model.safetensors.index.json", "model.bin")
    for name in names:
        (source / name).write_text("{}")
    output = Output(tmp_path / "out", 1, {})
    output.begin()
    output.finish_shard(0, {"a": torch.zeros(2)}, [])
    output.complete(source, {})
    found = {path.name for path in output.folder.iterdir() if path.suffix != ".safetensors"}
    assert found == {"config.json", "tokenizer.json", "LICENSE", "model.safetensors.index.json"}
    index = json.loads((output.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": "model-00001-of-00001.safetensors"}
