"""What an adapter of PEFT adds, by our reading, is what PEFT merges into the model's weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, SamplingParams
from quire.lora.request import LoRARequest
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import EMBEDDINGS
from quire.models.form import ModelForm
from quire.models.registry import build_model
from tests.lora.whole_adapters import Adapter, read_adapter
from tests.models.tiny_models import SIZES, hf_logits

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, about embeddings that it saves, and about tied weights
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # transformers', which PEFT reads
]

NUM_TOKENS = 12  # that are generated


@dataclass(frozen=True)
class Kind:
    """A kind of adapter: fields of LoraConfig, and the base."""

    fields: dict[str, Any]
    family: str = "Llama"
    is_tied: bool = False
    num_modules: int = 0  # that the adapter changes


KINDS: dict[str, Kind] = {
    "list": Kind({"target_modules": ["q_proj", "down_proj"], "lora_alpha": 3}, num_modules=6),
    "regex": Kind({"target_modules": r".*layers\.[02]\..*(q|k|v|o)_proj"}, num_modules=8),
    "all-linear": Kind({"target_modules": "all-linear", "fan_in_fan_out": True}, num_modules=21),
    "rank-stabilized": Kind({"target_modules": ["up_proj"], "use_rslora": True, "lora_alpha": 5}, num_modules=3),
    "patterns": Kind(
        {
            "target_modules": ["q_proj", "v_proj", "o_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 7, r"^model\.layers\..*v_proj": 3},
            "alpha_pattern": {r"layers\.[12]\.self_attn\.(q|v)_proj": 1, "o_proj": 9},
            "use_rslora": True,
        },
        num_modules=9,
    ),
    "layers": Kind(
        {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        num_modules=4,
    ),
    "embeddings": Kind({"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 5}, num_modules=5),
    "tied embeddings": Kind({"target_modules": ["embed_tokens", "k_proj"]}, is_tied=True, num_modules=4),
    "tied output": Kind({"target_modules": ["lm_head"]}, is_tied=True, num_modules=1),
    "tied adapters": Kind(
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, is_tied=True, num_modules=2
    ),
    "fused": Kind({"target_modules": "all-linear"}, family="Phi3", num_modules=12),
    "experts": Kind({"target_modules": ["q_proj", "o_proj"]}, family="Qwen3Moe", num_modules=6),
    "biases": Kind({"target_modules": ["q_proj", "k_proj", "v_proj"]}, family="Qwen2", num_modules=9),
}


def base_model(kind: Kind) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.family}Config")(**SIZES, tie_word_embeddings=kind.is_tied)
    return getattr(transformers, f"{kind.family}ForCausalLM")(config).eval()


def untied(model: Any) -> Any:
    """A copy whose output has its own weight. PEFT would merge the adapter of one of two tied modules into both."""
    copied = copy.deepcopy(model)
    copied.config.tie_word_embeddings = False
    copied.lm_head.weight = torch.nn.Parameter(copied.lm_head.weight.detach().clone())
    return copied


def saved(kind: Kind, folder: Path) -> tuple[Any, Adapter, ModelConfig]:
    """The base, and an adapter for it that PEFT has made and saved, read by us."""
    from peft import LoraConfig, get_peft_model  # it takes a second, which only these tests need

    model = base_model(kind)
    model.config.save_pretrained(folder)
    fields = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False} | kind.fields
    get_peft_model(copy.deepcopy(model), LoraConfig(**fields)).save_pretrained(folder / "adapter")
    config = load_model_config(folder)
    return model, read_adapter(folder / "adapter", config, max_rank=16, dtype=torch.float32), config


def merged(model: Any, adapter: Adapter) -> dict[str, Tensor]:
    """The weights after our deltas."""
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, delta in adapter.deltas.items():
        change_NK = delta.scale * delta.b_NR @ delta.a_RK
        weights[f"{name}.weight"] += change_NK.T if name == EMBEDDINGS else change_NK
    return weights


@pytest.mark.parametrize("name", KINDS)
def test_deltas_are_what_peft_merges(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    kind = KINDS[name]
    model, adapter, config = saved(kind, tmp_path)
    assert len(adapter.deltas) == kind.num_modules
    own = build_model(config, ModelForm(torch.float32))
    slots = {slot.removesuffix(".weight") for slot in own.expected_weights()}
    assert adapter.deltas.keys() <= slots | {"lm_head"}
    weights, tokens = merged(untied(model), adapter), list(range(3, 40))
    if "ensure_weight_tying" not in kind.fields:  # PEFT reads such an adapter into a tied model only
        theirs = PeftModel.from_pretrained(untied(model), tmp_path / "adapter").merge_and_unload()
        for weight, expected in theirs.state_dict().items():
            assert torch.allclose(weights[weight], expected, rtol=1e-5, atol=1e-6), weight
    ours = untied(model)
    ours.load_state_dict(weights)
    before = hf_logits(model, tokens)
    trained = hf_logits(PeftModel.from_pretrained(model, tmp_path / "adapter"), tokens)
    assert torch.allclose(hf_logits(ours, tokens), trained, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(trained, before, atol=1e-2)


@pytest.mark.parametrize("name", ["list", "embeddings", "fused"])
def test_greedy_tokens_are_those_of_a_merged_model(name: str, tmp_path: Path) -> None:
    """The engine reads the adapter's files beside the base; transformers generates after `merge_and_unload`."""
    from peft import PeftModel

    model, _, _ = saved(KINDS[name], tmp_path)
    model.save_pretrained(tmp_path)
    prompts = [list(range(3, 40)), [7, 5, 3, 2]]
    theirs = PeftModel.from_pretrained(untied(model), tmp_path / "adapter").merge_and_unload()
    want = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)[0]
        for prompt in prompts
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 22, "num_threads": 1, "skip_tokenizer_init": True}
    llm = LLM(str(tmp_path), dtype="float32", enable_lora=True, **options)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    base, adapted = (
        [list(output.outputs[0].token_ids) for output in llm.generate(inputs, params, lora_request=request)]
        for request in (None, LoRARequest("adapter", 1, str(tmp_path / "adapter")))
    )
    assert adapted == [tokens[len(prompt) :].tolist() for tokens, prompt in zip(want, prompts, strict=True)]
    assert adapted != base
