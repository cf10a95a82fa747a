"""`quire plan`: its bytes are the loaded ones; its answers for models of the guides, from config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.demo
import quire.planning.fits
from quire import LLM
from quire.cli.main import main
from quire.config import EngineConfig, ServerConfig
from quire.cost.arithmetic import StepArithmetic
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.model_config import load_model_config
from quire.planning import devices
from quire.planning.what_fits import ModelPlan, plan
from quire.resolve import DeviceFacts, GpuFacts, shown_bytes
from quire.screen.explain import explain
from tests.loading import load_model

GIB = 1 << 30
CPU = DeviceFacts(
    kind="cpu", name="test", isa="avx2", num_cores=4, total_memory_bytes=64 * GIB, free_memory_bytes=60 * GIB
)
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
MISTRAL_7B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 32768,
}  # fmt: skip
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}


def gpu(num_bytes: int) -> DeviceFacts:
    return replace(CPU, gpu=GpuFacts("test", 90, num_bytes, num_bytes))


def plan_of(folder: Path, fields: dict[str, Any], device: DeviceFacts, **flags: Any) -> ModelPlan:
    """Of a Llama with these fields in its config.json, and of no other file."""
    common = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps({**common, "dtype": "bfloat16", **fields}))
    model = load_model_config(folder)
    return plan("m", EngineConfig(model="m", **flags), model, device, memory_name="test")


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
    assert main(["plan", "--json", *words]) == code
    models: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["models"]
    return models


@pytest.mark.skipif(not cpu.available(), reason="the twin holds 4-bit codes in bytes")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_planned_bytes_are_loaded(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To a byte, in every format that the plan lists, by kind."""
    (found,) = shown(capsys, "--device", "cpu", "--dtype", dtype)
    assert [row["quantization"] for row in found["weights"]] == [None, "int8", "fp8", "int4"]
    config = load_model_config(quire.demo.path())
    for row in found["weights"]:
        model = load_model(config, getattr(torch, row["dtype"]), quantization=row["quantization"])
        assert model.weight_bytes() == row["num_bytes"], row["name"]
        kinds = ("blocks", "output", "embeddings", "norms_and_biases")
        assert sum(row[f"{kind}_bytes"] for kind in kinds) == row["num_bytes"]
        assert row["embeddings_bytes"] == 0, "they are the output projection's"
        assert row["output_bytes"] >= config.vocab_size * config.hidden_size


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8", "fp8_e5m2"])
def test_planned_kv_bytes_are_allocated(kv_cache_dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "--device", "cpu", "--kv-cache-dtype", kv_cache_dtype, "--num-gpu-blocks-override", "200")
    fit = found["fits"][0]
    llm = LLM(kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=200, device="cpu", num_threads=1)
    cache = llm.llm_engine.core.executor.workers[0].runner.cache  # type: ignore[attr-defined]
    assert fit["num_tokens"] == 200 * 16
    assert cache.num_bytes == fit["kv_bytes_per_token"] * fit["num_tokens"]


def test_what_fits_is_what_a_start_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of `explain`, if running requests can use all the free memory."""
    monkeypatch.setattr(devices, "total_memory_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: 220 << 20)
    for more in ((), ("--kv-cache-dtype", "int8"), ("--quantization", "int4"), ("--gpu-memory-utilization", "0.05")):
        (found,) = shown(capsys, "--device", "cpu", *more)
        assert main(["explain", "--json", "--device", "cpu", *more]) == 0
        settings = json.loads(capsys.readouterr().out)["settings"]
        fit = found["fits"][0]
        assert fit["num_tokens"] == settings["num_blocks"]["value"] * 16, more
        assert fit["why"] == settings["num_blocks"]["detail"]


def test_mistral_7b_awq_on_a_t4(tmp_path: Path) -> None:
    """16 GB at 0.9: 4.15 GB of weights leave about 9 GB, which are 9 requests of 8,192 tokens, not 40."""
    found = plan_of(tmp_path, MISTRAL_7B | AWQ, gpu(16 * 10**9), max_model_len=8192)
    (row,) = found.weights
    assert sum(row.num_bytes) == pytest.approx(4.15e9, rel=0.03)
    assert row.num_bytes.embeddings == row.num_bytes.output == 2 * 32000 * 4096
    fit = found.fits[0]
    assert (fit.form.kv_cache_dtype, fit.kv_bytes_per_token) == ("auto", 128 * 1024)
    assert 9e9 < fit.num_tokens * fit.kv_bytes_per_token < 10e9
    assert fit.num_sequences == 9


def test_llama_70b(tmp_path: Path) -> None:
    """39.8 GB in 4 bits with embeddings in bfloat16: 80 GB hold about 110,000 tokens beside it, 40 GB not even that."""
    bf16 = plan_of(tmp_path, LLAMA_70B, gpu(80 * 10**9))
    assert [row.form.name for row in bf16.weights] == ["bfloat16", "int8", "fp8", "int4"]
    assert sum(bf16.weights[0].num_bytes) == pytest.approx(141.1e9, rel=0.001)
    assert bf16.fits[0].num_tokens == 0
    assert bf16.fits[0].kv_bytes_per_token == 320 * 1024, "so 256 x 8,192 tokens take 687 GB, not 40"
    awq = plan_of(tmp_path, LLAMA_70B | AWQ, gpu(80 * GIB))
    assert sum(awq.weights[0].num_bytes) == pytest.approx(39.8e9, rel=0.01)
    assert awq.fits[0].num_tokens == pytest.approx(110_000, rel=0.1)
    assert awq.best is not None
    assert awq.best.form.flags == ()
    small = plan_of(tmp_path, LLAMA_70B | AWQ, gpu(40 * 10**9))
    assert small.best is None
    assert "best     none: --kv-cache-dtype fp8 comes closest, with" in small.text()


def test_adapters_of_a_70b(tmp_path: Path) -> None:
    """Rank 64 on all linear layers takes 1.66 GB; one more than fits is in memory while two change places."""
    modules = [*(f"{name}_proj" for name in "qkvo"), "gate_proj", "up_proj", "down_proj"]
    wanted = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "lora_target_modules": modules}
    plan = plan_of(tmp_path, LLAMA_70B, gpu(80 * 10**9), **wanted)
    objects, largest = 7 * 80 * 300, 28_672 * 64 * 4  # in Python, and a tensor in float32 that is read
    assert plan.as_dict()["lora_bytes"] == 5 * (64 * 2 * 80 * 161_792 + objects) + largest
    assert "adapters 7.72 GiB of work, at most: 4 of rank 64" in plan.text()


@pytest.mark.parametrize("share", [None, 0.9])
def test_what_is_missing_is_enough(share: float | None, tmp_path: Path) -> None:
    """With this number of bytes more, work and reserve counted, there is a first block; with one less there is none."""
    device = replace(CPU, total_memory_bytes=80 * GIB, free_memory_bytes=37 * GIB)
    flags: dict[str, Any] = {"kv_cache_dtype": "fp8", "gpu_memory_utilization": share}
    found = plan_of(tmp_path, LLAMA_70B | AWQ, device, **flags)
    (fit,) = found.fits
    assert found.best is None
    assert f"as it is comes closest, with {shown_bytes(fit.missing_bytes)} missing for any KV cache" in found.text()
    assert f"5% of {80 * GIB:,}" in found.text().splitlines()[-1], "the reserve is part of what is missing"
    for more, num_blocks in ((0, 1), (-1, 0)):
        enough = replace(device, free_memory_bytes=device.free_memory_bytes + fit.missing_bytes + more)
        assert plan_of(tmp_path, LLAMA_70B | AWQ, enough, **flags).fits[0].num_blocks == num_blocks


def test_the_longest_that_fits(tmp_path: Path) -> None:
    """`--max-model-len -1`: a start cuts it, so that every format holds a request; the plan says which holds it all."""
    device = gpu(46 * 10**9)
    found = plan_of(tmp_path, LLAMA_70B | AWQ, device, max_model_len=-1)
    best = found.best
    assert best is not None
    assert (best.form.flags, best.num_sequences) == ((), 1)
    assert 0 < best.max_model_len == best.num_tokens < 8192
    text = found.text()
    assert "requests of up to 8,192 tokens, cut to what fits:" in text
    assert f"holds 1 x {best.max_model_len:,} tokens" in text
    assert "--max-model-len -1 starts with that length; no format holds all 8,192" in text
    explained = explain("m", EngineConfig(model="m", max_model_len=-1), ServerConfig(), found.model, device)
    assert explained.error is None
    assert explained.settings["max_model_len"].value == best.max_model_len
    whole = plan_of(tmp_path, LLAMA_70B | AWQ, gpu(48 * 10**9), max_model_len=-1).text()
    assert "--max-model-len -1 starts with that length; --kv-cache-dtype int8 holds all 8,192" in whole
    assert "cut to" not in plan_of(tmp_path, LLAMA_70B | AWQ, gpu(80 * GIB), max_model_len=-1).text()


def test_weights_fit_but_no_full_request(tmp_path: Path) -> None:
    """44 GB: a few thousand tokens beside the weights of 70 B in 4 bits; the plan says which length would start."""
    found = plan_of(tmp_path, LLAMA_70B | AWQ, gpu(47 * 10**9), kv_cache_dtype="auto")
    assert found.fits[0].num_tokens in range(1000, 8192)
    limited = plan_of(tmp_path, LLAMA_70B | AWQ, gpu(46 * 10**9), kv_cache_dtype="int8")
    assert limited.best is None
    advice = limited.text().splitlines()[-1]
    length = int(advice.split()[1])
    assert "starts" in advice
    device = gpu(46 * 10**9)
    assert plan_of(tmp_path, LLAMA_70B | AWQ, device, kv_cache_dtype="int8", max_model_len=length).best is not None
    longer = plan_of(tmp_path, LLAMA_70B | AWQ, device, kv_cache_dtype="int8", max_model_len=length + 16)
    assert longer.best is None, "a block more does not start"


def test_max_model_len_does_not_change_what_fits(tmp_path: Path) -> None:
    """With pages it bounds one request, not the cache."""
    short, long = (
        plan_of(tmp_path, MISTRAL_7B, gpu(24 * GIB), max_model_len=length).fits[0] for length in (4096, 32768)
    )
    assert short.num_tokens == long.num_tokens
    assert short.num_sequences == short.num_tokens // 4096 > long.num_sequences == long.num_tokens // 32768 > 0


def test_the_best_loses_least_of_what_is_large_enough(tmp_path: Path) -> None:
    """In the order of measured losses; each format but the original has to be measured."""

    def best(num_bytes: float, **more: Any) -> tuple[str, ...]:
        found = plan_of(tmp_path, MISTRAL_7B, gpu(int(num_bytes)), max_model_len=8192, **more)
        assert found.best is not None
        is_original = not found.best.form.flags
        assert is_original != ("it is not the original: measure it first with `quire quality m -" in found.text())
        return found.best.form.flags

    assert best(24 * GIB) == ()
    assert best(17.4e9) == ("--kv-cache-dtype", "int8")
    assert best(16e9) == ("--quantization", "int8")
    assert best(7e9) == ("--quantization", "int4")
    assert best(24 * GIB, quantization="fp8") == (), "what the user has named is not up for choice"


def test_float32_checkpoints_may_run_in_bfloat16(tmp_path: Path) -> None:
    found = plan_of(tmp_path, MISTRAL_7B | {"dtype": "float32"}, CPU)
    names = [(row.form.name, row.form.dtype, row.form.flags) for row in found.weights]
    assert names[:3] == [
        ("float32", "float32", ()),
        ("bfloat16", "bfloat16", ("--dtype", "bfloat16")),
        ("int8", "bfloat16", ("--quantization", "int8", "--dtype", "bfloat16")),
    ]
    assert sum(found.weights[0].num_bytes) == 2 * sum(found.weights[1].num_bytes)


def test_a_format_the_model_cannot_have_is_named(tmp_path: Path) -> None:
    found = plan_of(tmp_path, MISTRAL_7B | {"intermediate_size": 65_600}, CPU)
    assert [row.form.name for row in found.weights] == ["bfloat16", "fp8", "int4"]
    assert "int8: A layer has more in-features than one scale" in found.text()


def test_a_pair_that_is_not_possible_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    possible = quire.planning.fits.resolve

    def refuse(engine: EngineConfig, *arguments: Any, **flags: Any) -> Any:
        if engine.quantization is not None and engine.kv_cache_dtype == "int8":
            raise ConfigError("No such pair")
        return possible(engine, *arguments, **flags)

    monkeypatch.setattr(quire.planning.fits, "resolve", refuse)
    found = plan_of(tmp_path, MISTRAL_7B, CPU)
    pairs = {(fit.form.weights.name, fit.form.kv_cache_dtype) for fit in found.fits}
    assert {("bfloat16", "int8"), ("int4", "fp8")} <= pairs
    assert ("int4", "int8") not in pairs
    assert found.refused["int4 with a KV cache in int8"] == "No such pair."
    assert any(line.startswith("int4") and " - " in line for line in found.text().splitlines())


def test_several_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(quire.demo.path())
    words = ["--memory", "80GiB", "--device", "cuda", "--sequences", "3"]
    first, second = shown(capsys, path, path, *words)
    assert first == second
    assert first["total_memory_bytes"] == 80 * GIB
    assert first["device"] == "cuda"
    assert first["best"]["num_sequences"] >= 3
    assert main(["plan", path, path, *words]) == 0
    text = capsys.readouterr().out
    assert text.count("memory   80.00 GiB (--memory) on a GPU, 0.9 of it in use") == 2
    assert "tokens/s" not in text, "the bandwidth of this machine is not that of another GPU"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2GiB", 2 * GIB), ("2G", 2 * GIB), ("3GB", 3 * 10**9), ("700MiB", 700 << 20)]
)
def test_sizes_of_memory(text: str, num_bytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "--memory", text, "--device", "cpu")
    assert found["total_memory_bytes"] == num_bytes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "5 parsecs"), "Illegal size of memory. Got '5 parsecs'. Expected a positive size up to an "),
        (("--memory", "1.e400"), "Illegal size of memory"),
        (("--memory", "9" * 400), "Illegal size of memory"),
        (("--memory", "0"), "Illegal size of memory"),
        (("--sequences", "0"), "Too few sequences"),
        (("a", "--model", "b"), "Models are named twice"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = shown(capsys, "--memory", "6MiB", "--device", "cpu", code=2)
    assert found["best"] is None


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip


def test_experts(tmp_path: Path) -> None:
    """Of Qwen3-30B-A3B, by its published counts; a step reads the experts that its tokens are expected to hit."""
    found = plan_of(tmp_path, QWEN3_30B_A3B, CPU, quantization="int4")
    shown_lines = found.text()
    assert "30,532.1 M parameters (3,353.0 M active)" in shown_lines
    assert "experts  48 layers of 128, 8 active per token" in shown_lines
    assert "8 at 1, 51.6 at 8, 112 at 32" in shown_lines
    assert "one expert" in shown_lines
    answer = found.as_dict()
    assert answer["num_parameters"] == 30_532_122_624
    assert answer["experts"][0]["num_layers"] == 48
    matrices = 3 * 2048 * 768
    assert answer["weights"][0]["expert_bytes"] == pytest.approx(matrices * (0.5 + 4 / 128), rel=0.001)
    arithmetic = StepArithmetic(found.model, "bfloat16", "int4", "auto")
    gigabytes = [arithmetic.weight_bytes(rows) / 1e9 for rows in (1, 8, 32)]
    assert gigabytes == pytest.approx([1.78, 7.1, 14.3], rel=0.03)


def test_explain_names_the_kernel_of_experts(tmp_path: Path) -> None:
    model = plan_of(tmp_path, QWEN3_30B_A3B, CPU).model
    answer = explain("m", EngineConfig(model="m", quantization="int4"), ServerConfig(), model, CPU)
    (line,) = [line for line in answer.text().splitlines() if "of 128 experts" in line]
    assert "48 x gate_proj+up_proj of 128 experts, 48 x down_proj of 128 experts" in line
    kernels = {layer.names: (layer.kernel, layer.weight) for layer in answer.layers}
    assert kernels["gate_proj", "up_proj"][0].startswith("grouped by expert: rows of the input in 8 bits")
    assert kernels["gate",][1] == "bfloat16", "the router is not quantized"
