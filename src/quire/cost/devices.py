"""The limits of devices: bytes and operations per second, memory, links. Facts with sources; nothing is measured."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from quire.cost.collectives import Link
from quire.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating point operations per second that a device reaches at most."""

    read_bandwidth: float
    flops: float


# Multiplications and additions per core and cycle with the widest instructions that the kernels use, times a clock of 3
# GHz: bfloat16 dot products of AVX-512 (2 x 16 lanes x 2 x 2), float32 FMA of AVX2 (2 x 8 lanes x 2), a tile product of
# AMX (16 x 16 x 32 in 16 cycles), FMA and bfloat16 matrix products of NEON (2 x 4 lanes x 2, 2 x 16 x 2). The numbers
# are from Intel's, AMD's and ARM's optimization manuals. A start measures the real rates of the machine.
_FLOPS_PER_CORE = {
    "avx512_bf16": 384e9, "amx": 3072e9, "avx512_vnni": 192e9, "avx512": 192e9, "avx_vnni": 96e9, "avx2": 96e9,
    "neon": 48e9, "neon_dotprod": 48e9, "neon_i8mm": 192e9,
}  # fmt: skip
_LEAST_FLOPS_PER_CORE = 24e9  # FLOP/s of plain torch
# One core of a server's processor: all its cores share eight to twelve channels of DDR5.
_BANDWIDTH_PER_CORE = 10e9


def cpu_ceilings(isa: str, num_cores: int) -> Ceilings:
    """The ceilings of some cores.

    Args:
        isa: the instruction set that the CPU kernels chose, or `torch`.
    """
    return Ceilings(num_cores * _BANDWIDTH_PER_CORE, num_cores * _FLOPS_PER_CORE.get(isa, _LEAST_FLOPS_PER_CORE))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its vendor's data sheet. Operations per second are for dense matrices; 0: the GPU has no such operation.

    Attributes:
        name: the name for `--hardware`.
        cuda_name: the name that CUDA reports.
        memory_bytes: the number in CUDA's messages about a lack of memory. It is less than the data sheet's.
        read_bandwidth: bytes per second.
        bf16_flops: with sums in float32.
        capability: 90 is sm_90.
        link_bandwidth: bytes per second to the other GPUs of a machine, in one direction.
        aws: the family of Amazon's instances with this GPU; empty: none.
        source: the source of the numbers.
    """

    name: str
    cuda_name: str
    memory_bytes: int
    read_bandwidth: float
    bf16_flops: float
    fp8_flops: float
    int8_ops: float
    capability: int
    link_bandwidth: float
    aws: str
    source: str

    def ceilings(self, is_fp8: bool) -> Ceilings:
        """The ceilings for weights in FP8 or others. Integers become the model's dtype before a multiplication."""
        return Ceilings(self.read_bandwidth, self.fp8_flops if is_fp8 and self.fp8_flops else self.bf16_flops)


_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9  # bytes per second of 16 lanes, in one direction
_NVIDIA = "https://www.nvidia.com/en-us/"
_DATA_CENTER = _NVIDIA + "data-center/"
_AMPERE = "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-V2.1.pdf"
_BLACKWELL = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"


def _gpu(
    name: str,
    cuda_name: str,
    gib: float,
    gb_per_second: float,
    teraops: tuple[float, float, float],
    capability: int,
    link: float,
    source: str,
    aws: str = "",
) -> Gpu:
    """`teraops`: in bfloat16, FP8 and int8."""
    bf16, fp8, int8 = (1e12 * rate for rate in teraops)
    return Gpu(name, cuda_name, int(gib * GIB), 1e9 * gb_per_second, bf16, fp8, int8, capability, link, aws, source)


# Some data sheets give only rates with sparsity: these are halved.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", "Tesla T4", 14.75, 320, (0, 0, 130), 75, _PCIE3, _DATA_CENTER + "tesla-t4/", "g4dn"),
        _gpu("v100", "Tesla V100-SXM2-32GB", 31.74, 900, (0, 0, 0), 70, 150e9, _DATA_CENTER + "v100/", "p3dn"),
        _gpu("a10", "NVIDIA A10", 22.06, 600, (125, 0, 250), 86, _PCIE4, _DATA_CENTER + "products/a10-gpu/"),
        _gpu(
            "a10g", "NVIDIA A10G", 22.06, 600, (70, 0, 140), 86, _PCIE4,
            "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf", "g5",
        ),
        _gpu("l4", "NVIDIA L4", 22.03, 300, (121, 242.5, 242.5), 89, _PCIE4, _DATA_CENTER + "l4/", "g6"),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 23.69, 936, (71, 0, 284), 86, _PCIE4, _AMPERE),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 23.64, 1008, (165.2, 330.3, 660.6), 89, _PCIE4, _ADA),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 31.36, 1792, (209.5, 419, 838), 120, _PCIE5, _BLACKWELL),
        _gpu("a100-40", "NVIDIA A100-SXM4-40GB", 39.39, 1555, (312, 0, 624), 80, 300e9, _DATA_CENTER + "a100/", "p4d"),
        _gpu("l40s", "NVIDIA L40S", 44.39, 864, (362, 733, 733), 89, _PCIE4, _DATA_CENTER + "l40s/", "g6e"),
        _gpu("a6000", "NVIDIA RTX A6000", 47.53, 768, (154.8, 0, 309.7), 86, _PCIE4, _AMPERE),
        _gpu("rtx6000-ada", "NVIDIA RTX 6000 Ada Generation", 44.43, 960, (364.2, 728.5, 728.5), 89, _PCIE4, _ADA),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 79.11, 2000, (756, 1513, 1513), 90, _PCIE5, _DATA_CENTER + "h100/"),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 79.11, 3350, (989, 1979, 1979), 90, 450e9, _DATA_CENTER + "h100/", "p5"),
        _gpu("a100-80", "NVIDIA A100-SXM4-80GB", 79.15, 2039, (312, 0, 624), 80, 300e9, _DATA_CENTER + "a100/", "p4de"),
        _gpu("h100-nvl", "NVIDIA H100 NVL", 93.0, 3900, (835, 1671, 1671), 90, 300e9, _DATA_CENTER + "h100/"),
        _gpu(
            "rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.97, 1792, (503.8, 1007.6, 1007.6),
            120, _PCIE5, _NVIDIA + "products/workstations/professional-desktop-gpus/rtx-pro-6000/",
        ),
        _gpu("h200", "NVIDIA H200", 139.72, 4800, (989, 1979, 1979), 90, 450e9, _DATA_CENTER + "h200/", "p5en"),
        _gpu("b200", "NVIDIA B200", 178.35, 7700, (2250, 4500, 4500), 100, 900e9, _DATA_CENTER + "hgx/", "p6-b200"),
    )
}  # fmt: skip
# Hardware of common guides that this version does not run on, and why.
NOT_RUN_ON = {
    "mi300": "it is a GPU of AMD, and the kernels are built for CUDA",
    "mi300x": "it is a GPU of AMD, and the kernels are built for CUDA",
    "mi325x": "it is a GPU of AMD, and the kernels are built for CUDA",
    "trn2": "it is an accelerator of Amazon's, and the kernels are built for CUDA",
    "gaudi3": "it is an accelerator of Intel's, and the kernels are built for CUDA",
}
_SHORT_NAMES = {
    "a100": "a100-80", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090", "h10080": "h100", "h100sxm": "h100",
    "p5e": "h200",
}  # fmt: skip


def runnable_names() -> list[str]:
    """Names of the GPUs in the table that kernels run on. They have bfloat16 in tensor cores."""
    return [gpu.name for gpu in GPUS.values() if gpu.bf16_flops]


def gpu_named(cuda_name: str) -> Gpu | None:
    """The GPU of the table with this CUDA name."""
    return next((gpu for gpu in GPUS.values() if gpu.cuda_name == cuda_name), None)


def cuda_ceilings(cuda_name: str, is_fp8: bool) -> Ceilings:
    """The ceilings of a GPU by its CUDA name. A GPU that the table lacks counts as the slowest that Quire runs on."""
    slowest = min((gpu for gpu in GPUS.values() if gpu.bf16_flops), key=lambda gpu: gpu.read_bandwidth)
    return (gpu_named(cuda_name) or slowest).ceilings(is_fp8)


# Links that are assumed where nothing was measured. Two ranks of one machine with two cores join 4 KiB in 0.6 us
# (benchmarks/results/epyc-zen5-2core/ranks_exchange_2026-11-29.md). A byte is copied once. Between machines: 10 Gbit/s,
# and the time of a small exchange over TCP on one machine, in the same result, with 10 us of the network.
SHARED_MEMORY = Link(1e-6, 1 / _BANDWIDTH_PER_CORE)
NETWORK = Link(30e-6, 1 / 1.25e9)
# Launches and waits of an exchange of GPUs take this time even if little is sent: assumed.
GPU_EXCHANGE_SECONDS = 20e-6
# Bytes per second from one GPU to the next where nothing is known: 16 lanes of PCIe 4.
DEFAULT_LINK_BANDWIDTH = _PCIE4


def gpu_link(cuda_name: str) -> Link:
    """The link between GPUs of one machine, by their CUDA name."""
    gpu = gpu_named(cuda_name)
    return Link(GPU_EXCHANGE_SECONDS, 1 / (DEFAULT_LINK_BANDWIDTH if gpu is None else gpu.link_bandwidth))


def find_gpu(wanted: str) -> Gpu:
    """A GPU by its name, by a usual spelling of it, or by a family of Amazon's instances.

    Raises ConfigError, with the nearest name, if the table lacks it or Quire does not run on it.
    """
    known = {_plain(name): gpu for name, gpu in GPUS.items()}
    known |= {_plain(gpu.aws): gpu for gpu in GPUS.values() if gpu.aws}
    known |= {_plain(gpu.cuda_name): gpu for gpu in GPUS.values()}
    known |= {short: GPUS[name] for short, name in _SHORT_NAMES.items()}
    plain = _plain(wanted)
    if plain in NOT_RUN_ON:
        raise ConfigError(
            f"Quire does not run on {wanted} in this version: {NOT_RUN_ON[plain]}",
            expected="one of " + ", ".join(runnable_names()),
            param="hardware",
        )
    if plain not in known:
        near = difflib.get_close_matches(plain, known, 1)
        raise ConfigError(
            "Unknown hardware",
            value=wanted,
            expected="one of " + ", ".join(runnable_names()),
            fix=f"Did you mean {known[near[0]].name!r}?"
            if near
            else "Describe it: --memory 48GiB --bandwidth 864GB --flops 362T --device cuda",
            param="hardware",
        )
    return known[plain]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "").removesuffix("gb")
