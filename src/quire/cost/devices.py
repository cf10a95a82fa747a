"""What devices can do at most: bytes and operations per second, memory, links. Facts with sources, nothing measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating point operations per second that a device reaches at most."""

    read_bandwidth: float
    flops: float


# Multiplications and additions per core and cycle with the widest instructions that the kernels use, times a clock of
# 3 GHz: bfloat16 dot products of AVX-512 (2 x 16 lanes x 2 x 2), float32 FMA of AVX2 (2 x 8 lanes x 2), a tile product
# of AMX (16 x 16 x 32 in 16 cycles). Intel's and AMD's optimization manuals. A start measures what is reached.
_FLOPS_PER_CORE = {"avx512_bf16": 384e9, "amx": 3072e9, "avx512": 192e9, "avx2": 96e9}
_LEAST_FLOPS_PER_CORE = 24e9  # of plain torch
# Of a core of a server's processor that shares eight to twelve channels of DDR5 with the others.
_BANDWIDTH_PER_CORE = 10e9


def cpu_ceilings(isa: str, num_cores: int) -> Ceilings:
    """Of some cores.

    Args:
        isa: what the CPU kernels chose, or `torch`.
    """
    return Ceilings(num_cores * _BANDWIDTH_PER_CORE, num_cores * _FLOPS_PER_CORE.get(isa, _LEAST_FLOPS_PER_CORE))
