"""Tables of cosines and sines for rotary position encoding, computed in float32 as in transformers.

Dimensions: L positions, R rotary dimensions (first R/2 columns cosines, last R/2 sines), F = R/2 frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.layer_spec.rope_config import RopeConfig


def halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows from neighbouring pairs, which some checkpoints rotate, to two halves.

    A weight without such rows is not changed: the layer that expects it reports the shape.
    """
    if weight.shape[0] % (2 * num_heads):
        return weight
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def cos_sin_table(rope: RopeConfig, max_model_len: int) -> Tensor:
    """The rotary table cos_sin_LR, float32, for positions 0 to max_model_len - 1.

    The factors of longrope may depend on the length of a sequence (`rope.switches_after`). Then rows 0 to border - 1
    are for short sequences, and the rows for long sequences begin at row `border`.

    For `dynamic`, transformers changes the frequencies with every token beyond max_position, so the keys in its cache
    have different frequencies. Here, as in vLLM, `max_model_len` decides once: if it is above max_position, the base of
    the full length is used.
    """
    positions_L = torch.arange(max_model_len, dtype=torch.float32)
    angles_LF = positions_L[:, None] * frequencies(rope, max_model_len)
    if (border := rope.switches_after(max_model_len)) is not None:
        angles_LF = torch.cat((positions_L[:border, None] * frequencies(rope, border), angles_LF))
    return torch.cat((angles_LF.cos(), angles_LF.sin()), dim=-1) * rope.attention_factor


def frequencies(rope: RopeConfig, length: int) -> Tensor:
    """Radians per position of each pair of dimensions, for sequences of this length: F float32."""
    steps_F = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    theta = rope.theta
    if rope.type == "dynamic":
        stretch = rope.factor * max(length, rope.max_position) / rope.max_position - (rope.factor - 1)
        theta *= stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    periods_F = torch.pow(theta, steps_F)
    if rope.type == "linear":
        return 1.0 / periods_F / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, 1.0 / periods_F)
    if rope.type == "yarn":
        return _yarn(rope, periods_F)
    if rope.type == "longrope":
        factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods_F)
    return 1.0 / periods_F


def _llama3(rope: RopeConfig, frequencies_F: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones stay, the others are interpolated."""
    wavelengths_F = 2 * math.pi / frequencies_F
    stretched_F = frequencies_F / rope.factor
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    share_F = (original / wavelengths_F - low) / (high - low)  # the part of the unstretched frequency
    between_F = (1 - share_F) * stretched_F + share_F * frequencies_F
    result_F = torch.where(wavelengths_F > original / low, stretched_F, between_F)
    return torch.where(wavelengths_F < original / high, frequencies_F, result_F)


def _yarn(rope: RopeConfig, periods_F: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): dimensions that rotate often in the pretraining context stay, slow ones stretch."""

    def border(num_rotations: float) -> float:
        periods = rope.original_max_position / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(periods) / (2 * math.log(rope.theta))

    low, high = border(rope.beta_fast), border(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a length
    ramp_F = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp_F / (rope.factor * periods_F) + (1 - ramp_F) / periods_F
