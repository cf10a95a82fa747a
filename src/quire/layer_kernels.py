"""Which kernel multiplies with the weights of each kind of layer, and why: for `quire explain`. No torch.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from quire.model_config import ModelConfig
from quire.stored_linear import StoredLinear
from quire.weight_format import Fp8Format, WeightFormat, packs_floats

# By instruction set: products of 8-bit integers, and of bfloat16.
_INTEGER_KERNELS = {
    "amx": "AMX tiles for batches, VNNI dot products for few rows",
    "avx512_bf16": "VNNI dot products",
    "avx512": "16-bit multiply-adds",
    "avx2": "16-bit multiply-adds",
    "scalar": "one product at a time",
}
# AMX takes groups up to kAmxSmallGroup of csrc/include/quire/kernels/gemm.h, and larger ones of whole tile rows
_AMX_SMALL_GROUP, _TILE_ROW = 512, 64
_BFLOAT16_KERNELS = {"amx": "AMX tiles, or bfloat16 dot products", "avx512_bf16": "bfloat16 dot products"}

_FP8_KERNELS = {"amx": "AMX tiles", "avx512_bf16": "bfloat16 dot products"}
_FLOAT_KERNEL = "float32 multiply-adds"


@dataclass(frozen=True)
class LayerKernel:
    """Layers of one name, stored in one way.

    Args:
        names: of their tensors' modules; several are fused.
        count: how many there are.
        num_bytes: of one weight.
        weight: how it is held.
        kernel: how it is multiplied with.
        why: where that comes from.
    """

    names: tuple[str, ...]
    count: int
    out_features: int
    in_features: int
    num_bytes: int
    weight: str
    kernel: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def layer_kernels(
    model: ModelConfig, dtype: str, quantization: str | None, isa: str, is_deterministic: bool = False
) -> list[LayerKernel]:
    """All linear layers of a model, those that are alike together. `isa` as in DeviceFacts."""
    if not model.is_native:
        return []
    counts: Counter[LayerKernel] = Counter()
    for stored in model.stored_linears(quantization):
        shape = stored.shape
        counts[
            LayerKernel(
                names=tuple(name for name, _ in shape.shards),
                count=0,
                out_features=shape.out_features,
                in_features=shape.in_features,
                num_bytes=stored.num_bytes(dtype, is_packed=packs_floats(isa)),
                weight=dtype if stored.held is None else _held(stored.held),
                kernel=_kernel(stored, dtype, isa, is_deterministic),
                why=stored.reason,
            )
        ] += 1
    return [LayerKernel(**(asdict(kind) | {"count": count})) for kind, count in counts.items()]


def _held(held: WeightFormat) -> str:
    shared = "output channel" if held.group_size is None else f"group of {held.group_size}"
    if isinstance(held, Fp8Format):
        return f"FP8 codes (e4m3), a float32 scale per {shared}"
    parts = [f"{held.bits}-bit codes", f"a {held.scales} scale per {shared}"]
    if held.offsets is not None:
        parts.append("zero points" if held.offsets == "uint8" else f"{held.offsets} minima")
    if held.is_ordered:
        parts.append("in-features by act-order")
    return ", ".join(parts)


def _scaled(held: WeightFormat) -> str:
    is_whole_row = isinstance(held, Fp8Format) and held.group_size is None
    return (
        "; from 257 rows torch._scaled_mm with rows of the input in FP8, where the GPU has it" if is_whole_row else ""
    )


def _kernel(stored: StoredLinear, dtype: str, isa: str, is_deterministic: bool) -> str:
    if isa == "torch":
        return "plain torch"
    if isa.startswith("sm_"):
        if stored.held is None:
            return "Triton: tensor cores" if is_deterministic else "cuBLAS"
        return f"Triton: codes to {dtype}, tensor cores{'' if is_deterministic else _scaled(stored.held)}"
    if isinstance(stored.held, Fp8Format):
        products = _FP8_KERNELS.get(isa, _FLOAT_KERNEL) if dtype == "bfloat16" else _FLOAT_KERNEL
        return f"codes to bfloat16 block by block, {products}"
    if stored.held is not None:
        group_size = stored.held.group_size_of(stored.shape.in_features)
        if isa == "amx" and group_size > _AMX_SMALL_GROUP and group_size % _TILE_ROW:
            isa = "avx512_bf16"
        return f"rows of the input in 8 bits, {_INTEGER_KERNELS[isa]}"
    if dtype == "bfloat16" and isa in _BFLOAT16_KERNELS:
        return _BFLOAT16_KERNELS[isa]
    return _FLOAT_KERNEL
