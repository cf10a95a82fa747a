"""Tensor types of GGUF files: elements and bytes of a block, and the types that run here.

Numbers and sizes: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and ggml's block structures.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """One storage type. A row of a tensor is a whole number of blocks."""

    name: str
    block_size: int  # elements of a block
    block_bytes: int


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}

# Types that are known but do not run here; errors name them.
OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}

FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # name -> dtype
