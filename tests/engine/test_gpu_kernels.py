"""The engine's path for GPUs with the kernels of a GPU, under Triton's interpreter: the tokens are the CPU engine's.

float32, because the interpreter cuts off where a GPU rounds. Without a GPU only: with one, test_on_a_gpu.py runs them.
A tiny model of random weights: the interpreter takes its time.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.engine.core import EngineCore
from quire.kernels import cpu, gpu
from quire.model_config import ModelConfig, load_head_config, load_model_config
from quire.models.decoder import Decoder
from quire.models.form import ModelForm
from quire.models.registry import CausalLM, build_model
from quire.sampling_params import SamplingParams
from quire.spec_decode.by_worker import DraftedByWorker
from tests import triton_interpreter
from tests.engine.harness import Prompt, Schedule, core_over, run
from tests.models.tiny_models import SIZES
from tests.worker.fake_accelerator import FakeAccelerator

if reason := triton_interpreter.why_not():
    pytest.skip(reason, allow_module_level=True)
# of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

PARAMS = (
    SamplingParams(temperature=0.0, min_tokens=5, max_tokens=5),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=2),
    SamplingParams(temperature=0.0, max_tokens=2),
)
LENGTHS = (9, 18, 3)


def requests() -> list[Prompt]:
    return [
        Prompt(tuple(range(3 + 20 * index, 3 + 20 * index + length)), params)
        for index, (length, params) in enumerate(zip(LENGTHS, PARAMS, strict=True))
    ]


# Of queries, and of keys and values: each is a program per token.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
HEADS_OF_DRAFTER = {"num_attention_heads": 3, "num_key_value_heads": 1}


def tiny_model(folder: Path, *, drafts: bool = False) -> tuple[ModelConfig, CausalLM]:
    """The same weights for whichever kernels are chosen, so wide that tokens differ."""
    raw = SIZES | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
    raw |= {"num_hidden_layers": 2} | (HEADS_OF_DRAFTER if drafts else HEADS)
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_model_config(folder)
    model = build_model(config, ModelForm(torch.float32))
    generator = torch.Generator().manual_seed(int(drafts))
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in model.expected_weights().items()}
    model.load_weights((name, weight + ("norm" in name)) for name, weight in weights.items())
    model.finalize()
    return config, model


def tiny_head(folder: Path, target_config: ModelConfig, target: CausalLM) -> tuple[ModelConfig, CausalLM]:
    """An EAGLE-3 head for it, which drafts the first tokens only."""
    assert isinstance(target, Decoder)
    raw = SIZES | {"num_hidden_layers": 1, "draft_vocab_size": 37, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    raw |= HEADS_OF_DRAFTER
    (folder / "config.json").write_text(json.dumps(raw))
    config = load_head_config(folder, "eagle3", target_config, {"lm_head.weight", "d2t"})
    model = build_model(config, ModelForm(torch.float32), target=target)
    generator = torch.Generator().manual_seed(2)
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in model.expected_weights().items()}
    weights["d2t"] = torch.zeros(37, dtype=torch.int64)
    model.load_weights((name, weight + ("norm" in name)) for name, weight in weights.items())
    model.finalize()
    return config, model


@pytest.mark.parametrize(
    ("is_deterministic", "drafter"),
    [
        (True, "model"),
        (False, "head"),
        *(pytest.param(is_deterministic, None, marks=pytest.mark.slow) for is_deterministic in (True, False)),
        pytest.param(False, "model", marks=pytest.mark.slow),
        pytest.param(True, "head", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_cpu(
    is_deterministic: bool, drafter: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts in pieces beside decodes, padded graphs, a random row among greedy ones; two steps in flight, or drafts
    of another model or of a head."""
    from quire.kernels.triton import kernels
    from quire.kernels.triton.launch import IS_INTERPRETED

    if not IS_INTERPRETED:
        pytest.skip("there is a GPU, on which kernels are not interpreted")
    expected = run(core_over(*tiny_model(tmp_path), Schedule(), "float32"), requests())
    assert len({token for tokens in expected for token in tokens}) > 3, "the weights hardly matter"
    called: set[str] = set()

    class Kernels:
        def __getattr__(self, name: str) -> object:
            called.add(name)
            return getattr(kernels, name)

    num_drafts = []

    def note(core: EngineCore, step: int) -> None:
        num_drafts.append(0 if core.last_record is None else core.last_record.num_draft_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "serves", lambda device: True)
        patch.setattr(gpu, "kernels", Kernels)
        patch.setattr(gpu, "_is_deterministic", is_deterministic)
        patch.setattr(cpu, "_available", False)
        accelerator = FakeAccelerator()
        schedule = Schedule(
            chunk=16, max_num_seqs=4, num_blocks=16, depth=2, accelerator=accelerator, graph_sizes=(2, 4)
        )
        target = tiny_model(tmp_path)
        if drafter is not None:
            draft = tiny_head(tmp_path, *target) if drafter == "head" else tiny_model(tmp_path, drafts=True)
            schedule = replace(schedule, depth=1, draft=draft, proposer=DraftedByWorker())
        assert run(core_over(*target, schedule, "float32"), requests(), before_step=note) == expected
    assert (sum(num_drafts) > 0) == (drafter is not None)
    assert sum(graph.num_replays for graph in accelerator.graphs) >= 2
    products = {"linear"} if is_deterministic else set()
    assert called == products | {*("gated_activation", "greedy", "norm", "paged_attention", "rope_and_cache", "sample")}
