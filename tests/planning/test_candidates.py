"""The ranked plan: goldens of well-known models, errors of guides, the order of rows, and changes that help."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quire.planning.fits
from quire.config import EngineConfig
from quire.cost.devices import GPUS, NOT_RUN_ON, Ceilings, cuda_ceilings, find_gpu
from quire.errors import ConfigError
from quire.formats.kv_format import kv_format
from quire.model_config import ModelConfig, load_model_config
from quire.planning.candidate_lines import RankedPlan
from quire.planning.candidates import Candidate, Candidates, Demand, memory_terms, points
from quire.planning.devices import LEAST_CAPABILITY
from quire.planning.hardware import Hardware, parse_hardware
from quire.planning.request_lengths import RequestLength, RequestLengths
from quire.planning.service import Goals
from tests.planning.goldens import CHATS, FILE, GIB, HERE, candidates_of, facts
from tests.planning.test_cut_model import AWQ
from tests.real_models import MODELS, write_config

GOLDENS = json.loads(FILE.read_text())


def rows_of(found: Candidates, **facts: Any) -> list[Candidate]:
    """Rows with these weights, kv, degree, hardware."""

    def matches(row: Candidate) -> bool:
        form = row.fit.form
        own = {
            "weights": form.weights.name,
            "kv": form.kv_cache_dtype,
            "degree": row.degree,
            "hardware": row.hardware.name,
        }
        return facts.items() <= own.items()

    return [row for row in found.rows if matches(row)]


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_well_known_models(name: str, tmp_path: Path) -> None:
    """The model cards say the same parameters and KV bytes."""
    model, (parameters, kv_bytes) = load_model_config(write_config(tmp_path, name)), MODELS[name][3:]
    assert model.weight_bytes("bfloat16") == 2 * parameters
    assert model.kv_bytes_per_token(kv_format("auto", "bfloat16")) == kv_bytes
    assert GOLDENS[name]["weight_bytes"]["bfloat16"] == 2 * parameters
    assert GOLDENS[name]["kv_bytes_per_token"] == kv_bytes


# One of each family, one that is too large for a device, and one that is for all of them.
PLANNED = {
    *("SmolLM2-135M", "Llama-3.1-8B", "Llama-3-70B", "Llama-3.1-405B", "Mistral-7B-v0.1", "Qwen2.5-7B", "Qwen3-4B"),
    *("Phi-3-mini-4k", "Gemma-2-9B", "OLMo-2-7B"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PLANNED else pytest.mark.slow) for name in MODELS]
)
def test_well_known_models(name: str, tmp_path: Path) -> None:
    """`python -m tests.planning.goldens` writes the file."""
    assert facts(write_config(tmp_path, name)) == GOLDENS[name]


def test_the_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings once per pair of formats and kind of device; weights counted once per format and number of parts."""
    counts = {"resolve": 0, "weights": 0}
    resolve, weigh = quire.planning.fits.resolve, ModelConfig.weight_bytes_by_kind

    def counted_resolve(*args: Any, **keywords: Any) -> Any:
        counts["resolve"] += 1
        return resolve(*args, **keywords)

    def counted_weigh(*args: Any, **keywords: Any) -> Any:
        counts["weights"] += 1
        return weigh(*args, **keywords)

    monkeypatch.setattr(quire.planning.fits, "resolve", counted_resolve)
    monkeypatch.setattr(ModelConfig, "weight_bytes_by_kind", counted_weigh)
    found = candidates_of(write_config(tmp_path, "Llama-3.1-405B"), "h100x8,l40sx8")
    assert len(found.rows) == 2 * 4 * 12
    assert counts["resolve"] == 2 * (1 + 12)
    assert counts["weights"] == 2 * 4 + 4 * 4


def test_405b_in_bfloat16(tmp_path: Path) -> None:
    """812 GB do not fit into 8 x 80 GB, whatever the degree; they fit into 8 x H200."""
    folder = write_config(tmp_path, "Llama-3.1-405B")
    assert not any(row.fits for row in rows_of(candidates_of(folder, "h100x8"), weights="bfloat16"))
    (row,) = rows_of(candidates_of(folder, "h200x8"), weights="bfloat16", kv="auto", degree=8)
    assert row.fits
    assert row.flags == ("--tensor-parallel-size", "8")


def test_256_contexts_of_70b_are_687_gb(tmp_path: Path) -> None:
    """Not 40 GB: the plan says the missing bytes on each of 8 devices."""
    demand = Demand(CHATS.lengths, Goals(), num_sequences=256)
    found = candidates_of(write_config(tmp_path, "Llama-3-70B"), "h100x8", demand=demand)
    (row,) = rows_of(found, weights="bfloat16", kv="auto", degree=8)
    assert not row.fits
    assert row.missing_bytes + row.fit.num_bytes == 256 * 8192 * 320 * 1024 // 8 == 687_194_767_360 // 8
    assert found.best is not None, "16 requests of codes"


@pytest.mark.parametrize(
    ("hardware", "more", "share", "degree", "tokens", "sequences"),
    [
        ("a100-80x2", {}, 0.9, 2, range(20_000, 30_000), 2),  # a guide: "140 GB on 2 x A100 80 GB"
        ("a100-80", AWQ, 0.9, 1, range(90_000, 115_000), 12),  # "70B AWQ on 1 x A100", of 80 GB
        ("h100x4", {}, 0.95, 4, range(500_000, 580_000), 64),  # "TP 4 at 0.95 is sufficient"
    ],
)
def test_70b_of_the_guides(
    hardware: str, more: dict[str, Any], share: float, degree: int, tokens: range, sequences: int, tmp_path: Path
) -> None:
    found = candidates_of(write_config(tmp_path, "Llama-3-70B", **more), hardware, gpu_memory_utilization=share)
    (row,) = [row for row in rows_of(found, kv="auto", degree=degree) if not row.fit.form.flags]
    assert row.fits
    assert row.fit.num_tokens in tokens
    assert row.num_sequences in range(sequences, sequences + 2)


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(None, 20_816), (256, 26_832)])
def test_what_70b_leaves_on_two_a100(max_num_seqs: int | None, tokens: int, tmp_path: Path) -> None:
    """Each term by hand: "140 GB on 2 x A100 80 GB" leaves 27k tokens with 256 requests, and 21k with the default."""
    folder = write_config(tmp_path, "Llama-3-70B")
    found = candidates_of(folder, "a100-80x2", gpu_memory_utilization=0.9, max_num_seqs=max_num_seqs)
    (row,) = [row for row in rows_of(found, kv="auto", degree=2) if not row.fit.form.flags]
    hidden, inner, vocabulary, layers, kv_elements = 8192, 28_672, 128_256, 80, 8 * 128
    rows, step_tokens = max_num_seqs or 1024, 8192
    norms = 2 * hidden * (2 * layers + 1)  # on both
    weights = (2 * 70_553_706_496 - norms) // 2 + norms
    # The residual stream, its norm, half of gate and up, and the whole input of down. Then logits: the own half of the
    # vocabulary, the halves of both, and the whole.
    work = 2 * step_tokens * (2 * hidden + inner + inner) + 4 * rows * vocabulary * 5 // 2
    left = int(0.9 * GPUS["a100-80"].memory_bytes) - weights - work
    kv_bytes_per_token = 2 * layers * 2 * kv_elements // 2  # half of the heads
    assert (row.fit.memory.weight_bytes, row.fit.memory.work_bytes) == (weights, work)
    assert row.fit.num_tokens == left // (16 * kv_bytes_per_token) * 16 == tokens
    assert tokens in range(20_000, 30_000)


def test_a_small_model_has_replicas_and_a_large_one_is_shared(tmp_path: Path) -> None:
    """TP 2 and two replicas in numbers: replicas serve more, and TP 2 answers one request faster."""
    found = candidates_of(write_config(tmp_path, "Llama-3.1-8B"), "h100x2")
    assert found.best is not None
    assert found.best.flags == ("--data-parallel-size", "2")
    replicas, shared = found.cuts_of(found.best)
    assert (replicas.copies, shared.degree) == (2, 2)
    assert replicas.requests_per_second > shared.requests_per_second
    (alone, *_), (faster, *_) = (points(row) for row in (replicas, shared))
    assert faster[1].itl.value < alone[1].itl.value
    text = _plan(found).text()
    interval, bound = r"[\d.,]+ \([\d.,]+-[\d.,]+\)", r"[\d.,]+ \([\d.,]+-[\d.,]+, (memory|arithmetic|links)\)"
    assert re.search(r"\ncopies +requests/s +one alone: TTFT ms +ITL ms\n", text)
    assert re.search(rf"\n +2 replicas on 1 device each +{bound} +{bound} +{bound}\n", text)
    assert re.search(rf"\n +one copy on 2 devices +{bound} +{bound} +{bound}\n", text)
    assert re.search(rf"\n1 +{interval} +{interval} +{interval} +{interval} +memory\n", text)
    assert (
        "\nFirst tokens are bound by arithmetic.\nAt least nine of ten measurements should lie in their intervals.\n"
        in text
    )
    assert "x the requests/s of one copy, which answers one request" in text
    large = candidates_of(write_config(tmp_path, "Llama-3-70B"), "h100x2")
    (row,) = rows_of(large, weights="bfloat16", kv="auto", degree=2)
    assert large.cuts_of(row) == [row], "it fits no single device"


def test_the_ranking_says_intervals_and_what_binds(tmp_path: Path) -> None:
    """The interval of requests/s is that of tokens/s and of prices."""
    found = candidates_of(write_config(tmp_path, "Llama-3.1-8B"), "h100x2,l4", prices=(2.5, 0.8))
    lines = _plan(found).text().splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("hardware  weights"))
    assert re.split("  +", lines[head])[-5:] == ["requests/s", "tokens/s", "per M", "bound by", "meets it"]
    said = next(
        index for index, line in enumerate(lines) if line.endswith(" lie within the same factor as requests/s.")
    )
    number = r"[\d.,]+"
    rate = re.compile(rf"  ({number} \({number}-{number}\)) +{number} +{number} +(\w+) +(yes|likely|no)$")
    rows = [rate.search(line) for line in lines[head + 1 : said - 1]]
    shown = [row.groups() for row in rows if row is not None]
    assert len(shown) == len(rows) >= 8
    best, price = found.rows[0], found.rows[0].price_per_million()
    assert best.best_point is not None
    assert price is not None
    assert shown[0] == (best.rate.text(), best.best_point.bound, best.verdict)
    tokens = best.best_point.tokens_per_second
    factors = [each.high / each.value for each in (best.rate, tokens, price)]
    factors += [each.value / each.low for each in (best.rate, tokens, price)]
    assert factors == pytest.approx([factors[0]] * 6)
    assert {bound for _, bound, _ in shown} == {"memory", "arithmetic"}


def test_the_number_of_copies_may_be_given(tmp_path: Path) -> None:
    model, engine = load_model_config(write_config(tmp_path, "Llama-3.1-8B")), EngineConfig(model="m")
    found = Candidates(engine, model, parse_hardware("h100x8", HERE, ()), CHATS, copies=2)
    assert {(row.copies, row.degree) for row in found.rows} == {(2, 4)}
    with pytest.raises(ConfigError, match=r"No hardware can be shared equally.*Got 3.*h100x8 has 8"):
        Candidates(engine, model, parse_hardware("h100x8", HERE, ()), CHATS, copies=3)


def test_70b_awq_on_24_gb_cards(tmp_path: Path) -> None:
    """2 x A10G hold the weights and hardly any request; an A100 of 40 GB not even the weights."""
    folder = write_config(tmp_path, "Llama-3-70B", **AWQ)
    (row,) = rows_of(candidates_of(folder, "a10gx2"), kv="auto", degree=2)
    assert row.max_model_len < 8192
    assert row.num_requests < 5
    assert not any(row.fits for row in candidates_of(folder, "a100-40").rows)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t4", "compute capability is 7.5, and the kernels need 8.0"),
        ("v100x8", "compute capability is 7.0"),
        ("mi300x", "a GPU of AMD"),
        ("MI300Xx8", "a GPU of AMD"),
        ("mi300", "a GPU of AMD"),
        ("trn2", "an accelerator of Amazon's"),
        ("h1000", "Did you mean 'h100'?"),
        ("l40", "Did you mean 'l40s'?"),
        ("abacus", "--memory 48GiB --bandwidth 864GB --flops 362T"),
        ("h100x0", "Illegal number of devices"),
        ("h100x9999", "Illegal number of devices"),
        ("", "Unknown hardware"),
        ("h100,,l4", "Unknown hardware"),
    ],
)
def test_hardware_that_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hardware(text, HERE, ())
    assert words in error.value.message


@pytest.mark.parametrize(("text", "name"), [("h100-80gb", "h100"), ("H100-SXM", "h100"), ("p5e", "h200")])
def test_short_names_of_hardware(text: str, name: str) -> None:
    assert parse_hardware(text, HERE, ())[0].name == name


def test_hardware_without_kernels_is_not_expected() -> None:
    with pytest.raises(ConfigError) as error:
        find_gpu("abacus")
    assert "v100" not in error.value.message


def test_names_of_hardware() -> None:
    """As people write them; Amazon's families are not mixed up: g6 has L4, g6e has L40S."""
    found = parse_hardware("H100x2, rtx4090,rtx4090x2,A100-80GB,g6,g6ex4,RTX-PRO-6000", HERE, (1, 2, 3, 4, 5, 6, 7))
    names = ["h100x2", "rtx4090", "rtx4090x2", "a100-80", "l4", "l40sx4", "rtx-pro-6000"]
    assert [each.name for each in found] == names
    assert [each.price_per_hour for each in found] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ConfigError, match="number of prices"):
        parse_hardware("h100,l4", HERE, (1, 2, 3))


def test_the_table_of_devices() -> None:
    """Facts that hold of all: FP8 came with 8.9 and doubles bfloat16, and CUDA reports a little less than the label."""
    for gpu in GPUS.values():
        assert gpu.source.startswith("https://"), gpu.name
        assert (gpu.fp8_flops > 0) == (gpu.capability >= 89), gpu.name
        assert not gpu.fp8_flops or gpu.fp8_flops == pytest.approx(2 * gpu.bf16_flops, rel=0.02), gpu.name
        assert (gpu.bf16_flops > 0) == (gpu.capability >= 80), gpu.name
        assert gpu.link_bandwidth < gpu.read_bandwidth, gpu.name
        assert find_gpu(gpu.name) is gpu is find_gpu(gpu.cuda_name)
    assert not NOT_RUN_ON.keys() & GPUS.keys()
    h100 = cuda_ceilings("NVIDIA H100 80GB HBM3", is_fp8=True)
    assert (h100.read_bandwidth, h100.flops) == (3.35e12, 1979e12)
    assert cuda_ceilings("NVIDIA H100 80GB HBM3", is_fp8=False).flops == 989e12, "codes become bfloat16 first"
    assert cuda_ceilings("NVIDIA Unheard Of", is_fp8=False).read_bandwidth == GPUS["l4"].read_bandwidth


def test_checkpoints_in_fp8_are_multiplied_in_fp8(tmp_path: Path) -> None:
    """Whatever their method is called: the held format decides."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    own = candidates_of(write_config(tmp_path, "Llama-3.1-8B", quantization_config=config), "h100").rows
    on_load = candidates_of(write_config(tmp_path, "Llama-3.1-8B"), "h100", quantization="fp8").rows
    first, second = (next(row for row in rows if row.fit.form.kv_cache_dtype == "auto") for rows in (own, on_load))
    assert first.service is not None
    assert second.service is not None
    assert first.service.at(1).ttft.value == pytest.approx(second.service.at(1).ttft.value, rel=0.05)


def test_no_more_requests_at_once_than_the_settings_let(tmp_path: Path) -> None:
    found = candidates_of(write_config(tmp_path, "SmolLM2-135M"), "h100", max_num_seqs=4)
    assert {row.num_requests for row in found.rows} == {4}


def test_every_layer_of_a_small_model_takes_a_while(tmp_path: Path) -> None:
    """Qwen2.5-0.5B reads 1 GB of weights a step, in 0.4 ms on an H100; its 24 layers are launched too."""
    best = candidates_of(write_config(tmp_path, "Qwen2.5-0.5B"), "h100").best
    assert best is not None
    assert best.service is not None
    assert 0.8e-3 < best.service.at(1).itl.value < 2e-3


def test_larger_machines_are_named_where_neither_more_nor_larger_devices_are_enough(tmp_path: Path) -> None:
    found = candidates_of(write_config(tmp_path, "Llama-3.1-405B"), "l4", quantization="fp8")
    assert found.with_more_devices(found.closest) is found.with_larger_devices(found.closest) is None
    other = found.with_more_larger_devices(found.closest)
    assert other is not None
    assert other.hardware.count > 1


def test_this_machine_has_no_more_devices(tmp_path: Path) -> None:
    model = load_model_config(write_config(tmp_path, "Llama-3.1-405B"))
    here, described = (Hardware("here", 1, HERE, described=rates) for rates in (None, Ceilings(1e12, 1e14)))
    found = Candidates(EngineConfig(model="m", device="cpu", quantization="int4"), model, [described], CHATS)
    more = found.with_more_devices(found.closest)
    assert more is not None
    assert more.hardware.name == "4 such devices"
    assert found.with_more_devices(replace(found.closest, hardware=here)) is None


def test_what_ranks_first(tmp_path: Path) -> None:
    """It meets the goals; it loses least; it is cheap: in this order."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    found = candidates_of(folder, "l4,h100x2")
    meets = [row for row in found.rows if row.meets]
    assert found.rows[: len(meets)] == meets
    losses = [row.fit.form.expected_loss for row in meets]
    assert losses == sorted(losses)
    assert found.best is not None
    assert (found.best.hardware.name, found.best.flags) == ("h100x2", ("--data-parallel-size", "2"))
    cheap = candidates_of(folder, "l40s,h100x2", prices=(0.01, 100))
    assert cheap.best is not None
    assert cheap.best.hardware.name == "l40s"
    price = cheap.best.price_per_million()
    assert price is not None
    assert cheap.best.best_point is not None
    assert price.value == pytest.approx(0.01 / 3600 / cheap.best.best_point.tokens_per_second.value * 1e6)
    assert price.low < price.value < price.high


def test_goals_bind(tmp_path: Path) -> None:
    """Rates and times of the plan itself: possible ones are met, impossible ones are not."""
    folder = write_config(tmp_path, "Llama-3.1-8B")

    def best_for(**goals: float) -> Candidate:
        best = candidates_of(folder, "h100x2", demand=Demand(CHATS.lengths, Goals(**goals))).best
        assert best is not None
        return best

    free = best_for()
    assert free.verdict == "yes"
    most = free.requests_per_second
    assert best_for(request_rate=0.4 * most).verdict == "yes"
    assert best_for(request_rate=0.9 * most).verdict == "likely"
    assert not best_for(request_rate=100 * most).meets
    one = dict(points(free))["one"]
    assert not best_for(itl=0.01 * one.itl.value).meets
    bound = best_for(itl=4 * one.itl.value)
    assert bound.meets
    assert bound.requests_per_second < most
    assert bound.best_point is not None
    assert bound.best_point.itl.value <= 4 * one.itl.value


def test_memory_adds_up(tmp_path: Path) -> None:
    found = candidates_of(write_config(tmp_path, "Llama-3.1-8B"), "h100x2")
    for row in found.rows:
        assert sum(term.num_bytes for term in memory_terms(row)) == row.hardware.memory_bytes
        assert {term.origin for term in memory_terms(row)} <= {"exact", "measured", "assumed"}


def test_requests_longer_than_the_model_are_not_met(tmp_path: Path) -> None:
    demand = Demand(RequestLengths("long", [RequestLength(2000, 100)]), Goals())
    found = candidates_of(write_config(tmp_path, "TinyLlama-1.1B"), "l4", demand=demand)
    assert found.best is not None
    assert found.best.verdict == "no"
    assert "100% of the requests are longer than that, and would be refused" in _plan(found).text()


def _plan(found: Candidates) -> RankedPlan:
    hardware = list(dict.fromkeys(row.hardware for row in found.rows))
    return RankedPlan("some/model", found._model, hardware, found)


def test_what_would_change_the_answer(tmp_path: Path) -> None:
    """Each line is what a plan of its own says."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    found = candidates_of(folder, "l4")
    best = found.best
    assert best is not None
    larger = found.with_larger_devices(best)
    assert larger is not None
    assert larger.hardware.name == "rtx5090"
    (alone,) = [row for row in candidates_of(folder, "rtx5090").rows if row.flags == larger.flags]
    assert alone.requests_per_second == pytest.approx(larger.requests_per_second)
    half = Demand(RequestLengths("half", [RequestLength(578, 211)]), Goals())
    (row,) = [row for row in candidates_of(folder, "l4", demand=half).rows if row.flags == best.flags]
    assert found.with_half_prompts(best).requests_per_second == pytest.approx(row.requests_per_second)
    lines = list(_plan(found)._changes())
    assert len(lines) == 3
    assert lines[0].startswith("--quantization int8")
    assert lines[1].startswith("prompts half as long: ")
    assert lines[2].startswith("rtx5090: ")


def test_devices_that_meet_a_rate(tmp_path: Path) -> None:
    """The wanted rate over the rate of one copy gives the number of copies: one less is too few."""
    folder = write_config(tmp_path, "Llama-3.1-8B")
    demand = Demand(CHATS.lengths, Goals(request_rate=100))
    alone = candidates_of(folder, "l4", demand=demand)
    assert alone.best is not None
    needed = math.ceil(100 / alone.best.requests_per_second)
    assert alone.best.best_point is not None
    served = (alone.best.rate * needed).text(alone.best.best_point.bound)
    assert next(_plan(alone)._changes()) == f"{needed} such devices: {needed} copies, {served} of 100 requests/s"
    for count, is_enough in ((needed, True), (needed - 1, False)):
        best = candidates_of(folder, f"l4x{count}", degree=1, demand=demand).best
        assert best is not None
        assert best.meets == is_enough


def test_nothing_fits(tmp_path: Path) -> None:
    """The missing bytes are enough, and every fix works."""
    folder = write_config(tmp_path, "Llama-3.1-405B")
    found = candidates_of(folder, "l40sx2")
    plan = _plan(found)
    assert found.best is None
    assert (plan.exit_code, plan.check_code) == (2, 2)
    assert found.closest.missing_bytes > 60e9
    assert "best      none: --quantization int4 --kv-cache-dtype fp8" in plan.text()
    more = found.with_more_devices(found.closest)
    larger = found.with_larger_devices(found.closest)
    assert more is not None
    assert larger is not None
    for fix in (more, larger):
        again = candidates_of(folder, fix.hardware.name).best
        assert again is not None
        assert again.fits
    assert list(plan._changes())[-2].startswith(f"{more.hardware.name}: TP ")


@pytest.mark.parametrize("hardware", ["h100x2,l40s", "rtx-pro-6000x8,h100-nvlx16", "l4"])
def test_lines_are_readable(hardware: str, tmp_path: Path) -> None:
    """At 120 columns, but for commands that are to be copied."""
    goals = Goals(request_rate=10, ttft=1, itl=0.05)
    for name in ("Llama-3-70B", "Qwen3-0.6B"):
        demand = Demand(CHATS.lengths, goals)
        found = candidates_of(write_config(tmp_path, name), hardware, demand=demand, prices=(2.5,))
        text = _plan(found).text()
        long = [line for line in text.splitlines() if len(line) > 120 and "quire " not in line]
        assert not long
        assert "nothing of Quire has run on a GPU yet" in text


def test_a_degree_that_was_asked_for(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "Llama-3-70B", num_hidden_layers=20)
    assert {row.degree for row in candidates_of(folder, "h100x4", degree=4).rows} == {4}
    with pytest.raises(ConfigError, match="one of 1, 3 with 3 devices"):
        candidates_of(folder, "h100x3", degree=2)
    engine = EngineConfig(model="m", quantization="int4")
    model = load_model_config(folder)
    found = Candidates(engine, model, parse_hardware("h100x2", HERE, ()), CHATS)
    assert {row.fit.form.weights.name for row in found.rows} == {"int4"}, "what the user has named is not up for choice"


def test_ranks_of_modelling_code_exchange_more(tmp_path: Path) -> None:
    folder, found = write_config(tmp_path, "Llama-3.1-8B"), []
    for model_impl in ("native", "transformers"):
        rows = candidates_of(folder, "h100x2", degree=2, model_impl=model_impl)
        (row,) = rows_of(rows, weights="bfloat16", kv="auto")
        assert row.service is not None
        found.append(row.service.at(1))
    assert found[0].itl.value < found[1].itl.value


def test_the_documented_table() -> None:
    """docs/planning.md has a row for each GPU that kernels run on, with its numbers."""
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    for gpu in GPUS.values():
        fp8 = f"{gpu.fp8_flops / 1e12:g}" if gpu.fp8_flops else "-"
        cells = (
            f"`{gpu.name}`",
            f"{gpu.memory_bytes / GIB:.2f}",
            f"{gpu.read_bandwidth / 1e9:,.0f}",
            f"{gpu.bf16_flops / 1e12:g}",
            fp8,
            f"{gpu.capability / 10:.1f}",
            gpu.aws or "-",
        )
        assert (f"| {' | '.join(cells)} |" in text) == (gpu.capability >= LEAST_CAPABILITY), gpu.name
