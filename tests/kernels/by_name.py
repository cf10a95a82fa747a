"""Rotation and attention with each tensor and number under a name of its own, as tables of cases change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire.forward_batch import LayerCache
from quire.kernels.layer_rules import AttentionRule, HeadRotation


def rope_and_cache(
    function: Callable[..., None],
    *,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    k_scales_BGP: Tensor | None = None,
    v_scales_BGP: Tensor | None = None,
    cos_sin_PR: Tensor | None = None,
    q_norm_weight_E: Tensor | None = None,
    k_norm_weight_E: Tensor | None = None,
    norm_eps: float = 0.0,
    norm_weight_offset: float = 0.0,
    temperature: float = 0.0,
    temperature_floor: float = 1.0,
    **others: Tensor,
) -> None:
    cache = LayerCache(k_cache_BGPE, v_cache_BGPE, k_scales_BGP, v_scales_BGP)
    norms = (q_norm_weight_E, k_norm_weight_E, norm_eps, norm_weight_offset)
    rotation = HeadRotation(cos_sin_PR, *norms, temperature, temperature_floor)
    function(cache=cache, rotation=rotation, **others)


def paged_attention(
    function: Callable[..., Any],
    *,
    k_cache_BGPE: Tensor,
    v_cache_BGPE: Tensor,
    k_scales_BGP: Tensor | None = None,
    v_scales_BGP: Tensor | None = None,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    chunk: int = 0,
    **others: Tensor,
) -> Any:
    cache = LayerCache(k_cache_BGPE, v_cache_BGPE, k_scales_BGP, v_scales_BGP)
    return function(cache=cache, rule=AttentionRule(scale, sliding_window, soft_cap, chunk), **others)
