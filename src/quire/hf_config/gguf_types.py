"""How a GGUF file stores the weights of a model: a type for each tensor. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.gguf.file import GgufFile
from quire.gguf.names import hf_name, is_weight
from quire.gguf.types import TensorType


@dataclass(frozen=True)
class GgufWeights:
    """Types by Hugging Face's names of modules, and how many weights there are of each type."""

    types: Mapping[str, TensorType] = field(hash=False)
    counts: Mapping[str, int] = field(hash=False)
    method: str = "gguf"

    def type_of(self, name: str) -> TensorType | None:
        """The type of the weight of `model.layers.0.mlp.down_proj`, ...; None: the file has none."""
        return self.types.get(name)

    def describe(self) -> str:
        """`Q4_K 83 %, Q6_K 17 % of the weights`: for people, as file names promise less than that."""
        total = sum(self.counts.values())
        ordered = sorted(self.counts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {count / total:.0%}" for name, count in ordered) + " of the weights"


def gguf_weights(file: GgufFile) -> GgufWeights:
    """What the header says."""
    types, counts = {}, Counter[str]()
    for info in file.tensors.values():
        name = hf_name(info.name, file.metadata["general.architecture"])
        if is_weight(info.name) and name.endswith(".weight") and len(info.shape) == 2:
            types[name.removesuffix(".weight")] = info.type
            counts[info.type.name] += math.prod(info.shape)
    return GgufWeights(types, counts)
