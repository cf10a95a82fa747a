"""Checkpoints of the size of real models that give the tokens of small ones: for times that depend on the text.

`inflate` writes the demo model, or its draft, with zeros and added weights that change nothing, and `inflate_head` does
the same with its EAGLE-3 head. `with_mtp` gives any model a layer for multi-token prediction. `copy_edit` writes a
model that follows one fixed order of its tokens, whatever stands before: a text in this order with some tokens replaced
is a text that the model copies with edits.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_SPECIAL_TOKENS = 3  # they have the first ids
WEIGHT_SCALE = 0.02  # the standard deviation of weights that do nothing


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama whose heads have 64 elements."""

    hidden: int
    num_layers: int
    intermediate: int
    num_kv_heads: int


TARGET, DRAFT = Shape(1024, 28, 6144, 8), Shape(512, 8, 3328, 4)  # 0.62 and 0.05 billion parameters
HEAD = Shape(1024, 1, 6144, 8)  # a layer of TARGET


class _Writer:
    """The tensors of one checkpoint, including tensors that do nothing."""

    def __init__(self, config: dict[str, Any], shape: Shape) -> None:
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        self.config = config | {
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.num_layers,
            "intermediate_size": shape.intermediate,
            "num_attention_heads": group * shape.num_kv_heads,
            "num_key_value_heads": shape.num_kv_heads,
        }
        self.shape = shape
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self._generator).mul_(WEIGHT_SCALE).to(torch.bfloat16)

    def add_layer(self, index: int) -> None:
        """Add a layer that adds zero. Half of its numbers are random, so that it cannot be read faster than others.

        The weights of products into the residual stream are zero, and so are the inputs of these products. So a format
        that scales a row of activations by its largest number gives the real activations the same scale as before.
        """
        hidden, inner, head_dim = self.shape.hidden, self.shape.intermediate, self.config["head_dim"]
        queries, keys = (self.config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
        zeros = torch.zeros(hidden, max(queries, inner), dtype=torch.bfloat16)
        ones = torch.ones(hidden, dtype=torch.bfloat16)
        layer = {
            "input_layernorm": ones,
            "self_attn.q_proj": self.random(queries, hidden),
            "self_attn.k_proj": self.random(keys, hidden),
            "self_attn.v_proj": zeros.T[:keys],
            "self_attn.o_proj": zeros[:, :queries],
            "post_attention_layernorm": ones,
            "mlp.gate_proj": zeros.T[:inner],
            "mlp.up_proj": self.random(inner, hidden),
            "mlp.down_proj": zeros[:, :inner],
        }
        for name, weight in layer.items():
            self.tensors[f"model.layers.{index}.{name}.weight"] = weight.clone(memory_format=torch.contiguous_format)


def inflate(source: Path, folder: Path, shape: Shape) -> None:
    """Write a checkpoint of this shape that gives the tokens of `source`, a Llama with tied embeddings.

    The residual stream gets zeros after its numbers. If it is four times as long, its root mean square is half as
    large. So the weights of norms are halved, and their epsilon is divided by four. Both operations are exact.

    Raises ValueError if a size of the shape is smaller than the source's, or if the hidden size does not grow by a
    power of 4.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    small = load_file(source / "model.safetensors")
    hidden, factor = config["hidden_size"], shape.hidden / config["hidden_size"]
    sizes = ("num_hidden_layers", "intermediate_size", "num_key_value_heads")
    wanted = (shape.num_layers, shape.intermediate, shape.num_kv_heads)
    if math.log(factor, 4) % 1 or any(config[name] > size for name, size in zip(sizes, wanted, strict=True)):
        raise ValueError(f"{source} cannot be brought to {shape}: it has {[config[name] for name in sizes]}, {hidden}")
    writer = _Writer(config | {"rms_norm_eps": config["rms_norm_eps"] / factor}, shape)
    for index in range(shape.num_layers):
        writer.add_layer(index)
    vocab_size = config["vocab_size"]
    writer.tensors["model.embed_tokens.weight"] = torch.zeros(vocab_size, shape.hidden, dtype=torch.bfloat16)
    writer.tensors["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    for name, weight in small.items():
        if weight.dim() == 1:
            writer.tensors[name][:hidden] = weight / math.sqrt(factor)
        else:
            rows, columns = weight.shape
            large = writer.tensors[name]
            large[:rows] = 0
            large[:rows, :columns] = weight
    save_checkpoint(folder, writer.tensors, writer.config, source)


def inflate_head(source: Path, folder: Path, shape: Shape) -> None:
    """Write an EAGLE-3 head of this shape that gives the drafts of `source`, for the inflated target of `source`.

    Its heads of attention keep their size. Norms and the epsilon change as in `inflate`. Weights that read several
    vectors side by side get zeros behind each of them.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    hidden, factor = config["hidden_size"], shape.hidden / config["hidden_size"]
    writer = _Writer(config | {"rms_norm_eps": config["rms_norm_eps"] / factor}, shape)
    queries, keys = (writer.config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    rows_of = {"q": queries, "k": keys, "v": keys, "gate": shape.intermediate, "up": shape.intermediate}
    columns_of = {"o": queries, "down": shape.intermediate}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.dim() == 1:
            large = torch.ones(shape.hidden, dtype=torch.bfloat16)
            large[:hidden] = weight / math.sqrt(factor)
        else:
            part = name.split(".")[-2].removesuffix("_proj")
            rows, columns = weight.shape
            width, kept = (columns_of[part], columns) if part in columns_of else (shape.hidden, hidden)
            num_read = columns // kept
            large = torch.zeros(rows_of.get(part, shape.hidden), num_read * width, dtype=torch.bfloat16)
            if part in ("q", "k", "up"):  # what is computed of them is multiplied by zeros
                large[rows:] = writer.random(len(large) - rows, num_read * width)
            for index in range(num_read):
                of_small = weight[:, index * kept : (index + 1) * kept]
                large[:rows, index * width : index * width + kept] = of_small
        writer.tensors[name] = large
    save_checkpoint(folder, writer.tensors, writer.config, source)


def copy_edit(folder: Path, shape: Shape, tokenizer: Path) -> None:
    """Write a model that answers each token with the next one of `token_order`.

    Embeddings are random, and therefore far from each other. In the output matrix, the row of a token is the embedding
    of the token before it.

    Args:
        tokenizer: the folder of a checkpoint. The model gets its tokenizer and its vocabulary.
    """
    config = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
    writer = _Writer(config | {"tie_word_embeddings": False}, shape)
    for index in range(shape.num_layers):
        writer.add_layer(index)
    embedding = writer.random(config["vocab_size"], shape.hidden)
    order = torch.tensor(token_order(config["vocab_size"]))
    output = torch.zeros_like(embedding)
    output[order.roll(-1)] = embedding[order]
    writer.tensors |= {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
    }
    save_checkpoint(folder, writer.tensors, writer.config, tokenizer)


def first_layers(source: Path, folder: Path, num_layers: int) -> None:
    """Write a checkpoint of the first layers of `source`, with its embedding, output and tokenizer."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kept = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) < num_layers:
                kept[name] = weight
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    save_checkpoint(folder, kept, config, source)


def with_mtp(source: Path, folder: Path) -> None:
    """Write a MiMo with the layers of `source`, and with a layer for multi-token prediction that drafts anything.

    It has the size of the first layer. Norms of single heads are left out, because a MiMo has none.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = {
        name: weight
        for path in sorted(source.glob("*.safetensors"))
        for name, weight in load_file(path).items()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    first, layer = "model.layers.0.", "model.mtp_layers.0."
    tensors |= {
        layer + name.removeprefix(first): weight.clone() for name, weight in tensors.items() if name.startswith(first)
    }
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace(".weight", ".bias")] = torch.zeros(len(tensors[name]), dtype=torch.bfloat16)
    hidden = config["hidden_size"]
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors[f"{layer}input_proj.weight"] = (
        torch.randn((hidden, 2 * hidden), generator=torch.Generator().manual_seed(0))
        .mul_(WEIGHT_SCALE)
        .to(torch.bfloat16)
    )
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    save_checkpoint(folder, tensors, config, source)


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], tokenizer: Path) -> None:
    """Write a checkpoint.

    Args:
        tokenizer: the folder of another checkpoint. All of its files except weights and config are copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer.iterdir():
        if ".safetensors" not in path.name:
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def token_order(vocab_size: int) -> list[int]:
    """The order in which the copy-edit model gives its tokens, again and again."""
    return random.Random(0).sample(range(NUM_SPECIAL_TOKENS, vocab_size), vocab_size - NUM_SPECIAL_TOKENS)


def edited_text(vocab_size: int, length: int, edits: float, draw: random.Random) -> tuple[list[int], list[int]]:
    """A prompt of `length` + 1 tokens, and the tokens that the copy-edit model answers.

    The prompt is a text with a share `edits` of its tokens replaced, and then a token from which the model begins to
    say the text.
    """
    order = token_order(vocab_size)
    begin = draw.randrange(len(order))
    text = [order[(begin + index) % len(order)] for index in range(length)]
    edited = [draw.choice(order) if draw.random() < edits else token for token in text]
    return [*edited, order[begin - 1]], text
