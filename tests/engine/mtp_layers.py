"""Random models with a layer for multi-token prediction behind their last one, and transformers' answers of both."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.test_families import CASES, random_hf_model
from tests.models.tiny_models import SIZES

NUM_LAYERS: int = SIZES["num_hidden_layers"]
LAYER = f"model.layers.{NUM_LAYERS}."


class Twin:
    """The drafts of such a layer, by transformers' modules: everything is computed anew for every token.

    Args:
        whole: a model of transformers; its last layer drafts.
        own: the layer's further weights, by their names.
    """

    def __init__(self, whole: Any, own: dict[str, Tensor]) -> None:
        self._inner, self._embeddings, self._output = whole.model, whole.get_input_embeddings(), whole.lm_head
        self._layers, self._norm = list(whole.model.layers), whole.model.norm
        self._own = {name: tensor.float() for name, tensor in own.items()}
        self._last_norm = self._with_weight(own["shared_head.norm.weight"])

    def _with_weight(self, weight: Tensor) -> Any:
        norm = copy.deepcopy(self._norm)
        norm.weight.data.copy_(weight)
        return norm

    def _run(self, layers: list[Any], norm: Any, **given: Tensor) -> Tensor:
        """The result of these layers and this norm, [T, D]."""
        self._inner.layers, self._inner.norm = nn.ModuleList(layers), norm
        return self._inner(**given, use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def drafts(self, token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        """The likeliest tokens behind these, one after the other."""
        own, tokens = self._own, list(token_ids)
        hidden_TD = self._run(self._layers[:-1], self._norm, input_ids=torch.tensor([tokens]))[:-1]
        norms = self._with_weight(own["enorm.weight"]), self._with_weight(own["hnorm.weight"])
        for _ in range(count):
            embedding_TD = self._embeddings(torch.tensor(tokens[1:]))
            embedding_TD[0] = 0.0
            both_TX = torch.cat([norms[0](embedding_TD), norms[1](hidden_TD)], dim=-1)
            x_TD = both_TX @ own["eh_proj.weight"].T
            out_D = self._run(self._layers[-1:], self._last_norm, inputs_embeds=x_TD[None])[-1]
            tokens.append(int(self._output(out_D).argmax()))
            hidden_TD = torch.cat([hidden_TD, out_D[None]])
        return tuple(tokens[len(token_ids) :])


def write(family: str, folder: Path, vocab_size: int = 5000) -> Twin:
    """Write a checkpoint in the form of DeepSeek-V3's: the layer has a copy of the embeddings and of the output."""
    case, sizes = CASES[family], {"vocab_size": vocab_size, "num_hidden_layers": NUM_LAYERS + 1}
    whole = random_hf_model(replace(case, settings=case.settings | sizes))
    whole.save_pretrained(folder)
    generator, width = torch.Generator().manual_seed(7), whole.config.hidden_size
    own = {"eh_proj.weight": 0.2 * torch.randn((width, 2 * width), generator=generator)}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=generator)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {LAYER + name: tensor for name, tensor in own.items()}
    tensors[f"{LAYER}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{LAYER}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.endswith("layer_types")}
    kept |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(kept))
    return Twin(whole, own)
