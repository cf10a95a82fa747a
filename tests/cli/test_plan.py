"""`quire plan` on the command line: hardware, workloads, goals and prices, exit codes, and refusals."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import quire.demo
from quire import extension
from quire.cli.main import main
from quire.config import EngineConfig
from quire.cost.calibrate import Fit
from quire.measure.workload import NAMED_WORKLOADS
from quire.model_config import load_model_config
from quire.planning import devices
from quire.planning.estimate import Estimate
from quire.planning.step_costs import calibration_file
from quire.resolve import resolve
from tests.cost.models import CONSTANTS
from tests.real_models import write_config


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", "--json", *words]) == code
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert isinstance(model, dict)
    return model


def text_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["plan", *words]) == code
    return capsys.readouterr().out


def test_a_line_for_each_group_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of a whole context too, which depend on the machine where a window limits them."""
    folder = str(write_config(tmp_path, "Gemma-2-9B"))
    for words in (("plan", folder, "--device", "cpu"), ("explain", folder)):
        main([*words])
        shown = [line.removeprefix("kv").strip() for line in capsys.readouterr().out.splitlines()]
        window, full = (line for line in shown if line.startswith("21 x "))
        assert window.startswith("21 x window of 4,096 tokens: 172,032 bytes per token, ")
        assert full == "21 x full: 172,032 bytes per token, 1.31 GiB for 8,192 tokens"


def test_json_of_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    goals = ("--request-rate", "2", "--slo-ttft", "1s", "--slo-itl", "80ms", "--price-per-hour", "2.5,0.9")
    found = shown(capsys, folder, "--hardware", "h100x2,l40s", *goals)
    assert found["asked"] == {"request_rate": 2.0, "slo_ttft": 1.0, "slo_itl": 0.08, "sequences": None}
    assert [each["price_per_hour"] for each in found["hardware"]] == [2.5, 0.9]
    best = found["best"]
    assert best == found["candidates"][0]
    assert best["verdict"] == "yes"
    assert best["price_per_million_tokens"]["low"] < best["price_per_million_tokens"]["value"]
    assert {term["origin"] for term in best["memory"]} <= {"exact", "measured", "assumed"}
    assert best["points"][0]["name"] == "one"
    for point in best["points"]:
        assert point["itl_seconds"]["low"] < point["itl_seconds"]["value"] < point["itl_seconds"]["high"]
        assert point["bound"] in ("memory", "arithmetic", "attention", "host", "links")
    for row in found["candidates"]:
        rate = row["requests_per_second"]
        assert rate["low"] < rate["value"] < rate["high"]
        assert row["bound"] in ("memory", "arithmetic", "attention", "host", "links")
    assert len(found["changes"]) == 3
    workload = found["workload"]
    assert workload["name"] == "chat"
    assert workload["mean_prompt_tokens"] == pytest.approx(NAMED_WORKLOADS["chat"][0], rel=0.05)


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0: met; 1: not by the best row; 2: nothing fits."""
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    assert shown(capsys, folder, "--hardware", "h100", "--check")["check"] == 0
    text_of(capsys, folder, "--hardware", "h100", "--check", "--slo-itl", "1ms", code=1)
    text_of(capsys, folder, "--hardware", "h100", "--slo-itl", "1ms")
    text_of(capsys, folder, "--hardware", "h100", "--check", "--request-rate", "1000", code=1)
    large = str(write_config(tmp_path, "Llama-3.1-405B"))
    text = text_of(capsys, large, "--hardware", "h200x8", "--check", "--quantization", "fp8")
    assert "--tensor-parallel-size" in text
    text = text_of(capsys, large, "--hardware", "l4x2", "--check", code=2)
    assert "are missing on each device for a request of" in text
    assert "fixes     " in text
    assert "are missing on the device for a request of" in text_of(capsys, large, "--hardware", "l4", code=2)


def test_json_of_goals_that_no_request_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate within the goals is 0. The price and the resource are those of one request in each copy."""
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    words = (folder, "--hardware", "l40s", "--slo-itl", "1ms", "--price-per-hour", "3.6")
    best = shown(capsys, *words)["best"]
    one = best["points"][0]
    assert (one["name"], one["num_requests"], best["copies"], best["tensor_parallel_size"]) == ("one", 1, 1, 1)
    assert best["requests_per_second"] == {"value": 0, "low": 0, "high": 0}
    assert best["bound"] == one["bound"]
    rate = one["output_tokens_per_second"]["value"]
    assert best["price_per_million_tokens"]["value"] == pytest.approx(1000 / rate, rel=0.001)
    printed = Estimate(**one["requests_per_second"]).text()
    ranked = [line for line in text_of(capsys, *words).splitlines() if line.startswith("l40s ")]
    assert f" {printed} " in ranked[0]


def test_json_of_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """405B in bfloat16 on 8 x 80 GB: each way to share it lacks memory, and no request fits."""
    large = str(write_config(tmp_path, "Llama-3.1-405B"))
    rows = [row for row in shown(capsys, large, "--hardware", "h100x8")["candidates"] if row["weights"] == "bfloat16"]
    assert {row["tensor_parallel_size"] for row in rows} == {1, 2, 4, 8}
    for row in rows:
        assert (row["verdict"], row["num_sequences"], row["points"]) == ("does not fit", 0, [])
        assert (row["requests_per_second"]["value"], row["bound"]) == (0, None)
        assert row["missing_bytes"] * row["tensor_parallel_size"] > 812e9 - 0.9 * row["tensor_parallel_size"] * 85e9
    (found,) = json.loads(text_of(capsys, large, "--hardware", "l4", "--json", code=2))["models"]
    assert (found["best"], found["check"]) == (None, 2)
    assert found["candidates"][0]["missing_bytes"] > 0


def test_the_command_of_the_best_row_has_the_flags_that_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each once, and no goal of the plan; a plan of the command's own flags is the same plan."""
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    given = ("--gpu-memory-utilization", "0.8", "--max-model-len", "8192", "--quantization", "int4", "--enable-lora")
    goal = ("--slo-itl", "1s", "--hardware", "l4x2")

    def best(*words: str) -> list[str]:
        line = next(line for line in text_of(capsys, *words).splitlines() if line.startswith("best "))
        return shlex.split(line)[1:]

    found = best(folder, *given, *goal, "--hf-token", "hidden")
    assert found[:3] == ["quire", "serve", folder]
    assert sorted(found[3:]) == sorted([*given, "--data-parallel-size", "2"])
    assert best(folder, *found[3:], *goal) == found
    drafts = best(folder, *given, *goal, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert json.loads(drafts[drafts.index("--speculative-config") + 1])["num_speculative_tokens"] == 3
    assert best(folder, *drafts[3:], *goal) == drafts


def test_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lengths decide the number of requests that fit; `quire bench` reads the same files."""
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))

    def planned(workload: str) -> dict[str, Any]:
        found = shown(capsys, folder, "--hardware", "l40s", "--workload", workload)
        return found["workload"] | {"fit": found["best"]["requests_that_fit"]}

    assert planned("random:512/128")["mean_resident_tokens"] == 576
    assert planned("rag")["fit"] < planned("chat")["fit"] < planned("random:64/64")["fit"]
    trace = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length")
    rows = (json.dumps(dict(zip(names, row, strict=True))) for row in ((0, 900, 100), (1, 100, 300)))
    trace.write_text("\n".join(rows))
    assert planned(str(trace))["mean_resident_tokens"] == pytest.approx((900 * 100 + 5000 + 100 * 300 + 45_000) / 400)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two three", "output_tokens": 7}) + "\n")
    tokenizer = ("--tokenizer", str(quire.demo.path("target")))
    found = shown(capsys, folder, "--hardware", "l40s", "--workload", str(prompts), *tokenizer)
    assert found["workload"]["mean_output_tokens"] == 7
    assert 0 < found["workload"]["mean_prompt_tokens"] < 20


def test_this_machine_with_its_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cost model gives speeds: assumed before a start, and then what the start measured."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    words = ("--device", "cpu", "--workload", "random:64/64")
    before = shown(capsys, *words)
    assert before["best"]["hardware"] == "this machine"
    assert before["best"]["speed_origin"].startswith("assumed")
    facts = devices.detect(extension.chosen_isa())
    model = load_model_config(quire.demo.path())
    resolved = resolve(EngineConfig(device="cpu"), model, facts, is_server=True)
    calibration_file(resolved, model, facts).write(Fit(CONSTANTS, 0.1))
    after = shown(capsys, *words)
    (row,) = [row for row in after["candidates"] if not row["flags"]]
    assert row["speed_origin"] == "an earlier start measured steps"
    itl = row["points"][0]["itl_seconds"]
    assert itl["high"] == pytest.approx(1.1 * itl["value"], rel=0.01)
    plain = text_of(capsys, "--device", "cpu")
    assert "an earlier start measured steps" in plain
    assert "tokens/s of one request  bound by\n" in plain
    (shown_row, *_) = shown(capsys, "--device", "cpu")["weights"]
    low, high = (f"{shown_row['tokens_per_second'][end]:,.0f}" for end in ("low", "high"))
    assert re.search(rf"\({low}-{high}\) +host\n", plain)
    assert shown_row["bound"] == "host"


def test_hardware_that_numbers_describe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table's L40S in numbers gives the same plan as its name."""
    folder = str(write_config(tmp_path, "Llama-3.1-8B"))
    numbers = ("--device", "cuda", "--memory", "47GB", "--bandwidth", "864GB/s", "--flops", "362 TFLOPS")
    described = shown(capsys, folder, *numbers, "--workload", "chat")
    named = shown(capsys, folder, "--hardware", "l40s")
    one, other = (found["best"]["points"][0]["itl_seconds"]["value"] for found in (described, named))
    assert one == pytest.approx(other)
    assert described["best"]["hardware"] == "as described"
    plain = text_of(capsys, folder, *numbers)
    assert "tokens/s of one request" in plain
    assert "assumed: 75% of the bandwidth" in plain


def test_ways_to_share_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """70 billion parameters on two GPUs of 80 GB: the remaining memory, and the part of each GPU."""
    folder = str(write_config(tmp_path, "Llama-3-70B"))
    found = shown(capsys, folder, "--hardware", "a100-80", "-pp", "2", "--dtype", "bfloat16", "--max-model-len", "8k")
    rows = {
        (row["weights"], row["tensor_parallel_size"], row["pipeline_parallel_size"]): row for row in found["layouts"]
    }
    one, tensor, pipeline = (rows["bfloat16", *degrees] for degrees in ((1, 1), (2, 1), (1, 2)))
    assert one["num_tokens"] == 0
    assert one["weight_bytes"] == pytest.approx(141.1e9, rel=0.001)
    assert 15_000 < tensor["num_tokens"] < 30_000
    assert found["asked"][0] == pipeline
    assert rows["int8", 1, 1]["num_tokens"] > 0
    assert found["legal_tensor_parallel_sizes"][:4] == [1, 2, 3, 4]
    assert [(share["stage"], share["rank"]) for share in found["ranks"]] == [(1, 0), (0, 1)]
    layers = sorted(share["layers"] for share in found["ranks"])
    assert (layers[0][0], layers[0][1] + 1, layers[1][1]) == (0, layers[1][0], 79)
    assert sum(share["weight_bytes"] for share in found["ranks"]) == one["weight_bytes"]
    assert max(share["weight_bytes"] for share in found["ranks"]) == pipeline["weight_bytes"]
    text_of(capsys, folder, "--hardware", "l4", "-pp", "2", "--quantization", "int8", code=2)


MACHINES = ("--device", "cpu", "--memory", "64GB", "--bandwidth", "80GB", "--flops", "3T", "--nnodes", "2")


def test_a_slow_network_makes_stages_better_than_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two machines with one rank each. A token of two ranks is longer by exactly what their exchanges cost more."""
    folder = str(write_config(tmp_path, "Qwen3-0.6B"))
    words = (folder, *MACHINES, "-tp", "2", "--dtype", "bfloat16")

    def planned(*network: str) -> tuple[list[str], dict[str, float]]:
        rows = shown(capsys, *words, *network)["layouts"]
        rows = [row for row in rows if row["weights"] == "bfloat16" and row["data_parallel_size"] == 1]
        names = ["TP" if row["tensor_parallel_size"] == 2 else "PP" for row in rows]
        found = dict(zip(names, rows, strict=True))
        assert found["TP"]["num_exchanges_between_machines"] == found["TP"]["num_exchanges"] == 4 * 28 + 3
        assert found["PP"]["num_exchanges_between_machines"] == 1
        return names, {name: row["token_seconds"]["value"] for name, row in found.items()}

    fast, times = planned("--interconnect", "12.5GB,0.01ms")
    slow, later = planned("--interconnect", "12.5GB,2ms")
    assert (fast, slow) == (["TP", "PP"], ["PP", "TP"])
    assert later["TP"] - times["TP"] == pytest.approx((4 * 28 + 3) * 1.99e-3, rel=1e-3)
    assert later["PP"] - times["PP"] == pytest.approx(1.99e-3, rel=0.02)
    text = text_of(capsys, *words, "--interconnect", "12.5GB,2ms")
    assert "between 2 machines 2,000 us and 12.5 GB/s (--interconnect)" in text
    assert "115 exchanges between machines of " in text
    assert "in a step of the layout that was asked for" in text
    assert "1.25 GB/s (assumed)" in text_of(capsys, *words)
    text = text_of(capsys, *words, "--interconnect", "100Gbit/s,2ms")
    assert "between 2 machines 2,000 us and 12.5 GB/s (--interconnect)" in text


def test_lanes_of_two_machines_use_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    folder = str(write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **experts))

    def seconds(network: str) -> float:
        words = (folder, *MACHINES, "-dp", "2", "-ep", "--dtype", "bfloat16", "--interconnect", network)
        (asked, *_) = shown(capsys, *words)["asked"]
        assert asked["num_exchanges_between_machines"] == asked["num_exchanges"] == 3 * 28
        return float(asked["token_seconds"]["value"])

    assert seconds("12.5GB,2ms") - seconds("12.5GB,0.01ms") == pytest.approx(3 * 28 * 1.99e-3, rel=1e-3)


def test_whole_experts_on_devices_to_choose_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    folder = str(write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **experts))
    shown(capsys, folder, "-tp", "2", "-ep", "--enable-eplb", "--hardware", "h100x2")
    (first, *_) = shown(capsys, folder, "-pp", "2", "-ep", "--hardware", "h100")["asked"]
    assert (first["tensor_parallel_size"], first["pipeline_parallel_size"]) == (1, 2)


def test_modelling_code_has_one_stage_and_all_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "num_key_value_heads": 2}
    architecture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    folder = str(write_config(tmp_path, "Qwen3-0.6B", **architecture, **sizes))
    memory = ("--device", "cpu", "--kv-cache-memory-bytes", "1000000000")
    words = (folder, "-tp", "4", "--model-impl", "transformers", *memory)
    found = shown(capsys, *words)
    assert found["most_stages"] == 1
    assert {row["pipeline_parallel_size"] for row in found["layouts"]} == {1}
    assert not any(row["enable_expert_parallel"] for row in found["layouts"])
    of_experts = 28 * 8 * 3 * 768 * 1024 * 2
    assert all(rank["weight_bytes"] > of_experts for rank in found["ranks"])
    assert "; -pp 1; -dcp" in text_of(capsys, *words)


def test_lanes_that_share_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "model_type": "qwen3_moe"}
    folder = str(write_config(tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **experts))
    words = (folder, "--device", "cpu", "-dp", "2", "-ep", "--memory", "64GB")
    text = text_of(capsys, *words)
    assert "ranks    -dp 2 -ep, weights in " in text
    assert "With -dp and -ep, copies are lanes of one engine and share the experts" in text
    rows = {
        row["enable_expert_parallel"]: row for row in shown(capsys, *words)["layouts"] if row["data_parallel_size"] == 2
    }
    assert rows[True]["weight_bytes"] < 0.8 * rows[False]["weight_bytes"]
    assert rows[True]["num_tokens"] > rows[False]["num_tokens"]
    one_head = write_config(
        tmp_path, "Qwen3-0.6B", architectures=["Qwen3MoeForCausalLM"], **experts, num_key_value_heads=1
    )
    words = (str(one_head), "--device", "cpu", "-tp", "2", "--memory", "64GB")
    assert shown(capsys, *words, "-ep")["legal_decode_context_parallel_sizes"] == [1, 2]
    assert shown(capsys, *words, "-ep", "-dp", "2")["legal_decode_context_parallel_sizes"] == [1]


def test_ranks_that_divide_the_kv_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two heads of keys and values: of four ranks, two and two hold the same ones."""
    folder = str(write_config(tmp_path, "Qwen2.5-0.5B"))
    arguments = (folder, "--device", "cpu", "--kv-cache-memory-bytes", "1000000000")
    found = shown(capsys, *arguments, "-tp", "4", "-dcp", "2")
    assert found["legal_decode_context_parallel_sizes"] == [1, 2]
    rows = {
        (row["tensor_parallel_size"], row["decode_context_parallel_size"]): row["num_tokens"]
        for row in found["layouts"]
        if row["weights"] == "bfloat16" and (row["pipeline_parallel_size"], row["data_parallel_size"]) == (1, 1)
    }
    assert rows.keys() == {(4, 1), (4, 2)}
    assert rows[4, 2] == pytest.approx(2 * rows[4, 1], rel=0.05)
    assert [row["decode_context_parallel_size"] for row in found["asked"]] == [2] * len(found["asked"])
    text = text_of(capsys, *arguments, "-tp", "4", "-dcp", "2")
    assert "-dcp 1, 2 with -tp 4" in text
    assert "ranks    -tp 4 -dcp 2, weights in " in text
    assert main(["plan", *arguments, "-tp", "2", "-dcp", "2"]) == 2
    assert "1 with --tensor-parallel-size 2" in capsys.readouterr().err


def test_ranks_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "--device", "cpu", "-tp", "2", "-pp", "2", "--kv-cache-memory-bytes", "1000000")
    assert "shared by 4 ranks" in text
    assert "ranks    -tp 2 -pp 2, weights in " in text
    assert "ranks 0 to 1, each: stage 1, layers " in text
    assert "-pp 1 to " in text
    for row in ("-tp 2 -pp 2", "-tp 2 -dp 2", "-pp 4", "-dp 4"):
        assert f"\n{row} " in text
    assert main(["plan", "--device", "cpu", "-tp", "64"]) == 2
    assert "cannot be shared by 64 devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--request-rate", "0"), "Illegal --request-rate"),
        (("--request-rate", "inf"), "Illegal --request-rate"),
        (("--price-per-hour", "-2"), "Illegal --price-per-hour"),
        (("--price-per-hour", "1,2"), "number of prices"),
        (("--price-per-hour", "9" * 400), "Illegal --price-per-hour"),
        (("--hardware", "h100x" + "9" * 5000), "Illegal number of devices"),
        (("--workload", "x" * 5000), "Unknown workload"),
        (("--workload", "talk"), "Unknown workload. Got 'talk'. Expected chat, code, rag, random:IN/OUT"),
        (("--workload", "random:0/5"), "Unknown workload"),
        (("--workload", "/nowhere/\x1b[31m"), r"\x1b[31m"),
        (("--memory", "80GiB"), "--hardware names a machine"),
        (("--device", "cpu"), "--hardware lists GPUs"),
        (("--bandwidth", "1T"), "--hardware names a machine"),
        (("--tensor-parallel-size", "3"), "cannot be shared by 3 devices"),
        (("--sequences", "0"), "Too few sequences"),
        (("-pp", "2", "--check"), "compared by memory and the time of one token alone"),
        (("-pp", "2", "--slo-ttft", "1s"), "compared by memory and the time of one token alone"),
        (("-pp", "2", "--interconnect", "1GB"), "Only one machine is planned"),
        (("-pp", "2", "--nnodes", "2", "--interconnect", "fast"), "Illegal --interconnect"),
        (("-pp", "2", "--nnodes", "2", "--interconnect", "0GB,1ms"), "Illegal --interconnect"),
        (("-pp", "2", "--nnodes", "2", "--interconnect", "10Gb/s"), "bits as 10Gbit/s, or bytes as 1.25GB/s"),
        (("-pp", "2", "--nnodes", "2", "--interconnect", "1.25gb,1ms"), "may stand for bits or for bytes"),
        (("-pp", "2", "--nnodes", "2", "--interconnect", "1GB,5 parsecs"), "Illegal --interconnect"),
        (("-pp", "2", "--nnodes", "2"), "GPUs of several machines"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hardware", "h100", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bandwidth", "1TB"), "described by --memory, --bandwidth and --flops together"),
        (("--memory", "1GiB", "--flops", "1T"), "described by --memory, --bandwidth and --flops together"),
        (("--memory", "1GiB", "--bandwidth", "fast", "--flops", "1T"), "Illegal --bandwidth"),
        (("--memory", "1GiB", "--bandwidth", f"0.{'0' * 320}1", "--flops", "1T"), "Illegal --bandwidth"),
        (("--memory", "1GiB", "--workload", "chat"), "has no speed of its own"),
        (("--price-per-hour", "1,2"), "There are several prices for one machine"),
    ],
)
def test_machines_that_are_refused(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[1, 2", "is not JSON"),
        (
            '{"input_length": 5, "output_length": 3}\n{"input_length": "x", "output_length": 3}',
            "Illegal 'input_length' on line 2",
        ),
        ('{"input_length": 5, "output_length": 0}', "Illegal 'output_length' on line 1"),
        ('{"input_length": 5}', "has no 'output_length'"),
        ('{"input_length": 5, "output_length": 3}\nnonsense', "Line 2 of"),
        ('{"words": 5}', "is of no known workload"),
        ("", "is of no known workload"),
    ],
)
def test_files_that_are_refused(lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(lines)
    assert main(["plan", "--hardware", "h100", "--workload", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5 parsecs", "-1", "0ms", "nan"])
def test_durations_that_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--hardware", "h100", f"--slo-ttft={text}"])
    assert stop.value.code == 2
    assert "a positive time: 500ms, 1.5s, or a number of seconds" in capsys.readouterr().err
