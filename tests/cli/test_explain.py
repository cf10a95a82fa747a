"""`quire explain`: every setting, its source, its numbers; for models of many shapes, from config.json alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.config import EngineConfig, ServerConfig
from quire.cost.calibrate import Fit
from quire.cost.model import CostModel
from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.model_config import load_model_config
from quire.option import options
from quire.planning import devices
from quire.planning.step_costs import calibration_file, step_arithmetic
from quire.resolve import DeviceFacts, GpuFacts, resolve
from quire.screen.explain import explain
from quire.screen.layer_kernels import LayerKernel
from tests.cost.models import CONSTANTS
from tests.e2e.serving import Program
from tests.nursery import LightPopen
from tests.real_models import MODELS, write_config

MIB, GIB = 1 << 20, 1 << 30
DEVICE = DeviceFacts(
    kind="cpu", name="test", isa="avx2", num_cores=4, total_memory_bytes=64 * GIB, free_memory_bytes=60 * GIB
)


@pytest.mark.parametrize("name", [name for name, facts in MODELS.items() if facts[3] < 9e9])
def test_numbers_of_models(tmp_path: Path, name: str) -> None:
    """The arithmetic of 64 GiB: 5 % reserve, weights, logits, and the rest for two contexts of each request or less."""
    parameters, kv_bytes = MODELS[name][3:]
    model = load_model_config(write_config(tmp_path, name))
    explanation = explain(name, EngineConfig(), ServerConfig(), model, DEVICE)
    shown = explanation.as_dict()
    assert shown["model"]["num_parameters"] == parameters
    assert shown["model"]["kv_bytes_per_token"] == kv_bytes
    settings = shown["settings"]
    assert settings["weight_bytes"]["value"] == 2 * parameters
    blocks = settings["num_blocks"]["value"]
    assert settings["kv_cache_bytes"]["value"] == blocks * 16 * kv_bytes
    work = settings["work_bytes"]["value"]
    left = DEVICE.free_memory_bytes - 2 * parameters - work - int(DEVICE.total_memory_bytes * 0.05)
    useful = 2 * 128 * model.max_model_len // 16
    assert blocks == min(left // (16 * kv_bytes), useful)
    expected = settings["expected_tokens_per_second"]
    assert expected["detail"].endswith("assumed; a start measures steps")
    assert expected["low"] < expected["value"] < expected["high"]
    text = explanation.text()
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_shared_prefill_tokens"):
        step = settings[name]["step_seconds"]
        assert step["low"] < step["value"] < step["high"]
        assert f", bound by {step['bound']}) for {step['rows']}\n" in text
    assert settings["most_answer_times"]["value"] == 8
    assert "until answers on average have taken 8 times as long as one alone; vLLM has none" in text


def test_when_the_length_limits_the_kv_cache(tmp_path: Path) -> None:
    """Two contexts per running request are less than the free memory; the plan has the same numbers."""
    model = load_model_config(write_config(tmp_path, "Qwen2.5-0.5B"))

    def explained(**settings: Any) -> tuple[str, int]:
        shown = explain("m", EngineConfig(**settings), ServerConfig(), model, DEVICE).settings
        return shown["max_model_len"].limits, shown["num_blocks"].value

    _, all_that_fits = explained()
    limits, num_blocks = explained(max_model_len=4096)
    assert num_blocks == 2 * 128 * 4096 // 16 < all_that_fits
    assert limits.startswith(
        "tokens of one request, and the KV cache: 2 contexts of 4,096 tokens for each of 128 running requests take "
        f"{num_blocks:,} blocks, and {all_that_fits:,} would fit"
    )
    assert explained(max_model_len=2048)[1] == num_blocks // 2, "the length limits it, as it says"
    own_size = num_blocks * 16 * 12_288
    for settings in ({}, {"max_model_len": 4096, "kv_cache_memory_bytes": own_size}):
        assert explained(**settings)[0] == "tokens of one request; not how many tokens the KV cache holds for all"
    assert explained(max_model_len=2048, kv_cache_memory_bytes=own_size)[1] == num_blocks


def test_where_each_rank_is(tmp_path: Path) -> None:
    model = load_model_config(write_config(tmp_path, "Qwen2.5-0.5B"))
    alone = explain("m", EngineConfig(), ServerConfig(), model, DEVICE)
    assert alone.as_dict()["ranks"] == []
    degrees = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2)
    explanation = explain("m", degrees, ServerConfig(), model, DEVICE)
    last, _, _, first = explanation.as_dict()["ranks"]
    assert (first["rank"], first["node"], first["stage"], first["layers"][0]) == (3, 1, 0, 0)
    assert (last["rank"], last["node"], last["stage"], last["layers"][1]) == (0, 0, 1, 23)
    assert (
        first["kv_bytes_per_token"] + last["kv_bytes_per_token"]
        == model.kv_bytes_per_token(kv_format("auto", "bfloat16")) / 2
    )
    assert "\nranks    ranks 0 to 1, each: node 0, stage 1, layers " in explanation.text()


def test_ranks_of_a_stage_on_two_machines(tmp_path: Path) -> None:
    model = load_model_config(write_config(tmp_path, "Qwen2.5-0.5B"))
    explanation = explain("m", EngineConfig(tensor_parallel_size=2, nnodes=2), ServerConfig(), model, DEVICE)
    assert [each["node"] for each in explanation.as_dict()["ranks"]] == [0, 1]
    for text in ("rank 0: node 0, layers ", "rank 1: node 1, layers "):
        assert text in explanation.text()
    shown = explanation.settings["expected_exchange_seconds"]
    assert shown.value > 99 * 30e-6
    assert "99 exchanges between machines of " in shown.detail
    assert "between machines 30 us and 1.25 GB/s; assumed" in shown.detail
    alone = explain("m", EngineConfig(), ServerConfig(), model, DEVICE)
    assert "expected_exchange_seconds" not in alone.settings


def test_ranks_that_divide_the_kv_cache(tmp_path: Path) -> None:
    """Half the bytes of a token on each rank, in blocks of 256 tokens."""
    model = load_model_config(write_config(tmp_path, "Qwen2.5-0.5B"))
    whole, half = (
        explain(
            "m",
            EngineConfig(tensor_parallel_size=4, decode_context_parallel_size=count, kv_cache_memory_bytes=1 << 28),
            ServerConfig(),
            model,
            DEVICE,
        )
        for count in (1, 2)
    )
    assert half.settings["block_size"].value == 256
    assert half.settings["kv_cache_bytes"].value <= 1 << 28
    held = [each.settings["kv_cache_tokens"].value for each in (whole, half)]
    assert held[1] == pytest.approx(2 * held[0], rel=0.05)
    tokens = [each.as_dict()["ranks"][0]["kv_bytes_per_token"] for each in (whole, half)]
    assert tokens[0] == 2 * tokens[1]
    assert "each rank has one of 2 blocks" in half.text()
    divided = EngineConfig(tensor_parallel_size=4, decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match="together with a model that drafts"):
        explain("m", divided, ServerConfig(), replace(model, drafter=model), DEVICE)
    with pytest.raises(ConfigError, match="1 with --tensor-parallel-size 1"):
        explain("m", EngineConfig(decode_context_parallel_size=2), ServerConfig(), model, DEVICE)


def test_expectation_from_bandwidth(tmp_path: Path) -> None:
    """Every token reads all weights; of embeddings that are not the output layer too, it reads one row."""
    model = load_model_config(write_config(tmp_path, "Phi-3-mini-4k"))
    explanation = explain("m", EngineConfig(), ServerConfig(), model, DEVICE, read_bandwidth=30e9)
    setting = explanation.settings["expected_tokens_per_second"]
    assert setting.value == pytest.approx(30e9 / (2 * (3_821_079_552 - 32064 * 3072)), rel=0.005)
    assert setting.detail.endswith("bound by memory; assumed from 30.0 GB/s, measured now; a start measures steps")
    busy = explain("m", EngineConfig(), ServerConfig(), model, DEVICE, read_bandwidth=30e9, waited=0.5)
    detail = busy.settings["expectation_waited_share"].detail
    assert detail.startswith("the machine is busy: this was measured with a core for 50% of the time; ")


def test_what_each_rank_holds(tmp_path: Path) -> None:
    """8 experts on 3 ranks. A rank takes none of the others' weights: together they hold the model and two routers."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    folder = write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **experts)
    model = load_model_config(folder)
    asked = EngineConfig(tensor_parallel_size=3, enable_expert_parallel=True)
    explanation = explain("m", asked, ServerConfig(), model, DEVICE)
    ranks = explanation.as_dict()["ranks"]
    assert [rank["num_experts"] for rank in ranks] == [3, 3, 2]
    assert "ranks    rank 0: layers 0 to 27, 3 experts of a layer, weights " in explanation.text()
    assert explanation.settings["enable_expert_parallel"].detail == "3 + 3 + 2 experts of a layer, by ranks"
    whole = explain("m", EngineConfig(), ServerConfig(), model, DEVICE)
    assert whole.ranks == ()
    dense = {layer.kernel for layer in whole.layers if not layer.num_experts}
    assert {layer.kernel for layer in whole.layers if layer.num_experts} == {f"grouped by expert: {x}" for x in dense}
    assert "kernel  grouped by expert: " in whole.text()
    on_all = 28 * 2 * (2 * 1024 + 2 * 128 + 64 * 1024) + 2 * 1024  # norms, and routers in panels, in bfloat16
    more = sum(rank["weight_bytes"] for rank in ranks) - whole.settings["weight_bytes"].value
    assert more == 2 * on_all


def test_what_each_rank_of_modelling_code_holds(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Qwen2.5-0.5B", architectures=["OtherForCausalLM"], model_type="other")
    model = load_model_config(folder, any_architecture=True)
    whole, shared = (
        explain("m", EngineConfig(tensor_parallel_size=degree), ServerConfig(), model, DEVICE) for degree in (1, 2)
    )
    assert "modelling code" not in whole.text()
    details = [shared.settings[f"{name}_parallel_size"].detail for name in ("tensor", "pipeline")]
    assert "; each rank has some heads with their KV cache, some rows of the embeddings and of large" in details[0]
    assert details[1] == "processes of this machine, with its cores divided"
    assert "to the bit" not in shared.text()
    ranks, num_bytes = shared.as_dict()["ranks"], whole.settings["weight_bytes"].value
    assert sum(rank["weight_bytes"] for rank in ranks) == pytest.approx(num_bytes, rel=0.01)
    assert sum(rank["kv_bytes_per_token"] for rank in ranks) == model.kv_bytes_per_token(kv_format("auto", "bfloat16"))
    with pytest.raises(ConfigError, match="runs all layers at once"):
        explain("m", EngineConfig(pipeline_parallel_size=2), ServerConfig(), model, DEVICE)


def test_lanes_and_replicas_are_told_apart(tmp_path: Path) -> None:
    """With -ep, -dp is one engine whose lanes share experts; without, copies of the model."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    model = load_model_config(write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **experts))
    lanes = explain("m", EngineConfig(data_parallel_size=3, enable_expert_parallel=True), ServerConfig(), model, DEVICE)
    assert "\nlanes    3 in one engine, which share experts; the lines below" in lanes.text()
    assert [rank["num_experts"] for rank in lanes.as_dict()["ranks"]] == [3, 3, 2]
    replicas = explain("m", EngineConfig(data_parallel_size=3), ServerConfig(), model, DEVICE)
    assert "\nreplicas 3, and the lines below" in replicas.text()
    assert replicas.ranks == ()
    whole = replicas.settings["weight_bytes"].value
    assert 0.5 * whole < lanes.settings["weight_bytes"].value < 0.7 * whole


def test_what_an_earlier_start_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    model = load_model_config(write_config(tmp_path, "Phi-3-mini-4k"))
    resolved = resolve(EngineConfig(), model, DEVICE, is_server=True)
    calibration_file(resolved, model, DEVICE).write(Fit(CONSTANTS, 0.1))
    cost = CostModel(step_arithmetic(resolved, model), Fit(CONSTANTS, 0.1))
    rate = 1 / cost.predict(cost.arithmetic.load([16], [1], 1)).seconds
    setting = explain("m", EngineConfig(), ServerConfig(), model, DEVICE, 30e9).settings["expected_tokens_per_second"]
    assert setting.value == pytest.approx(rate, rel=0.005)
    assert setting.detail.endswith("an earlier start measured steps")


def test_what_is_not_applied_and_where_factors_switch(tmp_path: Path) -> None:
    path = write_config(tmp_path, "Phi-3-mini-4k") / "config.json"
    raw = json.loads(path.read_text())
    factors = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
    long = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rope_scaling": factors}
    path.write_text(json.dumps(raw | long | {"attn_logit_softcapping": 30.0}))
    model = load_model_config(tmp_path)
    explanation = explain("m", EngineConfig(), ServerConfig(), model, DEVICE)
    assert "not applied, because Phi3ForCausalLM does not read it: attn_logit_softcapping" in explanation.text()
    assert "more than 4096 tokens takes longrope's long factors" in explanation.settings["max_model_len"].detail
    short = explain("m", EngineConfig(max_model_len=4096), ServerConfig(), model, DEVICE)
    assert "longrope" not in short.settings["max_model_len"].detail


def test_the_kernel_of_each_layer(tmp_path: Path) -> None:
    """By format and instruction set; for a layer that is not quantized, why."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": ["model.layers.31"],
    }
    (folder / "config.json").write_text(json.dumps(raw))
    model = load_model_config(folder)
    shown = explain("m", EngineConfig(), ServerConfig(), model, DEVICE)
    found = {(layer.names, layer.count): (layer.weight, layer.kernel, layer.why) for layer in shown.layers}
    awq = (
        "4-bit codes, a float16 scale per group of 128, zero points",
        "rows of the input in 8 bits, 16-bit multiply-adds",
        "the checkpoint's 4-bit, groups of 128, zero points",
    )
    left = ("bfloat16", "float32 multiply-adds", "not quantized in the checkpoint: modules_to_not_convert")
    assert found[("q_proj", "k_proj", "v_proj"), 31] == awq
    assert found[("down_proj",), 31] == awq
    assert found[("down_proj",), 1] == left
    assert found[("lm_head",), 1][2] == "not quantized in the checkpoint: AWQ leaves the output projection"
    assert sum(layer.count * layer.num_bytes for layer in shown.layers) < shown.settings["weight_bytes"].value
    text = shown.text()
    assert "layers   31 x q_proj+k_proj+v_proj, 31 x o_proj, 31 x gate_proj+up_proj, 31 x down_proj" in text
    assert "weight  bfloat16   (not quantized in the checkpoint: modules_to_not_convert)" in text
    assert "kernel  rows of the input in 8 bits, 16-bit multiply-adds   (integer codes, on avx2)" in text
    assert "kernel  float32 multiply-adds   (avx2 has no products of bfloat16)" in text


@pytest.mark.parametrize(
    ("isa", "dtype", "products", "why"),
    [
        ("amx", "bfloat16", "AMX tiles", "bfloat16, on amx"),
        ("avx512_bf16", "bfloat16", "bfloat16 dot products", "bfloat16, on avx512_bf16"),
        ("avx2", "bfloat16", "float32 multiply-adds", "avx2 has no products of bfloat16"),
        ("neon_i8mm", "bfloat16", "bfloat16 matrix products", "bfloat16, on neon_i8mm"),
        ("amx", "float16", "float32 multiply-adds", "the model computes in float16"),
    ],
)
def test_the_kernel_of_fp8_layers(isa: str, dtype: str, products: str, why: str, tmp_path: Path) -> None:
    (fp8, left) = _up_and_output(tmp_path, FP8, isa, EngineConfig(dtype=dtype))
    assert (fp8.weight, fp8.kernel, fp8.why, fp8.kernel_why) == (
        "FP8 codes (e4m3), a float32 scale per group of 128",
        f"codes to bfloat16 block by block, {products}",
        "the checkpoint's FP8, blocks of 128x128",
        f"CPUs multiply no FP8; {why}",
    )
    assert left.why == "not quantized in the checkpoint: FP8 checkpoints leave the output projection"


def _up_and_output(
    tmp_path: Path, description: dict[str, Any] | None, isa: str, engine: EngineConfig
) -> tuple[LayerKernel, LayerKernel]:
    """gate+up and the output projection of Llama-3.1-8B, with this under quantization_config."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": description}))
    device = replace(DEVICE, isa=isa)
    if isa.startswith("sm_"):
        device = replace(DEVICE, gpu=GpuFacts("test", int(isa.removeprefix("sm_")), 80 * GIB, 80 * GIB))
    shown = explain("m", engine, ServerConfig(), load_model_config(folder), device)
    return next(x for x in shown.layers if "up_proj" in x.names), next(x for x in shown.layers if "lm_head" in x.names)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 544, "desc_act": True, "sym": False}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": WEIGHTS,
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}
IN_8_BITS, IN_FLOATS = "rows of the input in 8 bits, ", "Triton: codes to bfloat16, tensor cores"
IN_FP8 = "; from 257 rows torch._scaled_mm with rows of the input in FP8, where the GPU has it"
NO_CUBLAS = "cuBLAS multiplies no codes with bfloat16"


@pytest.mark.parametrize(
    ("description", "settings", "isa", "weight", "kernel", "why"),
    [
        (
            GPTQ, {}, "amx", "4-bit codes, a float16 scale per group of 544, zero points, in-features by act-order",
            f"{IN_8_BITS}VNNI dot products", "a group of 544 does not fill AMX's tile rows of 64",
        ),
        (
            W8A8, {}, "amx", "8-bit codes, a float32 scale per output channel",
            f"{IN_8_BITS}AMX tiles for batches, VNNI dot products for few rows", "integer codes, on amx",
        ),
        (
            None, {"quantization": "int4"}, "avx512_bf16", "4-bit codes, a float32 scale per group of 128",
            f"{IN_8_BITS}VNNI dot products", "integer codes, on avx512_bf16",
        ),
        (
            None, {"quantization": "int8"}, "scalar", "8-bit codes, a float32 scale per output channel",
            f"{IN_8_BITS}one product at a time", "integer codes, on scalar",
        ),
        (
            None, {"quantization": "int8"}, "torch", "8-bit codes, a float32 scale per output channel",
            "plain torch", "the compiled kernels do not run here",
        ),
        (None, {}, "amx", "bfloat16", "AMX tiles, or bfloat16 dot products", "bfloat16, on amx"),
        (W8A8, {}, "sm_90", "8-bit codes, a float32 scale per output channel", IN_FLOATS, NO_CUBLAS),
        (
            None, {"quantization": "fp8"}, "sm_90", "FP8 codes (e4m3), a float32 scale per output channel",
            f"{IN_FLOATS}{IN_FP8}", NO_CUBLAS,
        ),
        (None, {}, "sm_90", "bfloat16", "cuBLAS", "bfloat16, on a GPU"),
        (
            None, {"deterministic": True}, "sm_90", "bfloat16", "Triton: tensor cores",
            "--deterministic: cuBLAS's sums follow the number of rows",
        ),
    ],
)  # fmt: skip
def test_the_kernel_and_why(
    description: dict[str, Any] | None,
    settings: dict[str, Any],
    isa: str,
    weight: str,
    kernel: str,
    why: str,
    tmp_path: Path,
) -> None:
    found, _ = _up_and_output(tmp_path, description, isa, EngineConfig(**settings))
    assert (found.weight, found.kernel, found.kernel_why) == (weight, kernel, why)
    assert found.why


def _shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["explain", "--json", *words]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_every_setting_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    settings = _shown(capsys)["settings"]
    fields = [*options(EngineConfig), *options(ServerConfig)]
    assert {f.name for f in fields} <= settings.keys()
    for name, setting in settings.items():
        assert setting["source"], name
        if setting["source"] in ("formula", "measured", "device", "model"):
            assert setting["detail"], f"{name} has no numbers"
    for f in fields:
        if f.name != "max_model_len":  # test_when_the_length_limits_the_kv_cache
            assert settings[f.name]["limits"] == f.metadata["limits"]
        assert settings[f.name]["live"] == f.metadata["live"]


def test_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_API_KEY", "do-not-show")
    path = tmp_path / "serve.yaml"
    path.write_text("max-num-seqs: 3\nhf-token: do-not-show\n")
    settings = _shown(capsys, "--config", str(path), "--block-size", "32")["settings"]
    assert settings["max_num_seqs"] | {"detail": ""} == {
        "value": 3,
        "source": "file",
        "detail": "",
        "limits": "running requests; the others wait",
        "live": True,
        "max": 3,
        "next": settings["max_num_seqs"]["next"],
        "step_seconds": settings["max_num_seqs"]["step_seconds"],
    }
    assert settings["max_num_seqs"]["detail"].startswith("default would be 128")
    expected = {
        "block_size": (32, "flag"),
        "num_threads": (1, "environment"),
        "dtype": ("bfloat16", "model"),
        "max_model_len": (2048, "model"),
        "isa": (settings["isa"]["value"], "device"),
        "num_blocks": (settings["num_blocks"]["value"], "formula"),
        "api_key": ("set", "environment"),
        "hf_token": ("set", "file"),
        "watermark": (0.0, "default"),
    }
    assert {name: (settings[name]["value"], settings[name]["source"]) for name in expected} == expected


def test_formats_of_answers_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}<tool_call>{{ tools }}</tool_call><think></think>")
    settings = _shown(capsys, "--chat-template", str(template))["settings"]
    for name, value, mark in (("tool_call_parser", "hermes", "<tool_call>"), ("reasoning_parser", "qwen3", "</think>")):
        assert (settings[name]["value"], settings[name]["source"]) == (value, "model")
        assert f"the chat template has {mark}" in settings[name]["detail"]
    assert main(["explain", "--chat-template", str(template), "--tool-call-parser", "none"]) == 0
    assert "the chat template has </think>" in capsys.readouterr().out


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--api-key", "do-not-show", "--hf-token", "do-not-show"]
    for command in (words, [*words, "--json"]):
        assert main(command) == 0
        output = capsys.readouterr()
        assert "do-not-show" not in output.out + output.err


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--max-num-seqs", "8", "--port", "0"]) == 0
    output = capsys.readouterr().out
    for part in (
        "model    quire-demo: LlamaForCausalLM, 5.8 M parameters, bfloat16, KV 3,072 bytes per token",
        "max_num_seqs                          8   [flag]",
        "limits  running requests; the others wait",
        "next    16: ",
        " for one token of each of 16 requests, in short contexts\n",
        " more work memory, and longer steps: ",
        "live    POST /v1/config moves it, up to 8",
        "fits     KV cache size: 32,768 tokens = 16 chats of 2k",
        "As they are by default:",
    ):
        assert part in output, output


def test_threads_of_a_cpu_with_two_kinds_of_cores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four performance cores with two threads each, and four efficient cores, as on Alder Lake."""
    read = devices._read_text

    def text_of(path: Path) -> str | None:
        if path == Path("/sys/devices/cpu_core/cpus"):
            return "0-7\n"
        if path.name == "thread_siblings_list":
            number = int(path.parts[-3].removeprefix("cpu"))
            return f"{number // 2 * 2}-{number // 2 * 2 + 1}\n" if number < 8 else f"{number}\n"
        return None if path.name == "cpu.max" else read(path)

    monkeypatch.setattr(devices, "_read_text", text_of)
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    setting = _shown(capsys)["settings"]["num_threads"]
    assert (setting["value"], setting["source"]) == (4, "device")
    why = "performance cores allowed by affinity and cgroup quota, without 4 efficient cores"
    assert setting["detail"] == why
    assert main(["explain"]) == 0
    assert why in capsys.readouterr().out


def test_memory_is_measured_now(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "total_memory_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: GIB)
    shown = _shown(capsys)
    assert shown["machine"]["free_memory_bytes"] == GIB
    assert shown["settings"]["num_blocks"]["source"] == "measured"
    assert shown["settings"]["kv_cache_bytes"]["value"] < GIB


def test_too_little_memory_is_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", "--kv-cache-memory-bytes", "1M"]
    assert main([*words, "--json"]) == 2
    shown = json.loads(capsys.readouterr().out)
    assert shown["error"]["code"] == "out_of_memory_plan"
    assert "num_blocks" not in shown["settings"]
    assert shown["settings"]["max_num_seqs"]["value"] == 8
    assert main(words) == 2
    assert "A start would fail: The KV cache for one request of 2048 tokens does not fit" in capsys.readouterr().out


def test_contradictions_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"]) == 2
    assert "The token budget is smaller" in capsys.readouterr().err


def test_next_value_costs_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The logits of twice as many requests are the difference between two explanations."""
    few = _shown(capsys, "--max-num-seqs", "512", "--max-num-batched-tokens", "4096")["settings"]
    many = _shown(capsys, "--max-num-seqs", "1024", "--max-num-batched-tokens", "4096")["settings"]
    growth = many["work_bytes"]["value"] - few["work_bytes"]["value"]
    assert f"1024: {growth / MIB:.1f} MiB more work memory" in few["max_num_seqs"]["next"]


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom quire.cli.main import main\n"
        "main(['explain', '--json'])\nmain(['collect-env'])\n"
        "print([n for n in ('torch', 'transformers') if n in sys.modules], file=sys.stderr)"
    )
    result = Program(("-c", code), LightPopen).run()
    assert result.stderr.strip() == "[]"
