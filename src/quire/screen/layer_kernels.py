"""The kernel of each kind of linear layer and the reason for it, for `quire explain`. No torch.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from quire.formats.stored_linear import StoredLinear
from quire.formats.weight_format import Fp8Format, WeightFormat, packs_floats
from quire.model_config import ModelConfig

# Products of 8-bit integers by instruction set; products of bfloat16 and FP8 below.
_INTEGER_KERNELS = {
    "amx": "AMX tiles for batches, VNNI dot products for few rows",
    "avx512_bf16": "VNNI dot products",
    "avx512_vnni": "VNNI dot products",
    "avx_vnni": "VNNI dot products of 256 bits",
    "avx512": "16-bit multiply-adds",
    "avx2": "16-bit multiply-adds",
    "neon_i8mm": "8-bit matrix products",
    "neon_dotprod": "8-bit dot products",
    "neon": "16-bit multiply-adds",
    "scalar": "one product at a time",
}
# AMX takes groups up to kAmxSmallGroup of csrc/include/quire/kernels/gemm.h, and larger groups of whole tile rows.
_AMX_SMALL_GROUP, _TILE_ROW = 512, 64
_BFLOAT16_KERNELS = {
    "amx": "AMX tiles, or bfloat16 dot products",
    "avx512_bf16": "bfloat16 dot products",
    "neon_i8mm": "bfloat16 matrix products",
}
_FP8_KERNELS = _BFLOAT16_KERNELS | {"amx": "AMX tiles"}
_FLOAT_KERNEL = "float32 multiply-adds"


@dataclass(frozen=True)
class LayerKernel:
    """Layers with one name and one stored form.

    Args:
        names: the names of their tensors' modules; several are fused.
        count: the number of layers.
        num_bytes: the bytes of one weight, with all its experts.
        weight: its form in memory.
        kernel: the kernel that multiplies by it.
        why: the source of the form.
        kernel_why: the reason for this kernel instead of a faster one.
        num_experts: the number of experts in one weight; 0: it is an ordinary layer. Sizes describe one expert.
    """

    names: tuple[str, ...]
    count: int
    out_features: int
    in_features: int
    num_bytes: int
    weight: str
    kernel: str
    why: str
    kernel_why: str
    num_experts: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The object for JSON."""
        return asdict(self)


def layer_kernels(
    model: ModelConfig, dtype: str, quantization: str | None, isa: str, is_deterministic: bool = False
) -> list[LayerKernel]:
    """All linear layers of a model; equal ones are counted together. `isa`: the name that DeviceFacts has."""
    if not model.is_native:
        return []
    counts: Counter[LayerKernel] = Counter()
    for stored in model.stored_linears(quantization):
        shape = stored.shape
        kernel, kernel_why = _kernel(stored, dtype, isa, is_deterministic)
        if shape.num_experts:
            kernel = f"grouped by expert: {kernel}"
        counts[
            LayerKernel(
                names=tuple(name for name, _ in shape.shards),
                count=0,
                out_features=shape.out_features,
                in_features=shape.in_features,
                num_bytes=stored.num_bytes(dtype, is_packed=packs_floats(isa)),
                weight=dtype if stored.held is None else _held(stored.held),
                kernel=kernel,
                why=stored.reason,
                kernel_why=kernel_why,
                num_experts=shape.num_experts,
            )
        ] += 1
    return [LayerKernel(**(asdict(kind) | {"count": count})) for kind, count in counts.items()]


def _held(held: WeightFormat) -> str:
    shared = "output channel" if held.group_size is None else f"group of {held.group_size}"
    if isinstance(held, Fp8Format):
        return f"FP8 codes (e4m3), a float32 scale per {shared}"
    if held.scales == "e8m0":
        return f"4-bit floats (e2m1), a power of two per {shared} (MXFP4)"
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


def _kernel(stored: StoredLinear, dtype: str, isa: str, is_deterministic: bool) -> tuple[str, str]:
    """The kernel and the reason for it."""
    if isa == "torch":
        return "plain torch", "the compiled kernels do not run here"
    if isa.startswith("sm_"):
        return _gpu_kernel(stored.held, dtype, is_deterministic)
    if isinstance(stored.held, Fp8Format):
        kernel, why = _float_kernel(_FP8_KERNELS, dtype, isa)
        return f"codes to bfloat16 block by block, {kernel}", f"CPUs multiply no FP8; {why}"
    if stored.held is None:
        return _float_kernel(_BFLOAT16_KERNELS, dtype, isa)
    group_size, why = stored.held.group_size_of(stored.shape.in_features), f"integer codes, on {isa}"
    if isa == "amx" and group_size > _AMX_SMALL_GROUP and group_size % _TILE_ROW:
        isa, why = "avx512_bf16", f"a group of {group_size} does not fill AMX's tile rows of {_TILE_ROW}"
    return f"rows of the input in 8 bits, {_INTEGER_KERNELS[isa]}", why


def _float_kernel(kernels: dict[str, str], dtype: str, isa: str) -> tuple[str, str]:
    """The kernel of a floating-point product and the reason for it. `kernels`: the kernels for bfloat16."""
    if dtype != "bfloat16":
        return _FLOAT_KERNEL, f"the model computes in {dtype}"
    if isa not in kernels:
        return _FLOAT_KERNEL, f"{isa} has no products of bfloat16"
    return kernels[isa], f"bfloat16, on {isa}"


def _gpu_kernel(held: WeightFormat | None, dtype: str, is_deterministic: bool) -> tuple[str, str]:
    if held is not None:
        kernel = f"Triton: codes to {dtype}, tensor cores{'' if is_deterministic else _scaled(held)}"
        return kernel, f"cuBLAS multiplies no codes with {dtype}"
    if is_deterministic:
        return "Triton: tensor cores", "--deterministic: cuBLAS's sums follow the number of rows"
    return "cuBLAS", f"{dtype}, on a GPU"
