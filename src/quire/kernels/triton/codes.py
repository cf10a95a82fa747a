"""8-bit codes of numbers, bit by bit: float8 (e4m3, e5m2) and int8 with a scale per row. See kernels.kv_codes.

Triton's own float8 types exist only on sm_89 and later, and its interpreter rounds them differently from a GPU.
Conversions of integers are the same everywhere and take the same number of instructions. Codes are held as int8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NAMES: dict[torch.dtype, str] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}


@triton.jit
def decode(codes, CODES: tl.constexpr):
    """The exact numbers of codes: float32, or float16 for e5m2. Numbers of int8 codes are not scaled yet."""
    if CODES == "e4m3":
        # Sign and magnitude move to their places in float32. This gives the number * 2^-120, because the biases of the
        # exponents are 7 and 127.
        bits = (codes.to(tl.int32) << 20) & -0x78100000
        y = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        y = tl.where(tl.abs(y) > 448.0, float("nan"), y)
    elif CODES == "e5m2":
        y = (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        y = codes.to(tl.float32)
    return y


@triton.jit
def encode_e4m3(x):
    """The nearest codes (ties to even) of float32. Numbers above 448 get the largest code; infinities become NaN."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6, codes are multiples of 2^-9. float32 numbers at 2^14 have this distance, so an addition rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(tl.abs(x) < float("inf"), code, 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)


@triton.jit
def encode_e5m2(x):
    """The nearest codes (ties to even) of float32. Above 57,344 it is the largest code; infinities and NaN stay."""
    magnitude = tl.minimum(tl.abs(x), 57344.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21) - (112 << 2)
    # Below 2^-14, codes are multiples of 2^-16. float32 numbers at 2^7 have this distance.
    subnormal = (magnitude + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    code = tl.where(magnitude < 6.103515625e-05, subnormal, normal)
    code = tl.where(tl.abs(x) == float("inf"), 0x7C, code)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)


@triton.jit
def encode_int8(x):
    """The nearest codes of a float32 row, and its scale: the largest magnitude / 127; NaN if the row is not finite."""
    largest = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), axis=0)
    is_finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), axis=0) > 0
    is_used = is_finite & (largest >= 1e-30)  # otherwise 127 / largest could overflow
    inverse = tl.where(is_used, tl.math.div_rn(127.0, tl.where(is_used, largest, 1.0)), 0.0)
    # At 1.5 * 2^23, float32 rounds to whole numbers.
    rounded = (tl.where(is_finite, x, 0.0) * inverse + 12582912.0) - 12582912.0
    scale = tl.where(is_finite, tl.where(is_used, tl.math.div_rn(largest, 127.0), 0.0), float("nan"))
    return rounded.to(tl.int8), scale


@triton.jit
def store_row(codes_ptr, scale_ptr, y, columns, is_inside):
    """Store a float32 row as e4m3 codes with a scale: the largest magnitude / 448; NaN if the row is not finite."""
    largest = tl.max(tl.where(tl.abs(y) < float("inf"), tl.abs(y), 0.0), axis=0)
    is_finite = tl.min((tl.abs(y) < float("inf")).to(tl.int32), axis=0) > 0
    scale = tl.math.div_rn(largest, 448.0)
    # If the scale is zero, or rounds to zero, all codes are zero.
    scaled = tl.where(scale > 0, tl.math.div_rn(y, tl.where(scale > 0, scale, 1.0)), 0.0)
    tl.store(codes_ptr + columns, encode_e4m3(scaled), mask=is_inside)
    tl.store(scale_ptr, tl.where(is_finite, scale, float("nan")))
