"""The bytes of a weight in each format. Planning and loading share this arithmetic.

Dimensions: N out-features, K in-features.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import ModelConfigError

PANEL_WIDTH = 64  # columns of a packed panel: kPanelWidth of csrc/include/quire/kernels/grouped_layout.h
ROW_UNIT = 64  # a row of codes in an AMX tile
K_UNIT = 32  # columns of a step in bfloat16 and FP8: kBf16KUnit of csrc/include/quire/kernels/gemm.h
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_GROUP_SIZE = 65_536  # a sum of more 8-bit products could overflow 32 bits
LORA_PANEL = 16  # columns of a packed B of an adapter: kLoraColumns of csrc/include/quire/kernels/lora.h
MAX_SUPER_ELEMENTS = 256  # in a super-group: kMaxSuperElements of csrc/include/quire/kernels/grouped_layout.h

_NUMBER_BYTES = {None: 0, "float32": 4, "float16": 2, "int8": 1, "uint8": 1, "e8m0": 1}


def plane_bits(bits: int) -> tuple[int, int]:
    """Low and high bits of a code. Each part has its own plane: struct CodePlanes of grouped_layout.h."""
    low_bits = 8 if bits == 8 else 4 if bits >= 4 else 2
    return low_bits, bits - low_bits


def packs_floats(isa: str) -> bool:
    """Whether weights in floating point, with FP8, are packed: only compiled CPU kernels do this."""
    return isa != "torch" and not isa.startswith("sm_")


def float_bytes(N: int, K: int, dtype: str, *, is_packed: bool) -> int:
    """Bytes of a weight [N, K] in `dtype`, a key of DTYPE_BYTES, in panels of the compiled kernels or unpacked."""
    if is_packed:
        N = -(-N // PANEL_WIDTH) * PANEL_WIDTH
        K = -(-K // K_UNIT) * K_UNIT if dtype == "bfloat16" else K
    return N * K * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class GroupedFormat:
    """Codes with numbers per group of elements along K: see kernels/grouped_weight.py.

    Args:
        bits: the bits of a code: 2 to 6 or 8.
        group_size: elements that share a scale; None: the whole row.
        scales: the type of a stored scale: "float32", "float16", "int8" (a factor of a super-group's float16), or
            "e8m0" (a power of two; the codes are floating-point numbers in e2m1: MXFP4).
        offsets: "uint8": zeros; "float32" or "float16": minima; "int8": minima as factors, with "int8" scales; None.
        super_size: groups per super-group.
        is_ordered: the weight keeps the order of its columns (act-order), as int32.
    """

    bits: int
    group_size: int | None
    scales: str = "float32"
    offsets: str | None = None
    super_size: int = 1
    is_ordered: bool = False

    def group_size_of(self, K: int) -> int:
        """Elements per group of a weight with K in-features.

        Raises ModelConfigError for rows that are too long for one scale.
        """
        if self.group_size is None and K > MAX_GROUP_SIZE:
            raise ModelConfigError(
                "A layer has more in-features than one scale of integer weights can serve",
                value=K,
                expected=f"at most {MAX_GROUP_SIZE:,}",
                fix="Use weights with groups along the in-features, as of --quantization int4, or --quantization fp8",
            )
        return self.group_size or -(-K // ROW_UNIT) * ROW_UNIT

    def num_bytes(self, N: int, K: int) -> int:
        """Bytes of a packed weight [N, K], with padding and the numbers of groups."""
        group_size = self.group_size_of(K)
        num_groups = -(-K // group_size)
        num_supers = -(-num_groups // self.super_size)
        num_rows = -(-N // PANEL_WIDTH) * PANEL_WIDTH
        group_bytes = _NUMBER_BYTES[self.scales] + _NUMBER_BYTES[self.offsets]
        super_bytes = 2 * ((self.scales == "int8") + (self.offsets == "int8"))
        code_bytes = self.padded(K) * self.bits // 8
        return num_rows * (num_groups * group_bytes + num_supers * super_bytes + code_bytes) + 4 * K * self.is_ordered

    def padded(self, K: int) -> int:
        """K rounded up to the in-features that are packed: whole groups, and whole bytes in every plane."""
        group_size, (low_bits, high_bits) = self.group_size_of(K), plane_bits(self.bits)
        unit = 4 * (8 // (high_bits or low_bits))  # quads of 4 that share their last bytes
        return -(-(-(-K // group_size) * group_size) // unit) * unit


# Blocks of 32 numbers of 4 bits with a power of two: OCP Microscaling Formats 1.0, as in gpt-oss.
MXFP4 = GroupedFormat(4, 32, "e8m0")

# The forms in memory of GGUF's quantized types. Codes keep the bits of the file.
GGUF: dict[str, GroupedFormat] = {
    "Q4_0": GroupedFormat(4, 32, "float16"),
    "Q4_1": GroupedFormat(4, 32, "float16", "float16"),
    "Q5_0": GroupedFormat(5, 32, "float16"),
    "Q5_1": GroupedFormat(5, 32, "float16", "float16"),
    "Q8_0": GroupedFormat(8, 32, "float16"),
    "Q2_K": GroupedFormat(2, 16, "int8", "int8", 16),
    "Q3_K": GroupedFormat(3, 16, "int8", None, 16),
    "Q4_K": GroupedFormat(4, 32, "int8", "int8", 8),
    "Q5_K": GroupedFormat(5, 32, "int8", "int8", 8),
    "Q6_K": GroupedFormat(6, 16, "int8", None, 16),
    "MXFP4": MXFP4,
}


@dataclass(frozen=True)
class Fp8Format:
    """Codes in FP8 (e4m3) with float32 scales: see kernels/fp8_weight.py.

    Args:
        group_size: elements along K that share a scale; None: the whole row.
    """

    group_size: int | None

    def group_size_of(self, K: int) -> int:
        """Elements per group of a weight with K in-features."""
        return self.group_size or -(-K // K_UNIT) * K_UNIT

    def num_bytes(self, N: int, K: int, *, is_packed: bool = True) -> int:
        """Bytes of a weight [N, K] with its scales. `is_packed`: the compiled kernels pack and pad it."""
        num_groups = -(-K // self.group_size_of(K))
        if is_packed:
            N, K = -(-N // PANEL_WIDTH) * PANEL_WIDTH, -(-K // K_UNIT) * K_UNIT
        return N * (_NUMBER_BYTES["float32"] * num_groups + K)


WeightFormat = GroupedFormat | Fp8Format


@dataclass(frozen=True)
class OnLoadFormat:
    """The form that `--quantization` gives to a floating-point checkpoint while it loads."""

    linear: WeightFormat  # the format of the layers
    output: WeightFormat  # the format of the output projection and of tied embeddings
    description: str


ON_LOAD: dict[str, OnLoadFormat] = {
    "int8": OnLoadFormat(GroupedFormat(8, None), GroupedFormat(8, None), "8-bit weights, a scale per output channel"),
    "int4": OnLoadFormat(
        GroupedFormat(4, 128),
        GroupedFormat(8, None),
        "4-bit weights in groups of 128; the output projection in 8 bits, as it costs the most quality",
    ),
    "fp8": OnLoadFormat(Fp8Format(None), Fp8Format(None), "FP8 weights (e4m3), a scale per output channel"),
}
