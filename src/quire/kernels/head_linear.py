"""Products of each head with a matrix of its own, for latent attention. The matrices are packed once.

CPU tensors use the compiled kernels. Other tensors use plain torch, which is cuBLAS on a GPU, or Triton if results must
be deterministic. The arithmetic is the same as in `dense.linear`, head by head.

Dimensions: T tokens, H heads, K in-features, N out-features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels import cpu, gpu, reference
from quire.kernels.dense import packs
from quire.kernels.guards import check_dtype, check_filled, check_last_stride, check_places, check_shape
from quire.kernels.weight_memory import WEIGHTS


@dataclass(frozen=True)
class PackedHeads:
    """Matrices in the form that `head_linear` reads.

    Attributes:
        data: if `is_packed`, the kernels' panel layout (uint8), one matrix after the other; else [H, N, K].
    """

    data: Tensor
    H: int
    N: int
    K: int
    dtype: torch.dtype
    is_packed: bool

    @cached_property
    def panels(self) -> cpu._C.PackedWeight:
        """The first matrix as the kernels take it: see cpu.gemm_heads."""
        return cpu.packed_weight(self.data, self.N, self.K)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pack_heads(weight_HNK: Tensor) -> PackedHeads:
    """Turn matrices of dtype float32, bfloat16 or float16 into the form that `head_linear` reads. It copies them."""
    check_filled("weight", weight_HNK, "HNK")
    check_dtype("weight", weight_HNK, *cpu.DTYPE_CODES)
    (H, N, K), dtype = weight_HNK.shape, weight_HNK.dtype
    if not packs(weight_HNK.device):
        return PackedHeads(weight_HNK.clone(memory_format=torch.contiguous_format), H, N, K, dtype, is_packed=False)
    num_bytes = cpu.gemm_packed_bytes(dtype, N, K)
    data = WEIGHTS(H * num_bytes)
    for weight_NK, to in zip(weight_HNK, torch.split(data, num_bytes), strict=True):
        cpu.gemm_pack(weight_NK.contiguous(), to)
    return PackedHeads(data, H, N, K, dtype, is_packed=True)


def head_linear(x_THK: Tensor, packed: PackedHeads, out_THN: Tensor | None = None) -> Tensor:
    """y[:, h] = x[:, h] @ weight[h].T, [T, H, N]. Sums are float32 and rounded once to x's dtype.

    x has the weights' dtype. x and `out` may be strided, but their last dimension is contiguous.

    Raises ValueError or TypeError if a shape, a stride, a device or a dtype does not fit.
    """
    check_filled("x", x_THK, "THK")
    T = x_THK.shape[0]
    check_shape("x", x_THK, T, packed.H, packed.K)
    check_dtype("x", x_THK, packed.dtype)
    if out_THN is None:
        out_THN = torch.empty((T, packed.H, packed.N), dtype=x_THK.dtype, device=x_THK.device)
    check_places(x=x_THK, weight=packed.data, out=out_THN)
    check_shape("out", out_THN, T, packed.H, packed.N)
    check_dtype("out", out_THN, x_THK.dtype)
    if packed.is_packed:
        check_last_stride(x=x_THK, out=out_THN)
        cpu.gemm_heads(x_THK, packed.panels, out_THN)
    elif not gpu.takes(x_THK):
        out_THN.copy_(reference.head_linear(x_THK, packed.data))
    elif gpu.is_deterministic():
        for h in range(packed.H):
            gpu.kernels().linear(x_THK[:, h], packed.data[h], None, out_THN[:, h])
    else:
        out_THN.copy_(torch.bmm(x_THK.transpose(0, 1), packed.data.mT).transpose(0, 1))
    return out_THN
