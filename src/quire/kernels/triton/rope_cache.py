"""Norm of single heads, rotary embedding and the write to the paged KV cache, in one kernel.

Dimensions: T tokens, H query heads, G kv heads, E head dim, B cache blocks, P block size, R rotary dims, L positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels.guards import check_strides
from quire.kernels.layer_rules import HeadRotation
from quire.kernels.triton import codes
from quire.kernels.triton.launch import next_power_of_2, strides


@triton.jit
def _normed_and_rotated(
    x_ptr,
    weight_ptr,
    cos_sin_ptr,
    position,
    eps,
    weight_offset,
    E: tl.constexpr,
    R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One head after norm and rotation, float32 [BLOCK_E]. Halves of the first R dimensions form pairs."""
    e = tl.arange(0, BLOCK_E)
    is_inside = e < E
    x = tl.load(x_ptr + e, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=0) / E + eps)
        weight = tl.load(weight_ptr + e, mask=is_inside, other=0.0).to(tl.float32) + weight_offset
        x = x * inverse * weight
    if R > 0:
        HALF: tl.constexpr = R // 2
        is_rotated = e < R
        is_first = e < HALF
        partner = tl.where(is_first, e + HALF, e - HALF)
        y = tl.load(x_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_NORM:
            partner_weight = tl.load(weight_ptr + partner, mask=is_rotated, other=0.0).to(tl.float32) + weight_offset
            y = y * inverse * partner_weight
        angle = tl.where(is_first, e, e - HALF)
        cos = tl.load(cos_sin_ptr + position * R + angle, mask=is_rotated, other=1.0)
        sin = tl.load(cos_sin_ptr + position * R + HALF + angle, mask=is_rotated, other=0.0)
        x = x * cos + tl.where(is_first, -y, y) * sin
    return x


@triton.jit
def _store(cache_ptr, scales_ptr, x, at, scale_at, E: tl.constexpr, BLOCK_E: tl.constexpr, CODES: tl.constexpr):
    """Write one float32 row to the cache."""
    e = tl.arange(0, BLOCK_E)
    if CODES == "none":
        y = x.to(cache_ptr.dtype.element_ty)
    elif CODES == "e4m3":
        y = codes.encode_e4m3(x)
    elif CODES == "e5m2":
        y = codes.encode_e5m2(x)
    else:
        y, scale = codes.encode_int8(x)
        tl.store(scales_ptr + scale_at, scale)
    tl.store(cache_ptr + at + e, y, mask=e < E)


@triton.jit
def _rope_and_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_scales_ptr,
    v_scales_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_g,
    v_stride_t,
    v_stride_g,
    cache_stride_b,
    cache_stride_g,
    scales_stride_b,
    eps,
    weight_offset,
    temperature,
    temperature_floor,
    H: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    CODES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    is_inside = e < E
    position = 0
    if R > 0:
        position = tl.load(positions_ptr + token)
    if head < H:
        x_ptr = q_ptr + token * q_stride_t + head * q_stride_h
        x = _normed_and_rotated(
            x_ptr, q_weight_ptr, cos_sin_ptr, position, eps, weight_offset, E, R, BLOCK_E, HAS_Q_NORM
        )
        if HAS_TEMPERATURE:
            steps = tl.floor((tl.load(positions_ptr + token) + 1).to(tl.float32) / temperature_floor)
            x = x * (1.0 + temperature * tl.log(1.0 + steps))
        tl.store(x_ptr + e, x.to(q_ptr.dtype.element_ty), mask=is_inside)
    else:
        group = head - H
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            at = (slot // P) * cache_stride_b + group * cache_stride_g + (slot % P) * E
            scale_at = (slot // P) * scales_stride_b + group * P + slot % P
            k = _normed_and_rotated(
                k_ptr + token * k_stride_t + group * k_stride_g,
                k_weight_ptr,
                cos_sin_ptr,
                position,
                eps,
                weight_offset,
                E,
                R,
                BLOCK_E,
                HAS_K_NORM,
            )
            v = tl.load(v_ptr + token * v_stride_t + group * v_stride_g + e, mask=is_inside, other=0.0)
            _store(k_cache_ptr, k_scales_ptr, k, at, scale_at, E, BLOCK_E, CODES)
            _store(v_cache_ptr, v_scales_ptr, v.to(tl.float32), at, scale_at, E, BLOCK_E, CODES)


def rope_and_cache(
    q_THE: Tensor,
    k_TGE: Tensor,
    v_TGE: Tensor,
    positions_T: Tensor,
    slot_mapping_T: Tensor,
    cache: LayerCache,
    rotation: HeadRotation,
) -> None:
    """See ops.rope_and_cache.

    Positions and slots are not checked, because the host would have to wait for the device.
    """
    T, H, E = q_THE.shape
    k_cache_BGPE, v_cache_BGPE, cos_sin_PR = cache.k_BGPE, cache.v_BGPE, rotation.cos_sin_PR
    G, P = k_cache_BGPE.shape[1:3]
    check_strides(cache)
    name = codes.NAMES.get(k_cache_BGPE.dtype, "none")
    if name != "none":
        k_cache_BGPE, v_cache_BGPE = k_cache_BGPE.view(torch.int8), v_cache_BGPE.view(torch.int8)
    # A program has one warp, because q changes in place: only within a warp do all loads come before the first store.
    _rope_and_cache_kernel[(T, H + G)](
        q_ptr=q_THE,
        k_ptr=k_TGE,
        v_ptr=v_TGE,
        positions_ptr=positions_T,
        cos_sin_ptr=cos_sin_PR,
        slots_ptr=slot_mapping_T,
        k_cache_ptr=k_cache_BGPE,
        v_cache_ptr=v_cache_BGPE,
        q_weight_ptr=rotation.q_norm_weight_E,
        k_weight_ptr=rotation.k_norm_weight_E,
        k_scales_ptr=cache.k_scales_BGP,
        v_scales_ptr=cache.v_scales_BGP,
        **strides("th", q=q_THE),
        **strides("tg", k=k_TGE, v=v_TGE),
        **strides("bg", cache=k_cache_BGPE),
        **strides("b", scales=cache.k_scales_BGP),
        eps=rotation.norm_eps,
        weight_offset=rotation.norm_weight_offset,
        temperature=rotation.temperature,
        temperature_floor=rotation.temperature_floor,
        H=H,
        E=E,
        P=P,
        R=0 if cos_sin_PR is None else cos_sin_PR.shape[1],
        BLOCK_E=next_power_of_2(E),
        HAS_Q_NORM=rotation.q_norm_weight_E is not None,
        HAS_K_NORM=rotation.k_norm_weight_E is not None,
        HAS_TEMPERATURE=rotation.temperature != 0,
        CODES=name,
        num_warps=1,
        enable_fp_fusion=False,  # codes of int8 are rounded products, as in the twin
    )
