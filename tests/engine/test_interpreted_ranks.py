"""Ranks that run the kernels of a GPU, each in a process of its own: their tokens are those of one rank on a CPU.

float32, because the interpreter cuts off where a GPU rounds. Gloo stands in for NCCL.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from quire.distributed.device_group import DeviceGroup
from quire.engine import rank_spawn
from quire.kernels import cpu
from quire.model_config import load_model_config
from quire.models.form import ModelForm
from quire.models.registry import build_model
from quire.sampling_params import SamplingParams
from quire.worker.worker import DeviceWorker
from tests.engine.harness import Prompt, run
from tests.engine.interpreted_gpus import WHY_NOT, Kernels, use_them
from tests.engine.ranks import started
from tests.engine.test_gpu_kernels import requests
from tests.engine.test_rank_processes import in_processes
from tests.models.tiny_models import SIZES
from tests.nursery import words_of

pytestmark = [
    pytest.mark.skipif(not cpu.available(), reason="ranks need the compiled kernels"),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),  # of the interpreter
]
LIMITS = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "cudagraph_capture_sizes": (1, 2),
    "num_gpu_blocks_override": 16,
    "distributed_timeout_seconds": 100,
}


OF_ATTENTION = {"norm", "paged_attention", "rope_and_cache"}
OF_EXPERTS = {"ExpertRows", "combine", "linear", "route"}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ONE_HEAD = {"num_key_value_heads": 1}
LONG = {"max_model_len": 320, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64}
DIVIDED = LONG | {"decode_context_parallel_size": 2}


def tiny_checkpoint(folder: Path, more: dict[str, int]) -> Path:
    """Random weights, so wide that tokens differ. Two ranks have two heads of queries and one of keys each."""
    kind = ("Qwen3MoeForCausalLM", "qwen3_moe") if more is EXPERTS else ("Qwen3ForCausalLM", "qwen3")
    raw = SIZES | {"architectures": [kind[0]], "model_type": kind[1], "tie_word_embeddings": True}
    raw |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "float32"}
    raw |= {"max_position_embeddings": 512} | more
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = build_model(load_model_config(folder), ModelForm(torch.float32)).expected_weights()
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file({name: weight + ("norm" in name) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def prompts(sharing: dict[str, int]) -> list[Prompt]:
    """With a divided cache, the first one has pages of both ranks, and the second one of one rank."""
    first, second = requests()[:2]
    if sharing is DIVIDED:
        params = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=3)
        first = Prompt(tuple(Random(3).choices(range(3, 100), k=257)), params)
    return [first, second]


@pytest.mark.parametrize(
    ("more", "sharing", "forward"),
    [
        pytest.param({}, {}, {"gated_activation", *OF_ATTENTION}, marks=pytest.mark.slow),
        (EXPERTS, {"enable_expert_parallel": True}, {"gated_activation", *OF_ATTENTION, *OF_EXPERTS}),
        (ONE_HEAD, DIVIDED, {"gated_activation", "norm", "partial_attention", "rope_and_cache"}),
    ],
    ids=["dense", "whole experts", "divided cache"],
)
def test_two_ranks_on_gpus(
    more: dict[str, int],
    sharing: dict[str, int],
    forward: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt beside a decode, captured steps, a random row beside a greedy one; hosts that are ahead."""
    from quire.kernels.triton.launch import IS_INTERPRETED

    if not IS_INTERPRETED:
        pytest.skip("there is a GPU, on which kernels are not interpreted")
    folder = tiny_checkpoint(tmp_path, more)
    own = {name: value for name, value in sharing.items() if name in LIMITS}
    engine = started(1, folder, **LIMITS | own)
    expected = run(engine.core, prompts(sharing))
    engine.core.shutdown()
    assert len({token for tokens in expected for token in tokens}) > 3, "the weights hardly matter"
    file, kernels = tmp_path / "kernels", Kernels()
    monkeypatch.setattr(rank_spawn, "PROGRAM", (*words_of("tests.engine.interpreted_gpus"), str(file)))
    use_them(kernels, monkeypatch.setattr)
    engine = in_processes(folder, tensor_parallel_size=2, device="cuda", **LIMITS | sharing)
    try:
        first = engine.executor.workers[0]  # type: ignore[attr-defined]
        assert isinstance(first, DeviceWorker)
        assert first._ranks is not None
        assert isinstance(first._ranks.group, DeviceGroup)
        assert run(engine.core, prompts(sharing)) == expected
        assert first.runner.forward_pass.num_captured
    finally:
        engine.core.shutdown()
    assert kernels.names.keys() == forward | {"greedy", "sample"}
    assert set(file.read_text().split()) == forward, "the first rank samples"
