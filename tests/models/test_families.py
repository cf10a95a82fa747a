"""Every family against transformers on tiny random weights: float32 logits, chunked prefill, decodes, bfloat16.

The sizes are ones nobody would choose, windows are shorter than the sequences, and blocks are scattered over the cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from quire.families import FAMILIES
from quire.formats.weight_format import ON_LOAD, Fp8Format
from quire.hf_config.translate import OPTIONAL_FIELDS
from quire.kernels import cpu, gpu, reference
from quire.layer_spec.attention import Latent
from quire.model_config import ModelConfig, load_model_config
from quire.models.form import ModelForm
from quire.models.registry import CausalLM, build_model
from tests.covering import covering
from tests.examples import IS_FULL
from tests.models.paged_run import PagedRun
from tests.models.tiny_models import QUANTIZED_ACTIVATIONS_TOLERANCE, SIZES, hf_logits

# float32 logits of magnitude 1 to 10 through three layers; the sums run in another order than torch's.
TOLERANCE = 1e-4
# bfloat16 has 8 bits of mantissa; three layers of rounding at other places than transformers' leave about this much.
BF16_TOLERANCE = 0.15
# norms per head, windows with a cap on scores, layers without rotation, experts, latent rows: cases of the GPU kernels
INTERPRETED = ("qwen3", "gemma2", "smollm3", "qwen2_moe", "deepseek_v3-halves")
NUM_DECODE = 12 if IS_FULL else 5
NUM_SINGLE = 45 if IS_FULL else 29  # up to here tokens come one by one

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

DEEPSEEK_YARN = YARN | {"mscale": 0.8, "mscale_all_dim": 0.7}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 6,
    "kv_lora_rank": 21,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
    "first_k_dense_replace": 3,
}
DEEPSEEK_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}


@dataclass(frozen=True)
class Case:
    """A tiny model. `prompt_lens` are of two sequences that run together."""

    config_class: str
    settings: dict[str, Any]
    prompt_lens: tuple[int, int] = (37, 11)
    max_model_len: int | None = None  # None: the config's


CASES = {
    "llama": Case("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-biases": Case(
        "LlamaConfig",
        {
            "hidden_size": 96,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
        },
    ),
    "mistral": Case("MistralConfig", {"sliding_window": 9}),
    "mistral-no-window": Case("MistralConfig", {"sliding_window": None, "num_key_value_heads": 6}),
    "qwen2": Case("Qwen2Config", {"rope_parameters": YARN}),
    "qwen2-window": Case(
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Case("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": Case("Gemma2Config", {"sliding_window": 9, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0}),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": Case("Phi3Config", {"head_dim": 8, "sliding_window": 9, "num_key_value_heads": 3}),
    "phi3-longrope-short": Case(
        "Phi3Config",
        {"hidden_size": 96, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        max_model_len=64,
    ),
    "phi3-longrope-long": Case(
        "Phi3Config",
        {"hidden_size": 96, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        prompt_lens=(37, 34),
    ),
    "smollm3": Case("SmolLM3Config", {"no_rope_layer_interval": 2, "head_dim": 8}),
    "smollm3-window": Case(
        "SmolLM3Config",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": False,
            "head_dim": 8,
        },
    ),
    "olmo2": Case("Olmo2Config", {"head_dim": 8}),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 8,
        },
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2_moe": Case(
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": Case(
        "Qwen3MoeConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": Case("OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 3, "head_dim": 8, "clip_qkv": 0.6}),
    "granitemoe": Case(
        "GraniteMoeConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "head_dim": 8,
        },
    ),
    "phimoe": Case(
        "PhimoeConfig",
        {
            "num_local_experts": 5,
            "num_hidden_layers": 2,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 9,
            "head_dim": 12,
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 64}
            | {"short_mscale": 1.2, "long_mscale": 1.2},
        },
        max_model_len=64,
    ),
    "gpt_oss": Case(
        "GptOssConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama4_text": Case(
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "intermediate_size_mlp": 72,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 9,
            "floor_scale": 4,
            "attn_scale": 0.4,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "glm4_moe": Case(
        "Glm4MoeConfig",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "deepseek_v2": Case(
        "DeepseekV2Config",
        LATENT
        | DEEPSEEK_EXPERTS
        | {
            "kv_lora_rank": 22,
            "q_lora_rank": None,
            "rope_parameters": DEEPSEEK_YARN,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v2-greedy": Case("DeepseekV2Config", LATENT | DEEPSEEK_EXPERTS | {"kv_lora_rank": 22, "q_lora_rank": 27}),
    "deepseek_v3": Case("DeepseekV3Config", LATENT | DEEPSEEK_EXPERTS | {"q_lora_rank": 27, "attention_bias": True}),
    "deepseek_v3-halves": Case(
        "DeepseekV3Config", LATENT | {"q_lora_rank": None, "rope_interleave": False, "rms_norm_eps": 1e-3}
    ),
}


@dataclass(frozen=True)
class Expected:
    """transformers' answers: by sequence the tokens, decoded ones included, and logits of every position."""

    folder: Path
    tokens: list[list[int]]
    logits: list[Tensor]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """Builds a case once: a checkpoint folder written by transformers, and its answers."""
    return cache(lambda name: make_expected(CASES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def loaded(expected: Callable[[str], Expected]) -> Callable[[str, torch.dtype, str], CausalLM]:
    """Reads a case once for each dtype and path. The path has to be in place."""
    return cache(lambda name, dtype, path: load(CASES[name], expected(name).folder, dtype))


def random_hf_model(case: Case) -> Any:
    """Weights wide enough that logits differ by whole numbers: the defaults' 0.02 would hide almost any mistake."""
    torch.manual_seed(11)
    config = getattr(transformers, case.config_class)(**{**SIZES, **case.settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def make_expected(case: Case, folder: Path) -> Expected:
    model = random_hf_model(case)
    model.save_pretrained(folder)
    tokens, logits = [], []
    for length in case.prompt_lens:
        sequence = torch.randint(3, SIZES["vocab_size"], (length + NUM_DECODE,)).tolist()
        tokens.append(sequence)
        logits.append(hf_logits(model, sequence))
    assert logits[0].abs().max() > 0.5, "the logits are too small for the tolerance to mean anything"
    return Expected(folder, tokens, logits)


def load(
    case: Case,
    folder: Path,
    dtype: torch.dtype,
    quantization: str | None = None,
    rounded_to: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> CausalLM:
    """With weights as they are, as `quantization` holds them, or in float as `rounded_to` would hold them."""
    config = load_model_config(folder, overrides)
    if case.max_model_len is not None:
        config = dataclasses.replace(config, max_model_len=case.max_model_len)
    model = build_model(config, ModelForm(dtype, quantization))
    weights = given = load_file(folder / "model.safetensors")
    if rounded_to is not None:
        weights = {name: round_weight(name, weight, config, rounded_to) for name, weight in given.items()}
        assert any(not torch.equal(weights[name], given[name]) for name in given), "nothing was rounded"
    model.load_weights(weights.items())
    model.finalize()
    return model


def round_weight(name: str, weight_NK: Tensor, config: ModelConfig, quantization: str) -> Tensor:
    if weight_NK.dim() == 3 and name.endswith("_proj"):  # [num_experts, K, N]
        rounded = [round_weight(f"{name}.weight", weight_KN.T, config, quantization).T for weight_KN in weight_NK]
        return torch.stack(rounded)
    if weight_NK.dim() == 3:
        return torch.stack([round_weight(name, weight, config, quantization) for weight in weight_NK])
    is_output = name.endswith("embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight")
    names = ("proj.weight", "proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight", "put_linear.weight")
    if not is_output and (not name.endswith(names) or name.endswith("kv_b_proj.weight")):
        return weight_NK
    weight_format = ON_LOAD[quantization].output if is_output else ON_LOAD[quantization].linear
    if isinstance(weight_format, Fp8Format):
        return reference.dequantize_fp8(reference.quantize_fp8(weight_NK))
    size = weight_format.group_size_of(weight_NK.shape[1])
    return reference.dequantize_grouped(reference.quantize_grouped(weight_NK, weight_format.bits, size))


PATHS = ("reference", "cpu")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The plain-torch path (ops and attention), the compiled kernels or, where asked for, Triton's interpreter."""
    if request.param == "cpu" and not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton has wheels for Linux only")
        monkeypatch.setattr(gpu, "serves", lambda device: True)
    monkeypatch.setattr(cpu, "_available", request.param == "cpu")
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens(name, path, expected, loaded):
    check_logits_and_greedy_tokens(name, expected(name), loaded(name, torch.float32, path))


@pytest.mark.slow  # about half a minute each
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of the interpreter
@pytest.mark.parametrize("path", ["triton"], indirect=True)
@pytest.mark.parametrize("name", INTERPRETED)
def test_gpu_kernels_give_the_same_logits_and_tokens(name, path, expected, loaded):
    check_logits_and_greedy_tokens(name, expected(name), loaded(name, torch.float32, path))


def check_logits_and_greedy_tokens(name: str, want: Expected, model: CausalLM) -> None:
    """One sequence in chunks 1, 7, rest, the other whole beside its last chunk, then both decode together.

    After every token greedy search takes the same token as in transformers.
    """
    sequences = PagedRun(model, torch.float32)
    (first_len, second_len), (first, second) = CASES[name].prompt_lens, want.tokens
    steps = [{0: first[:1]}, {0: first[1:8]}, {0: first[8:first_len], 1: second[:second_len]}]
    logits: dict[int, list[Tensor]] = {0: [], 1: []}

    def run(chunks: dict[int, list[int]]) -> None:
        for s, part in sequences.step(chunks).items():
            logits[s].append(part)

    for chunks in steps:
        run(chunks)
    for index in range(NUM_DECODE):
        run({0: [first[first_len + index]], 1: [second[second_len + index]]})
    for s in (0, 1):
        found = torch.cat(logits[s])
        torch.testing.assert_close(found, want.logits[s], atol=TOLERANCE, rtol=0)
        assert torch.equal(found.argmax(1), want.logits[s].argmax(1)), "greedy tokens differ from transformers"


@pytest.mark.parametrize("name", CASES)
def test_whole_prompt_equals_chunks(name, path, expected, loaded):
    """Without any cache in between; transformers' logits again."""
    want = expected(name)
    sequences = PagedRun(loaded(name, torch.float32, path), torch.float32)
    torch.testing.assert_close(sequences.step({0: want.tokens[0]})[0], want.logits[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_same_bits_for_any_chunks_and_mates(name, dtype, expected, loaded):
    """Batch invariance of the whole model: a token's result does not depend on the other tokens of the step."""
    if not cpu.available():
        pytest.skip("the compiled kernels are not in use")
    model = loaded(name, dtype, "cpu")
    first, second = expected(name).tokens
    whole = PagedRun(model, dtype).step({0: first})[0]
    sequences = PagedRun(model, dtype)
    pieces = [sequences.step({0: first[:1]})[0]]
    pieces.append(sequences.step({1: second[:5], 0: first[1:8]})[0])
    pieces.append(sequences.step({0: first[8:25], 1: second[5:]})[0])
    pieces += [sequences.step({0: [token]})[0] for token in first[25:NUM_SINGLE]]
    pieces.append(sequences.step({0: first[NUM_SINGLE:]})[0])
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(
    ("name", "dtype", "path"),
    covering(
        ["llama", "qwen3", "gemma2", "phi3-longrope-long", "olmo2", "granite"], [torch.bfloat16, torch.float16], PATHS
    ),
    indirect=["path"],
)
def test_half_precision_stays_close(name, dtype, path, expected, loaded):
    want = expected(name)
    model = loaded(name, dtype, path)
    logits = PagedRun(model, dtype).step({0: want.tokens[0]})[0]
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    error = (logits - want.logits[0]).abs().mean() / want.logits[0].abs().mean()
    assert error < BF16_TOLERANCE, f"mean error is {error:.3f} of the mean logit"


# Every case in one format. The cases of a kind (dense layers, experts, latent rows) stand together, and have them all.
QUANTIZED = [
    pytest.param(
        *(name, quantization, path),
        marks=() if (format_at, path_at) == (case_at % 3, (case_at % 3 + case_at // 3) % 2) else pytest.mark.slow,
    )
    for case_at, name in enumerate(CASES)
    for format_at, quantization in enumerate(ON_LOAD)
    for path_at, path in enumerate(PATHS)
]


@pytest.mark.parametrize(("name", "quantization", "path"), QUANTIZED, indirect=["path"])
def test_quantized_logits_are_those_of_the_rounded_weights(name, quantization, path, expected):
    """The rest is the rounding of activations to 8 bits: well under the error of the weights themselves."""
    case, want = CASES[name], expected(name)
    chunks = {0: want.tokens[0][:20], 1: want.tokens[1][:9]}
    all_active = {}  # else rounded activations could choose other experts
    if experts := load_model_config(want.folder).experts():
        all_active = {"num_experts_per_tok": experts[0].num_experts, "topk_group": experts[0].router.num_groups}
        all_active |= {"router_jitter_noise": 1.0}  # all experts are near the best one
    models = [
        load(case, want.folder, torch.float32, *arguments, overrides=all_active)
        for arguments in [(quantization, None), (None, quantization)]
    ]
    runs = [PagedRun(model, torch.float32) for model in models]
    quantized, rounded = (torch.cat([*run.step(chunks).values()]) for run in runs)
    error = (quantized - rounded).norm() / rounded.norm()
    assert error < QUANTIZED_ACTIVATIONS_TOLERANCE


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        pytest.param(name, quantization, marks=() if (case_at + format_at) % 3 == 0 else pytest.mark.slow)
        for case_at, name in enumerate(CASES)
        for format_at, quantization in enumerate(ON_LOAD)
    ],
)
def test_quantized_bytes_are_those_of_the_config(name, quantization, expected):
    model = load(CASES[name], expected(name).folder, torch.bfloat16, quantization)
    if cpu.available():  # the twin holds 4-bit codes in bytes
        assert model.weight_bytes() == model.config.weight_bytes("bfloat16", quantization)


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_bytes_are_those_of_the_config(name, path, loaded):
    """What plan prints is what is allocated, to the byte."""
    model = loaded(name, torch.float32, path)
    shapes = model.expected_weights().values()
    assert sum(torch.Size(shape).numel() for shape in shapes) == model.config.num_parameters()
    assert model.weight_bytes() == model.config.weight_bytes("float32", is_packed=path != "reference")


def test_aligned_sizes_have_no_padding(tmp_path, path):
    """Sizes as real models have them (multiples of 64): packed weights take exactly the planned bytes."""
    raw = {
        **SIZES,
        "hidden_size": 128,
        "intermediate_size": 192,
        "vocab_size": 256,
        "num_attention_heads": 4,
        "head_dim": 64,
    }
    raw = {
        **raw,
        "num_key_value_heads": 2,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    model = build_model(config, ModelForm(torch.bfloat16))
    model.load_weights((name, torch.zeros(shape)) for name, shape in model.expected_weights().items())
    assert model.weight_bytes() == config.weight_bytes("bfloat16")


# Families that transformers has no code for: another family with layers that draft.
EXTENDED = {"mimo": "qwen2"}

# Fields that some families read, at values that would change their logits, for the families that do not read them.
FOREIGN: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "rope_local_base_freq": 77.0,
    "use_sliding_window": False,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 5,
    "attention_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 3.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_bias": True,
    "lm_head_bias": True,
    "short_mscale": 1.3,
    "long_mscale": 1.3,
}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - EXTENDED.keys()))
def test_fields_of_other_families_change_nothing(family, tmp_path, expected):
    """As in transformers, whose modelling code trained them: by the architecture, not by what stands in the file."""
    name = max((name for name in CASES if family.startswith(name)), key=len)
    want = expected(name)
    raw = json.loads((want.folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 1000.0}  # of the other types transformers fails with a partial factor
    both = {"full_attention": rope, "sliding_attention": rope}
    reads = FAMILIES[family].reads
    foreign = {field: value for field, value in FOREIGN.items() if field not in reads}
    assert set(FOREIGN) == set(OPTIONAL_FIELDS)
    raw |= {**foreign, "rope_parameters": both if "rope_local_base_freq" in reads else rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(want.folder / "model.safetensors")
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["unexpected_keys"]
    weights = load_file(want.folder / "model.safetensors")
    config = load_model_config(tmp_path)
    assert set(config.ignored_fields) == set(foreign)
    ours = build_model(config, ModelForm(torch.float32))
    ours.load_weights(weights.items())
    tokens = want.tokens[0]
    logits = PagedRun(ours, torch.float32).step({0: tokens})[0]
    torch.testing.assert_close(logits, hf_logits(theirs.eval(), tokens), atol=TOLERANCE, rtol=0)


def test_every_family_is_covered():
    covered = {getattr(transformers, case.config_class).model_type for case in CASES.values()}
    assert covered | EXTENDED.keys() == set(FAMILIES), "a family has no case here"


@pytest.mark.parametrize("family", EXTENDED)
def test_extended_families_compute_what_the_other_does(family, tmp_path, expected):
    """Layers that draft are not read with the model."""
    want = expected(EXTENDED[family])
    raw = json.loads((want.folder / "config.json").read_text())
    raw |= {"model_type": family, "architectures": list(FAMILIES[family].architectures)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = build_model(load_model_config(tmp_path), ModelForm(torch.float32))
    drafts = {"model.mtp_layers.0.input_proj.weight": torch.zeros(3)}
    model.load_weights((load_file(want.folder / "model.safetensors") | drafts).items())
    logits = PagedRun(model, torch.float32).step({0: want.tokens[0]})[0]
    torch.testing.assert_close(logits, want.logits[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
@pytest.mark.parametrize(("name", "architecture"), [("gemma3", "Gemma3"), ("llama4_text", "Llama4")])
def test_a_model_with_vision_tower_runs_its_text_part(name, architecture, prefixes, expected, tmp_path, path):
    """The nested config and both ways of naming; the tower's weights are left alone."""
    want = expected(name)
    inner = json.loads((want.folder / "config.json").read_text())
    raw = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": architecture.lower()}
    raw["text_config"] = inner
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = build_model(load_model_config(tmp_path), ModelForm(torch.float32))
    model_prefix, head_prefix = prefixes
    weights = {
        name.replace("model.", model_prefix, 1) if name.startswith("model.") else head_prefix + name: tensor
        for name, tensor in load_file(want.folder / "model.safetensors").items()
    }
    tower = "vision_tower.vision_model" if name == "gemma3" else "vision_model"
    weights[f"{tower}.embeddings.weight"] = torch.zeros(3)
    model.load_weights(weights.items())
    logits = PagedRun(model, torch.float32).step({0: want.tokens[0]})[0]
    torch.testing.assert_close(logits, want.logits[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("config_class", sorted({case.config_class for case in CASES.values()}))
def test_defaults_are_those_of_transformers(config_class, tmp_path):
    """A file with only sizes has the meaning that transformers' config class gives it."""
    hf_class = getattr(transformers, config_class)
    model_type = hf_class.model_type
    sizes = {
        "vocab_size": 131,
        "hidden_size": 128,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "first_k_dense_replace": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": model_type}))
    ours: ModelConfig = load_model_config(tmp_path)
    theirs = hf_class(**sizes)
    attention = ours.layers[0].attention
    if isinstance(attention, Latent):
        assert (attention.nope_dim, attention.value_dim) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
        assert (attention.rank, attention.rope_dim) == (theirs.kv_lora_rank, theirs.qk_rope_head_dim)
        assert attention.query is not None
        assert attention.query.in_features == theirs.q_lora_rank
    else:
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert (attention.num_kv_heads, attention.head_dim) == (theirs.num_key_value_heads, head_dim)
        assert attention.soft_cap == (getattr(theirs, "attn_logit_softcapping", None) or 0.0)
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None else (eos,))
    assert ours.logits_soft_cap == (getattr(theirs, "final_logit_softcapping", None) or 0.0)
    rope = theirs.rope_parameters
    if "full_attention" in rope:
        assert (ours.rope.theta, attention.rope.theta) == tuple(
            rope[k]["rope_theta"] for k in ("full_attention", "sliding_attention")
        )
    else:
        assert ours.rope.theta == rope["rope_theta"]
    layer_types = getattr(theirs, "layer_types", None)
    window = theirs.sliding_window if hasattr(theirs, "sliding_window") else None
    windows = [spec.window for spec in ours.kv_specs()]
    if layer_types is None:
        assert max(windows) == (window or 0)
    else:
        bounds = {"sliding_attention": window or 0, "chunked_attention": getattr(theirs, "attention_chunk_size", 0)}
        assert windows == [bounds.get(kind, 0) for kind in layer_types]
