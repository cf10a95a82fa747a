"""The types of a model's weights in a GGUF file; each tensor has its own. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.gguf.file import GgufFile
from quire.gguf.names import hf_name, is_weight
from quire.gguf.types import TensorType
from quire.hf_config.family import Family, GgufForm


@dataclass(frozen=True)
class GgufWeights:
    """The types of modules by Hugging Face's names, and the number of weights of each type."""

    types: Mapping[str, TensorType] = field(hash=False)
    counts: Mapping[str, int] = field(hash=False)
    names: Mapping[str, str] = field(hash=False)  # file's name -> Hugging Face's, of all tensors that a model loads
    is_interleaved: bool  # heads rotate neighbouring dimensions
    method: str = "gguf"

    def type_of(self, name: str) -> TensorType | None:
        """The type of a module's weight, for example of `model.layers.0.mlp.down_proj`; None: the file has none."""
        return self.types.get(name)

    def describe(self) -> str:
        """`Q4_K 83 %, Q6_K 17 % of the weights`: text for people, more exact than the name of the file."""
        total = sum(self.counts.values())
        ordered = sorted(self.counts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {count / total:.0%}" for name, count in ordered) + " of the weights"


def gguf_weights(file: GgufFile, family: Family, form: GgufForm) -> GgufWeights:
    """The types that the header gives."""
    types, counts, own = {}, Counter[str](), family.gguf_names()
    names = {name: hf_name(name, own) for name in file.tensors if is_weight(name)}
    for tensor, name in names.items():
        info = file.tensors[tensor]
        if name.endswith(".weight") and len(info.shape) in (2, 3):  # 3: of all experts
            types[name.removesuffix(".weight")] = info.type
            counts[info.type.name] += math.prod(info.shape)
    return GgufWeights(types, counts, names, form.is_interleaved)
