"""Ranks share models with experts, sinks, chunks and latent attention: tokens and logprobs of one rank, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError
from quire.kernels import cpu
from quire.worker import expert_balancer
from tests.covering import covering
from tests.engine.ranks import started
from tests.engine.test_sameness_ranks import Answer, answers, of_ranks
from tests.models.test_families import CASES, random_hf_model
from tests.quantization import checkpoints, fp8_checkpoints
from tests.quantization.checkpoints import Format
from tests.quantization.fp8_checkpoints import Fp8Form

pytestmark = pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels")

LIMITS: dict[str, Any] = {"max_model_len": 128}
VOCABULARY = {"vocab_size": 5000}  # the prompts' tokens
FAMILIES = (
    *("phimoe", "qwen2_moe", "glm4_moe", "granitemoe", "gpt_oss", "llama4_text"),
    *("deepseek_v2", "deepseek_v3", DENSE := "deepseek_v3-halves"),
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a family, as transformers writes it."""

    def write(name: str) -> Path:
        folder, case = tmp_path_factory.mktemp(name), CASES[name]
        random_hf_model(replace(case, settings=case.settings | VOCABULARY)).save_pretrained(folder)
        return folder

    return cache(write)


@pytest.fixture(scope="module")
def expected(folder_of: Callable[[str], Path]) -> Callable[[str, str, str], Answer]:
    """Of one rank."""
    return cache(lambda family, form, isa: of_ranks(1, folder_of(family), **LIMITS, **FORMS[form]))


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


# Ranks have rows of every expert, or whole ones.
SHARES: dict[str, dict[str, Any]] = {
    "rows": {},
    "neighbours": {"enable_expert_parallel": True},
    "round robin": {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"},
}
MOVING = {"enable_expert_parallel": True, "enable_eplb": True}


# Each family in one form, with rows of experts and with whole ones, shared in one of two ways. The families of a kind
# (experts in several layouts, latent rows) have all forms.
SHARED = [
    pytest.param(
        *(family, form, num_ranks, share),
        marks=()
        if form_at == at % 3
        and (num_ranks, share_at) in ((2 + at % 2, 0), (3 - at % 2, 1 + at // 2 % 2))
        and not (family == DENSE and share_at)
        else pytest.mark.slow,
    )
    for at, family in enumerate(FAMILIES)
    for form_at, form in enumerate(FORMS)
    for num_ranks in (2, 3)
    for share_at, share in enumerate(SHARES)
]


@pytest.mark.parametrize(("family", "form", "num_ranks", "share"), SHARED)
def test_families(
    family: str,
    form: str,
    num_ranks: int,
    share: str,
    folder_of: Callable[[str], Path],
    expected: Callable[[str, str, str], Answer],
) -> None:
    """Router, routing and rows of the cache of latent attention are computed by every rank."""
    one = expected(family, form, cpu.isa())
    assert len({tuple(tokens) for tokens, _ in one}) > 2
    asked = {} if family == DENSE else SHARES[share]
    assert of_ranks(num_ranks, folder_of(family), **LIMITS, **FORMS[form], **asked) == one


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_whole_experts_in_stages(
    num_ranks: int, folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]
) -> None:
    """The ranks of each of two stages share its experts: -tp 4 -pp 2 -ep."""
    asked = LIMITS | FORMS["bfloat16"] | SHARES["neighbours"]
    found = of_ranks(num_ranks, folder_of("qwen3_moe"), num_stages=2, **asked)
    assert found == expected("qwen3_moe", "bfloat16", cpu.isa())


# The kernels of both families meet instruction sets in the tests of kernels.
@pytest.mark.parametrize(
    ("isa", "family", "share"),
    covering(cpu.isas()[:-1], ["qwen2_moe", "deepseek_v3"], ["rows", "round robin"], apart=[(0, 1), (0, 2)]),
)
def test_every_instruction_set(
    isa: str, family: str, share: str, folder_of: Callable[[str], Path], expected: Callable[[str, str, str], Answer]
) -> None:
    """With chunks of prompts and two batches in flight."""
    best, schedule = cpu.isa(), {"max_num_batched_tokens": 17, "async_scheduling": True}
    cpu.set_isa(isa)
    try:
        found = of_ranks(2, folder_of(family), **schedule, **LIMITS, **SHARES[share], dtype="bfloat16")
        assert found == expected(family, "bfloat16", isa)
    finally:
        cpu.set_isa(best)


EXPERTS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    **VOCABULARY,
}


def _experts(form: Format | Fp8Form) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if isinstance(form, Fp8Form):  # ranks have whole blocks of 128 rows
            sizes = EXPERTS | {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
            config = transformers.Qwen3MoeConfig(**sizes, head_dim=128)
            fp8_checkpoints.write(folder, config, form)
        else:
            checkpoints.write(folder, transformers.Qwen3MoeConfig(**EXPERTS, head_dim=32), form)

    return write


def _latent(folder: Path) -> None:
    """Blocks of 128 rows keep two heads together."""
    settings = CASES["deepseek_v3"].settings | {"q_lora_rank": 160, "hidden_size": 256, "num_attention_heads": 4}
    settings |= {"num_hidden_layers": 2}
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    more = {"num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 256, "attention_bias": False}
    config = transformers.DeepseekV3Config(**settings | sizes | more | VOCABULARY)
    fp8_checkpoints.write(folder, config, Fp8Form(scales="block", block=(64, 128)))


def _mxfp4(folder: Path) -> None:
    case = CASES["gpt_oss"]
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 3, "num_hidden_layers": 2}
    random_hf_model(replace(case, settings=case.settings | sizes | VOCABULARY)).save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, (E, N, K // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))


CHECKPOINTS: dict[str, Callable[[Path], None]] = {
    "AWQ": _experts(Format(method="awq", group_size=64, has_zeros=True)),
    "GPTQ with act-order": _experts(Format(method="gptq", group_size=32, has_zeros=True, has_order=True)),
    "int8 of whole rows": _experts(Format(method="int-quantized", bits=8)),
    "FP8 blocks": _experts(Fp8Form(scales="block")),
    "latent FP8 blocks": _latent,
    "MXFP4": _mxfp4,
}


# No expert is cut with whole ones: these forms have a tensor of all experts, an order of columns, and scales apart.
AS_WHOLE = ("MXFP4", "GPTQ with act-order", "FP8 blocks")


@pytest.mark.parametrize(
    ("name", "share"),
    [
        *((name, "rows") for name in CHECKPOINTS),
        *(pytest.param(name, "neighbours", marks=() if name in AS_WHOLE else pytest.mark.slow) for name in CHECKPOINTS),
    ],
)
def test_quantized_checkpoints(name: str, share: str, tmp_path: Path) -> None:
    CHECKPOINTS[name](tmp_path)
    one = of_ranks(1, tmp_path, **LIMITS)
    assert len({tuple(tokens) for tokens, _ in one}) > 1
    assert of_ranks(2, tmp_path, **LIMITS, **SHARES[share]) == one


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "config"),
    [
        (2, 2, {"num_redundant_experts": 3, "use_async": False}),
        (3, 1, {"num_redundant_experts": 2, "window_size": 2}),
        (3, 1, {}),
    ],
)
def test_experts_that_move_between_steps(
    num_ranks: int,
    num_stages: int,
    config: dict[str, Any],
    folder_of: Callable[[str], Path],
    expected: Callable[[str, str, str], Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two places change before a step, or all at once; in the middle of answers and of prompts in chunks."""
    monkeypatch.setattr(expert_balancer, "BUDGET_BYTES", 1)
    asked = MOVING | {"eplb_config": {"step_interval": 3, **config}}
    asked |= LIMITS | FORMS["int4"] | {"max_num_batched_tokens": 17, "async_scheduling": num_stages == 1}
    engine = started(num_ranks, folder_of("qwen2_moe"), num_stages=num_stages, **asked)
    runners = [worker.runner for worker in engine.executor.workers]  # type: ignore[attr-defined]
    balancers = [runner.balancer for runner in runners if runner.balancer is not None]  # one stage has experts
    assert len(balancers) == num_ranks
    before = balancers[0].num_moved
    assert answers(engine.core) == expected("qwen2_moe", "int4", cpu.isa())
    engine.core.shutdown()
    assert balancers[0].num_moved > before
    assert len({each.num_moved for each in balancers}) == 1


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        (DENSE, SHARES["neighbours"], "no experts that ranks could share"),
        ("qwen3_moe", SHARES["neighbours"] | {"tensor_parallel_size": 6}, "whole ones. Got 6. Expected .* 3, 4, 5[.]"),
        ("qwen2_moe", {"enable_eplb": True}, "Only ranks that have whole experts"),
        ("qwen2_moe", {"eplb_config": {"num_redundant_experts": 2}}, "need --enable-eplb"),
        (
            "qwen2_moe",
            MOVING | {"eplb_config": {"num_redundant_experts": 60}},
            "60 redundant experts are more than",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    family: str, asked: dict[str, Any], message: str, folder_of: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        started(2, folder_of(family), **asked)
