"""Chooses the scheme of a linear layer."""

from __future__ import annotations

from quire.formats.stored_linear import StoredLinear, held_form
from quire.formats.weight_format import Fp8Format
from quire.gguf.types import TensorType
from quire.quantization.awq import AWQ
from quire.quantization.compressed_tensors import Int8, PackQuantized
from quire.quantization.fp8 import Fp8Checkpoint, Fp8OnLoad
from quire.quantization.gguf import GgufBlocks
from quire.quantization.gptq import GPTQ
from quire.quantization.grouped import GroupedCheckpoint, Layout, QuantizedOnLoad
from quire.quantization.mxfp4 import Mxfp4
from quire.quantization.scheme import QuantScheme
from quire.quantization.unquantized import Unquantized

_LAYOUTS: dict[str, Layout] = {"awq": AWQ(), "gptq": GPTQ(), "packed": PackQuantized(), "int8": Int8()}


def select_scheme(stored: StoredLinear) -> QuantScheme:
    """The scheme that loads the layer's tensors, holds its weight and multiplies by it."""
    held = stored.held
    if stored.source is None:
        if held is None:
            return Unquantized()
        return Fp8OnLoad() if isinstance(held, Fp8Format) else QuantizedOnLoad(held)
    if isinstance(stored.source, TensorType):
        return GgufBlocks(stored.source)
    held = held or held_form(stored.source, stored.shape.in_features)
    if isinstance(held, Fp8Format):
        return Fp8Checkpoint(stored.source, held)
    if stored.source.layout == "mxfp4":
        return Mxfp4()
    return GroupedCheckpoint(_LAYOUTS[stored.source.layout], stored.source, held)
