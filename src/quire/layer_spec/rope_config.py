"""The rotation of positions in a layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of each position. layers/rope.py has the formulas."""

    rotary_dim: int  # leading dimensions of a head that rotate
    theta: float = 10_000.0
    type: str = "default"  # one of hf_config.rope.ROPE_TYPES
    factor: float = 1.0  # the context is stretched by it
    max_position: int = 0  # position limit of the file
    original_max_position: int = 0  # context of the pretraining
    attention_factor: float = 1.0  # on cos and sin (yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the borders of the ramp to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope, one per pair of dimensions: contexts up to original_max_position
    long_factor: tuple[float, ...] = ()  # longrope: longer contexts

    def switches_after(self, max_model_len: int) -> int | None:
        """Longrope: sequences of more tokens take the long factors, others the short ones. None: there is one set."""
        is_reached = self.type == "longrope" and max_model_len > self.original_max_position
        return self.original_max_position if is_reached and self.short_factor != self.long_factor else None

    def row_offset(self, num_tokens: int, max_model_len: int) -> int:
        """The first row of the rotary table (layers/rope.py) for a sequence of `num_tokens` tokens."""
        border = self.switches_after(max_model_len)
        return 0 if border is None or num_tokens <= border else border
