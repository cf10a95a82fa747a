"""Random heads that draft for the demo model, in the forms of checkpoints, and their twin in plain PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

import quire.demo
from quire.loader.drafter import load_drafter_config
from quire.model_config import ModelConfig, load_model_config
from quire.models.decoder import Decoder
from quire.models.registry import CausalLM
from quire.speculative_config import SpeculativeConfig
from tests.engine.harness import demo_model, dtype_of, load_with
from tests.loading import load_model

TARGET = json.loads((quire.demo.path("target") / "config.json").read_text())
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 256, 4, 2, 64, 128, 4096
NUM_DRAFTED = 500
STREAMS = [0, 3, 6]  # before all layers, between two, and behind all
LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def _random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.2 * values if len(shape) == 1 else values * 2 / shape[-1] ** 0.5
    return found


def _block(prefix: str, width: int, inner: int = INNER) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": (inner, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (inner, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, inner),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle3_tensors(*, prefix: str = "midlayer.", is_whole: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Of a checkpoint. `is_whole`: embeddings of its own, and all tokens of the target; then there is no output."""
    shapes = _block(prefix, 2 * HIDDEN) | {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, len(STREAMS) * HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    if is_whole:
        return _random(shapes | {"embed_tokens.weight": (VOCAB, HIDDEN)}, seed)
    tensors = _random(shapes | {"lm_head.weight": (NUM_DRAFTED, HIDDEN)}, seed)
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:NUM_DRAFTED].sort().values
    tensors["d2t"] = chosen - torch.arange(NUM_DRAFTED)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


EAGLE3 = LAYER | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": NUM_DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": STREAMS, "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": VOCAB,
    "norm_before_residual": True,
    "target_hidden_size": HIDDEN,
    "eagle_aux_hidden_state_layer_ids": STREAMS,
    "transformer_layer_config": LAYER | {"model_type": "llama"},
}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_mimo(folder: Path, layer: Mapping[str, Tensor] | None = None) -> Path:
    """The demo model as a MiMo: biases of zero, and a layer for multi-token prediction; None: a random one."""
    tensors = safetensors.torch.load_file(quire.demo.path("target") / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for index in range(TARGET["num_hidden_layers"]):
        for name, width in widths.items():
            tensors[f"model.layers.{index}.self_attn.{name}_proj.bias"] = torch.zeros(width, dtype=torch.bfloat16)
    tensors |= layer or mtp_tensors()
    config = TARGET | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    }
    write(folder, config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(quire.demo.path("target") / name, folder)
    return folder


def write_mixture(folder: Path, num_experts: int = 5, noise: float = 0.02) -> Path:
    """The demo model as a Mixtral. Each expert is nearly the model's MLP, so drafters of the demo model fit it too."""
    tensors = safetensors.torch.load_file(quire.demo.path("target") / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def nearly(values: Tensor) -> Tensor:
        return values + noise * values.float().std() * torch.randn(values.shape, generator=generator).to(values.dtype)

    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for index in range(TARGET["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        experts = f"{layer}block_sparse_moe."
        parts = {name: tensors.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up", "down")}
        tensors[f"{experts}gate.weight"] = torch.randn((num_experts, HIDDEN), generator=generator).bfloat16()
        for expert in range(num_experts):
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                tensors[f"{experts}experts.{expert}.{theirs}.weight"] = nearly(parts[ours])
    config = TARGET | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "tie_word_embeddings": False,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    return write(folder, config, tensors)


MTP = "model.mtp_layers.0."


def mtp_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Of a layer for multi-token prediction; its MLP has the width of the model's."""
    shapes: dict[str, tuple[int, ...]] = _block(MTP, HIDDEN, TARGET["intermediate_size"])
    shapes[f"{MTP}input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    for name in ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"{MTP}{name}.weight"] = (HIDDEN,)
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        shapes[f"{MTP}self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
    return _random(shapes, seed)


def bigram_tensors(following: Mapping[int, int]) -> dict[str, Tensor]:
    """Of such a layer whose attention and MLP add nothing, and which knows the tokens that follow up to 256 others."""
    tensors, embeddings_VD = mtp_tensors(), embeddings()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{MTP}{name}.weight"].zero_()
    for name in ("token_layernorm", "final_layernorm"):
        tensors[f"{MTP}{name}.weight"].fill_(1)
    read_ND = norm(embeddings_VD[[*following]], torch.ones(()))
    wanted_ND = functional.normalize(embeddings_VD[[*following.values()]])
    of_token_DD = (torch.linalg.pinv(read_ND) @ wanted_ND).T
    tensors[f"{MTP}input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), of_token_DD], dim=1)
    return tensors


@dataclass(frozen=True)
class Pair:
    """A target of its own, which nothing else uses, and a head that drafts for it."""

    config: ModelConfig
    model: CausalLM
    draft: tuple[ModelConfig, CausalLM]


def load(folder: Path, method: str, target: Path | None = None, dtype: torch.dtype = torch.float32) -> Pair:
    """A head in a folder with its target, by default the demo model."""
    config = load_model_config(target or quire.demo.path("target"))
    model = load_model(config, dtype)
    speculation = SpeculativeConfig(method=method, model="x")  # type: ignore[arg-type]
    drafter = load_drafter_config(folder, speculation, config)
    return Pair(config, model, (drafter, load_model(drafter, dtype, target=model)))


def load_for(max_model_len: int, precision: str) -> tuple[ModelConfig, CausalLM]:
    """The bundled head, for the demo model as `demo_model` has it."""
    return _head("eagle3", quire.demo.path("eagle3"), *demo_model(precision, max_model_len, True), precision)


def load_mimo_for(max_model_len: int, precision: str, layer: Mapping[str, Tensor]) -> Pair:
    """The demo model as a MiMo with this layer, in the precisions of `demo_model`."""
    with TemporaryDirectory() as name:
        folder = write_mimo(Path(name), layer)
        config, model = load_with(folder, precision, max_model_len)
        return Pair(config, model, _head("mtp", folder, config, model, precision))


def _head(
    method: str, folder: Path, config: ModelConfig, target: CausalLM, precision: str
) -> tuple[ModelConfig, CausalLM]:
    speculation = SpeculativeConfig(method=method, model="x")  # type: ignore[arg-type]
    drafter = load_drafter_config(folder, speculation, config)
    assert isinstance(target, Decoder)
    return drafter, load_model(drafter, dtype_of(precision), target=target)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


class Twin:
    """The drafts of a head, in plain PyTorch: everything is computed anew for every token.

    Args:
        tensors: of its checkpoint.
        norm_before_residual: see EAGLE-3.
        layers: before which it reads the target.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        norm_before_residual: bool = False,
        layers: Sequence[int] = STREAMS,
        head_dim: int = HEAD_DIM,
    ) -> None:
        self._layers, self._head_dim = layers, head_dim
        self._tensors = {name.removeprefix("midlayer.").removeprefix("layers.0."): t for name, t in tensors.items()}
        self._is_mtp = any("mtp" in name for name in tensors)
        self._tensors = {name.removeprefix(MTP): tensor for name, tensor in self._tensors.items()}
        self._tensors = {name: t.float() if t.is_floating_point() else t for name, t in self._tensors.items()}
        self._norm_before_residual = norm_before_residual
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def drafts(self, token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The likeliest tokens behind these, one after the other. Schedules ask about the same tokens again."""
        if len(self._known.get(token_ids, ())) < count:
            self._known[token_ids] = self._drafts(token_ids, count)
        return self._known[token_ids][:count]

    def _drafts(self, token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        of = self._tensors
        layers = [TARGET["num_hidden_layers"]] if self._is_mtp else self._layers
        hidden_TD = torch.cat([streams(token_ids)[layer] for layer in layers], dim=-1)[:-1]
        hidden_TD = hidden_TD if self._is_mtp else hidden_TD @ of["fc.weight"].T
        tokens = list(token_ids)
        for _ in range(count):
            out_D, next_D = self._last(hidden_TD, torch.tensor(tokens[1:]))
            logits = self._logits(out_D)
            tokens.append(int(logits.argmax()))
            if "d2t" in of:
                tokens[-1] += int(of["d2t"][tokens[-1]])
            hidden_TD = torch.cat([hidden_TD, next_D[None]])
        return tuple(tokens[len(token_ids) :])

    def _logits(self, out_D: Tensor) -> Tensor:
        return out_D @ self._tensors.get("lm_head.weight", embeddings()).T

    def _last(self, hidden_TD: Tensor, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Of the last position: the normed state for the logits, and the hidden state for the next position."""
        of = self._tensors
        embedding_TD = of.get("embed_tokens.weight", embeddings())[token_ids_T]
        if self._is_mtp:
            embedding_TD = torch.cat([torch.zeros(1, HIDDEN), embedding_TD[1:]])
            both = norm(hidden_TD, of["hidden_layernorm.weight"]), norm(embedding_TD, of["token_layernorm.weight"])
            residual_TD = torch.cat(both, dim=-1) @ of["input_proj.weight"].T
            x_TD = norm(residual_TD, of["input_layernorm.weight"])
        else:
            normed_TD = norm(hidden_TD, of["hidden_norm.weight"])
            residual_TD = normed_TD if self._norm_before_residual else hidden_TD
            x_TD = torch.cat([norm(embedding_TD, of["input_layernorm.weight"]), normed_TD], dim=-1)
        residual_D = residual_TD[-1] + self._attention(x_TD)
        x_D = norm(residual_D, of["post_attention_layernorm.weight"])
        inner = functional.silu(of["mlp.gate_proj.weight"] @ x_D) * (of["mlp.up_proj.weight"] @ x_D)
        last_D = residual_D + of["mlp.down_proj.weight"] @ inner
        out_D = norm(last_D, of["final_layernorm.weight" if self._is_mtp else "norm.weight"])
        return out_D, out_D if self._is_mtp else last_D

    def _attention(self, x_TD: Tensor) -> Tensor:
        """Of the last position."""
        size = self._head_dim

        def heads(name: str) -> Tensor:
            y = x_TD @ self._tensors[f"self_attn.{name}_proj.weight"].T
            y = y + self._tensors.get(f"self_attn.{name}_proj.bias", torch.zeros(()))
            return y.view(len(x_TD), -1, size).transpose(0, 1)

        angles = torch.arange(len(x_TD))[:, None] / 10_000.0 ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos(), angles.sin()

        def rotated(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        q, k, v = rotated(heads("q"))[:, -1:], rotated(heads("k")), heads("v")
        k, v = (each.repeat_interleave(len(q) // len(k), dim=0) for each in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v)
        return self._tensors["self_attn.o_proj.weight"] @ out.flatten()


@cache
def embeddings() -> Tensor:
    """Of the demo model, float32 [vocabulary, hidden]; they are its output layer too."""
    with safe_open(quire.demo.path("target") / "model.safetensors", "pt") as file:
        return file.get_tensor("model.embed_tokens.weight").float()


@cache
def target() -> Any:
    """The demo model in transformers' code, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(quire.demo.path("target"), dtype=torch.float32).model.eval()


_streams: list[tuple[tuple[int, ...], list[Tensor]]] = []  # of sequences that were asked about


@torch.no_grad()
def streams(token_ids: tuple[int, ...]) -> list[Tensor]:
    """The residual streams before each layer, and behind the last one: of a longer sequence the first ones."""
    for known, of_known in _streams:
        if known[: len(token_ids)] == token_ids:
            return [stream_TD[: len(token_ids)] for stream_TD in of_known]
    model, found = target(), []
    hooks = [layer.register_forward_pre_hook(lambda _, args: found.append(args[0][0])) for layer in model.layers]
    hooks.append(model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0][0])))
    try:
        model(torch.tensor([token_ids]))
    finally:
        for hook in hooks:
            hook.remove()
    _streams.append((token_ids, found))
    return found
