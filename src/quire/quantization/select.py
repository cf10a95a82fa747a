"""Which scheme each part of a model gets."""

from __future__ import annotations

from dataclasses import dataclass

from quire.quantization.grouped import QuantizedOnLoad
from quire.quantization.scheme import QuantScheme
from quire.quantization.unquantized import Unquantized
from quire.weight_format import ON_LOAD


@dataclass(frozen=True)
class Schemes:
    """How the weights of a model are stored and applied."""

    linear: QuantScheme  # the layers
    output: QuantScheme  # the output projection, and embeddings tied to it


def select_schemes(quantization: str | None) -> Schemes:
    """The schemes for `--quantization`: a key of `weight_format.ON_LOAD`, or None for weights as they are."""
    if quantization is None:
        return Schemes(Unquantized(), Unquantized())
    on_load = ON_LOAD[quantization]
    return Schemes(QuantizedOnLoad(on_load.linear), QuantizedOnLoad(on_load.output))
